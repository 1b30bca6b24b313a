"""An outside opinion: ckpt-chaos kills the trainer at each of its file events and resumes it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

TRAINER = Path(__file__).with_name("chaos_trainer.py")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    importlib.util.find_spec("ckpt_chaos") is None, reason="no ckpt-chaos: pip install ckpt-chaos"
)
def test_the_trainer_killed_at_each_file_event_resumes(tmp_path: Path) -> None:
    """It sees the trainer's Python alone: the node agent lives on, as it is meant to."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ckpt_chaos", "run", "--work", str(tmp_path / "chaos")),
            *("--step-regex", r"resumed from step (\d+)", "--result-file", "{out}/final.bin"),
            *("--fail-on", "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK", "--max-points", "16"),
            *("--", sys.executable, str(TRAINER), "--out", "{out}"),
        ],
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    print(done.stdout[-2000:])
    found = re.search(r"-> (\d+) crash points", done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert found is not None
    assert int(found[1]) >= 8
