"""Damaged stores: values are dropped, files are set aside, and a run that resumes sends first visits again."""

from __future__ import annotations

import errno
import faulthandler
import os
import random
import re
import resource
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from pipecomp.buffers import lmdb_folder, lmdb_store, open_environment
from pipecomp.buffers.admin import prune, verify
from pipecomp.buffers.lmdb_file import ValueFile
from pipecomp.buffers.lmdb_folder import DAMAGED_FILE, DATA_FILE, UNSYNCED_FILE, copy_file
from pipecomp.errors import StoreError
from tests.children import child_of

SAMPLES = 40


@pytest.fixture
def store(tmp_path: Path) -> Path:
    environment = open_environment("lmdb", tmp_path, 0)
    environment.bind("of-a-run", disposable=False)
    link = environment.link("link-0", {"a": 1})
    draw = torch.Generator().manual_seed(0)
    for sample in range(SAMPLES):
        link.put(sample, 1, torch.randn(64, 16, generator=draw))
    environment.commit()
    environment.close()
    return tmp_path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Recorded reads of files: "pages" for a walk over all of them, and the sample of each value."""
    read: list[object] = []
    walk, join = lmdb_store.page_problems, ValueFile._join

    def counted_walk(path: Path) -> list[str]:
        read.append("pages")
        return walk(path)

    def counted_join(self: ValueFile, cursor: Any, table: Any, slot: int, sample: int, size: int | None) -> bytearray:
        read.append(sample)
        return join(self, cursor, table, slot, sample, size)

    monkeypatch.setattr(lmdb_store, "page_problems", counted_walk)
    monkeypatch.setattr(ValueFile, "_join", counted_join)
    return read


def leave_unsynced(store: Path) -> None:
    """Leave the store as a power failure does."""
    (store / "rank-0" / UNSYNCED_FILE).touch()


def damage_value(store: Path) -> None:
    """Change one byte in the middle of a value, which no page's structure shows."""
    file = store / "rank-0" / DATA_FILE
    content = bytearray(file.read_bytes())
    for place in range(len(content) * 2 // 3, len(content) - 8, 4096):
        content[place] ^= 1
        file.write_bytes(content)
        found = verify(store)
        if found.damaged and all(damaged.sample is not None for damaged in found.damaged):
            return
        content[place] ^= 1
    raise AssertionError("no byte of a value was found")


def damage_text(store: Path, pattern: bytes, place: int, bit: int = 2) -> None:
    """Change a bit of every copy of a text, LMDB's older pages included."""
    file = store / "rank-0" / DATA_FILE
    content = bytearray(file.read_bytes())
    found = [match.start() for match in re.finditer(pattern, content)]
    assert found
    for start in found:
        content[start + place] ^= bit
    file.write_bytes(content)


def saved_copy(store: Path) -> Path:
    """A copy as a checkpoint has it, of the file as it is."""
    copy_file(store / "rank-0" / DATA_FILE, store / "checkpoint" / DATA_FILE)
    return store / "checkpoint"


def opened(store: Path) -> tuple[int, list[str]]:
    """Samples that a run finds in the store, and its warnings."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        with closing(open_environment("lmdb", store, 0)) as environment:
            link = environment.link("link-0", {"a": 1})
            ids = [row.sample for row in link.inventory()]
            assert all(cached is not None for cached in link.get(ids))
    return len(ids), [str(one.message) for one in given]


def assert_set_aside(store: Path, samples: int = 0) -> None:
    """One warning, which names the file, and a new store of so many samples."""
    file = store / "rank-0" / DATA_FILE
    damaged = file.read_bytes()
    held, (warning,) = opened(store)
    assert held == samples
    assert str(store / "rank-0" / DAMAGED_FILE) in warning
    assert (store / "rank-0" / DAMAGED_FILE).read_bytes() == damaged
    assert verify(store).damaged == []
    assert opened(store) == (samples, [])


def test_a_whole_one_stays_as_it_is(store: Path) -> None:
    leave_unsynced(store)
    assert opened(store) == (SAMPLES, [])
    assert not (store / "rank-0" / DAMAGED_FILE).exists()


def test_after_an_orderly_close_no_value_is_read(store: Path, reads: list[object]) -> None:
    mark = store / "rank-0" / UNSYNCED_FILE
    for _ in range(2):
        assert not mark.exists()
        with closing(open_environment("lmdb", store, 0)) as environment:
            assert len(environment.link("link-0", {"a": 1}).inventory()) == SAMPLES
            assert mark.exists()
    assert reads == []
    with pytest.raises(StoreError, match="other settings"), closing(open_environment("lmdb", store, 0)) as environment:
        environment.link("link-0", {"a": 2})
    assert not mark.exists()


def test_after_a_crash_everything_is_checked_once(store: Path, reads: list[object]) -> None:
    def crash() -> str:
        environment = open_environment("lmdb", store, 0)
        link = environment.link("link-0", {"a": 1})
        link.put_many([(SAMPLES, 1, torch.ones(2, 16))])
        environment.commit()
        environment.flush()
        os._exit(3)

    assert child_of(crash) == ("", 3)
    for expected in (["pages", *range(SAMPLES + 1)], []):
        with closing(open_environment("lmdb", store, 0)) as environment:
            assert len(environment.link("link-0", {"a": 1}).inventory()) == SAMPLES + 1
        assert reads == expected
        reads.clear()


@pytest.mark.parametrize("step_ends", [True, False], ids=["sender", "receiver"])
def test_a_value_damaged_at_rest_is_found_when_read(store: Path, reads: list[object], step_ends: bool) -> None:
    """A sender drops it and goes on; a receiver stops within the step. Either way the next start checks everything."""
    damage_value(store)
    reads.clear()
    with closing(open_environment("lmdb", store, 0)) as environment:
        link = environment.link("link-0", {"a": 1})
        assert len(link.inventory()) == SAMPLES
        assert reads == []
        with pytest.warns(UserWarning, match=r"CRC-32.*first visits"):
            assert [cached is None for cached in link.get(range(SAMPLES))].count(True) == 1
        if step_ends:
            environment.commit()
    reads.clear()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        with closing(open_environment("lmdb", store, 0)) as environment:
            assert len(environment.link("link-0", {"a": 1}).inventory()) == SAMPLES - 1
    assert len(given) == (0 if step_ends else 1)
    assert reads[0] == "pages"
    assert len(reads) == (SAMPLES if step_ends else SAMPLES + 1)
    assert verify(store).damaged == []
    assert opened(store) == (SAMPLES - 1, [])


def test_a_header_damaged_at_rest_takes_no_other_value_along(store: Path) -> None:
    """Its number of tokens, of which the number of its pieces follows."""
    damage_text(store, rb"PCMV\x01\0\x20\0\x07\0{7}\x01\0{7}\x40\0{3}", 24, 0x60)  # sample 7: 32 tokens, not 64
    with closing(open_environment("lmdb", store, 0)) as environment:
        link = environment.link("link-0", {"a": 1})
        with pytest.warns(UserWarning, match="sample 7.*first visits"):
            assert link.get([7]) == [None]
        environment.commit()
    assert verify(store).damaged == []
    assert opened(store) == (SAMPLES - 1, [])


@pytest.mark.parametrize("pattern", [b"\xff", b"\0"])
def test_pages_damaged_at_rest_stop_one_start_at_most(store: Path, pattern: bytes) -> None:
    """LMDB may crash on them: the mark of the store that it left open makes the next start look at the pages."""
    file = store / "rank-0" / DATA_FILE
    content = file.read_bytes()
    file.write_bytes(content[: 2 * 4096] + pattern * (len(content) - 2 * 4096))

    def start() -> str:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        return str(opened(store)[0])

    text, status = child_of(start)
    assert (text, status) == ("0", 0) or status != 0
    assert opened(store)[0] == 0
    assert (store / "rank-0" / DAMAGED_FILE).exists()
    assert opened(store) == (0, [])


def test_a_close_without_a_sync_leaves_the_mark(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = open_environment("lmdb", store, 0)

    def refuse() -> None:
        raise StoreError("cannot sync")

    monkeypatch.setattr(environment.file, "sync", refuse)
    with pytest.raises(StoreError, match="cannot sync"):
        environment.close()
    assert (store / "rank-0" / UNSYNCED_FILE).exists()
    assert prune(store).kept == SAMPLES
    assert not (store / "rank-0" / UNSYNCED_FILE).exists()


def test_single_values_go(store: Path) -> None:
    damage_value(store)
    leave_unsynced(store)
    held, (warning,) = opened(store)
    assert held == SAMPLES - 1
    assert "CRC-32" in warning
    assert "first visits" in warning
    assert verify(store).damaged == []
    assert opened(store) == (SAMPLES - 1, [])


@pytest.mark.parametrize("damage", ["value", "settings", "key"])
def test_a_copy_of_a_damaged_store_takes_no_place(store: Path, damage: str) -> None:
    """A checkpoint that was written after the damage has it too: what is whole of the store is better than that."""
    if damage == "value":
        damage_value(store)
    elif damage == "settings":
        damage_text(store, rb'\{"a": 1', 2)
    else:
        damage_text(store, rb"\0{7}\x05\0\0\0{7}\x05", 8, 0x10)  # of the first piece of a value's, slot 5
    saved = saved_copy(store)
    leave_unsynced(store)
    left, warned = opened(store)
    assert left == {"value": SAMPLES - 1, "settings": 0, "key": 0}[damage]
    assert len(warned) == 1
    environment = open_environment("lmdb", store, 0)
    with closing(environment):
        link = environment.link("link-0", {"a": 1})
        with pytest.warns(UserWarning, match="is damaged and is not used: "):
            assert not environment.restore(saved)
        assert link.stats()["samples"] == left


@pytest.mark.parametrize("seed", range(3))
def test_a_file_with_damaged_pages_is_set_aside(store: Path, seed: int) -> None:
    """Bits all over the file."""
    file = store / "rank-0" / DATA_FILE
    draw, content = random.Random(seed), bytearray(file.read_bytes())
    while not any(damaged.sample is None for damaged in verify(store).damaged):
        content[draw.randrange(2 * 4096, len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(content)
    with pytest.raises(StoreError, match="--everything"):
        prune(store)
    leave_unsynced(store)
    assert_set_aside(store)
    assert prune(store, everything=True).bytes_after == 0
    assert not (store / "rank-0" / DAMAGED_FILE).exists()


@pytest.mark.parametrize(
    ("pattern", "place", "bit"),
    [
        (rb'\{"a": 1', 2, 2),  # a setting's name
        (rb'\{"a": 1', 6, 2),  # its value
        (b"link:link-0", 8, 2),  # whose settings they are
        (b"crc:link:link-0", 15, 2),  # their CRC-32, behind its key
        (b"of-a-run", 3, 2),
        (b"format1", 6, 2),
        (rb"(?<!:)link-0", 1, 2),  # the name of a link
        (rb"(?<!:)link-0", 1, 0x80),  # which is none at all then
    ],
)
def test_a_file_with_damaged_metadata_is_set_aside(store: Path, pattern: bytes, place: int, bit: int) -> None:
    """A setting or a run with a flipped bit looks like another one: such a store could not be opened any more."""
    damage_text(store, pattern, place, bit)
    assert any(damaged.sample is None for damaged in verify(store).damaged)
    assert_set_aside(store)


def test_a_store_whose_metadata_have_lost_their_name_is_refused(store: Path) -> None:
    """Else it would have neither run nor settings, and take any; it may be another program's."""
    damage_text(store, rb"meta", 1)
    with pytest.raises(StoreError, match="not a message store"):
        open_environment("lmdb", store, 0)
    assert not (store / "rank-0" / DAMAGED_FILE).exists()


@pytest.mark.parametrize("content", [b"no database" * 999, None])
def test_what_is_no_database_any_more_is_set_aside(store: Path, content: bytes | None) -> None:
    file = store / "rank-0" / DATA_FILE
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 3] if content is None else content)
    assert_set_aside(store)


def test_an_empty_file_is_a_new_store(store: Path) -> None:
    (store / "rank-0" / DATA_FILE).write_bytes(b"")
    assert opened(store) == (0, [])


def test_a_disk_that_is_full_is_the_reason_that_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that its blocks could not be shared before; checkpoints tell the first error of a chain."""

    def refuse(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "old").write_bytes(b"m")
    monkeypatch.setattr(lmdb_folder.fcntl, "ioctl", lambda *given: (_ for _ in ()).throw(OSError(errno.EXDEV, "no")))
    monkeypatch.setattr(lmdb_folder.shutil, "copyfileobj", refuse)
    with pytest.raises(StoreError) as told:
        copy_file(tmp_path / "old", tmp_path / "copy" / "new")
    error: BaseException | None = told.value
    while error is not None:
        assert getattr(error, "errno", errno.ENOSPC) == errno.ENOSPC
        error = error.__context__
