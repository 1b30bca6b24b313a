"""Checkpoints on their way: what each tier has, what is being written to it, and what waits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from forebay.plan.draws import Draws
from forebay.plan.load import Load
from forebay.plan.scenario import Scenario
from forebay.plan.tally import Tally

MEMORY, LOCAL, PEER, DURABLE, NOWHERE = range(5)
NEVER = 2**63
_TO_LOCAL, _TO_PEER, _TO_DURABLE = range(3)


@dataclass(slots=True, kw_only=True)
class Image:
    """A checkpoint on its way. ``on``: the farthest near tier that has all of it."""

    number: int
    began_ns: int
    to_peer: bool
    to_durable: bool
    on: int = MEMORY
    slot: bool = True
    lost: bool = False


class Transit:
    """The tiers of one run. Times in nanoseconds since it began; local, peer, durable in order.

    Each of the three writes one checkpoint at a time. ``ends``: when; ``holds``: number of the
    newest complete checkpoint in memory, local, peer, durable, 0 for none; ``slots``: in use;
    ``slowed``: how much longer a step takes now.
    """

    __slots__ = (
        "_begun", "_draws", "_load", "_queues", "_scenario", "_tally", "_under", "ends", "holds",
        "slots", "slowed",
    )  # fmt: skip

    def __init__(self, scenario: Scenario, draws: Draws, load: Load, tally: Tally) -> None:
        self._scenario, self._draws, self._load, self._tally = scenario, draws, load, tally
        self._queues: tuple[deque[Image], ...] = (deque(), deque(), deque())
        self._under: list[Image | None] = [None] * 3
        self._begun, self.ends = [0] * 3, [NEVER] * 3
        self.holds = [0] * 4
        self.slots = 0
        self.slowed = 1.0

    def enter(self, image: Image, now: int) -> None:
        """An image is whole in host memory and begins its way to where it is to go."""
        if self._scenario.tiers[MEMORY]:
            self.complete(MEMORY, image, now)
        if self._scenario.tiers[LOCAL]:
            self._queues[_TO_LOCAL].append(image)
            self._begin(_TO_LOCAL, now)
        else:
            self._onward(image, now)

    def arrive(self, now: int) -> None:
        """Every write that ends now: its checkpoint is complete in that tier."""
        for hop in (_TO_DURABLE, _TO_PEER, _TO_LOCAL):
            if self.ends[hop] == now:
                self._written(hop, now)

    def complete(self, tier: int, image: Image, now: int) -> None:
        """A tier has all of a checkpoint."""
        self.holds[tier] = max(self.holds[tier], image.number)
        self._tally.reached[tier].add(now - image.began_ns)

    def free(self, image: Image) -> None:
        """Its slot may be filled again."""
        if image.slot:
            image.slot = False
            self.slots -= 1

    def strike(self, kind: int, now: int, again: int) -> None:
        """A failure that leaves tier ``kind`` and those beyond it.

        What is on its way goes on if an agent still has it, and is lost if nothing has it. After
        the death of more than the trainer, what is left starts over at ``again``.
        """
        for tier in range(kind):
            self.holds[tier] = 0
        for hop, queue in enumerate(self._queues):
            under = self._under[hop]
            if under is not None:
                survives = self._survives(under, kind)
                if hop == _TO_DURABLE and (kind > MEMORY or not survives):
                    self.wrote(self._begun[hop], self.ends[hop], now)
                if not survives:
                    self._idle(hop)
                elif kind > MEMORY:
                    self._time(hop, again)
            kept = [image for image in queue if self._survives(image, kind)]
            queue.clear()
            queue.extend(kept)
            self._begin(hop, again if kind > MEMORY else now)

    def reload(self, source: int) -> None:
        """What a restart has loaded from ``source`` is in the nearer tiers again."""
        for tier in range(source):
            if self._scenario.tiers[tier]:
                self.holds[tier] = self.holds[source]

    def wrote(self, begun: int, ends: int, now: int) -> None:
        """Account for a write to the durable tier, or for the part of it that is done by now."""
        until = min(ends, now)
        if until <= begun:
            return
        rate = self._scenario.plan.sizes.checkpoint_bytes / (ends - begun)
        self._load.add(begun, until, rate)
        self._tally.drained_bytes += (until - begun) * rate
        self._tally.drain_ns += until - begun
        self._tally.peak_bytes_per_ns = max(self._tally.peak_bytes_per_ns, rate)

    def close(self, now: int) -> None:
        """The run is over: what was written of the drain under way counts as load."""
        if self._under[_TO_DURABLE] is not None:
            self.wrote(self._begun[_TO_DURABLE], self.ends[_TO_DURABLE], now)

    def _onward(self, image: Image, now: int) -> None:
        """From where it rests to the peer and to the durable tier, side by side."""
        tiers = self._scenario.tiers
        if image.to_peer:
            self._queues[_TO_PEER].append(image)
            self._begin(_TO_PEER, now)
        elif tiers[LOCAL] or tiers[PEER] or not image.to_durable:
            self.free(image)
        if image.to_durable:
            waiting = self._queues[_TO_DURABLE]
            if waiting:  # a newer one replaces what has not begun
                self._tally.superseded += 1
                older = waiting.popleft()
                if not older.to_peer:
                    self.free(older)
            waiting.append(image)
            self._begin(_TO_DURABLE, now)

    def _begin(self, hop: int, at: int) -> None:
        """Start the next write of a hop that is idle."""
        if self._under[hop] is None and self._queues[hop]:
            self._under[hop] = self._queues[hop].popleft()
            self._time(hop, at)

    def _time(self, hop: int, at: int) -> None:
        self._begun[hop] = at
        self.ends[hop] = at + self._draws.write_ns(hop)
        self._slow()

    def _written(self, hop: int, now: int) -> None:
        image = self._under[hop]
        assert image is not None
        if hop == _TO_DURABLE:
            self.wrote(self._begun[hop], self.ends[hop], now)
        self._idle(hop)
        self.complete(hop + 1, image, now)
        if hop == _TO_LOCAL:
            image.on = LOCAL
            self._onward(image, now)
        elif hop == _TO_PEER:
            image.on = PEER
            self.free(image)
        elif not image.to_peer:
            self.free(image)
        self._begin(hop, now)

    def _idle(self, hop: int) -> None:
        self._under[hop] = None
        self.ends[hop] = NEVER
        self._slow()

    def _slow(self) -> None:
        weight = 0.0
        for under, each in zip(self._under, self._scenario.disturbs, strict=True):
            if under is not None:
                weight += each
        self.slowed = 1.0 + self._scenario.interference * min(1.0, weight)

    def _survives(self, image: Image, kind: int) -> bool:
        """Whether a near tier that there is has all of it after a failure of that kind."""
        if image.on >= kind and self._scenario.tiers[image.on]:
            return True
        if not image.lost:
            image.lost = True
            self._tally.lost_in_flight += 1
            self.free(image)
        return False
