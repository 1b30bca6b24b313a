"""Deletion, in the one safe order: manifest, then records, then data."""

from __future__ import annotations

from collections.abc import Collection

from forebay.commit.catalog import Catalog
from forebay.commit.retain import decide
from forebay.config import Keep
from forebay.errors import DamagedError, NotFoundError
from forebay.format import names
from forebay.storage.store import Store
from forebay.watch.events import emit


def delete_step(store: Store, step: int) -> int:
    """Delete a committed step; returns how many objects went. Killed half-way, the rest is garbage.

    Only names that the format knows are touched, and only those of the manifest's attempt.
    """
    try:
        attempt: str | None = Catalog(store).manifest(step).attempt
    except (DamagedError, NotFoundError):
        attempt = None  # whose data it was is unknown: that is for the sweep
    count = int(store.delete(names.manifest_key(step)))
    if attempt is None:
        return count
    found = [info.key for info in store.list(names.attempt_prefix(step, attempt))]
    ours = [key for key in found if names.parse_data_key(key) is not None]
    for key in sorted(ours, key=lambda k: (not k.endswith("record.json.zst"), k)):
        count += int(store.delete(key))
    return count


def apply_keep(store: Store, keep: Keep, spared: Collection[int] = ()) -> list[int]:
    """Delete the committed steps that ``keep`` does not name; returns them.

    ``spared`` are left for another time: steps that a commit is at work on, which would make the
    manifest again over data that is gone.
    """
    unnamed = [d.step for d in decide(Catalog(store).steps(), keep) if not d.keep]
    gone = [step for step in unnamed if step not in spared]
    for step in gone:
        objects = delete_step(store, step)
        emit("retention.deleted", step=step, objects=objects)
    return gone
