"""A store on a directory: NVMe, a parallel filesystem, any POSIX disk."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from forebay.errors import ConflictError, DamagedError, NotFoundError, StoreError
from forebay.storage import direct, durable
from forebay.storage.multipart import UploadLog
from forebay.storage.pace import Pace
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
    is_part,
    store_error,
)

_READ_BYTES = 2**30
_MAKE_TRIES = 20


def open_url(text: str, *, make: bool) -> DirectoryStore:
    """The store on the directory ``text``."""
    return DirectoryStore(Path(text), make=make)


class DirectoryStore(Store):
    """Objects as files below ``root``. Makes ``root`` when its parent exists.

    Raises StoreError when it cannot be used, naming which part of the path and why.
    """

    def __init__(self, root: Path, *, make: bool = True) -> None:
        self.root = root
        self.url = str(root)
        self.pace = Pace()
        try:
            self._open(make)
            self._true_root = root.resolve()
            durable_here = not _is_volatile(root.stat().st_dev)
        except OSError as error:
            raise store_error(error, f"{root}: cannot be used") from error
        self.capabilities = Capabilities(
            create_if_absent=True, durable=durable_here, local_path=True
        )
        self._settled: set[Path] = set()

    def _open(self, make: bool) -> None:
        root = self.root
        if not make and not root.exists():
            raise NotFoundError(f"{root}: does not exist")
        if not root.parent.is_dir():
            there = next(p for p in root.parents if p.exists())
            lacks = root.parent.relative_to(there).parts[:1]
            what = f"{there / lacks[0]} does not exist" if lacks else f"{there} is no directory"
            raise StoreError(f"{root}: {what}: make it, or correct the path")
        if not root.exists():
            root.mkdir(exist_ok=True)
            durable.sync_directory(root.parent)
        if not root.is_dir():
            raise StoreError(f"{root}: is a file, expected a directory: correct the path")
        if make and not os.access(root, os.W_OK | os.X_OK):
            raise StoreError(f"{root}: is not writable: allow writing there, or choose another")

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _guard(self, directory: Path) -> None:
        """Refuse a directory that a link leads out of the run. Raises StoreError."""
        try:
            within = directory.resolve().is_relative_to(self._true_root)
        except (OSError, RuntimeError):  # a loop of links
            within = False
        if not within:
            raise StoreError(f"{directory}: a link leads out of {self.root}: remove it")

    def get(self, key: str, *, max_bytes: int) -> bytes:
        path = self._path(key)
        with self._opened(path) as fd:
            size = os.fstat(fd).st_size
            if size > max_bytes:
                raise StoreError(f"{path}: {size} bytes, expected at most {max_bytes}")
            parts: list[bytes] = []
            done = 0
            while done < size:
                parts.append(os.pread(fd, min(size - done, _READ_BYTES), done))
                if not parts[-1]:
                    raise _short(path, size, done)
                done += len(parts[-1])
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        path = self._path(key)
        into = check_range(start, into)
        with self._opened(path) as fd:
            if direct.read_at(fd, start, into) < into.nbytes:
                raise _short(path, start + into.nbytes, os.fstat(fd).st_size)

    @contextlib.contextmanager
    def _opened(self, path: Path) -> Iterator[int]:
        """An object's file, of this caller alone; what fails inside becomes StoreError."""
        self._guard(path.parent)
        # A named pipe would hold a blocking open for ever.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(path, flags)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(f"{path}: no such object") from None
        except OSError as error:
            raise store_error(error, f"{path}: cannot be opened") from error
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise NotFoundError(f"{path}: is no file")
            os.set_blocking(fd, True)
            yield fd
        except OSError as error:
            raise store_error(error, f"{path}: cannot be read") from error
        finally:
            os.close(fd)

    def head(self, key: str) -> ObjectInfo | None:
        path = self._path(key)
        self._guard(path.parent)
        try:
            found = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise store_error(error, f"{path}: cannot be looked at") from error
        if not stat.S_ISREG(found.st_mode):
            return None
        return ObjectInfo(key=key, size=found.st_size, modified_s=found.st_mtime)

    def put(self, key: str, data: bytes | memoryview) -> None:
        if not self._write(key, memoryview(data)) and not self._holds(key, data):
            raise ConflictError(f"{self._path(key)}: exists with other bytes; nothing was changed")

    def _holds(self, key: str, data: bytes | memoryview) -> bool:
        info = self.head(key)
        size = memoryview(data).nbytes
        return info is not None and info.size == size and self.get(key, max_bytes=size) == data

    def put_large(
        self,
        key: str,
        view: memoryview,
        *,
        on_progress: OnProgress | None = None,
        on_drop: OnDrop | None = None,
        log: UploadLog | None = None,
    ) -> None:
        del log  # a file has no parts to go on with
        if not self._write(key, view, on_progress, on_drop):
            raise ConflictError(f"{self._path(key)}: exists; nothing was changed")

    def create(self, key: str, data: bytes) -> CreateOutcome:
        made = self._write(key, memoryview(data))
        return CreateOutcome.COMMITTED if made else CreateOutcome.EXISTS

    def _write(
        self,
        key: str,
        view: memoryview,
        on_progress: OnProgress | None = None,
        on_drop: OnDrop | None = None,
    ) -> bool:
        """Write a new object; False when there is one, which is durable then."""
        path = self._path(key)
        try:
            if os.path.lexists(path):  # spares the bytes; the link below decides
                self._guard(path.parent)
                durable.sync_directory(path.parent)
                return False
            for tries_left in reversed(range(_MAKE_TRIES)):
                try:
                    self._make_parent(path)
                    durable.write_new(
                        path, view, on_progress=on_progress, on_drop=on_drop, pace=self.pace
                    )
                except FileNotFoundError:
                    if not tries_left:  # else: a delete took the empty directory away
                        raise
                else:
                    return True
        except FileExistsError:
            # Its writer may not have come to this yet, and what a caller was told exists must stay.
            with contextlib.suppress(FileNotFoundError):
                durable.sync_directory(path.parent)
            return False
        except OSError as error:
            raise store_error(error, f"{path}: cannot be written") from error
        raise AssertionError("unreachable")

    def _make_parent(self, path: Path) -> None:
        known = next(p for p in path.parents if p == self.root or p.exists())
        self._guard(known)
        durable.make_directories(path.parent, self.root, self._settled)

    def settle(self, key: str) -> None:
        directory = self._path(key).parent
        self._guard(directory)
        try:
            with contextlib.suppress(FileNotFoundError):
                durable.sync_directory(directory)
        except OSError as error:
            raise store_error(error, f"{directory}: cannot be flushed") from error

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        self._guard(self.root / prefix)
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
            if not is_part(entry.name):
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
        self._guard(path.parent)
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
            except FileNotFoundError:
                pass  # another delete was here first
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                return
            directory = directory.parent

    def sweep(self, prefix: str, *, older_than_s: float) -> int:
        top = self.root / check_prefix(prefix)
        self._guard(top)
        count = 0
        try:
            for at, _, names in os.walk(top):
                unfinished = [Path(at, name) for name in names if durable.is_unfinished(name)]
                gone = sum(durable.remove_unfinished(path, older_than_s) for path in unfinished)
                if gone:
                    self._prune(Path(at))
                count += gone
        except OSError as error:
            raise store_error(error, f"{top}: cannot be swept") from error
        return count

    def local_path(self, key: str) -> Path | None:
        return self._path(key)


def _short(path: Path, expected: int, found: int) -> DamagedError:
    return DamagedError(
        f"{path}: expected at least {expected} bytes, found {found}: use another tier or an older "
        "checkpoint"
    )


def _is_directory(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _is_volatile(device: int) -> bool:
    """Whether a device is memory, which a power cut empties; unknown counts as a disk."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    for line in mounts.splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2:3] == [wanted]:
            return kind.split()[:1] in (["tmpfs"], ["ramfs"])
    return False
