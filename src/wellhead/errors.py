"""Every refusal of wellhead, as a table: one class an exit code. `docs/errors.md` is generated from this module.

A message says what, where and what to do: `message` is the first two, `hint` the third. Foreign errors are turned
into these at one seam each (the engine's, the store's, the command line's), never in between.
"""

from __future__ import annotations

import errno
from typing import ClassVar


class WellheadError(Exception):
    """Something inside wellhead went wrong that it has no better word for; please report it."""

    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    label: ClassVar[str] = "error"
    """What it is called on a screen: some ends have an exit code and are no errors."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class EngineDied(WellheadError):
    """The engine ended with an error of its own; what was captured before is committed."""

    code = "engine"
    retryable = True


class UsageError(WellheadError):
    """The command line or a configuration value is wrong."""

    exit_code = 2
    code = "usage"


class DoesNotFit(WellheadError):
    """The states would not fit into the free space, less the reserve; nothing was started."""

    exit_code = 3
    code = "does_not_fit"


class PreflightRefused(WellheadError):
    """The engine, the tokenizer or a layer is not what the run needs; nothing was captured."""

    exit_code = 4
    code = "preflight"


class OtherSpec(WellheadError):
    """The run folder belongs to another capture spec, or to another engine than the one asked for."""

    exit_code = 5
    code = "other_spec"


class FindingsFound(WellheadError):
    """`verify` found something that is wrong with the run."""

    exit_code = 6
    code = "findings"


class RunHeld(WellheadError):
    """Another living process holds the run."""

    exit_code = 7
    code = "held"
    retryable = True


class RowRejected(WellheadError):
    """A row of the data set was rejected and `--strict` was given."""

    exit_code = 8
    code = "rejected"


class CompleteWithRejects(WellheadError):
    """The run is complete, but some samples were rejected or quarantined."""

    label = "note"
    exit_code = 10
    code = "complete_with_rejects"


class Stopped(WellheadError):
    """The run was stopped and everything captured is committed; the same command resumes it."""

    label = "note"
    exit_code = 11
    code = "stopped"
    retryable = True


class GaveUp(WellheadError):
    """Too many samples failed; what was captured is committed."""

    exit_code = 12
    code = "gave_up"


class DiskFull(WellheadError):
    """No room is left on a disk; what was committed is safe, and the same command resumes when there is room."""

    exit_code = 13
    code = "disk"
    retryable = True


class DiskFailed(WellheadError):
    """A disk answered with an error that is not about room; what was committed is safe if the disk keeps it."""

    exit_code = 13
    code = "disk_failed"


class StoreDamaged(WellheadError):
    """Bytes of the run are not what the ledger says; `wellhead verify` names them all."""

    exit_code = 6
    code = "damaged"


SIGNAL_EXIT_CODES = {
    130: "SIGINT: ended at once (`extract` does so at the second one, and exits with 11 after the first)",
    141: "nobody reads standard output any more",
    143: "SIGTERM: ended at once (`extract`: as with SIGINT)",
}

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


def is_no_room(error: OSError) -> bool:
    """Whether an OSError says that a disk or a quota is full."""
    return error.errno in _NO_ROOM


def all_errors() -> list[type[WellheadError]]:
    """Every class of the table, by exit code."""
    found = [WellheadError]
    for cls in found:
        found += cls.__subclasses__()
    return sorted(set(found), key=lambda cls: (cls.exit_code, cls.code))
