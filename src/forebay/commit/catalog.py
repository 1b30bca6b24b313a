"""Which checkpoints a run has. A step exists if its manifest does."""

from __future__ import annotations

import functools
import io
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from forebay.errors import DamagedError, FormatError, NotFoundError
from forebay.format import names, tree
from forebay.format.digests import digest
from forebay.format.manifest import MAX_MANIFEST_BYTES, Manifest, Ref, read_manifest
from forebay.format.packed import pack, unpack
from forebay.format.record import MAX_RECORD_BYTES, Record, read_record
from forebay.format.stored import Ints, Stored, Table
from forebay.storage.reread import read_checked, reread
from forebay.storage.store import Store

MAX_TREE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """An attempt at a step that has no manifest: which nodes' records are there, how many it needs.

    ``nodes`` is None until one record is there. ``age_s`` counts from its newest object.
    """

    step: int
    attempt: str
    present: tuple[int, ...]
    nodes: int | None
    age_s: float

    @property
    def complete(self) -> bool:
        """True when only the commit is missing."""
        return self.nodes is not None and len(self.present) == self.nodes


class Catalog:
    """Reads the checkpoints of the run in ``store``. Changes nothing."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self._clock = clock

    def steps(self) -> list[int]:
        """Committed steps, oldest first."""
        found = (
            names.parse_manifest_key(info.key) for info in self.store.list(names.MANIFEST_PREFIX)
        )
        return [step for step in found if step is not None]

    def latest(self) -> int | None:
        """The newest committed step, or None."""
        return max(self.steps(), default=None)

    def require_run(self) -> None:
        """Raise NotFoundError unless something of a run is there."""
        for prefix in (names.MANIFEST_PREFIX, names.DATA_PREFIX):
            if next(iter(self.store.list(prefix)), None) is not None:
                return
        raise NotFoundError(
            f"{self.store.url}: not a forebay run: neither manifests/ nor data/ is there"
        )

    def manifest_bytes(self, step: int) -> bytes:
        """The manifest as stored, and intact. Raises as ``manifest`` does."""
        return self._manifest(step)[0]

    def _manifest(self, step: int) -> tuple[bytes, Manifest]:
        key = names.manifest_key(step)
        where = f"{self.store.url}/{key}"
        try:
            data, found = read_checked(
                self.store, key, MAX_MANIFEST_BYTES, lambda d: (d, read_manifest(d, where))
            )
        except NotFoundError:
            self.require_run()
            there = self.steps()[-5:]
            newest = f"newest are {', '.join(map(str, there))}" if there else "it has none yet"
            raise NotFoundError(f"{self.store.url}: no committed step {step}: {newest}") from None
        if found.step != step:
            raise FormatError(f"{where}: is the manifest of step {found.step}")
        return data, found

    def manifest(self, step: int) -> Manifest:
        """The manifest of a step. Raises FormatError when it is damaged.

        NotFoundError, when there is none, names the newest steps there are.
        """
        return self._manifest(step)[1]

    def attempt_of(self, step: int) -> str | None:
        """Whose manifest of a step stands; None without one. Raises FormatError as ``manifest``."""
        if self.store.head(names.manifest_key(step)) is None:
            return None
        try:
            return self.manifest(step).attempt
        except NotFoundError:  # deleted in between
            return None

    def checked(self, ref: Ref, limit: int) -> bytes:
        """An object that a manifest names. Raises DamagedError unless size and digest are right."""
        where = f"{self.store.url}/{ref.key}"

        def as_written(data: bytes) -> bytes:
            if len(data) != ref.nbytes:
                raise DamagedError(f"{where}: expected {ref.nbytes} bytes, found {len(data)}")
            found = digest(data).hex()
            if found != ref.digest:
                raise DamagedError(
                    f"{where}: expected digest {ref.digest[:16]}, found {found[:16]}"
                )
            return data

        try:
            return read_checked(self.store, ref.key, limit, as_written)
        except NotFoundError:
            raise DamagedError(f"{where}: is gone, the manifest names it") from None

    def record(self, manifest: Manifest, node: int) -> Record:
        """The record of a node, checked against the manifest."""
        ref = manifest.records[node]
        record = read_record(self.checked(ref, MAX_RECORD_BYTES), f"{self.store.url}/{ref.key}")
        if (record.step, record.attempt, record.node) != (manifest.step, manifest.attempt, node):
            raise FormatError(f"{self.store.url}/{ref.key}: belongs to another node or step")
        return record

    def entries(self, manifest: Manifest) -> list[tree.Entry]:
        """The state's entries that ranks hold in common."""
        return unpack_entries(
            self.checked(manifest.state, MAX_TREE_BYTES), f"{self.store.url}/{manifest.state.key}"
        )

    def slices(self, manifest: Manifest, fqns: Sequence[str] | None = None) -> Iterator[Stored]:
        """Slices of the named tensors, from only the parts of the index that hold them."""
        for table in self.tables(manifest, fqns):
            yield from table

    def tables(
        self,
        manifest: Manifest,
        fqns: Sequence[str] | None = None,
        choose: Callable[[Table], Ints] | None = None,
    ) -> Iterator[Table]:
        """As ``slices``, in tables; ``choose`` gives the rows of one that are wanted at all."""
        from forebay.format.index import read_tables  # pyarrow is large: only who needs it

        where = f"{self.store.url}/{manifest.index.key}"
        if fqns is None:
            found = read_tables(self.checked(manifest.index, 1 << 34), None, where, choose)
        else:

            def named() -> list[Table]:
                file = ObjectFile(self.store, manifest.index)
                return list(read_tables(file, fqns, where, choose))

            found = iter(reread(named))
        for table in found:
            for key in table.keys:
                names.require_within(key, manifest.step, manifest.attempt)
            yield table

    def unfinished(self) -> list[Unfinished]:
        """Attempts without a manifest of their own, oldest step first."""
        committed = set(self.steps())
        attempts: dict[tuple[int, str], tuple[set[int], float]] = {}
        for info in self.store.list(names.DATA_PREFIX):
            name = names.parse_data_key(info.key)
            if name is None:
                continue
            nodes, newest = attempts.setdefault((name.step, name.attempt), (set(), 0.0))
            if name.leaf == "record.json.zst" and name.node is not None:
                nodes.add(name.node)
            attempts[name.step, name.attempt] = (nodes, max(newest, info.modified_s))
        found = []
        for (step, attempt), (nodes, newest) in sorted(attempts.items()):
            if step in committed and self._is_of(step, attempt):
                continue
            found.append(
                Unfinished(
                    step=step,
                    attempt=attempt,
                    present=tuple(sorted(nodes)),
                    nodes=self._nodes_of(step, attempt, nodes),
                    age_s=self._clock() - newest,
                )
            )
        return found

    def _is_of(self, step: int, attempt: str) -> bool:
        try:
            return self.manifest(step).attempt == attempt
        except (DamagedError, NotFoundError):
            return True  # unreadable: it may be this one's, so nothing of it is loose

    def _nodes_of(self, step: int, attempt: str, nodes: set[int]) -> int | None:
        for node in sorted(nodes):
            key = names.record_key(step, attempt, node)
            try:
                read = functools.partial(read_record, name=key)
                return read_checked(self.store, key, MAX_RECORD_BYTES, read).nodes
            except (DamagedError, NotFoundError):
                continue
        return None


def pack_entries(entries: Sequence[tree.Entry]) -> bytes:
    """Entries as the state object: compressed ``write_tree`` bytes."""
    return pack(tree.write_tree(entries))


def unpack_entries(data: bytes, name: str) -> list[tree.Entry]:
    """Entries of a state object. Raises FormatError."""
    return tree.read_tree(unpack(data, MAX_TREE_BYTES, name), name)


class ObjectFile(io.RawIOBase):
    """A stored object as a seekable file: each read is one ranged read of the store."""

    def __init__(self, store: Store, ref: Ref) -> None:
        self._store = store
        self._ref = ref
        self._at = 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset; returns it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._ref.nbytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fill as much of ``buffer`` as the object still has."""
        view = memoryview(buffer).cast("B")
        count = min(view.nbytes, self._ref.nbytes - self._at)
        if count <= 0:
            return 0
        self._store.read_into(self._ref.key, self._at, view[:count])
        self._at += count
        return count
