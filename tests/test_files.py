"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zlib

import pytest

from pipecomp.utils import files
from pipecomp.utils.files import atomic_write, atomic_write_text, file_crc, lock_file, unlock_file
from tests.limits import HANG_S


def test_a_file_is_replaced_at_once(tmp_path):
    path = tmp_path / "state.json"
    atomic_write_text(path, "old ä")
    with atomic_write(path) as part:
        part.write_text("new")
        assert path.read_text(encoding="utf-8") == "old ä"
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_what_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "state.json"
    atomic_write_text(path, "old")
    with pytest.raises(TypeError), atomic_write(path) as part:
        part.write_text(b"not text")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_what_is_no_file_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    atomic_write_text(pipe, "told")
    assert os.read(reader, 10) == b"told"
    os.close(reader)
    assert pipe.is_fifo()


def test_a_link_stays_one(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "state.json").symlink_to("elsewhere/state.json")
    for text in ("old", "new"):
        atomic_write_text(tmp_path / "state.json", text)
    assert (tmp_path / "state.json").is_symlink()
    assert [(p.name, p.read_text()) for p in (tmp_path / "elsewhere").iterdir()] == [("state.json", "new")]


def test_nothing_written_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "nothing"):
        pass


def test_the_crc_is_zlibs(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_CHUNK", 100_000)
    data = bytes(range(256)) * 1000
    (tmp_path / "data").write_bytes(data)
    assert file_crc(tmp_path / "data") == zlib.crc32(data)


def test_a_lock_outlasts_other_openings_of_its_file_and_ends_with_its_own(tmp_path):
    (file := tmp_path / "file").write_text("")
    first, second = (os.open(file, os.O_RDWR) for _ in range(2))
    assert lock_file(first)
    file.read_bytes()  # opens and closes it, which ends the record locks of a process
    command = "import os, sys; from pipecomp.utils.files import lock_file; f = os.open(sys.argv[1], os.O_RDWR)"
    command += "; sys.exit(lock_file(f))"
    other = [sys.executable, "-c", command, str(file)]
    assert subprocess.run(other, check=False).returncode == 0
    assert not lock_file(second, shared=True)
    unlock_file(first)
    assert lock_file(second)
    unlock_file(second)
    assert subprocess.run(other, check=False).returncode == 1


def test_a_forked_child_does_not_keep_a_lock(tmp_path):
    (file := tmp_path / "file").write_text("")
    first, second = (os.open(file, os.O_RDWR) for _ in range(2))
    reading, writing = os.pipe()
    assert lock_file(first)
    if not (child := os.fork()):
        os.read(reading, 1)  # lives on
        os._exit(0)
    try:
        os.close(first)
        deadline = time.monotonic() + HANG_S
        while not lock_file(second):  # until the child has begun
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.write(writing, b"x")
        os.waitpid(child, 0)
        unlock_file(second)
