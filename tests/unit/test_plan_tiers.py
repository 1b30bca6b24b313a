"""Tiers, hops and losses of one case in which no two figures are equal, worked by hand."""

from __future__ import annotations

import pytest

from forebay.plan.arithmetic import Plan, best_cadence_of, work, work_fleet
from forebay.plan.resolve import read_flags, resolve
from forebay.plan.verdict import conditions_of

GB = 1e9
FLAGS = {
    "model.params": "1e12",
    "model.bytes_per_param": "16",
    "cluster.gpus": "1024",
    "cluster.nvme": "20GB/s",
    "cluster.nvme_read": "30GB/s",
    "cluster.peer": "10GB/s",
    "storage.filesystem": "200GB/s",
    "storage.filesystem_read": "160GB/s",
    "storage.per_node": "5GB/s",
    "storage.per_node_read": "7GB/s",
    "storage.budget": "50%",
    "checkpoint.cadence": "10min",
    "checkpoint.peer_cadence": "20min",
    "checkpoint.durable_cadence": "40min",
    "checkpoint.local_keep": "3",
    "checkpoint.pause": "2s",
    "checkpoint.interference": "4%",
    "failures.mtbf": "100000s",
    "failures.share_memory": "40%",
    "failures.share_local": "30%",
    "failures.share_peer": "20%",
    "failures.share_durable": "10%",
    "failures.restart_memory": "50s",
    "failures.restart_local": "150s",
    "failures.restart_peer": "250s",
    "failures.restart_durable": "350s",
}
NODE = 16e12 / 128
NVME_S, PEER_S, DRAIN_S = NODE / (20 * GB), NODE / (10 * GB), 16e12 / (100 * GB)


def plan(**more: str) -> Plan:
    flags = FLAGS | {key.replace("__", "."): text for key, text in more.items()}
    return work(resolve(flags=read_flags(flags)))


def test_every_field_of_every_tier() -> None:
    found = [
        (
            tier.name,
            tier.cadence_s,
            tier.takes_s,
            tier.lag_s,
            tier.restart_s,
            tier.load_s,
            tier.share,
            tier.disturbs_s,
        )
        for tier in plan().tiers
    ]
    copy_s = NODE / 8 / (55 * GB)
    link_s = NODE / (5 * GB)
    expected = [
        ("memory", 600, copy_s, 0.0, 50, copy_s, 0.4, 0.0),
        ("local", 600, NVME_S, NVME_S, 150, NODE / (30 * GB), 0.3, 0.04 * NVME_S),
        ("peer", 1200, PEER_S, NVME_S + PEER_S, 250, NODE / (10 * GB), 0.2, 0.04 * PEER_S),
        # all nodes read side by side: 160 GB/s for 128 of them is less than a node's own link
        ("durable", 2400, DRAIN_S, NVME_S + DRAIN_S, 350, NODE / (1.25 * GB), 0.1, 0.04 * link_s),
    ]
    for one, other in zip(found, expected, strict=True):
        assert one[0] == other[0]
        assert one[1:] == pytest.approx(other[1:]), one[0]


def test_a_tiers_loss_is_its_failures_rework_and_restart() -> None:
    worked = plan()
    lags = (0.0, NVME_S, NVME_S + PEER_S, NVME_S + DRAIN_S)
    by_hand = [
        share * (cadence / 2 + lag + restart) / 100_000
        for share, cadence, lag, restart in zip(
            (0.4, 0.3, 0.2, 0.1), (600, 600, 1200, 2400), lags, (50, 150, 250, 350), strict=True
        )
    ]
    assert [tier.loss for tier in worked.tiers] == pytest.approx(by_hand)
    assert worked.losses.rework + worked.losses.restart == pytest.approx(sum(by_hand))


def test_a_failure_goes_to_the_tier_with_the_fresher_copy() -> None:
    worked = plan(checkpoint__peer_cadence="60min", checkpoint__durable_cadence="30min")
    peer, durable = worked.tiers[2], worked.tiers[3]
    assert peer.loss == pytest.approx(0.2 * (900 + NVME_S + DRAIN_S + 350) / 100_000)
    assert durable.loss == pytest.approx(0.1 * (900 + NVME_S + DRAIN_S + 350) / 100_000)
    assert sum(tier.loss for tier in worked.tiers) == pytest.approx(
        worked.losses.rework + worked.losses.restart
    )


def test_a_cadence_that_is_no_multiple_is_taken_at_the_next_one() -> None:
    odd = plan(checkpoint__durable_cadence="41min")
    even = plan(checkpoint__peer_cadence="20min", checkpoint__durable_cadence="60min")
    assert odd.levels[-1].cadence_s == 3600  # of the peer's 20 minutes
    assert odd.losses.rework == pytest.approx(even.losses.rework)


def test_interference_of_each_tier_at_its_own_cadence() -> None:
    by_hand = 0.04 * (NVME_S / 600 + PEER_S / 1200 + NODE / (5 * GB) / 2400)
    assert plan().losses.interference == pytest.approx(by_hand)
    assert plan(checkpoint__interference_window="drain").losses.interference == pytest.approx(
        0.04 * (NVME_S / 600 + PEER_S / 1200 + DRAIN_S / 2400)
    )


def test_room_and_rate_of_the_disks() -> None:
    held = {each.name: each for each in conditions_of(plan())}
    assert held["local disks"].need == pytest.approx(2 * NODE / 600)
    assert held["room on local disks"].need == pytest.approx(4 * 2 * NODE)
    assert held["free slot"].need == 1200
    assert held["free slot"].have == pytest.approx(NVME_S + PEER_S)
    assert held["restart"].need == pytest.approx(NODE / (1.25 * GB))
    assert held["restart"].have == 350


def test_best_cadences_keep_to_what_slots_and_disks_allow() -> None:
    slow = plan(cluster__nvme="100MB/s", cluster__peer="150MB/s", checkpoint__peer_cadence="10min")
    near_s = NODE / (0.1 * GB)
    assert slow.cadence.best_s >= 2 * near_s * (1 - 1e-4)  # own images and a peer's
    alone = plan(checkpoint__local="no", checkpoint__mirror="no")
    assert alone.cadence.best_s >= DRAIN_S / 2 * (1 - 1e-4)
    worked = plan()
    assert best_cadence_of(worked, worked.tiers[-1]) == pytest.approx(
        max((2 * 0.04 * NODE / (5 * GB) * 100_000 / 0.1) ** 0.5, DRAIN_S)
    )


def test_a_bucket_is_read_within_its_requests() -> None:
    worked = work(resolve(storage="s3"))
    parts = 16384 * 6  # of 64 MiB, in 395.5 MB
    assert worked.tiers[-1].load_s == pytest.approx(parts / 5500)
    wide = work(resolve(storage="s3", flags=read_flags({"storage.prefixes": "1000"})))
    assert wide.tiers[-1].load_s == pytest.approx(6.48e12 / 2048 / 8e9, rel=0.01)


def test_what_grows_with_gpus_grows_with_them_and_not_with_nodes() -> None:
    trays, nodes = (work(resolve(cluster=name)) for name in ("gb200-nvl72", "dgx-h100"))
    assert trays.inputs.nodes == 2 * nodes.inputs.nodes
    assert trays.inputs.failures.mtbf_s == pytest.approx(nodes.inputs.failures.mtbf_s)
    rates = {
        work(resolve(cluster=name, storage="superpod-good")).inputs.storage.filesystem_bytes_per_s
        for name in ("gb200-nvl72", "dgx-h100")
    }
    assert rates == {7e9 * 64}


def test_a_fast_store_is_no_fault() -> None:
    worked = work(
        resolve(model="8b", storage="tectonic", flags=read_flags({"cluster.gpus": "128"}))
    )
    assert all(each.holds for each in conditions_of(worked))


def test_what_losses_add_to_the_training() -> None:
    worked = plan()
    fleet = work_fleet(worked)
    assert fleet.gpu_hours_added == pytest.approx(1024 * (fleet.train_s - fleet.ideal_s) / 3600)
