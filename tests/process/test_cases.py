"""Small inputs drawn from public reports of what went wrong elsewhere, and the right result.

Each test is named after its case. A3 belongs to retention, A15 to the peer tier.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay.capture.topology import Topology
from tests.process.conftest import Faults, Ranks, agent_pids, agent_socket, kill_agent, poll

pytestmark = pytest.mark.usefixtures("runtime")

TIMEOUT_S = 60.0


def save_and_wait(url: str | Path, step: int, state: dict[Any, Any], **options: Any) -> None:
    with forebay.Checkpointer(url, **options) as checkpointer:
        checkpointer.save(step, state).wait("durable", TIMEOUT_S)
    wait_for_agents()


def wait_for_agents() -> None:
    """Until the agents are gone, and with them the images in memory."""
    here = Path(os.environ["FOREBAY_RUNTIME_DIR"])
    poll(lambda: not agent_pids(here), "agents to end")


def restored(url: str | Path, state: dict[Any, Any], **options: Any) -> int | None:
    with forebay.Checkpointer(url) as checkpointer:
        return checkpointer.restore(state, **options)


def only_shard(run: Path, step: int) -> Path:
    (found,) = (run / "data" / f"{step:012d}").glob("*/*/rank-*.safetensors")
    return found


def test_a1_lost_write(faults: Faults, start_ranks: Callable[..., Ranks]) -> None:
    faults.set({"op": "put_large", "match": r"rank-0000[1-3]", "do": "enospc"})
    outcomes = start_ranks(
        "save_own", 4, url=faults.url, steps=[1, 1], tensors=8, fixed=str(faults.script)
    ).wait()
    for first, second in outcomes:
        assert first.startswith("full: "), first
        assert "rank-0000" in first
        assert "No space left on device" in first
        assert second == "committed"
    assert forebay.open(faults.directory).steps() == [1]


def test_a1_one_rank_eight_tensors(faults: Faults) -> None:
    state = {f"t{i}": torch.full((10,), float(i)) for i in range(8)}
    faults.set({"op": "put_large", "do": "enospc"})
    checkpointer = forebay.Checkpointer(faults.url)
    snapshot = checkpointer.save(1, state)
    with pytest.raises(forebay.FullError, match=r"rank-00000.*No space left on device"):
        snapshot.wait("durable", TIMEOUT_S)
    assert not list(faults.directory.glob("manifests/*"))
    faults.set()
    checkpointer.save(1, state).wait("durable", TIMEOUT_S)
    assert forebay.open(faults.directory).steps() == [1]
    with pytest.raises(forebay.IncompleteError, match="not committed: 1 "):
        checkpointer.close()


@pytest.mark.parametrize("how", ["fails", "killed"])
def test_a2_torn_overwrite(faults: Faults, runtime: Path, how: str) -> None:
    names = ("a", "b", "c", "d")
    ones = {name: torch.ones(200_000) for name in names}
    twos = {name: torch.full((200_000,), 2.0) for name in names}
    save_and_wait(faults.url, 7, ones)
    third = 4096 + 2 * 800_000 + 400_000
    if how == "fails":
        faults.set({"op": "put_large", "do": "partial", "at_bytes": third})
        checkpointer = forebay.Checkpointer(faults.url)
        with pytest.raises(forebay.StoreError):
            checkpointer.save(7, twos).wait("durable", TIMEOUT_S)
        with pytest.raises(forebay.IncompleteError):
            checkpointer.close()
    else:
        checkpointer = forebay.Checkpointer(faults.url, drain_bytes_per_s=1e6)
        checkpointer.save(7, twos)
        hidden = f"data/{7:012d}/*/*/.rank-*"
        poll(
            lambda: any(p.stat().st_size > third for p in faults.directory.glob(hidden)),
            "the third tensor to be under way",
        )
        kill_agent(runtime)
        checkpointer._leave(clean=False)
        for pid in agent_pids(runtime):
            os.kill(pid, signal.SIGKILL)
        poll(lambda: not agent_pids(runtime), "agents to end")
    faults.set()
    target = {name: torch.zeros(200_000) for name in names}
    assert restored(faults.directory, target) == 7
    assert all(torch.equal(target[name], ones[name]) for name in names)
    pair = {name: torch.zeros(200_000) for name in names[:2]}
    assert restored(faults.directory, pair, strict=False) == 7
    assert all(torch.equal(pair[name], ones[name]) for name in pair)


def test_a2_second_save_of_a_committed_step_is_refused(tmp_path: Path) -> None:
    save_and_wait(tmp_path / "run", 7, {"w": torch.ones(10)})
    checkpointer = forebay.Checkpointer(tmp_path / "run")
    with pytest.raises(forebay.ConflictError, match="step 7 is already committed"):
        checkpointer.save(7, {"w": torch.zeros(10)}).wait("durable", TIMEOUT_S)
    with pytest.raises(forebay.IncompleteError):
        checkpointer.close()
    target = {"w": torch.zeros(10)}
    assert restored(tmp_path / "run", target) == 7
    assert torch.equal(target["w"], torch.ones(10))


def _flip(run: Path) -> str:
    path = only_shard(run, 2)
    data = bytearray(path.read_bytes())
    data[4096 + 4 * 500] ^= 1
    path.write_bytes(data)
    return "expected digest .* found"


def _cut(run: Path) -> str:
    path = only_shard(run, 2)
    os.truncate(path, path.stat().st_size // 2)
    return "expected .* bytes, found|expected at least .* bytes, found"


def _exchange(run: Path) -> str:
    one, two = only_shard(run, 1), only_shard(run, 2)
    assert one.stat().st_size == two.stat().st_size
    two.unlink()
    two.write_bytes(one.read_bytes())
    return "expected digest .* found"


@pytest.mark.parametrize("harm", [_flip, _cut, _exchange])
def test_a4_wrong_bytes(
    tmp_path: Path, harm: Callable[[Path], str], cli: Callable[..., Any]
) -> None:
    run = tmp_path / "run"
    with forebay.Checkpointer(run) as checkpointer:
        checkpointer.save(1, {"w": torch.arange(1000.0)}).wait("durable", TIMEOUT_S)
        checkpointer.save(2, {"w": -torch.arange(1000.0)}).wait("durable", TIMEOUT_S)
    wait_for_agents()
    found = harm(run)
    target = {"w": torch.full((1000,), 7.0)}
    with pytest.raises(forebay.DamagedError, match=rf"rank-00000.safetensors.*({found})"):
        restored(run, target)
    assert torch.equal(target["w"], torch.full((1000,), 7.0))
    verified = cli("verify", run, "2", "--json")
    assert verified.code == 4
    assert not verified.document["ok"]
    assert any("rank-00000.safetensors" in bad["object"] for bad in verified.document["bad"])
    assert cli("verify", run, "1").code == 0
    assert restored(run, target, fallback=True) == 1
    assert torch.equal(target["w"], torch.arange(1000.0))


def test_a_damaged_manifest_is_passed_over_only_when_allowed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with forebay.Checkpointer(run) as checkpointer:
        for step in (1, 2):
            state = {"w": torch.full((10,), float(step))}
            checkpointer.save(step, state).wait("durable", TIMEOUT_S)
    wait_for_agents()
    manifest = run / "manifests" / f"{2:012d}.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    target = {"w": torch.zeros(10)}
    with pytest.raises(forebay.FormatError, match=rf"{manifest}.*do not end in a digest"):
        restored(run, target)
    assert torch.equal(target["w"], torch.zeros(10))
    assert restored(run, target, fallback=True) == 1
    assert torch.equal(target["w"], torch.ones(10))


def test_a5_dtype(tmp_path: Path) -> None:
    saved = torch.tensor([1.7, -2.9, 1.0009765])
    save_and_wait(tmp_path / "run", 1, {"w": saved})
    for dtype in (torch.int64, torch.bool, torch.bfloat16):
        target = {"w": torch.ones(3, dtype=dtype)}
        with pytest.raises(forebay.MismatchError, match=rf"w: dtype {str(dtype)[6:]}.*float32"):
            restored(tmp_path / "run", target)
        assert torch.equal(target["w"], torch.ones(3, dtype=dtype))
    target = {"w": torch.zeros(3)}
    assert restored(tmp_path / "run", target) == 1
    assert torch.equal(target["w"], saved)
    rounded = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    with forebay.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.restore(rounded, allow_cast=True) == 1
        assert checkpointer.last_restore is not None
        assert checkpointer.last_restore.cast == ("w: float32 -> bfloat16",)
    assert torch.equal(rounded["w"], saved.to(torch.bfloat16))
    with pytest.raises(forebay.MismatchError):
        restored(tmp_path / "run", {"w": torch.zeros(3, dtype=torch.int64)}, allow_cast=True)


def test_a6_empty_and_uneven_shards(tmp_path: Path, start_ranks: Callable[..., Ranks]) -> None:
    url = str(tmp_path / "run")
    start_ranks("save_shapes", 4, url=url).wait()
    shards = list((tmp_path / "run" / "data").glob("*/*/*/rank-*.safetensors"))
    assert len(shards) == 4
    for world in (1, 2, 3, 5, 7):
        assert start_ranks("load_shapes", world, url=url).wait() == [True] * world


def test_a6_512_over_30(tmp_path: Path) -> None:
    """30 ranks in one process: 28 of 18, one of 8, one empty, saved as one rank's boxes each."""
    from forebay.capture.placement import Split, held_boxes, local_shape

    counts = [local_shape((512,), [Split(0, 30, index)])[0] for index in range(30)]
    assert counts == [18] * 28 + [8, 0]
    covered = [held_boxes((512,), [Split(0, 30, index)]) for index in range(30)]
    assert sum(box.elements for boxes in covered for box, _ in boxes) == 512
    assert covered[29] == []


def test_a6_rank_with_nothing_writes_no_object(
    tmp_path: Path, start_ranks: Callable[..., Ranks]
) -> None:
    url = str(tmp_path / "run")
    start_ranks("save_few", 4, url=url, elements=3).wait()
    assert len(list((tmp_path / "run" / "data").glob("*/*/*/rank-*.safetensors"))) == 3
    for world in (1, 2, 5):
        assert start_ranks("load_few", world, url=url, elements=3).wait() == [True] * world


def test_a7_keys_and_containers(tmp_path: Path) -> None:
    saved: dict[Any, Any] = {
        "a": {0: 5, 1: torch.ones(2), "0": 6},
        "a.b": torch.ones(1),
        "x": {"k": [{"p": 1}, {"p": 2}]},
        "n": None,
        "t": (1, torch.ones(1)),
    }
    save_and_wait(tmp_path / "run", 1, saved)
    target: dict[Any, Any] = {
        "a": {0: -1, 1: torch.zeros(2), "0": -1},
        "a.b": torch.zeros(1),
        "x": {"k": []},
        "n": 3,
        "t": (9, torch.zeros(1)),
    }
    assert restored(tmp_path / "run", target) == 1
    assert list(target) == list(saved)
    assert list(target["a"]) == [0, 1, "0"]
    assert (target["a"][0], target["a"]["0"]) == (5, 6)
    assert torch.equal(target["a"][1], torch.ones(2))
    assert torch.equal(target["a.b"], torch.ones(1))
    assert target["x"] == {"k": [{"p": 1}, {"p": 2}]}
    assert target["n"] is None
    assert type(target["t"]) is tuple
    assert target["t"][0] == 1
    assert torch.equal(target["t"][1], torch.ones(1))


def test_a8_isolation(faults: Faults) -> None:
    faults.set(
        {"op": "put_large", "do": "delay", "seconds": 0.5},
        {"op": "put", "do": "delay", "seconds": 0.5},
    )
    weight, counter = torch.zeros(4), torch.tensor(1.0)
    state: dict[str, Any] = {"w": weight, "c": counter, "s": {"step": 1}, "l": [1, 2]}
    with forebay.Checkpointer(faults.url) as checkpointer:
        snapshot = checkpointer.save(1, state)
        weight.fill_(9)
        counter.fill_(9)
        state["s"]["step"] = 2
        state["l"].append(3)
        snapshot.wait("durable", TIMEOUT_S)
    target: dict[str, Any] = {
        "w": torch.ones(4),
        "c": torch.tensor(0.0),
        "s": {"step": 0},
        "l": [],
    }
    assert restored(faults.directory, target) == 1
    assert torch.equal(target["w"], torch.zeros(4))
    assert target["c"].item() == 1.0
    assert target["s"] == {"step": 1}
    assert target["l"] == [1, 2]


def test_a9_lost_component_failure(faults: Faults, start_ranks: Callable[..., Ranks]) -> None:
    faults.set({"op": "put_large", "match": "rank-00001", "do": "enospc", "message": "disk full"})
    outcomes = start_ranks(
        "save_own", 2, url=faults.url, steps=[7, 8], tensors=2, fixed=str(faults.script)
    ).wait()
    for seven, eight in outcomes:
        assert seven.startswith("full: ")
        assert "rank 1" in seven
        assert "model, optimizer" in seven
        assert "disk full" in seven
        assert eight == "committed", "training and the next save go on"
    assert forebay.open(faults.directory).steps() == [8]


@pytest.mark.parametrize("survives", [False, True])
def test_a10_pointer_before_durability(
    tmp_path: Path, runtime: Path, start_ranks: Callable[..., Ranks], survives: bool
) -> None:
    run = tmp_path / "run"
    save_and_wait(run, 100, {"w": forebay.per_rank(torch.arange(250_000, dtype=torch.int32))})
    poll(lambda: not agent_pids(runtime), "the first agent to end")
    nbytes = 40 * 2**20
    rate = nbytes / (4 if survives else 60)
    ranks = start_ranks(
        "save_and_hang",
        1,
        url=str(run),
        step=200,
        marker=str(tmp_path / "saved"),
        nbytes=nbytes,
        drain_bytes_per_s=rate,
        keep_last=1,
    )
    poll(lambda: (tmp_path / "saved-0").exists(), "the save to return")
    time.sleep(1.0)  # the case: everything dies one second after the save returned
    ranks.kill()
    if not survives:
        kill_agent(runtime)
        assert forebay.open(run).steps() == [100]
        target = {"w": forebay.per_rank(torch.zeros(250_000, dtype=torch.int32))}
        opened = forebay.open(run)
        assert (opened.read(100, "w", rank=0) == target["w"].item.numpy() + range(250_000)).all()
        return
    poll(lambda: 200 in forebay.open(run).steps(), "step 200 to be committed by the agent")
    poll(lambda: forebay.open(run).steps() == [200], "retention to keep only the last")
    assert forebay.open(run).read(200, "w", rank=0).shape == (nbytes // 4,)


def test_a11_structure_change(tmp_path: Path, start_ranks: Callable[..., Ranks]) -> None:
    url = str(tmp_path / "run")
    assert start_ranks("save_growing", 2, url=url).wait() == ["committed"] * 2
    opened = forebay.open(url)
    assert sorted(opened.tensors(1)) == ["a", "b"]
    assert sorted(opened.tensors(2)) == ["a", "b", "late"]
    assert opened.read(2, "late").tolist() == [3.0] * 5
    assert len(opened.values(2)["bytes"]) == 150
    assert start_ranks("load_growing", 2, url=url).wait() == [True, True]


def test_a12_grown_tensor(tmp_path: Path) -> None:
    with forebay.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"w": torch.arange(1000.0)}).wait("durable", TIMEOUT_S)
        checkpointer.save(2, {"w": torch.arange(2000.0), "new": torch.tensor(3)}).wait(
            "durable", TIMEOUT_S
        )
    target = {"w": torch.zeros(2000), "new": torch.tensor(0)}
    assert restored(tmp_path / "run", target) == 2
    assert torch.equal(target["w"], torch.arange(2000.0))
    assert target["new"].item() == 3
    first = {"w": torch.zeros(1000)}
    assert restored(tmp_path / "run", first, step=1) == 1
    assert torch.equal(first["w"], torch.arange(1000.0))


@pytest.mark.parametrize("local", [False, True])
def test_a13_truncated_object(tmp_path: Path, local: bool) -> None:
    names = ("a", "b", "c", "d")
    options: dict[str, Any] = {"local": tmp_path / "nvme"} if local else {}
    saved = {name: torch.full((1000,), float(i + 1)) for i, name in enumerate(names)}
    save_and_wait(tmp_path / "run", 1, saved, **options)
    os.truncate(only_shard(tmp_path / "run", 1), 4096 + 2 * 4000)
    target = {name: torch.full((1000,), 7.0) for name in names}
    with forebay.Checkpointer(tmp_path / "run", **options) as checkpointer:
        if not local:
            with pytest.raises(
                forebay.DamagedError,
                match=r"rank-00000.safetensors.*expected at least \d+ bytes, found 12096",
            ):
                checkpointer.restore(target)
            assert all(torch.equal(t, torch.full((1000,), 7.0)) for t in target.values())
            return
        assert checkpointer.restore(target) == 1
        report = checkpointer.last_restore
    assert all(torch.equal(target[name], saved[name]) for name in names)
    assert report is not None
    assert set(report.by_source) == {"local"}


@pytest.mark.parametrize("local", [False, True])
def test_a14_drainer_killed(tmp_path: Path, runtime: Path, local: bool) -> None:
    nbytes = 32 * 2**20
    options: dict[str, Any] = {"local": tmp_path / "nvme"} if local else {}
    checkpointer = forebay.Checkpointer(tmp_path / "run", drain_bytes_per_s=nbytes / 4, **options)
    state = {"w": torch.arange(nbytes // 4, dtype=torch.int32)}
    checkpointer.prepare(state)
    snapshot = checkpointer.save(1, state)
    poll(lambda: _done_share(runtime) >= 0.5, "half of the drain")
    kill_agent(runtime)
    began = time.monotonic()
    try:
        snapshot.wait("durable", timeout_s=10)
    except forebay.DeadlineError as error:
        assert "node agent" in str(error)  # noqa: PT017 - either end is right, with a cause
    assert time.monotonic() - began < 12
    snapshot.wait("durable", TIMEOUT_S)
    state["w"] += 1
    checkpointer.save(2, state).wait("durable", TIMEOUT_S)
    checkpointer.close()
    target = {"w": torch.zeros(nbytes // 4, dtype=torch.int32)}
    for step in (1, 2):
        assert restored(tmp_path / "run", target, step=step) == step
        assert torch.equal(target["w"], torch.arange(nbytes // 4, dtype=torch.int32) + step - 1)


def _done_share(runtime: Path) -> float:
    from forebay.drain.agent import ask
    from forebay.format.messages import AskStatus, StatusReply

    reply = ask(agent_socket(runtime), AskStatus(), timeout_s=10)
    assert isinstance(reply, StatusReply)
    if not reply.snapshots:
        return 0.0
    return reply.snapshots[-1].done_bytes / reply.snapshots[-1].nbytes


def test_a16_two_jobs_on_one_host(
    tmp_path: Path, runtime: Path, start_ranks: Callable[..., Ranks]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    first = forebay.Checkpointer(one)
    second = forebay.Checkpointer(two)
    small, large = {"w": torch.ones(10)}, {"w": torch.full((1000,), 2.0)}
    first.save(2, small).wait("durable", TIMEOUT_S)
    second.save(2, large).wait("durable", TIMEOUT_S)
    assert len(agent_pids(runtime)) == 2
    (refusal,) = start_ranks("save_refused", 1, url=str(one)).wait()
    assert refusal.startswith("busy: ")
    assert f"pid {os.getpid()}" in refusal
    second.close()
    poll(lambda: len(agent_pids(runtime)) == 1, "the agent of the second job to end")
    first.save(3, small).wait("durable", TIMEOUT_S)
    first.close()
    assert forebay.open(one).steps() == [2, 3]
    assert forebay.open(one).read(2, "w").shape == (10,)
    assert forebay.open(two).steps() == [2]
    assert forebay.open(two).read(2, "w").shape == (1000,)


def test_replicated_values_that_differ_are_refused(
    tmp_path: Path, start_ranks: Callable[..., Ranks]
) -> None:
    for name, values in {
        "value": [3, 4],
        "small": [[1.0, 2.0], [1.0, 2.5]],
        "large": [[1.0] * 40_000, [1.0] * 39_999 + [2.0]],
    }.items():
        url = str(tmp_path / f"run-{name}")
        outcomes = start_ranks("save_dict", 2, url=url, step=1, values={name: values}).wait()
        for outcome in outcomes:
            assert outcome.startswith("conflict: "), outcome
            assert name in outcome
            assert "rank 0" in outcome
            assert "rank 1" in outcome
            assert "per_rank" in outcome
        assert not list(Path(url).glob("manifests/*"))


def test_uncovered_targets_are_refused_before_any_byte(tmp_path: Path) -> None:
    topology = Topology(rank=0, world_size=1, node=0, nodes=1, node_ranks=(0,))
    save_and_wait(tmp_path / "run", 1, {"w": torch.ones(6), "v": torch.ones(2)}, topology=topology)
    target = {"v": torch.zeros(2), "w": torch.zeros(8)}
    with pytest.raises(
        forebay.MismatchError, match=r"w: shape \(8,\) in the target, \(6,\) stored"
    ):
        restored(tmp_path / "run", target)
    assert torch.equal(target["v"], torch.zeros(2))
    missing = {"v": torch.zeros(2), "w": torch.zeros(6), "u": torch.zeros(1)}
    with pytest.raises(forebay.MismatchError, match="u: not in the checkpoint"):
        restored(tmp_path / "run", missing)
    assert torch.equal(missing["v"], torch.zeros(2))
    with pytest.raises(forebay.MismatchError, match="no place for: v"):
        restored(tmp_path / "run", {"w": torch.zeros(6)})
