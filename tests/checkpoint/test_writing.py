"""A checkpoint writer's notes, and the report to all ranks."""

from __future__ import annotations

import errno
import os
import resource
import stat
from pathlib import Path

import pytest
import torch

from pipecomp.checkpoint import writing
from pipecomp.checkpoint.writing import CollectiveWrite, RecordingCheckpointEngine, describe_error, private_files
from pipecomp.errors import CheckpointError


class Engine:
    """DeepSpeed's checkpoint engine, as far as it is passed through."""

    def commit(self, tag: str) -> str:
        return f"committed {tag}"


def test_a_full_disk_is_noted_with_its_path_and_without_a_stack() -> None:
    attempts = CollectiveWrite("here")
    writer = RecordingCheckpointEngine(Engine(), attempts)
    writer.save({"weights": torch.zeros(1 << 20)}, "/dev/full")
    assert attempts.problem == "/dev/full: No space left on device"
    writer.save({}, "/dev/null/never")
    assert attempts.problem == "/dev/full: No space left on device", "the first one counts"
    assert writer.commit("x") == "committed x"


@pytest.mark.parametrize("code", [errno.EFBIG, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("rust", [False, True])
def test_a_limit_on_file_sizes_is_named(tmp_path: Path, code: int, rust: bool) -> None:
    error: Exception = OSError(code, os.strerror(code))
    if rust:
        error = RuntimeError(f"I/O error: {os.strerror(code)} (os error {code})")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    try:
        text = describe_error(tmp_path / "weights", error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.strerror(code) in text
    assert "at most 64 KiB (ulimit -f)" in text
    assert ("quota" in text) == (code in (errno.EIO, errno.EDQUOT))
    assert "quota" not in describe_error("weights", OSError(errno.ENOENT, "no such file"))


def test_what_is_written_is_on_the_disk_before_anything_vouches_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure an empty file beside its manifest would be all that is left: older checkpoints are gone."""
    synced: list[tuple[int, int]] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append((os.fstat(fd).st_ino, os.fstat(fd).st_size)), fsync(fd)))
    RecordingCheckpointEngine(Engine(), CollectiveWrite(tmp_path)).save(
        {"weights": torch.arange(5)}, str(tmp_path / "file")
    )
    found = (tmp_path / "file").stat()
    assert synced == [(found.st_ino, found.st_size)]


def test_what_is_written_is_what_torch_writes(tmp_path: Path) -> None:
    attempts = CollectiveWrite(tmp_path)
    writer = RecordingCheckpointEngine(Engine(), attempts)
    writer.makedirs(str(tmp_path / "a" / "b"))
    writer.save({"weights": torch.arange(5)}, str(tmp_path / "a" / "b" / "file"))
    assert attempts.problem is None
    assert torch.load(tmp_path / "a" / "b" / "file", weights_only=True)["weights"].tolist() == [0, 1, 2, 3, 4]


def test_an_error_of_one_rank_is_one_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "gathered", lambda mine, group=None: [mine, "/disk/file: No space left on device"])
    with pytest.raises(CheckpointError) as caught:
        CollectiveWrite("/disk/c").raise_problems()
    told = "the checkpoint /disk/c cannot be written: rank 1: /disk/file: No space left on device. No part of it"
    assert str(caught.value).startswith(told)


def test_a_bug_is_none_of_the_disk() -> None:
    with pytest.raises(KeyError):
        CollectiveWrite("here").attempt(lambda: {}["missing"])


def test_private_files(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with private_files():
            (tmp_path / "inner").mkdir()
            (tmp_path / "inner" / "file").write_text("")
        (tmp_path / "after").write_text("")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("inner", "inner/file", "after")]
    assert modes == [0o700, 0o600, 0o644]
