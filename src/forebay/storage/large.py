"""A large object on its way to S3: whole, or in parts that outlive the process; lost replies."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping

from forebay.errors import ConflictError, StoreError
from forebay.storage.multipart import Gate, PartPlan, Upload, UploadLog
from forebay.storage.pace import Pace
from forebay.storage.patience import Patience
from forebay.storage.s3 import S3, Body, Reply

_RESTARTS = 3
_PARTS_PATIENCE = 10  # times that of a request: a part is many blocks
_GONE = (404, 409, 412)

Told = Callable[[int], None]
Drop = Callable[[int, int], None]


class Sender:
    """Writes objects of any size to one bucket. ``conditional`` lets no object be replaced."""

    def __init__(self, s3: S3, pace: Pace, *, patience_s: float, conditional: bool) -> None:
        self._s3 = s3
        self._pace = pace
        self._patience_s = patience_s
        self._conditional = conditional

    def put(
        self,
        key: str,
        view: memoryview,
        plan: PartPlan,
        *,
        told: Told,
        drop: Drop,
        log: UploadLog | None,
    ) -> None:
        """Write the object. Raises ConflictError when it exists, StoreError when patience ends."""
        if not self._conditional and self._size_and_tag(key) is not None:
            raise self._exists(key)
        if plan.count == 1:
            self._put_whole(key, view, told, drop)
        else:
            self._put_parts(key, view, plan, told, drop, log)

    def _exists(self, key: str) -> ConflictError:
        return ConflictError(f"{self._s3.name(key)}: exists; nothing was changed")

    def _put_whole(self, key: str, view: memoryview, told: Told, drop: Drop) -> None:
        headers = {"If-None-Match": "*"} if self._conditional else {}

        def once() -> None:
            count = 0

            def sent(nbytes: int) -> None:
                nonlocal count
                told(nbytes)
                count += nbytes

            body = Body(view=view, pace=self._pace, sent=sent, drop=drop)
            try:
                reply = self._s3.send("PUT", key, headers=headers, body=body, pace=self._pace)
                if reply.status == 412:
                    raise self._exists(key)
                self._s3.expect(reply, f"{self._s3.name(key)}: put", self._pace)
            except StoreError:
                told(-count)
                raise

        Patience(self._patience_s).again(once)

    def _put_parts(
        self,
        key: str,
        view: memoryview,
        plan: PartPlan,
        told: Told,
        drop: Drop,
        log: UploadLog | None,
    ) -> None:
        parts = _Parts(self._s3, key, view, self._pace, drop, self._patience_s)
        for left in reversed(range(_RESTARTS)):
            upload = Upload(
                parts,
                plan,
                what=self._s3.name(key),
                pace=self._pace,
                told=told,
                patience=Patience(self._parts_patience_s(plan)),
            )
            upload_id = upload.run(log)
            if self._complete(key, upload_id, upload.tags, view.nbytes):
                return
            told(-view.nbytes)
            with contextlib.suppress(StoreError):  # gone already, or swept one day
                self._s3.abort(key, upload_id, self._pace)
            log = None if log is None else _Anew(log)
            if not left:
                raise StoreError(f"{self._s3.name(key)}: the store dropped its upload, again")

    def _parts_patience_s(self, plan: PartPlan) -> float:
        """How long no part may arrive: longer than all lanes need for theirs at the pace of now.

        What ends the upload cuts off the parts that are on their way.
        """
        rate = self._pace.bytes_per_s
        slow_s = 0.0 if rate is None else 2 * plan.lanes * plan.part_bytes / rate
        return max(_PARTS_PATIENCE * self._patience_s, slow_s)

    def _complete(self, key: str, upload_id: str, tags: Mapping[int, str], nbytes: int) -> bool:
        """Make the object of its parts; False when the upload is gone and there is no object.

        A lost reply is settled by asking again: a completed upload is unknown then, and the
        object's tag tells whose parts it has. Raises ConflictError when the object is another's.
        """
        what = f"{self._s3.name(key)}: completion of an upload"

        def once() -> bool:
            reply = self._s3.complete(key, upload_id, tags, self._pace, create=self._conditional)
            if reply.status in _GONE and b"NoSuchBucket" not in reply.data:
                there = self._size_and_tag(key)
                if there is None and reply.status != 412:
                    return False
                if there == (nbytes, _tag_of(tags)):
                    return True
                if there is not None:
                    self._s3.abort(key, upload_id, self._pace)
                    raise self._exists(key)
            self._s3.expect(reply, what, self._pace)
            return True

        return Patience(self._patience_s).again(once)

    def _size_and_tag(self, key: str) -> tuple[int, str] | None:
        def once() -> tuple[int, str] | None:
            reply: Reply = self._s3.send("HEAD", key, pace=self._pace)
            if reply.status == 404:
                return None
            found = self._s3.expect(reply, f"{self._s3.name(key)}: head", self._pace).headers
            return int(found.get("content-length", "0")), found.get("etag", "").strip('"')

        return Patience(self._patience_s).again(once)


class _Parts:
    """The parts of one object."""

    def __init__(
        self, s3: S3, key: str, view: memoryview, pace: Pace, drop: Drop, patience_s: float
    ) -> None:
        self._s3, self._key, self._view = s3, key, view
        self._pace, self._drop, self._patience_s = pace, drop, patience_s

    def begin(self) -> str:
        """Open an upload."""
        return Patience(self._patience_s).again(lambda: self._s3.begin(self._key, self._pace))

    def there(self, upload_id: str) -> Mapping[int, tuple[str, int]] | None:
        """What has arrived."""
        return Patience(self._patience_s).again(
            lambda: self._s3.parts(self._key, upload_id, self._pace)
        )

    def put(
        self,
        upload_id: str,
        number: int,
        start: int,
        nbytes: int,
        *,
        sent: Callable[[int], None],
        gate: Gate,
    ) -> str:
        """Send a part, once."""
        view = self._view[start : start + nbytes]
        body = Body(view=view, pace=self._pace, sent=sent, drop=self._drop, start=start, gate=gate)
        return self._s3.put_part(self._key, upload_id, number, body)


class _Anew:
    """A log whose known upload is of no use any more."""

    def __init__(self, log: UploadLog) -> None:
        self._log = log

    def known(self) -> tuple[str, int] | None:
        """Nothing to go on with."""
        return None

    def begun(self, upload_id: str, part_bytes: int) -> None:
        """Noted in the place of the other."""
        self._log.begun(upload_id, part_bytes)

    def trouble(self, why: str) -> None:
        """Passed on."""
        self._log.trouble(why)


def sweep(s3: S3, pace: Pace, prefix: str, *, older_than_s: float) -> int:
    """Abort uploads below a prefix that were begun long ago and have no end; how many."""
    count = 0
    for key, upload_id, begun_s in list(s3.uploads(prefix, pace)):
        if time.time() - begun_s >= older_than_s:
            s3.abort(key, upload_id, pace)
            count += 1
    return count


def _tag_of(tags: Mapping[int, str]) -> str | None:
    """The tag that S3 gives an object of these parts, MD5 of their MD5s, where tags are MD5s."""
    try:
        joined = b"".join(bytes.fromhex(tags[number].strip('"')) for number in sorted(tags))
    except ValueError:
        return None  # encrypted with keys of the store's own: tags tell nothing
    return f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(tags)}"
