"""Another user of the node: reaches nothing of a job; what he plants is refused or not followed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.capture.arena import claim_rank
from forebay.errors import UsageError
from forebay.format.messages import (
    AGENT_CONFIG,
    AGENT_LOCK,
    AGENT_LOG,
    AGENT_SOCKET,
    AskStatus,
    Phase,
    job_directory,
    job_name,
    write_frame,
)
from forebay.storage.address import open_home
from tests.process.conftest import Ranks, agent_pids, poll
from tests.process.test_agent import TIMEOUT_S, Job

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root: makes another user's process")


def other(code: str, *arguments: object) -> Any:
    """Run Python code as another user; what it puts into ``said``. Modules are loaded before."""
    whole = (
        "import json, os, socket, sys, stat, time\n"
        f"os.umask(0); os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        f"arguments = sys.argv[1:]\nsaid = None\n{code}\nprint(json.dumps(said))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", whole, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


REACH = """
said = {}
def attempt(what, call):
    try:
        said[what] = repr(call())
    except OSError as error:
        said[what] = "refused " + (error.strerror or "")
directory, names = arguments[0], arguments[1:]
attempt("list", lambda: os.listdir(directory))
for name in names:
    path = os.path.join(directory, name)
    for how, flags in (("read", os.O_RDONLY), ("write", os.O_WRONLY)):
        attempt(how + " " + name, lambda: os.open(path, flags))
    attempt("remove " + name, lambda: os.unlink(path))
    attempt("link " + name, lambda: os.link(path, path + ".mine"))
    attempt("rename " + name, lambda: os.rename(path, path + ".mine"))
for plant in ("rank-00007.0.arena", "rank-00007.lock", "spawn.lock", "mine"):
    attempt("plant " + plant, lambda: os.open(os.path.join(directory, plant), os.O_CREAT))
    attempt("symlink " + plant, lambda: os.symlink("/etc/passwd", os.path.join(directory, plant)))
"""

TALK = """
wire = socket.socket(socket.AF_UNIX)
wire.settimeout(60)
try:
    wire.connect(arguments[0])
    wire.sendall(bytes.fromhex(arguments[1]))
    said = wire.recv(100).hex()
except OSError as error:
    said = "refused"
"""


@pytest.fixture
def sticky() -> Iterator[Path]:
    """A directory that everybody may write into, as /tmp is one."""
    path = Path(tempfile.mkdtemp(prefix="forebay-sticky-", dir="/dev/shm"))
    path.chmod(0o1777)
    yield path
    for pid in agent_pids(path):
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(path)


@pytest.fixture
def job(tmp_path: Path, sticky: Path) -> Iterator[Job]:
    shared = sticky / "runtime"
    shared.mkdir(mode=0o700)
    made = Job(tmp_path, shared)
    yield made
    made.end()


@pytest.mark.parametrize("opened", [False, True], ids=["as made", "directories opened to all"])
def test_another_user_reaches_nothing(job: Job, opened: bool) -> None:
    job.start()
    player = job.player()
    player.connect()
    player.save(1)
    assert player.wait(1).phase is Phase.COMMITTED
    (job.directory / AGENT_LOG).touch(mode=0o600)
    (job.directory / AGENT_CONFIG).chmod(0o600)  # as a trainer writes it
    if opened:  # the files are the user's alone, whatever the directories are
        for path in (job.shared, job.directory):
            path.chmod(0o755)
    files = sorted(path.name for path in job.directory.iterdir())
    assert {AGENT_SOCKET, AGENT_LOCK, AGENT_CONFIG, AGENT_LOG, player.arena} <= set(files)
    said = other(REACH, job.directory, *files)
    breaches = {what: how for what, how in said.items() if not how.startswith("refused")}
    breaches.pop("list", None) if opened else None
    assert not breaches
    assert sorted(path.name for path in job.directory.iterdir()) == files
    assert other(TALK, job.directory / AGENT_SOCKET, write_frame(AskStatus()).hex()) == "refused"
    print(f"other user: {len(said) + 1} tries at a job's files, breaches: {len(breaches)}")
    assert len(said) > 30


def test_a_foreign_process_that_can_connect_is_dropped_at_once(job: Job) -> None:
    job.start()
    for path, mode in ((job.shared, 0o755), (job.directory, 0o755)):
        path.chmod(mode)
    (job.directory / AGENT_SOCKET).chmod(0o777)
    answers = [
        other(TALK, job.directory / AGENT_SOCKET, frame.hex())
        for frame in (write_frame(AskStatus()), b"\0", b"\xff" * 8)
    ]
    assert set(answers) <= {"", "refused"}
    assert job.status().run == job.url


PLANTS: dict[str, str] = {
    "a directory for all": "os.mkdir(path, 0o777)",
    "a directory of his": "os.mkdir(path, 0o700)",
    "a link to a directory of his": "os.mkdir(path + '-his'); os.symlink(path + '-his', path)",
    "a link to one of ours": "os.symlink(arguments[1], path)",
    "a link to nothing": "os.symlink(path + '-none', path)",
    "a file": "os.close(os.open(path, os.O_CREAT, 0o666))",
    "a pipe": "os.mkfifo(path, 0o666)",
}


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("where", ["runtime", "job"])
def test_a_planted_directory_is_refused_in_one_line(
    sticky: Path, tmp_path: Path, plant: str, where: str
) -> None:
    ours = tmp_path / "ours"
    ours.mkdir(mode=0o700)
    for path in (tmp_path, *tmp_path.parents):
        if path.owner() == "root" and path != Path("/") and "pytest" in str(path):
            path.chmod(0o755)  # so that the link leads somewhere for him too
    runtime = sticky / "runtime"
    directory = job_directory(runtime, "/runs/one", 0)
    if where == "job":  # planted while the runtime directory stood open
        runtime.mkdir()
        runtime.chmod(0o777)
    at = runtime if where == "runtime" else directory
    other(f"path = arguments[0]\n{PLANTS[plant]}", at, ours)
    if where == "job":
        runtime.chmod(0o700)
    with pytest.raises(UsageError) as refused:
        claim_rank(directory, 0, "/runs/one")
    text = str(refused.value)
    assert str(at) in text
    assert "\n" not in text
    assert "FOREBAY_RUNTIME_DIR" in text
    assert list(ours.iterdir()) == []


def test_our_own_directory_that_is_open_to_all_is_refused(sticky: Path) -> None:
    runtime = sticky / "runtime"
    runtime.mkdir()
    runtime.chmod(0o777)
    with pytest.raises(UsageError, match=r"runtime: must belong to uid 0 with mode 0700.*0777"):
        claim_rank(job_directory(runtime, "/r", 0), 0, "/r")


def test_an_agent_serves_no_foreign_directory(sticky: Path) -> None:
    config = '{"run":"/dev/null/x","local":null,"node":0}'
    code = "os.mkdir(arguments[0]); open(arguments[0] + '/agent.json', 'w').write(arguments[1])"
    other(code, sticky / "his", config)
    done = subprocess.run(
        [sys.executable, "-m", "forebay.drain.agent", str(sticky / "his")],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == UsageError.exit_code
    assert "must belong to uid 0" in done.stderr
    assert [path.name for path in (sticky / "his").iterdir()] == [AGENT_CONFIG]


def test_a_planted_home_on_the_local_tier_is_refused(sticky: Path) -> None:
    name = job_name("/runs/one", 0)
    for code in ("os.mkdir(path)", "os.symlink('/dev/shm', path)"):
        other(f"path = arguments[0]\n{code}", sticky / name)
        with pytest.raises(
            UsageError, match=rf"{name}: the job's directory on the local tier must"
        ):
            open_home(sticky, name)
        (sticky / name).rmdir() if (sticky / name).lstat().st_nlink > 1 else (
            sticky / name
        ).unlink()
    open_home(sticky, name)
    assert stat.S_IMODE((sticky / name).stat().st_mode) == 0o700


NAMES = ("rank-00000.lock", "spawn.lock", AGENT_LOCK, AGENT_CONFIG, AGENT_LOG, AGENT_SOCKET)
NAMES += ("rank-00000.0.arena", ".rank-00000.0.arena", "journal", "journal.new")


def _plant(path: Path, how: str, victim: Path) -> None:
    if how == "symlink":
        path.symlink_to(victim)
    elif how == "hard link":
        path.hardlink_to(victim)
    elif how == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(b"of somebody else")
        os.chown(path, NOBODY, NOBODY)


@pytest.mark.parametrize(
    "how",
    [
        "symlink",
        *(
            pytest.param(how, marks=pytest.mark.soak)
            for how in ("hard link", "pipe", "foreign file")
        ),
    ],
)
def test_names_that_were_planted_are_refused_or_not_followed(
    tmp_path: Path, sticky: Path, start_ranks: Callable[..., Ranks], how: str, runtime: Path
) -> None:
    """The whole way of a job, with one name after another taken before it starts."""
    outcomes = {}
    for number, name in enumerate(NAMES):
        url = str(tmp_path / f"run-{number}")
        directory = job_directory(runtime, url, 0)
        directory.mkdir(mode=0o700, parents=True)
        victim = sticky / f"victim-{number}"
        victim.write_bytes(b"precious\n" * 1000)
        victim.chmod(0o644)
        os.chown(victim, NOBODY, NOBODY)
        before = victim.stat()
        _plant(directory / name, how, victim)
        # The agent that refuses says so in its log alone, so that one is waited for.
        options = {"agent_timeout_s": 10.0} if name == AGENT_LOCK else {}
        ranks = start_ranks("save_or_say", 1, url=url, **options)
        (said,) = ranks.wait()
        outcomes[name] = said
        assert victim.read_bytes() == b"precious\n" * 1000, f"{name} was followed"
        assert (victim.stat().st_mode, victim.stat().st_size) == (before.st_mode, before.st_size)
        if said != "committed":
            kind, _, text = said.partition(": ")
            assert kind in ("usage", "agent", "busy"), said
            assert name in text, said
            assert "\n" not in said
        for pid in agent_pids(runtime):
            os.kill(pid, signal.SIGKILL)
        poll(lambda: not agent_pids(runtime), "agents to end")
        shutil.rmtree(directory, ignore_errors=True)
        runtime.mkdir(mode=0o700, exist_ok=True)
    refused = sum(said != "committed" for said in outcomes.values())
    print(f"planted by {how}: {len(outcomes)} names, refused {refused}, followed: 0")
    assert len(outcomes) == len(NAMES)
    assert outcomes[".rank-00000.0.arena"] == outcomes["journal"] == "committed"


LISTEN = """
listener = socket.socket(socket.AF_UNIX)
listener.bind(arguments[0])
os.chmod(arguments[0], 0o777)
listener.listen()
print("ready", flush=True)
listener.settimeout(60)
peer, _ = listener.accept()
said = peer.recv(1000).hex()
"""


def test_a_foreign_listener_at_the_socket_hears_nothing(
    tmp_path: Path, start_ranks: Callable[..., Ranks], runtime: Path
) -> None:
    url = str(tmp_path / "run")
    directory = job_directory(runtime, url, 0)
    directory.mkdir(mode=0o700)
    for path in (runtime, directory):
        path.chmod(0o777)
    code = (
        "import json, os, socket, sys\n"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        f"arguments = sys.argv[1:]\n{LISTEN}\nprint(said)\n"
    )
    his = subprocess.Popen(
        [sys.executable, "-c", code, str(directory / AGENT_SOCKET)],
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    try:
        assert his.stdout is not None
        assert his.stdout.readline() == "ready\n"
        for path in (runtime, directory):
            path.chmod(0o700)
        (said,) = start_ranks("save_or_say", 1, url=url).wait()
        assert said == "committed"
        assert his.stdout.readline().strip() == ""
    finally:
        his.kill()
        his.wait()
        if his.stdout is not None:
            his.stdout.close()


def test_a_second_start_names_the_live_one(
    tmp_path: Path, runtime: Path, start_ranks: Callable[..., Ranks]
) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    marks = [tmp_path / "mark-one", tmp_path / "mark-two"]
    jobs = [
        start_ranks("save_and_hang", 1, url=url, step=1, marker=str(mark), nbytes=4000)
        for url, mark in zip((one, two), marks, strict=True)
    ]
    poll(lambda: all(Path(f"{mark}-0").exists() for mark in marks), "both jobs to have saved")
    directories = [job_directory(runtime, url, 0) for url in (one, two)]
    assert sorted(path for path in runtime.iterdir()) == sorted(directories)
    assert len(agent_pids(runtime)) == 2
    inodes = {path.stat().st_ino for d in directories for path in d.glob("*.arena")}
    assert len(inodes) == 2
    for url, ranks in zip((one, two), jobs, strict=True):
        (said,) = start_ranks("save_or_say", 1, url=url).wait()
        assert said.startswith("busy: "), said
        assert f"pid {ranks.pids[0]})" in said
        assert url in said
    attempts = set()
    for url in (one, two):
        poll(lambda url=url: list(Path(url).glob("manifests/*")), f"a commit in {url}")
        attempts |= {path.name for path in Path(url).glob("data/*/*")}
    assert len(attempts) == 2
    for ranks in jobs:
        ranks.kill()


def test_modules_planted_where_a_trainer_runs_are_not_the_agents(
    tmp_path: Path, runtime: Path, sticky: Path
) -> None:
    """A program takes modules from where it lies; `python -m` from where it is called."""
    code = "open(arguments[0], 'w').write(arguments[1])"
    for name in ("msgspec", "asyncio", "forebay"):
        planted = (
            f"open({str(sticky / 'ran')!r}, 'a').write({name!r} + chr(10))\nraise SystemExit(9)"
        )
        other(code, sticky / f"{name}.py", planted)
    program = tmp_path / "train.py"
    program.write_text(
        "import forebay\n"
        f"with forebay.Checkpointer({str(tmp_path / 'run')!r}) as checkpointer:\n"
        "    checkpointer.save(1, {'step': forebay.value(1)})\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=sticky,
    )
    assert not (sticky / "ran").exists(), (sticky / "ran").read_text()
    assert done.returncode == 0, done.stderr
    assert forebay.open(tmp_path / "run").steps() == [1]
