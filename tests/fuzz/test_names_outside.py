"""A manifest, record or index that names something outside of its own step reads nothing there."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import forebay
from forebay.commit.catalog import Catalog
from forebay.commit.gather import gather
from forebay.commit.publish import publish
from forebay.errors import DamagedError, ForebayError, StoreError
from forebay.format import names
from forebay.format.digests import digest
from forebay.format.index import read_index, write_index
from forebay.format.manifest import Ref, read_manifest, write_manifest
from forebay.format.record import read_record, write_record
from forebay.storage.directory import DirectoryStore
from tests.build import ATTEMPT, STEP, put_nodes, two_nodes

KEY = names.shard_key(STEP, ATTEMPT, 0, 0)
OUTSIDE = (
    *("../secret", "/etc/passwd", "../../../../../../etc/passwd", "", ".", "data", "manifests/x"),
    *(
        KEY.replace("/first/", "/../first/"),
        KEY.replace("/first/", "/other/"),
        f"{KEY}\0",
        f"{KEY}/",
    ),
    *(KEY.replace(f"{STEP:012d}", f"{STEP + 1:012d}"), f"/{KEY}", f"./{KEY}", f"{KEY}/../../x"),
    *(KEY.replace("node-00000", "node-" + "9" * 5000), KEY.replace("rank-", "rank-\u0661"), "a\\b"),
)
_watching: list[str] | None = None
_thread = threading.get_ident()


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching is not None and event == "open" and threading.get_ident() == _thread:
        _watching.append(str(arguments[0]))


@pytest.fixture(scope="module", autouse=True)
def hook() -> None:
    sys.addaudithook(_watch)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A committed step, and the same files under other names that must not be read."""
    root = tmp_path / "run"
    store = DirectoryStore(root)
    for step, attempt in ((STEP, ATTEMPT), (STEP + 1, ATTEMPT), (STEP, "other")):
        put_nodes(store, two_nodes(), step=step, attempt=attempt)
        if attempt == ATTEMPT:
            publish(store, gather(store, step, attempt, nodes=2, timeout_s=0.0))
    (tmp_path / "secret").write_bytes((root / KEY).read_bytes())
    return root


def replace(path: Path, data: bytes) -> Ref:
    path.unlink()
    path.write_bytes(data)
    return Ref("", len(data), digest(data).hex())


def forge(root: Path, what: str, name: str) -> None:
    """Let the manifest, a record or the index name something, with every digest as it must be."""
    at = root / names.manifest_key(STEP)
    manifest = read_manifest(at.read_bytes())
    if what == "index":
        path = root / manifest.index.key
        rows = [elsewhere(row, name) for row in read_index(path.read_bytes())]
        ref = replace(path, write_index(rows))
        manifest = msgspec.structs.replace(manifest, index=named(ref, manifest.index.key))
    elif what == "record":
        path = root / manifest.records[0].key
        record = read_record(path.read_bytes())
        shards = [msgspec.structs.replace(shard, key=name) for shard in record.shards]
        ref = replace(path, write_record(msgspec.structs.replace(record, shards=shards)))
        records = [named(ref, manifest.records[0].key), *manifest.records[1:]]
        manifest = msgspec.structs.replace(manifest, records=records)
    else:
        held: Any = getattr(manifest, what.removeprefix("manifest "))
        forged: Any = [named(held[0], name), *held[1:]] if isinstance(held, list) else None
        change = {what.removeprefix("manifest "): forged or named(held, name)}
        manifest = msgspec.structs.replace(manifest, **change)
    replace(at, write_manifest(manifest))


def named(ref: Ref, key: str) -> Ref:
    return Ref(key, ref.nbytes, ref.digest)


def elsewhere(row: Any, name: str) -> Any:
    """A row of the index that names another file."""
    from dataclasses import replace as changed

    return changed(row, key=name)


def read_everything(root: Path) -> list[str]:
    """What files are opened while the step is read in each way; each must fail as ours."""
    global _watching
    _watching = []
    failures: list[str] = []
    try:
        opened = forebay.open(root)
        catalog = Catalog(opened.store)
        for ask in (
            lambda: opened.read(STEP, "w"),
            lambda: opened.values(STEP),
            lambda: list(catalog.slices(catalog.manifest(STEP))),
            lambda: opened.per_rank_entries(STEP, 0),
        ):
            try:
                ask()
            except ForebayError as error:
                failures.append(str(error))
        assert failures, "nothing refused it"
        assert not any("\n" in text for text in failures)
        return _watching
    finally:
        _watching = None


PARTS = ("index", "record", "manifest index", "manifest state", "manifest records")


@pytest.mark.parametrize("what", PARTS)
def test_a_name_outside_reads_nothing(run: Path, what: str) -> None:
    whole = forebay.open(run).read(STEP, "w")
    assert np.array_equal(whole, np.arange(32, dtype=np.float32).reshape(8, 4))
    kept = run.with_name("kept")
    shutil.copytree(run, kept)
    mine = (run / "data" / f"{STEP:012d}" / ATTEMPT, run / "manifests")
    breaches, cases = [], 0
    for name in OUTSIDE:
        if what == "record" and not name:
            continue  # a rank without tensors has none
        forge(run, what, name)
        cases += 1
        for path in map(Path, read_everything(run)):
            if path.suffix not in (".py", ".pyc", ".so") and not path.is_relative_to("/proc"):
                breaches += [path] if not any(path.is_relative_to(m) for m in mine) else []
        shutil.rmtree(run)
        shutil.copytree(kept, run)
    print(f"names outside, {what}: {cases} cases, violations: {len(breaches)}")
    assert not breaches
    assert cases >= len(OUTSIDE) - 1


@pytest.mark.parametrize("key", [KEY, names.manifest_key(STEP), names.index_key(STEP, ATTEMPT)])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_link_that_leads_out_is_not_followed(run: Path, key: str, depth: int) -> None:
    place = run / key
    for _ in range(min(depth, len(Path(key).parts) - 1)):
        place = place.parent
    outside = run.with_name("outside")
    shutil.move(place, outside)
    place.symlink_to(outside)
    with pytest.raises((StoreError, DamagedError, forebay.NotFoundError)):
        forebay.open(run).read(STEP, "w")
    assert os.path.lexists(outside)


def test_a_planted_manifest_publishes_only_what_its_digests_hold_for(run: Path) -> None:
    """Whoever can write there can publish, as SECURITY.md says; each byte is still checked."""
    at = run / names.manifest_key(STEP)
    data = at.read_bytes()
    planted = run / names.manifest_key(STEP + 5)
    planted.write_bytes(data)
    with pytest.raises(DamagedError, match=f"is the manifest of step {STEP}"):
        forebay.open(run).read(STEP + 5, "w")
    flipped = bytearray((run / KEY).read_bytes())
    flipped[-1] ^= 1
    replace(run / KEY, bytes(flipped))
    opened = forebay.open(run)
    failures = 0
    for name in ("b", "w"):
        try:
            opened.read(STEP, name)
        except DamagedError:
            failures += 1
    assert failures == 1
