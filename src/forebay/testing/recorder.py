"""Records what a program does to the files below a directory, in the order in which it happens.

For ``forebay.testing.disk``. It stands in for the functions of ``os`` while it is entered, in all
threads of this process; a change that goes past them is noticed by an audit hook and is an error.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from forebay.testing.disk import (
    ROOT,
    WHOLE,
    Cut,
    Enter,
    Leave,
    Mark,
    Move,
    Operation,
    Recording,
    SyncDirectory,
    SyncFile,
    Write,
    enter,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_CHANGES = {
    "os.mkdir": 1,
    "os.rmdir": 1,
    "os.remove": 1,
    "os.truncate": 1,
    "os.link": 2,
    "os.rename": 2,
    "os.symlink": 2,
}
"""Audit events of changes, and how many paths each begins with."""

_UNHEARD = ("writev", "pwritev", "sendfile", "copy_file_range", "splice", "posix_fallocate")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_active: list[Recorder] = []
_hooked = False


class Recorder:
    """Records below ``root``, which exists. Enter it once. Python 3.11 or newer.

    ``before`` is called by each thread before each call, so that a test can put threads in order.
    """

    def __init__(self, root: Path, before: Callable[[], None] = lambda: None) -> None:
        if sys.version_info < (3, 11):
            raise RuntimeError("the recorder needs Python 3.11 or newer: pathlib keeps os's own")
        if root != root.resolve():
            raise ValueError(f"{root}: name it without links: {root.resolve()}")
        self._root = root
        self._before = before
        self._lock = threading.RLock()
        self._inside = threading.local()
        self._names: dict[int, dict[str, int]] = {ROOT: {}}
        self._sizes: dict[int, int] = {}
        self._nodes = 0
        self._fds: dict[int, tuple[int, int]] = {}
        self._past: list[str] = []
        self._real: dict[str, Callable[..., Any]] = {}
        self._operations: list[Operation] = []
        data: dict[int, bytes] = {}
        self._look(root, ROOT, data)
        names = {node: dict(found) for node, found in self._names.items()}
        self.recording = Recording(names=names, data=data, operations=self._operations)

    def _look(self, directory: Path, node: int, data: dict[int, bytes]) -> None:
        """Take over what is there already; hard links count as files of their own."""
        for path in sorted(directory.iterdir()):
            new = self._node()
            self._names[node][path.name] = new
            if path.is_dir():
                self._names[new] = {}
                self._look(path, new, data)
            else:
                data[new] = path.read_bytes()
                self._sizes[new] = len(data[new])

    def mark(self, text: str) -> None:
        """Note that something was promised, begun or told now."""
        with self._lock:
            self._operations.append(Mark(text))

    def __enter__(self) -> Self:
        global _hooked  # noqa: PLW0603 - an audit hook can never be taken away
        if not _hooked:
            sys.addaudithook(_heard)
            _hooked = True
        for name in (
            *("open", "close", "mkdir", "rmdir", "link", "unlink", "remove", "rename", "replace"),
            *("write", "pwrite", "fsync", "fdatasync", "ftruncate", "truncate"),
            *_UNHEARD,
        ):
            self._real[name] = getattr(os, name)
            stand_in = self._refuse(name) if name in _UNHEARD else getattr(self, f"_on_{name}")
            setattr(os, name, self._locked(stand_in))
        _active.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _active.remove(self)
        for name, real in self._real.items():
            setattr(os, name, real)
        if kind is None and self._past:
            raise RuntimeError(f"not recorded: {', '.join(self._past[:5])}")

    def _locked(self, stand_in: Callable[..., Any]) -> Callable[..., Any]:
        """One operation at a time, so that the order of the notes is that of the calls."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not getattr(self._inside, "yes", False):
                self._before()
            with self._lock:
                outer = getattr(self._inside, "yes", False)
                self._inside.yes = True
                try:
                    return stand_in(*args, **kwargs)
                finally:
                    self._inside.yes = outer

        return call

    def heard(self, event: str, args: tuple[Any, ...]) -> None:
        """An audit event, which must have come by way of this recorder if it changes anything."""
        if getattr(self._inside, "yes", False):
            return
        if event == "open":
            paths = args[:1] if isinstance(args[2], int) and args[2] & _WRITES else ()
        else:
            paths = args[: _CHANGES.get(event, 0)]
        for path in paths:
            if isinstance(path, str | bytes | os.PathLike) and self._below(path) is not None:
                self._past.append(f"{event} {os.fsdecode(path)}")

    def _below(self, path: Any, dir_fd: int | None = None) -> tuple[str, ...] | None:
        """The parts of a path below the root, None for one elsewhere."""
        if isinstance(path, int):
            return None
        where = Path.cwd() if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
        full = where / os.fsdecode(path)
        return full.relative_to(self._root).parts if full.is_relative_to(self._root) else None

    def _node(self) -> int:
        self._nodes += 1
        return self._nodes

    def _find(self, parts: tuple[str, ...]) -> int:
        node = ROOT
        for name in parts:
            node = self._names[node][name]
        return node

    def _note(self, operation: Operation) -> None:
        self._operations.append(operation)
        enter(self._names, operation, WHOLE)

    def _enter(self, parts: tuple[str, ...]) -> int:
        node = self._node()
        self._note(Enter(self._find(parts[:-1]), parts[-1], node))
        return node

    def _refuse(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(fd: int, *args: Any, **kwargs: Any) -> Any:
            if fd in self._fds or (args and args[0] in self._fds):
                self._past.append(name)
            return real(fd, *args, **kwargs)

        return call

    def _on_open(
        self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        parts = self._below(path, dir_fd)
        there = parts is None or os.path.lexists(self._root.joinpath(*parts))
        fd = int(self._real["open"](path, flags, mode, dir_fd=dir_fd))
        if parts is not None:
            node = self._find(parts) if there else self._enter(parts)
            self._fds[fd] = node, flags
            if not there:
                self._sizes[node] = 0
            elif flags & os.O_TRUNC:
                self._cut(node, 0)
        return fd

    def _on_close(self, fd: int) -> None:
        self._fds.pop(fd, None)
        self._real["close"](fd)

    def _on_mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        parts = self._below(path, dir_fd)
        self._real["mkdir"](path, mode, dir_fd=dir_fd)
        if parts is not None:
            self._names[self._enter(parts)] = {}

    def _leave(self, name: str, path: Any, dir_fd: int | None) -> None:
        parts = self._below(path, dir_fd)
        self._real[name](path, dir_fd=dir_fd)
        if parts is not None:
            self._note(Leave(self._find(parts[:-1]), parts[-1]))

    def _on_rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._leave("rmdir", path, dir_fd)

    def _on_unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._leave("unlink", path, dir_fd)

    def _on_remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._leave("remove", path, dir_fd)

    def _pair(
        self, name: str, source: Any, target: Any, fds: dict[str, Any], **options: Any
    ) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Carry out a call with two paths; the parts of both, None where it is not ours."""
        old = self._below(source, fds.get("src_dir_fd"))
        new = self._below(target, fds.get("dst_dir_fd"))
        self._real[name](source, target, **fds, **options)
        if old is None and new is None:
            return None
        if old is None or new is None:
            self._past.append(f"{name} across {self._root}")
            return None
        return old, new

    def _on_link(
        self, source: Any, target: Any, *, follow_symlinks: bool = True, **fds: int | None
    ) -> None:
        pair = self._pair("link", source, target, fds, follow_symlinks=follow_symlinks)
        if pair is not None:
            old, new = pair
            self._note(Enter(self._find(new[:-1]), new[-1], self._find(old)))

    def _move(self, name: str, source: Any, target: Any, fds: dict[str, Any]) -> None:
        pair = self._pair(name, source, target, fds)
        if pair is not None:
            old, new = pair
            self._note(Move(self._find(old[:-1]), old[-1], self._find(new[:-1]), new[-1]))

    def _on_rename(self, source: Any, target: Any, **fds: int | None) -> None:
        self._move("rename", source, target, fds)

    def _on_replace(self, source: Any, target: Any, **fds: int | None) -> None:
        self._move("replace", source, target, fds)

    def _wrote(self, fd: int, at: int | None, data: Any, count: int) -> None:
        """Note a write of ``count`` bytes at ``at``, None where the descriptor stood."""
        if fd not in self._fds:
            return
        node, flags = self._fds[fd]
        if at is None:
            ended = self._sizes[node] + count if flags & os.O_APPEND else 0
            at = ended - count if ended else os.lseek(fd, 0, os.SEEK_CUR) - count
        self._operations.append(Write(node, at, bytes(memoryview(data).cast("B")[:count])))
        self._sizes[node] = max(self._sizes[node], at + count)

    def _on_write(self, fd: int, data: Any) -> int:
        count = int(self._real["write"](fd, data))
        self._wrote(fd, None, data, count)
        return count

    def _on_pwrite(self, fd: int, data: Any, offset: int) -> int:
        count = int(self._real["pwrite"](fd, data, offset))
        self._wrote(fd, offset, data, count)
        return count

    def _synced(self, name: str, fd: int) -> None:
        self._real[name](fd)
        if fd in self._fds:
            node = self._fds[fd][0]
            ours = SyncDirectory(node) if node in self._names else SyncFile(node)
            self._operations.append(ours)

    def _on_fsync(self, fd: int) -> None:
        self._synced("fsync", fd)

    def _on_fdatasync(self, fd: int) -> None:
        self._synced("fdatasync", fd)

    def _cut(self, node: int, size: int) -> None:
        if self._sizes[node] != size:
            self._operations.append(Cut(node, size))
            self._sizes[node] = size

    def _on_ftruncate(self, fd: int, length: int) -> None:
        self._real["ftruncate"](fd, length)
        if fd in self._fds:
            self._cut(self._fds[fd][0], length)

    def _on_truncate(self, path: Any, length: int) -> None:
        self._real["truncate"](path, length)
        if isinstance(path, int):
            if path in self._fds:
                self._cut(self._fds[path][0], length)
        elif (parts := self._below(path)) is not None:
            self._cut(self._find(parts), length)


def _heard(event: str, args: tuple[Any, ...]) -> None:
    if _active and (event == "open" or event in _CHANGES):
        for recorder in _active:
            recorder.heard(event, args)
