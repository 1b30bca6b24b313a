"""The fleet: tokens, FLOPs and MFU to days and GPU-hours, and what checkpoints add to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from forebay.plan.inputs import Inputs
from forebay.units import show_count, show_seconds

HOUR_S = 3600.0
_MFU_STEPS = (-0.05, -0.02, -0.01, 0.01, 0.02, 0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Time to train, with and without what checkpoints and failures take. Times in seconds."""

    flops: float
    ideal_s: float
    """At the given MFU, without a loss."""
    train_s: float
    """With the losses of the plan."""
    added_s: float
    gpu_hours: float
    gpu_hours_added: float
    mfu_sensitivity: tuple[tuple[float, float], ...]
    """Pairs of MFU and time to train."""
    deadline_s: float | None
    gpus_for_deadline: int | None
    """Fewest GPUs, in whole replicas of the model, that meet the deadline; None: no number does."""

    @property
    def train_text(self) -> str:
        """Time and GPU-hours with losses, for people."""
        return _spent(self.train_s, self.gpu_hours)

    @property
    def added_text(self) -> str:
        """What the losses add to both, for people."""
        return _spent(self.added_s, self.gpu_hours_added)


def ideal_s(inputs: Inputs, gpus: int, mfu: float) -> float:
    """Seconds to train without losses: parameters x tokens x FLOPs each / (GPUs x peak x MFU)."""
    return total_flops(inputs) / (gpus * inputs.cluster.peak_flops * mfu)


def total_flops(inputs: Inputs) -> float:
    """Floating-point operations of the whole training."""
    training = inputs.training
    return inputs.model.params * training.tokens * training.flops_per_param_token


def fleet_of(inputs: Inputs, goodput: float, goodput_at: Callable[[int], float]) -> Fleet:
    """The fleet equation at this plan's goodput; ``goodput_at`` gives that of other GPU counts."""
    gpus, training = inputs.cluster.gpus, inputs.training
    ideal = ideal_s(inputs, gpus, training.mfu)
    train = ideal / goodput if goodput else float("inf")
    return Fleet(
        flops=total_flops(inputs),
        ideal_s=ideal,
        train_s=train,
        added_s=train - ideal,
        gpu_hours=gpus * train / HOUR_S,
        gpu_hours_added=gpus * (train - ideal) / HOUR_S,
        mfu_sensitivity=tuple(
            (mfu, ideal_s(inputs, gpus, mfu) / goodput if goodput else float("inf"))
            for step in _MFU_STEPS
            if 0 < (mfu := training.mfu + step) <= 1
        ),
        deadline_s=training.deadline_s,
        gpus_for_deadline=_gpus_for(inputs, training.deadline_s, goodput_at),
    )


def replica_gpus(inputs: Inputs) -> int:
    """GPUs that come and go together: a replica of the model, in whole nodes."""
    layout, per_node = inputs.layout, inputs.cluster.gpus_per_node
    replica = layout.tp * layout.pp * layout.cp
    while replica % per_node:
        replica += layout.tp * layout.pp * layout.cp
    return replica


def _spent(seconds: float, gpu_hours: float) -> str:
    hours = gpu_hours if math.isinf(gpu_hours) else round(gpu_hours)
    return f"{show_seconds(seconds)}, {show_count(hours)} GPU-hours"


def _gpus_for(
    inputs: Inputs, deadline_s: float | None, goodput_at: Callable[[int], float]
) -> int | None:
    """The fewest GPUs by bisection: more of them train faster until failures eat the gain."""
    if deadline_s is None:
        return None
    step = replica_gpus(inputs)

    def in_time(count: int) -> bool:
        good = goodput_at(count * step)
        return good > 0 and ideal_s(inputs, count * step, inputs.training.mfu) / good <= deadline_s

    high = 1
    while not in_time(high):
        high *= 2
        if high * step > 2**26:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if in_time(middle) else (middle, high)
    return high * step
