"""The verb as people call it: exit status, one document, one line, and what it loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FIELDS = {
    "sync": {"write_s", "loss_fraction"},
    "pause": {"copy_s", "tail_s", "total_s", "loss_fraction"},
    "drain": {"seconds", "bytes_per_s", "share_of_filesystem", "fits_cadence", "exposure_s"},
    "memory": {"arena_bytes_per_node", "nvme_bytes_per_node"},
    "losses": {"pause", "rework", "restart", "interference", "total"},
    "cadence": {"given_s", "best_s", "best_total"},
}


def forebay(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "forebay.cli", *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def document(*words: str, status: int = 0) -> dict[str, Any]:
    done = forebay("plan", "--json", *words)
    assert done.returncode == status, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_document_has_what_is_promised() -> None:
    found = document("--preset", "llama3-405b")
    assert found["checkpoint_bytes"] == 6.48e12
    assert found["bytes_per_node"] == pytest.approx(3.164e9, rel=1e-3)
    for name, fields in FIELDS.items():
        assert fields <= set(found[name])
    assert [hop["name"] for hop in found["hops"]] == ["d2h", "nvme", "peer", "durable"]
    for hop in found["hops"]:
        assert {"name", "bytes", "bytes_per_s", "seconds", "requests_per_s"} <= set(hop)
    for condition in found["conditions"]:
        assert {"name", "holds", "need", "have", "why"} <= set(condition)
    for tier in found["tiers"]:
        assert {"name", "cadence_s", "survives", "loss"} <= set(tier)
    assert {"gpu_hours_lost", "mfu_lost", "goodput"} <= set(found)
    assert all(each["source"] for each in found["inputs"].values())


def test_flags_of_the_interface() -> None:
    words = (
        "--params 405e9 --gpus 16384 --gpus-per-node 8 --bytes-per-param 14 --cadence 30min "
        "--d2h 55GB/s --nvme 26GB/s --filesystem 200GB/s --mtbf 3.09h --restart 5min "
        "--content weights=bf16,master=fp32,moments=2*fp32 --pause-limit 60s"
    )
    found = document(*words.split())
    assert found["sync"]["write_s"] == pytest.approx(5.67e12 / 200e9)


def test_a_condition_that_fails_is_status_6_and_no_error() -> None:
    done = forebay("plan", "--cadence", "2min")
    assert done.returncode == 6
    assert "FAILS" in done.stdout
    assert done.stderr == ""
    found = document("--cadence", "2min", status=6)
    (drain,) = [each for each in found["conditions"] if each["name"] == "drain"]
    assert not drain["holds"]
    assert "durable cadence" in drain["change"]


@pytest.mark.parametrize(
    "words",
    [
        ("--d2h", "55"),
        ("--cadence", "-5min"),
        ("--gpus", "16385"),
        ("--tp", "3"),
        ("--preset", "gpt2"),
        ("--preset", ""),
        ("--sweep", "cadence=1min:2min", "--points", "100000"),
        ("--file", "/nowhere/at/all.yaml"),
        ("--sweep", "cadence=1min"),
        ("--solve", "happiness"),
        ("--html", "/nowhere/at/all.html"),
    ],
)
def test_bad_input_is_one_line_and_status_2(words: tuple[str, ...]) -> None:
    done = forebay("plan", *words)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("forebay: ")
    assert len(line) > 20


def test_a_file_that_is_no_yaml(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("cluster: [1, 2\n")
    done = forebay("plan", "--file", str(path))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert str(path) in done.stderr


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("cluster:\n  gpus: 8\n  gpus: 16\n")
    done = forebay("plan", "--file", str(path))
    assert done.returncode == 2
    assert "'gpus' stands twice" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_run_that_gets_nowhere_is_status_6_and_no_bug() -> None:
    done = forebay("plan", "--mtbf", "1s", "--solve", "gpus")
    assert done.returncode == 6
    assert "never" in done.stdout
    assert done.stderr == ""


def test_a_file_is_laid_under_flags(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("preset: 70b\ncluster:\n  d2h: {value: 20 GB/s, source: measured}\n")
    found = document("--file", str(path), "--cadence", "10min")
    assert found["inputs"]["cluster.d2h"] == {
        "value": 20e9,
        "unit": "B/s",
        "text": "20 GB/s",
        "source": "measured",
    }
    assert found["inputs"]["checkpoint.cadence"]["value"] == 600
    assert "70b" in found["title"]


def test_solve_and_sweep_in_the_terminal_and_in_the_document() -> None:
    words = ("--solve", "filesystem", "--sweep", "cadence=1min:60min", "--points", "5")
    done = forebay("plan", *words)
    assert done.returncode == 0
    assert "360 GB/s" in done.stdout
    assert "sweep of cadence" in done.stdout
    found = document(*words)
    (solution,) = found["solve"]
    bounds = {goal["goal"]: goal for goal in solution["goals"]}
    assert bounds["sync_loss"]["smallest"] == pytest.approx(360e9, rel=1e-6)
    assert len(found["sweep"][0]["points"]) == 5


def test_it_says_plainly_what_one_per_cent_means() -> None:
    done = forebay("plan")
    lines = done.stdout.splitlines()
    (pause,) = [line for line in lines if "the pause alone" in line]
    (total,) = [line for line in lines if "all together" in line]
    (needs,) = [line for line in lines if "the total under 1 %" in line]
    assert pause.split()[0] == "yes"
    assert total.split()[0] == "no"
    assert "restart within" in needs
    assert "peer" in needs
    assert "durable one every" in needs


def test_the_plan_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['forebay', 'plan', '--json']\n"
        "from forebay.cli import main\n"
        "try:\n main()\n"
        "except SystemExit as end:\n assert not end.code, end.code\n"
        "names = {'torch', 'numpy', 'pyarrow', 'plotly', 'obstore', 'botocore'}\n"
        "names |= {'rich.console', 'yaml'}\n"
        "heavy = names & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_every_verb_is_there_and_a_wrong_one_is_not() -> None:
    listed = forebay("--help")
    assert listed.returncode == 0
    verbs = (
        "ls",
        "show",
        "verify",
        "commit",
        "prune",
        "agent",
        "status",
        "plan",
        "simulate",
        "demo",
    )
    for verb in verbs:
        assert verb in listed.stdout
        assert forebay(verb, "--help").returncode == 0
    assert forebay("pln").returncode == 2
