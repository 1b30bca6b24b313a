"""A simulation in words: the rows that terminal and page show alike."""

from __future__ import annotations

from forebay.plan.compare import Comparison, Row
from forebay.plan.histogram import Histogram
from forebay.plan.inputs import TIERS
from forebay.plan.scenario import NS, Strategy
from forebay.plan.sim_document import KINDS, SOURCES, filesystem_of
from forebay.plan.simulate import Simulation
from forebay.plan.tally import PARTS
from forebay.units import show_count, show_fraction, show_rate, show_seconds

Rows = list[tuple[str, ...]]
TIME_COLUMNS = ("what", "number", "p50", "p99", "longest")
COMPARED = ("strategy", "p99", "pause", "rework", "restart", "goodput", "peak")
"""For a narrow terminal; ``p99`` of the pauses, ``peak``: the durable tier's fastest write."""
MORE_COMPARED = ("interference", "p50 to durable", "asked of the filesystem", "skipped a run")


def part_rows(found: Simulation) -> Rows:
    """Each part of the run, and the goodput that the plan works out beside it."""
    rows: Rows = [(name, show_fraction(found.part(name))) for name in PARTS]
    error = found.standard_error
    about = "" if error is None else f" (standard error {show_fraction(error)})"
    rows.append(("goodput", f"{found.goodput * 100:.2f} %{about}"))
    if found.scenario.tiers[0]:
        rows.append(("goodput as planned", f"{found.scenario.plan.goodput * 100:.2f} %"))
    return rows


def time_rows(found: Simulation) -> Rows:
    """Pauses, ways to the tiers, lost work and restarts."""
    tally = found.tally
    rows: Rows = [("pause", *_times(tally.pauses))]
    for index, name in enumerate(TIERS):
        if found.scenario.tiers[index] and tally.reached[index].count:
            rows.append((f"complete in {name}", *_times(tally.reached[index])))
    rows.append(("work lost a failure", *_times(tally.lost)))
    rows.append(("failure to training", *_times(tally.restarts)))
    return rows


def count_rows(found: Simulation) -> Rows:
    """What was counted, a run."""
    tally, runs = found.tally, found.runs

    def per(count: int) -> str:
        return show_count(round(count / runs, 1))

    kinds = ", ".join(
        f"{name} {per(count)}" for name, count in zip(KINDS, tally.failures, strict=True)
    )
    back = ", ".join(
        f"{name} {per(count)}"
        for name, count in zip(SOURCES, tally.recovered, strict=True)
        if count
    )
    return [
        ("checkpoints due", per(tally.due)),
        ("taken", per(tally.taken)),
        ("skipped: no free slot", per(tally.skipped)),
        ("torn by a failure in the pause", per(tally.torn)),
        ("replaced before they drained", per(tally.superseded)),
        ("lost on their way", per(tally.lost_in_flight)),
        ("failures", f"{per(sum(tally.failures))}: {kinds}"),
        ("failures in a restart", per(tally.failed_restarts)),
        ("went back to", back or "-"),
    ]


def filesystem_rows(found: Simulation) -> Rows:
    """What the durable tier saw."""
    seen = filesystem_of(found)
    return [
        ("fastest write", _share(seen["peak_bytes_per_s"], seen["peak_share"])),
        ("asked for by the nodes", _share(seen["asked_bytes_per_s"], seen["asked_share"])),
        ("average", _share(seen["mean_bytes_per_s"], seen["mean_share"])),
        ("written to", f"{show_fraction(seen['busy_part'])} of the time"),
    ]


def compared_rows(found: Comparison, *, more: bool = False) -> Rows:
    """A row a strategy and value, as ``COMPARED``, with ``more`` as ``MORE_COMPARED`` too.

    Where an input is varied its value stands before it.
    """
    rows: Rows = []
    for row in found.rows:
        cells = _compared(row) + (_more(row) if more else ())
        if found.variable is not None:
            cells = (found.variable.given.kind.show(row.value), *cells)
        rows.append(cells)
    return rows


def cadences_text(found: Comparison) -> str:
    """How often each strategy writes, from the first value's rows."""
    texts = []
    for row in found.rows[: len(Strategy)]:
        every = f"every {show_seconds(row.cadence_s)}"
        if row.durable_cadence_s != row.cadence_s:
            every += f", durable every {show_seconds(row.durable_cadence_s)}"
        texts.append(f"{row.strategy.value} {every}")
    return "; ".join(texts)


def _compared(row: Row) -> tuple[str, ...]:
    found = row.simulation
    if found is None:
        return (row.strategy.value, "-", "-", "-", "-", "none", "-")
    return (
        row.strategy.value,
        show_seconds(found.tally.pauses.quantile(0.99) / NS),
        show_fraction(found.part("pause")),
        show_fraction(found.part("rework")),
        show_fraction(found.part("restart")),
        f"{found.goodput * 100:.2f} %",
        show_rate(filesystem_of(found)["peak_bytes_per_s"]),
    )


def _more(row: Row) -> tuple[str, ...]:
    found = row.simulation
    if found is None:
        return ("-",) * len(MORE_COMPARED)
    durable = found.tally.reached[-1]
    return (
        show_fraction(found.part("interference")),
        show_seconds(durable.quantile(0.5) / NS) if durable.count else "-",
        show_rate(filesystem_of(found)["asked_bytes_per_s"]),
        show_count(round(found.tally.skipped / found.runs, 1)),
    )


def _share(bytes_per_s: float, share: float | None) -> str:
    text = show_rate(bytes_per_s)
    return text if share is None or share > 1 else f"{text}, {show_fraction(share)}"


def _times(each: Histogram) -> tuple[str, str, str, str]:
    if not each.count:
        return "0", "-", "-", "-"
    return (
        show_count(each.count),
        show_seconds(each.quantile(0.5) / NS),
        show_seconds(each.quantile(0.99) / NS),
        show_seconds(each.most / NS),
    )
