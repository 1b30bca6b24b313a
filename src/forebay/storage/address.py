"""From a URL to a store."""

from __future__ import annotations

import contextlib
import os
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from urllib.parse import unquote, urlsplit

from forebay.errors import UsageError
from forebay.private import require_own
from forebay.storage import directory, memory
from forebay.storage.durable import sync_directory
from forebay.storage.endpoint import LEAST_PART_BYTES, parse_remote
from forebay.storage.store import Store, store_error

STORE_GROUP = "forebay.stores"
_REMOTE = ("s3", "gs", "az")
_BUILT_IN = {"file": directory.open_url, "memory": memory.open_url}


def resolve_url(url: str | os.PathLike[str]) -> str:
    """A directory as an absolute ``file://``-free path, any other URL as it is.

    The result names the run: two spellings of one directory give one name.
    """
    text = os.fspath(url)
    if not text or "\0" in text:
        raise UsageError(f"store: {text!r}: expected a directory or a URL")
    try:
        text.encode()
    except UnicodeEncodeError:  # so does a name look whose bytes are no UTF-8
        raise UsageError(f"store: {text!r}: its name is not valid UTF-8: choose another") from None
    if "://" not in text:
        return os.path.abspath(os.path.expanduser(text))  # noqa: PTH100, PTH111 - text in, text out
    parts = urlsplit(text)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise UsageError(f"store: {text!r}: expected file:///absolute/path")
        return os.path.abspath(unquote(parts.path))  # noqa: PTH100
    if parts.scheme in _REMOTE:
        found = parse_remote(text)
        return found.shown + (f"?{parts.query}" if parts.query else "")
    return text


def open_home(local: str | os.PathLike[str], name: str) -> Store:
    """A job's own directory on the local tier. Raises StoreError, UsageError for a foreign one.

    What lies there is taken for what this job wrote: nobody else may have made it.
    """
    open_store(local)
    home = Path(local) / name
    try:
        with contextlib.suppress(FileExistsError):
            home.mkdir(mode=0o700)
            sync_directory(home.parent)
        require_own(home, "the job's directory on the local tier")
    except OSError as error:
        raise store_error(error, f"{home}: cannot be used") from error
    return open_store(home)


def open_store(
    url: str | os.PathLike[str],
    *,
    make: bool = True,
    single_writer: bool = False,
    patience_s: float = 60.0,
) -> Store:
    """Open a store by URL or directory. Makes the run's directory; its parent must exist.

    With ``make=False``, for reading, a directory that is not there is NotFoundError. With
    ``single_writer`` an object store is not asked for conditional writes, which some lack;
    ``patience_s`` is for how long one call to it is tried again while nothing comes through.

    Other schemes come from the entry points ``forebay.stores``: a scheme,
    or what stands before its ``+``. Raises UsageError for a scheme nobody knows.
    """
    text = resolve_url(url)
    scheme = urlsplit(text).scheme if "://" in text else "file"
    if scheme in _BUILT_IN:
        return _BUILT_IN[scheme](text, make=make)
    if scheme in _REMOTE:
        from forebay.storage import remote  # obstore and botocore are only for those who need them

        return remote.open_url(text, conditional=not single_writer, patience_s=patience_s)
    point = _entry_point(text, scheme)
    store = point.load()(text)
    if not isinstance(store, Store):
        raise UsageError(f"store: {text!r}: {point.value} gave no Store")
    return store


def check_url(url: str | os.PathLike[str]) -> None:
    """Raises UsageError for a URL that ``open_store`` would refuse unasked; opens nothing.

    What a store of another maker thinks of its URL is not known before it is opened.
    """
    text = resolve_url(url)
    scheme = urlsplit(text).scheme if "://" in text else "file"
    if scheme in _REMOTE:
        found = parse_remote(text)
        found.part_bytes(LEAST_PART_BYTES)
        for name in ("path_style", "allow_http"):
            found.flag(name)
    elif scheme not in _BUILT_IN:
        _entry_point(text, scheme)


def _entry_point(text: str, scheme: str) -> EntryPoint:
    """What makes stores of another maker's scheme. Raises UsageError where nobody does."""
    known = {point.name: point for point in entry_points(group=STORE_GROUP)}
    for name in (scheme, scheme.partition("+")[0]):
        if name in known:
            return known[name]
    names = ", ".join(sorted({*_BUILT_IN, *_REMOTE, *known}))
    raise UsageError(
        f"store: unknown scheme {scheme!r} in {text!r}; known are a directory, {names}"
    )
