"""One measure of ``bench.scale``, in a process of its own: ``python -m bench.scale_parts ORDER``.

``ORDER`` is a JSON object with ``measure``, ``mesh``, ``target``, ``store``; the answer is one JSON
object. Memory is the process's own at its highest, torch and all.
"""

from __future__ import annotations

import json
import pickle
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forebay.commit.catalog import Catalog
from forebay.commit.gather import Gathering, read_one
from forebay.commit.publish import publish
from forebay.drain.seal import build_record
from forebay.format import names
from forebay.format.record import table_of, write_record
from forebay.restore.reads import plan_reads, touched
from forebay.storage.address import open_store
from forebay.storage.read_once import ReadOnce
from forebay.testing.hollow import HollowStore

STEP, ATTEMPT = 1, "a1"
SHARDS = "shards.json"


def cluster_of(order: dict[str, Any], which: str = "mesh") -> Any:
    """The job, with torch, which the committer and a restore's planning do without."""
    from forebay.testing.cluster import Cluster, Mesh
    from forebay.testing.llama import Llama

    return Cluster(Mesh(*order[which]), Llama(), run="bench")


def store_of(order: dict[str, Any]) -> HollowStore:
    """The store with the records, and with shards that have a size alone."""
    shards = json.loads(Path(order["home"], SHARDS).read_text())
    return HollowStore(open_store(order["store"]), shards)


def peak_bytes() -> int:
    """The most memory that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write(order: dict[str, Any]) -> dict[str, Any]:
    """All records, as the agents would write them; the sizes of their shards."""
    cluster, store = cluster_of(order), open_store(order["store"])
    shards: dict[str, int] = {}
    total = slices = witnesses = 0
    for record in cluster.records():
        data = write_record(record)
        store.put(names.record_key(STEP, ATTEMPT, record.node), data)
        shards |= {shard.key: shard.nbytes for shard in record.shards if shard.key}
        total, slices = total + len(data), slices + len(record.slices.rank)
        witnesses += len(record.witnesses)
    Path(order["home"], SHARDS).write_text(json.dumps(shards))
    return {
        "nodes": cluster.nodes,
        "records_bytes": total,
        "slices": slices,
        "witnesses": witnesses,
        "payload_bytes": sum(shards.values()),
    }


def seal(order: dict[str, Any]) -> dict[str, Any]:
    """One node's record: built from what its agent knows, and written."""
    snapshot = cluster_of(order).snapshot(0)
    began = time.perf_counter()
    data = write_record(build_record(snapshot, 0.0))
    return {"seal_s": time.perf_counter() - began, "record_bytes": len(data)}


def commit(order: dict[str, Any]) -> dict[str, Any]:
    """The committer: each record as it arrives, and then what is left after the last one."""
    store, nodes = store_of(order), order["nodes"]
    sizes = {info.key: info.size for info in store.list(names.attempt_prefix(STEP, ATTEMPT))}
    gathering = Gathering(store, STEP, ATTEMPT, nodes)
    began = time.perf_counter()
    for node in range(nodes):
        one = read_one(store, STEP, ATTEMPT, node)
        assert one is not None
        if node == nodes - 1:
            arrived = time.perf_counter()
        gathering.take(one, sizes)
    checked = gathering.check()
    checking = time.perf_counter()
    _, manifest = publish(store, checked)
    ended = time.perf_counter()
    digests = 32 * sum(len(part) + len(part.blocks) for part in checked.stored.parts())
    size = store.head(names.manifest_key(STEP))
    assert size is not None
    return {
        "arrivals_s": arrived - began,
        "check_s": checking - arrived,
        "publish_s": ended - checking,
        "after_last_s": ended - arrived,
        "index_bytes": manifest.index.nbytes,
        "index_without_digests_bytes": manifest.index.nbytes - digests,
        "manifest_bytes": size.size,
        "peak_bytes": peak_bytes(),
    }


def same(order: dict[str, Any]) -> dict[str, Any]:
    """A rank's restore of its own layout, planned: manifest, state, its node's record, and of the
    index what lies elsewhere. What has to be imported is."""
    import forebay.format.index  # noqa: F401 - part of starting up, not of the plan

    store, rank = store_of(order), order["rank"]
    wants = cluster_of(order).wants(rank)
    began = time.perf_counter()
    catalog = Catalog(store)
    manifest = catalog.manifest(STEP)
    catalog.entries(manifest)
    table = table_of(catalog.record(manifest, rank // 8))
    rows = list(table.take(touched(wants, table)))
    mine: dict[Any, list[Any]] = {}
    for row in rows:
        mine.setdefault(row.slice.key, []).append(row)
    rest = [want for want in wants if not _is_covered(want, mine.get(want.key, []))]
    fqns = sorted({want.key.fqn for want in rest})
    for found in catalog.tables(manifest, fqns, _choose(rest)):
        rows += found
    plan_reads(wants, rows)
    return {
        "same_plan_s": time.perf_counter() - began,
        "same_rank_bytes": store.read_bytes,
        "same_from_index": len(rest),
    }


def _is_covered(want: Any, rows: list[Any]) -> bool:
    met = (want.box.meet(row.slice.box) for row in rows)
    return sum(box.elements for box in met if box is not None) == want.box.elements


def reshard(order: dict[str, Any]) -> dict[str, Any]:
    """Ranks of one node of another job, planned one after the other; they share what they read."""
    store, other = store_of(order), cluster_of(order, "target")
    node, took, first_bytes = order["rank"] // 8, [], 0
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="forebay-bench-") as shared:
        ranks = other.ranks_of(node)[: order["planned"]]
        for rank in ranks:
            wants = other.wants(rank)
            began = time.perf_counter()
            catalog = Catalog(ReadOnce(store, Path(shared, "reads")))
            manifest = catalog.manifest(STEP)
            catalog.entries(manifest)
            fqns = sorted({want.key.fqn for want in wants})
            rows: list[Any] = []
            for table in catalog.tables(manifest, fqns, _choose(wants)):
                rows += table
            plan_reads(wants, rows)
            took.append(time.perf_counter() - began)
            first_bytes = first_bytes or store.read_bytes
    return {
        "reshard_plan_s": min(took),
        "reshard_first_plan_s": took[0],
        "reshard_rank_bytes": first_bytes,
        "reshard_node_bytes": store.read_bytes,
        "reshard_nodes": other.nodes,
        "reshard_rows": len(rows),
        "peak_bytes": peak_bytes(),
    }


def _choose(wants: list[Any]) -> Callable[[Any], Any]:
    return lambda table: touched(wants, table)


def dcp(order: dict[str, Any]) -> dict[str, Any]:
    """torch.distributed.checkpoint on the same slices: its global plan, and metadata as pickled."""
    import torch
    from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
    from torch.distributed.checkpoint.default_planner import (
        _validate_global_plan,
        create_default_global_save_plan,
    )
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    cluster, plans, local_s = cluster_of(order), [], 0.0
    for rank in range(cluster.mesh.ranks):
        wants = [want for want in cluster.wants(rank) if want.box.elements]
        began = time.perf_counter()
        items = []
        for want in wants:
            if not want.shape and rank:
                continue  # DCP's planner has one rank write what is replicated, in the end
            offsets, sizes = torch.Size(want.box.offsets), torch.Size(want.box.sizes)
            items.append(
                WriteItem(
                    index=MetadataIndex(want.key.fqn, offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                        properties=TensorProperties(dtype=getattr(torch, want.dtype)),
                        size=torch.Size(want.shape),
                    ),
                )
            )
        local_s += time.perf_counter() - began
        plans.append(SavePlan(items))
    began = time.perf_counter()
    plans, metadata = create_default_global_save_plan(dedup_save_plans(plans))
    valid_from = time.perf_counter()
    wrong = _validate_global_plan(plans, metadata)
    if wrong and wrong is not True:
        raise ValueError(f"DCP finds the plan wrong, it was built wrong here: {wrong[:3]}")
    ended = time.perf_counter()
    pickled = pickle.dumps(metadata)
    return {
        "dcp_items": sum(len(plan.items) for plan in plans),
        "dcp_local_s_per_rank": local_s / cluster.mesh.ranks,
        "dcp_global_s": valid_from - began,
        "dcp_validate_s": ended - valid_from,
        "dcp_pickle_s": time.perf_counter() - ended,
        "dcp_metadata_bytes": len(pickled),
        "dcp_all_ranks_bytes": len(pickled) * cluster.mesh.ranks,
        "dcp_peak_bytes": peak_bytes(),
    }


MEASURES = {one.__name__: one for one in (write, seal, commit, same, reshard, dcp)}


def main() -> None:
    """Do what the order says, and answer."""
    order = json.loads(sys.argv[1])
    began = time.perf_counter()
    found = MEASURES[order["measure"]](order)
    print(json.dumps(found | {"took_s": time.perf_counter() - began}))


if __name__ == "__main__":
    main()
