"""Pipelines train what the unsplit model would become: some rows of docs/trust.md, and what would be noticed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts import trust
from tests.models import MODELS
from tests.trust.conditions import FACTORS, KNOWN, Row, all_rows, allowed
from tests.trust.covering import pairs_of, pairwise
from tests.trust.training import LIMIT, compare

ROOT = Path(__file__).parents[2]


def row(model: str, stages: int, replicas: int, padding: str, optimizer: str, *words: str) -> Row:
    """words: clipped, tied, recomputed, decay, zero, and "several" micro-batches."""
    return Row(
        model=model,
        stages=stages,
        replicas=replicas,
        padding=padding,
        optimizer=optimizer,
        micro_batches=3 if "several" in words else 1,
        zero=int("zero" in words),
        **{name: name in words for name in ("clipped", "tied", "recomputed", "decay")},
    )


SOME = (
    row("gpt2", 2, 1, "right", "SGD", "tied", "clipped", "several", "decay"),
    row("bert-masked", 2, 1, "none", "AdamW", "tied", "zero"),
    row("llama-classes", 1, 2, "left", "AdamW", "several", "zero", "clipped", "decay"),
    row("roberta-classes", 2, 1, "right", "SGD", "several", "recomputed"),
    row("qwen3", 1, 2, "none", "SGD", "several", "tied"),
    row("qwen2", 2, 2, "left", "AdamW", "several", "tied", "clipped", "zero"),
    row("deberta-v2", 4, 1, "right", "SGD", "several", "clipped", "recomputed"),
    row("mistral", 2, 2, "none", "SGD", "recomputed", "decay"),
)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", sorted({r.ranks for r in SOME}))
def test_pipelines_train_as_the_unsplit_model(ranks: int) -> None:
    for found in compare([r for r in SOME if r.ranks == ranks]):
        assert found.holds, found
        assert found.moved > 300 * LIMIT, found  # not because nothing was trained


# -- what would be noticed


def a_thousandth_too_much(engine: Any) -> None:
    for p in engine.stage.parameters():
        p.register_hook(lambda g: 1.001 * g)


def scaled_once_more_by_each_stage(engine: Any) -> None:
    for p in engine.stage.parameters():
        p.register_hook(lambda g: g / engine.num_stages)


def tied_weights_apart(engine: Any) -> None:
    engine.gradients.sum_tied = lambda: None


@pytest.mark.ranks
@pytest.mark.parametrize(
    "faulty", [a_thousandth_too_much, scaled_once_more_by_each_stage, tied_weights_apart], ids=lambda f: f.__name__
)
def test_wrong_gradients_are_noticed(faulty: Callable) -> None:
    (found,) = compare([row("gpt2", 2, 1, "none", "SGD", "tied")], faulty=faulty)
    assert not found.error
    assert not found.holds
    assert found.difference > 10 * LIMIT


# -- rows and page


def test_every_pair_of_values_occurs_that_goes_together() -> None:
    rows = pairwise(FACTORS, allowed)
    found = set().union(*(pairs_of(values) for values in rows))
    for a in FACTORS:
        for b in FACTORS:
            for x in FACTORS[a]:
                for y in FACTORS[b]:
                    if a < b and allowed({a: x, b: y}):
                        assert ((a, x), (b, y)) in found, (a, x, b, y)
    assert all(map(allowed, rows))
    assert rows == pairwise(FACTORS, allowed)
    assert len(rows) < 1.1 * len(FACTORS["model"]) * len(FACTORS["stages"])


def test_small_arrays() -> None:
    assert pairwise({"a": (1, 2), "b": (1, 2), "c": (1, 2)}, lambda row: True) == [
        {"a": 1, "b": 1, "c": 1},
        {"a": 1, "b": 2, "c": 2},
        {"a": 2, "b": 1, "c": 2},
        {"a": 2, "b": 2, "c": 1},
    ]
    unlike = pairwise({"a": (1, 2), "b": (1, 2)}, lambda row: row.get("a") != row.get("b"))
    assert unlike == [{"a": 1, "b": 2}, {"a": 2, "b": 1}]


def test_every_architecture_and_head_has_rows() -> None:
    """Those that pipecomp registers; other tests register more."""
    spec = importlib.util.find_spec("pipecomp.stages.partition.architectures")
    assert spec is not None
    fresh = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    import sys

    kept = sys.modules[spec.name]
    try:
        sys.modules[spec.name] = fresh  # dataclasses look there
        spec.loader.exec_module(fresh)
    finally:
        sys.modules[spec.name] = kept
    heads = {head for architecture in fresh._REGISTRY.values() for head in architecture.heads}
    assert heads == {MODELS[r.model][0] for r in all_rows()}


def test_the_page_is_what_the_records_say() -> None:
    records = trust.recorded()
    versions, found = next(iter(records.items()))
    assert set(all_rows()) | set(KNOWN) == set(found), "make trust runs what is missing"
    assert trust.PAGE.read_text(encoding="utf-8") == trust.draw()
    assert all(result.holds != (r in KNOWN) for r, result in found.items())
    assert len(versions) == len(trust.PACKAGES)
