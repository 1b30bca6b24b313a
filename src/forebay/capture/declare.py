"""What a user says about an entry of the state: it is per rank, it is a plain value."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from forebay.capture.rng import Rng

T = TypeVar("T")


class PerRank(Generic[T]):
    """Marks ``item`` as this rank's own: saved and restored by rank, never compared."""

    __slots__ = ("item",)

    def __init__(self, item: T) -> None:
        self.item = item


class ValueBox(Generic[T]):
    """A plain value that restore can replace: read and set it through ``value``."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"value({self.value!r})"


def per_rank(item: T) -> PerRank[T]:
    """Declare that ``item`` (RNG, data loader, any part of a state) belongs to this rank alone.

    What differs between ranks and is not declared so is refused at the commit.
    """
    return PerRank(item)


def value(initial: T) -> ValueBox[T]:
    """A box for a plain value: ``step = forebay.value(0)``; set ``step.value`` before each save."""
    return ValueBox(initial)


def rng() -> Rng:
    """The random generators of this process; usually ``forebay.per_rank(forebay.rng())``."""
    return Rng()


def unwrap(item: Any) -> tuple[Any, bool]:
    """``(inner item, declared per rank)``."""
    own = False
    while isinstance(item, PerRank):
        item, own = item.item, True
    return item, own
