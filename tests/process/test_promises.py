"""Promises of the write path, on real processes: who dies, who waits, what bad input says."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay.drain.agent import ask
from forebay.format.messages import AskStatus, StatusReply
from tests import disks
from tests.process.conftest import (
    Faults,
    Ranks,
    Said,
    agent_pids,
    agent_socket,
    kill_agent,
    poll,
)

pytestmark = pytest.mark.usefixtures("runtime")

TIMEOUT_S = 60.0
AGENT_THREADS = 16  # its pools, the loop, and what pyarrow keeps


def commit_one(run: Path, step: int = 1, **options: Any) -> None:
    with forebay.Checkpointer(run, **options) as checkpointer:
        checkpointer.save(step, {"w": torch.arange(1000.0)}).wait("durable", TIMEOUT_S)


@pytest.mark.parametrize("local", [False, True])
def test_trainer_killed_a_millisecond_after_save(
    tmp_path: Path, start_ranks: Callable[..., Ranks], local: bool
) -> None:
    run, marker = tmp_path / "run", tmp_path / "saved"
    options = {"local": str(tmp_path / "nvme")} if local else {}
    ranks = start_ranks(
        "save_and_hang", 2, url=str(run), step=5, marker=str(marker), nbytes=8 * 2**20, **options
    )
    poll(lambda: all(Path(f"{marker}-{rank}").exists() for rank in range(2)), "both saves")
    time.sleep(0.001)  # the promise itself
    ranks.kill()
    poll(lambda: list(run.glob("manifests/*")), "the agent to commit step 5")
    assert forebay.open(run).steps() == [5]
    for rank in range(2):
        found = forebay.open(run).read(5, "w", rank=rank)
        assert (found == torch.arange(2 * 2**20, dtype=torch.int32).numpy() + rank).all()


def test_trainer_killed_while_its_agent_is_dead(
    tmp_path: Path, runtime: Path, start_ranks: Callable[..., Ranks], cli: Callable[..., Said]
) -> None:
    """The slot itself is the offer: an agent that starts later finds it."""
    run, marker = tmp_path / "run", tmp_path / "saved"
    ranks = start_ranks(
        "save_and_hang",
        1,
        url=str(run),
        step=5,
        marker=str(marker),
        nbytes=8 * 2**20,
        drain_bytes_per_s=1e6,
    )
    poll(lambda: Path(f"{marker}-0").exists(), "the save")
    ranks.kill()
    kill_agent(runtime)
    assert not list(run.glob("manifests/*"))
    said = cli("agent", run, "--linger", "1s", timeout_s=100)
    assert said.code == 0, said.err
    assert forebay.open(run).steps() == [5]


def test_save_waits_for_no_other_rank(tmp_path: Path, start_ranks: Callable[..., Ranks]) -> None:
    """Rank 1 saves only once rank 0's save has returned: a collective would never end."""
    url, done = str(tmp_path / "run"), str(tmp_path / "done")
    ranks = start_ranks("save_late", 2, url=url, late_rank=1, go="", done=done)
    assert ranks.wait(90) == ["committed"] * 2


def test_a_rank_that_dies_in_its_copy_leaves_the_step_absent(
    tmp_path: Path, start_ranks: Callable[..., Ranks]
) -> None:
    url = str(tmp_path / "run")
    outcomes = start_ranks("save_without", 2, url=url, missing=1).wait(check=False)
    assert outcomes[0].startswith("incomplete: ")
    assert "ranks 1 ended before they had staged it" in outcomes[0]
    assert forebay.open(url).steps() == [1]


def test_agent_killed_between_tiers_goes_on(tmp_path: Path, runtime: Path) -> None:
    """Spilled and killed before the upload: the next agent uploads from the local tier."""
    nbytes = 16 * 2**20
    checkpointer = forebay.Checkpointer(
        tmp_path / "run", local=tmp_path / "nvme", drain_bytes_per_s=nbytes / 3
    )
    state = {"w": torch.arange(nbytes // 4, dtype=torch.int32)}
    checkpointer.prepare(state)
    snapshot = checkpointer.save(1, state)
    snapshot.wait("local", TIMEOUT_S)
    kill_agent(runtime)
    state["w"].zero_()
    snapshot.wait("durable", TIMEOUT_S)
    checkpointer.close()
    found = forebay.open(tmp_path / "run").read(1, "w")
    assert (found == torch.arange(nbytes // 4, dtype=torch.int32).numpy()).all()


def test_everything_but_the_manifest_is_finished_at_restart(
    tmp_path: Path, cli: Callable[..., Said]
) -> None:
    run = tmp_path / "run"
    commit_one(run, 1)
    commit_one(run, 2)
    for manifest in run.glob("manifests/*2.json"):
        manifest.unlink()
    assert forebay.open(run).steps() == [1]
    assert "forebay commit" in cli("ls", run, "--all").out.replace("\n", " ")
    target = {"w": torch.zeros(1000)}
    with forebay.Checkpointer(run) as checkpointer:
        assert checkpointer.restore(target) == 2
    assert forebay.open(run).steps() == [1, 2]


def test_commit_verb(tmp_path: Path, cli: Callable[..., Said]) -> None:
    run = tmp_path / "run"
    commit_one(run, 1)
    commit_one(run, 2)
    next(run.glob("manifests/*2.json")).unlink()
    done = cli("commit", run, "2", "--json")
    assert (done.code, done.document["verdict"]) == (0, "committed")
    assert cli("commit", run, "2", "--json").document["verdict"] == "same"
    next(run.glob("manifests/*2.json")).unlink()
    next(run.glob("data/*2/*/*/record.json.zst")).unlink()
    missing = cli("commit", run, "2")
    assert missing.code == 3
    assert "no node's record is there" in missing.err
    assert forebay.open(run).steps() == [1]


def test_full_slots_skip_and_are_counted(tmp_path: Path, runtime: Path) -> None:
    nbytes = 4 * 2**20
    checkpointer = forebay.Checkpointer(tmp_path / "run", drain_bytes_per_s=nbytes / 2)
    state = {"w": torch.zeros(nbytes // 4)}
    checkpointer.prepare(state)
    snapshots = [checkpointer.save(step, state) for step in (1, 2, 3)]
    assert [bool(s.skipped) for s in snapshots] == [False, False, True]
    assert "slots of rank 0 still drain" in snapshots[2].skipped
    with pytest.raises(forebay.IncompleteError, match="step 3: no snapshot was taken"):
        snapshots[2].wait("durable", TIMEOUT_S)
    reply = poll(lambda: _status(runtime) if _status(runtime).skipped else None, "the count")
    assert reply.skipped == 1
    checkpointer.close()
    assert forebay.open(tmp_path / "run").steps() == [1, 2]


def _status(runtime: Path) -> StatusReply:
    reply = ask(agent_socket(runtime), AskStatus(), timeout_s=10)
    assert isinstance(reply, StatusReply)
    return reply


def test_on_full_wait(tmp_path: Path) -> None:
    nbytes = 2**20
    with forebay.Checkpointer(
        tmp_path / "run", drain_bytes_per_s=4 * nbytes, on_full="wait", slots=1
    ) as checkpointer:
        state = {"w": torch.zeros(nbytes // 4)}
        for step in (1, 2, 3):
            assert not checkpointer.save(step, state).skipped
    assert forebay.open(tmp_path / "run").steps() == [1, 2, 3]


def test_durable_every_keeps_the_others_near(tmp_path: Path) -> None:
    with forebay.Checkpointer(
        tmp_path / "run", local=tmp_path / "nvme", durable_every=2
    ) as checkpointer:
        for step in (1, 2, 3):
            snapshot = checkpointer.save(step, {"w": torch.full((10,), float(step))})
            snapshot.wait("local", TIMEOUT_S)
            if step == 2:
                with pytest.raises(forebay.UsageError, match="stays near"):
                    snapshot.wait("durable", TIMEOUT_S)
            else:
                snapshot.wait("durable", TIMEOUT_S)
    assert forebay.open(tmp_path / "run").steps() == [1, 3]


def test_durable_every_so_long_a_time(tmp_path: Path) -> None:
    with forebay.Checkpointer(
        tmp_path / "run", local=tmp_path / "nvme", durable_every="1h"
    ) as checkpointer:
        for step in (1, 2, 3):
            snapshot = checkpointer.save(step, {"w": torch.full((10,), float(step))})
            snapshot.wait("local" if step > 1 else "durable", TIMEOUT_S)
        poll(lambda: not checkpointer.status()["open"], "all to end")
        assert snapshot.status()["phase"] == "kept_near"
    assert forebay.open(tmp_path / "run").steps() == [1]


def test_keep_is_applied_after_the_commit(tmp_path: Path) -> None:
    keep = forebay.Keep(last=2, every=4)
    with forebay.Checkpointer(tmp_path / "run", keep=keep) as checkpointer:
        for step in range(3, 9):
            checkpointer.save(step, {"w": torch.ones(4)}).wait("durable", TIMEOUT_S)
    poll(
        lambda: forebay.open(tmp_path / "run").steps() == [4, 7, 8],
        "retention to leave steps 4, 7 and 8",
    )
    kept = {f"{step:012d}" for step in (4, 7, 8)}
    poll(
        lambda: {p.name for p in (tmp_path / "run" / "data").glob("*")} == kept,
        "the data of the others to go",
    )


def test_agent_is_small_and_has_no_torch(tmp_path: Path, runtime: Path) -> None:
    checkpointer = forebay.Checkpointer(tmp_path / "run")
    state = {"w": torch.ones(25 * 2**20), "v": [1, 2]}
    for step in range(3):
        checkpointer.save(step, state).wait("durable", TIMEOUT_S)
    (pid,) = agent_pids(runtime)
    status = Path(f"/proc/{pid}/status").read_text()
    resident = sum(
        int(found) * 1024
        for found in re.findall(r"^Rss(?:Anon|File):\s+(\d+) kB", status, re.MULTILINE)
    )
    assert resident <= 120e6, f"{resident / 1e6:.1f} MB"
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "/torch/" not in maps
    checkpointer.close()


def test_nothing_is_left_behind(tmp_path: Path, runtime: Path) -> None:
    commit_one(tmp_path / "run", local=tmp_path / "nvme")
    poll(lambda: not agent_pids(runtime), "the agent to end")
    assert not list(runtime.glob("*")) if runtime.exists() else True
    assert not list((tmp_path / "run").rglob(".*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disks.small_disk(tmp_path / "small", "4m") as path:
        yield path


def test_full_durable_disk(small_disk: Path) -> None:
    checkpointer = forebay.Checkpointer(small_disk / "run")
    small, large = {"w": torch.ones(1000)}, {"w": torch.ones(2 * 2**20)}
    checkpointer.save(1, small).wait("durable", TIMEOUT_S)
    with pytest.raises(forebay.FullError, match="No space left on device"):
        checkpointer.save(2, large).wait("durable", TIMEOUT_S)
    checkpointer.save(3, small).wait("durable", TIMEOUT_S)
    with pytest.raises(forebay.IncompleteError, match="not committed: 2 "):
        checkpointer.close()
    assert forebay.open(small_disk / "run").steps() == [1, 3]
    assert not list((small_disk / "run").rglob(".*.tmp"))


def test_full_local_disk_goes_on_to_the_durable_tier(
    small_disk: Path, tmp_path: Path, runtime: Path
) -> None:
    with forebay.Checkpointer(tmp_path / "run", local=small_disk / "nvme") as checkpointer:
        checkpointer.save(1, {"w": torch.ones(2 * 2**20)}).wait("durable", TIMEOUT_S)
    poll(lambda: not agent_pids(runtime), "the agent to end")
    assert forebay.open(tmp_path / "run").read(1, "w").sum() == 2 * 2**20


def test_full_shared_memory(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_RUNTIME_DIR", str(small_disk / "runtime"))
    checkpointer = forebay.Checkpointer(tmp_path / "run")
    with pytest.raises(forebay.FullError, match=r"needs .* bytes of shared memory.*are free"):
        checkpointer.prepare({"w": torch.ones(2 * 2**20)})
    assert not list((small_disk / "runtime").glob("*/*.arena"))
    checkpointer._leave(clean=True)
    poll(lambda: not agent_pids(small_disk), "the agent to end")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("{tmp}/missing/run", "/missing does not exist: make it"),
        ("{tmp}/file/run", "/file is no directory: make it"),
        ("{tmp}/file", "is a file, expected a directory"),
        ("ftp://host/run", "unknown scheme 'ftp'.*known are"),
        ("s3://bucket", "a run needs a name below the bucket"),
        ("s3://bucket/run?endpoint=http://host", "is plain http, .* say allow_http=true"),
        ("/proc/forebay-run", "/proc/forebay-run: cannot be used"),
        ("{tmp}/caf\udce9", "its name is not valid UTF-8"),
    ],
)
def test_bad_places_are_refused_in_one_line(tmp_path: Path, url: str, says: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(forebay.ForebayError, match=says) as caught:
        forebay.Checkpointer(url.format(tmp=tmp_path)).prepare({"w": torch.ones(1)})
    assert "\n" not in str(caught.value)


def test_a_runtime_directory_where_nothing_can_be_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., Said]
) -> None:
    monkeypatch.setenv("FOREBAY_RUNTIME_DIR", "/proc/forebay-run")
    with pytest.raises(forebay.ForebayError, match=r"/proc/forebay-run.*cannot be used"):
        forebay.Checkpointer(tmp_path / "run").prepare({"w": torch.ones(1)})
    said = cli("agent", tmp_path / "run")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("forebay: /proc/forebay-run/")
    assert said.err.count("\n") == 1


class Odd:
    """A value that nothing can encode."""


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"a": {"b": Odd()}}, r"a/b: a value of type .*Odd cannot be saved"),
        ({"a": {("t",): 1}}, r"key \('t',\) has type tuple"),
        ({"a": torch.ones(2, device="meta")}, "a: a tensor on the meta device"),
        ({"a": [1, {2, print}]}, "a/1: a value of type builtins.builtin_function"),
        ([1, 2], "expected a dict, found list"),
    ],
)
def test_what_cannot_be_encoded_is_refused_with_its_path(
    tmp_path: Path, state: Any, says: str
) -> None:
    checkpointer = forebay.Checkpointer(tmp_path / "run")
    with pytest.raises(forebay.StateError, match=says):
        checkpointer.save(1, state)
    checkpointer.save(2, {"w": torch.ones(1)}).wait("durable", TIMEOUT_S)
    checkpointer.close()


def test_command_line_says_one_line_for_bad_input(tmp_path: Path, cli: Callable[..., Said]) -> None:
    run = tmp_path / "run"
    commit_one(run, 7)
    (tmp_path / "empty").mkdir()
    cases: list[tuple[tuple[object, ...], int, str]] = [
        (("show", run, "8"), 2, "no committed step 8: newest are 7"),
        (("ls", tmp_path / "empty"), 2, "not a forebay run"),
        (("ls", tmp_path / "nowhere"), 2, "does not exist"),
        (("verify", run, "8"), 2, "no committed step 8"),
        (("commit", run, "8"), 2, "nothing was stored for step 8"),
        (("ls", "ftp://x/y"), 2, "unknown scheme 'ftp'"),
        (("verify", run, "--part", "3/2"), 2, "expected I/N"),
    ]
    for arguments, code, says in cases:
        said = cli(*arguments)
        assert said.code == code, (arguments, said)
        assert says in said.err
        assert said.err.count("\n") == 1, said.err
        assert said.out == ""
    manifest = next(run.glob("manifests/*"))
    data = bytearray(manifest.read_bytes())
    data[100] ^= 4
    manifest.write_bytes(data)
    for arguments in (("show", run, "7"), ("verify", run, "7")):
        said = cli(*arguments)
        assert said.code == 4
        assert "expected digest" in said.err + said.out
    assert "damaged" in cli("ls", run).out
    with (
        pytest.raises(forebay.DamagedError, match=r"expected digest .* found"),
        forebay.Checkpointer(run) as checkpointer,
    ):
        checkpointer.restore({"w": torch.zeros(1000)})


def test_json_documents(tmp_path: Path, runtime: Path, cli: Callable[..., Said]) -> None:
    run = tmp_path / "run"
    checkpointer = forebay.Checkpointer(run)
    state = {"w": torch.ones(3, 4), "n": {"lr": 0.5, "on": True, "t": (1, None)}}
    checkpointer.save(3, state).wait("durable", TIMEOUT_S)
    listed = cli("ls", run, "--json").document
    assert [row["step"] for row in listed["checkpoints"]] == [3]
    assert listed["checkpoints"][0]["world_size"] == 1
    shown = cli("show", run, "--json").document
    assert shown["step"] == 3
    (tensor,) = shown["tensors"]
    assert (tensor["fqn"], tensor["dtype"], tensor["shape"]) == ("w", "float32", [3, 4])
    assert shown["values"] == {"n/lr": 0.5, "n/on": True, "n/t": [1, None]}
    verified = cli("verify", run, "--json").document
    assert verified["ok"] is True
    assert verified["bytes_checked"] > 48
    status = cli("status", "--json")
    assert status.code == 0
    (agent,) = status.document["agents"]
    assert agent["committed"] == 1
    assert agent["snapshots"][0]["phase"] == "committed"
    kill_agent(runtime)
    os.kill(os.getpid(), signal.SIGCONT)
    poll(lambda: agent_pids(runtime), "the trainer to start another agent")
    checkpointer.close()
    text = cli("show", run)
    assert text.code == 0
    assert "3x4" in text.out
    json.dumps(shown)


def test_store_that_fails_for_a_while(faults: Faults) -> None:
    faults.set({"op": "put_large", "do": "eio", "times": 2}, {"op": "put", "do": "eio", "times": 1})
    with forebay.Checkpointer(faults.url) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(10)}).wait("durable", TIMEOUT_S)
    assert forebay.open(faults.directory).steps() == [1]


def test_lost_reply_of_the_manifest(faults: Faults) -> None:
    """And, before it, one of the probe."""
    lost = {"op": "create", "do": "lost_reply", "times": 1}
    faults.set(lost | {"match": "probe/"}, lost | {"match": "manifests/"})
    with forebay.Checkpointer(faults.url) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(10)}).wait("durable", TIMEOUT_S)
    assert forebay.open(faults.directory).steps() == [1]


def test_a_restart_restores_from_memory(
    tmp_path: Path, start_ranks: Callable[..., Ranks], runtime: Path
) -> None:
    run, marker, nbytes = tmp_path / "run", tmp_path / "saved", 4 * 2**20
    ranks = start_ranks("save_and_hang", 1, url=str(run), step=5, marker=str(marker), nbytes=nbytes)
    poll(lambda: list(run.glob("manifests/*")), "the commit")
    ranks.kill()
    target = {"w": forebay.per_rank(torch.zeros(nbytes // 4, dtype=torch.int32))}
    (arena,) = runtime.glob("*/rank-*.arena")
    before = arena.stat().st_ino
    with forebay.Checkpointer(run) as checkpointer:
        assert checkpointer.restore(target) == 5
        report = checkpointer.last_restore
        assert arena.stat().st_ino == before, "the arena of the dead is used again"
    assert report is not None
    assert {name: share.bytes for name, share in report.by_source.items()} == {"memory": nbytes}
    assert torch.equal(target["w"].item, torch.arange(nbytes // 4, dtype=torch.int32))


def test_memory_that_was_changed_is_not_used(
    tmp_path: Path, start_ranks: Callable[..., Ranks], runtime: Path
) -> None:
    run, marker, nbytes = tmp_path / "run", tmp_path / "saved", 2**20
    ranks = start_ranks("save_and_hang", 1, url=str(run), step=5, marker=str(marker), nbytes=nbytes)
    poll(lambda: list(run.glob("manifests/*")), "the commit")
    ranks.kill()
    (arena,) = runtime.glob("*/rank-*.arena")
    data = bytearray(arena.read_bytes())
    image = data.find(torch.arange(64, dtype=torch.int32).numpy().tobytes())
    assert image > 0
    data[image + 1000] ^= 1
    arena.write_bytes(data)
    target = {"w": forebay.per_rank(torch.zeros(nbytes // 4, dtype=torch.int32))}
    with forebay.Checkpointer(run) as checkpointer:
        assert checkpointer.restore(target) == 5
        report = checkpointer.last_restore
    assert report is not None
    assert set(report.by_source) == {"durable"}
    assert len(report.bad_ranges) == 1
    assert torch.equal(target["w"].item, torch.arange(nbytes // 4, dtype=torch.int32))


def test_optimizer_state_of_the_first_step_finds_room(tmp_path: Path, runtime: Path) -> None:
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with forebay.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.restore(state) is None
        (arena,) = runtime.glob("*/rank-*.arena")
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()
        checkpointer.save(1, state).wait("durable", TIMEOUT_S)
        assert list(runtime.glob("*/rank-*.arena")) == [arena], "no new arena in the first save"
    fresh = torch.nn.Linear(300, 300)
    again = torch.optim.AdamW(fresh.parameters())
    with forebay.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.restore({"model": fresh, "optimizer": again}) == 1
    for name, tensor in optimizer.state_dict()["state"][0].items():
        assert torch.equal(tensor, again.state_dict()["state"][0][name]), name


def test_status_says_when_an_agent_is_gone(
    tmp_path: Path, runtime: Path, start_ranks: Callable[..., Ranks], cli: Callable[..., Said]
) -> None:
    marker = tmp_path / "saved"
    ranks = start_ranks(
        "save_and_hang", 1, url=str(tmp_path / "run"), step=1, marker=str(marker), nbytes=4096
    )
    poll(lambda: Path(f"{marker}-0").exists(), "the save")
    assert cli("status").code == 0
    ranks.kill()
    kill_agent(runtime)
    said = cli("status", "--json")
    assert said.code == 5
    assert "no agent answers" in said.document["agents"][0]["why"]


def test_ranks_that_cannot_talk_do_not_choose_a_step(
    tmp_path: Path, start_ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "run")
    outcomes = start_ranks("restore_alone", 2, url=url, attempt="by-hand").wait()
    for unnamed, named in outcomes:
        assert unnamed.startswith("usage: restore: 2 ranks cannot agree on a step")
        assert named == 1


def test_a_copy_that_fails_gives_its_slot_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forebay.capture.copy import Copier

    state = {"w": torch.ones(10)}
    with forebay.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.prepare(state)
        with monkeypatch.context() as patched:
            patched.setattr(Copier, "copy", lambda *_: (_ for _ in ()).throw(RuntimeError("lost")))
            for step in (1, 2, 3):
                with pytest.raises(RuntimeError, match="lost"):
                    checkpointer.save(step, state)
        checkpointer.save(4, state).wait("durable", TIMEOUT_S)
    assert forebay.open(tmp_path / "run").steps() == [4]


def test_names_in_shared_memory_that_somebody_removed(tmp_path: Path, runtime: Path) -> None:
    """The mappings live on; only the names are gone. systemd's RemoveIPC does this at a logout."""
    state = {"w": torch.zeros(1000)}
    with forebay.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state).wait("durable", TIMEOUT_S)
        (pid,) = agent_pids(runtime)
        for path in runtime.rglob("*"):
            if path.is_file() or path.is_socket():
                path.unlink()
        for step in (2, 3, 4):
            state["w"].fill_(step)
            checkpointer.save(step, state).wait("durable", TIMEOUT_S)
    poll(lambda: pid not in agent_pids(runtime), "the agent to end")
    run = forebay.open(tmp_path / "run")
    assert [run.read(step, "w")[0] for step in run.steps()] == [0, 2, 3, 4]


def test_arguments_go_before_settings(tmp_path: Path) -> None:
    from forebay.config import Settings

    settings = Settings(slots=3, on_full="wait", keep=forebay.Keep(last=2))
    one = forebay.Checkpointer(tmp_path / "run", settings=settings)
    assert one.settings == settings
    two = forebay.Checkpointer(tmp_path / "run", settings=settings, slots=1)
    assert (two.settings.slots, two.settings.on_full) == (1, "wait")


def test_a_target_that_ties_two_different_tensors_is_refused(tmp_path: Path) -> None:
    with forebay.Checkpointer(tmp_path / "run") as checkpointer:
        state = {"a": torch.ones(3), "b": torch.zeros(3), "c": torch.ones(2)}
        checkpointer.save(1, state).wait("durable", TIMEOUT_S)
    shared, other = torch.full((3,), 7.0), torch.full((2,), 7.0)
    with (
        forebay.Checkpointer(tmp_path / "run") as checkpointer,
        pytest.raises(forebay.MismatchError, match="the target ties it to a"),
    ):
        checkpointer.restore({"c": other, "a": shared, "b": shared})
    assert (shared == 7).all()
    assert (other == 7).all()


def test_a_view_that_conjugates_or_negates_comes_back_as_it_reads(tmp_path: Path) -> None:
    number = torch.randn(40_000, dtype=torch.complex64)
    state = {"a": number, "b": number.conj(), "c": number.imag, "d": number.conj().imag}
    target = {name: torch.zeros_like(tensor.resolve_neg()) for name, tensor in state.items()}
    target["b"] = torch.zeros_like(number)
    with forebay.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state).wait(timeout_s=TIMEOUT_S)
        assert checkpointer.restore(target) == 1
    assert all(torch.equal(target[name], tensor) for name, tensor in state.items())


def test_an_attempt_with_a_dot_is_refused(tmp_path: Path) -> None:
    """What follows a dot counts the saves of one step: nothing would be heard of such a start's."""
    with pytest.raises(forebay.UsageError, match="no dot"):
        forebay.Checkpointer(tmp_path / "run", attempt="12345.0").prepare({"x": torch.ones(1)})


def test_a_forked_process_does_not_write_into_its_parents_slots(tmp_path: Path) -> None:
    state = {"w": torch.arange(1000.0)}
    with forebay.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state).wait("durable", TIMEOUT_S)
        child = os.fork()
        if child == 0:
            refused = 0
            for use in (
                lambda: checkpointer.save(2, state),
                lambda: checkpointer.restore(state),
                checkpointer.close,
            ):
                try:
                    use()
                except forebay.UsageError:
                    refused += 1
            checkpointer.__exit__(SystemExit, None, None)  # as where it ends in a with block
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        checkpointer.save(3, state).wait("durable", TIMEOUT_S)
    assert forebay.open(tmp_path / "run").steps() == [1, 3]
