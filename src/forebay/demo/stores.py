"""Durable tiers that the demo can run on: a directory, or a real S3 server of its own."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from forebay.errors import UsageError
from forebay.format.names import manifest_key
from forebay.storage.address import open_store

KINDS = {
    "file": "a directory",
    "s3": "an S3 server started for the demo",
    "s3-faulty": "the same, where one request in five fails",
    "s3-restart": "the same, killed and started again while the step to be resumed drains",
}
FAULTY_SHARE = 0.2
DOWN_S = 1.0
_SEED = 20


class DemoStore:
    """A directory for every run."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def url(self, run: str) -> str:
        """The durable tier of a run."""
        return str(self.home / run / "store")

    def committed(self, run: str, step: int) -> bool:
        """Whether the step's manifest is there."""
        return (self.home / run / "store" / manifest_key(step)).exists()

    def disturb(self) -> str:
        """What happens to the store while the killed run's step drains; says what, or ""."""
        return ""


class S3DemoStore(DemoStore):
    """A prefix for every run, in a bucket on a server of the demo's own."""

    def __init__(self, home: Path, *, restart: bool) -> None:
        from forebay.testing.s3 import S3Server

        super().__init__(home)
        self.server = S3Server(home / "s3")
        self._restart = restart

    def url(self, run: str) -> str:
        """A run in the bucket; where it is and the keys to it are in the environment."""
        return self.server.run_url(run)

    def committed(self, run: str, step: int) -> bool:
        """Asks the server."""
        return open_store(self.url(run)).head(manifest_key(step)) is not None

    def disturb(self) -> str:
        """Kill the server, and bring it back a moment later, if that is asked for."""
        if not self._restart:
            return ""
        pid = self.server.pid
        self.server.kill()
        time.sleep(DOWN_S)
        self.server.start()
        return f"killed the S3 server (pid {pid}) and started it again"


@contextlib.contextmanager
def open_demo_store(kind: str, home: Path) -> Iterator[DemoStore]:
    """The store of a demo, up while this lasts, its place and keys in the environment.

    Raises UsageError for an unknown kind, or where what it needs is not installed.
    """
    if kind not in KINDS:
        known = ", ".join(f"{name!r} ({what})" for name, what in KINDS.items())
        raise UsageError(f"demo: unknown store {kind!r}; known are {known}")
    if kind == "file":
        yield DemoStore(home)
        return
    (home / "s3").mkdir()
    store = S3DemoStore(home, restart=kind == "s3-restart")
    with contextlib.ExitStack() as stack:
        stack.enter_context(store.server)
        environment = store.server.environment
        if kind == "s3-faulty":
            from forebay.testing.proxy import Fault, FaultProxy

            proxy = stack.enter_context(FaultProxy(store.server.endpoint, seed=_SEED))
            proxy.set_faults([Fault(do="status", share=FAULTY_SHARE, status=503)])
            environment["AWS_ENDPOINT_URL"] = proxy.url
        stack.enter_context(_environment(environment))
        yield store


@contextlib.contextmanager
def _environment(given: Mapping[str, str]) -> Iterator[None]:
    """These variables, and no other of the kind, for us and whom we start."""
    before = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    for name in before:
        del os.environ[name]
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            os.environ.pop(name, None)
        os.environ.update(before)
