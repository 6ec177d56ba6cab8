"""The benchmark of one pass: its text, one small run of some lines, its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import one_pass
from benchmarks.wikitext import LENGTH
from pipecomp.demo.task import gpt2


def sequences(count: int, seed: int = 0) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(100, (count, LENGTH), generator=draw).tolist()


def test_versions_are_alike_and_hardly_ever_the_same() -> None:
    articles = sequences(one_pass.DOCUMENTS * one_pass.PARAGRAPHS)
    found = one_pass.versions(articles, 1000, seed=3)
    assert found == one_pass.versions(articles, 1000, seed=3) != one_pass.versions(articles, 1000, seed=4)
    assert [len(row) for row in found] == [LENGTH] * 1000
    original = {tuple(row) for row in articles}
    assert sum(tuple(row) in original for row in found) < 500
    shared = [sum(a == b for a, b in zip(row, other, strict=True)) for row in found[:5] for other in articles]
    assert max(shared) > LENGTH // 2


def test_bytes_between_those_of_direct_quantization() -> None:
    points = [(2.0, 1.0), (3.0, 0.5), (4.0, 0.4)]
    assert [one_pass.between(points, x) for x in (2.0, 2.5, 3.5, 4.0)] == pytest.approx([1.0, 0.75, 0.45, 0.4])
    assert one_pass.between(points, 1.9) is one_pass.between(points, 4.1) is None


def test_a_small_run_of_each_kind_and_the_page_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_pass, "CLUSTERS", (16,))
    names = ("FP32", "DirectQ fw2 bw4", "DirectQ fw3 bw6", "16 clusters fw2 bw4")
    articles = sequences(one_pass.DOCUMENTS * one_pass.PARAGRAPHS, seed=1)
    found = one_pass.versions(articles, 96, seed=0)
    rows: list[dict[str, Any]] = []
    for name in names:
        model = gpt2(100, LENGTH, layers=4, width=32, heads=2, seed=0)
        rows.append({"task": "versions", **one_pass.one_pass(model, name, 4, 0, found[:80], found[80:])})
    exact, direct, more, clusters = rows
    assert len({row["train_loss"] for row in rows}) == 4
    assert exact["forward_bytes_sent"] >= exact["forward_bytes_raw"]
    tokens = 3 * 80 * LENGTH
    assert clusters["forward_bytes_sent"] - direct["forward_bytes_sent"] == tokens * 4 // 8
    assert direct["forward_bytes_sent"] < clusters["forward_bytes_sent"] < more["forward_bytes_sent"]
    assert clusters["store_bytes"] > 0 == direct["store_bytes"]
    assert 0 < clusters["error"] < 1
    page = one_pass.results(rows)
    line = next(line for line in page if line.startswith("| 16 clusters fw2 bw4 |"))
    assert "%)" in line.split("|")[5]
    assert [line for line in page if line.startswith("## ")] == ["## versions, K = 4"]


def test_without_the_text_it_is_skipped_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one_pass.main(["--data", str(tmp_path), "--out", str(tmp_path / "out")])
    assert "has no train.txt and no valid.txt" in capsys.readouterr().out
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())
