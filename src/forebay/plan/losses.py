"""What checkpoints and failures take from a run: first order, and exact for Poisson failures.

Symbols: ``d`` pause, ``T`` useful time between checkpoints, ``M`` mean time between interruptions,
``R`` restart, ``L`` lag until a copy is where it survives. Times in seconds, losses as parts of 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

_HOPELESS = 100.0  # once in e^100 tries: no run of any length gets there


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Failures of one kind: their part of all, and what a restart after one goes back to.

    ``cadence_s``: time between the checkpoints that survive it; ``lag_s``: how long after a
    checkpoint its copy is there; ``restart_s``: detect, replace, relaunch, load; ``near``: every
    checkpoint survives it, so it follows the near cadence when that is changed.
    """

    share: float
    cadence_s: float
    lag_s: float
    restart_s: float
    near: bool = True


def young_s(pause_s: float, mtbf_s: float) -> float:
    """Young (1974): sqrt(2 d M)."""
    return math.sqrt(2 * pause_s * mtbf_s)


def daly_s(pause_s: float, mtbf_s: float) -> float:
    """Daly (2006), higher order: sqrt(2 d M) (1 + x/3 + x^2/9) - d, x = sqrt(d / 2M).

    M where d is 2M or more.
    """
    if pause_s >= 2 * mtbf_s:
        return mtbf_s
    x = math.sqrt(pause_s / (2 * mtbf_s))
    return young_s(pause_s, mtbf_s) * (1 + x / 3 + x * x / 9) - pause_s


def exact_goodput(*, useful_s: float, pause_s: float, mtbf_s: float, restart_s: float) -> float:
    """Useful part of a run with one kind of failure: T / (M e^(R/M) (e^((T+d)/M) - 1)).

    Failures are Poisson and may strike in a pause and in a restart.
    """
    if (restart_s + useful_s + pause_s) / mtbf_s > _HOPELESS:
        return 0.0
    wall_s = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((useful_s + pause_s) / mtbf_s)
    return useful_s / wall_s


def goodput(levels: Sequence[Level], *, pause_s: float, mtbf_s: float) -> float:
    """Useful part of a run with several kinds of failure, exact for Poisson failures.

    ``levels`` from the shortest cadence to the longest. A failure of kind i goes back to the last
    checkpoint of cadence i, after ``restart + lag`` seconds that may fail too; a failure meanwhile
    is recovered from the farther of the two kinds. With one level and no lag this is
    ``exact_goodput``. Solved by first-step analysis: expected times from each position, linear in
    each other, and geometric over the segments of a period (docs/planner.md has the derivation).
    """
    last = len(levels) - 1
    segment_s = levels[0].cadence_s + pause_s
    worst_s = max(level.restart_s + level.lag_s for level in levels)
    if (segment_s + worst_s) / mtbf_s > _HOPELESS:
        return 0.0
    constants, onward = _recoveries(levels, mtbf_s)
    through = math.exp(-segment_s / mtbf_s)
    fails = -math.expm1(-segment_s / mtbf_s)
    # from a segment's start: alpha + beta * next + sum(gamma[l] * start of period l)
    alpha = mtbf_s * fails + fails * sum(
        level.share * constant for level, constant in zip(levels, constants, strict=True)
    )
    gamma = [
        fails * sum(levels[kind].share * onward[kind][to] for kind in range(last + 1))
        for to in range(last + 1)
    ]
    beta = through
    count = 1.0
    for index in range(last + 1):
        if index:
            count = levels[index].cadence_s / levels[index - 1].cadence_s
            # the rest of what leads on leads back to an outer period's start
            back = sum(gamma[index:])
            log_power = count * math.log1p(-back) if back < 1 else -math.inf
            power = math.exp(log_power)
            total = -math.expm1(log_power) / back if back > 0 else count
            alpha, beta = alpha * total, power
            gamma = [each * total for each in gamma]
        stays = beta + sum(gamma[index + 1 :])  # 1 - gamma[index], without cancellation
        if stays <= 0:
            return 0.0
        alpha, beta = alpha / stays, beta / stays
        gamma = [0.0] * (index + 1) + [each / stays for each in gamma[index + 1 :]]
    return levels[last].cadence_s / alpha


def in_whole(levels: Sequence[Level]) -> tuple[Level, ...]:
    """The same levels as a run can have them: each cadence a whole number of the one before.

    A checkpoint that is due between two near ones is taken at the later one.
    """
    found: list[Level] = []
    for level in levels:
        if found:
            step_s = found[-1].cadence_s
            times = max(1, math.ceil(level.cadence_s / step_s - 1e-9))
            level = replace(level, cadence_s=times * step_s)  # noqa: PLW2901
        found.append(level)
    return tuple(found)


def _recoveries(levels: Sequence[Level], mtbf_s: float) -> tuple[list[float], list[list[float]]]:
    """Expected time to recover from each kind, and the odds of which period's start it leads to."""
    count = len(levels)
    constants = [0.0] * count
    onward = [[0.0] * count for _ in range(count)]
    for kind in reversed(range(count)):
        takes_s = levels[kind].restart_s + levels[kind].lag_s
        done = math.exp(-takes_s / mtbf_s)
        fails = -math.expm1(-takes_s / mtbf_s)
        # one less what fails again from here: in this form nothing cancels
        scale = 1 / (done + fails * sum(level.share for level in levels[kind + 1 :]))
        constant = mtbf_s * fails
        odds = [0.0] * count
        odds[kind] = done
        for farther in range(kind + 1, count):
            part = fails * levels[farther].share
            constant += part * constants[farther]
            odds = [mine + part * its for mine, its in zip(odds, onward[farther], strict=True)]
        constants[kind] = constant * scale
        onward[kind] = [each * scale for each in odds]
    return constants, onward


def first_order(levels: Sequence[Level], *, mtbf_s: float) -> tuple[float, float]:
    """Rework and restart as parts of the run: sum of share (T/2 + L) / M, and of share R / M."""
    rework = sum(level.share * (level.cadence_s / 2 + level.lag_s) for level in levels) / mtbf_s
    restart = sum(level.share * level.restart_s for level in levels) / mtbf_s
    return rework, restart


def at_cadence(levels: Sequence[Level], cadence_s: float) -> tuple[Level, ...]:
    """The same kinds of failure with a checkpoint every ``cadence_s``.

    Tiers that do not take every checkpoint keep their own cadence, unless it would be shorter.
    """
    return tuple(
        replace(level, cadence_s=cadence_s if level.near else max(level.cadence_s, cadence_s))
        for level in levels
    )


def best_cadence_s(
    levels: Sequence[Level], *, pause_s: float, mtbf_s: float, shortest_s: float = 0.0
) -> float:
    """The near cadence with the largest exact goodput, in seconds, ``shortest_s`` or longer.

    Golden-section search over the logarithm: the loss falls with the pauses and rises with rework.
    """
    low, high = math.log(max(shortest_s, pause_s / 100, 1e-6)), math.log(10 * mtbf_s)
    if high <= low:
        return math.exp(low)

    def loss(log_s: float) -> float:
        return -goodput(at_cadence(levels, math.exp(log_s)), pause_s=pause_s, mtbf_s=mtbf_s)

    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = loss(left), loss(right)
    while high - low > 1e-5:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = loss(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = loss(right)
    return math.exp((low + high) / 2)
