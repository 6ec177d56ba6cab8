"""A disk that is full, read-only or gone: the run stops or goes on as configured, and nothing stored is lost."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import pytest
import torch

from pipecomp.buffers import LmdbEnvironment, lmdb_store
from pipecomp.config import Config
from pipecomp.errors import ConfigError, StoreError
from pipecomp.stages.boundary import Layout
from pipecomp.stages.downstream import DownstreamEnd
from pipecomp.stages.link import Position
from pipecomp.stages.loopback import loopback_pair
from pipecomp.stages.upstream import UpstreamEnd

SECTION = {"activations": {"method": "aqsgd"}, "store": {"on_write_error": "continue"}}


@pytest.fixture
def tmp_path():
    """In memory where there is such a place: an fsync can take seconds while others write to the same disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture
def small_disk(tmp_path):
    """An empty file system of 2 MiB, if this process may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a small tmpfs: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


class Ends:
    """Both ends of a link, each with a store of its own; `full` says which of them has the given disk."""

    def __init__(self, tmp_path: Path, disk: Path, full: str, **options) -> None:
        folders = [disk / "rank" if full == name else tmp_path / name for name in ("up", "down")]
        self.environments = [LmdbEnvironment(f, **{"on_write_error": "continue", **options}) for f in folders]
        stores = [e.link("link-0", {}) for e in self.environments]
        a, b = loopback_pair(timeout_s=5)
        config = Config.from_dict(SECTION)
        self.up, self.down = UpstreamEnd(0, config, a, stores[0]), DownstreamEnd(0, config, b, stores[1])
        self.step = 0

    def visit(self, ids: tuple[int, ...], n: int = 64, H: int = 128) -> None:
        """One training step of one micro-batch; the receiver must compute with what the sender holds."""
        at, layout = Position(self.step, 0), Layout(ids, (0,) * len(ids), (n,) * len(ids), n)
        x_BSH = torch.randn(len(ids), n, H)
        self.up.send_activation(x_BSH, layout, at)
        y_BSH, _ = self.down.recv_activation(at)
        assert float((x_BSH - y_BSH).norm() / x_BSH.norm()) < 0.5
        self.down.send_gradient(x_BSH, layout, at)
        self.up.recv_gradient(layout, at)
        for environment in self.environments:
            environment.commit()
            environment.writer.drain()
        self.step += 1

    def held(self) -> list[dict[int, tuple[int, int]]]:
        return [{h.sample: (h.version, h.digest) for h in end.store.inventory()} for end in (self.up, self.down)]

    def close(self) -> None:
        for environment in self.environments:
            environment.close()


@pytest.mark.parametrize("full", ["up", "down"])
def test_a_full_disk_goes_on_without_new_samples(tmp_path, small_disk, full):
    """A sample takes 33 KB: the disk holds some fifty of them."""
    ends = Ends(tmp_path, small_disk, full)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for start in range(0, 120, 4):
            ends.visit(tuple(range(start, start + 4)))
        for start in range(0, 120, 4):
            ends.visit(tuple(range(start, start + 4)))
    assert len([w for w in said if "on_write_error" in str(w.message)]) == 1
    up, down = ends.held()
    assert up == down, "both ends go on alike"
    assert 30 < len(up) < 70
    stats = [ends.up.stats, ends.down.stats]
    assert stats[0].unstored_samples == stats[1].unstored_samples > 100
    assert stats[0].delta_samples == stats[1].delta_samples > 30, "what is stored is used"
    ends.close()
    again = LmdbEnvironment(small_disk / "rank")
    found = again.link("link-0", {})
    ids = [h.sample for h in found.inventory()]
    assert len(ids) > 20
    assert set(ids) <= set(up)
    assert all(message is not None for message in found.get(ids)), "every value that was stored can be read"
    again.close()


def test_space_that_comes_back_is_used(tmp_path, small_disk):
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1 << 20))
    ends = Ends(tmp_path, small_disk, "down")
    with pytest.warns(UserWarning, match="on_write_error"):  # noqa: PT031
        for start in range(0, 60, 4):
            ends.visit(tuple(range(start, start + 4)))
    few = len(ends.held()[0])
    ballast.unlink()
    ends.visit((0,))
    for start in range(40, 60, 4):
        ends.visit(tuple(range(start, start + 4)))
    assert len(ends.held()[1]) > few
    assert ends.held()[0] == ends.held()[1]
    ends.close()


def refuse(environment, monkeypatch, code=errno.ENOSPC):
    def fail(changes):
        try:
            raise OSError(code, os.strerror(code))
        except OSError as error:
            raise StoreError(f"{environment.path}: cannot write: {error}") from error

    monkeypatch.setattr(environment.file, "write", fail)


def test_what_is_refused_stays_readable_in_memory_and_is_written_later(tmp_path, monkeypatch):
    environment = LmdbEnvironment(tmp_path / "rank", on_write_error="continue")
    store = environment.link("link-0", {})
    with monkeypatch.context() as patched, pytest.warns(UserWarning, match="No space left"):  # noqa: PT031
        refuse(environment, patched)
        for version in (1, 2):
            store.put(5, version, torch.full((2, 3), float(version)))
            store.commit()
            environment.writer.drain()
        assert not store.keeps_new()
        assert store.get([5])[0].m_nH.tolist() == [[2.0] * 3] * 2
    store.commit()
    store.put(5, 3, torch.full((2, 3), 3.0))
    store.commit()
    environment.writer.drain()
    assert store.keeps_new()
    environment.close()
    again = LmdbEnvironment(tmp_path / "rank")
    assert again.link("link-0", {}).get([5])[0].version == 3
    again.close()


def test_too_much_in_memory_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(lmdb_store, "UNWRITTEN_BYTES", 1000)
    environment = LmdbEnvironment(tmp_path / "rank", on_write_error="continue")
    store = environment.link("link-0", {})
    refuse(environment, monkeypatch)
    store.put(5, 1, torch.zeros(20, 30))
    store.commit()
    with pytest.raises(StoreError, match=r"wait in memory, the limit is 1000"):
        environment.writer.drain()
    environment.close()


def test_damage_stops_the_run_whatever_is_configured(tmp_path, monkeypatch):
    environment = LmdbEnvironment(tmp_path / "rank", on_write_error="continue")
    store = environment.link("link-0", {})

    def fail(changes):
        raise StoreError("slots are out of order")

    monkeypatch.setattr(environment.file, "write", fail)
    store.put(5, 1, torch.zeros(2, 3))
    store.commit()
    with pytest.raises(StoreError, match="out of order"):
        environment.writer.drain()
    environment.close()


def test_stop_is_the_default(tmp_path, monkeypatch):
    environment = LmdbEnvironment(tmp_path / "rank")
    store = environment.link("link-0", {})
    refuse(environment, monkeypatch, errno.EROFS)
    store.put(5, 1, torch.zeros(2, 3))
    store.commit()
    with pytest.raises(StoreError, match="Read-only file system"):
        environment.writer.drain()
    environment.close()


def test_a_folder_that_vanished_is_named(tmp_path):
    environment = LmdbEnvironment(tmp_path / "rank")
    store = environment.link("link-0", {})
    shutil.rmtree(tmp_path / "rank")
    store.put(5, 1, torch.zeros(2, 3))
    store.commit()
    with pytest.raises(StoreError, match=rf"{tmp_path}/rank: cannot write.*No such file"):
        environment.writer.drain()
    environment.close()


def test_wrong_values_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"store\.on_write_error: got 'retry'"):
        LmdbEnvironment(tmp_path / "rank", on_write_error="retry")
    for store in ({"on_write_error": 1}, {"backend": "memory", "on_write_error": "continue"}):
        with pytest.raises(ConfigError, match=r"store\.on_write_error"):
            Config.from_dict({"activations": {"method": "aqsgd"}, "store": store})
