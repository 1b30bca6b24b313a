"""The power is cut at every moment of a save, a delete and a race of two committers."""

from __future__ import annotations

import functools
import itertools
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forebay.commit.publish import commit_step
from forebay.commit.reclaim import delete_step
from forebay.errors import ConflictError, DeadlineError
from forebay.storage.store import CreateOutcome
from forebay.testing.disk import Count, Recording, explore
from forebay.testing.recorder import Recorder
from tests.crash.judge import (
    COMMITTED,
    DELETING,
    NODES,
    Kept,
    Shards,
    is_held,
    is_mended,
    save,
    seal,
)

A, B = "first", "second"
NEXT_STEP = 90
all_of_them = pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.soak)])


class Scene:
    """A run below a recorded root."""

    def __init__(self, memory: Path, name: str = "recorded") -> None:
        self.memory = memory
        self.root = memory / name
        self.root.mkdir()
        self.shards: Shards = {}
        self.told = ""

    def store(self) -> Kept:
        return Kept(self.root / "run", self.shards)

    def hold(self, recording: Recording, again: Sequence[tuple[int, str]], every: int) -> Count:
        """Judge every state as it is, and every so many-th when the next start went on from it."""
        count, mended = Count(), 0
        for state in explore(recording, count):
            place = self.memory / "state"
            place.mkdir()
            state.make(place)
            store = Kept(place / "run", dict(self.shards))
            wrong = is_held(store, state.marks, self.shards)
            if count.distinct % every == 0:
                mended += 1
                wrong += is_mended(store, store.shards, again, NEXT_STEP)
            assert not wrong, f"{wrong}\nafter {state.at} operations; {state.lost}; {state.marks}"
            shutil.rmtree(place)
        self.told = (
            f"{len(recording.operations)} operations, {count.prefixes} prefixes "
            f"({count.sampled} sampled), {count.states} states, {count.distinct} differ, "
            f"{mended} gone on from, 0 violations"
        )
        return count


@all_of_them
def test_a_save_by_two_nodes(memory: Path, every: int) -> None:
    scene = Scene(memory)
    with Recorder(scene.root) as recorder:
        save(scene.store(), 1, A)
        recorder.mark(f"{COMMITTED} 1")
        save(scene.store(), 2, A)
        recorder.mark(f"{COMMITTED} 2")
    count = scene.hold(recorder.recording, [(1, A), (2, A)], every)
    print(scene.told)
    assert count.sampled == 0


class InTurn:
    """Threads that do one call on files each, then wait for the others: all are as far."""

    def __init__(self, count: int) -> None:
        self._turn = threading.Condition()
        self._waiting: list[int] = list(range(count))
        self._mine = threading.local()

    def wait(self) -> None:
        """Before a call; a thread that is not one of them goes on at once."""
        number = getattr(self._mine, "number", None)
        if number is not None:
            with self._turn:
                self._waiting.append(self._waiting.pop(0))
                self._turn.notify_all()
                assert self._turn.wait_for(lambda: self._waiting[0] == number, timeout=60)

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make all calls, each in a thread of its own."""
        with ThreadPoolExecutor(len(calls)) as pool:
            for done in [pool.submit(self._one, n, call) for n, call in enumerate(calls)]:
                done.result(120)

    def _one(self, number: int, call: Callable[[], None]) -> None:
        with self._turn:
            assert self._turn.wait_for(lambda: self._waiting[0] == number, timeout=60)
        self._mine.number = number
        try:
            call()
        finally:
            with self._turn:
                self._waiting.remove(number)
                self._turn.notify_all()


@all_of_them
def test_two_nodes_at_once(memory: Path, every: int) -> None:
    scene = Scene(memory)
    save(scene.store(), 1, A)
    step_by_step = InTurn(NODES)
    with Recorder(scene.root, step_by_step.wait) as recorder:
        step_by_step.run(
            [functools.partial(seal, scene.store(), node, 2, A) for node in range(NODES)]
        )
        commit_step(scene.store(), 2, A, nodes=NODES, timeout_s=60)
        recorder.mark(f"{COMMITTED} 2")
    count = scene.hold(recorder.recording, [(2, A)], every)
    print(scene.told)
    assert count.distinct > 100


class Killed(BaseException):
    """What a process that was killed does from then on."""


class Counted:
    """Counts the calls of a thread, and does something before the n-th."""

    def __init__(self) -> None:
        self.calls = 0
        self.at: int | None = None
        self.what: Callable[[], None] = lambda: None
        self._mine = threading.local()

    def start(self, at: int | None, what: Callable[[], None]) -> None:
        """From now on the calls of this thread count."""
        self.calls, self.at, self.what = 0, at, what
        self._mine.yes = True

    def stop(self) -> None:
        self._mine.yes = False

    def __call__(self) -> None:
        if getattr(self._mine, "yes", False):
            self.calls += 1
            if self.at is not None and self.calls >= self.at:
                self.what()


def calls_of(memory: Path, work: Callable[[Kept], None]) -> int:
    """How many calls on files some work makes, on a run with one step."""
    root = memory / "counted"
    root.mkdir()
    counted = Counted()
    store = Kept(root / "run", {})
    save(store, 1, A)
    with Recorder(root, counted):
        counted.start(None, lambda: None)
        work(Kept(root / "run", {}))
        counted.stop()
    shutil.rmtree(root)
    return counted.calls


def die() -> None:
    raise Killed


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.soak)])
def test_a_process_is_killed_and_the_next_goes_on_before_the_power_is_cut(
    memory: Path, stride: int
) -> None:
    """What the dead one had not flushed is still in the cache, and can be seen: not relied upon."""
    total = 0
    points = range(1, calls_of(memory, lambda store: save(store, 2, A)) + 1, stride)
    for point in points:
        scene = Scene(memory, f"killed-{point}")
        save(scene.store(), 1, A)
        counted = Counted()
        with Recorder(scene.root, counted) as recorder:
            counted.start(point, die)
            with pytest.raises(Killed):
                save(scene.store(), 2, A)
            counted.stop()
            save(scene.store(), 2, A)
            recorder.mark(f"{COMMITTED} 2")
        total += scene.hold(recorder.recording, [(2, A)], 40 * stride).distinct
    print(f"{len(points)} kills, then power cuts: {total} states that differ, 0 violations")
    assert total > 100


def test_a_record_is_seen_before_its_node_has_flushed_it(memory: Path) -> None:
    """A node stalls before each of its calls in turn, and the others commit what they can see."""
    seen = 0
    for point in range(1, calls_of(memory, lambda store: seal(store, 1, 2, A)) + 1):
        scene = Scene(memory, f"stalled-{point}")
        save(scene.store(), 1, A)
        seal(scene.store(), 0, 2, A)
        counted, stalled, go_on = Counted(), threading.Event(), threading.Event()

        def stall(stalled: threading.Event = stalled, go_on: threading.Event = go_on) -> None:
            stalled.set()
            assert go_on.wait(60)

        def node(scene: Scene = scene, counted: Counted = counted, at: int = point) -> None:
            counted.start(at, stall)
            seal(scene.store(), 1, 2, A)

        with Recorder(scene.root, counted) as recorder:
            thread = threading.Thread(target=node)
            thread.start()
            assert stalled.wait(60)
            try:
                commit_step(scene.store(), 2, A, nodes=NODES, timeout_s=0)
            except DeadlineError:
                continue
            else:
                recorder.mark(f"{COMMITTED} 2")
                seen += 1
            finally:
                go_on.set()
                thread.join(60)
        scene.hold(recorder.recording, [(2, A)], 40)
    assert seen >= 2


@all_of_them
def test_a_delete(memory: Path, every: int) -> None:
    scene = Scene(memory)
    for step in (1, 2, 3):
        save(scene.store(), step, A)
    with Recorder(scene.root) as recorder:
        for step in (1, 2, 3):
            recorder.mark(f"{COMMITTED} {step}")
        for step in (1, 2):
            recorder.mark(f"{DELETING} {step}")
            delete_step(scene.store(), step)
    scene.hold(recorder.recording, [], every)
    print(scene.told)


class Turns(Kept):
    """A committer that writes only when it is its turn."""

    def __init__(self, root: Path, shards: Shards) -> None:
        super().__init__(root, shards)
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._go.acquire(timeout=60)
        super().put(key, data)
        self._done.release()

    def create(self, key: str, data: bytes) -> CreateOutcome:
        self._go.acquire(timeout=60)
        outcome = super().create(key, data)
        self._done.release()
        return outcome

    def turn(self) -> None:
        self._go.release()
        assert self._done.acquire(timeout=60)


ORDERS = sorted(set(itertools.permutations((0, 0, 0, 1, 1, 1))))


@pytest.mark.parametrize("attempts", [(A, A), (A, B)], ids=["one attempt", "two attempts"])
@all_of_them
def test_a_race_of_two_committers(memory: Path, attempts: tuple[str, str], every: int) -> None:
    total = 0
    for order in ORDERS:
        shutil.rmtree(memory)
        memory.mkdir()
        scene = Scene(memory)
        for node, attempt in itertools.product(range(NODES), sorted(set(attempts))):
            seal(scene.store(), node, 5, attempt)
        with Recorder(scene.root) as recorder:
            total += race(scene, recorder, attempts, order, every)
    assert len(ORDERS) == 20
    print(f"{len(ORDERS)} orders, {total} states that differ, 0 violations")


def race(
    scene: Scene,
    recorder: Recorder,
    attempts: tuple[str, str],
    order: tuple[int, ...],
    every: int,
) -> int:
    """Two committers take turns; exactly one attempt wins, and who is told so is told the truth."""
    committers = [Turns(scene.root / "run", scene.shards) for _ in attempts]
    won: list[str] = []

    def commit(number: int) -> None:
        try:
            commit_step(committers[number], 5, attempts[number], nodes=NODES, timeout_s=0)
        except ConflictError:
            return
        recorder.mark(f"{COMMITTED} 5")
        won.append(attempts[number])

    threads = [threading.Thread(target=commit, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for number in order:
        committers[number].turn()
    for thread in threads:
        thread.join(60)
    assert len(set(won)) == 1
    return scene.hold(recorder.recording, [(5, won[0])], every).distinct
