"""What is said at the start about dropout and few bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from pipecomp.config import Config
from pipecomp.plan.auto_bits import (
    MIN_BITS_OF_CLASSIFIERS,
    MIN_BITS_WITH_DROPOUT,
    dropout_advice,
    dropout_of,
    fewest_bits,
    warn_of_dropout,
)

AQSGD: dict[str, Any] = {"method": "aqsgd", "backward_bits": 8}


def made(store: dict[str, Any] | None = None, **activations: Any) -> Config:
    return Config.from_dict({"activations": activations, **({"store": store} if store else {})})


def test_the_largest_share_counts():
    assert dropout_of(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Sequential(nn.Dropout(0.3)))) == 0.3
    assert dropout_of(nn.Linear(2, 2)) == 0.0


def test_dropout_before_adapters_does_not_count():
    adapted = nn.ModuleDict({"lora_dropout": nn.ModuleDict({"default": nn.Dropout(0.3)}), "block": nn.Dropout(0.1)})
    assert dropout_of(adapted) == 0.1


FEW = {"error": 0.07, "min": 1, "max": MIN_BITS_WITH_DROPOUT - 1}


@pytest.mark.parametrize("bits", [MIN_BITS_WITH_DROPOUT - 1, (8, MIN_BITS_WITH_DROPOUT - 1), FEW, (8, FEW)])
def test_few_bits_with_dropout_are_spoken_of(bits, caplog):
    settings = made(**AQSGD, forward_bits=bits)
    text = dropout_advice(0.1, settings)
    assert "dropout 0.1" in text
    assert f"forward_bits {MIN_BITS_WITH_DROPOUT - 1} " in text
    assert "--dropout 0" in text
    warn_of_dropout(nn.Dropout(0.1), settings)
    assert caplog.messages == [text]


@pytest.mark.parametrize(
    ("dropout", "given"),
    [
        (0.0, {**AQSGD, "forward_bits": 1}),
        (0.1, {**AQSGD, "forward_bits": MIN_BITS_WITH_DROPOUT}),
        (0.1, {**AQSGD, "forward_bits": {"error": 0.07}}),
        (0.1, {"method": "none"}),
        (0.1, {"method": "direct", "forward_bits": 2}),
        (0.1, {**AQSGD, "forward_bits": 2, "store": {"clusters": 64}}),
    ],
)
def test_nothing_is_said_where_it_costs_little_or_is_not_the_changes(dropout, given, caplog):
    settings = made(**given)
    assert dropout_advice(dropout, settings) is None
    warn_of_dropout(nn.Dropout(dropout), settings)
    assert not caplog.messages


def test_auto_takes_more_bits_of_changes_with_dropout():
    auto = made(**AQSGD, forward_bits="auto")
    assert fewest_bits(nn.Dropout(0.1), auto) == fewest_bits(nn.Linear(2, 2), auto, 0.1) == MIN_BITS_WITH_DROPOUT
    assert fewest_bits(nn.Dropout(0.1), auto, 0.0) == 2
    assert fewest_bits(nn.Dropout(0.0), auto) == fewest_bits(nn.Linear(2, 2), auto) == 2
    assert fewest_bits(nn.Dropout(0.1), made(method="direct", forward_bits="auto")) == 2
    assert fewest_bits(nn.Dropout(0.1), made({"clusters": 64}, **AQSGD, forward_bits="auto")) == 2


@pytest.mark.parametrize(
    ("model_class", "fewest"),
    [("BertForSequenceClassification", MIN_BITS_OF_CLASSIFIERS), ("GPT2LMHeadModel", MIN_BITS_WITH_DROPOUT)],
)
def test_a_classifier_takes_more_bits_with_dropout(model_class, fewest, caplog):
    stage = nn.Dropout(0.1)
    stage.plan = SimpleNamespace(model_class=model_class)
    assert fewest_bits(stage, made(**AQSGD, forward_bits="auto")) == fewest
    warn_of_dropout(stage, made(**AQSGD, forward_bits=fewest))
    assert not caplog.messages
    warn_of_dropout(stage, made(**AQSGD, forward_bits=fewest - 1))
    assert f"Use {fewest} or more" in caplog.text
