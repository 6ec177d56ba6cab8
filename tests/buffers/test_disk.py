"""A disk that is full, read-only or gone: the run stops or goes on as configured, and nothing stored is lost."""

from __future__ import annotations

import errno
import faulthandler
import os
import resource
import shutil
import signal
import stat
import subprocess
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import lmdb
import pytest
import torch

from pipecomp.buffers import LmdbEnvironment, admin, lmdb_store
from pipecomp.config import Config
from pipecomp.errors import ConfigError, StoreError
from pipecomp.stages.link.endpoint import LinkReceiver, LinkSender, Position
from pipecomp.stages.link.layout import Layout
from pipecomp.stages.link.transport import loopback_pair
from tests.children import child_of, in_child
from tests.limits import HANG_S

SECTION = {"activations": {"method": "aqsgd"}, "store": {"on_write_error": "continue"}}


@pytest.fixture
def tmp_path(memory_folder):
    return memory_folder


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
        self.up, self.down = LinkSender(0, config, a, stores[0]), LinkReceiver(0, config, b, stores[1])
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
    with pytest.warns(UserWarning, match="refused the latest activations of"):
        ends.close()
    again = LmdbEnvironment(small_disk / "rank")
    found = again.link("link-0", {})
    ids = [h.sample for h in found.inventory()]
    assert len(ids) > 20
    assert set(ids) <= set(up)
    assert all(message is not None for message in found.get(ids)), "every value that was stored can be read"
    again.close()


def test_a_store_that_begins_on_a_full_disk_says_so(small_disk):
    """LMDB maps its lock file: the system would end a process that writes there without room."""
    (small_disk / "rank").mkdir()
    (small_disk / "rank" / "in-use").write_text("a process that was here")
    with (small_disk / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
        while True:
            ballast.write(bytes(1024))

    def begin():
        faulthandler.disable()
        said = []
        for _ in range(2):
            with pytest.raises(StoreError) as caught:
                LmdbEnvironment(small_disk / "rank")
            said.append(str(caught.value))
        return "\n".join(said)

    for text in in_child(begin).splitlines() or [""]:
        assert "No space left on device: free some space there" in text


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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
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
        assert not store.accepts_new()
        assert store.get([5])[0].m_nH.tolist() == [[2.0] * 3] * 2
    store.commit()
    store.put(5, 3, torch.full((2, 3), 3.0))
    store.commit()
    environment.writer.drain()
    assert store.accepts_new()
    environment.close()
    again = LmdbEnvironment(tmp_path / "rank")
    assert again.link("link-0", {}).get([5])[0].version == 3
    again.close()


def test_a_link_that_is_opened_again_leaves_what_is_refused_its_place(tmp_path, monkeypatch):
    environment = LmdbEnvironment(tmp_path / "rank", on_write_error="continue")
    store = environment.link("link-0", {})
    with monkeypatch.context() as patched, pytest.warns(UserWarning, match="No space left"):  # noqa: PT031
        refuse(environment, patched)
        store.put(5, 1, torch.full((2, 3), 1.0))
        store.commit()
        store.close()
        store = environment.link("link-0", {})
    environment.flush()
    store.put(6, 2, torch.full((2, 3), 2.0))
    store.commit()
    environment.close()
    again = LmdbEnvironment(tmp_path / "rank")
    assert [cached.version for cached in again.link("link-0", {}).get([5, 6])] == [1, 2]
    again.close()


def test_too_much_in_memory_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(lmdb_store, "MAX_REFUSED_BYTES", 1000)
    environment = LmdbEnvironment(tmp_path / "rank", on_write_error="continue")
    store = environment.link("link-0", {})
    refuse(environment, monkeypatch)
    store.put(5, 1, torch.zeros(20, 30))
    store.commit()
    with pytest.raises(StoreError, match=r"in memory, limit 1000"):
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


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.ENODEV])
def test_a_file_system_without_locks_is_told_with_the_way_out(tmp_path, monkeypatch, code):
    def refuses(*args, **options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(lmdb, "open", refuses)
    with pytest.raises(StoreError, match=f"{os.strerror(code)}. The file system has no locks, .* own disk"):
        LmdbEnvironment(tmp_path / "rank")


def test_a_file_system_that_syncs_no_folders_holds_a_store(tmp_path, monkeypatch):
    def refuses(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", refuses)
    environment = LmdbEnvironment(tmp_path / "rank")
    put_whole_step(environment, environment.link("link-0", {}), 1)
    environment.close()
    assert held_at(tmp_path / "rank") == {4: 1, 5: 1}


def test_a_program_that_goes_elsewhere_keeps_its_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment = LmdbEnvironment("rank")
    store = environment.link("link-0", {})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    put_whole_step(environment, store, 1)
    environment.close()
    assert held_at(tmp_path / "rank") == {4: 1, 5: 1}


def test_a_folder_that_vanishes_later_is_named_too(tmp_path):
    """LMDB would go on with the file that it has open, which nobody finds when the run goes on."""
    environment = LmdbEnvironment(tmp_path / "rank")
    store = environment.link("link-0", {})
    put_whole_step(environment, store, 1)
    (tmp_path / "rank").rename(tmp_path / "elsewhere")
    store.put(5, 2, torch.zeros(2, 3))
    store.commit()
    with pytest.raises(StoreError, match=rf"{tmp_path}/rank: cannot write.*No such file"):
        environment.writer.drain()
    environment.close()


def test_a_disk_that_is_mounted_again_is_used_again(tmp_path):
    environment = LmdbEnvironment(tmp_path / "rank", on_write_error="continue")
    store = environment.link("link-0", {})
    put_whole_step(environment, store, 1)
    (tmp_path / "rank").rename(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="No such file"):
        put_whole_step(environment, store, 2)
    assert not store.accepts_new()
    assert [m.version for m in store.get([4, 5])] == [2, 2]
    (tmp_path / "elsewhere").rename(tmp_path / "rank")
    environment.close()
    assert held_at(tmp_path / "rank") == {4: 2, 5: 2}


def test_another_file_in_the_place_of_the_store_is_noticed(tmp_path):
    environment = LmdbEnvironment(tmp_path / "rank")
    store = environment.link("link-0", {})
    put_whole_step(environment, store, 1)
    shutil.copy(tmp_path / "rank" / "data.mdb", tmp_path / "copy")
    os.replace(tmp_path / "copy", tmp_path / "rank" / "data.mdb")
    store.put(5, 2, torch.zeros(2, 3))
    store.commit()
    with pytest.raises(StoreError, match="replaced by another file"):
        environment.writer.drain()
    environment.close()


def put_whole_step(environment, store, version):
    for sample in (4, 5):
        store.put(sample, version, torch.full((2, 3), float(version)))
    store.commit()
    environment.writer.drain()


def held_at(folder):
    """Version of each sample in a store that nobody uses; every value is read."""
    environment = LmdbEnvironment(folder)
    store = environment.link("link-0", {})
    held = {h.sample: h.version for h in store.inventory()}
    assert all(m is not None for m in store.get(list(held)))
    environment.close()
    return held


def test_closing_tries_once_more_and_says_what_is_not_written(tmp_path, monkeypatch):
    for name, refused_to_the_end in (("late", False), ("never", True)):
        environment = LmdbEnvironment(tmp_path / name, on_write_error="continue")
        store = environment.link("link-0", {})
        put_whole_step(environment, store, 1)
        with monkeypatch.context() as patched, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            refuse(environment, patched)
            put_whole_step(environment, store, 2)
            if not refused_to_the_end:
                patched.undo()
            environment.close()
        ends = [str(w.message) for w in said if "until the end" in str(w.message)]
        assert len(ends) == refused_to_the_end
        assert all("latest activations of 2 samples" in text for text in ends)
        assert held_at(tmp_path / name) == dict.fromkeys((4, 5), 1 if refused_to_the_end else 2)


def test_a_copy_for_a_checkpoint_is_whole_or_not_made(tmp_path, monkeypatch):
    environment = LmdbEnvironment(tmp_path / "rank", on_write_error="continue")
    store = environment.link("link-0", {})
    put_whole_step(environment, store, 1)
    assert environment.save(tmp_path / "first")
    with monkeypatch.context() as patched, pytest.warns(UserWarning, match="on_write_error"):  # noqa: PT031
        refuse(environment, patched)
        put_whole_step(environment, store, 2)
        assert not environment.save(tmp_path / "second")
        assert not (tmp_path / "second").exists()
    assert environment.restore(tmp_path / "first")
    assert store.accepts_new()
    environment.close()  # what was refused before is of a time that is over
    assert held_at(tmp_path / "rank") == {4: 1, 5: 1}


def test_a_copy_has_every_committed_step_and_takes_the_place_of_later_ones(tmp_path):
    environment = LmdbEnvironment(tmp_path / "rank", prefetch=1)
    store = environment.link("link-0", {})

    def behind(commit):
        """A step that is not written when the next call begins."""
        gate = threading.Event()
        environment.writer.submit(lambda: gate.wait(HANG_S))
        commit()
        threading.Timer(0.05, gate.set).start()

    def step(version):
        store.put_many([(sample, version, torch.full((2, 3), float(version))) for sample in (4, 5)])
        store.commit()

    behind(lambda: step(1))
    assert environment.save(tmp_path / "first")
    step(2)
    environment.flush()

    def later():
        step(3)
        store.put(5, 4, torch.full((2, 3), 4.0))  # of a step that does not end
        store.prefetch([4])
        while not store.prefetched():
            time.sleep(0.001)

    behind(later)
    assert environment.restore(tmp_path / "first")
    store.commit()
    assert [(got.version, float(got.m_nH[0, 0])) for got in store.get([4, 5])] == [(1, 1.0)] * 2
    environment.close()
    assert held_at(tmp_path / "rank") == {4: 1, 5: 1}


def test_a_copy_takes_the_place_of_a_store_beside_which_there_is_no_room(tmp_path, small_disk):
    environment = LmdbEnvironment(small_disk / "rank")
    store = environment.link("link-0", {})
    store.put_many([(sample, 1, torch.ones(64, 128)) for sample in range(34)])
    store.commit()
    assert environment.save(tmp_path / "copy")
    assert environment.size_bytes() > 1 << 20  # more than half of the disk
    assert environment.restore(tmp_path / "copy")
    assert {got.version for got in store.get(list(range(34)))} == {1}
    environment.close()


def test_a_copy_that_was_made_with_other_settings_is_not_taken(tmp_path):
    for bits in (3, 4):
        environment = LmdbEnvironment(tmp_path / "rank")
        store = environment.link("link-0", {"forward_bits": bits})
        if bits == 3:
            assert environment.save(tmp_path / "copy")
        else:
            with pytest.warns(UserWarning, match=r"was stored with other settings \(forward_bits: 4, stored with 3"):
                assert not environment.restore(tmp_path / "copy")
            put_whole_step(environment, store, 1)  # goes on as it was
        environment.close()
        shutil.rmtree(tmp_path / "rank")


def limit_memory(more: int) -> None:
    """No more address space than now, and so many bytes."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, resource.RLIM_INFINITY))


@pytest.mark.parametrize("goes_on", ["stop", "continue"])
def test_no_room_for_a_larger_map(tmp_path, goes_on):
    """LMDB closes its file if the larger map cannot be had, and nothing could be read any more."""

    def fill():
        environment = LmdbEnvironment(tmp_path / "rank", map_bytes=1 << 18, on_write_error=goes_on)
        store = environment.link("link-0", {})
        put_whole_step(environment, store, 1)
        limit_memory(12 << 20)
        said = ""
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                for sample in range(6, 700):
                    store.put(sample, 1, torch.full((64, 128), float(sample)))
                    if sample % 8 == 0:
                        store.commit()
                        environment.writer.drain()
                    assert float(store.get([5])[0].m_nH[0, 0]) == 1.0
            except StoreError as error:
                said = str(error)
        if goes_on == "stop":
            environment.close()
        elif not said:
            (one,) = warned
            said = f"went on: {one.message}"
        return said

    said = in_child(fill)
    assert said.startswith("went on: ") == (goes_on == "continue")
    for part in (f"{tmp_path}/rank: cannot write", "Cannot allocate memory", "see `ulimit -v`"):
        assert part in said
    held = held_at(tmp_path / "rank")
    assert held.keys() >= {4, 5}
    assert len(held) > 20


def test_a_slow_disk_is_waited_for(tmp_path, monkeypatch):
    """No more than two steps wait in memory, the time is counted, and nothing is lost."""
    environment = LmdbEnvironment(tmp_path / "rank")
    store = environment.link("link-0", {})
    write, steps, ahead = environment.file.write, [], []

    def slowly(changes):
        time.sleep(0.05)
        write(changes)
        steps.append(len(steps))

    monkeypatch.setattr(environment.file, "write", slowly)
    for version in range(1, 9):
        store.put(5, version, torch.full((2, 3), float(version)))
        store.commit()
        ahead.append(version - len(steps))
    assert max(ahead) <= 3  # two wait, and the third may just have been given to the disk
    assert store.stats()["wait_seconds"] > 0
    environment.close()
    assert held_at(tmp_path / "rank") == {5: 8}


def test_a_file_that_is_cut_short_in_use_ends_the_process(tmp_path):
    """The system ends who reads a page of a mapped file that is not there: for the other ranks, a killed one."""

    def read():
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        environment = LmdbEnvironment(tmp_path / "rank")
        store = environment.link("link-0", {})
        put_whole_step(environment, store, 1)
        os.truncate(tmp_path / "rank" / "data.mdb", 0)
        store.get([4])
        return "read"

    assert child_of(read) == ("", -signal.SIGBUS)
    assert held_at(tmp_path / "rank") == {}


@pytest.mark.parametrize("share", [0.95, 0.5, 0.1, 0.01])
def test_a_file_that_was_cut_short_is_set_aside(tmp_path, share):
    environment = LmdbEnvironment(tmp_path / "rank-0")
    store = environment.link("link-0", {})
    for sample in range(50):
        store.put(sample, 1, torch.full((16, 64), float(sample)))
    store.commit()
    environment.close()
    file = tmp_path / "rank-0" / "data.mdb"
    os.truncate(file, int(share * file.stat().st_size))

    def read():
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with pytest.raises(StoreError, match="damaged pages"):
            admin.info(tmp_path)
        with pytest.warns(UserWarning, match=f"set aside as {file}.damaged"):
            return str(held_at(tmp_path / "rank-0"))

    assert child_of(read) == ("{}", 0)
    assert held_at(tmp_path / "rank-0") == {}


def test_wrong_values_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"store\.on_write_error: got 'retry'"):
        LmdbEnvironment(tmp_path / "rank", on_write_error="retry")
    for store in ({"on_write_error": 1}, {"backend": "memory", "on_write_error": "continue"}):
        with pytest.raises(ConfigError, match=r"store\.on_write_error"):
            Config.from_dict({"activations": {"method": "aqsgd"}, "store": store})
