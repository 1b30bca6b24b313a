"""One run, event by event: training, pauses, failures and recoveries.

Its clock is a whole number of nanoseconds. Between two events nothing changes, so a run takes as
many steps as it has events, however many nodes there are.
"""

from __future__ import annotations

from forebay.plan.draws import Draws
from forebay.plan.load import Load
from forebay.plan.scenario import NS, Scenario, Strategy
from forebay.plan.story import Failure, Story
from forebay.plan.tally import Tally
from forebay.plan.transit import DURABLE, MEMORY, NEVER, NOWHERE, PEER, Image, Transit

_TRAINS, _PAUSES, _RESTARTS = range(3)


class Run:
    """The state of one run; ``play`` takes it to its end."""

    __slots__ = (
        "_done", "_draws", "_due", "_durable_marked", "_end", "_failed_at", "_fails_at", "_mode",
        "_mode_end", "_now", "_peer_marked", "_saving", "_scenario", "_source", "_story", "_tally",
        "_transit", "_worked",
    )  # fmt: skip

    def __init__(
        self,
        scenario: Scenario,
        draws: Draws,
        load: Load,
        end_ns: int,
        story: Story | None = None,
    ) -> None:
        self._scenario, self._draws, self._end, self._story = scenario, draws, end_ns, story
        self._tally = Tally()
        self._transit = Transit(scenario, draws, load, self._tally)
        self._now = 0
        self._done = 0  # training that is in the model
        self._worked = 0  # all training, what was taken back too
        self._due = scenario.cadence_ns  # where in `_done` the next checkpoint stands
        self._mode, self._mode_end = _TRAINS, NEVER
        self._fails_at = draws.failure_ns()
        self._failed_at = 0
        self._source = NOWHERE
        self._saving: Image | None = None
        self._peer_marked = self._durable_marked = 0  # number of the last that was to go there

    def play(self) -> Tally:
        """Event after event until the run's time is over."""
        while self._now < self._end:
            self._advance()
        self._transit.close(self._now)
        tally = self._tally
        tally.total_ns, tally.useful_ns = self._end, self._done
        tally.rework_ns = self._worked - self._done
        return tally

    def _advance(self) -> None:
        """To the next event, whatever it is."""
        transit, now, tally, mode = self._transit, self._now, self._tally, self._mode
        left = self._due - self._done
        slowed = transit.slowed
        if mode == _TRAINS:
            turn = now + (left if slowed == 1.0 else int(left * slowed) + 1)
        else:
            turn = self._mode_end
        at = min(turn, *transit.ends, self._fails_at, self._end)
        took = at - now
        if mode == _TRAINS:
            work = left if at == turn else min(left, int(took / slowed))
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
        elif at != turn:
            transit.arrive(at)
        elif mode == _TRAINS:
            self._save()
        elif mode == _PAUSES:
            self._saved()
        else:
            self._restarted()

    def _save(self) -> None:
        """A checkpoint is due: a pause begins, unless no slot is free."""
        scenario, transit = self._scenario, self._transit
        number = self._done // scenario.cadence_ns
        self._due += scenario.cadence_ns
        self._tally.due += 1
        if transit.slots >= scenario.slots:
            self._tally.skipped += 1
            return
        if scenario.slots == 1:
            transit.holds[MEMORY] = 0  # the only slot is written over
        transit.slots += 1
        to_peer = scenario.tiers[PEER] and _due(number, self._peer_marked, scenario.peer_every)
        self._saving = Image(
            number=number,
            began_ns=self._now,
            to_peer=to_peer,
            to_durable=_due(number, self._durable_marked, scenario.durable_every),
        )
        self._mode, self._mode_end = _PAUSES, self._now + self._draws.pause_ns()

    def _saved(self) -> None:
        """The pause is over: training goes on, with the image on its way."""
        image, now, transit = self._saving, self._now, self._transit
        assert image is not None
        if self._scenario.strategy is Strategy.SYNCHRONOUS:
            transit.free(image)
            transit.complete(DURABLE, image, now)
            transit.wrote(self._writes_from(image), now, now)
        else:
            transit.enter(image, now)
        self._tally.taken += 1
        self._tally.pauses.add(now - image.began_ns)
        if image.to_peer:
            self._peer_marked = image.number
        if image.to_durable:
            self._durable_marked = image.number
        self._saving = None
        self._mode, self._mode_end = _TRAINS, NEVER

    def _writes_from(self, image: Image) -> int:
        """When in a synchronous pause the filesystem begins to be written to."""
        return max(image.began_ns, self._mode_end - round(self._scenario.drain_s * NS))

    def _fail(self) -> None:
        """A failure: what it leaves decides what the run goes back to."""
        scenario, tally, transit = self._scenario, self._tally, self._transit
        now, torn, kind = self._now, self._saving, self._draws.kind()
        tally.failures[kind] += 1
        self._fails_at = now + self._draws.failure_ns()
        if torn is not None:
            tally.torn += 1
            if scenario.strategy is Strategy.SYNCHRONOUS:
                transit.wrote(self._writes_from(torn), self._mode_end, now)
            transit.free(torn)
            self._saving = None
        left = [0] * kind + transit.holds[kind:]
        newest = max(left)
        self._source = left.index(newest) if newest else NOWHERE
        back = newest * scenario.cadence_ns
        lost = self._done - back
        tally.lost.add(lost)
        self._done, self._due = back, back + scenario.cadence_ns
        self._peer_marked = min(self._peer_marked, newest)
        self._durable_marked = min(self._durable_marked, newest)
        if self._mode == _RESTARTS:
            tally.failed_restarts += 1
        else:
            self._failed_at = now
        if self._story is not None:
            self._tell(self._story, kind, lost)
        takes_s = scenario.restart_s[min(self._source, DURABLE)]
        self._mode, self._mode_end = _RESTARTS, now + max(1, round(takes_s * NS))
        transit.strike(kind, now, self._mode_end)

    def _tell(self, story: Story, kind: int, lost: int) -> None:
        tally = self._tally
        story.tell(
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

    def _restarted(self) -> None:
        """Training goes on from what was loaded."""
        self._tally.restarts.add(self._now - self._failed_at)
        self._tally.recovered[self._source] += 1
        if self._source < NOWHERE:
            self._transit.reload(self._source)
        self._mode, self._mode_end = _TRAINS, NEVER


def _due(number: int, marked: int, every: int) -> bool:
    """Whether a checkpoint is the first at or after the next multiple of an outer cadence."""
    return number // every > marked // every
