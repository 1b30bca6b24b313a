"""Standard output whose trouble has a name: it is told from that of files that a verb works on."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from forebay.errors import ForebayError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FD = 1


class OutputError(ForebayError):
    """Standard output takes no more: a full disk, perhaps."""


class UnreadError(Exception):
    """Nobody reads standard output any more, as after ``| head``: no error, and nothing to say."""


class _Pipe(io.FileIO):
    """The descriptor. What it raises is no OSError: libraries that draw would hide that."""

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise UnreadError from None
        except OSError as error:
            raise OutputError(
                f"standard output: {error.strerror}: send it where it can be written"
            ) from None


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Inside, standard output raises OutputError and UnreadError; it is flushed in the end.

    After one of them nothing more is written, by the interpreter when it ends neither.
    """
    before = sys.stdout
    if not isinstance(before, io.TextIOWrapper) or before is not sys.__stdout__:
        # closed, or somebody else's
        yield
        return
    before.flush()
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Pipe(_FD, "w", closefd=False)),
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.line_buffering,
    )
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except (OutputError, UnreadError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), _FD)
        raise
