"""What chance decides of a run: failures, and how long the slowest of all nodes takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.plan.scenario import NS, Scenario, Strategy
from forebay.plan.tail import slowest_s

if TYPE_CHECKING:
    import numpy as np

_BLOCK = 4096
_LONGEST_NS = 4 * 10**18  # longer than any run


class Draws:
    """Times of one run, in nanoseconds. Failures come from a generator of their own.

    Two scenarios with the same seed and MTBF are so hit by the same failures at the same times.

    The slowest of N nodes that are alike takes what one of them stays below in ``u^(1/N)`` of all
    cases (``tail.slowest_s``), with u even in 0 to 1: one number, however many nodes there are.
    """

    __slots__ = (
        "_at",
        "_block",
        "_failures",
        "_kinds",
        "_mtbf",
        "_ranks",
        "_scenario",
        "_spread",
        "_tail",
        "_times",
        "_uneven",
        "_writes",
    )  # fmt: skip

    def __init__(
        self, scenario: Scenario, failures: np.random.Generator, times: np.random.Generator
    ) -> None:
        plan = scenario.plan
        checkpoint, sizes = plan.inputs.checkpoint, plan.sizes
        self._scenario = scenario
        self._failures, self._times = failures, times
        self._block: list[float] = []
        self._at = _BLOCK
        self._mtbf = scenario.mtbf_s * NS
        self._tail, self._spread = checkpoint.tail, checkpoint.spread
        self._uneven = self._tail != "none" and self._spread > 0
        self._ranks = sizes.writers
        by_name = {hop.name: hop.seconds for hop in plan.hops}
        # what no node can be slower or faster in, and what each takes by itself
        self._writes = (
            (0.0, by_name.get("nvme", 0.0)),
            (0.0, by_name.get("peer", 0.0)),
            (scenario.drain_s, scenario.link_s),
        )
        odds, self._kinds = 0.0, []
        for share in scenario.shares:
            odds += share
            self._kinds.append(odds)

    def failure_ns(self) -> int:
        """Time to the next failure: exponential, so it does not matter since when."""
        return max(1, min(_LONGEST_NS, int(self._failures.standard_exponential() * self._mtbf)))

    def kind(self) -> int:
        """The nearest tier that a failure leaves: 0 memory to 3 durable."""
        drawn = self._failures.random() * self._kinds[-1]
        for kind, odds in enumerate(self._kinds):
            if drawn < odds:
                return kind
        return len(self._kinds) - 1

    def pause_ns(self) -> int:
        """One pause: fixed cost, the slowest copy, and what is written within it."""
        scenario = self._scenario
        seconds = scenario.fixed_s + self._slowest(scenario.copy_s, self._ranks)
        if scenario.strategy is Strategy.SYNCHRONOUS:
            seconds += self._write_s(2)
        return max(0, round(seconds * NS))

    def write_ns(self, hop: int) -> int:
        """One checkpoint's way to local disks (0), to peers (1), to the durable tier (2)."""
        return max(1, round(self._write_s(hop) * NS))

    def _write_s(self, hop: int) -> float:
        together_s, alone_s = self._writes[hop]
        nodes = self._scenario.plan.sizes.writing_nodes
        return max(together_s, self._slowest(alone_s, nodes))

    def _slowest(self, typical_s: float, count: int) -> float:
        if not self._uneven or typical_s == 0:
            return typical_s
        return slowest_s(
            typical_s, ranks=count, tail=self._tail, spread=self._spread, quantile=self._uniform()
        )

    def _uniform(self) -> float:
        """Even in 0 to 1, neither of them."""
        if self._at >= _BLOCK:
            self._block = (1.0 - self._times.random(_BLOCK)).tolist()
            self._at = 0
        drawn = self._block[self._at]
        self._at += 1
        return drawn if drawn < 1.0 else 0.9999999999999999
