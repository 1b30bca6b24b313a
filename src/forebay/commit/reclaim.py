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
    return Reclaimer(store).delete(step)


def delete_manifest_of(store: Store, step: int, attempt: str) -> bool:
    """Delete the manifest of a step where it is this attempt's; whether it was there."""
    if Catalog(store).attempt_of(step) != attempt:
        return False
    return store.delete(names.manifest_key(step))


class Reclaimer:
    """Deletes steps, and remembers those that a failure left half-way: their manifests are gone.

    For one thread at a time. Nobody else may tell such garbage from what is still being written.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._half_gone: dict[int, str] = {}

    def delete(self, step: int) -> int:
        """As ``delete_step``. A failure is raised; ``go_on`` then ends what was begun."""
        try:
            attempt = Catalog(self._store).manifest(step).attempt
        except (DamagedError, NotFoundError):
            # whose data it was is unknown: that is for the sweep
            return int(self._store.delete(names.manifest_key(step)))
        self._half_gone[step] = attempt  # before the call: its reply may be lost, and it done
        count = int(self._store.delete(names.manifest_key(step)))
        return count + self._rest(step, attempt)

    def go_on(self) -> None:
        """Delete the rest of the steps whose manifests went before a failure."""
        there = set(Catalog(self._store).steps()) if self._half_gone else set()
        for step, attempt in list(self._half_gone.items()):
            if step in there:  # it did not go, or somebody saved the step again
                del self._half_gone[step]
                continue
            self._rest(step, attempt)

    def _rest(self, step: int, attempt: str) -> int:
        found = [info.key for info in self._store.list(names.attempt_prefix(step, attempt))]
        ours = [key for key in found if names.parse_data_key(key) is not None]
        count = 0
        for key in sorted(ours, key=lambda k: (not k.endswith("record.json.zst"), k)):
            count += int(self._store.delete(key))
        # A second committer may have made it since. One that comes later still finds no record,
        # and takes its manifest back itself.
        count += int(delete_manifest_of(self._store, step, attempt))
        self._half_gone.pop(step, None)
        return count

    def apply(self, keep: Keep, spared: Collection[int] = ()) -> list[int]:
        """Delete the committed steps that ``keep`` does not name; returns them.

        ``spared`` are left for another time: steps that a commit is at work on, which would make
        the manifest again over data that is gone.
        """
        self.go_on()
        unnamed = [d.step for d in decide(Catalog(self._store).steps(), keep) if not d.keep]
        gone = [step for step in unnamed if step not in spared]
        for step in gone:
            objects = self.delete(step)
            emit("retention.deleted", step=step, objects=objects)
        return gone


def apply_keep(store: Store, keep: Keep, spared: Collection[int] = ()) -> list[int]:
    """Delete the committed steps that ``keep`` does not name, as ``Reclaimer.apply``."""
    return Reclaimer(store).apply(keep, spared)
