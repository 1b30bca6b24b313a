"""Hostile input: no parser raises another error than ours, takes much, hangs, or goes outside."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.guard import ViolationError, check
from tests.fuzz.mutate import mutate
from tests.fuzz.seeds import CORPUS
from tests.fuzz.targets import TARGETS, Target, warm

ROOT = Path(__file__).parents[2]
NATIVE = "index"
NATIVE_BYTES = 3 * 2**30  # of addresses: the interpreter and its libraries take one
SOAK_S = 180
_EXAMPLES = settings(
    max_examples=60,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def traced() -> Iterator[None]:
    """Memory that Python objects take is counted."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


def committed(name: str, kind: str) -> list[bytes]:
    """The corpus of a target: ``valid`` or ``crash``."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob(f"{kind}-*"))]


def every_case(name: str, target: Target, cases: int) -> Counter[str]:
    """Corpus, then mutations that come out the same in every run; what became of each."""
    seen: Counter[str] = Counter()
    warm(target)
    seeds = [*target.seeds(), *committed(name, "valid"), *committed(name, "crash")]
    for data in seeds:
        seen[check(target.parse, data)] += 1
    chance = random.Random(name)
    for _ in range(cases):
        data = mutate(chance, seeds)
        try:
            seen[check(target.parse, data)] += 1
        except ViolationError as violation:
            pytest.fail(f"{name}: {violation}\ninput: {data[:400]!r} ({len(data)} bytes)")
    return seen


def say(name: str, seen: Counter[str]) -> None:
    """The figure, in one line."""
    count = sum(seen.values())
    print(f"fuzz {name}: {count} cases, taken {seen['']}, violations: 0")


@pytest.mark.parametrize("name", sorted(set(TARGETS) - {NATIVE}))
def test_mutations(name: str, traced: None) -> None:
    target = TARGETS[name]
    seen = every_case(name, target, target.cases)
    say(name, seen)
    assert seen[""] > 0
    assert sum(seen.values()) - seen[""] > target.cases // 4 or name in ("raw_journal", "journal")


@pytest.mark.parametrize("name", sorted(set(TARGETS) - {NATIVE, "plan"}))
def test_what_hypothesis_thinks_of(name: str) -> None:
    target = TARGETS[name]
    warm(target)
    seeds = target.seeds()
    several = st.randoms(use_true_random=False).map(lambda chance: mutate(chance, seeds))

    @_EXAMPLES
    @given(st.one_of(several, st.binary(max_size=600)))
    def never_a_violation(data: bytes) -> None:
        check(target.parse, data)

    never_a_violation()


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_valid_files_of_the_corpus_are_still_read(name: str) -> None:
    files = sorted((CORPUS / name).glob("valid-*"))
    assert files, "python -m tests.fuzz.test_fuzz writes them"
    for path in files:
        if (name, path.name) not in _REFUSED:
            TARGETS[name].parse(path.read_bytes())


# Seeds that are an error as they should be: a refusal of a bucket, the word in place of the other.
_REFUSED = {("word", "valid-1"), ("finding", "valid-0")}
_REFUSED |= {("reply", f"valid-{n}") for n in range(9)} | {
    ("listener", f"valid-{n}") for n in (0, 1)
}


def test_mutations_of_an_index() -> None:
    """In a process of its own, which pyarrow may not take more of than it is given."""
    code = "from tests.fuzz.test_fuzz import native; native()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (NATIVE_BYTES, NATIVE_BYTES)),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = Counter(json.loads(done.stdout.splitlines()[-1]))
    say(NATIVE, seen)
    assert seen[""] > 0
    assert sum(seen.values()) >= TARGETS[NATIVE].cases


def native() -> None:
    """The cases of an index, their outcomes as JSON."""
    import pyarrow as pa

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    tracemalloc.start()
    print(json.dumps(every_case(NATIVE, TARGETS[NATIVE], TARGETS[NATIVE].cases)))


@pytest.mark.soak
@pytest.mark.timeout(SOAK_S + 240)
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_soak(name: str, tmp_path: Path) -> None:
    """The same parsers, led by the branches they take."""
    pytest.importorskip("atheris", reason="pip install atheris")
    command = [sys.executable, "-m", "tests.fuzz.cover", name, "--seconds", str(SOAK_S)]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SOAK_S + 200,
        check=False,
    )
    found = [path.name for path in tmp_path.iterdir()]
    print(f"cover {name}: {done.stdout.splitlines()[-1] if done.stdout else 'silent'}")
    assert done.returncode == 0, f"{found}\n{done.stderr[-3000:]}"


def write_corpus() -> None:
    """The seeds of now as the valid files of the corpus."""
    for name, target in TARGETS.items():
        home = CORPUS / name
        home.mkdir(parents=True, exist_ok=True)
        for path in home.glob("valid-*"):
            path.unlink()
        for number, data in enumerate(target.seeds()):
            (home / f"valid-{number}").write_bytes(data)


if __name__ == "__main__":
    write_corpus()
