"""A ledger: what one life has made durable, a JSON line each, appended and never changed.

A line is a JSON object with `kind` first and `crc` last, where crc is the CRC-32, in 8 hex digits, of the exact text
before `,"crc":"`. So a line proves itself, and a scan survives half lines, zeros and garbage: what proves itself
counts, wherever it stands.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import xxhash

from wellhead.store.atomic import POSIX, Disk, File, SyncError
from wellhead.store.life import Life
from wellhead.store.records import (
    Adopt,
    Attempt,
    Commit,
    Opened,
    Quarantine,
    Record,
    Recover,
    Replace,
    Retired,
    Tombstone,
    record_from_json,
)

__all__ = [
    "Adopt",
    "Attempt",
    "Commit",
    "Ledger",
    "LedgerScan",
    "Opened",
    "Quarantine",
    "Record",
    "Recover",
    "Replace",
    "Retired",
    "Tombstone",
    "read_record",
    "scan",
]

_CRC_AT = -len(',"crc":"01234567"}\n')
_BLOCK = 4 << 20


def encode_line(record: Record) -> bytes:
    text = orjson.dumps({"kind": record.kind, **record.to_json()})[:-1]
    return b'%b,"crc":"%08x"}\n' % (text, zlib.crc32(text))


def fault_of(line: bytes) -> str | None:
    """Why a line with its newline does not prove itself; None if it does."""
    # Compared as text: a parsed number would also take other spellings, and so miss flipped bits.
    if line.endswith(b',"crc":"%08x"}\n' % zlib.crc32(memoryview(line)[:_CRC_AT])):
        return None
    if line.endswith(b'"}\n') and line[_CRC_AT:].startswith(b',"crc":"'):
        return "the checksum differs"
    return "no whole line" if line.strip(b"\0") else "zeros"


class LedgerScan:
    """Iterates over (offset, line) of the lines that prove themselves; the rest is told afterwards.

    Streams: a ledger may be larger than memory. With `limit`, only the first `limit` bytes are looked at. After the
    iteration:
    `valid_bytes` the end of the last good line (with `limit`: how much of the limit is there), `xxh3` the hash of
    these bytes, `torn` the number of bytes after them, `damaged` a list of (offset, why) of bad lines before them.
    """

    def __init__(self, path: Path, limit: int | None = None) -> None:
        self.path = path
        self.limit = limit
        self.valid_bytes = 0
        self.torn = 0
        self.damaged: list[tuple[int, str]] = []
        self.xxh3 = xxhash.xxh3_64_intdigest(b"")

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        self.valid_bytes, self.damaged = 0, []
        hash_ = xxhash.xxh3_64()
        at = 0
        unproven: list[tuple[int, str, bytes]] = []  # damage if a good line follows, else the torn tail
        for line in _lines(self.path, self.limit):
            why = fault_of(line)
            if why is not None:
                unproven.append((at, why, line))
                at += len(line)
                continue
            if unproven:
                self._note_damage(unproven, hash_)
                unproven = []
            hash_.update(line)
            yield at, line
            at += len(line)
            self.valid_bytes = at
        if self.limit is not None:
            self._note_damage(unproven, hash_)
            self.valid_bytes = at
        self.torn = self.path.stat().st_size - self.valid_bytes
        self.xxh3 = hash_.intdigest()

    def _note_damage(self, unproven: list[tuple[int, str, bytes]], hash_: xxhash.xxh3_64) -> None:
        for at, why, line in unproven:
            self.damaged.append((at, why))
            hash_.update(line)

    def records(self) -> Iterator[tuple[int, Record]]:
        """The same as records. A line that proves itself and makes no sense is reported as damaged."""
        senseless = []
        for offset, line in self:
            try:
                yield offset, parse(line)
            except ValueError as why:
                senseless.append((offset, str(why)))
        self.damaged = sorted([*self.damaged, *senseless])


def parse(line: bytes) -> Record:
    """The record of a line that proves itself; ValueError if it makes no sense."""
    return record_from_json(json_of(line))


def json_of(line: bytes) -> dict[str, Any]:
    """The JSON object of a line; ValueError if it is none."""
    value = orjson.loads(line)
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def scan(path: Path, limit: int | None = None) -> LedgerScan:
    """Prepares a scan; nothing is read before the iteration."""
    return LedgerScan(path, limit)


def read_record(path: Path, offset: int, length: int) -> Record:
    """One line again. ValueError if it is not there any more."""
    with path.open("rb") as file:
        file.seek(offset)
        line = file.read(length)
    fault = fault_of(line)
    if len(line) != length or fault is not None:
        raise ValueError(fault or "no whole line")
    return parse(line)


class Ledger:
    """The ledger of a living life, open for appending by it alone. One thread at a time."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._size = 0
        self._broken: OSError | None = None

    @classmethod
    def open(cls, path: Path, life: Life, fingerprint: str, disk: Disk = POSIX) -> Ledger:
        """A new ledger with its first line. Its content and its name are durable on return."""
        ledger = cls(disk.create(path))
        try:
            ledger.append(Opened(life, fingerprint))
            disk.sync_dir(path.parent)
        except OSError:
            ledger.close()
            raise
        return ledger

    def append(self, record: Record) -> None:
        """Durable on return. OSError: the record does not count, or nobody can know yet whether it does.

        After a failed write the half line is cut off and the ledger stays usable; after a failed sync, or if the cut
        fails, every later append raises too.
        """
        if self._broken is not None:
            raise OSError(self._broken.errno, "an earlier write to this ledger failed", str(self._file.path))
        line = encode_line(record)
        try:
            self._file.write(line)
        except OSError:
            self._cut()
            raise
        try:
            self._file.sync()
        except SyncError as error:
            self._broken = error
            raise
        self._size += len(line)

    def close(self) -> None:
        self._file.close()

    def _cut(self) -> None:
        try:
            self._file.truncate(self._size)
        except OSError as error:
            self._broken = error


def _lines(path: Path, limit: int | None) -> Iterator[bytes]:
    """Lines with their newline; the last one may have none. Reads what is there now, block by block."""
    left = path.stat().st_size if limit is None else limit
    rest: list[bytes] = []
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(_BLOCK, left))):
            left -= len(block)
            start = 0
            while (end := block.find(b"\n", start)) >= 0:
                rest.append(block[start : end + 1])
                yield b"".join(rest) if len(rest) > 1 else rest[0]
                rest = []
                start = end + 1
            if start < len(block):
                rest.append(block[start:])
    if rest:
        yield b"".join(rest)
