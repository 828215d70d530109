"""The pulse of a run: a thread of its own, because torch blocks every other one.

Every `status_s` seconds it replaces the life's status.json and hands the same figures to whoever shows them; every
`event_s` seconds it writes a heartbeat event, also while nothing moves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from wellhead.log import EventLog
from wellhead.store.atomic import write_atomic

Snapshot = dict[str, Any]


class Heartbeat:
    """Context manager. `measure` must be callable from any thread; `show` is called from this one."""

    def __init__(
        self,
        status_file: Path,
        events: EventLog,
        measure: Callable[[], Snapshot],
        show: Callable[[Snapshot], None],
        period_s: tuple[float, float] = (2.0, 10.0),
    ) -> None:
        self._file = status_file
        self._events = events
        self._measure = measure
        self._show = show
        self._status_s, self._event_s = period_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="wellhead-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self.publish()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        self.publish()

    def publish(self) -> Snapshot:
        """Measures, replaces status.json and shows. A full disk must not end the run from here: the store says so
        itself, at the next commit."""
        snapshot = self._measure()
        try:
            write_atomic(self._file, orjson.dumps(snapshot, option=orjson.OPT_INDENT_2), durable=False)
        except OSError as error:
            snapshot["warnings"] = [*snapshot.get("warnings", ()), f"status.json could not be written: {error}"]
        self._show(snapshot)
        return snapshot

    def _beat(self) -> None:
        waited = 0.0
        while not self._end.wait(self._status_s):
            waited += self._status_s
            snapshot = self.publish()
            if waited >= self._event_s:
                waited = 0.0
                self._events.write("heartbeat", **_vital(snapshot))


def _vital(snapshot: Snapshot) -> Snapshot:
    keys = ("doing", "kept", "pending", "tokens", "uncommitted_tokens", "still_s", "oldest_in_flight", "free_bytes")
    return {key: snapshot.get(key) for key in keys}
