"""The node agent's process. ``python -m forebay.drain.agent DIRECTORY``.

Owns everything after the copy. Killed at any point, the next agent goes on from the journal, the
arenas and the local tier. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from forebay.drain.log import BoundedLog
from forebay.drain.service import Agent
from forebay.drain.wire import answers, ask
from forebay.errors import AgentError, BusyError, ForebayError, FormatError, UsageError
from forebay.format.messages import (
    AGENT_CONFIG,
    AGENT_LOCK,
    AGENT_LOG,
    AGENT_SOCKET,
    AgentConfig,
    job_name,
    read_agent_config,
)
from forebay.locks import lock_owner
from forebay.private import open_own, read_own, require_private
from forebay.storage.address import open_home
from forebay.watch.events import LOGGER, emit

__all__ = ["ask", "main", "read_config", "run_agent"]

_HANDOVER_S = 60.0
_HANDOVER_POLL_S = 0.05
_CONFIG_BYTES = 2**20


def read_config(directory: Path) -> AgentConfig:
    """The config beside the socket. Raises UsageError when there is none or it is damaged."""
    path = directory / AGENT_CONFIG
    try:
        return read_agent_config(read_own(path, _CONFIG_BYTES), str(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: expected a job's directory") from None
    except FormatError as error:
        raise UsageError(str(error)) from None


def _take_lock(directory: Path) -> int | None:
    """The lock's descriptor, or None when another agent serves the directory.

    One that holds the lock and no longer answers is ending: its place is waited for.
    """
    path = directory / AGENT_LOCK
    deadline = time.monotonic() + _HANDOVER_S
    while True:
        fd = open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN, errno.ENOENT):
                os.close(fd)
                raise
        os.close(fd)
        owner = lock_owner(path)
        if owner is not None and (answers(directory / AGENT_SOCKET) or time.monotonic() > deadline):
            LOGGER.warning("%s is served by the agent with pid %d already", directory, owner)
            return None
        time.sleep(_HANDOVER_POLL_S)


def _take_home(config: AgentConfig) -> int | None:
    """The descriptor of this job's part of the local tier, which it locks, where there is one.

    Agents may share it that do not share a job's directory: of two containers, or one whose
    directory was removed. What the journal says and what is half written there is for one alone.
    Raises BusyError when the other one does not end, StoreError when the tier cannot be used.
    """
    if config.local is None:
        return None
    name = job_name(config.run, config.node)
    open_home(config.local, name)
    home = Path(config.local) / name
    fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + _HANDOVER_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(fd)
                raise BusyError(
                    f"{home}: another agent of this job, maybe of another container, still works "
                    "there: wait for it, stop it, or choose another local tier"
                ) from None
            time.sleep(_HANDOVER_POLL_S)
        except OSError as error:  # a filesystem without locks
            emit("tier.not_locked", level=30, tier="local", why=error)
            return fd
        else:
            return fd


class _NoPandas(MetaPathFinder):
    """Pyarrow imports pandas, where it is installed, to ask whether a list is of its kind.

    That is half of the memory the agent may take.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the protocol of importlib
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Nothing of anything, and pandas not at all."""
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas has no place in the node agent", name=fullname)
        return None


@contextlib.contextmanager
def _small() -> Iterator[None]:
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def run_agent(job_directory: Path) -> int:
    """Serve a job's directory until nothing is left to do. Returns the exit status.

    One agent a directory: a second one says so and ends at once. Raises UsageError without a
    config, StoreError when a tier cannot be opened, BusyError as ``_take_home``.
    """
    os.umask(0o077)
    require_private(job_directory)
    config = read_config(job_directory)
    fd = _take_lock(job_directory)
    if fd is None:
        return 0
    home: int | None = None
    try:
        home = _take_home(config)
        emit("agent.serves", run=config.run, node=config.node, pid=os.getpid())
        with _small():
            asyncio.run(_serve(job_directory, config, fd))
    finally:
        if home is not None:
            os.close(home)
        os.close(fd)
    return 0


async def _serve(directory: Path, config: AgentConfig, lock: int) -> None:
    await Agent(directory, config, lock).run()


def main(arguments: list[str]) -> int:
    """Entry of ``python -m forebay.drain.agent``: a job's directory, ``--detach`` before it."""
    detach = arguments[:1] == ["--detach"]
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if detach:  # standard error is the job's log, which is ours alone
        handler = BoundedLog(Path(arguments[-1]) / AGENT_LOG, sys.stderr.fileno())
    logging.basicConfig(
        level=logging.INFO,
        handlers=[handler],
        format="%(asctime)s %(levelname)s %(message)s",
    )
    if len(arguments) != 1 + detach:
        LOGGER.error("usage: python -m forebay.drain.agent [--detach] JOB_DIRECTORY")
        return 2
    if detach and os.fork():
        # No thread and no lock yet: the child is nobody's child, and its starter is free at once.
        os._exit(0)
    try:
        status = run_agent(Path(arguments[-1]))
    except ForebayError as error:
        LOGGER.error("%s", error)
        return error.exit_code
    except OSError as error:  # of the job's directory: whoever needs an agent starts another
        LOGGER.error("agent: %s", error)
        status = AgentError.exit_code
    logging.shutdown()
    # A thread that hangs in a store must not hold up the end: nothing of it is needed any more.
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
