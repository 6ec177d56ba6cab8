"""A damaged store that a run goes on with: from a copy, with what is whole, or empty."""

from __future__ import annotations

import errno
import random
import re
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch

from pipecomp.buffers import lmdb_folder, open_environment, salvage
from pipecomp.buffers.admin import info, prune, verify
from pipecomp.buffers.lmdb_folder import DATA_FILE, copy_file
from pipecomp.buffers.mending import mend
from pipecomp.errors import StoreError

SAMPLES = 40


@pytest.fixture
def store(tmp_path: Path) -> Path:
    environment = open_environment("lmdb", tmp_path, 0)
    environment.bind("of-a-run")
    link = environment.link("link-0", {"a": 1})
    draw = torch.Generator().manual_seed(0)
    for sample in range(SAMPLES):
        link.put(sample, 1, torch.randn(64, 16, generator=draw))
    environment.commit()
    environment.close()
    return tmp_path


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


def held(store: Path) -> int:
    environment = open_environment("lmdb", store, 0)
    count = environment.link("link-0", {"a": 1}).stats()["samples"]
    environment.close()
    return int(count)


def test_a_whole_one_stays_as_it_is(store: Path) -> None:
    saved = saved_copy(store)
    assert mend(store, 0, copy=saved) is None
    assert mend(store, 1, copy=saved) is None, "there is none of that rank"
    assert held(store) == SAMPLES


def test_single_values_go(store: Path) -> None:
    damage_value(store)
    words = mend(store, 0, copy=store / "none")
    assert words is not None
    assert words.startswith(f"the message store {store / 'rank-0'} was damaged (")
    assert words.endswith(f": {SAMPLES - 1} values are kept")
    assert held(store) == SAMPLES - 1
    assert not verify(store).damaged


def test_with_a_copy_all_of_it_goes(store: Path) -> None:
    saved = saved_copy(store)
    damage_value(store)
    assert str(mend(store, 0, copy=saved)).endswith("the checkpoint's copy takes its place")
    assert not (store / "rank-0" / DATA_FILE).exists()


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
    left = {"value": SAMPLES - 1, "settings": 0, "key": SAMPLES - 1}[damage]
    words = mend(store, 0, copy=saved)
    assert words is not None
    assert words.endswith(f"{left} values are kept")
    environment = open_environment("lmdb", store, 0)
    with closing(environment):
        link = environment.link("link-0", {"a": 1})
        with pytest.warns(UserWarning, match="is damaged and is not used: "):
            assert not environment.restore(saved)
        assert link.stats()["samples"] == left


@pytest.mark.parametrize("seed", range(3))
def test_of_damaged_pages_what_is_whole_is_kept(store: Path, seed: int) -> None:
    """Bits all over the file: whatever LMDB makes of it, in a process of its own, nothing damaged is kept."""
    file = store / "rank-0" / DATA_FILE
    draw, content = random.Random(seed), bytearray(file.read_bytes())
    while not any(damaged.sample is None for damaged in verify(store).damaged):
        content[draw.randrange(2 * 4096, len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(content)
    words = mend(store, 0, copy=store / "none")
    assert words is not None
    assert words.endswith(("values are kept", "it starts empty"))
    assert not verify(store).damaged if file.exists() else held(store) == 0
    assert held(store) < SAMPLES


def test_a_page_of_headers_costs_its_own_values_alone(store: Path) -> None:
    file = store / "rank-0" / DATA_FILE
    content = bytearray(file.read_bytes())
    for page in range(2, len(content) // 4096):
        start = 4096 * page
        content[start] ^= 1  # the number that each page begins with
        file.write_bytes(content)
        if any(damaged.sample is None for damaged in verify(store).damaged):
            break
        content[start] ^= 1
    found = prune(store)
    assert found.kept > 0
    assert not verify(store).damaged
    assert held(store) == found.kept


def test_values_are_saved_batch_by_batch(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(salvage, "_BATCH", 7)
    (store / "rank-1").mkdir()
    salvage._copy(store / "rank-0", store / "rank-1")
    assert not verify(store).damaged
    assert [line.samples for line in info(store)] == [SAMPLES, SAMPLES]


def test_values_behind_many_empty_slots_are_kept(store: Path) -> None:
    """Most samples were forgotten: the others are in slots with higher numbers than the file has pieces."""
    environment = open_environment("lmdb", store, 0)
    with closing(environment):
        environment.link("link-0", {"a": 1}).drop(range(30))
        environment.commit()
    file = store / "rank-0" / DATA_FILE
    size = file.stat().st_size
    found, before = [], file.read_bytes()
    for page in range(2, size // 4096):
        content = bytearray(before)
        content[4096 * page] ^= 1  # the number that each page begins with
        file.write_bytes(content)
        if any(damaged.sample is None for damaged in verify(store).damaged):
            with suppress(StoreError):
                found.append(prune(store))
    assert max(report.kept for report in found) == SAMPLES - 30
    assert {report.bytes_before for report in found} == {size}


@pytest.mark.parametrize(
    ("pattern", "place"),
    [
        (rb'\{"a": 1', 2),  # a setting's name
        (rb'\{"a": 1', 6),  # its value
        (b"link:link-0", 8),  # whose settings they are
        (b"crc:link:link-0", 15),  # their CRC-32, behind its key
        (b"of-a-run", 3),
        (b"format1", 6),
    ],
)
def test_values_go_where_what_vouches_for_them_is_damaged(store: Path, pattern: bytes, place: int) -> None:
    """A setting or a run with a flipped bit looks like another one: such a store could not be opened any more."""
    damage_text(store, pattern, place)
    assert any(damaged.sample is None for damaged in verify(store).damaged)
    words = mend(store, 0, copy=store / "none")
    assert words is not None
    assert words.endswith(("values are kept", "it starts empty"))
    assert held(store) == 0
    assert not verify(store).damaged


def test_a_damaged_remark_is_an_error_that_says_what_to_do(store: Path) -> None:
    damage_text(store, rb'\{"a": 1', 2)
    environment = open_environment("lmdb", store, 0)
    said = rf"link:link-0\) is damaged; `pipecomp store prune {store}/rank-0`"
    with closing(environment), pytest.raises(StoreError, match=said):
        environment.link("link-0", {"a": 1})
    assert prune(store).removed == SAMPLES


@pytest.mark.parametrize("bit", [2, 0x80])
def test_a_link_whose_name_is_damaged_is_given_up(store: Path, bit: int) -> None:
    """Its values are there, but of no link that anybody knows; with 0x80 of one that cannot even be a name."""
    damage_text(store, rb"(?<!:)link-0", 1, bit)
    assert verify(store).damaged
    assert mend(store, 0, copy=store / "none") is not None
    assert held(store) == 0
    assert not verify(store).damaged


def test_a_store_whose_remarks_have_lost_their_name_is_refused(store: Path) -> None:
    """Else it would have neither run nor settings, and take any."""
    damage_text(store, rb"meta", 1)
    with pytest.raises(StoreError, match="Damaged, or not a message store"):
        open_environment("lmdb", store, 0)
    assert mend(store, 0, copy=store / "none") is not None
    assert held(store) == 0


@pytest.mark.parametrize("content", [b"", b"no database" * 999, None])
def test_what_is_no_database_any_more_starts_empty(store: Path, content: bytes | None) -> None:
    file = store / "rank-0" / DATA_FILE
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 3] if content is None else content)
    words = mend(store, 0, copy=store / "none")
    assert words is not None
    assert words.endswith(": it starts empty")
    assert held(store) == 0


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
