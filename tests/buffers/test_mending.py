"""A damaged store that a run goes on with: from a copy, with what is whole, or empty."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from pipecomp.buffers import open_environment
from pipecomp.buffers.admin import prune, verify
from pipecomp.buffers.lmdb_folder import DATA_FILE
from pipecomp.buffers.mending import mend

SAMPLES = 40


@pytest.fixture
def store(tmp_path: Path) -> Path:
    environment = open_environment("lmdb", tmp_path, 0)
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


def held(store: Path) -> int:
    environment = open_environment("lmdb", store, 0)
    count = environment.link("link-0", {"a": 1}).stats()["samples"]
    environment.close()
    return int(count)


def test_a_whole_one_stays_as_it_is(store: Path) -> None:
    assert mend(store, 0, copy=True) is None
    assert mend(store, 1, copy=True) is None, "there is none of that rank"
    assert held(store) == SAMPLES


def test_single_values_go(store: Path) -> None:
    damage_value(store)
    words = mend(store, 0, copy=False)
    assert words is not None
    assert words.startswith(f"the message store {store / 'rank-0'} was damaged (")
    assert words.endswith(f": {SAMPLES - 1} samples are kept, others are sent in full precision once more")
    assert held(store) == SAMPLES - 1
    assert not verify(store).damaged


def test_with_a_copy_all_of_it_goes(store: Path) -> None:
    damage_value(store)
    assert str(mend(store, 0, copy=True)).endswith("the checkpoint's copy takes its place")
    assert not (store / "rank-0" / DATA_FILE).exists()


@pytest.mark.parametrize("seed", range(3))
def test_of_damaged_pages_what_is_whole_is_kept(store: Path, seed: int) -> None:
    """Bits all over the file: whatever LMDB makes of it, in a process of its own, nothing damaged is kept."""
    file = store / "rank-0" / DATA_FILE
    draw, content = random.Random(seed), bytearray(file.read_bytes())
    while not any(damaged.sample is None for damaged in verify(store).damaged):
        content[draw.randrange(2 * 4096, len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(content)
    words = mend(store, 0, copy=False)
    assert words is not None
    assert "in full precision once more" in words
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


@pytest.mark.parametrize("content", [b"", b"no database" * 999, None])
def test_what_is_no_database_any_more_starts_empty(store: Path, content: bytes | None) -> None:
    file = store / "rank-0" / DATA_FILE
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 3] if content is None else content)
    words = mend(store, 0, copy=False)
    assert words is not None
    assert words.endswith("it starts empty, and every sample is sent in full precision once more")
    assert held(store) == 0
