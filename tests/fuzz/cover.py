"""A parser under atheris: mutations led by the branches they take. Linux, Python 3.11 to 3.13.

python -m tests.fuzz.cover TARGET --seconds N [--output DIRECTORY]

Status 0 when nothing was found; else the input lies in DIRECTORY (the working one by default).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

import atheris


def main(arguments: list[str]) -> None:
    """Fuzz one target; libFuzzer ends the process."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.cover", description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path())
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # one that is shown opens the file that it came from
    with atheris.instrument_imports(include=["forebay"]):
        from tests.fuzz.guard import check
        from tests.fuzz.seeds import CORPUS
        from tests.fuzz.targets import TARGETS, warm
    if given.target not in TARGETS:
        parser.error(f"target: expected one of {', '.join(TARGETS)}")
    target = TARGETS[given.target]
    warm(target)
    corpus = Path(tempfile.mkdtemp(prefix="forebay-fuzz-"))
    for path in (CORPUS / given.target).glob("*"):
        (corpus / path.name).write_bytes(path.read_bytes())
    options = [
        f"-max_total_time={given.seconds}",
        f"-artifact_prefix={given.output}/",
        *("-timeout=20", "-rss_limit_mb=2048", "-max_len=65536", "-print_final_stats=1"),
    ]
    atheris.Setup(
        [sys.argv[0], *options, str(corpus)],
        lambda data: check(target.parse, data, alarm=False) and None,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
