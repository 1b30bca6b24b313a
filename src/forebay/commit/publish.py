"""The commit point: index and state first, then the manifest, created if absent."""

from __future__ import annotations

import enum
import os
import secrets
import socket
import time
from collections.abc import Callable

import forebay
from forebay.commit.catalog import Catalog, pack_entries, unpack_entries
from forebay.commit.gather import Checked, gather, read_one
from forebay.commit.reclaim import delete_manifest_of
from forebay.commit.spool import view
from forebay.errors import ConflictError, DamagedError, IncompleteError, NotFoundError, StoreError
from forebay.format import names, tree
from forebay.format.digests import digest
from forebay.format.manifest import (
    MANIFEST_VERSION,
    MAX_MANIFEST_BYTES,
    Manifest,
    Ref,
    read_manifest,
    write_manifest,
)
from forebay.storage.reread import read_checked
from forebay.storage.store import CreateOutcome, Store

_LARGE_BYTES = 256 * 2**20  # of one object: written in parts above


class Verdict(enum.Enum):
    """How a commit ended: ours was first, one of the same attempt was, another attempt's was."""

    COMMITTED = "committed"
    SAME = "same"
    LOST = "lost"


def publish(
    store: Store, checked: Checked, *, clock: Callable[[], float] = time.time
) -> tuple[Verdict, Manifest]:
    """Write index, state, and then the manifest; returns the manifest that now stands.

    Any number of committers may do this at once: all end with one manifest and the right verdict.
    An unknown outcome is settled by reading back; raises StoreError when even that fails, and then
    nothing of the attempt may be deleted. Raises IncompleteError when the step was deleted since
    its records were read; the manifest is then taken back.
    """
    # pyarrow is large: only the committer needs it
    from forebay.format.index import joined_index, write_index, write_parts

    key = names.manifest_key(checked.step)
    with checked.stored.sink() as sink:
        slices = write_parts(checked.stored.parts, sink)
        index = _put(
            store,
            names.index_key(checked.step, checked.attempt),
            view(sink),
            lambda there, where: write_index(joined_index(there, where)),
        )
    state = _put(
        store,
        names.state_key(checked.step, checked.attempt),
        pack_entries(checked.entries),
        lambda there, where: pack_entries(unpack_entries(there, where)),
    )
    manifest = Manifest(
        version=MANIFEST_VERSION,
        features=[],
        forebay=forebay.__version__,
        run=checked.run,
        step=checked.step,
        attempt=checked.attempt,
        committed_s=clock(),
        committer=f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(6)}",
        world_size=checked.world_size,
        nodes=checked.nodes,
        data_bytes=checked.data_bytes,
        tensors=sum(isinstance(entry, tree.Tensor) for entry in checked.entries),
        slices=slices,
        index=index,
        state=state,
        records=list(checked.refs),
    )
    for ref in checked.refs:
        store.settle(ref.key)  # a record can be seen before its node has flushed its name
    outcome = store.create(key, write_manifest(manifest))
    if outcome is CreateOutcome.COMMITTED:
        _withdraw_if_deleted(store, checked)
        return Verdict.COMMITTED, manifest
    try:
        there = read_checked(
            store, key, MAX_MANIFEST_BYTES, lambda data: read_manifest(data, f"{store.url}/{key}")
        )
    except NotFoundError:
        _withdraw_if_deleted(store, checked)
        seen = (
            "the reply to its creation was lost and it is not there"
            if outcome is CreateOutcome.UNKNOWN
            else "it was there already and is gone: something deletes this step"
        )
        raise StoreError(
            f"{store.url}/{key}: {seen}; nothing was deleted: run `forebay commit` for step "
            f"{checked.step} once the store is well"
        ) from None
    if there.attempt != checked.attempt:
        return Verdict.LOST, there
    _withdraw_if_deleted(store, checked)
    return (Verdict.COMMITTED if there.committer == manifest.committer else Verdict.SAME), there


def _withdraw_if_deleted(store: Store, checked: Checked) -> None:
    """Take the manifest back when the step's records are gone: it names data that is going too.

    Another committer was first, and retention took the step before this one came to its manifest.
    A record that is still there says that a deletion, if there is one, has yet to end, and what
    ends it is a second look for a manifest (``Reclaimer``): one of the two sees the other.
    """
    key, step, attempt = checked.refs[0].key, checked.step, checked.attempt
    if store.head(key) is not None:
        return
    delete_manifest_of(store, step, attempt)
    raise IncompleteError(
        f"step {step}: {store.url}/{key} is gone: the step was deleted while attempt "
        f"{attempt} of it was committed; its manifest is not left behind"
    )


def _put(
    store: Store, key: str, data: bytes | memoryview, anew: Callable[[bytes, str], bytes]
) -> Ref:
    """Write an object of the attempt; another committer of it may have written it already.

    Two versions of the software may encode the same content differently: what is there stands, if
    it says the same when encoded ``anew``. The manifest vouches for it: nothing is taken unread.
    """
    where = f"{store.url}/{key}"

    def read_back(there: bytes) -> bytes:
        if there == data:
            return there
        if anew(there, where) != data:
            raise DamagedError(f"{where}: is there already and says something else: delete it")
        if store.get(key, max_bytes=1 << 34) != there:
            raise DamagedError(f"{where}: two reads of it differ")
        return there

    try:
        if len(data) > _LARGE_BYTES:
            store.put_large(key, memoryview(data))
        else:
            store.put(key, data)
    except ConflictError:
        data = read_checked(store, key, 1 << 34, read_back)
    return Ref(key, len(data), digest(data).hex())


def commit_step(
    store: Store, step: int, attempt: str, *, nodes: int, timeout_s: float
) -> tuple[Verdict, Manifest]:
    """Gather, check, publish. Raises ConflictError when another attempt has this step."""
    checked = gather(store, step, attempt, nodes=nodes, timeout_s=timeout_s)
    verdict, manifest = publish(store, checked)
    if verdict is Verdict.LOST:
        raise ConflictError(
            f"step {step} is already committed by attempt {manifest.attempt}; attempt {attempt} "
            "was not published: save under a newer step"
        )
    return verdict, manifest


def finish(store: Store, step: int, attempt: str | None = None) -> tuple[Verdict, Manifest]:
    """Commit a step whose records are all there, whoever wrote them.

    Raises IncompleteError naming what is missing, NotFoundError when nothing of the step is there,
    ConflictError when several attempts are complete and none was named.
    """
    catalog = Catalog(store)
    if step in catalog.steps():
        store.settle(names.manifest_key(step))
        manifest = catalog.manifest(step)
        if attempt in (None, manifest.attempt):
            return Verdict.SAME, manifest
    found = [u for u in catalog.unfinished() if u.step == step and attempt in (None, u.attempt)]
    if not found:
        catalog.require_run()
        raise NotFoundError(f"{store.url}: nothing was stored for step {step}")
    complete = [u for u in found if u.complete]
    if len(complete) > 1:
        raise ConflictError(
            f"step {step}: attempts {', '.join(u.attempt for u in complete)} are complete: name one"
        )
    if not complete:
        raise IncompleteError(
            f"step {step}: " + "; ".join(_lack(store, u.step, u.attempt, u.nodes) for u in found)
        )
    chosen = complete[0]
    assert chosen.nodes is not None
    return commit_step(store, step, chosen.attempt, nodes=chosen.nodes, timeout_s=0.0)


def _lack(store: Store, step: int, attempt: str, nodes: int | None) -> str:
    if nodes is None:
        return f"attempt {attempt}: no node's record is there"
    missing = [n for n in range(nodes) if read_one(store, step, attempt, n) is None]
    return f"attempt {attempt}: no record of nodes {', '.join(map(str, missing))} of {nodes}"
