"""Signals of a long verb: the first asks it to drain and commit, the second ends it at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_STOPS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signals(tell: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Yields `stop_asked`. SIGINT and SIGTERM set it; a second one ends the process with 130 or 143.

    The handler sets a flag and calls `tell`, which may take no lock: it runs between any two instructions. A process
    that a script started with `&` ignores SIGINT; here it is taken all the same, since somebody sent it on purpose."""

    asked: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if asked:
            # Not sys.exit: threads of an engine may never end. Nothing is lost that is not lost by a SIGKILL.
            os._exit(128 + number)
        asked.append(number)
        name = signal.Signals(number).name
        tell(f"{name}: finishing what is in hand and committing it; once more ends at once")

    before = {number: signal.signal(number, on_signal) for number in _STOPS}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
