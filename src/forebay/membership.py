"""A rank's membership of a job on its node."""

from __future__ import annotations

import os

from forebay.capture import arena
from forebay.capture.ledger import Ledger
from forebay.capture.offer import Link
from forebay.capture.topology import Topology
from forebay.config import Settings, linger_s, runtime_directory
from forebay.format import messages
from forebay.storage.address import open_store
from forebay.storage.store import Store


class Membership:
    """What a rank holds of a job on its node: directory, lock, stores and the tie to the agent.

    Raises BusyError when a live process holds the rank, StoreError when a tier cannot be used,
    AgentError when no agent answers.
    """

    def __init__(
        self, url: str, settings: Settings, topology: Topology, attempt: str, ledger: Ledger
    ) -> None:
        self.topology = topology
        self.attempt = attempt
        self.store: Store = open_store(url)
        self.local_store: Store | None = None
        self.directory = messages.job_directory(runtime_directory(), url, topology.node)
        if settings.local is not None:
            job_home = settings.local / messages.job_name(url, topology.node)
            open_store(settings.local)
            self.local_store = open_store(job_home)
        self.lock = arena.claim_rank(self.directory, topology.rank, url)
        keep = settings.keep
        config = messages.AgentConfig(
            run=url,
            local=None if settings.local is None else str(settings.local),
            node=topology.node,
            durable_every=settings.durable_every,
            keep_last=None if keep is None else keep.last,
            keep_every=None if keep is None else keep.every,
            drain_bytes_per_s=settings.drain_bytes_per_s,
            gather_timeout_s=settings.gather_timeout_s,
            linger_s=linger_s(),
        )
        hello = messages.Hello(
            protocol=messages.PROTOCOL,
            run=url,
            attempt=attempt,
            rank=topology.rank,
            pid=os.getpid(),
            arenas=tuple(path.name for path in arena.find_arenas(self.directory, topology.rank)),
        )
        try:
            self.link = Link(
                self.directory,
                config,
                hello,
                ledger,
                start_agents=settings.agent == "auto",
                timeout_s=settings.agent_timeout_s,
            )
        except BaseException:
            self.lock.release()
            raise

    def leave(self, *, clean: bool) -> None:
        """Take leave of the agent and give the rank's name back."""
        self.link.close(clean=clean)
        self.lock.release()
