"""One run, event by event: training, pauses, writes to the tiers, failures and recoveries.

Its clock is a whole number of nanoseconds. Between two events nothing changes, so a run takes as
many steps as it has events, however many nodes there are.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from forebay.plan.draws import Draws
from forebay.plan.load import Load
from forebay.plan.scenario import NS, Scenario, Strategy
from forebay.plan.story import Failure, Story
from forebay.plan.tally import Tally

MEMORY, LOCAL, PEER, DURABLE, NOWHERE = range(5)
_TRAINS, _PAUSES, _RESTARTS = range(3)
_TO_LOCAL, _TO_PEER, _TO_DURABLE = range(3)
_NEVER = 2**63


@dataclass(slots=True, kw_only=True)
class _Image:
    """A checkpoint on its way. ``on``: the farthest near tier that has all of it."""

    number: int
    began_ns: int
    to_peer: bool
    to_durable: bool
    on: int = MEMORY
    slot: bool = True
    lost: bool = False


class Run:
    """The state of one run; ``play`` takes it to its end."""

    __slots__ = (
        "_begun", "_done", "_draws", "_due", "_durable_marked", "_end", "_ends", "_failed_at",
        "_fails_at", "_holds", "_load", "_mode", "_mode_end", "_now", "_peer_marked", "_queues",
        "_saving", "_scenario", "_slots", "_slowed", "_source", "_story", "_tally", "_under",
        "_worked",
    )  # fmt: skip

    def __init__(
        self,
        scenario: Scenario,
        draws: Draws,
        load: Load,
        end_ns: int,
        story: Story | None = None,
    ) -> None:
        self._scenario, self._draws, self._load, self._end = scenario, draws, load, end_ns
        self._story = story
        self._tally = Tally()
        self._now = 0
        self._done = 0  # training that is in the model
        self._worked = 0  # all training, what was taken back too
        self._due = scenario.cadence_ns  # where in `_done` the next checkpoint stands
        self._mode, self._mode_end = _TRAINS, _NEVER
        self._fails_at = draws.failure_ns()
        self._failed_at = 0
        self._source = NOWHERE
        self._holds = [0] * 4  # number of the newest complete checkpoint in each tier; 0: none
        self._saving: _Image | None = None
        self._slots = 0  # in use
        self._peer_marked = self._durable_marked = 0
        self._slowed = 1.0
        # local, peer, durable: each writes one checkpoint at a time
        self._queues: tuple[deque[_Image], ...] = (deque(), deque(), deque())
        self._under: list[_Image | None] = [None] * 3
        self._begun, self._ends = [0] * 3, [_NEVER] * 3

    def play(self) -> Tally:
        """Event after event until the run's time is over."""
        while self._now < self._end:
            self._advance()
        if self._under[_TO_DURABLE] is not None:
            self._wrote(self._begun[_TO_DURABLE], self._ends[_TO_DURABLE])
        tally = self._tally
        tally.total_ns, tally.useful_ns = self._end, self._done
        tally.rework_ns = self._worked - self._done
        return tally

    def _advance(self) -> None:
        """To the next event, whatever it is."""
        ends, now, tally, mode = self._ends, self._now, self._tally, self._mode
        left = self._due - self._done
        if mode == _TRAINS:
            slowed = self._slowed
            turn = now + (left if slowed == 1.0 else int(left * slowed) + 1)
        else:
            turn = self._mode_end
        at = min(turn, ends[0], ends[1], ends[2], self._fails_at, self._end)
        took = at - now
        if mode == _TRAINS:
            work = left if at == turn else min(left, int(took / self._slowed))
            self._done += work
            self._worked += work
            tally.interference_ns += took - work
        elif mode == _PAUSES:
            tally.pause_ns += took
        else:
            tally.restart_ns += took
        self._now = at
        if at == self._fails_at:
            self._fail()
        elif at == turn:
            if mode == _TRAINS:
                self._save()
            elif mode == _PAUSES:
                self._saved()
            else:
                self._restarted()
        else:
            for hop in (_TO_DURABLE, _TO_PEER, _TO_LOCAL):
                if at == ends[hop]:
                    self._written(hop)

    def _save(self) -> None:
        """A checkpoint is due: a pause begins, unless no slot is free."""
        scenario = self._scenario
        number = self._done // scenario.cadence_ns
        self._due += scenario.cadence_ns
        self._tally.due += 1
        if self._slots >= scenario.slots:
            self._tally.skipped += 1
            return
        if scenario.slots == 1:
            self._holds[MEMORY] = 0  # the only slot is written over
        self._slots += 1
        self._saving = _Image(
            number=number,
            began_ns=self._now,
            to_peer=scenario.tiers[PEER] and _due(number, self._peer_marked, scenario.peer_every),
            to_durable=_due(number, self._durable_marked, scenario.durable_every),
        )
        self._mode, self._mode_end = _PAUSES, self._now + self._draws.pause_ns()

    def _saved(self) -> None:
        """The pause is over: training goes on, with the image on its way."""
        image = self._saving
        assert image is not None
        scenario, tally = self._scenario, self._tally
        self._saving = None
        self._mode, self._mode_end = _TRAINS, _NEVER
        tally.taken += 1
        tally.pauses.add(self._now - image.began_ns)
        if image.to_peer:
            self._peer_marked = image.number
        if image.to_durable:
            self._durable_marked = image.number
        if scenario.strategy is Strategy.SYNCHRONOUS:
            self._free(image)
            self._complete(DURABLE, image)
            self._wrote(self._now - self._writing_ns(image), self._now)
            return
        if scenario.tiers[MEMORY]:
            self._complete(MEMORY, image)
        if scenario.tiers[LOCAL]:
            self._queues[_TO_LOCAL].append(image)
            self._begin(_TO_LOCAL)
        else:
            self._onward(image)

    def _writing_ns(self, image: _Image) -> int:
        """The part of a synchronous pause in which the filesystem is written to."""
        scenario = self._scenario
        write_s = scenario.plan.sizes.checkpoint_bytes / scenario.drain_bytes_per_s
        return min(self._mode_end - image.began_ns, round(write_s * NS))

    def _onward(self, image: _Image) -> None:
        """From where it rests to the peer and to the durable tier, side by side."""
        scenario = self._scenario
        if image.to_peer:
            self._queues[_TO_PEER].append(image)
            self._begin(_TO_PEER)
        elif scenario.tiers[LOCAL] or scenario.tiers[PEER] or not image.to_durable:
            self._free(image)
        if image.to_durable:
            waiting = self._queues[_TO_DURABLE]
            if waiting:  # a newer one replaces what has not begun
                self._tally.superseded += 1
                older = waiting.popleft()
                if not older.to_peer:
                    self._free(older)
            waiting.append(image)
            self._begin(_TO_DURABLE)

    def _begin(self, hop: int, not_before: int = 0) -> None:
        """Start the next write of a hop that is idle."""
        if self._under[hop] is None and self._queues[hop]:
            self._under[hop] = self._queues[hop].popleft()
            self._time(hop, max(self._now, not_before))

    def _time(self, hop: int, begins: int) -> None:
        self._begun[hop] = begins
        self._ends[hop] = begins + self._draws.write_ns(hop)
        self._slow()

    def _written(self, hop: int) -> None:
        """A write is over: the checkpoint is complete in that tier."""
        image = self._under[hop]
        assert image is not None
        if hop == _TO_DURABLE:
            self._wrote(self._begun[hop], self._ends[hop])
        self._idle(hop)
        self._complete(hop + 1, image)
        if hop == _TO_LOCAL:
            image.on = LOCAL
            self._onward(image)
        elif hop == _TO_PEER:
            image.on = PEER
            self._free(image)
        elif not image.to_peer:
            self._free(image)
        self._begin(hop)

    def _idle(self, hop: int) -> None:
        self._under[hop] = None
        self._ends[hop] = _NEVER
        self._slow()

    def _complete(self, tier: int, image: _Image) -> None:
        self._holds[tier] = max(self._holds[tier], image.number)
        self._tally.reached[tier].add(self._now - image.began_ns)

    def _free(self, image: _Image) -> None:
        """Its slot may be filled again."""
        if image.slot:
            image.slot = False
            self._slots -= 1

    def _slow(self) -> None:
        """How much longer a step takes, with what is being written now."""
        weight = 0.0
        for under, each in zip(self._under, self._scenario.disturbs, strict=True):
            if under is not None:
                weight += each
        self._slowed = 1.0 + self._scenario.interference * min(1.0, weight)

    def _wrote(self, begun: int, ends: int) -> None:
        """Account for a write to the durable tier, or the part of it that was done by now."""
        until = min(ends, self._now)
        if until <= begun:
            return
        rate = self._scenario.plan.sizes.checkpoint_bytes / (ends - begun)
        self._load.add(begun, until, rate)
        self._tally.drained_bytes += (until - begun) * rate
        self._tally.drain_ns += until - begun
        self._tally.peak_bytes_per_ns = max(self._tally.peak_bytes_per_ns, rate)

    def _fail(self) -> None:
        """A failure: what it leaves decides what the run goes back to."""
        scenario, tally, holds = self._scenario, self._tally, self._holds
        kind = self._draws.kind()
        tally.failures[kind] += 1
        self._fails_at = self._now + self._draws.failure_ns()
        if self._saving is not None:
            tally.torn += 1
            if scenario.strategy is Strategy.SYNCHRONOUS:
                self._wrote(self._mode_end - self._writing_ns(self._saving), self._mode_end)
            self._free(self._saving)
            self._saving = None
        for tier in range(kind):
            holds[tier] = 0
        newest = max(holds)
        self._source = holds.index(newest) if newest else NOWHERE
        back = newest * scenario.cadence_ns
        lost = self._done - back
        tally.lost.add(lost)
        self._done, self._due = back, back + scenario.cadence_ns
        self._peer_marked = min(self._peer_marked, newest)
        self._durable_marked = min(self._durable_marked, newest)
        if self._mode == _RESTARTS:
            tally.failed_restarts += 1
        else:
            self._failed_at = self._now
        if self._story is not None:
            self._story.tell(
                Failure(
                    at_ns=self._now,
                    kind=kind,
                    source=self._source,
                    lost_ns=lost,
                    pause_ns=tally.pause_ns,
                    rework_ns=self._worked - self._done,
                    restart_ns=tally.restart_ns,
                    interference_ns=tally.interference_ns,
                )
            )
        takes_s = scenario.restart_s[min(self._source, DURABLE)]
        self._mode, self._mode_end = _RESTARTS, self._now + max(1, round(takes_s * NS))
        self._strike(kind)

    def _strike(self, kind: int) -> None:
        """What is on its way: goes on if an agent still has it, is lost if nothing has it.

        After the death of more than the trainer, what is left starts over with the restart.
        """
        for hop, queue in enumerate(self._queues):
            under = self._under[hop]
            if under is not None and not self._survives(under, kind):
                if hop == _TO_DURABLE:
                    self._wrote(self._begun[hop], self._ends[hop])
                self._idle(hop)
            elif under is not None and kind > MEMORY:
                if hop == _TO_DURABLE:
                    self._wrote(self._begun[hop], self._ends[hop])
                self._time(hop, self._mode_end)
            kept = [image for image in queue if self._survives(image, kind)]
            queue.clear()
            queue.extend(kept)
            self._begin(hop, self._mode_end if kind > MEMORY else 0)

    def _survives(self, image: _Image, kind: int) -> bool:
        """Whether a near tier that there is has all of it after a failure of that kind."""
        if image.on >= kind and self._scenario.tiers[image.on]:
            return True
        if not image.lost:
            image.lost = True
            self._tally.lost_in_flight += 1
            self._free(image)
        return False

    def _restarted(self) -> None:
        """Training goes on from what was loaded; tiers nearer than its source have it again."""
        scenario, holds = self._scenario, self._holds
        self._tally.restarts.add(self._now - self._failed_at)
        self._tally.recovered[self._source] += 1
        if self._source < NOWHERE:
            for tier in range(self._source):
                if scenario.tiers[tier]:
                    holds[tier] = holds[self._source]
        self._mode, self._mode_end = _TRAINS, _NEVER


def _due(number: int, marked: int, every: int) -> bool:
    """Whether a checkpoint is the first at or after the next multiple of an outer cadence."""
    return number // every > marked // every
