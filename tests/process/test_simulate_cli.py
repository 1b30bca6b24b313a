"""``forebay simulate`` as people call it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = ("--days", "3", "--runs", "2")


def simulate(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "forebay.cli", "simulate", *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_same_seed_gives_the_same_bytes() -> None:
    first, again = (simulate(*SMALL, "--seed", "4", "--json") for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stderr == ""
    assert first.stdout == again.stdout
    found = json.loads(first.stdout)
    assert {"goodput", "parts", "pause_s", "reached_s", "lost_work_s", "filesystem"} <= set(found)
    assert found["seed"] == 4


def test_tables_files_and_the_comparison(tmp_path: Path) -> None:
    page, trace = tmp_path / "run.html", tmp_path / "one.json"
    done = simulate(*SMALL, "--html", str(page), "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    for words in ("rework", "complete in durable", "torn by a failure", "fastest write"):
        assert words in done.stdout
    assert json.loads(trace.read_text())["traceEvents"]
    assert page.read_text().startswith("<!doctype html>")
    compared = simulate(*SMALL, "--compare", "--vary", "filesystem=100GB/s,1TB/s", "--json")
    assert len(json.loads(compared.stdout)["rows"]) == 6
    shown = simulate("--days", "2", "--runs", "1", "--compare")
    assert "tiered every 60 s, durable every 15 min" in " ".join(shown.stdout.split())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--runs", "0"), "--runs"),
        (("--days", "0"), "--days"),
        (("--days", "-3"), "--days"),
        (("--seed", "-1"), "--seed"),
        (("--nvme", "-5GB/s"), "--nvme"),
        (("--durable-cadence", "0s"), "--durable-cadence"),
        (("--mirror", "no", "--peer-cadence", "1h"), "peer-cadence"),
        (("--mtbf", "20s"), "progress"),
        (("--cadence", "100d"), "progress"),
        (("--pause", "100d"), "progress"),
        (("--strategy", "hopeful"), "--strategy"),
        (("--vary", "filesystem=1GB/s"), "--vary"),
        (("--compare", "--trace", "x.json"), "--trace"),
        (("--compare", "--near-cadence", "1h"), "--far-cadence"),
        (("--compare", "--near-cadence", "0s"), "--near-cadence"),
        (("--days", "1", "--runs", "1", "--html", "/nowhere/at/all.html"), "--html"),
        (("--days", "1", "--runs", "1", "--trace", "/nowhere/at/all.json"), "--trace"),
    ],
)
def test_bad_input_is_one_line_and_status_2(words: tuple[str, ...], told: str) -> None:
    done = simulate(*words)
    assert done.returncode == 2, done.stdout
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("forebay: ")
    assert told in line
    assert "expected" in line or "name a file" in line


def test_a_tier_without_a_cadence_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("checkpoint:\n  durable_cadence:\n")
    done = simulate("--file", str(path))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "checkpoint.durable_cadence" in line


def test_it_needs_no_torch_and_no_plotly_and_the_plan_no_numpy() -> None:
    code = """
import sys
from forebay.cli import app
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in WHAT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refused())
app(WORDS.split(), standalone_mode=False)
"""
    for what, words in (
        (("torch", "plotly"), "simulate --days 1 --runs 1 --json"),
        (("torch", "plotly"), "simulate --days 1 --runs 1"),
        (("torch", "plotly", "numpy"), "plan --json"),
    ):
        given = f"WHAT, WORDS = {what!r}, {words!r}\n"
        done = subprocess.run(
            [sys.executable, "-c", given + code],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr


def test_a_page_without_plotly_says_what_to_install() -> None:
    code = """
import sys
sys.modules["plotly"] = None
sys.argv = ["forebay", "simulate", "--days", "1", "--runs", "1", "--html", "x.html"]
from forebay.cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "pip install 'forebay[report]'" in done.stderr
