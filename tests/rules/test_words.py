"""The tree speaks of the project alone: no path of the machine it was written on."""

from __future__ import annotations

import re
import subprocess

from tests.rules.source import ROOT

# Written in two parts, so that this file does not find itself.
PLACES = re.compile(rb"/" + rb"work/|/" + rb"root/")


def test_no_path_of_a_development_machine() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=60,
    )
    names = [name.decode() for name in filter(None, listed.stdout.split(b"\0"))]
    assert names, "git lists no file"
    bad = [
        f"{name}:{number}"
        for name in names
        if (ROOT / name).is_file()
        for number, line in enumerate((ROOT / name).read_bytes().splitlines(), 1)
        if PLACES.search(line)
    ]
    assert not bad
