"""A store on a directory: NVMe, a parallel filesystem, any POSIX disk."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from forebay.errors import ConflictError, DamagedError, NotFoundError, StoreError
from forebay.storage import durable
from forebay.storage.pace import Pace
from forebay.storage.store import (
    Capabilities,
    CreateOutcome,
    ObjectInfo,
    OnProgress,
    Store,
    check_key,
    store_error,
)

_READ_BYTES = 16 * 2**20


class DirectoryStore(Store):
    """Objects as files below ``root``. Makes ``root`` when its parent exists.

    Raises StoreError when it cannot be used, naming which part of the path and why.
    """

    capabilities = Capabilities(create_if_absent=True, durable=True, local_path=True)

    def __init__(self, root: Path, *, make: bool = True) -> None:
        self.root = root
        self.url = str(root)
        if not make and not root.exists():
            raise NotFoundError(f"{root}: does not exist")
        if not root.parent.is_dir():
            raise StoreError(
                f"{root}: its parent {root.parent} does not exist or is no directory: make it, or "
                "correct the path"
            )
        try:
            if not root.exists():
                root.mkdir(exist_ok=True)
                durable.sync_directory(root.parent)
        except OSError as error:
            raise store_error(error, f"{root}: cannot be made") from error
        if not root.is_dir():
            raise StoreError(f"{root}: is a file, expected a directory")

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        path = self._path(key)
        with self._opened(path) as fd:
            size = os.fstat(fd).st_size
            if size > max_bytes:
                raise StoreError(f"{path}: {size} bytes, expected at most {max_bytes}")
            data = bytearray(size)
            self._fill(fd, path, 0, memoryview(data))
            return bytes(data)

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        path = self._path(key)
        with self._opened(path) as fd:
            self._fill(fd, path, start, into)

    @contextlib.contextmanager
    def _opened(self, path: Path) -> Iterator[int]:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                os.close(fd)
                raise NotFoundError(f"{path}: no such object")
        except FileNotFoundError:
            raise NotFoundError(f"{path}: no such object") from None
        except NotADirectoryError:
            raise NotFoundError(f"{path}: no such object") from None
        except OSError as error:
            raise store_error(error, f"{path}: cannot be opened") from error
        try:
            yield fd
        finally:
            os.close(fd)

    def _fill(self, fd: int, path: Path, start: int, into: memoryview) -> None:
        done = 0
        while done < into.nbytes:
            try:
                count = os.preadv(fd, [into[done : done + _READ_BYTES]], start + done)
            except OSError as error:
                raise store_error(error, f"{path}: read at {start + done}") from error
            if count == 0:
                found = os.fstat(fd).st_size
                raise DamagedError(
                    f"{path}: expected at least {start + into.nbytes} bytes, found {found}"
                )
            done += count

    def head(self, key: str) -> ObjectInfo | None:
        try:
            found = self._path(key).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise store_error(error, f"{self._path(key)}: cannot be looked at") from error
        if not stat.S_ISREG(found.st_mode):
            return None
        return ObjectInfo(key=key, size=found.st_size, modified_s=found.st_mtime)

    def put(self, key: str, data: bytes) -> None:
        try:
            self._write(key, _aligned(data), None, None)
        except FileExistsError:
            there = self.head(key)
            if (
                there is None
                or there.size != len(data)
                or self.get_range(key, 0, len(data)) != data
            ):
                raise ConflictError(
                    f"{self._path(key)}: exists with other bytes; nothing was changed"
                ) from None

    def put_large(
        self,
        key: str,
        view: memoryview,
        *,
        on_progress: OnProgress | None = None,
        pace: Pace | None = None,
    ) -> None:
        try:
            self._write(key, view, on_progress, pace)
        except FileExistsError:
            raise ConflictError(f"{self._path(key)}: exists; nothing was changed") from None

    def create(self, key: str, data: bytes) -> CreateOutcome:
        try:
            self._write(key, _aligned(data), None, None)
        except FileExistsError:
            return CreateOutcome.EXISTS
        return CreateOutcome.COMMITTED

    def _write(
        self, key: str, view: memoryview, on_progress: OnProgress | None, pace: Pace | None
    ) -> None:
        path = self._path(key)
        try:
            durable.make_directories(path.parent, self.root)
            if path.is_symlink() or not path.parent.resolve().is_relative_to(self.root.resolve()):
                raise StoreError(f"{path}: a link leads out of the run; nothing was written")
            durable.write_new(path, view, on_progress=on_progress, pace=pace)
        except FileExistsError:
            raise
        except OSError as error:
            raise store_error(error, f"{path}: cannot be written") from error

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_key(prefix, prefix=True)
        yield from self._walk(self.root / prefix, prefix)

    def _walk(self, directory: Path, prefix: str) -> Iterator[ObjectInfo]:
        try:
            with os.scandir(directory) as scan:
                entries = sorted(scan, key=lambda e: e.name + ("/" if _is_directory(e) else ""))
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise store_error(error, f"{directory}: cannot be listed") from error
        for entry in entries:
            if entry.name.startswith(durable.HIDDEN):
                continue
            if _is_directory(entry):
                yield from self._walk(directory / entry.name, f"{prefix}{entry.name}/")
            elif entry.is_file(follow_symlinks=False):
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield ObjectInfo(
                    key=prefix + entry.name, size=found.st_size, modified_s=found.st_mtime
                )

    def delete(self, key: str) -> bool:
        path = self._path(key)
        if path.is_dir() or not path.parent.is_dir():
            return False
        try:
            gone = durable.remove(path)
            self._prune(path.parent)
        except OSError as error:
            raise store_error(error, f"{path}: cannot be deleted") from error
        return gone

    def _prune(self, directory: Path) -> None:
        """Remove directories that a delete left empty."""
        while directory != self.root:
            try:
                directory.rmdir()
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    raise
                return
            directory = directory.parent

    def local_path(self, key: str) -> Path | None:
        return self._path(key)


def _is_directory(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _aligned(data: bytes) -> memoryview:
    """Small data in page-aligned memory, so that it leaves by O_DIRECT like all else."""
    if not data:
        return memoryview(b"")
    page = mmap.mmap(-1, len(data))
    page.write(data)
    return memoryview(page)[: len(data)]
