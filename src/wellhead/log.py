"""Log and event files that can be read at any moment: every line is one write to the file, nothing is held back."""

from __future__ import annotations

import json
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self


class _Lines:
    """Appends whole lines. Safe in several threads.

    A line that cannot be written must not end the work it tells of: it is counted, and the next line that can be
    written says how many are missing and why. Lines are not synced; a power cut may take the last ones.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._lock = threading.Lock()
        self._missing = 0
        self._reason = ""
        self._torn = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Safe to call twice. Lines written afterwards are dropped."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _append(self, line: str) -> None:
        with self._lock:
            if self._fd < 0:
                return
            if self._missing and self._write(self._gap(self._missing, self._reason)):
                self._missing = 0
            if not self._write(line):
                self._missing += 1

    def _write(self, line: str) -> bool:
        # Behind half a line (a disk that filled up in the middle of it) the next one starts anew.
        data = b"\n" * self._torn + f"{line}\n".encode(errors="backslashreplace")
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            self._reason = error.strerror or str(error)
            return False
        if written < len(data):
            self._torn, self._reason = True, "no room for a whole line"
            return False
        self._torn = False
        return True

    def _gap(self, lines: int, reason: str) -> str:
        raise NotImplementedError


class RunLog(_Lines):
    """A text log for people: UTC time and text, a line each."""

    def line(self, text: str) -> None:
        """Appends a line; line breaks in the text are shown as ⏎."""
        self._append(f"{_now()} {'⏎'.join(text.splitlines())}")

    def _gap(self, lines: int, reason: str) -> str:
        return f"{_now()} {lines} lines could not be written: {reason}"


class EventLog(_Lines):
    """A log for machines: one JSON object a line, with `time` (UTC) and `kind` first."""

    def write(self, kind: str, **fields: Any) -> None:
        """Appends an event; fields that JSON does not know are written as their text."""
        self._append(_object(kind, fields))

    def _gap(self, lines: int, reason: str) -> str:
        return _object("events_missing", {"lines": lines, "reason": reason})


def _object(kind: str, fields: dict[str, Any]) -> str:
    return json.dumps({"time": _now(), "kind": kind, **fields}, default=str, ensure_ascii=False)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
