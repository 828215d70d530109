"""The store's one seam where the operating system's errors become wellhead's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from wellhead.errors import DiskFailed, DiskFull, WellheadError, is_no_room


def disk_error(error: OSError, doing: str) -> WellheadError:
    """DiskFull for a full disk or quota, DiskFailed for anything else."""
    where = f" ({error.filename})" if error.filename else ""
    if is_no_room(error):
        return DiskFull(
            f"no room left while {doing}{where}: {error.strerror}",
            "make room and run the same command: it goes on where it stopped, nothing committed is lost",
        )
    return DiskFailed(
        f"the disk failed while {doing}{where}: {error.strerror or error}",
        "look at the system's log; once the disk is well the same command goes on where it stopped",
    )


@contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Turns OSErrors of the block into DiskFull or DiskFailed."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, doing) from error
