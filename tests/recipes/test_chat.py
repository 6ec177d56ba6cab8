"""Data of `pipecomp train` and chat recipes: which become blocks, which are packed or padded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipecomp.data import BlockSamples, DataOptions, PackingCollator
from pipecomp.data.loading import LINES
from pipecomp.errors import ConfigError
from pipecomp.recipes.chat import ChatData, pad_samples
from tests.data import tokenizers_for_tests

TEXT = "the cat sat on a mat\nand saw what it was\n"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizers_for_tests.split(TEXT * 50)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    (tmp_path / "a.txt").write_text(TEXT * 9)
    (tmp_path / "b.txt").write_text(TEXT * 2)
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": TEXT * n}) + "\n" for n in (1, 2, 4)))
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "the cat", "completion": "sat on a mat"}) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("names", "options", "more", "in_blocks"),
    [
        (["a.txt"], {}, {}, True),
        (["a.txt"], {}, {"packing": False}, True),
        (["a.txt"], {}, {"packing": True}, False),
        (["a.txt"], {"documents": LINES}, {}, False),
        (["a.txt", "b.txt"], {}, {}, False),
        (["a.txt", "b.txt"], {}, {"joined": True}, True),
        (["c.jsonl"], {}, {}, False),
        (["c.jsonl"], {}, {"joined": True}, True),
        (["d.jsonl"], {}, {}, False),
    ],
)
def test_one_plain_text_becomes_blocks_and_documents_stay_whole(
    files: Path, tokenizer: Any, names: list[str], options: dict[str, Any], more: dict[str, Any], in_blocks: bool
) -> None:
    loaded = ChatData.load([files / name for name in names], DataOptions(**options), tokenizer, 16, 999, **more)
    made = loaded.samples()
    assert isinstance(made.training, BlockSamples) == in_blocks
    assert max(made.training.lengths) <= 16
    if in_blocks:
        assert set(made.training.lengths) == {16}
        assert made.padding is None
        return
    assert isinstance(made.collate, PackingCollator)
    assert (made.padding is None) == (more.get("packing") is True), "what was asked for is not replaced"
    row = made.collate([made.training[i] for i in range(len(made.training))])
    assert row["input_ids"].shape[1] <= 16
    assert int((row["position_ids"] == 0).sum()) >= len(made.training)


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("d.jsonl", {"joined": True}, "--documents: got 'joined', allowed: files. .*d.jsonl has the format prompt and"),
        ("c.jsonl", {"joined": True, "packing": True}, "--packing: got True, allowed: only without --documents joined"),
    ],
)
def test_samples_that_cannot_be_joined(files: Path, tokenizer: Any, name: str, more: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ChatData.load([files / name], DataOptions(), tokenizer, 16, 999, **more)


def test_padding_is_neither_seen_nor_learned() -> None:
    samples = [{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in ([5, 6, 7], [8])]
    batch = {key: value.tolist() for key, value in pad_samples(samples, pad=9).items()}
    assert batch == {
        "input_ids": [[5, 6, 7], [8, 9, 9]],
        "labels": [[5, 6, 7], [8, -100, -100]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
    }
