"""A rank's membership of a job on its node."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

from forebay.capture import arena
from forebay.capture.ledger import Ledger
from forebay.capture.offer import Link
from forebay.capture.topology import Topology
from forebay.config import RUNTIME_VARIABLE, Settings, linger_s, runtime_directory, stagger_s
from forebay.errors import StoreError, UsageError
from forebay.format import messages
from forebay.format.names import PROBE_RESULT_KEY, probe_key
from forebay.storage.address import open_home, open_store
from forebay.storage.probe import require_exclusive
from forebay.storage.store import Store, store_error

_KEYS = ("AWS_", "AZURE_", "GOOGLE_")


class Membership:
    """What a rank holds of a job on its node: directory, lock, stores and the tie to the agent.

    Rank 0 probes the durable tier, unless that was done for the run.
    Raises BusyError when a live process holds the rank, StoreError when a tier or the
    job's directory cannot be used, AgentError when no agent answers.
    """

    def __init__(
        self, url: str, settings: Settings, topology: Topology, attempt: str, ledger: Ledger
    ) -> None:
        self.topology = topology
        self.attempt = attempt
        self._pid = os.getpid()
        single_writer = settings.commit_mode == "single-writer"
        self.store: Store = open_store(url, single_writer=single_writer)
        if topology.rank == 0:
            require_exclusive(self.store, PROBE_RESULT_KEY, probe_key, single_writer=single_writer)
        self.local_store: Store | None = None
        self.directory = messages.job_directory(runtime_directory(), url, topology.node)
        if settings.local is not None:
            self.local_store = open_home(settings.local, messages.job_name(url, topology.node))
        try:
            self.lock = arena.claim_rank(self.directory, topology.rank, url)
        except OSError as error:
            raise self._unusable(error) from error
        keep = settings.keep
        config = messages.AgentConfig(
            run=url,
            local=None if settings.local is None else str(settings.local),
            node=topology.node,
            durable_every_s=settings.durable_every_s,
            keep_last=None if keep is None else keep.last,
            keep_every=None if keep is None else keep.every,
            drain_bytes_per_s=settings.drain_bytes_per_s,
            drain_requests_per_s=settings.drain_requests_per_s,
            stagger_s=stagger_s(settings.stagger_s, topology.nodes),
            queue=settings.queue,
            store_timeout_s=settings.store_timeout_s,
            commit_mode=settings.commit_mode,
            environment=environment_digest(os.environ),
            gather_timeout_s=settings.gather_timeout_s,
            linger_s=linger_s(),
        )
        hello = messages.Hello(
            protocol=messages.PROTOCOL,
            run=url,
            attempt=attempt,
            rank=topology.rank,
            pid=self._pid,
            config=messages.config_digest(config) if settings.agent == "auto" else "",
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
        except OSError as error:
            self.lock.release()
            raise self._unusable(error) from error
        except BaseException:
            self.lock.release()
            raise

    def _unusable(self, error: OSError) -> StoreError:
        """What a failed call on the job's directory becomes."""
        return store_error(
            error, f"{self.directory}: cannot be used ({RUNTIME_VARIABLE} sets another place)"
        )

    def require_own(self) -> None:
        """Raise UsageError in a forked process: it would write into its parent's slots."""
        if self._pid != os.getpid():
            raise UsageError(
                f"checkpointer: it belongs to process {self._pid}, which forked this one: save and "
                "restore there"
            )

    def leave(self, *, clean: bool) -> None:
        """Take leave of the agent and give the rank's name back. Nothing in a forked process."""
        if self._pid != os.getpid():
            return
        self.link.close(clean=clean)
        self.lock.release()


def environment_digest(environment: Mapping[str, str]) -> str:
    """What the keys of the tiers come from, as a digest: an agent with another one is outdated."""
    found = sorted(f"{name}={environment[name]}" for name in environment if name.startswith(_KEYS))
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]
