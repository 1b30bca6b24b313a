"""Device to slot: the copies of one save, and nothing else. One of the doors to torch.

On the CPU a save is one call that copies all parts with torch's own threads. With an accelerator
the arena is registered as pinned memory once, the copies run on a side stream behind the work
already queued, and the save waits for their event alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from forebay.capture.arena import Arena
from forebay.format.digests import digest
from forebay.watch.events import emit

if TYPE_CHECKING:
    from forebay.capture.layout import Part, Plan
    from forebay.capture.state import Leaf

# Types that copy_ may not know, or may change in passing, are copied as integers of their size.
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CUDA: Any = torch.cuda  # partly untyped in torch
_NATIVE = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
}


def carried_as(dtype: torch.dtype) -> torch.dtype:
    """The type under which elements of ``dtype`` are copied, bit for bit."""
    return dtype if dtype in _NATIVE else _AS_INTEGERS[dtype.itemsize]


def digest_of(leaf: Leaf) -> str:
    """BLAKE3 of a leaf's local bytes, row-major, as hex. Copies once where it is not on the CPU."""
    local = leaf.tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return digest(memoryview(local.view(-1).view(torch.uint8).numpy().data), threads=4).hex()


class Pages:
    """An arena's memory as one tensor, registered once as pinned where there is a CUDA device."""

    def __init__(self, arena: Arena, device: torch.device | None) -> None:
        self.base = torch.frombuffer(arena.mapping, dtype=torch.uint8)
        self.starts = [arena.head.image_start(slot) for slot in range(arena.head.slots)]
        self.stream: Any = None
        self._registered = 0
        if device is not None and device.type == "cuda":
            self._register()
            self.stream = _CUDA.Stream(device)

    def _register(self) -> None:
        """Pin the pages for the device; a failure leaves pageable copies, and says so."""
        runtime: Any = _CUDA.cudart()
        result = runtime.cudaHostRegister(self.base.data_ptr(), self.base.numel(), 0)
        if int(result) == 0:
            self._registered = self.base.data_ptr()
        else:
            emit("arena.not_pinned", level=30, cuda_error=int(result), bytes=self.base.numel())

    def close(self) -> None:
        """Unpin and let go of the memory."""
        if self._registered:
            with contextlib.suppress(RuntimeError):
                _CUDA.cudart().cudaHostUnregister(self._registered)
        self._registered = 0
        del self.base


class Copier:
    """Copies a plan's parts into the slots of one arena. Used by the thread that trains."""

    def __init__(self, pages: Pages, plan: Plan) -> None:
        self._plan = plan
        self._base = pages.base
        self._stream = pages.stream
        self._targets = [self._views(start) for start in pages.starts]

    def _views(self, image_start: int) -> list[torch.Tensor]:
        views = []
        for part in self._plan.parts:
            start = image_start + part.start
            flat = self._base[start : start + part.nbytes]
            dtype = carried_as(getattr(torch, part.dtype))
            views.append(flat.view(dtype).view(part.sizes))
        return views

    def copy(self, slot: int, leaves: Sequence[Leaf], step: int) -> None:
        """Copy every part into ``slot``; on return the host owns the bytes."""
        if not self._plan.parts:
            return
        with torch.no_grad():
            sources = [_source(part, leaves[part.leaf].tensor, step) for part in self._plan.parts]
            if self._stream is None:
                torch._foreach_copy_(self._targets[slot], sources)
                return
            self._stream.wait_stream(_CUDA.current_stream())
            with _CUDA.stream(self._stream):
                torch._foreach_copy_(self._targets[slot], sources, non_blocking=True)
                done = _CUDA.Event()
                done.record(self._stream)
            done.synchronize()

    def close(self) -> None:
        """Let go of the arena's memory."""
        self._targets.clear()
        del self._base


def _source(part: Part, tensor: torch.Tensor, step: int) -> torch.Tensor:
    if tensor.dtype not in _NATIVE:
        tensor = tensor.view(_AS_INTEGERS[tensor.dtype.itemsize])
    if part.stride:
        first = step * 2_654_435_761 % part.stride
        return tensor.view(-1)[first :: part.stride][: part.sizes[0]]
    if part.local is not None:
        for dim, (start, count) in enumerate(
            zip(part.local.offsets, part.local.sizes, strict=True)
        ):
            tensor = tensor.narrow(dim, start, count)
    return tensor
