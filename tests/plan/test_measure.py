"""What plans measure: links over transports, stages, link ends; and what "auto" decides from it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from pipecomp.config import Config
from pipecomp.doctor.measure import Measured
from pipecomp.errors import ConfigError, LinkError
from pipecomp.plan.auto import Batch, Seen, decide, sample_length, wants_auto
from pipecomp.plan.probe import TransportPeer, measure_links, network_of
from pipecomp.plan.simulation import StageCosts
from pipecomp.plan.timing import time_link, time_model, time_stage, time_update
from pipecomp.stages import split
from pipecomp.stages.link.loopback import loopback_pair
from tests.limits import HANG_S

CPU = torch.device("cpu")


def small(layers=2):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=layers, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def test_links_are_measured_in_turns():
    """Three stages: each measures the link to the next, and all end."""
    (a, b), (c, d) = loopback_pair((0, 1), 20.0), loopback_pair((1, 2), 20.0)
    ends = [(None, a), (b, c), (d, None)]
    found: dict[int, object] = {}

    def run(stage: int) -> None:
        found[stage] = measure_links(stage, *ends[stage])

    threads = [threading.Thread(target=run, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert found[2] is None
    for k in (0, 1):
        assert found[k].out_bit_s > 1e6
        assert 0 < found[k].round_trip_s < 5


def test_foreign_bytes_while_measuring():
    a, b = loopback_pair()
    a.send(np.zeros(3, dtype=np.uint8))
    with pytest.raises(LinkError, match="3 bytes"):
        TransportPeer(b).receive(torch.empty(2, dtype=torch.int64))


def measured(out, back, trip=0.0):
    return Measured(out, back, trip, 0.0, 0.0)


def test_the_slowest_replica_counts():
    network = network_of([[measured(1e8, 3e7, 0.02), measured(2e8, 1e7, 0.04)]])
    (out,), (back,) = network.forward, network.backward
    assert (out.bits_per_s, back.bits_per_s) == (1e8, 1e7)
    assert out.latency_s == back.latency_s == 0.02


def test_a_stage_is_timed_without_a_trace():
    """Neither gradients nor random numbers nor the mode change."""
    for stage in split(small(), 2):
        stage.eval()
        torch.manual_seed(5)
        found = time_stage(stage, 2, 8, seconds=0.01)
        assert found.forward_s > 0
        assert found.backward_s > 0
        assert found.kept_bytes > 2 * 8 * 16 * 4
        assert all(p.grad is None for p in stage.parameters())
        assert not stage.training
        drawn = torch.rand(3)
        torch.manual_seed(5)
        assert torch.equal(drawn, torch.rand(3))


@pytest.mark.parametrize("method", ["none", "bf16", "direct", "aqsgd"])
def test_link_ends_are_timed(method):
    config = Config.from_dict({"activations": {"method": method}})
    encode_s, decode_s = time_link(config, 2, 4, 16, torch.float32, CPU, seconds=0.01)
    assert encode_s > 0
    assert decode_s > 0


def test_a_model_is_timed_block_by_block():
    found = time_model(small(4), 8, torch.float32, CPU, samples=4)
    assert len(found.blocks) == 4
    assert found.measured.startswith("measured")
    assert (found.hidden, found.tokens) == (16, 8)
    assert sum(found.call_s) + sum(found.blocks[0].forward_s for _ in range(4)) > 0
    assert time_update(CPU, values=1000) > 0


def test_lengths_of_samples():
    stage = split(small(), 1)[0]
    assert sample_length([{"input_ids": [1, 2, 3]}, {"input_ids": torch.zeros(5)}], stage) == 5
    assert sample_length(None, stage) == 16  # as long as the model's positions
    assert sample_length([], stage) == 16


class TestDecision:
    """20 ms of compute a micro-batch and stage, 64,000 values."""

    batch = Batch(samples=1, tokens=64, micro_batches=64)

    def seen(self, out, back, replicas=1, C=0.02):
        rows = []
        for _ in range(replicas):
            rows += [
                Seen(0, StageCosts(forward_s=C / 3, backward_s=2 * C / 3), measured(out, back)),
                Seen(1, StageCosts(forward_s=C / 3, backward_s=2 * C / 3), None),
            ]
        return rows

    def decided(self, rows, **activations):
        section = {"method": "aqsgd", "forward_bits": "auto", "backward_bits": "auto", **activations}
        config = Config.from_dict({"activations": section})
        assert wants_auto(config)
        return decide(config, rows, self.batch, 1000, torch.float32)

    def test_a_fast_link(self):
        found = self.decided(self.seen(1e12, 1e12))
        assert found[:2] == (8, 8)
        assert "method 'none' would do" in found.reason

    def test_a_link_that_compute_hides(self):
        found = self.decided(self.seen(21e6, 21e6))
        assert found[:2] == (3, 6)
        assert "compute time hides" in found.reason
        assert "21 Mbit/s" in found.reason

    def test_a_link_that_nothing_hides(self):
        found = self.decided(self.seen(1e6, 1e6))
        assert found[:2] == (2, 4)
        assert "the slowest link is the limit" in found.reason

    def test_numbers_stay(self):
        assert self.decided(self.seen(1e6, 1e6), forward_bits=1)[:2] == (1, 4)
        assert self.decided(self.seen(1e12, 1e12), backward_bits=6)[:2] == (8, 6)

    def test_the_slowest_replica_decides(self):
        rows = self.seen(1e12, 1e12) + self.seen(1e6, 1e6)
        assert self.decided(rows)[:2] == (2, 4)

    def test_auto_needs_a_method_with_bits(self):
        with pytest.raises(ConfigError, match=r"activations\.forward_bits: got 'auto'"):
            Config.from_dict({"activations": {"method": "none", "forward_bits": "auto", "eval": "direct"}})
        with pytest.raises(ConfigError, match="got 'most'"):
            Config.from_dict({"activations": {"method": "aqsgd", "forward_bits": "most"}})
        with pytest.raises(ConfigError, match="settles 'auto'"):
            _ = Config.from_dict({"activations": {"method": "aqsgd", "forward_bits": "auto"}}).activations.bits(0)
