"""A store on S3, GCS or Azure: the only import of obstore.

Every request is tried again under one deadline; what may have landed although its reply was lost is
settled by reading back. Large objects go to S3 in parts that survive this process (``s3.py``), to
GCS and Azure in obstore's own, which do not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import obstore
from obstore import exceptions as obs
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store

from forebay.errors import (
    ConflictError,
    DamagedError,
    DeniedError,
    FullError,
    NotFoundError,
    StoreError,
)
from forebay.storage import endpoint, large, multipart, replies
from forebay.storage.endpoint import RemoteUrl
from forebay.storage.multipart import UploadLog, plan_parts
from forebay.storage.pace import Pace
from forebay.storage.patience import Patience
from forebay.storage.s3 import S3, Body
from forebay.storage.store import (
    Capabilities,
    CreateOutcome,
    ObjectInfo,
    OnDrop,
    OnProgress,
    Store,
    check_key,
    check_prefix,
    check_range,
)
from forebay.watch.events import emit

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3CredentialProvider

RANGE_BYTES = 16 * 2**20
RANGES = 8
"""Ranges read side by side: a reader holds at most ``RANGES * RANGE_BYTES`` beside its target."""
_REQUEST_S = 60
_CONNECT_S = 10
_SILENT_S = 5.0  # a wait that is longer is told, and again every so often
_PAST_THE_END = 416
_PAST_TEXT = "Wanted range starting at"  # what obstore says where the store answered with less
_LARGEST_COMPARED_BYTES = 2**28

_T = TypeVar("_T")


def open_url(text: str, *, conditional: bool, patience_s: float) -> RemoteStore:
    """The store of a remote URL. Nothing is asked of it yet, and there is nothing to make."""
    url = endpoint.parse_remote(text)
    return RemoteStore(url, conditional=conditional, patience_s=patience_s)


class RemoteStore(Store):
    """Objects below a prefix of a bucket. ``patience_s`` bounds how long one call stands still.

    ``conditional`` False is for stores that ignore ``If-None-Match``: a create then looks first,
    which is no protection against a second writer.
    """

    def __init__(
        self,
        url: RemoteUrl,
        *,
        conditional: bool = True,
        patience_s: float = 60.0,
        part_bytes: int | None = None,
    ) -> None:
        self.url = url.shown
        self.pace = Pace()
        self.capabilities = Capabilities(
            create_if_absent=conditional, durable=True, local_path=False
        )
        self._remote = url
        self._conditional = conditional
        self._patience_s = patience_s
        self._part_bytes = part_bytes or url.part_bytes(multipart.PART_BYTES)
        self._s3 = S3(url) if url.scheme == "s3" else None
        self._client = self._connect()
        self._reading = threading.BoundedSemaphore(RANGES)
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def _connect(self) -> ObjectStore:
        """An obstore client that tries once: tries, waits and the budget are ours."""
        url = self._remote
        common: dict[str, Any] = {
            "prefix": url.prefix,
            "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=_REQUEST_S)},
        }
        client: ClientConfig = {
            "timeout": timedelta(seconds=_REQUEST_S),
            "connect_timeout": timedelta(seconds=_CONNECT_S),
        }
        try:
            if self._s3 is not None:
                at = self._s3.endpoint
                return S3Store(
                    at.bucket,
                    endpoint=at.base_url if at.path_style else at.bucket_url,
                    region=at.region,
                    virtual_hosted_style_request=not at.path_style,
                    client_options={**client, "allow_http": at.allow_http},
                    credential_provider=cast("S3CredentialProvider", self._s3.credentials),
                    **common,
                )
            named = url.options.get("endpoint")
            if url.scheme == "gs":
                client["allow_http"] = endpoint.http_allowed(url, "GOOGLE_ALLOW_HTTP")
                if named is not None:
                    base = endpoint.check_endpoint(url, named, allow_http=client["allow_http"])
                    common["base_url"] = base
                return GCSStore(url.bucket, client_options=client, **common)
            client["allow_http"] = endpoint.http_allowed(url, "AZURE_ALLOW_HTTP")
            if named is not None:
                base = endpoint.check_endpoint(url, named, allow_http=client["allow_http"])
                common["endpoint"] = base
            if "account" in url.options:
                common["account_name"] = url.options["account"]
            return AzureStore(url.bucket, client_options=client, **common)
        except (obs.BaseError, ValueError) as error:
            raise DeniedError(f"{self.url}: cannot be opened: {_flat(error)}") from error

    # -- one request -----------------------------------------------------------------------------

    def _ask(self, key: str, verb: str, call: Callable[[], _T]) -> _T:
        """One try of one request, in the budget. Raises what obstore says, as an error of ours.

        NotFoundError for an object that is not there, ConflictError for one that is.
        """
        what = f"{self.url}/{key}: {verb}"
        self.pace.ask()
        try:
            return call()
        except (FileNotFoundError, obs.NotFoundError) as error:
            if replies.code_of(str(error)) in ("NoSuchBucket", "ContainerNotFound"):
                raise replies.from_text(what, str(error)) from None
            raise NotFoundError(f"{self.url}/{key}: no such object") from None
        except (obs.AlreadyExistsError, obs.PreconditionError) as error:
            raise ConflictError(f"{self.url}/{key}: exists; nothing was changed") from error
        except (obs.PermissionDeniedError, obs.UnauthenticatedError) as error:
            self._renew()
            raise _denied(replies.from_text(what, str(error)), what) from None
        except obs.BaseError as error:
            failure = replies.from_text(what, str(error))
            if isinstance(failure, replies.ThrottledError):
                self.pace.pushed_back()
            if isinstance(failure, DeniedError):
                self._renew()
            raise failure from None

    def _renew(self) -> None:
        """Read the keys anew, for whoever comes next."""
        if self._s3 is not None:
            self._s3.credentials.renew()
            self._client = self._connect()

    def _again(self, key: str, verb: str, call: Callable[[], _T]) -> _T:
        """A request that may be repeated, until it succeeds or patience ends."""
        told_s = time.monotonic() + _SILENT_S

        def once() -> _T:
            nonlocal told_s
            try:
                return self._ask(key, verb, call)
            except StoreError as error:
                if time.monotonic() > told_s:
                    told_s = time.monotonic() + _SILENT_S
                    emit("store.retry", level=30, why=error)
                raise

        return self._patience().again(once)

    def _patience(self) -> Patience:
        """For one call: whoever waits for as long as a request may hang is not failed by one."""
        tries = 2 if self._patience_s >= _REQUEST_S else 1
        return Patience(self._patience_s, least_tries=tries)

    # -- reading ---------------------------------------------------------------------------------

    def get(self, key: str, *, max_bytes: int) -> bytes:
        check_key(key)

        def whole() -> bytes | int:
            result = obstore.get(self._client, key)
            size = result.meta["size"]
            return size if size > max_bytes else bytes(result.bytes())

        data = self._again(key, "get", whole)
        if isinstance(data, int):
            raise StoreError(f"{self.url}/{key}: {data} bytes, expected at most {max_bytes}")
        return data

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        check_key(key)
        into = check_range(start, into)
        if not into.nbytes:
            if self.head(key) is None:
                raise NotFoundError(f"{self.url}/{key}: no such object")
            return
        if into.nbytes <= RANGE_BYTES:
            self._range(key, start, into)
            return
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(RANGES, thread_name_prefix="range")
        parts = [
            self._pool.submit(self._range, key, start + at, into[at : at + RANGE_BYTES])
            for at in range(0, into.nbytes, RANGE_BYTES)
        ]
        try:
            for part in parts:
                part.result()
        finally:
            for part in parts:
                part.cancel()

    def _range(self, key: str, start: int, into: memoryview) -> None:
        what, end = f"read of bytes {start} to {start + into.nbytes}", start + into.nbytes

        def read() -> obstore.Bytes:
            try:
                data = obstore.get_range(self._client, key, start=start, length=into.nbytes)
                if len(data) == into.nbytes:
                    return data
            except obs.BaseError as error:
                if replies.status_of(str(error)) != _PAST_THE_END and _PAST_TEXT not in str(error):
                    raise
            size = self._headed(key)["size"]
            if size >= end:
                raise StoreError(f"{self.url}/{key}: {what}: the answer was cut short")
            raise DamagedError(
                f"{self.url}/{key}: expected at least {end} bytes, found {size}: use another tier "
                "or an older checkpoint"
            )

        with self._reading:
            into[:] = memoryview(self._again(key, what, read))

    def head(self, key: str) -> ObjectInfo | None:
        meta = self._meta(check_key(key))
        return None if meta is None else _info(meta, key)

    def _meta(self, key: str) -> Any:
        try:
            return self._again(key, "head", lambda: self._headed(key))
        except NotFoundError:
            return None

    def _headed(self, key: str) -> Any:
        """One head. An answer to it has no body: what a refusal means, a read of the object says.

        Without that, keys that have expired would look like a failure that may pass.
        """
        try:
            return obstore.head(self._client, key)
        except FileNotFoundError:
            raise
        except obs.BaseError as error:
            if replies.is_mute_refusal(str(error)):
                obstore.get_range(self._client, key, start=0, length=1)
            raise

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        found = self._again(prefix, "list", lambda: list(self._listed(prefix)))
        yield from sorted(found, key=lambda info: info.key)

    def _listed(self, prefix: str) -> Iterator[ObjectInfo]:
        """What lies below a prefix, in the store's order, which is not everywhere that of keys."""
        for batch in obstore.list(self._client, prefix or None, chunk_size=1000):
            for meta in batch:
                key = meta["path"].removeprefix(f"{self._remote.prefix}/")
                if key.startswith(prefix) and _is_key(key):
                    yield _info(meta, key)

    # -- writing ---------------------------------------------------------------------------------

    def put(self, key: str, data: bytes | memoryview) -> None:
        body = bytes(data)
        outcome, failure = self._create(key, body)
        if outcome is CreateOutcome.UNKNOWN:
            raise failure or StoreError(f"{self.url}/{key}: put: its reply was lost")
        if outcome is CreateOutcome.EXISTS and self._holds(key, body) is not True:
            raise ConflictError(f"{self.url}/{key}: exists with other bytes; nothing was changed")

    def create(self, key: str, data: bytes) -> CreateOutcome:
        """As the contract has it; what a lost reply leaves open is settled by reading back.

        A refusal after a try whose reply was lost may be that try's own success: equal bytes then
        are ours, which is why what racers write must differ. UNKNOWN when patience ended first.
        """
        return self._create(key, data)[0]

    def _create(self, key: str, data: bytes) -> tuple[CreateOutcome, StoreError | None]:
        """The outcome, and why it is unknown where it is."""
        check_key(key)
        patience = self._patience()
        failure: StoreError | None = None
        doubtful = False
        while True:
            try:
                self._create_once(key, data)
            except ConflictError:
                pass
            except (DeniedError, FullError) as error:
                if not doubtful:
                    raise
                return CreateOutcome.UNKNOWN, error
            except StoreError as error:
                failure, doubtful = error, True
            else:
                return CreateOutcome.COMMITTED, None
            try:
                same = self._holds(key, data)
            except StoreError:
                same = None
            if same is not None:
                ours = same and doubtful
                return (CreateOutcome.COMMITTED if ours else CreateOutcome.EXISTS), None
            # Not there: it failed, or (409) another create is under way and may still fail.
            wait_s = patience.next_wait_s()
            if wait_s is None:
                return CreateOutcome.UNKNOWN, failure
            time.sleep(wait_s)

    def _create_once(self, key: str, data: bytes) -> None:
        self.pace.take(len(data))
        if not self._conditional:
            if self._meta(key) is not None:
                raise ConflictError(f"{self.url}/{key}: exists; nothing was changed")
            self._ask(key, "put", lambda: obstore.put(self._client, key, data, use_multipart=False))
            return
        self._ask(key, "create", lambda: obstore.put(self._client, key, data, mode="create"))

    def _holds(self, key: str, data: bytes) -> bool | None:
        """Whether the object has these bytes; None when there is no object."""
        info = self.head(key)
        if info is None:
            return None
        if info.size != len(data) or info.size > _LARGEST_COMPARED_BYTES:
            return False
        try:
            return self.get(key, max_bytes=len(data)) == data
        except NotFoundError:
            return None

    def put_large(
        self,
        key: str,
        view: memoryview,
        *,
        on_progress: OnProgress | None = None,
        on_drop: OnDrop | None = None,
        log: UploadLog | None = None,
    ) -> None:
        check_key(key)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        told, drop = on_progress or _no_progress, on_drop or _no_drop
        plan = plan_parts(view.nbytes, self._part_bytes)
        if self._s3 is not None:
            sender = large.Sender(
                self._s3, self.pace, patience_s=self._patience_s, conditional=self._conditional
            )
            sender.put(key, view, plan, told=told, drop=drop, log=log)
            return
        if self._meta(key) is not None:
            raise ConflictError(f"{self.url}/{key}: exists; nothing was changed")
        body = Body(view=view, pace=self.pace, sent=told, drop=drop)

        def streamed() -> None:
            obstore.put(
                self._client,
                key,
                body.blocks() if view.nbytes else b"",
                chunk_size=plan.part_bytes,
                max_concurrency=plan.lanes,
            )

        self._ask(key, "put", streamed)

    def delete(self, key: str) -> bool:
        if self._meta(check_key(key)) is None:
            return False
        try:
            self._again(key, "delete", lambda: obstore.delete(self._client, key))
        except NotFoundError:
            return False
        return True

    def sweep(self, prefix: str, *, older_than_s: float) -> int:
        check_prefix(prefix)
        if self._s3 is None:
            return 0  # obstore shows no unfinished uploads there; a lifecycle rule ends them
        return large.sweep(self._s3, self.pace, prefix, older_than_s=older_than_s)


def _denied(failure: StoreError, what: str) -> StoreError:
    return failure if isinstance(failure, DeniedError) else DeniedError(f"{what}: {failure}")


def _info(meta: Any, key: str) -> ObjectInfo:
    return ObjectInfo(key=key, size=meta["size"], modified_s=meta["last_modified"].timestamp())


def _is_key(key: str) -> bool:
    try:
        check_key(key)
    except Exception:  # noqa: BLE001 - a stranger's name
        return False
    return True


def _flat(error: Exception) -> str:
    return " ".join(str(error).split()).partition(" Debug source:")[0]


def _no_progress(nbytes: int) -> None:
    del nbytes


def _no_drop(start: int, nbytes: int) -> None:
    del start, nbytes
