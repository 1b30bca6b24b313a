"""The whole path on a real S3 server: agents and servers killed, keys that expire, a store that
hangs, throttles, races, and is slower than the saves come.
"""

from __future__ import annotations

import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay.commit.catalog import Catalog
from forebay.drain.finish import LITTER_AGE_S
from forebay.errors import DeniedError, IncompleteError, StoreError
from forebay.format.names import PROBE_RESULT_KEY
from forebay.storage.address import open_store
from forebay.testing.proxy import Fault, FaultProxy
from forebay.testing.s3 import S3Server
from tests.process.conftest import Ranks, Said, agent_pids, kill_agent, poll
from tests.race import race
from tests.servers import Place

TIMEOUT_S = 90.0
MIB = 2**20
PART = 5 * MIB


def run_url(**options: str) -> str:
    """A run of this test alone; where the server is, is in the environment."""
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return f"s3://ckpt/{secrets.token_hex(6)}" + (f"?{query}" if query else "")


def state_of(nbytes: int, seed: int = 0) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    return {"w": torch.randint(0, 255, (nbytes,), dtype=torch.uint8, generator=made), "step": seed}


def check(url: str, step: int, expected: dict[str, Any]) -> None:
    """What the store holds is what was saved, every byte checked."""
    found = forebay.open(url).read(step, "w")
    assert bytes(found) == bytes(expected["w"].numpy())


def parts_sent(proxy: FaultProxy) -> Counter[tuple[str, str]]:
    """How often the store took each part of each upload, whether or not the agent lived to hear."""
    found: Counter[tuple[str, str]] = Counter()
    for one in list(proxy.requests):
        number = re.search(r"partNumber=(\d+)", one.query)
        if one.method == "PUT" and number is not None and one.upstream_status == 200:
            found[one.path, number[1]] += 1
    return found


def test_ranks_save_and_restore(seaweed: Place, start_ranks: Callable[..., Ranks]) -> None:
    url = run_url()
    saved = start_ranks("save_trained", 2, url=url, layout="fsdp", step=3).wait()
    found = start_ranks("load_trained", 3, url=url, layout="fsdp", step=3).wait()
    assert saved[0]
    assert saved[0] == found[0]
    assert open_store(url).head(PROBE_RESULT_KEY) is not None


def test_ranks_of_a_node_read_the_index_once(
    proxy: FaultProxy, start_ranks: Callable[..., Ranks]
) -> None:
    """Three ranks of another layout: the footer, places and digests, and the state, once each."""
    url = run_url()
    saved = start_ranks("save_trained", 2, url=url, layout="fsdp", step=3).wait()
    before = len(proxy.requests)
    assert start_ranks("load_trained", 3, url=url, layout="fsdp", step=3).wait()[0] == saved[0]
    got = Counter(
        one.path.rpartition("/")[2] for one in proxy.requests[before:] if one.method == "GET"
    )
    assert (got["index.parquet"], got["state.msgpack.zst"]) == (3, 1), got


@pytest.mark.parametrize("layout", ["hsdp", "plain"])
def test_replicas_read_no_byte_twice(
    proxy: FaultProxy, start_ranks: Callable[..., Ranks], layout: str
) -> None:
    """Restored by four ranks that hold all of it in common, or half."""
    url, model = run_url(), {"step": 3, "width": 256}
    saved = start_ranks("save_trained", 2, url=url, layout="fsdp", **model).wait()
    before = len(proxy.requests)
    found = start_ranks("load_trained", 4, url=url, layout=layout, **model).wait()
    assert found[0] == saved[0]
    shards = {
        info.key: info.size
        for info in open_store(url).list("data/")
        if info.key.endswith(".safetensors")
    }
    got: Counter[str] = Counter()
    for one in list(proxy.requests)[before:]:
        for key in shards:
            if one.method == "GET" and one.path.endswith(key):
                got[key] += one.reply_bytes
    print(f"{layout}: {sum(got.values())} of {sum(shards.values())} bytes read")
    assert got.keys() == shards.keys()
    # A gap below 64 KiB is cheaper read than left out, so that a small neighbour may come twice.
    assert all(got[key] <= 1.2 * shards[key] for key in shards)


@pytest.mark.parametrize("local", [True, False])
def test_an_agent_that_dies_sends_no_part_again(
    proxy: FaultProxy, runtime: Path, tmp_path: Path, local: bool
) -> None:
    url, state = run_url(part_size="5MiB"), state_of(40 * MIB)
    (tmp_path / "local").mkdir()
    with forebay.Checkpointer(
        url, local=tmp_path / "local" if local else None, drain_bytes_per_s=12e6
    ) as checkpointer:
        snapshot = checkpointer.save(1, state)
        poll(lambda: len(parts_sent(proxy)) >= 3, "three parts to arrive")
        kill_agent(runtime)
        snapshot.wait("durable", TIMEOUT_S)
    sent = parts_sent(proxy)
    assert len(sent) == 9
    assert set(sent.values()) == {1}
    assert sum(one.method == "POST" and "uploads=" in one.query for one in proxy.requests) == 1
    check(url, 1, state)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server of this test alone, to be killed and stopped."""
    with S3Server(tmp_path / "server") as made:
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)
        yield made


def test_the_server_dies_while_a_snapshot_drains(server: S3Server, runtime: Path) -> None:
    url, state = run_url(part_size="5MiB"), state_of(30 * MIB)
    with forebay.Checkpointer(url, drain_bytes_per_s=15e6) as checkpointer:
        snapshot = checkpointer.save(1, state)
        poll(lambda: snapshot.status()["done_bytes"] > PART, "the upload to be under way")
        server.kill()
        poll(lambda: snapshot.status()["trouble"], "the trouble to be told")
        assert "cannot be reached" in snapshot.status()["trouble"]
        server.start()
        snapshot.wait("durable", TIMEOUT_S)
        assert snapshot.status()["trouble"] == ""
    check(url, 1, state)


def test_a_store_that_hangs_keeps_no_save_waiting(
    server: S3Server, runtime: Path, tmp_path: Path
) -> None:
    """Saves go on to the local tier; what waits too long gives way to newer ones."""
    url, state = run_url(), state_of(2 * MIB)
    (tmp_path / "local").mkdir()
    with forebay.Checkpointer(url, local=tmp_path / "local") as checkpointer:
        checkpointer.save(1, state).wait("durable", TIMEOUT_S)
        server.suspend()
        snapshots = []
        for step in range(2, 12):
            state["step"] = step
            snapshots.append(checkpointer.save(step, state))
            assert not snapshots[-1].skipped
            snapshots[-1].wait("local", TIMEOUT_S)
        phases = Counter(snapshot.status()["phase"] for snapshot in snapshots)
        assert phases["committed"] == 0
        server.resume()
        snapshots[-1].wait("durable", TIMEOUT_S)
        poll(lambda: not checkpointer.status()["open"], "all to end")
        ended = Counter(snapshot.status()["phase"] for snapshot in snapshots)
        assert set(ended) == {"committed", "kept_near"}
        assert ended["kept_near"] >= 5
    assert forebay.open(url).steps()[-1] == 11


def test_newer_snapshots_take_the_place_of_waiting_ones(
    seaweed: Place, runtime: Path, tmp_path: Path, cli: Callable[..., Said]
) -> None:
    url, state = run_url(part_size="5MiB"), state_of(20 * MIB)
    (tmp_path / "local").mkdir()
    with forebay.Checkpointer(url, local=tmp_path / "local", drain_bytes_per_s=5e6) as checkpointer:
        snapshots = []
        for step in range(1, 6):
            snapshots.append(checkpointer.save(step, state))
            snapshots[-1].wait("local", TIMEOUT_S)
            if step == 1:
                poll(lambda: snapshots[0].status()["done_bytes"], "the first to begin")
        news = poll(lambda: _with_forecast(snapshots[0]), "a forecast")
        assert 0 < news["durable_in_s"] < 60
        assert 0 < news["done_bytes"] < news["nbytes"]
        assert 1e6 < news["bytes_per_s"] < 8e6
        (agent,) = cli("status", "--json").document["agents"]
        shown = {row["step"]: row for row in agent["snapshots"]}
        assert shown[1]["phase"] == "uploading"
        assert shown[5]["durable_in_s"] > shown[1]["durable_in_s"]
        assert agent["limit_bytes_per_s"] == pytest.approx(5e6)
        assert "durable" in cli("status").out
        with pytest.raises(IncompleteError, match="took its place"):
            snapshots[2].wait("durable", TIMEOUT_S)
        snapshots[-1].wait("durable", TIMEOUT_S)
        phases = [snapshot.status()["phase"] for snapshot in snapshots]
    assert phases[0] == phases[-1] == "committed"
    assert phases.count("kept_near") >= 2
    assert forebay.open(url).steps()[-1] == 5


def _with_forecast(snapshot: forebay.Snapshot) -> Any:
    news = snapshot.status()
    return news if news["durable_in_s"] and news["done_bytes"] else None


def test_keys_that_expire_and_are_renewed(proxy: FaultProxy, runtime: Path, tmp_path: Path) -> None:
    url, state = run_url(), state_of(MIB)
    (tmp_path / "local").mkdir()
    with forebay.Checkpointer(url, local=tmp_path / "local") as checkpointer:
        checkpointer.prepare(state)
        proxy.set_faults([Fault(do="status", status=400, code="ExpiredToken")])
        snapshot = checkpointer.save(1, state)
        snapshot.wait("local", TIMEOUT_S)
        trouble = poll(lambda: snapshot.status()["trouble"], "the trouble to be told")
        assert trouble.startswith(url)
        assert "renew the credentials" in trouble
        assert "\n" not in trouble
        proxy.set_faults([])
        snapshot.wait("durable", TIMEOUT_S)
    check(url, 1, state)


def test_throttling_slows_the_drain_and_it_ends(proxy: FaultProxy, runtime: Path) -> None:
    url, state = run_url(part_size="5MiB"), state_of(30 * MIB)
    with forebay.Checkpointer(url) as checkpointer:
        checkpointer.prepare(state)
        proxy.set_faults([Fault(do="status", method="PUT", match="partNumber", times=6)])
        checkpointer.save(1, state).wait("durable", TIMEOUT_S)
    assert Counter(one.status for one in proxy.requests)[503] == 6
    check(url, 1, state)


def test_one_request_in_five_fails(proxy: FaultProxy, runtime: Path) -> None:
    url, state = run_url(part_size="5MiB"), state_of(20 * MIB)
    proxy.set_faults([Fault(do="status", share=0.2)])
    with forebay.Checkpointer(url) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state).wait("durable", TIMEOUT_S)
    target = {"w": torch.zeros_like(state["w"]), "step": 5}
    with forebay.Checkpointer(url) as checkpointer:
        assert checkpointer.restore(target) == 3
    assert torch.equal(target["w"], state["w"])


@pytest.mark.parametrize("do", ["lose_reply", "reset_reply"])
def test_a_manifest_whose_reply_is_lost(proxy: FaultProxy, runtime: Path, do: str) -> None:
    url, state = run_url(), state_of(1000)
    with forebay.Checkpointer(url) as checkpointer:
        checkpointer.prepare(state)
        proxy.set_faults([Fault(do=do, method="PUT", match="manifests/", times=2)])  # type: ignore[arg-type]
        checkpointer.save(1, state).wait("durable", TIMEOUT_S)
    assert forebay.open(url).steps() == [1]


def test_sixteen_processes_commit_one_step(seaweed: Place) -> None:
    won = race(run_url(), rounds=3)
    assert won.total() == 3


def test_a_store_without_conditional_creates_is_refused(
    moto: Place, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or used by one writer, when that is said."""
    with FaultProxy(moto.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        proxy.set_faults([Fault(do="unconditional")])
        url, state = run_url(), state_of(1000)
        with pytest.raises(StoreError, match=r"16 of 16 creators.*commit_mode='single-writer'"):
            forebay.Checkpointer(url).prepare(state)
        assert not agent_pids(runtime)
        settings = forebay.config.Settings(commit_mode="single-writer")
        with forebay.Checkpointer(url, settings=settings) as checkpointer:
            checkpointer.save(1, state).wait("durable", TIMEOUT_S)
        check(url, 1, state)
        assert forebay.open(url).steps() == [1]


def test_a_store_is_probed_once_a_run(proxy: FaultProxy, runtime: Path) -> None:
    def probes() -> int:
        return sum("-race" in one.path and one.method == "PUT" for one in proxy.requests)

    url = run_url()
    for count in (1, 2):
        with forebay.Checkpointer(url) as checkpointer:
            checkpointer.prepare({"w": torch.ones(1)})
        assert probes() == 16, count
    left = [info.key for info in open_store(url).list("probe/")]
    assert left == [PROBE_RESULT_KEY]


def test_wrong_keys_at_the_start(
    seaweed: Place, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused at once, before anything is trained; a start with the right keys works."""
    right = seaweed.environment["AWS_SECRET_ACCESS_KEY"]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    url, state = run_url(), state_of(1000)
    with pytest.raises(DeniedError, match="secret key"):
        forebay.Checkpointer(url).restore(state)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", right)
    with forebay.Checkpointer(url) as checkpointer:
        assert checkpointer.restore(state) is None
        checkpointer.save(1, state).wait("durable", TIMEOUT_S)


def test_a_start_with_other_keys_brings_its_own_agent(
    seaweed: Place, runtime: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The agent of an earlier start has the earlier keys; what it had not sent goes on."""
    (tmp_path / "local").mkdir()
    url, state = run_url(part_size="5MiB"), state_of(30 * MIB)
    earlier = forebay.Checkpointer(url, local=tmp_path / "local", drain_bytes_per_s=2e6)
    earlier.save(1, state).wait("local", TIMEOUT_S)
    (first,) = agent_pids(runtime)
    earlier._leave(clean=False)
    monkeypatch.setenv("AWS_SESSION_NAME", "renewed")
    target = {"w": torch.zeros_like(state["w"]), "step": 5}
    with forebay.Checkpointer(url, local=tmp_path / "local") as checkpointer:
        assert checkpointer.restore(target) == 1
        (second,) = agent_pids(runtime)
        assert second != first
    assert torch.equal(target["w"], state["w"])


def test_an_agent_sweeps_uploads_of_long_ago(
    seaweed: Place, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload as old as this one stays; the age is what the agent goes by."""
    from forebay.storage.endpoint import parse_remote
    from forebay.storage.pace import Pace
    from forebay.storage.s3 import S3

    url = run_url()
    client = S3(parse_remote(url))
    young = client.begin("data/abandoned", Pace())
    with forebay.Checkpointer(url) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(10)}).wait("durable", TIMEOUT_S)
    assert [upload for _, upload, _ in client.uploads("", Pace())] == [young]
    assert open_store(url).sweep("", older_than_s=LITTER_AGE_S) == 0
    assert open_store(url).sweep("", older_than_s=0) == 1


def test_nodes_wait_for_their_turn(seaweed: Place, runtime: Path) -> None:
    """A window of three seconds: the node begins when its name says, not at once."""
    from forebay.storage.pace import start_delay_s

    url = run_url()
    delay_s = start_delay_s(f"{url} node 0", 3.0)
    settings = forebay.config.Settings(stagger_s=3.0)
    with forebay.Checkpointer(url, settings=settings) as checkpointer:
        checkpointer.prepare({"w": torch.ones(1)})
        snapshot = checkpointer.save(1, {"w": torch.ones(1)})
        staged_s = time.time()
        snapshot.wait("durable", TIMEOUT_S)
    begun_s = snapshot.status()["reached_s"]["uploading"]
    assert begun_s - staged_s > delay_s - 0.2


def test_the_catalog_of_a_missing_bucket(seaweed: Place, cli: Callable[..., Said]) -> None:
    said = cli("ls", "s3://nosuch/run")
    assert said.code == 1
    assert "make the bucket, or correct the URL" in said.err
    assert "Traceback" not in said.err
    with pytest.raises(StoreError, match="no such bucket"):
        Catalog(open_store("s3://nosuch/run")).steps()


def test_a_tier_that_cannot_be_asked_is_not_called_damaged(
    proxy: FaultProxy, runtime: Path
) -> None:
    """Nor passed over for an older step: its bytes are good."""
    url = run_url()
    with forebay.Checkpointer(url) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(MIB, step)).wait("durable", TIMEOUT_S)
    poll(lambda: not agent_pids(runtime), "the agent to end")
    expired = Fault(
        do="status", method="GET", match="/0*2/.*rank-00000", status=403, code="ExpiredToken"
    )
    proxy.set_faults([expired])
    target = state_of(MIB, 9)
    with forebay.Checkpointer(url) as checkpointer:
        with pytest.raises(DeniedError, match="renew the credentials"):
            checkpointer.restore(target, fallback=True)
        assert target["step"] == 9
        proxy.set_faults([])
        assert checkpointer.restore(target, fallback=True) == 2


def test_failed_uploads_keep_no_deleted_image(
    proxy: FaultProxy, runtime: Path, tmp_path: Path
) -> None:
    """A part size that is no whole pages, too: 6 MB."""
    (tmp_path / "local").mkdir()
    url, state = run_url(part_size="6MB"), state_of(30 * MIB)
    with forebay.Checkpointer(url, local=tmp_path / "local") as checkpointer:
        checkpointer.save(1, state).wait("durable", TIMEOUT_S)
        (agent,) = agent_pids(runtime)
        proxy.set_faults(
            [Fault(do="reset_request", method="PUT", match="partNumber", at_bytes=10_000)]
        )
        snapshot = checkpointer.save(2, state)
        poll(lambda: snapshot.status()["trouble"], "the trouble to be told")
        proxy.set_faults([])
        snapshot.wait("durable", TIMEOUT_S)
        maps = Path(f"/proc/{agent}/maps")
        poll(lambda: "rank-00000.safetensors" not in maps.read_text(), "the mappings to go")


def test_the_agent_verb_says_at_once_that_it_cannot(
    seaweed: Place, runtime: Path, cli: Callable[..., Said]
) -> None:
    said = cli("agent", "s3://nosuch/run", "--linger", "1s")
    assert said.code == 1
    assert "make the bucket, or correct the URL" in said.err
