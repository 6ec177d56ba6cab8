"""Stores on disk: transactions, settings, size of the file, growth, errors of the disk, restarts."""

import errno
import json
import os
import random
import resource
import signal
import struct
import threading
from contextlib import contextmanager

import lmdb
import pytest
import torch

from pipecomp.buffers import LmdbEnvironment, admin, lmdb_folder
from pipecomp.buffers.lmdb_file import ValueFile, piece_sizes
from pipecomp.buffers.value import HEADER_BYTES, ValueFormat
from pipecomp.errors import ConfigError, StoreError
from tests.children import in_child

SETTINGS = {"method": "aqsgd", "forward_bits": 4}


@pytest.fixture
def tmp_path(memory_folder):
    return memory_folder


@pytest.fixture
def opened(tmp_path):
    """Opens the same folder again and again; a test may leave it open."""
    environments = []

    def environment(**options):
        for old in environments:
            old.close()
        environments.append(LmdbEnvironment(tmp_path / "rank-0", **options))
        return environments[-1]

    yield environment
    for one in environments:
        one.close()


def message(sample: int, version: int, n: int = 4, H: int = 32) -> torch.Tensor:
    return torch.randn(n, H, generator=torch.Generator().manual_seed(1000 * sample + version))


def versions(store) -> dict[int, int]:
    return {line.sample: line.version for line in store.inventory()}


def move_the_last_of_four(opened, folder, *, slot: int, sample: int) -> None:
    """Store samples 0 to 3, a piece each; then move the last one's value to the key of another slot or sample."""
    store = opened().link("link-0", SETTINGS)
    store.put_many([(number, 1, message(number, 1, n=2)) for number in range(4)])
    store.commit()
    opened().close()
    with lmdb.open(str(folder / "rank-0"), max_dbs=3) as raw:
        table = raw.open_db(b"link-0")
        with raw.begin(write=True, db=table) as txn:
            txn.put(struct.pack(">QHQ", slot, 0, sample), txn.pop(struct.pack(">QHQ", 3, 0, 3)))


def transactions(environment) -> int:
    return environment.file._env.info()["last_txnid"]


class TestSteps:
    def test_a_step_of_all_links_is_one_transaction(self, opened):
        environment = opened()
        stores = [environment.link(f"link-{i}", SETTINGS) for i in range(3)]
        environment.flush()
        before = transactions(environment)
        for step in range(4):
            for store in stores:
                for sample in range(5):
                    store.put(sample, step, message(sample, step))
            environment.commit()
        environment.flush()
        assert transactions(environment) == before + 4

    def test_a_link_that_is_committed_by_itself_leaves_the_others_in_their_step(self, opened):
        environment = opened()
        stores = [environment.link(f"link-{i}", SETTINGS) for i in range(2)]
        environment.flush()
        before = transactions(environment)
        for store in stores:
            store.put(0, 1, message(0, 1))
        stores[0].commit()
        environment.writer.drain()
        assert transactions(environment) == before + 1
        environment = opened()
        assert [versions(environment.link(f"link-{i}", SETTINGS)) for i in range(2)] == [{0: 1}, {}]

    def test_only_whole_steps_survive_a_close(self, opened):
        store = opened().link("link-0", SETTINGS)
        store.put(0, 1, message(0, 1))
        store.put(1, 1, message(1, 1))
        store.commit()
        store.put(0, 2, message(0, 2))
        store.drop([1])
        assert versions(store) == {0: 2}
        store = opened().link("link-0", SETTINGS)
        assert versions(store) == {0: 1, 1: 1}
        assert torch.equal(store.get([0])[0].m_nH, message(0, 1))

    def test_what_is_on_disk_is_in_memory_no_more(self, opened):
        store = opened().link("link-0", SETTINGS)
        store.put_many([(sample, 1, message(sample, 1)) for sample in range(3)])
        store.commit()
        store.flush()
        assert [entry.value for entry in store._entries.values()] == [None] * 3
        assert [entry.copy for entry in store._entries.values()] == [None] * 3

    def test_slots_that_are_free_are_used_after_opening_again(self, opened):
        """Slots that only grew would be taken for damage one day."""
        store = opened().link("link-0", SETTINGS)
        store.put_many([(sample, 1, message(sample, 1)) for sample in range(4)])
        store.commit()
        store.drop([1, 2])
        store.commit()
        store = opened().link("link-0", SETTINGS)
        store.put_many([(sample, 2, message(sample, 2)) for sample in (7, 8)])
        store.commit()
        store.flush()
        assert store._table.end == 4
        assert versions(opened().link("link-0", SETTINGS)) == {0: 1, 3: 1, 7: 2, 8: 2}

    def test_a_value_may_change_its_length(self, opened):
        environment = opened()
        store = environment.link("link-0", SETTINGS)
        rng = random.Random(0)
        lengths: dict[int, int] = {}
        for step in range(12):
            for sample in rng.sample(range(6), 3):
                lengths[sample] = rng.choice([0, 1, 7, 40, 130, 300, 700])
                store.put(sample, step, message(sample, step, n=lengths[sample]))
            if step % 4 == 3:
                gone = rng.choice(sorted(lengths))
                del lengths[gone]
                store.drop([gone])
            environment.commit()
        held = versions(store)
        for options in ({}, {}):
            store = opened(**options).link("link-0", SETTINGS)
            assert versions(store) == held
            for sample, version in held.items():
                assert torch.equal(store.get([sample])[0].m_nH, message(sample, version, n=lengths[sample]))


class TestSettings:
    def test_other_settings_are_refused_and_named(self, opened):
        opened(bits=8).link("link-0", {"forward_bits": 4, "seed": 1, "pair": (1, 2)})
        opened(bits=8).link("link-0", {"pair": [1, 2], "seed": 1, "forward_bits": 4})
        with pytest.raises(StoreError) as caught:
            opened(bits=8).link("link-0", {"forward_bits": 2, "extra": None, "pair": [1, 2]})
        text = str(caught.value)
        assert "forward_bits: 2, stored with 4" in text
        assert "seed: 'not set', stored with 1" in text
        for part in ("extra: None", "prune", "rank-0"):
            assert part in text
        assert "pair" not in text
        with pytest.raises(StoreError, match="bits: 4, stored with 8"):
            opened(bits=4).link("link-0", {"forward_bits": 4, "seed": 1, "pair": [1, 2]})

    def test_names_and_settings_must_fit(self, opened):
        environment = opened()
        for name in ("", "meta", "a/b", "ä", "x" * 101, ".hidden"):
            with pytest.raises(ConfigError):
                environment.link(name, SETTINGS)
        with pytest.raises(ConfigError, match="settings"):
            environment.link("link-0", {"what": object()})

    def test_another_format_is_refused(self, opened):
        environment = opened()
        environment.file.set_meta(b"format", b"9")
        with pytest.raises(StoreError, match="format 9"):
            opened()

    def test_a_smaller_budget_is_applied_on_reopening(self, opened):
        environment = opened()
        store = environment.link("link-0", SETTINGS)
        for sample in range(20):
            store.put(sample, 1, message(sample, 1))
        store.commit()
        size = ValueFormat(32).size(4, 32)
        for _ in range(2):
            environment = opened(max_bytes=7 * size)
            store = environment.link("link-0", SETTINGS)
            assert len(store.inventory()) == 7
            store.commit()
        assert len(opened().link("link-0", SETTINGS).inventory()) == 7


class TestSize:
    @pytest.mark.parametrize("size", [40, 41, 700, 4079, 4080, 4120, 4121, 8752, 49704, 65560, 819240, 3_000_001])
    def test_pieces_add_up_and_the_first_holds_the_header(self, size):
        pieces = piece_sizes(size, 4096)
        assert sum(pieces) == size
        assert pieces[0] >= HEADER_BYTES
        assert min(pieces) > 0
        small = [p for p in pieces if p <= 490]
        assert all((p + 16) % 4096 == 0 for p in pieces[len(small) :]), "fill whole pages"
        assert len(small) <= 9

    @pytest.mark.parametrize(("H", "bits"), [(256, 2), (256, 4), (312, 2), (345, 2), (768, 8), (1024, 16), (256, 32)])
    def test_the_file_is_little_larger_than_the_bits(self, tmp_path, H, bits):
        """At most 1.15 times the z * n * H bits of the messages, after four epochs that overwrite every sample."""
        tokens, samples, step = 128, 800, 8
        value = ValueFormat(bits).pack(0, 1, torch.randn(tokens, H), "here")  # one for all: packing is not the point
        file = ValueFile(tmp_path)
        table = file.table("link-0")
        rng = random.Random(1)
        for _ in range(4):
            order = rng.sample(range(samples), samples)
            for start in range(0, samples, step):
                file.write({table: dict.fromkeys(order[start : start + step], value)})
        assert file.read(table, 17) == value
        assert file.size_bytes() <= 1.15 * samples * tokens * H * bits / 8
        file.close()

    def test_samples_of_many_lengths_do_not_break_the_file_up(self, tmp_path):
        """Freed runs of pages must fit what comes next: below 1.15 still after eight epochs."""
        rng = random.Random(1)
        values = [bytearray(ValueFormat(4).size(rng.randint(16, 128), 768)) for _ in range(400)]
        file = ValueFile(tmp_path)
        table = file.table("link-0")
        for _ in range(8):
            order = rng.sample(range(len(values)), len(values))
            for start in range(0, len(order), 4):
                file.write({table: {sample: values[sample] for sample in order[start : start + 4]}})
        assert file.size_bytes() <= 1.15 * sum(map(len, values))
        file.close()

    def test_the_map_grows_while_others_read(self, opened):
        environment = opened(map_bytes=1 << 16, prefetch=2)
        store = environment.link("link-0", SETTINGS)
        done = threading.Event()

        def read():
            while not done.is_set():
                store.prefetch(range(8))
                for got in store.get(range(8)):
                    assert got is None or torch.equal(got.m_nH, message(0, got.version, n=200))

        problems = []

        def reader():
            try:
                read()
            except BaseException as error:
                problems.append(error)

        thread = threading.Thread(target=reader)
        thread.start()
        try:
            for step in range(20):
                for sample in range(2 * step, 2 * step + 4):
                    store.put(sample, step, message(0, step, n=200))
                environment.commit()
            environment.flush()
        finally:
            done.set()
            thread.join()
        assert not problems
        assert environment.file._env.info()["map_size"] >= environment.size_bytes() > 1 << 20
        assert len(store.inventory()) == 42


class TestReading:
    def test_what_is_written_while_others_are_read_is_read_anew(self, opened, monkeypatch):
        """A micro-batch is read from one snapshot of the file, which lacks what was committed since it was taken."""
        environment = opened()
        store = environment.link("link-0", SETTINGS)
        store.put_many([(sample, 1, message(sample, 1)) for sample in (0, 1)])
        store.commit()
        store.flush()
        reading = store._reader

        @contextmanager
        def slowly():
            with reading() as read:
                store.put(1, 2, message(1, 2))
                store.commit()
                environment.writer.drain()
                yield read

        monkeypatch.setattr(store, "_reader", slowly)
        first, second = store.get([0, 1])
        assert (first.version, second.version) == (1, 2)
        assert torch.equal(first.m_nH, message(0, 1))
        assert torch.equal(second.m_nH, message(1, 2))

    def test_a_value_without_all_its_pieces_is_refused(self, tmp_path):
        file = ValueFile(tmp_path)
        table = file.table("link-0")
        values = {sample: ValueFormat(32).pack(sample, 1, message(sample, 1, n=9), "here") for sample in (0, 1)}
        file.write({table: values})
        assert [file.read(table, sample) for sample in (0, 1)] == list(values.values())
        last = len(piece_sizes(len(values[0]), file._page)) - 1
        file._transact(lambda txn: txn.delete((0).to_bytes(8, "big") + last.to_bytes(2, "big"), db=table.handle))
        with pytest.raises(StoreError, match=r"sample 0: .* bytes"):
            file.read(table, 0)
        assert file.read(table, 1) == values[1]
        file.close()

    def test_a_write_that_fails_uses_up_no_slots(self, tmp_path, monkeypatch):
        """A run that goes on without the disk tries again at every step: slots must not grow with the steps."""
        file = ValueFile(tmp_path)
        table = file.table("link-0")
        value = ValueFormat(32).pack(0, 1, message(0, 1), "here")
        file.write({table: dict.fromkeys(range(6), value)})
        file.write({table: dict.fromkeys((1, 3))})
        before = (table.end, sorted(table.free), dict(table.locations))

        def refused(*args):
            raise OSError(errno.ENOSPC, "full")

        with monkeypatch.context() as disk:
            disk.setattr(file, "_put", refused)
            for _ in range(3):
                with pytest.raises(StoreError, match="full"):
                    file.write({table: {**dict.fromkeys(range(10, 15), value), 5: value, 0: None}})
        assert (table.end, sorted(table.free), table.locations) == before
        file.write({table: dict.fromkeys(range(10, 15), value)})
        assert table.end == 9
        assert all(file.read(table, sample) == value for sample in (0, 5, 10, 14))
        file.close()


class TestErrors:
    def test_a_value_that_is_damaged_in_use_is_dropped(self, opened, tmp_path):
        environment = opened(prefetch=1)
        store = environment.link("link-0", SETTINGS)
        for sample in (3, 4):
            store.put(sample, 1, torch.full((60, 64), float(sample)))
        store.commit()
        store.flush()
        file = tmp_path / "rank-0" / "data.mdb"
        with file.open("r+b") as handle:  # the pages that LMDB has mapped
            pattern = torch.full((64,), 4.0).numpy().tobytes()
            handle.seek(file.read_bytes().index(pattern))
            handle.write(bytes([pattern[0] ^ 1]))
        assert torch.equal(store.get([3])[0].m_nH, torch.full((60, 64), 3.0))
        store.prefetch([4])
        with pytest.warns(UserWarning, match=r"link-0, sample 4.*CRC-32.*first visits"):
            assert store.get([4]) == [None]
        assert store.get([4]) == [None]
        assert versions(store) == {3: 1}
        store.commit()
        opened().close()
        assert admin.verify(tmp_path).damaged == []
        store = opened().link("link-0", SETTINGS)
        store.put(4, 2, message(4, 2))
        assert torch.equal(store.get([4])[0].m_nH, message(4, 2))

    def test_damaged_values_are_dropped_when_opening(self, opened, tmp_path):
        store = opened().link("link-0", SETTINGS)
        for sample in (3, 4):
            store.put(sample, 1, torch.full((60, 64), float(sample)))
        store.commit()
        opened().close()
        damage(tmp_path / "rank-0" / "data.mdb", torch.full((64,), 4.0).numpy().tobytes())
        (tmp_path / "rank-0" / lmdb_folder.UNSYNCED_FILE).touch()
        with pytest.warns(UserWarning, match=r"link-0, sample 4.*CRC-32.*1 damaged values are dropped"):
            store = opened().link("link-0", SETTINGS)
        assert versions(store) == {3: 1}
        store.put_many([(sample, 2, message(sample, 2)) for sample in (3, 4, 5)])
        store.commit()
        assert versions(opened().link("link-0", SETTINGS)) == dict.fromkeys((3, 4, 5), 2)

    def test_a_value_with_a_damaged_header_is_dropped_when_opening(self, opened, tmp_path):
        store = opened().link("link-0", SETTINGS)
        store.put(3, 1, message(3, 1))
        store.commit()
        store.flush()
        opened().close()
        file = tmp_path / "rank-0" / "data.mdb"
        whole = file.read_bytes()
        at = whole.index(b"PCMV")
        for offset in (0, 4, 6, 7, 8):
            data = bytearray(whole)
            data[at + offset] ^= 1
            file.write_bytes(data)
            environment = opened()
            with pytest.warns(UserWarning, match="link-0, sample 3"):
                assert versions(environment.link("link-0", SETTINGS)) == {}
            opened().close()

    def test_foreign_files_are_set_aside(self, tmp_path):
        folder = tmp_path / "rank-0"
        folder.mkdir()
        (folder / "data.mdb").write_bytes(b"something else " * 1000)
        with pytest.warns(UserWarning, match=r"set aside as .*rank-0/data.mdb.damaged"):
            LmdbEnvironment(folder).close()
        assert (folder / "data.mdb.damaged").read_bytes() == b"something else " * 1000
        with pytest.raises(StoreError, match="cannot use it"):
            LmdbEnvironment(folder / "data.mdb")

    def test_somebody_elses_lmdb_file_is_refused_and_stays_as_it_is(self, tmp_path):
        with lmdb.open(str(tmp_path / "rank-0")) as theirs, theirs.begin(write=True) as txn:
            txn.put(b"theirs", b"data")
        file = tmp_path / "rank-0" / "data.mdb"
        before = file.read_bytes()
        with pytest.raises(StoreError, match="not a message store"):
            LmdbEnvironment(tmp_path / "rank-0")
        assert file.read_bytes() == before

    @pytest.mark.parametrize("slot", [1 << 40, (1 << 64) - 1])
    def test_a_damaged_slot_is_found_before_room_is_made_for_those_below(self, opened, tmp_path, slot):
        move_the_last_of_four(opened, tmp_path, slot=slot, sample=3)
        for call in (admin.verify, admin.info, admin.prune):
            said = str([d.problem for d in call(tmp_path).damaged] if call is admin.verify else raised(call, tmp_path))
            assert f"damaged key {slot:016x}" in said
        with pytest.raises(StoreError, match=r"damaged key .* start again"):
            opened().link("link-0", SETTINGS)
        with pytest.warns(UserWarning, match=r"damaged key .* set aside"):
            assert versions(opened().link("link-0", SETTINGS)) == {}

    def test_a_value_under_another_samples_key_is_found(self, opened, tmp_path):
        move_the_last_of_four(opened, tmp_path, slot=3, sample=9)
        (found,) = admin.verify(tmp_path).damaged
        assert found.sample == 9
        assert "sample 9: holds a value of sample 3" in found.problem
        assert admin.prune(tmp_path).kept == 3
        assert versions(opened().link("link-0", SETTINGS)) == dict.fromkeys(range(3), 1)

    def test_two_users_of_a_folder_are_refused(self, opened, tmp_path):
        opened()
        with pytest.raises(StoreError, match="in use by this process"):
            LmdbEnvironment(tmp_path / "rank-0")

        def other_process():
            lmdb_folder._used.clear()  # what a forked child inherits and a process of its own does not have
            with pytest.raises(StoreError) as caught:
                LmdbEnvironment(tmp_path / "rank-0")
            return str(caught.value)

        assert f"in use by process {os.getpid()} on " in in_child(other_process)

    def test_a_background_error_surfaces_at_the_next_calls(self, opened, monkeypatch):
        environment = opened()
        store = environment.link("link-0", SETTINGS)
        store.put(0, 1, message(0, 1))
        store.commit()
        store.flush()

        def fail(changes):
            raise StoreError("/somewhere: cannot write: the disk is full")

        monkeypatch.setattr(environment.file, "write", fail)
        store.put(0, 2, message(0, 2))
        store.commit()
        for call in (store.flush, store.commit, lambda: store.get([0]), lambda: store.put(1, 1, message(1, 1))):
            with pytest.raises(StoreError, match=r"earlier write in the background failed.*disk is full"):
                call()
        environment.close()  # told already
        monkeypatch.undo()
        assert versions(opened().link("link-0", SETTINGS)) == {0: 1}

    def test_an_error_nobody_saw_is_raised_by_close(self, opened, monkeypatch):
        environment = opened()
        store = environment.link("link-0", SETTINGS)

        def fail(changes):
            raise OSError("gone")

        monkeypatch.setattr(environment.file, "write", fail)
        store.put(0, 1, message(0, 1))
        store.commit()
        with pytest.raises(StoreError, match="gone"):
            environment.close()
        environment.close()

    def test_a_full_disk_names_the_path_and_the_way_out(self, tmp_path):
        """A limit on the size of files stands in for a full disk."""

        def fill():
            environment = LmdbEnvironment(tmp_path / "rank-0")
            store = environment.link("link-0", SETTINGS)
            store.put(0, 1, message(0, 1))
            store.commit()
            store.flush()
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, resource.RLIM_INFINITY))
            for sample in range(64):
                store.put(sample, 2, message(sample, 2, n=400))
            store.commit()
            said = []
            for call in (store.flush, lambda: store.get([0]), environment.close):
                try:
                    call()
                    said.append("nothing")
                except StoreError as error:
                    said.append(str(error))
            return "\n".join(said)

        first, second, third = in_child(fill).splitlines()
        assert first == second
        assert third == "nothing"
        for part in (
            str(tmp_path / "rank-0"),
            "cannot write",
            "files of this process may have at most 256 KiB (ulimit -f)",
            "store.max_bytes",
        ):
            assert part in first
        environment = LmdbEnvironment(tmp_path / "rank-0")
        assert versions(environment.link("link-0", SETTINGS)) == {0: 1}
        environment.close()

    def test_a_read_only_place_names_the_path_and_the_way_out(self, tmp_path):
        tmp_path.chmod(0o755)
        folder = tmp_path / "rank-0"
        folder.mkdir(mode=0o555)

        def try_it():
            if os.geteuid() == 0:
                os.seteuid(65534)  # root may write anywhere
            with pytest.raises(StoreError) as caught:
                LmdbEnvironment(folder)
            return str(caught.value)

        said = in_child(try_it)
        assert str(folder) in said
        assert "Permission denied" in said
        assert "It must be writable" in said


class TestRestart:
    def fill(self, opened):
        environment = opened()
        store = environment.link("link-0", SETTINGS)
        for sample in range(5):
            store.put(sample, 1, torch.full((40, 64), float(sample)))
        store.commit()
        return environment, store

    def test_a_store_that_was_about_to_be_made_is_used(self, opened, tmp_path):
        """Its process was killed when it had made the file, but not yet written to it."""
        folder = tmp_path / "rank-0"
        folder.mkdir()
        ValueFile(folder).close()
        self.fill(opened)[0].close()
        lmdb.open(str(tmp_path / "rank-1")).close()
        LmdbEnvironment(tmp_path / "rank-1").close()

    def test_a_store_with_a_page_that_never_reached_the_disk_is_set_aside(self, opened, tmp_path):
        self.fill(opened)[0].close()
        file = tmp_path / "rank-0" / "data.mdb"
        data = bytearray(file.read_bytes())
        start = data.index(torch.full((1000,), 3.0).numpy().tobytes()) // 4096 * 4096
        data[start : start + 4096] = bytes(4096)
        file.write_bytes(data)
        (tmp_path / "rank-0" / lmdb_folder.UNSYNCED_FILE).touch()
        with pytest.warns(UserWarning, match=r"damaged pages.*set aside"):
            assert versions(opened().link("link-0", SETTINGS)) == {}


def raised(call, *args) -> str:
    with pytest.raises(StoreError) as caught:
        call(*args)
    return str(caught.value)


def damage(file, pattern: bytes) -> None:
    """Flip a bit of `pattern` everywhere: LMDB leaves copies of moved records in the free part of pages."""
    data = file.read_bytes()
    assert pattern in data
    file.write_bytes(data.replace(pattern, bytes([pattern[0] ^ 1]) + pattern[1:]))


def test_the_settings_are_readable_json(opened):
    environment = opened(bits=4, group_size=16)
    environment.link("link-0", SETTINGS)
    assert json.loads(environment.file.meta(b"link:link-0")) == {**SETTINGS, "bits": 4, "grouping": 16}
