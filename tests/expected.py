"""What a run must hold: a dictionary of what was staged, told durable and deleted."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import forebay
from forebay.commit.catalog import Catalog
from forebay.commit.verify import Finding, verify_step
from forebay.errors import DamagedError, NotFoundError
from forebay.storage.directory import DirectoryStore

TOTAL_BYTES = 6000  # divides by 1, 2, 3 and 4 ranks


def bytes_of(step: int, attempt: str, rank: int, nbytes: int) -> bytes:
    """What a rank saves: every step of every start of the job differs."""
    return random.Random(f"{attempt}/{step}/{rank}").randbytes(nbytes)


@dataclass
class Snapshot:
    """One step of one attempt. ``spoiled`` when a rank is dead or past it: it cannot be whole.

    ``local`` once all ranks heard that it is on the local tier, ``deleted`` once it was told to go,
    ``lost`` when it was only in memory that is gone.
    """

    step: int
    attempt: str
    world: int
    data: dict[int, bytes] = field(default_factory=dict)
    spoiled: bool = False
    local: bool = False
    deleted: bool = False
    lost: bool = False

    @property
    def whole(self) -> bool:
        """True when every rank has staged it."""
        return len(self.data) == self.world

    def whole_bytes(self) -> bytes:
        """The tensor."""
        return b"".join(self.data[rank] for rank in range(self.world))


class Expected:
    """The model of one run. ``durable`` has what was told to be: step -> attempt."""

    def __init__(self, run: Path, keep_last: int | None) -> None:
        self.store = DirectoryStore(run)
        self.catalog = Catalog(self.store)
        self.snapshots: dict[tuple[int, str], Snapshot] = {}
        self.durable: dict[int, str] = {}
        self.checked = 0
        self._keep_last = keep_last
        self._files: dict[tuple[int, str], dict[Path, bytes]] = {}

    def told_durable(self, step: int, attempt: str) -> None:
        """From now on the step must be there, with that attempt's bytes."""
        self.durable[step] = attempt

    def told_to_go(self, step: int, attempt: str) -> None:
        """A delete of it has begun: it may be there or not, but never half."""
        self.durable.pop(step, None)
        self.snapshots[step, attempt].deleted = True

    def check(self) -> dict[int, str]:
        """Compare the run with the model; returns what is listed. Raises AssertionError."""
        listed = {}
        for step in self.catalog.steps():
            try:
                attempt = self.catalog.manifest(step).attempt
                self._check_step(step, attempt)
            except (NotFoundError, DamagedError) as error:
                if step in self.catalog.steps():  # else an agent's retention took it meanwhile
                    raise AssertionError(f"step {step} is listed and not complete") from error
                continue
            listed[step] = attempt
        self._check_none_lost(listed)
        return listed

    def _check_step(self, step: int, attempt: str) -> None:
        made = self.snapshots.get((step, attempt))
        assert made is not None, f"step {step} of attempt {attempt} was saved by nobody"
        assert made.whole, f"step {step} of {attempt} is listed, staged by {sorted(made.data)} only"
        known = self._files.get((step, attempt))
        files = self._read(step, attempt)
        if known is not None:
            gone = [path for path in known if path not in files]
            if gone:
                raise DamagedError(f"{gone} of step {step} are gone")
            assert known == files, f"objects of step {step} of {attempt} have changed"
        else:
            self._check_bytes(step, made)
            self._files[step, attempt] = files
        self.checked += 1

    def _read(self, step: int, attempt: str) -> dict[Path, bytes]:
        home = self.store.root / "data" / f"{step:012d}" / attempt
        return {
            path: path.read_bytes()
            for path in home.rglob("*")
            if path.is_file() and not path.name.startswith(".")
        }

    def _check_bytes(self, step: int, made: Snapshot) -> None:
        run = forebay.open(self.store.root)
        assert run.read(step, "model/w").tobytes() == made.whole_bytes(), f"bytes of step {step}"
        assert run.values(step)["step"] == step
        manifest = self.catalog.manifest(step)
        found = [f for f in verify_step(self.catalog, manifest) if isinstance(f, Finding)]
        if found:
            raise DamagedError(f"step {step}: {found}")

    def _check_none_lost(self, listed: dict[int, str]) -> None:
        for step, attempt in list(self.durable.items()):
            if step in listed:
                assert listed[step] == attempt, f"step {step}: {attempt} became {listed[step]}"
                continue
            newer = sum(other > step for other in listed)
            assert self._keep_last is not None, f"step {step} was durable and is gone: {listed}"
            assert newer >= self._keep_last, f"step {step} was to be kept and is gone: {listed}"
            self.told_to_go(step, attempt)

    def array(self, step: int, attempt: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """The tensor of a snapshot."""
        return np.frombuffer(self.snapshots[step, attempt].whole_bytes(), dtype=np.uint8)
