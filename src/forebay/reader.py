"""Reading a run without torch: ``forebay.open(url)``. Tensors come back as numpy arrays."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.commit.catalog import Catalog
from forebay.errors import NotFoundError
from forebay.format import paths, tree
from forebay.format.dtypes import element_type
from forebay.format.manifest import Manifest
from forebay.format.slices import Box, TensorKey
from forebay.restore.fetch import fetch
from forebay.restore.reads import Want, plan_reads
from forebay.restore.source import StoreSource
from forebay.storage.store import open_store

# Types numpy lacks come back as integers of their size, bit for bit.
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A tensor of a checkpoint. ``fqn`` names its bytes: another path's when the two are tied."""

    path: str
    fqn: str
    dtype: str
    shape: tuple[int, ...]
    sharded: bool
    per_rank: bool

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return Box.whole(self.shape).elements * element_type(self.dtype).item_bytes


class Run:
    """The committed checkpoints of one run. Reads only; every byte is checked."""

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.store = open_store(url, make=False)
        self.catalog = Catalog(self.store)
        self.catalog.require_run()

    def steps(self) -> list[int]:
        """Committed steps, oldest first."""
        return self.catalog.steps()

    def manifest(self, step: int | None = None) -> Manifest:
        """The manifest of ``step``, or of the newest. Raises NotFoundError, DamagedError."""
        if step is None:
            step = self.catalog.latest()
            if step is None:
                raise NotFoundError(f"{self.store.url}: has no committed checkpoint yet")
        return self.catalog.manifest(step)

    def tensors(self, step: int | None = None) -> dict[str, TensorInfo]:
        """Tensors that ranks hold in common, by path, in the state's order."""
        return {
            entry.path: _info(entry, per_rank=False)
            for entry in self.catalog.entries(self.manifest(step))
            if isinstance(entry, tree.Tensor)
        }

    def per_rank_entries(self, step: int | None, rank: int) -> list[tree.Entry]:
        """What one rank declared as its own. Raises NotFoundError when there is no such rank."""
        manifest = self.manifest(step)
        for node in range(manifest.nodes):
            for shard in self.catalog.record(manifest, node).shards:
                if shard.rank == rank:
                    return tree.read_tree(shard.own, f"per-rank entries of rank {rank}")
        raise NotFoundError(
            f"{self.store.url}: step {manifest.step} was saved on {manifest.world_size} ranks, "
            f"there is no rank {rank}"
        )

    def values(self, step: int | None = None, rank: int | None = None) -> dict[str, Any]:
        """Values by path: what ranks hold in common, or what ``rank`` declared as its own."""
        entries: Sequence[tree.Entry]
        if rank is None:
            entries = self.catalog.entries(self.manifest(step))
        else:
            entries = self.per_rank_entries(step, rank)
        return {
            entry.path: tree.decode_value(entry.data, entry.path)
            for entry in entries
            if isinstance(entry, tree.Value)
        }

    def read(self, step: int | None, fqn: str, rank: int | None = None) -> np.ndarray[Any, Any]:
        """One whole tensor. bfloat16 and 8-bit floats come as unsigned integers, bit for bit.

        ``fqn`` is a path as ``tensors`` lists it; dots for slashes are understood where only one
        tensor can be meant. ``rank`` selects a tensor that was declared per rank.
        """
        manifest = self.manifest(step)
        if rank is None:
            known = self.tensors(manifest.step)
        else:
            known = {
                entry.path: _info(entry, per_rank=True)
                for entry in self.per_rank_entries(manifest.step, rank)
                if isinstance(entry, tree.Tensor)
            }
        info = _find(known, fqn, f"{self.store.url}: step {manifest.step}")
        key = TensorKey(info.fqn, rank)
        want = Want(key, info.dtype, info.shape, Box.whole(info.shape))
        stored = [s for s in self.catalog.slices(manifest, [info.fqn]) if s.slice.key == key]
        source = StoreSource("durable", self.store)
        found = fetch(
            plan_reads([want], stored), [source], allocate=lambda n: memoryview(bytearray(n))
        )
        kind = element_type(info.dtype)
        dtype = np.dtype(kind.numpy) if kind.numpy else np.dtype(_BITS[kind.item_bytes])
        return np.frombuffer(found.buffers[0], dtype=dtype).reshape(info.shape)


def _info(entry: tree.Tensor, *, per_rank: bool) -> TensorInfo:
    return TensorInfo(
        path=entry.path,
        fqn=entry.fqn,
        dtype=entry.dtype,
        shape=entry.shape,
        sharded=entry.sharded,
        per_rank=per_rank,
    )


def _find(known: dict[str, TensorInfo], fqn: str, where: str) -> TensorInfo:
    if fqn in known:
        return known[fqn]
    alike = [path for path in known if path.replace("/", ".") == fqn]
    if len(alike) == 1:
        return known[alike[0]]
    near = [path for path in known if paths.split(path)[-1:] == paths.split(fqn)[-1:]][:3]
    hint = f"; there are {', '.join(near)}" if near else "; `forebay show` lists what there is"
    raise NotFoundError(f"{where}: no tensor {fqn!r}{hint}")


def open(url: str | os.PathLike[str]) -> Run:  # noqa: A001 - the public name is forebay.open
    """Open a run for reading. Raises NotFoundError for a place that holds none."""
    return Run(url)
