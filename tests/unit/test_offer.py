"""The rank's tie to its agent, held against agents that end at the wrong moment."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from forebay import __version__
from forebay.capture.ledger import Ledger
from forebay.capture.offer import Link
from forebay.drain.wire import short_path
from forebay.errors import DeadlineError
from forebay.format.messages import (
    AGENT_SOCKET,
    PROTOCOL,
    AgentConfig,
    AskSettled,
    Hello,
    Message,
    StatusReply,
    Welcome,
    frame_bytes,
    read_message,
    write_frame,
)

RUN = "/runs/one"
M = TypeVar("M")


def settled(question: int) -> StatusReply:
    return StatusReply(
        pid=os.getpid(),
        version=__version__,
        run=RUN,
        node=0,
        trainers=(0,),
        settled=True,
        snapshots=[],
        committed=question,
        failed=0,
        skipped=0,
        question=question,
    )


class Connection:
    """The agent's end of one connection, a frame at a time."""

    def __init__(self, accepted: socket.socket) -> None:
        self._socket = accepted
        self._file = accepted.makefile("rb")

    def hear(self, kind: type[M]) -> M:
        message = read_message(self._file.read(frame_bytes(self._file.read(4))))
        assert isinstance(message, kind)
        return message

    def say(self, message: Message) -> None:
        self._socket.sendall(write_frame(message))

    def greet(self) -> None:
        self.hear(Hello)
        self.say(Welcome(protocol=PROTOCOL, version=__version__, pid=os.getpid()))

    def close(self) -> None:
        self._file.close()
        self._socket.close()


Script = Callable[[Connection], None]


@contextlib.contextmanager
def agents(directory: Path, *scripts: Script) -> Iterator[list[BaseException]]:
    """One after the other they serve the directory's socket, each for one connection."""
    path = directory / AGENT_SOCKET
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with short_path(path) as name:
            listener.bind(name)
        listener.listen()
        listener.settimeout(30)
        broken: list[BaseException] = []

        def serve() -> None:
            try:
                for script in scripts:
                    accepted, _ = listener.accept()
                    accepted.settimeout(30)
                    with contextlib.closing(Connection(accepted)) as connection:
                        script(connection)
            except BaseException as error:
                broken.append(error)
            finally:
                listener.close()  # or who comes later would wait for a greeting

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield broken
        finally:
            thread.join(60)
            assert not thread.is_alive()
    assert not broken


@contextlib.contextmanager
def link(directory: Path, timeout_s: float = 20.0) -> Iterator[Link]:
    made = Link(
        directory,
        AgentConfig(run=RUN, local=None, node=0),
        Hello(protocol=PROTOCOL, run=RUN, attempt="a", rank=0, pid=os.getpid(), arenas=()),
        Ledger(has_local=False),
        start_agents=False,
        timeout_s=timeout_s,
    )
    try:
        yield made
    finally:
        made.close(clean=False)


def answers(connection: Connection) -> None:
    connection.greet()
    asked = connection.hear(AskSettled)
    assert 0 < asked.timeout_s <= 20
    connection.say(settled(asked.question))


def test_a_question_that_ended_with_its_agent_is_asked_of_the_next(tmp_path: Path) -> None:
    def ends_before_it_hears(connection: Connection) -> None:
        connection.greet()

    def ends_before_it_answers(connection: Connection) -> None:
        connection.greet()
        connection.hear(AskSettled)

    scripts = ends_before_it_hears, ends_before_it_answers, answers
    with agents(tmp_path, *scripts), link(tmp_path) as tie:
        assert tie.settle(20.0).settled


def test_an_answer_to_an_earlier_question_is_none_to_this(tmp_path: Path) -> None:
    def answers_twice(connection: Connection) -> None:
        connection.greet()
        first = connection.hear(AskSettled).question
        connection.say(settled(first))
        connection.say(msgspec.structs.replace(settled(first), settled=False))
        connection.say(settled(connection.hear(AskSettled).question))

    with agents(tmp_path, answers_twice), link(tmp_path) as tie:
        first, second = tie.settle(20.0), tie.settle(20.0)
    assert (first.question, second.question) == (1, 2)
    assert second.settled


def test_an_agent_that_says_nothing_meets_the_deadline(tmp_path: Path) -> None:
    over = threading.Event()

    def silent(connection: Connection) -> None:
        connection.greet()
        connection.hear(AskSettled)
        over.wait(30)

    with agents(tmp_path, silent):
        with (
            link(tmp_path, timeout_s=0.2) as tie,
            pytest.raises(DeadlineError, match=r"within 0\.1"),
        ):
            tie.settle(0.1)
        over.set()
