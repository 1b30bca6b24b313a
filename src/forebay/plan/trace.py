"""One checkpoint as a trace for chrome://tracing and Perfetto: a process a node, a lane a hop.

In the Trace Event Format: an object with ``traceEvents``, times in microseconds.
"""

from __future__ import annotations

from typing import Any

from forebay.plan.scenario import Scenario, Strategy
from forebay.plan.tail import slowest_s

MOST_NODES = 256
_US = 1e6
_LANES = ("training", "device to host", "to local disk", "to peer", "to durable")
_STREAM = 2**31  # apart from those of the runs


def trace_of(scenario: Scenario, *, seed: int) -> dict[str, Any]:
    """One checkpoint of ``scenario`` with each node's own times, the first that goes everywhere.

    Of more than ``MOST_NODES`` nodes that many are shown: the slowest in each hop, and others
    evenly chosen. Pause and tiers end with the slowest of all, shown or not.
    """
    import numpy as np

    plan = scenario.plan
    checkpoint, sizes = plan.inputs.checkpoint, plan.sizes
    nodes, (_, local, peer, _) = sizes.writing_nodes, scenario.tiers
    draw = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(_STREAM,))))

    def times(typical_s: float, ranks: int = 1) -> list[float]:
        """Seconds of each node, of the slowest of its ``ranks``."""
        even = np.clip(draw.random(nodes), 1e-12, 1 - 1e-12).tolist()
        tail, spread = checkpoint.tail, checkpoint.spread
        return [
            slowest_s(typical_s, ranks=ranks, tail=tail, spread=spread, quantile=each)
            if typical_s
            else 0.0
            for each in even
        ]

    hops = {hop.name: hop for hop in plan.hops}
    fixed_s, copies = checkpoint.fixed_s, times(plan.pause.copy_s, sizes.writers_per_node)
    if checkpoint.pause_s is not None:
        fixed_s, copies = 0.0, [checkpoint.pause_s] * nodes
    locals_ = times(hops["nvme"].seconds) if local else [0.0] * nodes
    peers = times(hops["peer"].seconds) if peer else [0.0] * nodes
    links = times(scenario.link_s)
    drains = [max(scenario.drain_s, link_s) for link_s in links]
    copied_s = fixed_s + max(copies)
    in_pause = scenario.strategy is Strategy.SYNCHRONOUS
    pause_s = copied_s + (max(drains) if in_pause else 0.0)
    begin_s = copied_s if in_pause else pause_s
    events: list[dict[str, Any]] = []
    for node in _shown(nodes, copies, locals_, peers, drains):
        pid, at_s = node + 1, begin_s
        events.append(_named("process_name", pid, 0, f"node {node}"))
        events.append(_span(pid, 0, "pause", 0.0, pause_s))
        events.append(_span(pid, 1, "copy", fixed_s, copies[node], sizes.bytes_per_node))
        lanes = {0, 1, 4}
        if local:
            events.append(_span(pid, 2, "write", at_s, locals_[node], sizes.bytes_per_node))
            at_s += locals_[node]
            lanes.add(2)
        if peer:
            events.append(_span(pid, 3, "send", at_s, peers[node], sizes.bytes_per_node))
            lanes.add(3)
        events.append(_span(pid, 4, "drain", at_s, drains[node], sizes.bytes_per_node))
        events += [_named("thread_name", pid, lane, _LANES[lane]) for lane in sorted(lanes)]
    local_s = [begin_s + each for each in locals_]
    reached = {"memory": copied_s}
    if local:
        reached["local"] = max(local_s)
    if peer:
        reached["peer"] = max(a + b for a, b in zip(local_s, peers, strict=True))
    reached["durable"] = max(a + b for a, b in zip(local_s, drains, strict=True))
    events.append(_named("process_name", 0, 0, "the job"))
    events.append(_named("thread_name", 0, 0, "complete"))
    for tier, at_s in reached.items():
        events.append(
            {"ph": "i", "s": "g", "pid": 0, "tid": 0, "name": f"{tier} complete", "cat": "tier",
             "ts": at_s * _US}
        )  # fmt: skip
    events += _filesystem(local_s, drains, sizes.bytes_per_node)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "title": plan.inputs.title,
            "strategy": scenario.strategy.value,
            "seed": seed,
            "nodes": nodes,
            "bytes_per_node": sizes.bytes_per_node,
        },
    }


def _shown(nodes: int, *hops: list[float]) -> list[int]:
    if nodes <= MOST_NODES:
        return list(range(nodes))
    slowest = {times.index(max(times)) for times in hops}
    step = nodes / (MOST_NODES - len(slowest))
    even = {int(index * step) for index in range(MOST_NODES - len(slowest))}
    return sorted(slowest | even)


def _filesystem(begins: list[float], drains: list[float], nbytes: float) -> list[dict[str, Any]]:
    """How fast all nodes together write to the durable tier, at every tenth of the way."""
    spans = list(zip(begins, drains, strict=True))
    first, last = min(begins), max(begin + took for begin, took in spans)
    marks = [first + (last - first) * step / 10 for step in range(11)]
    events = []
    for mark in marks:
        rate = sum(nbytes / took for begin, took in spans if begin <= mark < begin + took)
        events.append(
            {"ph": "C", "pid": 0, "tid": 0, "name": "filesystem", "ts": mark * _US,
             "args": {"GB/s": rate / 1e9}}
        )  # fmt: skip
    return events


def _span(
    pid: int, lane: int, name: str, begin_s: float, took_s: float, nbytes: float = 0.0
) -> dict[str, Any]:
    span = {"ph": "X", "pid": pid, "tid": lane, "name": name, "cat": _LANES[lane],
            "ts": begin_s * _US, "dur": took_s * _US}  # fmt: skip
    return {**span, "args": {"bytes": nbytes}} if nbytes else span


def _named(what: str, pid: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": lane, "name": what, "args": {"name": name}}
