"""Every error Forebay raises, as one tree.

    ForebayError
    |-- UsageError          the call or the command line is wrong: correct it
    |   |-- StateError      something in the state cannot be saved or restored as it is
    |   `-- BusyError       the name is in use by a live job: stop it or choose another
    |-- NotFoundError       no such run, step, tensor: list what there is
    |-- MismatchError       checkpoint and target differ: change the target or opt in
    |-- DamagedError        stored bytes are not what was written: another tier, an older step
    |   `-- FormatError     stored bytes are not in the format at all
    |-- IncompleteError     a checkpoint is not complete: wait, commit, or go back one
    |-- ConflictError       the step exists already, or ranks disagree: nothing was changed
    |-- StoreError          a tier refused or failed: see its cause; bytes stay on the tier before
    |   |-- FullError       no space left there
    |   `-- DeniedError     the store refuses this caller: keys, bucket, clock; a person must act
    |-- AgentError          the node agent is gone or refused: it is started again by the next save
    `-- DeadlineError       a wait ended at its deadline: the text says what was waited for

Grouped by what a handler would do. ``kind`` is stable and fit for matching in logs;
``exit_code`` is what the command line ends with.
"""

from __future__ import annotations

from typing import ClassVar


class ForebayError(Exception):
    """Base of every error of this package. The text is one line and says what to do next."""

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1


class UsageError(ForebayError):
    """The call is wrong; nothing was read or written."""

    kind = "usage"
    exit_code = 2


class StateError(UsageError):
    """A part of the state cannot be encoded or placed; the text names its path."""

    kind = "state"


class BusyError(UsageError):
    """A live job already holds this name."""

    kind = "busy"


class NotFoundError(ForebayError):
    """The run, step, tensor or file asked for does not exist."""

    kind = "not_found"
    exit_code = 2


class MismatchError(ForebayError):
    """Checkpoint and target differ in names, dtype, shape or cover; no target was changed."""

    kind = "mismatch"
    exit_code = 2


class DamagedError(ForebayError):
    """Bytes read back are not the bytes that were written."""

    kind = "damaged"
    exit_code = 4


class FormatError(DamagedError):
    """A stored object does not follow the format, or is of an unknown version."""

    kind = "format"


class IncompleteError(ForebayError):
    """A checkpoint lacks records or shards and therefore does not exist."""

    kind = "incomplete"
    exit_code = 3


class ConflictError(ForebayError):
    """The commit was refused: the step exists already, or ranks disagree about a value."""

    kind = "conflict"
    exit_code = 3


class StoreError(ForebayError):
    """A tier failed or refused an operation; the cause is chained."""

    kind = "store"


class FullError(StoreError):
    """A tier has no space left."""

    kind = "full"


class DeniedError(StoreError):
    """The store answers and refuses: wrong keys, no such bucket, an expired token, the clock."""

    kind = "denied"


class AgentError(ForebayError):
    """The node agent cannot be reached, or refused what it was asked."""

    kind = "agent"
    exit_code = 5


class DeadlineError(ForebayError):
    """A wait ended at its deadline; the text names what was waited for."""

    kind = "deadline"
    exit_code = 3
