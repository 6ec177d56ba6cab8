"""Gathering a model's shards: no name that another rank says is opened."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipecomp.engine import export
from pipecomp.engine.export import _ShardFile
from pipecomp.errors import PeerLostError, WireError
from pipecomp.utils.files import file_crc

NAMES = ["model-00001-of-00002.safetensors.part", "model-00002-of-00002.safetensors.part"]
CONTENT = [b"first", b"second"]


class Run:
    """One of two ranks, each of which has a stage; what the other says is set here."""

    def __init__(self, rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank, self.folder = rank, folder
        self.other: Any = _ShardFile(1 - rank, NAMES[1 - rank], len(CONTENT[1 - rank]), 0)
        self.wanted: Any = None
        self.sent: list[bytes] = []
        monkeypatch.setattr(
            export,
            "dist",
            SimpleNamespace(
                get_rank=lambda: rank,
                new_group=lambda backend, timeout: None,
                destroy_process_group=lambda group: None,
                send=lambda piece, to, group: self.sent.append(bytes(piece.numpy())),
                recv=lambda piece, source, group: piece.copy_(torch.tensor(list(CONTENT[1 - rank]))),
            ),
        )
        monkeypatch.setattr(export, "host_backend", lambda: "gloo")
        monkeypatch.setattr(export.CollectiveModelWrite, "raise_problems", lambda attempts, group=None: None)
        monkeypatch.setattr(export, "write_shard", self._write)
        monkeypatch.setattr(export, "write_index", lambda stage, folder: None)
        monkeypatch.setattr(export, "gathered", self._gathered)
        monkeypatch.setattr(export, "broadcast", lambda value, source, group: value if rank == 0 else self.wanted)

    def _write(self, stage: Any, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / NAMES[self.rank]).write_bytes(CONTENT[self.rank])
        return folder / NAMES[self.rank]

    def _gathered(self, mine: Any, group: Any) -> list[Any]:
        return [mine, self.other] if self.rank == 0 else [self.other, mine]

    def save(self) -> None:
        stage: Any = SimpleNamespace(index=self.rank, num_stages=2)
        export.save_pretrained(stage, self.folder, owners=[0, 1])


def test_a_shard_goes_to_the_first_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Run(0, tmp_path / "first", monkeypatch)
    first.save()
    assert (first.folder / NAMES[1]).read_bytes() == CONTENT[1]
    second = Run(1, tmp_path / "second", monkeypatch)
    second.wanted = [1]
    second.save()
    assert second.sent == [CONTENT[1]]


def test_a_lost_rank_is_noticed_before_the_others_make_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There they would wait for it until it counts as silent."""
    first = Run(0, tmp_path / "first", monkeypatch)

    def lost(attempts: object) -> None:
        raise PeerLostError("lost rank 1", 1)

    monkeypatch.setattr(export.CollectiveModelWrite, "raise_problems", lost)
    monkeypatch.setattr(export.dist, "new_group", lambda **given: pytest.fail("waits for rank 1"))
    with pytest.raises(PeerLostError):
        first.save()


@pytest.mark.parametrize("name", ["{outside}", "../outside", "..", NAMES[0], "model-00002-of-00003.safetensors.part"])
def test_another_rank_names_no_file_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    first = Run(0, tmp_path / "model", monkeypatch)
    first.other = _ShardFile(1, str(outside) if name == "{outside}" else name, len(CONTENT[1]), 0)
    with pytest.raises(WireError, match=r"rank 1 describes .*, allowed: the shard of stage 1, model-00002-of-00002"):
        first.save()
    assert outside.read_bytes() == b"mine"
    assert [path.name for path in first.folder.iterdir()] == [NAMES[0]]


@pytest.mark.parametrize(
    "said",
    [None, "text", _ShardFile(0, NAMES[0], 5, 0), _ShardFile(1, NAMES[1], -1, 0), _ShardFile(1, NAMES[1], True, 0)],
)
def test_a_rank_describes_its_own_shard_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    first = Run(0, tmp_path / "model", monkeypatch)
    first.other = said
    with pytest.raises(WireError, match="rank 1"):
        first.save()


def test_the_first_rank_names_no_file_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"a private key")
    crc = file_crc(secret)
    for wanted in (
        [_ShardFile(1, str(secret), 13, crc)],
        [_ShardFile(1, "../secret", 13, crc)],
        [str(secret)],
        [0],
        [2],
        1,
    ):
        second = Run(1, tmp_path / "model", monkeypatch)
        second.wanted = wanted
        with pytest.raises(WireError, match=r"rank 0 requests the shards of .*, allowed: stages from 1 to 1"):
            second.save()
        assert second.sent == []
