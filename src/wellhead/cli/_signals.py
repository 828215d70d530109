"""Signals of a long verb: the first asks it to drain and commit, the second ends it at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_STOPS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Whether somebody asked to stop. While `interruptible`, the first signal raises KeyboardInterrupt instead of being
    looked at later: where nothing is in hand, nothing has to be finished."""

    def __init__(self) -> None:
        self.asked = False
        self._interruptible = False

    def __call__(self) -> bool:
        return self.asked

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        self._interruptible = True
        try:
            if self.asked:
                raise KeyboardInterrupt
            yield
        finally:
            self._interruptible = False

    def ask(self) -> None:
        self.asked = True
        if self._interruptible:
            raise KeyboardInterrupt


@contextmanager
def stop_on_signals(tell: Callable[[str], None]) -> Iterator[Stop]:
    """SIGINT and SIGTERM ask to stop; a second one ends the process with 130 or 143.

    The handler calls `tell`, which may take no lock: it runs between any two instructions. A process that a script
    started with `&` ignores SIGINT; here it is taken all the same, since somebody sent it on purpose."""
    stop = Stop()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if stop.asked:
            # Not sys.exit: threads of an engine may never end. Nothing is lost that is not lost by a SIGKILL.
            os._exit(128 + number)
        name = signal.Signals(number).name
        tell(f"{name}: finishing what is in hand and committing it; once more ends at once")
        stop.ask()

    before = {number: signal.signal(number, on_signal) for number in _STOPS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
