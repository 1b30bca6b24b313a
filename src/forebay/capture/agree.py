"""The one small exchange at start-up: attempt, chosen step, which replicas are held by whom.

Constant size on every rank, whatever the world size. Never called from a save that was prepared.
Without torch.distributed it is an exchange with oneself. One of the doors to torch.
"""

from __future__ import annotations

import datetime
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from forebay.capture.ledger import error_of
from forebay.capture.topology import SINGLE, Topology, from_environment, place
from forebay.errors import DeadlineError, ForebayError, UsageError
from forebay.format.names import check_start

BUCKETS = 16_384
_LIMIT = datetime.timedelta(minutes=10)
_MESSAGE_BYTES = 2**28


def group_is_up() -> bool:
    """True when torch.distributed can carry an exchange."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class Exchange:
    """Exchanges over a gloo group of all ranks, made at first use. All ranks call, or none."""

    def __init__(self) -> None:
        self._group: Any = None

    def are_there(self) -> bool:
        """True when there are other ranks to speak with."""
        return group_is_up()

    def _over(self) -> Any:
        if self._group is None:
            plain = dist.get_backend() == "gloo"
            self._group = (
                dist.group.WORLD if plain else dist.new_group(backend="gloo", timeout=_LIMIT)
            )
        return self._group

    def from_first(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank."""
        if not group_is_up():
            return data or b""
        group = self._over()
        size = torch.tensor([len(data or b"")], dtype=torch.int64)
        dist.broadcast(size, src=0, group=group)
        buffer = torch.zeros(max(int(size), 1), dtype=torch.uint8)
        if data and dist.get_rank() == 0:
            buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(buffer, src=0, group=group)
        return buffer[: int(size)].numpy().tobytes()

    def agreed_buckets(self, marks: Mapping[int, int]) -> set[int]:
        """Buckets whose mark is equal on every rank that has one. Alone, only with itself: all."""
        if not group_is_up():
            return set()
        group = self._over()
        top = 2**62
        low = torch.full((BUCKETS,), top, dtype=torch.int64)
        high = torch.full((BUCKETS,), -1, dtype=torch.int64)
        for bucket, mark in marks.items():
            low[bucket] = high[bucket] = mark
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
        return {bucket for bucket in marks if int(low[bucket]) == int(high[bucket])}

    def swap(self, said: Mapping[int, bytes]) -> dict[int, bytes]:
        """To each of some ranks its word, and from each the same number of bytes.

        Whoever this rank names has to name this rank.
        """
        heard = {rank: bytearray(len(word)) for rank, word in said.items()}
        self.pass_on(
            [(rank, memoryview(bytearray(word))) for rank, word in said.items()],
            [(rank, memoryview(word)) for rank, word in heard.items()],
        )
        return {rank: bytes(word) for rank, word in heard.items()}

    def pass_on(
        self,
        given: Sequence[tuple[int, memoryview]],
        taken: Sequence[tuple[int, memoryview]],
    ) -> None:
        """Send bytes to ranks, and fill memory with what ranks send, in the order of each pair.

        Raises DeadlineError when another rank does not come to it.
        """
        group, tags = self._over(), Counter[tuple[bool, int]]()
        pending = []
        try:
            for gives, moves in ((False, taken), (True, given)):
                move = dist.isend if gives else dist.irecv
                for rank, view in moves:
                    for at in range(0, view.nbytes, _MESSAGE_BYTES):
                        part = torch.frombuffer(view[at : at + _MESSAGE_BYTES], dtype=torch.uint8)
                        pending.append(move(part, rank, group=group, tag=tags[gives, rank]))
                        tags[gives, rank] += 1
            for one in pending:
                if one is not None:
                    one.wait()
        except RuntimeError as error:
            raise DeadlineError(f"restore: a rank did not pass on what it read: {error}") from None

    def broadcast(self, view: memoryview, reader: int) -> None:
        """Fill memory with a rank's bytes, on every rank. Raises DeadlineError."""
        group = self._over()
        try:
            for at in range(0, view.nbytes, _MESSAGE_BYTES):
                part = torch.frombuffer(view[at : at + _MESSAGE_BYTES], dtype=torch.uint8)
                dist.broadcast(part, src=reader, group=group)
        except RuntimeError as error:
            raise DeadlineError(f"restore: rank {reader} gave nothing: {error}") from None

    def any_of(self, marks: bytes) -> bytes:
        """Byte by byte the largest over all ranks, which all give equally many."""
        if not group_is_up() or not marks:
            return marks
        buffer = torch.frombuffer(bytearray(marks), dtype=torch.uint8)
        dist.all_reduce(buffer, op=dist.ReduceOp.MAX, group=self._over())
        return buffer.numpy().tobytes()

    def attempt(self, step: Callable[[], None]) -> ForebayError | None:
        """Do something on all ranks: the first failure that one of them has, on each."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - the others wait in the exchange
            return self.together(as_failure(error))
        return self.together(None)

    def together(self, failure: ForebayError | None) -> ForebayError | None:
        """This rank's failure, or that of the first rank that has one; None when all went well."""
        text = None if failure is None else f"{failure.kind} {failure}"
        first = self.first_failure(text)
        if first is None or failure is not None:
            return failure
        kind, _, text = first[1].partition(" ")
        return error_of(kind, f"rank {first[0]}: {text}")

    def first_failure(self, failure: str | None) -> tuple[int, str] | None:
        """The failure of the lowest rank that has one, on every rank; None when all went well."""
        if not group_is_up():
            return (0, failure) if failure is not None else None
        group = self._over()
        rank, world = dist.get_rank(), dist.get_world_size()
        lowest = torch.tensor([rank if failure is not None else world], dtype=torch.int64)
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
        source = int(lowest)
        if source == world:
            return None
        text = (failure or "").encode()[:4000].ljust(4000, b"\0") if rank == source else bytes(4000)
        buffer = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        dist.broadcast(buffer, src=source, group=group)
        return source, buffer.numpy().tobytes().rstrip(b"\0").decode(errors="replace")


def as_failure(error: Exception) -> ForebayError:
    """What went wrong as one of ours, so that all ranks can end together."""
    if isinstance(error, ForebayError):
        return error
    failure = ForebayError(f"a bug: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def discover_topology() -> Topology:
    """This process's place in the job: from the launcher, else torch.distributed, else alone."""
    found = from_environment()
    if found is None and group_is_up():
        return place(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            local_rank=None,
            local_size=None,
            node=None,
            nodes=None,
        )
    return found or SINGLE


def choose_attempt(given: str | None, topology: Topology, exchange: Exchange) -> str:
    """Name this start of the job, equally on every rank and unlike any other start.

    Taken from ``given`` or ``$FOREBAY_ATTEMPT``; else drawn by rank 0 and broadcast; else, where
    ranks cannot speak, from the launcher's run id and restart count. Raises UsageError when there
    is none of these.
    """
    stated = given or os.environ.get("FOREBAY_ATTEMPT")
    if stated:
        return check_start(stated)
    if topology.world_size == 1 or group_is_up():
        drawn = time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + "-" + secrets.token_hex(4)
        return check_start(exchange.from_first(drawn.encode()).decode())
    env = os.environ
    run, restart = env.get("TORCHELASTIC_RUN_ID"), env.get("TORCHELASTIC_RESTART_COUNT", "0")
    if run in (None, "", "none"):
        run, restart = env.get("SLURM_JOB_ID"), env.get("SLURM_RESTART_COUNT", "0")
    if not run:
        raise UsageError(
            f"attempt: {topology.world_size} ranks cannot agree on a name for this start: call "
            "torch.distributed.init_process_group() first, or set FOREBAY_ATTEMPT on all ranks"
        )
    safe = "".join(c if c.isalnum() or c in "_-" else "-" for c in run)[:60]
    return check_start(f"{safe}-r{restart}")
