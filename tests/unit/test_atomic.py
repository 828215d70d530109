"""Whole files or nothing: the lowest layer of the store."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from wellhead.store.atomic import POSIX, PosixDisk, SyncError, temp_path, write_atomic


def test_write_appends_after_pwrite_and_truncate(tmp_path: Path) -> None:
    file = POSIX.create(tmp_path / "a")
    file.write(b"0123456789")
    file.pwrite(b"AB", 2)
    file.write(b"X")
    file.truncate(5)
    file.write(np.arange(3, dtype="<u2").reshape(1, 3))
    file.write(np.empty((0, 4), dtype=np.uint8))
    file.sync()
    file.close()
    file.close()
    assert (tmp_path / "a").read_bytes() == b"01AB4\x00\x00\x01\x00\x02\x00"


def test_pwrite_beyond_the_end_moves_the_append_position(tmp_path: Path) -> None:
    file = POSIX.create(tmp_path / "a")
    file.pwrite(b"ab", 3)
    file.write(b"c")
    file.close()
    assert (tmp_path / "a").read_bytes() == b"\0\0\0abc"


def test_create_and_publish_and_link_refuse_a_taken_name(tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"old")
    (tmp_path / "temp").write_bytes(b"new")
    with pytest.raises(FileExistsError):
        POSIX.create(tmp_path / "taken")
    with pytest.raises(FileExistsError):
        POSIX.publish(tmp_path / "temp", tmp_path / "taken")
    with pytest.raises(FileExistsError):
        POSIX.link(tmp_path / "temp", tmp_path / "taken")
    assert (tmp_path / "taken").read_bytes() == b"old"
    POSIX.publish(tmp_path / "temp", tmp_path / "free")
    assert (tmp_path / "free").read_bytes() == b"new"
    assert not (tmp_path / "temp").exists()


def test_a_dangling_link_also_takes_the_name(tmp_path: Path) -> None:
    (tmp_path / "name").symlink_to(tmp_path / "nowhere")
    (tmp_path / "temp").write_bytes(b"new")
    with pytest.raises(FileExistsError):
        POSIX.publish(tmp_path / "temp", tmp_path / "name")


def test_make_dir_makes_parents_and_may_be_repeated(tmp_path: Path) -> None:
    POSIX.make_dir(tmp_path / "a" / "b" / "c")
    POSIX.make_dir(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()


def test_temp_names_are_hidden_fresh_and_beside_the_file(tmp_path: Path) -> None:
    names = {temp_path(tmp_path / "x.json") for _ in range(100)}
    assert len(names) == 100
    assert all(name.parent == tmp_path and name.name.startswith(".x.json.") for name in names)


@pytest.mark.parametrize("durable", [True, False])
def test_write_atomic_replaces_and_leaves_no_temp(tmp_path: Path, durable: bool) -> None:
    write_atomic(tmp_path / "x", b"one", durable=durable)
    write_atomic(tmp_path / "x", b"two", durable=durable)
    assert (tmp_path / "x").read_bytes() == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_write_atomic_that_fails_keeps_the_old_file_and_no_temp(tmp_path: Path) -> None:
    class NoRename(PosixDisk):
        def replace(self, temp: Path, final: Path) -> None:
            raise OSError(5, "no", str(final))

    write_atomic(tmp_path / "x", b"one")
    with pytest.raises(OSError, match="no"):
        write_atomic(tmp_path / "x", b"two", disk=NoRename())
    assert (tmp_path / "x").read_bytes() == b"one"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_failed_sync_is_never_retried_on_the_same_file(tmp_path: Path) -> None:
    file = POSIX.create(tmp_path / "a")
    [fd] = [int(p.name) for p in Path("/proc/self/fd").iterdir() if p.is_symlink() and p.readlink() == tmp_path / "a"]
    good = os.dup(fd)
    reading, writing = os.pipe()
    os.dup2(writing, fd)  # a pipe cannot be synced
    with pytest.raises(SyncError):
        file.sync()
    os.dup2(good, fd)  # the descriptor is well again, the pages may be gone
    with pytest.raises(SyncError, match="earlier"):
        file.sync()
    file.close()
    for other in (good, reading, writing):
        os.close(other)
