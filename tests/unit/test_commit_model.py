"""The commit protocol, every interleaving of it: the model in spec/, checked by Spin."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).parents[2] / "spec" / "commit.pml"
COMPILER = shutil.which("gcc") or shutil.which("cc")
LIMIT_S = 900
SAFE = ("-DSAFETY",), ("-N", "complete_or_absent")
END = ("-DSAFETY",), ("-N", "complete_or_absent_in_the_end")
LIVE = ("-DNFAIR=3",), ("-a", "-f", "-N", "committed")  # NFAIR: room for more than 6 processes
ENDS = ("-DSAFETY", "-DNOCLAIM"), ()  # Spin looks for states that cannot go on without a claim only

pytestmark = [
    pytest.mark.skipif(shutil.which("spin") is None, reason="no Spin: `make spin` installs it"),
    pytest.mark.skipif(COMPILER is None, reason="no C compiler: Debian's package is gcc"),
    pytest.mark.timeout(2 * LIMIT_S),
]


def check(
    path: Path, defines: tuple[str, ...], how: tuple[tuple[str, ...], tuple[str, ...]]
) -> str:
    """What the exhaustive search of the model says."""
    compiled, searched = how
    shutil.copy(MODEL, path)
    assert COMPILER is not None
    for command in (
        ["spin", *(f"-D{name}" for name in defines), "-a", MODEL.name],
        [COMPILER, "-O2", "-w", *compiled, "-o", "pan", "pan.c"],
        ["./pan", "-m100000", *searched],
    ):
        done = subprocess.run(
            command, cwd=path, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def errors(said: str) -> int:
    found = re.search(r"errors: (\d+)", said)
    states = re.search(r"(\S+) states, stored", said)
    assert found is not None, said
    assert states is not None, said
    print(f"{states[1]} states, {found[1]} errors")
    return int(found[1])


@pytest.mark.parametrize(
    ("defines", "how"),
    [
        pytest.param(("QUIET",), ENDS, id="nothing hangs"),
        pytest.param(("QUIET",), SAFE, id="complete or absent"),
        pytest.param(("KILLS=0",), END, id="a committer comes late"),
        pytest.param(("QUIET", "KILLS=0"), LIVE, id="committed, a lost reply"),
        pytest.param(("QUIET", "LOSSES=0"), LIVE, id="committed, a death"),
        pytest.param(("QUIET", "LOSSES=2"), SAFE, id="two lost replies", marks=pytest.mark.soak),
        pytest.param(("QUIET", "PATIENCE=2"), SAFE, id="two polls", marks=pytest.mark.soak),
        pytest.param(("QUIET",), LIVE, id="committed", marks=pytest.mark.soak),
        # 12 GB of memory
        pytest.param((), END, id="late, and a death and a lost reply", marks=pytest.mark.soak),
    ],
)
def test_the_protocol_holds(
    tmp_path: Path,
    defines: tuple[str, ...],
    how: tuple[tuple[str, ...], tuple[str, ...]],
) -> None:
    said = check(tmp_path, defines, how)
    assert errors(said) == 0, said
    for cut_short in ("max search depth too small", "Search not completed", "out of memory"):
        assert cut_short not in said, said


@pytest.mark.parametrize(
    ("mistake", "how", "broken"),
    [
        ("MANIFEST_FIRST -DQUIET", SAFE, "WHOLE"),
        ("COUNT_NOT_SET -DQUIET", SAFE, "WHOLE"),
        ("DELETE_DATA_FIRST -DQUIET", SAFE, "WHOLE"),
        ("OVERWRITE -DQUIET", SAFE, "manifest==0"),
        ("TRUST_LOST_REPLY -DQUIET", SAFE, "WHOLE"),
        ("EXISTS_IS_OURS -DQUIET", SAFE, "made&"),
        ("NO_WITHDRAWAL", END, "WHOLE"),
        ("NO_LAST_LOOK", END, "WHOLE"),
        # with one loss the other committer commits all the same
        ("GIVE_UP -DLOSSES=2", LIVE, "acceptance cycle"),
    ],
)
def test_a_mistake_is_found(
    tmp_path: Path, mistake: str, how: tuple[tuple[str, ...], tuple[str, ...]], broken: str
) -> None:
    said = check(tmp_path, tuple(mistake.split(" -D")), how)
    assert errors(said) > 0, said
    assert ("shards[1]" if broken == "WHOLE" else broken) in said
