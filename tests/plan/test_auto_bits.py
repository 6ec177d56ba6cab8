"""Bits chosen when a run begins: the limit that dropout sets, and decisions from measurements."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipecomp.codecs.selection import LinkCodecs
from pipecomp.config import Config
from pipecomp.config.activations import ConstantError
from pipecomp.doctor.measure import LinkMeasurement
from pipecomp.errors import ConfigError
from pipecomp.plan import auto_bits
from pipecomp.plan.auto_bits import (
    MIN_BITS_OF_CLASSIFIERS,
    MIN_BITS_WITH_DROPOUT,
    BatchShape,
    RankMeasurement,
    decide_bits,
    dropout_advice,
    dropout_of,
    fewest_bits,
    needs_measuring,
    sample_length,
    settle_scales,
    warn_of_dropout,
)
from pipecomp.plan.simulation import TCP_SHARE, StageCosts
from pipecomp.stages import split
from tests.models import make_model
from tests.plan.test_measure import small

AQSGD: dict[str, Any] = {"method": "aqsgd", "backward_bits": 8}


def made(store: dict[str, Any] | None = None, **activations: Any) -> Config:
    return Config.from_dict({"activations": activations, **({"store": store} if store else {})})


def test_the_largest_share_counts():
    assert dropout_of(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Sequential(nn.Dropout(0.3)))) == 0.3
    assert dropout_of(nn.Linear(2, 2)) == 0.0


def test_dropout_before_adapters_does_not_count():
    adapted = nn.ModuleDict({"lora_dropout": nn.ModuleDict({"default": nn.Dropout(0.3)}), "block": nn.Dropout(0.1)})
    assert dropout_of(adapted) == 0.1


def test_numbers_of_modules_without_dropout_modules_count():
    attention = nn.Linear(2, 2)
    attention.attention_dropout, attention.dropout_calls = 0.2, 7
    assert dropout_of(nn.Sequential(attention, nn.Dropout(0.1))) == 0.2
    assert dropout_of(nn.Dropout2d(0.3)) == 0.3


@pytest.mark.parametrize(
    ("name", "number"),
    [("gpt2", "resid_pdrop"), ("bert-masked", "hidden_dropout_prob"), ("llama", "attention_dropout")],
)
@pytest.mark.parametrize("share", [0.0, 0.2])
def test_dropout_by_the_models_own_numbers(name, number, share):
    others = {"gpt2": ("attn_pdrop", "embd_pdrop"), "bert-masked": ("attention_probs_dropout_prob",)}.get(name, ())
    assert dropout_of(make_model(name, 1, **{number: share, **dict.fromkeys(others, 0.0)})) == share


def settled(monkeypatch, ranks, settings, tokens=64):
    """Activations, and the gains of links, where other ranks have these stages and dropout."""
    monkeypatch.setattr(auto_bits, "gathered", lambda own: [(k, share, own[2], own[3]) for k, share in ranks])
    return settle_scales(settings, nn.Linear(2, 2), 0, lambda: tokens).activations


@pytest.mark.parametrize(
    ("dropout", "gains"),
    [
        ((False, False, False), ["unbiased", "unbiased"]),
        ((True, False, False), ["least_error", "least_error"]),
        ((False, True, True), ["unbiased", "least_error"]),
        ((False, False, True), ["unbiased", "unbiased"]),
    ],
)
def test_a_links_gain_follows_dropout_before_it(monkeypatch, dropout, gains):
    ranks = [(k, share) for k, share in enumerate(dropout)] * 2  # of two replicas
    a = settled(monkeypatch, ranks, made(**AQSGD, scale="channels"))
    assert [a.gain_of("forward", link) for link in (0, 1)] == gains
    assert a.gain_of("backward", 1) == "unbiased"
    of_links = [LinkCodecs(a, link).forward.gain for link in (0, 1)]
    assert of_links == gains
    given = made(**AQSGD, scale="channels", gain={"forward": ["auto", "unbiased"], "backward": "least_error"})
    a = settled(monkeypatch, ranks, given)
    assert [a.gain_of("forward", link) for link in (0, 1)] == [gains[0], "unbiased"]
    assert a.gain_of("backward", 1) == "least_error"


def test_gains_of_another_number_of_links_are_refused():
    a = made(**AQSGD, scale="channels", gain={"forward": ["auto", "unbiased"]}).activations
    a.check_links(2)
    with pytest.raises(ConfigError, match=r"gain.forward.*3: one for each link"):
        a.check_links(3)


def test_no_rank_waits_for_others_where_nothing_is_automatic(monkeypatch):
    monkeypatch.delattr(auto_bits, "gathered")
    for settings in (made(**AQSGD), made(**AQSGD, scale={"backward": "channels"}), made(method="none")):
        assert settle_scales(settings, nn.Dropout(0.5), 0, lambda: 1 / 0) == settings


@pytest.mark.parametrize(
    ("section", "tokens", "kinds"),
    [
        (AQSGD, 64, ("channels", "channels")),
        (AQSGD, 63, ("cached_channels", "max")),
        ({**AQSGD, "backward_method": "delta"}, 63, ("cached_channels", "cached_channels")),
        ({**AQSGD, "backward_top_k": 0.2}, 512, ("channels", "max")),
        ({**AQSGD, "rounding": "stochastic"}, 512, ("max", "max")),
        ({"method": "direct", "forward_bits": 2, "backward_bits": 4}, 512, ("channels", "channels")),
        ({"method": "direct", "forward_bits": 2, "backward_bits": 4}, 8, ("rms", "max")),
    ],
)
def test_automatic_scales_by_the_tokens_of_a_packet(monkeypatch, section, tokens, kinds):
    a = settled(monkeypatch, [(0, False), (1, False)], made(**section, scale="auto"), tokens)
    assert (a.scale_of("forward"), a.scale_of("backward")) == kinds
    LinkCodecs(a, 0)
    one = made(**section, scale={"forward": "auto", "backward": "rms" if section.get("rounding") is None else "max"})
    a = settled(monkeypatch, [(0, False), (1, False)], one, tokens)
    assert (a.scale_of("forward"), a.scale_of("backward")) == (kinds[0], one.activations.scale_of("backward"))


def test_on_a_gpu_automatic_scales_do_not_make_the_choice_of_bits_wait():
    bits = {"error": 0.1}
    a = made(method="aqsgd", forward_bits=bits, backward_bits=4, first_visit=8, scale="auto").activations
    of = a.with_scales(512, gpu=True)
    assert (of.scale_of("forward"), of.scale_of("backward")) == ("max", "channels")


def test_links_refuse_scales_that_are_not_settled():
    with pytest.raises(ConfigError, match=r"scale: got 'auto'.*initialize"):
        LinkCodecs(made(**AQSGD, scale="auto").activations, 0)


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
    assert fewest_bits(nn.Dropout(0.1), made(**AQSGD, forward_bits="auto", scale="channels")) == 2
    unbiased = made(**AQSGD, forward_bits="auto", scale="channels", gain="unbiased")
    assert fewest_bits(nn.Dropout(0.1), unbiased) == MIN_BITS_WITH_DROPOUT
    assert fewest_bits(nn.Dropout(0.1), auto, 0.0) == 2
    assert fewest_bits(nn.Dropout(0.0), auto) == fewest_bits(nn.Linear(2, 2), auto) == 2
    assert fewest_bits(nn.Dropout(0.1), made(method="direct", forward_bits="auto")) == 2
    assert fewest_bits(nn.Dropout(0.1), made({"clusters": 64}, **AQSGD, forward_bits="auto")) == 2


@pytest.mark.parametrize(
    ("model_class", "scale", "fewest"),
    [
        ("BertForSequenceClassification", "max", MIN_BITS_OF_CLASSIFIERS),
        ("BertForSequenceClassification", "channels", MIN_BITS_OF_CLASSIFIERS - 1),
        ("GPT2LMHeadModel", "max", MIN_BITS_WITH_DROPOUT),
        ("GPT2LMHeadModel", "channels", MIN_BITS_WITH_DROPOUT - 1),
    ],
)
def test_a_classifier_takes_more_bits_with_dropout(model_class, scale, fewest, caplog):
    stage = nn.Dropout(0.1)
    stage.plan = SimpleNamespace(model_class=model_class)
    assert fewest_bits(stage, made(**AQSGD, forward_bits="auto", scale=scale)) == fewest
    warn_of_dropout(stage, made(**AQSGD, forward_bits=fewest, scale=scale))
    assert not caplog.messages
    warn_of_dropout(stage, made(**AQSGD, forward_bits=fewest - 1, scale=scale))
    assert f"Use {fewest} or more" in caplog.text


def test_lengths_of_samples():
    stage = split(small(), 1)[0]
    assert sample_length([{"input_ids": [1, 2, 3]}, {"input_ids": torch.zeros(5)}], stage) == 5
    assert sample_length(None, stage) == 16  # as long as the model's positions
    assert sample_length([], stage) == 16


def measured(out, back, trip=0.0):
    return LinkMeasurement(out, back, trip)


FORWARD, BACKWARD = ConstantError(error=0.025), ConstantError(error=0.05)  # where 8 bits are hidden
LEAST = (2, ConstantError(error=0.1, max=4))


class TestDecision:
    """20 ms of compute a micro-batch and stage, 64,000 values."""

    batch = BatchShape(samples=1, tokens=64, micro_batches=64)

    costs = StageCosts(forward_s=0.02 / 3, backward_s=0.04 / 3)

    def seen(self, out, back, *, fewest=2):
        return [RankMeasurement(0, self.costs, measured(out, back)), RankMeasurement(1, self.costs, None, fewest)]

    def unmeasured(self, stages=2):
        return [RankMeasurement(k, self.costs, None) for k in range(stages)]

    def decided(self, rows, **activations):
        section = {"method": "aqsgd", "forward_bits": "auto", "backward_bits": "auto", **activations}
        config = Config.from_dict({"activations": section})
        assert needs_measuring(config)
        return decide_bits(config, rows, self.batch, 1000, torch.float32)

    def test_a_fast_link(self):
        found = self.decided(self.seen(1e12, 1e12))
        assert found[:2] == (FORWARD, BACKWARD)
        assert "method 'none' would do" in found.reason

    def test_a_link_that_compute_hides(self):
        found = self.decided(self.seen(21e6, 21e6))
        assert found[:2] == (ConstantError(error=0.05, max=3), ConstantError(error=0.1, max=6))
        said = "bits 'auto': 2 to 3 forward (error 0.05), 2 to 6 back (error 0.1): the most that compute time hides ("
        assert found.reason.startswith(said)
        assert "21 Mbit/s" in found.reason

    def test_a_link_that_nothing_hides(self):
        found = self.decided(self.seen(1e6, 1e6))
        assert found[:2] == LEAST
        said = "bits 'auto': 2 forward, 2 to 4 back (error 0.1): no more, as the slowest link is the limit (at most"
        assert found.reason.startswith(said)

    def test_numbers_and_errors_stay(self):
        assert self.decided(self.seen(1e6, 1e6), forward_bits=1)[:2] == (1, LEAST[1])
        assert self.decided(self.seen(1e12, 1e12), backward_bits=6)[:2] == (FORWARD, 6)
        given = {"error": 0.2, "min": 1, "max": 5}
        found = self.decided(self.seen(1e6, 1e6), backward_bits=given)
        assert found[:2] == (ConstantError(error=0.05, max=3), ConstantError(**given)), "5 bits back are the limit"

    def test_the_slowest_replica_decides(self):
        rows = self.seen(1e12, 1e12) + self.seen(1e6, 1e6)
        assert self.decided(rows)[:2] == LEAST

    def test_dropout_asks_for_more(self):
        assert self.decided(self.seen(1e6, 1e6, fewest=3))[:2] == (3, LEAST[1])
        assert self.decided(self.seen(1e12, 1e12, fewest=3))[:2] == (FORWARD.replace(min=3), BACKWARD)

    def test_with_top_k_gradients_have_a_number(self):
        assert self.decided(self.seen(1e12, 1e12), backward_top_k=0.2)[:2] == (FORWARD, 8)

    def test_given_rates_count_as_measured_ones(self):
        """Nominal ones: of 21 Mbit/s of content."""
        rate = 21 / TCP_SHARE
        rated = {"error": 0.05, "min": 1, "mbit_per_s": rate}
        found = self.decided(self.unmeasured(), forward_bits=rated, backward_bits={"error": 0.2, "mbit_per_s": rate})
        assert found[:2] == (ConstantError(error=0.05, min=1, max=3), ConstantError(error=0.2, max=6))
        assert found.reason.startswith(
            "bits within the links' rates: 1 to 3 forward (error 0.05), 2 to 6 back (error 0.2)"
        )
        assert "slowest link 21 Mbit/s" in found.reason
        slow = {**rated, "mbit_per_s": 1}
        assert self.decided(self.unmeasured(), forward_bits=slow, backward_bits=slow)[:2] == (
            ConstantError(error=0.05, min=1, max=2),
            ConstantError(error=0.05, min=1, max=4),
        )
        # A way without a rate does not limit, and keeps what it was given; where it is "auto" it is measured.
        assert self.decided(self.unmeasured(), forward_bits={**rated, "mbit_per_s": 9}, backward_bits=8)[1] == 8
        assert self.decided(self.seen(1e6, 1e12), forward_bits={**rated, "mbit_per_s": 1e6})[:2] == (
            ConstantError(error=0.05, min=1),
            BACKWARD,
        )

    def test_each_link_has_its_own_rate(self):
        both = {key: {"error": 0.1, "mbit_per_s": [21 / TCP_SHARE, 1e5]} for key in ("forward_bits", "backward_bits")}
        found = self.decided(self.unmeasured(3), **both)
        assert found[0] == (ConstantError(error=0.1, max=3), ConstantError(error=0.1))
        assert found[1] == (ConstantError(error=0.1, max=6), ConstantError(error=0.1))
        assert "2 to 3/2 to 8 forward (error 0.1), 2 to 6/2 to 8 back (error 0.1)" in found.reason

    def test_a_line_that_is_fast_one_way_only(self):
        way = {"error": 0.1, "mbit_per_s": 1e5}
        slow = {"error": 0.1, "mbit_per_s": 1}
        assert self.decided(self.unmeasured(), forward_bits=way, backward_bits=slow)[:2] == (
            ConstantError(error=0.1),
            ConstantError(error=0.1, max=4),
        )

    def test_auto_needs_a_method_with_bits(self):
        with pytest.raises(ConfigError, match=r"activations\.forward_bits: got 'auto'"):
            Config.from_dict({"activations": {"method": "none", "forward_bits": "auto", "eval": "direct"}})
        with pytest.raises(ConfigError, match="got 'most'"):
            Config.from_dict({"activations": {"method": "aqsgd", "forward_bits": "most"}})
        with pytest.raises(ConfigError, match="settles 'auto'"):
            _ = Config.from_dict({"activations": {"method": "aqsgd", "forward_bits": "auto"}}).activations.bits(0)
