"""Looking at stores on disk, finding damage, and cleaning up."""

import errno
import os
import signal
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from pipecomp.buffers import LmdbEnvironment, admin, open_environment
from pipecomp.buffers.base import GRADIENT, entry_id
from pipecomp.buffers.lmdb_folder import RankFolder
from pipecomp.buffers.store import sample_hash
from pipecomp.buffers.value import ValueFormat
from pipecomp.errors import ConfigError, StoreError

SETTINGS = {"forward_bits": 4}
RANKS, LINKS, SAMPLES = (0, 2), ("link-0", "link-1"), 12


@pytest.fixture
def tmp_path(memory_folder):
    return memory_folder


def value(rank: int, link: str, sample: int, version: int) -> torch.Tensor:
    return torch.full((80, 32), 100.0 * rank + 10 * LINKS.index(link) + sample + version / 128)


@pytest.fixture
def store(tmp_path):
    """Two ranks with two links each, every sample written twice, the last one once."""
    for rank in RANKS:
        environment = open_environment("lmdb", tmp_path / "messages", rank, bits=32)
        stores = {link: environment.link(link, SETTINGS) for link in LINKS}
        for version in (3, 4):
            for link, one in stores.items():
                for sample in range(SAMPLES if version == 3 else SAMPLES - 1):
                    one.put(sample, version, value(rank, link, sample, version))
            environment.commit()
        environment.close()
    return tmp_path / "messages"


def damage(store, rank, link, sample):
    """Flip one bit of a value, in all copies of its bytes."""
    file = store / f"rank-{rank}" / "data.mdb"
    version = 4 if sample < SAMPLES - 1 else 3
    pattern = value(rank, link, sample, version)[:2].numpy().tobytes()
    data = file.read_bytes()
    assert pattern in data
    file.write_bytes(data.replace(pattern, bytes([pattern[0] ^ 4]) + pattern[1:]))


def contents(store, rank) -> dict:
    environment = LmdbEnvironment(store / f"rank-{rank}")
    found = {}
    for link in LINKS:
        one = environment.link(link, SETTINGS)
        for line in one.inventory():
            message = one.get([line.sample])[0]
            assert torch.equal(message.m_nH, value(rank, link, line.sample, line.version))
            found.setdefault(link, {})[line.sample] = line.version
    environment.close()
    return found


def snapshot(store) -> dict:
    return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(store.rglob("*")) if p.is_file()}


WHOLE = {link: {**dict.fromkeys(range(SAMPLES - 1), 4), SAMPLES - 1: 3} for link in LINKS}


def test_info_says_what_is_there_and_writes_nothing(store):
    before = snapshot(store)
    lines = admin.info(store)
    assert snapshot(store) == before
    assert [(line.rank, line.link) for line in lines] == [(r, link) for r in RANKS for link in LINKS]
    for line in lines:
        assert (line.samples, line.versions, line.bits, line.group_size) == (SAMPLES, (3, 4), 32, None)
        assert line.stored_bytes == SAMPLES * ValueFormat(32).size(80, 32)
        assert line.file_bytes == (store / f"rank-{line.rank}" / "data.mdb").stat().st_size
        assert line.settings == SETTINGS
    one = admin.info(store / "rank-2")
    assert [(line.rank, line.link) for line in one] == [(2, link) for link in LINKS]


def test_verify_lists_every_damaged_sample_and_writes_nothing(store):
    assert admin.verify(store) == admin.VerifyReport(checked=4 * SAMPLES)
    damage(store, 0, "link-1", 5)
    damage(store, 2, "link-0", 11)
    before = snapshot(store)
    report = admin.verify(store)
    assert snapshot(store) == before
    assert report.checked == 4 * SAMPLES
    assert [(d.rank, d.link, d.sample) for d in report.damaged] == [(0, "link-1", 5), (2, "link-0", 11)]
    assert all("CRC-32" in d.problem for d in report.damaged)


def test_verify_finds_damaged_pages_without_reading_values(store):
    file = store / "rank-0" / "data.mdb"
    data = bytearray(file.read_bytes())
    for page in range(2, len(data) // 4096):
        data[4096 * page : 4096 * page + 64] = b"\xff" * 64
    file.write_bytes(data)
    with pytest.raises(StoreError, match=r"rank-0: damaged pages: .*pipecomp store verify"):
        admin.info(store)
    report = admin.verify(store)
    assert report.checked == 2 * SAMPLES, "the other rank is checked"
    assert {(d.rank, d.link, d.sample) for d in report.damaged} == {(0, None, None)}
    with pytest.raises(StoreError, match="--everything"):
        admin.prune(store)
    report = admin.prune(store / "rank-0", everything=True)
    assert report.bytes_after == 0
    assert contents(store, 0) == {}
    assert contents(store, 2) == WHOLE


def test_prune_takes_out_what_is_damaged(store, monkeypatch):
    monkeypatch.setattr(admin, "_COPY_BYTES", 25_000)  # two or three values: several transactions for each link
    damage(store, 0, "link-1", 5)
    damage(store, 2, "link-0", 11)
    report = admin.prune(store)
    assert (report.kept, report.removed, report.damaged) == (4 * SAMPLES - 2, 2, 2)
    assert 0 < report.bytes_after < report.bytes_before
    assert admin.verify(store) == admin.VerifyReport(checked=4 * SAMPLES - 2)
    assert contents(store, 0) == {**WHOLE, "link-1": {s: v for s, v in WHOLE["link-1"].items() if s != 5}}
    assert contents(store, 2) == {**WHOLE, "link-0": {s: v for s, v in WHOLE["link-0"].items() if s != 11}}


def test_prune_removes_a_link_with_its_settings(store):
    report = admin.prune(store, link="link-0")
    assert (report.kept, report.removed, report.damaged) == (2 * SAMPLES, 2 * SAMPLES, 0)
    assert [line.link for line in admin.info(store)] == ["link-1", "link-1"]
    environment = LmdbEnvironment(store / "rank-0")
    assert environment.link("link-0", {"quite": "other settings"}).inventory() == []
    environment.close()
    with pytest.raises(StoreError, match=r"link-7.*link-1"):
        admin.prune(store, link="link-7")


def test_links_of_other_cuts_are_forgotten(tmp_path: Path) -> None:
    stored = {f"link-{n}": {"cut": 2 * n + 2, "replica": "0 of 1"} for n in range(3)}
    with closing(open_environment("lmdb", tmp_path, 1)) as environment:
        for link, settings in stored.items():
            environment.link(link, settings).put(3, 1, torch.ones(2, 4))
        environment.commit()
    assert admin.forget_other_cuts(tmp_path, 0, [0, 3, 8]) == [], "it has none"
    assert admin.forget_other_cuts(tmp_path, 1, [0, 2, 5, 8], "0 of 1") == ["link-1", "link-2"]
    with closing(open_environment("lmdb", tmp_path, 1)) as environment:
        links = (("link-0", stored["link-0"]), ("link-1", {"cut": 5, "replica": "0 of 1"}))
        held = [len(environment.link(*link).inventory()) for link in links]
    assert held == [1, 0]
    assert admin.forget_other_cuts(tmp_path, 1, [0, 2, 5, 8], "0 of 2") == ["link-0", "link-1"], "another replica's"
    with closing(open_environment("lmdb", tmp_path, 1)) as environment:
        assert environment.link("link-0", {"cut": 3}).inventory() == []
    file = tmp_path / "rank-1" / "data.mdb"
    file.write_bytes(bytes(file.stat().st_size))
    assert admin.forget_other_cuts(tmp_path, 1, [0, 1, 8]) == [], "one that cannot be read is for the run"


def test_prune_by_id_and_by_number(store):
    assert admin.prune(store, ids_below=9).removed == 4 * (SAMPLES - 9)
    kept = {link: dict.fromkeys(range(9), 4) for link in LINKS}
    assert contents(store, 0) == kept
    admin.prune(store, max_samples=4)
    best = sorted(range(9), key=sample_hash)[:4]
    assert contents(store, 2) == {link: dict.fromkeys(sorted(best), 4) for link in LINKS}
    admin.prune(store, max_samples=0)
    assert contents(store, 0) == {}
    with pytest.raises(ConfigError, match="ids_below"):
        admin.prune(store, ids_below=-1)
    with pytest.raises(ConfigError, match="everything"):
        admin.prune(store, everything=True, max_samples=3)


def test_a_samples_gradient_is_counted_with_it_and_goes_with_it(tmp_path):
    with closing(open_environment("lmdb", tmp_path / "messages", 0, bits=32)) as environment:
        one = environment.link("link-0", SETTINGS)
        for sample in range(6):
            one.put(sample, 1, value(0, "link-0", sample, 1))
            one.put(entry_id(sample, gradient=True), 1, value(0, "link-0", sample, 2))
        environment.commit()
    for options, left in (({"ids_below": 5}, 5), ({"max_samples": 2}, 2)):
        admin.prune(tmp_path / "messages", **options)
        assert [line.samples for line in admin.info(tmp_path / "messages")] == [left]
        with closing(LmdbEnvironment(tmp_path / "messages" / "rank-0")) as environment:
            held = [line.sample for line in environment.link("link-0", SETTINGS).inventory()]
        assert held == sorted(held)
        assert {i for i in held if i & GRADIENT} == {i | GRADIENT for i in held if not i & GRADIENT}
        assert len(held) == 2 * left


def test_prune_of_everything_leaves_an_empty_store(store):
    report = admin.prune(store, everything=True)
    assert (report.bytes_before > 0, report.bytes_after) == (True, 0)
    with pytest.raises(StoreError, match="no message store"):
        admin.info(store)
    assert contents(store, 0) == {}


@contextmanager
def held_by_another(folder, *, shared: bool):
    """The id of a forked process that holds the folder until the end of the block."""
    go_read, go_write = os.pipe()
    ready_read, ready_write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        os.close(go_write)
        RankFolder(folder, shared=shared)
        os.write(ready_write, b"1")
        os.read(go_read, 1)
        os._exit(0)
    try:
        os.close(ready_write)
        assert os.read(ready_read, 1) == b"1"
        yield child
    finally:
        os.close(go_write)
        os.waitpid(child, 0)
        os.close(go_read)
        os.close(ready_read)


def test_a_store_in_use_is_refused(store):
    with held_by_another(store / "rank-2", shared=False) as pid:
        for call in (admin.info, admin.verify, admin.prune, lambda p: admin.prune(p, everything=True)):
            with pytest.raises(StoreError, match=f"rank-2: in use by process {pid} on "):
                call(store)
        assert admin.info(store / "rank-0")
    assert contents(store, 2) == WHOLE


def test_two_may_look_at_once(store):
    with held_by_another(store / "rank-0", shared=True):
        assert len(admin.info(store / "rank-0")) == 2
        with pytest.raises(StoreError, match="in use by"):
            admin.prune(store / "rank-0")
        with pytest.raises(StoreError, match="in use by"):
            LmdbEnvironment(store / "rank-0")
    assert contents(store, 0) == WHOLE


def test_a_read_only_store_can_be_looked_at(store):
    folder = store / "rank-0"
    for path in folder.iterdir():
        path.chmod(0o444)
    folder.chmod(0o555)
    try:
        assert len(admin.info(folder)) == 2
        assert admin.verify(folder).damaged == []
    finally:
        folder.chmod(0o755)


def test_where_there_is_no_store(tmp_path):
    os.makedirs(tmp_path / "empty" / "rank-0")
    for path in (tmp_path / "missing", tmp_path / "empty", tmp_path / "empty" / "rank-0"):
        for call in (admin.info, admin.verify, admin.prune):
            with pytest.raises(StoreError, match="no message store"):
                call(path)
    assert not (tmp_path / "missing").exists()


def test_one_ranks_store_is_forgotten(tmp_path):
    for rank in (0, 1):
        with closing(open_environment("lmdb", tmp_path, rank)) as environment:
            environment.link("link-0", {"of": "the last run"}).put(3, 1, torch.ones(2, 4))
            environment.commit()
    admin.forget(tmp_path, 1)
    admin.forget(tmp_path, 2)  # has none
    held = []
    for rank, described in ((0, {"of": "the last run"}), (1, {"of": "this run"})):
        with closing(open_environment("lmdb", tmp_path, rank)) as environment:
            held.append(len(environment.link("link-0", described).inventory()))
    assert held == [1, 0]


def test_a_store_of_somebody_else_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(StoreError, match=r"cannot read: .*Permission denied"):
        admin.info(tmp_path / "messages")
