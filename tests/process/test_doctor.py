"""The verb on this machine: a directory, a real S3 server, and a file that the plan takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.doctor import store
from forebay.doctor.finding import Verdict
from forebay.storage.address import open_store, resolve_url
from forebay.testing.s3 import BUCKET
from tests.servers import Place


def doctor(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "forebay.cli",
            "doctor",
            "--seconds",
            "0.1",
            "--size",
            "16MiB",
            *words,
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_directory_and_the_plan_on_its_own_figures(tmp_path: Path) -> None:
    path = tmp_path / "measured.yaml"
    local = tmp_path / "local"
    local.mkdir()
    done = doctor(str(tmp_path / "run"), "--local", str(local), "--write", str(path), "--json")
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["holds"] else 6), done.stderr
    fields = {each["field"] for each in found["findings"] if each["measured"] is not None}
    assert {"cluster.host_bandwidth", "cluster.nvme", "storage.per_node"} <= fields
    assert path.read_text() == found["file"]
    assert not list(local.iterdir())
    assert not (tmp_path / "run").exists()
    planned = subprocess.run(
        [sys.executable, "-m", "forebay.cli", "plan", "--file", str(path), "--json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert planned.returncode in (0, 6), planned.stderr
    assert (
        "measured by forebay doctor"
        in json.loads(planned.stdout)["inputs"]["cluster.nvme"]["source"]
    )


def test_a_machine_that_is_not_as_assumed_is_status_6() -> None:
    done = doctor("--cluster", "dgx-h100")
    assert done.returncode == 6
    assert "slow" in done.stdout
    assert "measuring" not in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("--seconds", "0"),
        ("--size", "1kB"),
        ("--local", "/nowhere"),
        ("--peer", "x"),
        ("--cluster", "abacus"),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...]) -> None:
    done = doctor(*words)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("forebay: ")


def test_a_store_that_cannot_be_reached_is_a_line_and_not_the_end() -> None:
    found = store.measure(
        "s3://bucket/run?endpoint=http://127.0.0.1:9&allow_http=true",
        {},
        seconds=0.1,
        told=lambda _line: None,
        timeout_s=3,
    )
    assert found[0].verdict is Verdict.FAILED
    assert found[0].note


def test_a_real_bucket_is_measured_and_left_clean(seaweed: Place) -> None:
    url = f"s3://{BUCKET}/doctor?endpoint={seaweed.endpoint}&allow_http=true"
    found = store.measure(url, {}, seconds=0.2, size_bytes=2**24, told=lambda _line: None)
    by_field = {each.field: each for each in found}
    assert by_field["storage.per_node"].measured
    assert by_field["storage.per_node_read"].measured
    assert all(each.verdict.holds for each in found), found
    assert not list(open_store(resolve_url(url)).list(""))
