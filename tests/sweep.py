"""A sweep of faults: each kind at each request of a course of action that was recorded first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from forebay.testing.proxy import Fault, FaultProxy, Seen

WORKERS = 8
TIMES = (1, 3)
_READS = ("short", "corrupt", "reset_reply")

KINDS: dict[str, Fault] = {
    "503": Fault(do="status"),
    "500": Fault(do="status", status=500, code="InternalError"),
    "403": Fault(do="status", status=403, code="AccessDenied"),
    "reset before": Fault(do="reset_request"),
    "reply lost": Fault(do="lose_reply"),
    "reply cut": Fault(do="reset_reply", at_bytes=20),
    "reply short": Fault(do="short", at_bytes=20),
    "reply empty": Fault(do="short"),
    "reply corrupt": Fault(do="corrupt"),
    "slow": Fault(do="slow", bytes_per_s=4e6),
    "hang": Fault(do="hang"),
}


@dataclass(frozen=True)
class Case:
    """One fault: of ``kind``, at request ``index`` (0 is the first), ``times`` in a row."""

    kind: str
    index: int
    times: int
    request: str

    def __str__(self) -> str:
        return f"{self.kind} x{self.times} at request {self.index} ({self.request})"

    @property
    def fault(self) -> Fault:
        """As the proxy takes it; the bit that is changed differs from request to request."""
        made = KINDS[self.kind]
        at_bytes = 7919 * (self.index + 1) if made.do == "corrupt" else made.at_bytes
        return Fault(
            do=made.do,
            after=self.index + 1,
            times=self.times,
            status=made.status,
            code=made.code,
            at_bytes=at_bytes,
            bytes_per_s=made.bytes_per_s,
        )


def cases(recorded: Sequence[Seen]) -> Iterator[Case]:
    """Every fault that can be at each of these requests.

    Nothing tells a list of names with another name in it from the right one: no list is corrupted.
    """
    for (kind, fault), (index, seen), times in itertools.product(
        KINDS.items(), enumerate(recorded), TIMES
    ):
        has_body = seen.method in ("GET", "POST")
        if (fault.do in _READS and not has_body) or (fault.do == "corrupt" and seen.is_list):
            continue
        yield Case(kind, index, times, f"{seen.method} {seen.path}?{seen.query[:24]}")


def sweep(
    upstream: str, todo: Sequence[Case], run: Callable[[FaultProxy, Case], list[str]]
) -> list[str]:
    """Run each case behind a proxy of its own, many at once: mostly they wait. What went wrong."""

    def one(case: Case) -> list[str]:
        with FaultProxy(upstream) as proxy:
            try:
                return [f"{case}: {what}" for what in run(proxy, case)]
            except Exception as error:
                return [f"{case}: {type(error).__name__}: {error}"]

    with ThreadPoolExecutor(WORKERS) as pool:
        return [what for found in pool.map(one, todo) for what in found]
