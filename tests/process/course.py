"""The undisturbed course of a small job, to be disturbed: saves, uploads, commits, deletions, end.

One rank, a local tier, ``keep_last=1``: from the third step on every kind of file is written,
replaced and deleted on both tiers, and at the end the job's directory goes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from forebay.commit.catalog import Catalog
from forebay.commit.verify import Finding, verify_step
from forebay.drain.wire import ask
from forebay.errors import AgentError
from forebay.format import names
from forebay.format.messages import (
    AGENT_CONFIG,
    AGENT_SOCKET,
    AgentConfig,
    AskSettled,
    Phase,
    Progress,
    Welcome,
    job_directory,
    job_name,
)
from forebay.storage.directory import DirectoryStore
from forebay.storage.durable import is_unfinished
from tests.player import Player
from tests.process.agents import Agent, Agents
from tests.process.strace import Point, Strace, injected, read_points

STEPS = (1, 2, 3)
NEXT_STEP = 4
TIMEOUT_S = 60.0


class Course:
    """One job from its first agent to its last. ``problems`` is what was not as promised."""

    def __init__(self, root: Path, shared: Path, agents: Agents, **options: Any) -> None:
        self.root, self.agents = root, agents
        self.shared = shared / root.name
        self.run_path, self.local = root / "run", root / "local"
        for path in (root, self.local, self.shared):
            path.mkdir(mode=0o700, exist_ok=True)
        self.url = str(self.run_path)
        self.directory = job_directory(self.shared, self.url, 0)
        self.home = self.local / job_name(self.url, 0)
        self.options: dict[str, Any] = {"local": str(self.local), "keep_last": 1, **options}
        self.log = root / "agent.log"
        self.problems: list[str] = []
        self.staged: list[int] = []
        self.ends: dict[int, Progress] = {}
        self.left = False
        self._started: list[Agent] = []
        self._configure()
        self.player = Player(self.directory, self.url, nbytes=60_000)

    def _configure(self) -> None:
        config = AgentConfig(**({"run": self.url, "node": 0, "linger_s": 30.0} | self.options))
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.directory / AGENT_CONFIG).write_bytes(msgspec.json.encode(config))

    def move_run(self, path: Path) -> None:
        """Keep the run elsewhere, and nothing on a local tier; before the first agent."""
        self.player.die()
        self.player.map.close()
        self.run_path, self.url = path, str(path)
        self.options["local"] = None
        self.directory = job_directory(self.shared, self.url, 0)
        self._configure()
        self.player = Player(self.directory, self.url, nbytes=60_000)

    def start(self, **how: Any) -> Agent:
        """Fork an agent for the job."""
        made = self.agents.start(self.directory, self.log, **how)
        self._started.append(made)
        return made

    def go(self, calls: list[str], *inject: str, **how: Any) -> tuple[str, bool]:
        """The course with an agent under strace: the call that was hit, and whether it lived on.

        Ends when the agent has, by itself or by what was injected.
        """
        gate, log = self.root / "gate", self.root / "strace.log"
        agent = self.start(gate=gate, **how)
        with Strace(agent.pid, log, calls, *inject):
            gate.touch()
            whole = self.drive(agent)
        return (injected(log) if inject else ""), whole

    def drive(self, agent: Agent) -> bool:
        """Save every step, then leave. False when the agent died before."""
        try:
            self.connect(agent)
            for step in STEPS:
                self.staged.append(step)
                self.player.save(step)
                self.ends[step] = self.player.wait(step)
            self._settle()
        except TimeoutError:
            self.problems.append(f"after {TIMEOUT_S:g} s no word from the agent: {self.last()}")
            agent.kill()
            return False
        except (ConnectionError, FileNotFoundError):
            self._must(lambda: not agent.alive, "an agent that closed its connection to end")
            return False
        self.left = True
        with contextlib.suppress(ConnectionError):
            self.player.bye()
        self.player.die()
        self._must(lambda: not agent.alive, "the agent to end after the course")
        return True

    def _settle(self) -> None:
        """Wait until the agent has nothing left to do."""
        try:
            ask(self.directory / AGENT_SOCKET, AskSettled(timeout_s=TIMEOUT_S), 2 * TIMEOUT_S)
        except AgentError as error:
            raise error.__cause__ or error from None

    def connect(self, agent: Agent) -> None:
        """Say Hello as soon as the agent listens. Raises ConnectionResetError when it has ended."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            with contextlib.suppress(ConnectionError, FileNotFoundError):
                assert isinstance(self.player.connect(), Welcome)
                return
            if not agent.alive:
                raise ConnectionResetError
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.005)

    def _must(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                self.problems.append(f"after {TIMEOUT_S:g} s still waiting for {what}")
                return
            time.sleep(0.005)

    def last(self) -> str:
        """The last line of the agents' log."""
        lines = (
            self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        )
        return lines[-1] if lines else "its log is empty"

    def acknowledged(self) -> list[int]:
        """Steps that the trainer was told are committed."""
        return [s for s, end in self.ends.items() if end.phase is Phase.COMMITTED]

    def look(self, when: str) -> list[int]:
        """Every step that is there must be complete, and the last acknowledged among them."""
        if not self.run_path.exists():
            return []
        catalog = Catalog(DirectoryStore(self.run_path))
        steps = catalog.steps()
        for step in steps:
            manifest = catalog.manifest(step)
            self.problems += [
                f"{when}: step {step}: {found.what}"
                for found in verify_step(catalog, manifest)
                if isinstance(found, Finding)
            ]
            for stored in catalog.slices(manifest):
                data = catalog.store.get_range(stored.key, stored.start, stored.nbytes)
                if data != self.player.data(step):
                    self.problems.append(f"{when}: step {step} has other bytes than were staged")
        newest = max(self.acknowledged(), default=None)
        if newest is not None and newest not in steps and max(steps, default=0) <= newest:
            self.problems.append(f"{when}: step {newest} was acknowledged, there are {steps}")
        return steps

    def finish(self) -> None:
        """A fresh agent commits what is staged, and the next save; then all is tidy."""
        self.look("after the fault")
        self._configure()
        if self.left:
            self.player = Player(self.directory, self.url, nbytes=60_000, generation=1)
        agent = self.start()
        try:
            self.connect(agent)
            for step in self.staged:
                if step not in self.ends:
                    self.ends[step] = end = self.player.wait(step)
                    if end.phase is not Phase.COMMITTED:
                        self.problems.append(f"step {step} was staged and is {end}")
            self._settle()  # retention goes on behind the commit
            self.look("after the next agent")
            self.player.save(NEXT_STEP)
            self.ends[NEXT_STEP] = end = self.player.wait(NEXT_STEP)
            if end.phase is not Phase.COMMITTED:
                self.problems.append(f"the next save is {end}")
            self._settle()
            self.player.bye()
        except (TimeoutError, ConnectionError, FileNotFoundError) as error:
            self.problems.append(f"the next agent: {error!r}: {self.last()}")
            return
        self._must(lambda: not agent.alive, "the next agent to end")
        steps = self.look("at the end")
        if steps != [NEXT_STEP]:
            self.problems.append(f"retention left steps {steps}")

    def litter(self) -> list[str]:
        """What lies about that nobody admits."""
        found = [f"shared memory: {path.name}" for path in self.shared.glob("*")]
        for path in self.run_path.rglob("*"):
            key = str(path.relative_to(self.run_path))
            known = names.parse_data_key(key) or names.parse_manifest_key(key)
            if path.is_file() and not known and not is_unfinished(path.name):
                found.append(f"run: {key}")
        # a call's number is counted in each thread: it may have failed for all steps but the last
        newest = sorted(self.acknowledged())[-2:]
        oldest = f"{newest[0] if len(newest) == 2 else 0:012d}"
        for path in self.home.rglob("*"):
            key = path.relative_to(self.home)
            step = key.parts[1] if key.parts[0] == "data" and len(key.parts) > 1 else None
            if path.is_file() and (step is None or step < oldest or is_unfinished(path.name)):
                found.append(f"local tier: {key}")
        return found

    def end(self) -> None:
        """Leave no process."""
        self.player.die()
        self.player.map.close()
        for agent in self._started:
            agent.close()


def record(
    root: Path, shared: Path, agents: Agents, calls: list[str], ordered: bool
) -> list[Point]:
    """The points of a course that nobody disturbs, which ends well and tidily itself."""
    course = Course(root, shared, agents)
    try:
        _, whole = course.go(calls, ordered=ordered)
        assert whole, course.last()
        assert course.acknowledged() == [1, 2, 3]
        course.look("undisturbed")
        assert not course.problems
        return read_points(root / "strace.log")
    finally:
        course.end()
