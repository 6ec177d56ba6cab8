"""Measurements for plans: links over transports, stages, link ends."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import GPT2Config

from pipecomp.buffers import MemoryStore
from pipecomp.config import Config
from pipecomp.config.activations import ConstantError
from pipecomp.doctor.measure import LinkMeasurement
from pipecomp.errors import ConfigError, LinkError
from pipecomp.plan import measure
from pipecomp.plan.auto_bits import sample_length
from pipecomp.plan.command import PlanRequest, model_size
from pipecomp.plan.measure import (
    TransportPeer,
    find_shared_cores,
    measure_links,
    network_of,
    own_device,
    slowest_profile,
    slowest_speeds,
    survey_machine,
    survey_ranks,
    time_accumulation,
    time_link,
    time_model,
    time_stage,
    time_update,
    turns,
)
from pipecomp.plan.options import PlanOptions
from pipecomp.plan.prediction import MachineSpeeds
from pipecomp.plan.profile import PartCost, Profile, count, count_stages, max_tokens
from pipecomp.plan.simulation import SharedCores
from pipecomp.rank_layout import RankLayout
from pipecomp.stages import split
from pipecomp.stages.link.transport import loopback_pair, unpaced
from tests.limits import HANG_S
from tests.models import gpt2, make_config

CPU = torch.device("cpu")


def small(layers=2):
    return gpt2(layers, 16, vocab_size=50, n_positions=16, n_head=2)


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
    return LinkMeasurement(out, back, trip)


def test_the_slowest_replica_counts():
    network = network_of([[measured(1e8, 3e7, 0.02), measured(2e8, 1e7, 0.04)]])
    (out,), (back,) = network.forward, network.backward
    assert (out.bits_per_s, back.bits_per_s) == (1e8, 1e7)
    assert out.latency_s == back.latency_s == 0.02


def test_the_slowest_machine_counts_part_by_part():
    def profile(*seconds):
        parts = [PartCost(flops=0.0, kept_bytes=0.0, forward_s=s, backward_s=s) for s in seconds[:4]]
        more = {"call_s": (seconds[4], seconds[4]), "measured": "measured"}
        return Profile(hidden=8, tokens=4, first=parts[0], blocks=tuple(parts[1:3]), last=parts[3], **more)

    found = slowest_profile([profile(1.0, 2.0, 5.0, 4.0, 0.5), profile(2.0, 1.0, 6.0, 3.0, 0.25)])
    assert found == replace(profile(2.0, 2.0, 6.0, 4.0, 0.5), measured="measured, the slowest of 2")
    calls = [replace(profile(1.0, 1.0, 1.0, 1.0, 0.0), call_s=call_s) for call_s in ((0.2, 0.1), (0.1, 0.9))]
    assert slowest_profile(calls).call_s == (0.1, 0.9)
    rates = ("encode_values_s", "decode_values_s", "cast_values_s", "disk_bytes_s")
    one, other = (
        MachineSpeeds(
            average={"reduce": s, "decode": 1 / s},
            update_s_per_parameter=s,
            accumulate_s_per_parameter=s,
            **dict.fromkeys(rates, s),
        )
        for s in (2.0, 4.0)
    )
    wanted = replace(
        one, average={"reduce": 4.0, "decode": 0.5}, update_s_per_parameter=4.0, accumulate_s_per_parameter=4.0
    )
    assert slowest_speeds([one, other]) == slowest_speeds([other, one]) == wanted


def test_a_stage_is_timed_without_a_trace():
    """Neither gradients nor random numbers nor the mode change."""
    for stage in split(small(), 2):
        stage.eval()
        torch.manual_seed(5)
        found = time_stage(stage, 2, 8, seconds=0.01)
        assert found.forward_s > 0
        assert found.backward_s > 0
        assert all(p.grad is None for p in stage.parameters())
        assert not stage.training
        drawn = torch.rand(3)
        torch.manual_seed(5)
        assert torch.equal(drawn, torch.rand(3))


@pytest.mark.parametrize("method", ["none", "bf16", "direct", "aqsgd"])
def test_link_ends_are_timed(method, monkeypatch):
    opened, closed = [], []

    class Store(MemoryStore):
        def __init__(self, *given, **options):
            super().__init__(*given, **options)
            opened.append(self)

        def close(self):
            super().close()
            closed.append(self)

    monkeypatch.setattr(measure, "MemoryStore", Store)
    config = Config.from_dict({"activations": {"method": method}})
    encode_s, decode_s = time_link(config, 2, 4, 16, torch.float32, CPU, seconds=0.01)
    assert encode_s > 0
    assert decode_s > 0
    assert len(opened) == (2 if method == "aqsgd" else 0)
    assert set(closed) == set(opened), "their threads would stay"


@pytest.mark.parametrize(("place", "gpu"), [("0", 0), ("1", 1), ("2", 0)])
def test_ranks_of_a_machine_measure_on_the_gpus_that_they_train_on(monkeypatch, place, gpu):
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", place)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    assert own_device() == torch.device("cuda", gpu)
    assert taken == [torch.device("cuda", gpu)]
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert own_device() == CPU


def test_a_model_is_timed_block_by_block():
    found = time_model(small(4), 8, torch.float32, CPU, samples=4)
    assert len(found.blocks) == 4
    assert found.measured.startswith("measured")
    assert (found.hidden, found.tokens) == (16, 8)
    assert sum(found.call_s) + sum(found.blocks[0].forward_s for _ in range(4)) > 0
    assert time_update(CPU, values=1000) > 0
    assert time_accumulation(CPU, values=1000) > 0


def roberta():
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
    more = {"max_position_embeddings": 16, "pad_token_id": 1, "architectures": ["RobertaForMaskedLM"]}
    return make_config("roberta-masked", 2, **sizes, **more)


def test_the_longest_sample_has_a_place_for_each_token():
    """RoBERTa's positions begin after that of the padding token."""
    assert max_tokens(small().config) == 16
    assert max_tokens(roberta()) == 14
    assert max_tokens(object()) is None
    assert count(roberta(), 14).tokens == time_model(roberta(), 14, torch.float32, CPU).tokens == 14
    with pytest.raises(ConfigError, match="tokens: got 15, allowed: 1 to 14, the model's positions"):
        count(roberta(), 15)
    stage = split(transformers.RobertaForMaskedLM(roberta()), 1)[0]
    assert sample_length(None, stage) == 14
    assert model_size(PlanOptions(model=roberta()))[1] == 14
    assert model_size(PlanOptions(model=roberta(), tokens=0))[1] == 0, "not a default: refused"


def test_too_long_samples_are_refused_before_anything_is_measured(monkeypatch, tmp_path):
    """Also before ranks meet: this one is alone, and would wait for the other."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for survey in (survey_machine, partial(survey_ranks, stages=2, pacer_to=unpaced)):
        with pytest.raises(ConfigError, match="tokens: got 15, allowed: 1 to 14"):
            survey(roberta(), 15, torch.float32, 1, tmp_path)


def test_a_full_disk_is_an_error_that_names_it(monkeypatch, tmp_path):
    def full(folder, share):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(measure, "measure_disk", full)
    monkeypatch.setattr(measure, "time_model", lambda *given, **more: SimpleNamespace(hidden=4))
    with pytest.raises(ConfigError, match=r"store: got '.*', allowed: a folder that can be written \(No space left"):
        survey_machine(GPT2Config(), 8, torch.float32, 2, tmp_path / "messages")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("one_pass", "clusters"), [(False, None), (True, 256)])
def test_links_are_timed_with_what_a_plan_sends(monkeypatch, tmp_path, one_pass, clusters):
    timed = []
    monkeypatch.setattr(measure, "time_link", lambda config, *size: timed.append(config) or (1.0, 1.0))
    monkeypatch.setattr(measure, "time_model", lambda *given, **more: SimpleNamespace(hidden=4))
    monkeypatch.setattr(measure, "measure_disk", lambda folder, share: SimpleNamespace(read=1.0, write=1.0))
    monkeypatch.setattr(measure, "time_average", lambda device: MachineSpeeds().average)
    survey_machine(GPT2Config(), 8, torch.float32, 2, tmp_path, one_pass=one_pass)
    sent, cast = timed
    assert cast == Config()
    assert sent.store.clusters == clusters
    a = sent.activations
    assert a.backward_method == ("direct" if one_pass else "delta")
    errors = (8, 8) if one_pass else (ConstantError(error=0.025), ConstantError(error=0.05))
    assert (a.forward_bits, a.backward_bits) == errors, "choosing bits takes time, too"


def test_the_disk_is_measured_several_times(monkeypatch, tmp_path):
    rates = iter([4.0, 1.0, 2.0])
    monkeypatch.setattr(measure, "time_link", lambda config, *size: (1.0, 1.0))
    monkeypatch.setattr(measure, "time_model", lambda *given, **more: SimpleNamespace(hidden=4))
    monkeypatch.setattr(
        measure, "measure_disk", lambda folder, share: SimpleNamespace(**dict.fromkeys(("read", "write"), next(rates)))
    )
    monkeypatch.setattr(measure, "time_average", lambda device: MachineSpeeds().average)
    speeds = survey_machine(GPT2Config(), 8, torch.float32, 2, tmp_path).speeds
    assert (speeds.disk_bytes_s, speeds.disk_spread) == (1.0, (0.5, 2.0)), "a byte is written and read"


def test_a_bfloat16_stage_with_float32_adapters_is_timed():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    for stage in split(peft.get_peft_model(small().bfloat16(), lora), 2):
        assert {p.dtype for p in stage.parameters() if p.requires_grad} == {torch.float32}
        assert time_stage(stage, 2, 8, seconds=0.01).backward_s > 0


@pytest.mark.parametrize(
    ("ranks", "shared", "when"),
    [
        ([["a", [0, 1], 2.0]] * 2, [], [[0, 1]]),  # a core each
        ([["a", [0, 1], 2.0]] * 3, [((0, 1, 2), 2.0)], [[0, 1], [2]]),
        ([["a", [0, 1], 0.5]] * 2, [((0, 1), 1.0)], [[0], [1]]),  # more threads than cores: each alone is as slow
        ([["a", [0], 1.0], ["a", [1], 1.0], ["a", [0], 1.0]], [((0, 2), 1.0)], [[0, 1], [2]]),
        ([["a", [0], 1.0], ["b", [0], 1.0]], [], [[0, 1]]),
        ([["a", [0, 1], 0.0]] * 4, [], [[0, 1, 2, 3]]),  # GPUs
    ],
)
def test_ranks_that_share_too_few_cores_take_turns(ranks, shared, when):
    found = find_shared_cores(ranks)
    assert [(one.members, one.at_once) for one in found] == shared
    assert turns(len(ranks), found) == when


def test_cores_that_replicas_share_are_divided_among_them():
    """Four ranks on two cores are two stages of two replicas: each replica has one core for its two stages."""
    shared = (SharedCores(members=(0, 1, 2, 3), at_once=2.0),)
    request = PlanRequest(options=PlanOptions(model=small()), nodes=4, stages=2, shared_cores=shared)
    assert request.stage_cores(RankLayout(2, 2)) == (SharedCores(members=(0, 1), at_once=1.0),)
    assert request.stage_cores(RankLayout(4, 1)) == shared
    assert request.stage_cores(RankLayout(2, 2, "replicas-across")) == (SharedCores(members=(0, 1), at_once=1.0),)
    fewer = replace(request, shared_cores=(SharedCores(members=(0, 1), at_once=2.0),))
    assert fewer.stage_cores(RankLayout(2, 2)) == ()


def test_a_model_whose_code_reads_values_is_counted_with_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small().config
    _, expected, _ = count_stages(config, 16, torch.float32)
    plain = torch.nn.functional.embedding

    def embedding(ids: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        assert bool((ids >= 0).all())
        return plain(ids, *given, **more)

    monkeypatch.setattr(torch.nn.functional, "embedding", embedding)
    _, found, _ = count_stages(config, 16, torch.float32)
    assert {k: cost.flops for k, cost in found.items()} == {k: cost.flops for k, cost in expected.items()}
    for k, cost in found.items():
        assert cost.kept_bytes == pytest.approx(expected[k].kept_bytes, rel=0.05)
