"""Each fault that a store's network has, at each request of a save, a delete, a commit, a restore.

The agent's own parts run in this process, against a real S3 server behind the fault proxy.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay.checkpointer import _manifest_bytes
from forebay.commit.catalog import Catalog
from forebay.commit.publish import finish
from forebay.errors import ForebayError
from forebay.format import names
from forebay.format.manifest import read_manifest
from forebay.format.messages import Phase
from forebay.restore.session import Session
from forebay.storage import remote, s3
from forebay.storage.address import open_store
from forebay.storage.endpoint import parse_remote
from forebay.storage.remote import RemoteStore
from forebay.storage.reread import TRIES
from forebay.testing.proxy import FaultProxy, Seen
from tests.node import Node, wrong
from tests.player import ATTEMPT
from tests.process.conftest import poll
from tests.servers import Place
from tests.sweep import KINDS, Case, cases, sweep

PART = 5 * 2**20
SIZES = {"whole": 150_000, "in parts": PART + 400_000}
REPLY_S = 1.0
PATIENCE_S = 1.0


@pytest.fixture
def server(seaweed: Place, monkeypatch: pytest.MonkeyPatch) -> str:
    """A real server, whose clients lose patience soon."""
    for module, name in ((s3, "_REPLY_S"), (s3, "_CONNECT_S"), (remote, "_CONNECT_S")):
        monkeypatch.setattr(module, name, REPLY_S)
    monkeypatch.setattr(remote, "_REQUEST_S", REPLY_S)
    return seaweed.endpoint


def store_at(endpoint: str, run: str) -> RemoteStore:
    url = parse_remote(f"s3://ckpt/{run}?endpoint={endpoint}&allow_http=true")
    return RemoteStore(url, patience_s=PATIENCE_S, part_bytes=PART)


def told_badly(text: str) -> list[str]:
    return [] if text and "\n" not in text else [f"not one line: {text!r}"]


# -- a save, its commit, and the deletion of the step before ---------------------------------------


def disturbed_save(
    server: str, home: Path, proxy: FaultProxy, nbytes: int, case: Case | None
) -> tuple[list[Seen], list[str]]:
    """Steps 1 to 3, the fault in 2, one checkpoint kept: requests of step 2, and what is wrong."""
    run, found = secrets.token_hex(6), []
    direct = store_at(server, run)
    node = Node(home / run, store_at(proxy.url, run), nbytes=nbytes)
    with contextlib.closing(node):
        assert node.save(1).phase is Phase.COMMITTED
        del proxy.requests[:]
        proxy.set_faults([case.fault] if case else [])
        second = node.save(2)
        requests = list(proxy.requests)
        proxy.set_faults([])
        if second.phase is not Phase.COMMITTED:
            found += [f"step 2 {second.phase.value}: {second.detail}"] if case.times == 1 else []
            found += told_badly(second.detail)
        steps = Catalog(direct).steps()
        if steps[-1:] != [2 if second.phase is Phase.COMMITTED else 1] and steps[-1:] != [2]:
            found.append(f"a step that was durable is gone: {steps} are left")
        found += wrong(direct)
        third = node.save(3)
        if third.phase is not Phase.COMMITTED:
            found.append(f"the save after it {third.phase.value}: {third.detail}")
    keys = [info.key for info in direct.list("")]
    left = [key for key in keys if not is_of(key, 3)]
    if second.phase is Phase.COMMITTED and left and not unreadable_manifest(case):
        found.append(f"left behind: {left}")
    return requests, found + wrong(direct)


def unreadable_manifest(case: Case | None) -> bool:
    """A manifest that is wrong each time it is read is deleted; whose data it was, nobody knows."""
    wrong_reply = case is not None and case.kind in ("reply short", "reply empty", "reply corrupt")
    return wrong_reply and case.times >= TRIES and f"{names.manifest_key(1)}?" in case.request


def is_of(key: str, step: int) -> bool:
    prefix = names.attempt_prefix(step, ATTEMPT)
    return key == names.manifest_key(step) or key.startswith(prefix)


def sampled(todo: list[Case], every: int) -> list[Case]:
    """Every n-th, in an order in which neighbours differ in kind, request and count."""
    return todo[::every]


@pytest.mark.parametrize(
    ("how", "every"),
    [
        ("whole", 22),
        ("in parts", 62),
        pytest.param("whole", 1, marks=pytest.mark.soak),
        pytest.param("in parts", 1, marks=pytest.mark.soak),
    ],
)
def test_a_save_through_every_fault(server: str, tmp_path: Path, how: str, every: int) -> None:
    with FaultProxy(server) as proxy:
        recorded, found = disturbed_save(server, tmp_path, proxy, SIZES[how], None)
    assert not found
    todo = sampled(list(cases(recorded)), every)

    def run(proxy: FaultProxy, case: Case) -> list[str]:
        return disturbed_save(server, tmp_path, proxy, SIZES[how], case)[1]

    report(f"save {how}", recorded, todo, sweep(server, todo, run), floor=350 // every)


def report(
    what: str, recorded: Sequence[Seen], todo: Sequence[Case], found: list[str], floor: int
) -> None:
    print(
        f"{what}: {len(recorded)} requests, {len(todo)} faults, violations: {len(found)}",
        *found,
        sep="\n  ",
    )
    assert len(todo) >= floor
    assert not found, "\n".join(found)


# -- a commit that another committer left before its manifest --------------------------------------


@pytest.mark.parametrize("every", [18, pytest.param(1, marks=pytest.mark.soak)])
def test_a_commit_that_is_finished_through_every_fault(
    server: str, tmp_path: Path, every: int
) -> None:
    def disturbed(proxy: FaultProxy, case: Case | None) -> tuple[list[Seen], list[str]]:
        run, found = secrets.token_hex(6), []
        direct, through = store_at(server, run), store_at(proxy.url, run)
        with contextlib.closing(Node(tmp_path / run, direct, nbytes=1000)) as node:
            assert node.save(1).phase is Phase.COMMITTED
        assert direct.delete(names.manifest_key(1))
        proxy.set_faults([case.fault] if case else [])
        told = False
        try:
            finish(through, 1)
            told = True
        except ForebayError as error:
            found += told_badly(str(error))
        requests = list(proxy.requests)
        found += wrong(direct)
        if told and Catalog(direct).steps() != [1]:
            found.append("told to be committed, and is not there")
        finish(direct, 1)
        return requests, found + wrong(direct)

    with FaultProxy(server) as proxy:
        recorded, found = disturbed(proxy, None)
    assert not found
    todo = list(cases(recorded))[::every]
    found = sweep(server, todo, lambda proxy, case: disturbed(proxy, case)[1])
    report("commit of another", recorded, todo, found, floor=150 // every)


# -- a restore -------------------------------------------------------------------------------------


def restored(store: RemoteStore, state: dict[str, Any], home: Path, rank: int) -> int:
    """As a rank alone on its node restores, a rank of another world where it is not 0."""
    manifest = read_manifest(_manifest_bytes(Catalog(store), None, None, fallback=False), "m")
    session = Session(
        store=store,
        manifest=manifest,
        rank=rank,
        world_size=rank + 1,
        node=0,
        job_directory=home,
        local=None,
        strict=True,
        allow_cast=False,
        per_rank="require",
    )
    session.check_unused(session.bind(state))
    session.fetch()
    session.apply()
    return manifest.step


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.soak)])
def test_a_restore_through_every_fault(server: str, tmp_path: Path, every: int) -> None:
    nbytes, run, home = 150_000, secrets.token_hex(6), tmp_path / "none"
    home.mkdir()
    with contextlib.closing(Node(tmp_path / run, store_at(server, run), nbytes=nbytes)) as node:
        for step in (1, 2):
            assert node.save(step).phase is Phase.COMMITTED
        expected = node.player.data(2)

    def disturbed(proxy: FaultProxy, case: Case | None, rank: int) -> tuple[list[Seen], list[str]]:
        state = {"model": {"w": torch.zeros(nbytes, dtype=torch.uint8)}, "step": 0}
        proxy.set_faults([case.fault] if case else [])
        try:
            step = restored(store_at(proxy.url, run), state, home, rank)
        except ForebayError as error:
            if state["model"]["w"].any() or state["step"]:  # type: ignore[index]
                return [], ["it failed, and has changed the state"]
            survived = case is not None and case.times == 1 and case.kind != "403"
            return [], told_badly(str(error)) + ([f"it failed: {error}"] if survived else [])
        right = bytes(state["model"]["w"].numpy()) == expected and state["step"] == 2  # type: ignore[index]
        return list(proxy.requests), [] if right and step == 2 else ["other bytes"]

    for rank in (0, 1):
        with FaultProxy(server) as proxy:
            recorded, found = disturbed(proxy, None, rank)
        assert not found
        todo = list(cases(recorded))[::every]
        found = sweep(server, todo, lambda proxy, case, rank=rank: disturbed(proxy, case, rank)[1])
        report(f"restore as rank {rank}", recorded, todo, found, floor=80 // every)


# -- a real trainer and its agent ------------------------------------------------------------------


def test_a_trainer_and_its_agent_through_a_sample(proxy: FaultProxy, runtime: Path) -> None:
    url, kinds = f"s3://ckpt/{secrets.token_hex(6)}", list(KINDS)
    kinds.remove("hang")  # the agent waits a minute for an answer
    state = {"w": torch.zeros(40_000), "step": 0}
    with forebay.Checkpointer(url, keep=forebay.Keep(last=1)) as checkpointer:
        checkpointer.prepare(state)
        for step in range(len(kinds) * 2):
            state["w"].fill_(step)
            state["step"] = step
            case = Case(kinds[step % len(kinds)], (step * 5) % 9, 1 + 2 * (step % 2), "")
            proxy.set_faults([case.fault])
            checkpointer.save(step, state).wait("durable", 90.0)
            assert Catalog(open_store(url)).latest() == step, case
        proxy.set_faults([])
        last = step + 1
        state["w"].fill_(last)
        state["step"] = last
        checkpointer.save(last, state).wait("durable", 90.0)
        steps = lambda: Catalog(open_store(url)).steps() == [last]
        poll(steps, "retention to go on", 60.0)
    target = {"w": torch.zeros(40_000), "step": 0}
    with forebay.Checkpointer(url) as checkpointer:
        assert checkpointer.restore(target) == last
    assert torch.equal(target["w"], state["w"])
    assert not wrong(open_store(url))
    print(f"trainer and agent: {last} faults, violations: 0")
