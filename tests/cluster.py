"""A job on one or two nodes: real agents, trainers played by the test, all of which may die."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from forebay.drain.wire import ask
from forebay.format.messages import (
    AGENT_CONFIG,
    AGENT_SOCKET,
    FINAL_PHASES,
    AgentConfig,
    AskSettled,
    Phase,
    Progress,
    StatusReply,
    job_directory,
)
from forebay.format.slot import WORD_BYTES, SlotState
from forebay.testing.faulty import Rule
from tests.agents import Child, Nursery
from tests.expected import TOTAL_BYTES, bytes_of
from tests.player import Player, connected

DEADLINE_S = 60.0
GATHER_S = 1.0


class Rank(Player):
    """A trainer rank of one attempt; ``saving`` names the attempt of the snapshot it fills."""

    def __init__(
        self,
        directory: Path,
        run: str,
        attempt: str,
        rank: int,
        world: int,
        node: int,
        nodes: int,
        node_ranks: tuple[int, ...],
    ) -> None:
        self.attempt = self.saving = attempt
        self.agent = 0
        super().__init__(
            directory,
            run,
            rank,
            world,
            nbytes=TOTAL_BYTES // world,
            node=node,
            nodes=nodes,
            node_ranks=node_ranks,
            claim=True,
        )

    @property
    def alive(self) -> bool:
        """True until it has died."""
        return self._lock >= 0

    def data(self, step: int) -> bytes:
        """The bytes of this rank at ``step``."""
        nbytes = sum(placed.nbytes for placed in self.image.placed)
        return bytes_of(step, self.saving, self.rank, nbytes)

    def die_in_copy(self, step: int) -> None:
        """Be gone when half of an image has been written into a slot."""
        free = self.free_slots()
        if free:
            start = self.head.control_start(free[0])
            self.map[start : start + 8] = int(SlotState.FILLING).to_bytes(8, "little")
            at = self.head.image_start(free[0]) + self.image.placed[0].start
            half = self.data(step)[: TOTAL_BYTES // 8]
            self.map[at : at + len(half)] = half
            assert self.words(free[0]).state is SlotState.FILLING, WORD_BYTES
        self.die()


class Cluster:
    """Trainers and agents of one run; ``local`` gives each node a local tier."""

    def __init__(
        self, root: Path, shared: Path, nursery: Nursery, *, local: bool, keep_last: int | None
    ) -> None:
        self.root, self.shared = root, shared
        self.run = root / "run"
        self.run.mkdir()
        self._script = root / "faults.json"
        self.url = f"faulty+file://{self.run}?script={self._script}"
        self._faults()
        self._nursery = nursery
        self._local = local
        self._keep_last = keep_last
        if local:
            for node in range(2):
                (root / f"local-{node}").mkdir()
        self.agents: dict[int, Child] = {}
        self.ranks: list[Rank] = []
        self.nodes = 0
        self.attempt = ""
        self.attempts = 0
        self.deaths = 0
        self.armed = False

    def directory(self, node: int) -> Path:
        """The job's directory of a node."""
        return job_directory(self.shared, self.url, node)

    def begin(self, world: int, nodes: int) -> None:
        """A new start of the job: other ranks, another attempt; agents that live stay."""
        for rank in self.ranks:
            rank.die()
        self.attempts += 1
        self.attempt, self.nodes = f"a{self.attempts}", nodes
        share = -(-world // nodes)
        self.ranks = []
        for rank in range(world):
            node = rank // share
            members = tuple(r for r in range(world) if r // share == node)
            self._prepare(node)
            self.ranks.append(
                Rank(
                    self.directory(node), self.url, self.attempt, rank, world, node, nodes, members
                )
            )

    def _prepare(self, node: int) -> None:
        directory = self.directory(node)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        config = AgentConfig(
            run=self.url,
            local=str(self.root / f"local-{node}") if self._local else None,
            node=node,
            keep_last=self._keep_last,
            queue=64,
            gather_timeout_s=GATHER_S,
        )
        (directory / AGENT_CONFIG).write_bytes(msgspec.json.encode(config))

    def arm(self, op: str, match: str, after: int) -> None:
        """An agent dies in one of its next calls of the durable tier."""
        self._faults(Rule(op=op, match=match, after=after, do="kill", times=1))  # type: ignore[arg-type]
        self.armed = True

    def disarm(self) -> None:
        """No agent dies by itself any more."""
        if self.armed:
            self._faults()
            self.armed = False

    def _faults(self, *rules: Rule) -> None:
        temporary = self._script.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(rules))
        temporary.rename(self._script)

    def agent_lives(self, node: int) -> bool:
        """True while the node has an agent."""
        return node in self.agents and not self.agents[node].ended()

    def kill_agent(self, node: int) -> None:
        """SIGKILL the agent of a node, if it has one."""
        if node in self.agents:
            self.deaths += self.agent_lives(node)
            self.agents.pop(node).kill()

    def serve(self, node: int) -> None:
        """See to it that the node has an agent that answers."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            if not self.agent_lives(node):
                self.disarm()
                self.kill_agent(node)
                self._prepare(node)
                log = self.root / f"agent-{node}.log"
                self.agents[node] = self._nursery.start(self.directory(node), log)
            try:
                connected(self.directory(node)).close()
            except OSError:
                assert time.monotonic() < deadline, f"no agent of node {node}: {self.log(node)}"
                time.sleep(0.002)
            else:
                return

    def log(self, node: int) -> str:
        """The last words of a node's agents."""
        path = self.root / f"agent-{node}.log"
        return path.read_text()[-3000:] if path.exists() else "never started"

    def serve_all(self) -> None:
        """Every node has an agent, and every living rank is connected to it."""
        for rank in self.ranks:
            self.link(rank)

    def link(self, rank: Rank) -> None:
        """The node of a rank has an agent, and the rank, if it lives, is connected to it."""
        deadline, node = time.monotonic() + DEADLINE_S, rank.layout.node
        while True:
            self.serve(node)
            if not rank.alive or rank.agent == self.agents[node].pid:
                return
            try:
                rank.connect(rank.attempt)
                rank.agent = self.agents[node].pid
            except OSError:
                assert time.monotonic() < deadline, f"rank {rank.rank}: {self.log(node)}"

    def linked(self, rank: Rank) -> bool:
        """True when the rank's agent, if it still lives, hears it."""
        node = rank.layout.node
        return self.agent_lives(node) and rank.agent == self.agents[node].pid

    def hear(self, rank: Rank, step: int, attempt: str, *phases: Phase) -> Progress:
        """What a living rank hears when a snapshot comes to a phase, or to any end."""
        wanted = set(phases) | FINAL_PHASES
        deadline = time.monotonic() + 2 * DEADLINE_S
        while True:
            for said in rank.heard:
                if (said.step, said.attempt) == (step, attempt) and said.phase in wanted:
                    return said
            where = f"rank {rank.rank} waits for {step} of {attempt}: {self.log(rank.layout.node)}"
            assert time.monotonic() < deadline, where
            try:
                message = rank.receive()
            except TimeoutError:
                raise AssertionError(where) from None
            except OSError:
                rank.agent = 0
                self.link(rank)
                continue
            if isinstance(message, Progress):
                rank.heard.append(message)

    def settle(self, *nodes: int) -> list[StatusReply]:
        """Wait until the agents of the nodes have nothing left to do."""
        replies = []
        for node in nodes:
            deadline = time.monotonic() + 2 * DEADLINE_S
            while True:
                self.serve(node)
                for rank in self.ranks:  # of an agent that died, each finds the next by itself
                    if rank.layout.node == node:
                        self.link(rank)
                try:
                    reply = ask(
                        self.directory(node) / AGENT_SOCKET, AskSettled(timeout_s=DEADLINE_S), 90.0
                    )
                except Exception:
                    assert time.monotonic() < deadline, f"node {node}: {self.log(node)}"
                    continue
                assert isinstance(reply, StatusReply)
                if reply.settled:
                    replies.append(reply)
                    break
                assert time.monotonic() < deadline, f"node {node}: {self.log(node)}"
        return replies

    def close(self) -> None:
        """End all that it started."""
        for rank in self.ranks:
            rank.die()
        for node in list(self.agents):
            self.kill_agent(node)
