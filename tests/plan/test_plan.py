"""Plans: bytes as links send them, operations of known models, choices of bits and layouts, the command."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from typer.testing import CliRunner

from pipecomp.allreduce import predict as predict_average
from pipecomp.buffers import MemoryStore
from pipecomp.cli import app
from pipecomp.config import Config
from pipecomp.config.activations import ConstantError
from pipecomp.engine.validation import check_precision
from pipecomp.errors import ConfigError, SplitError
from pipecomp.gradient_config import Gradients
from pipecomp.plan import command
from pipecomp.plan.auto_bits import MIN_BITS_OF_CLASSIFIERS, fewest_bits
from pipecomp.plan.command import parse_networks, round_up, run_plan
from pipecomp.plan.options import PlanOptions
from pipecomp.plan.packet_sizes import activation_bytes, gradient_bytes, with_bits
from pipecomp.plan.prediction import (
    HEAP_SHARE,
    RUNTIME_BYTES,
    MachineSpeeds,
    StepPrediction,
    TrainingJob,
    as_row,
    average_seconds,
    best_in_flight,
    memory_bytes,
    predict,
)
from pipecomp.plan.profile import PartCost, Profile, balanced, count, without_weights
from pipecomp.plan.report import (
    PlanResult,
    advice,
    configuration,
    link_table,
    method_table,
    print_plan,
    stage_seconds_table,
)
from pipecomp.plan.search import (
    PlanChoice,
    aqsgd_sections,
    choose,
    choose_average,
    choose_bits,
    choose_local_steps,
    constant_error_bits,
    divisible,
    layouts,
    micro_batch_splits,
)
from pipecomp.plan.simulation import (
    TCP_SHARE,
    Channel,
    LinkNetwork,
    StageCosts,
    StepSpec,
    between_replicas,
    chain,
    uniform,
)
from pipecomp.stages.link.endpoint import LinkReceiver, LinkSender, Position
from pipecomp.stages.link.layout import Layout
from pipecomp.stages.link.transport import loopback_pair
from pipecomp.utils.processes import LARGE_BLOCK
from tests.models import make_config

SECTIONS = [
    {"method": "none"},
    {"method": "fp16"},
    {"method": "bf16"},
    {"method": "direct", "forward_bits": 3, "backward_bits": 5},
    {"method": "direct", "forward_bits": 2, "group_size": 10, "rotation": True},
    {"method": "aqsgd", "forward_bits": 2, "backward_bits": 8},
    {"method": "aqsgd", "forward_bits": 4, "first_visit": 8, "rotation": True},
    {"method": "aqsgd", "forward_bits": 1, "backward_bits": 8, "backward_top_k": 0.2, "group_size": 16},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: "-".join(map(str, s.values())))
def test_bytes_are_those_that_links_send(section, dtype):
    """Two visits of padded samples over a real link; what its ends counted."""
    config = Config.from_dict({"activations": section})
    stores = [MemoryStore("link-0") if section["method"] == "aqsgd" else None for _ in "ab"]
    a, b = loopback_pair(timeout_s=5)
    up, down = LinkSender(0, config, a, stores[0]), LinkReceiver(0, config, b, stores[1])
    counts, H = (7, 3, 5), 37
    where = Layout((1, 2, 3), (0, 0, 0), counts, 7)
    sent = []
    for visit in range(2):
        x_BSH = torch.randn(3, 7, H).to(dtype)
        up.send_activation(x_BSH, where, Position(visit, 0))
        down.recv_activation(Position(visit, 0))
        down.send_gradient(x_BSH, where, Position(visit, 0))
        up.recv_gradient(where, Position(visit, 0))
        sent.append((up.stats.forward.bytes_sent, up.stats.backward.bytes_sent))
    (first, gradient), (both, _) = sent
    assert activation_bytes(config, 0, counts, H, dtype, first_visit=True) == first
    assert activation_bytes(config, 0, counts, H, dtype) == both - first
    assert gradient_bytes(config, 0, counts, H, dtype) == gradient


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("delta", [False, True])
def test_packets_that_keep_an_error_count_with_the_most_bits_or_their_mean(way, delta):
    error = {"error": 0.1, "min": 2, "max": 6}
    section = {"method": "aqsgd", "backward_method": "delta"} if delta else {"method": "direct"}
    size = activation_bytes if way == "forward" else gradient_bytes

    def count(bits, **more):
        made = Config.from_dict({"activations": {**section, f"{way}_bits": bits}})
        return size(made, 0, (7, 3), 64, torch.float32, **more)

    assert count(error) == count(6)
    assert [count(error, mean_bits=bits) for bits in (2.0, 3, 6.0)] == [count(bits) for bits in (2, 3, 6)]
    assert count(error, mean_bits=3.25) == count(3) + (count(4) - count(3)) / 4
    assert count(5, mean_bits=3.25) == count(5), "a number stays"


def llama(layers=4, width=64, tied=False, vocabulary=200):
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "max_position_embeddings": 64}
    sizes |= {"vocab_size": vocabulary}
    return make_config("llama", layers, **sizes, tie_word_embeddings=tied)


class TestProfile:
    def test_operations_by_hand(self):
        """Llama, D wide: q and o have D², k and v half of it each, the MLP 3 × 3 D²; attention 2 S D twice."""
        D, S, V = 64, 32, 200
        found = count(llama(), S)
        assert found.blocks[0].flops == 2 * S * (3 * D * D + 9 * D * D) + 4 * S * S * D
        assert found.first.flops == 0
        assert found.last.flops == 2 * S * V * D
        assert len(found.blocks) == 4
        assert found.last.kept_bytes > S * V * 4  # logits

    def test_a_model_that_no_machine_here_could_hold(self):
        """Llama-8B's shape: 32 blocks of 218 M weights; nothing is allocated."""
        from transformers import LlamaConfig

        config = LlamaConfig(
            hidden_size=4096,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            intermediate_size=14336,
            vocab_size=128256,
            tie_word_embeddings=False,
            max_position_embeddings=8192,
        )
        found = count(config, 2048, torch.bfloat16)
        weights = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
        assert found.blocks[0].flops == 2 * 2048 * weights + 4 * 2048 * 2048 * 4096
        plan = balanced(without_weights(config), found.estimated(1e13), 4)
        assert sum(plan.parameters) == 8_030_261_248
        seconds = [sum(pair) for pair in found.estimated(1e13).stage_seconds(plan, 1)]
        assert max(seconds) < 1.15 * min(seconds)
        assert plan.cuts[-1] - plan.cuts[-2] < 8  # the head takes the place of blocks

    def test_cuts_go_by_the_seconds_of_the_head_and_not_by_its_parameters(self):
        """At 1,024 tokens attention is a fifth of a block, and has none; the head has no attention."""
        gpt2 = transformers.GPT2Config()
        found, model = count(gpt2, 1024).estimated(1e12), without_weights(gpt2)

        def slowest(cut: int) -> float:
            return max(map(sum, found.stage_seconds(balanced(model, found, [0, cut]), 1)))

        assert balanced(model, found, 2).cuts[1] == min(range(1, 12), key=slowest) == 8

    @pytest.mark.parametrize("layers", [1, 2, 3])
    def test_short_models(self, layers):
        found = count(llama(layers), 16)
        assert len(found.blocks) == layers
        whole = sum(b.flops for b in found.blocks) + found.first.flops + found.last.flops
        block = 2 * 16 * 12 * 64 * 64 + 4 * 16 * 16 * 64
        assert whole == layers * block + 2 * 16 * 200 * 64

    def test_recomputing_takes_one_forward_of_the_blocks_more(self):
        plain = count(llama(), 16).estimated(1e9)
        again = plain.recomputing(torch.float32)
        assert plain.blocks[0].backward_s == pytest.approx(2 * plain.blocks[0].forward_s)
        assert again.blocks[0].backward_s == pytest.approx(3 * plain.blocks[0].forward_s)
        assert (again.first, again.last) == (plain.first, plain.last), "head and loss are not recomputed"

    def test_recomputing_keeps_inputs_and_what_one_block_keeps(self):
        """16 tokens of 64 float32 values for each block in flight; three micro-batches are on the first of 3 stages."""
        profile = count(llama(6), 16).estimated(1e9)
        made = replace(job(K=3, M=8, samples=2), profile=profile)
        again = replace(made, profile=profile.recomputing(torch.float32))
        inputs, block, head = 16 * 64 * 4, profile.blocks[0].kept_bytes, profile.last.kept_bytes
        assert block > 10 * inputs
        plain = memory_bytes(made)
        found = memory_bytes(again)
        moments = profile.working_bytes(made.plan, 2)
        others = [RUNTIME_BYTES + 16 * n + moment for n, moment in zip(made.plan.parameters, moments, strict=True)]
        for held, stage, flying in ((0.0, 0, 3), (0.0, 1, 2), (head, 2, 1)):
            more = profile.first.kept_bytes if stage == 0 else 0
            times = 2 * (flying + HEAP_SHARE)
            assert plain[stage] == others[stage] + times * (2 * block + held + more)
            assert found[stage] == others[stage] + times * (2 * inputs + held + more) + 2 * block
        half = profile.recomputing(torch.bfloat16)
        assert half.kept_bytes(made.plan, 2)[1] == 2 * 2 * inputs / 2

    def test_it_is_kept_as_json(self):
        found = count(llama(), 16).estimated(1e9)
        assert Profile.from_dict(json.loads(json.dumps(found.as_dict()))) == found
        with pytest.raises(ConfigError, match="profile"):
            Profile.from_dict({"blocks": []})
        with pytest.raises(ConfigError, match="profile"):
            Profile.from_dict(None)

    def test_too_many_tokens(self):
        with pytest.raises(ConfigError, match="tokens: got 65, allowed: 1 to 64"):
            count(llama(), 65)


def job(K=2, M=8, samples=1, S=64, H=1000, block_s=0.01, replicas=1, tied=False) -> TrainingJob:
    """Two equal blocks for each stage, forward block_s / 3; the cuts and parameters of a small Llama."""
    model = without_weights(llama(2 * K, tied=tied))
    block = PartCost(flops=1.0, kept_bytes=1e6, forward_s=block_s / 3, backward_s=2 * block_s / 3)
    nothing = PartCost(flops=0.0, kept_bytes=0.0, forward_s=0.0, backward_s=0.0)
    profile = Profile(hidden=H, tokens=S, blocks=(block,) * (2 * K), first=nothing, last=nothing)
    plan = balanced(model, profile, list(range(0, 2 * K + 1, 2)))
    sizes = {name: p.numel() for name, p in model.named_parameters(remove_duplicate=False)}
    return TrainingJob(
        profile=profile,
        plan=plan,
        samples=samples,
        micro_batches=M,
        replicas=replicas,
        tied=tuple(sizes[g.name] for g in plan.tied),
    )


AQSGD = Config.from_dict({"activations": {"method": "aqsgd", "forward_bits": "auto", "backward_bits": "auto"}})
CHANGES = Config.from_dict(aqsgd_sections("auto", "auto", one_pass=False))
DELTA = Config.from_dict({"activations": {"method": "aqsgd", "backward_method": "delta"}})


class TestPrediction:
    def test_local_steps_share_out_what_averaging_takes(self):
        one, slow = job(K=1, replicas=2), uniform(1, 1e5)

        def predicted(**local: Any) -> StepPrediction:
            return predict(one, Config.from_dict({"gradients": {"method": "double_squeeze", **local}}), slow)

        every, eighth = predicted(), predicted(local_steps=8)
        assert eighth.average_s == pytest.approx(every.average_s / 8)
        assert eighth.step_s == pytest.approx(every.step_s - 7 / 8 * every.average_s)
        assert eighth.memory_bytes()[0] == every.memory_bytes()[0] + 4 * one.plan.parameters[0]
        nesterov = predicted(local_steps=8, outer={"optimizer": "nesterov"})
        assert nesterov.memory_bytes()[0] == every.memory_bytes()[0] + 8 * one.plan.parameters[0]
        halves = predicted(local_steps=8, fragments=2, overlap=1)
        shown = every.average_s / 8 - (every.step_s - every.average_s) * 2 / 8
        assert halves.average_s == pytest.approx(shown)
        assert predicted(local_steps=8, fragments=2, overlap=4).average_s < halves.average_s
        always = predicted(local_steps=8, fragments=8, overlap=7)
        assert always.average_s == pytest.approx(every.average_s / 8 - (every.step_s - every.average_s))

    def test_late_fragments_travel_while_links_are_idle(self):
        two, network = job(K=2, replicas=2), uniform(2, 2e8)

        def predicted(**local: Any) -> StepPrediction:
            section = {"method": "double_squeeze", "local_steps": 8, **local}
            speeds = MachineSpeeds(average={"quantize": 1e-5})
            return predict(two, Config.from_dict({"gradients": section}), network, speeds)

        alone = predict(job(K=2), Config(), network)
        idle_s = alone.step_s - 8 * two.micro_batches * alone.forward_bytes[0] / 2e8
        assert idle_s > 0.05
        assert predicted().average_s - predicted(overlap=1).average_s == pytest.approx(idle_s / 8)

    def test_without_a_network_it_is_compute(self):
        found = predict(job(K=4, M=10), Config(), uniform(4, float("inf")))
        assert found.step_s == pytest.approx(13 * 0.02)
        assert found.samples_per_s == pytest.approx(10 / found.step_s)
        assert found.slack == 1
        assert found.first_epoch_s == found.step_s
        distant = predict(job(K=3, M=1), Config(), uniform(3, float("inf"), 1.0))
        assert distant.step_s == pytest.approx(3 * 0.02 + 4 + 4 + 1), "packets, the norm over the stages, the loss"

    def test_blocks_below_the_lowest_trained_one_have_no_backward(self):
        """Four blocks on two stages, 10/3 ms forward and 20/3 ms back: the lower three are frozen."""
        whole = job(K=2, M=8)
        frozen = {"trained": (0, whole.plan.trained[1]), "frozen_bytes": (4 * whole.plan.parameters[0], 0)}
        plan = replace(whole.plan, **frozen, first_trained_block=3)
        found = predict(replace(whole, plan=plan), Config(), uniform(2, 1e7))
        assert [sum(pair) for pair in found.job.stage_seconds()] == pytest.approx([2 * 0.01 / 3, 4 * 0.01 / 3])
        before = predict(whole, Config(), uniform(2, 1e7))
        assert (found.forward_bytes, found.backward_bytes) == (before.forward_bytes, (0,))
        assert found.job.profile.kept_bytes(plan, 1) == [0, 1e6]
        packet_s = 8 * found.forward_bytes[0] / 1e7
        assert found.step_s == pytest.approx(2 * 0.01 / 3 + 8 * packet_s + 4 * 0.01 / 3)
        assert found.step_s < before.step_s
        assert as_row(found)["in_flight"] == [1, 1]
        assert found.memory_bytes()[0] == RUNTIME_BYTES + plan.frozen_bytes[0], "no gradients, no moments, nothing kept"

    def test_first_epoch_sends_whole_activations(self):
        found = predict(job(), with_bits(AQSGD, 2, 4), uniform(2, 1e7))
        assert found.first_visit_bytes[0] > 15 * found.forward_bytes[0]
        assert found.first_epoch_s > 2 * found.step_s

    def test_first_epoch_sends_whole_gradients_where_they_are_changes(self):
        slow_back = LinkNetwork(forward=(Channel(),), backward=(Channel(bits_per_s=1e7),))
        found = predict(job(), with_bits(DELTA, 2, 2), slow_back)
        assert found.first_epoch_s > 2 * found.step_s

    def test_kernels_and_updates_count(self):
        made = job(K=1, M=4)
        plain = predict(made, Config(), uniform(1, 1e9))
        speeds = MachineSpeeds(update_s_per_parameter=1e-6, cast_values_s=1.0)
        assert predict(made, Config(), uniform(1, 1e9), speeds).step_s == pytest.approx(
            plain.step_s + 1e-6 * made.plan.parameters[0]
        )
        speeds = MachineSpeeds(accumulate_s_per_parameter=1e-6, cast_values_s=1.0)
        assert predict(made, Config(), uniform(1, 1e9), speeds).step_s == pytest.approx(
            plain.step_s + 4 * 1e-6 * made.plan.parameters[0]
        ), "of each micro-batch"
        two = job(K=2, M=1)
        values = 64 * 1000
        speeds = MachineSpeeds(encode_values_s=values / 0.1, decode_values_s=values / 0.2)
        slow = predict(two, with_bits(AQSGD, 2, 4), uniform(2, float("inf")), speeds)
        assert slow.step_s == pytest.approx(0.04 + 2 * (0.1 + 0.2))

    def test_a_slow_disk_is_the_limit(self):
        found = predict(job(M=8), with_bits(AQSGD, 2, 4), uniform(2, 1e9), MachineSpeeds(disk_bytes_s=1e5))
        assert found.step_s == found.store_s == pytest.approx(8 * 64 * 1000 * 4 / 1e5)
        eight = with_bits(AQSGD, 2, 4).replace(store=AQSGD.store.replace(bits=8))
        assert predict(job(M=8), eight, uniform(2, 1e9), MachineSpeeds(disk_bytes_s=1e5)).store_s == found.store_s / 4
        delta = predict(job(M=8), DELTA, uniform(2, 1e9), MachineSpeeds(disk_bytes_s=1e5))
        assert delta.store_s == 2 * found.store_s, "gradients too"
        middle = predict(job(K=3, M=8), with_bits(AQSGD, 2, 4), uniform(3, 1e9), MachineSpeeds(disk_bytes_s=1e5))
        assert middle.store_s == 2 * found.store_s, "of both links"

    def test_cluster_centers_have_no_first_epoch_and_are_written_once_a_step(self):
        section = {"activations": {"method": "aqsgd", "forward_bits": 2}, "store": {"clusters": 256}}
        found = predict(job(M=8), Config.from_dict(section), uniform(2, 1e9), MachineSpeeds(disk_bytes_s=1e5))
        assert found.store_s == pytest.approx(256 * 1000 * 4 / 1e5)
        assert found.first_epoch_s == found.step_s
        assert found.first_visit_bytes == found.forward_bytes
        direct = {"activations": {"method": "direct", "forward_bits": 2}}
        plain = predict(job(M=8), Config.from_dict(direct), uniform(2, 1e9))
        assert [a - b for a, b in zip(found.forward_bytes, plain.forward_bytes, strict=True)] == [64]

    def test_replicas_average_and_tied_weights_are_shared(self):
        alone, pair = job(K=1), job(K=1, replicas=2)
        slow = LinkNetwork(forward=(Channel(bits_per_s=1e6),), backward=(Channel(bits_per_s=1e7),))
        d = pair.plan.parameters[0]
        expected = predict_average("none", d, 2, bandwidth_bit_per_s=1e6).total_s
        assert average_seconds(Config(), d, 2, slow, MachineSpeeds()) == pytest.approx(expected)
        assert average_seconds(Config(), d, 1, slow, MachineSpeeds()) == 0
        assert alone.batch * 2 == pair.batch
        for links in (
            uniform(1, 1e6),
            chain(1, (1e6,)),
            LinkNetwork(forward=(), backward=(), between=Channel(bits_per_s=1e6)),
        ):
            found = predict(pair, Config(), links)
            assert found.average_s == pytest.approx(expected), "replicas of one stage have a network too"
            assert found.step_s == pytest.approx(predict(alone, Config(), links).step_s + expected)
        distant = predict_average("none", d, 2, bandwidth_bit_per_s=1e6, latency_s=0.5).total_s
        assert distant > expected
        assert predict(pair, Config(), uniform(1, 1e6, 0.5)).average_s == pytest.approx(distant)
        tied, untied = (predict(job(tied=t), Config(), uniform(2, 1e7)).step_s for t in (True, False))
        assert tied == pytest.approx(untied + predict_average("none", 200 * 64, 2, bandwidth_bit_per_s=1e7).total_s)
        both = job(tied=True, replicas=2)
        found = predict(both, Config(), uniform(2, 1e7))
        # DeepSpeed averages over replicas what stages have summed; compressed, all four do both at once.
        assert found.tied_s == predict_average("none", 200 * 64, 2, bandwidth_bit_per_s=1e7).total_s
        most = max(both.plan.parameters)
        assert found.average_s == predict_average("none", most, 2, bandwidth_bit_per_s=1e7).total_s
        found = predict(both, Config(gradients=Gradients(method="fp16")), uniform(2, 1e7))
        assert found.tied_s == predict_average("fp16", 200 * 64, 4, bandwidth_bit_per_s=1e7).total_s
        rest = most - 200 * 64
        assert found.average_s == predict_average("fp16", rest, 2, bandwidth_bit_per_s=1e7).total_s
        for dtype, shorter in ((torch.bfloat16, 1), (torch.float16, 2)):  # what DeepSpeed sums gradients in
            half = predict(replace(job(tied=True), dtype=dtype), Config(), uniform(2, 1e7))
            d = 200 * 64 // shorter
            assert half.tied_s == predict_average("none", d, 2, bandwidth_bit_per_s=1e7).total_s
        assert between_replicas(uniform(3, 1e6, 0.5)).between == Channel(bits_per_s=1e6, latency_s=0.5)

    def test_replicas_of_half_precision_also_send_each_other_weights(self):
        pair = replace(job(K=1, replicas=2), dtype=torch.bfloat16)
        d, slow = pair.plan.parameters[0], uniform(1, 1e6, 0.5)
        gathered = 16 * d / 2 / 1e6 + 0.5
        reduced = predict_average("none", d // 2, 2, bandwidth_bit_per_s=1e6, latency_s=0.5).total_s
        assert predict(pair, Config(), slow).average_s == pytest.approx(reduced + gathered)
        squeezed = Config.from_dict({"gradients": {"method": "double_squeeze"}})
        reduced = predict_average("double_squeeze", d, 2, bandwidth_bit_per_s=1e6, latency_s=0.5).total_s
        assert predict(pair, squeezed, slow).average_s == pytest.approx(reduced + gathered)

    def test_memory_counts_what_is_in_flight(self):
        made = job(K=2, M=8)
        found = predict(made, Config(), uniform(2, float("inf")))
        first, second = (RUNTIME_BYTES + (flying + HEAP_SHARE) * 2e6 for flying in (2, 1))
        assert found.memory_bytes() == [16 * made.plan.parameters[0] + first, 16 * made.plan.parameters[1] + second]
        half = memory_bytes(replace(made, dtype=torch.bfloat16))
        assert half[1] == 18 * made.plan.parameters[1] + second, "with a copy in float32"
        shared = memory_bytes(replace(made, dtype=torch.bfloat16, replicas=4))
        assert shared[1] == (6 + 12 / 4) * made.plan.parameters[1] + second, (
            "each replica has a part of it and of Adam's state"
        )

    def test_large_tensors_leave_nothing_in_the_heap(self):
        made = job(K=2, M=8)
        most = LARGE_BLOCK // (4 * made.profile.tokens * made.profile.hidden * 4)
        few, many = (replace(made, samples=samples) for samples in (most - 1, most + 1))
        kept = made.profile.kept_bytes(made.plan, 1)[1]
        moments = [p.profile.working_bytes(p.plan, p.samples)[1] for p in (few, many)]
        weights = RUNTIME_BYTES + 16 * made.plan.parameters[1]
        assert memory_bytes(few)[1] == pytest.approx(weights + (1 + HEAP_SHARE) * few.samples * kept + moments[0])
        assert memory_bytes(many)[1] == pytest.approx(weights + many.samples * kept + moments[1])

    def test_memory_counts_what_is_needed_for_a_moment(self):
        """Of 2 samples the logits' gradient and that of their logarithms; an embedding's new gradient."""
        S, V, D = 32, 4000, 64
        profile = count(llama(vocabulary=V), S)
        assert profile.last.working_bytes == pytest.approx(2 * S * V * 4, rel=0.05)
        assert profile.first.gradient_bytes == pytest.approx(V * D * 4, rel=0.05)
        made = replace(job(K=2, samples=2), profile=profile)
        plain = replace(profile, last=replace(profile.last, working_bytes=0.0, gradient_bytes=0.0))
        more = memory_bytes(made)[1] - memory_bytes(replace(made, profile=plain))[1]
        block = profile.blocks[0].gradient_bytes + 2 * profile.blocks[0].working_bytes
        assert more == profile.last.gradient_bytes + 2 * profile.last.working_bytes - block > 0

    def test_memory_counts_error_feedback(self):
        """float32 values: all of a worker's, and those of which a rank is the owner."""
        squeezed = Config(gradients=Gradients(method="double_squeeze"))

        def more(made: TrainingJob) -> list[float]:
            plain, found = (predict(made, config, uniform(2, 1e7)).memory_bytes() for config in (Config(), squeezed))
            return [b - a for a, b in zip(plain, found, strict=True)]

        tied, values = 200 * 64, job(tied=True).plan.parameters
        assert more(job(replicas=4)) == [5 * count for count in job().plan.parameters]
        assert more(job(tied=True)) == [6 * tied] * 2, "one replica averages nothing else"
        assert more(job(tied=True, replicas=2)) == [6 * (count - tied) + 5 * tied for count in values]

    def test_the_memory_shown_is_that_of_what_is_recommended(self):
        big, links = job(K=3), uniform(3, float("inf"))
        blocks = tuple(replace(block, kept_bytes=1e9) for block in big.profile.blocks)
        made = predict(replace(big, profile=replace(big.profile, blocks=blocks)), DELTA, links)
        plain = replace(made, config=Config(), slack=made.slack + 1)
        choice = PlanChoice(forward_bits=3, backward_bits=6, prediction=made, plain=plain, fits=True)
        assert not choice.pays
        found = PlanResult(choice=choice, rows=[("plain", [plain])])
        shown = io.StringIO()
        print_plan(found, links, ["lab"], Console(file=shown, width=200))
        assert f"{plain.memory_bytes()[0] / 1e9:.2f}" in shown.getvalue()

    def test_stages_run_ahead_as_far_as_it_helps(self):
        stages = [StageCosts(forward_s=1, backward_s=2)] * 2
        step = StepSpec(stages=stages, micro_batches=40, forward_bytes=[2], backward_bytes=[2])
        assert best_in_flight(step, uniform(2, float("inf")))[0] == 1
        # 2 s each way: 2 + 3 + 2 until the gradient is back, and 3 more of its own; four in flight are 12 s of work.
        slack, played = best_in_flight(step, uniform(2, 8))
        assert slack == 3
        assert played.seconds == pytest.approx(40 * 3, rel=0.1)
        assert best_in_flight(step, uniform(2, 8), 6)[0] == 5


class TestChoices:
    def test_bits_are_the_most_that_hide(self):
        def predicted(limit):
            return lambda f, b: max(1.0, (f + b) / limit)

        alike = uniform(2, 1e6)
        assert choose_bits(predicted(16), alike) == (8, 8, True)
        assert choose_bits(predicted(12), alike) == (4, 8, True)
        assert choose_bits(predicted(9), alike) == (3, 6, True)
        assert choose_bits(predicted(5), alike) == (2, 4, False)
        assert choose_bits(predicted(12), alike, 3) == (3, 8, True)
        assert choose_bits(predicted(12), alike, "auto", 6) == (6, 6, True)
        assert choose_bits(predicted(1), alike, 7, 7)[:2] == (7, 7)
        assert choose_bits(predicted(1), alike, (7,), (7,))[:2] == (7, 7)

    def test_fast_links_get_more(self):
        """Bits of link k take 1, 1 / 2 and 1 / 10 of a limit of 10: links that are not twice as fast stay alike."""
        network = chain(4, (1e6, 1.9e6, 1e7))

        def predicted(f, b):
            slow = [2.0, 1.9, 10.0]
            pairs = [(f if isinstance(f, int) else f[k], b if isinstance(b, int) else b[k]) for k in range(3)]
            return max(1.0, *((p + q) / (7 * s / 2) for (p, q), s in zip(pairs, slow, strict=True)))

        assert choose_bits(predicted, network) == ((2, 2, 8), (4, 4, 8), False)
        assert choose_bits(predicted, network, 2) == (2, (4, 4, 8), False)
        assert choose_bits(predicted, network, (5, 4, 4), "auto") == ((5, 4, 4), (4, 4, 8), False)

    def test_errors_within_a_rate_have_bits_chosen_and_others_count_with_the_most(self):
        def predicted(limit):
            return lambda f, b: max(1.0, (f + b) / limit)

        alike, rated = uniform(2, 1e6), ConstantError(error=0.1, min=3, max=7, mbit_per_s=1)
        assert choose_bits(predicted(16), alike, rated, rated) == (7, 7, True)
        assert choose_bits(predicted(9), alike, rated, rated) == (3, 6, True)
        assert choose_bits(predicted(1), alike, rated, rated) == (3, 4, False)
        assert choose_bits(predicted(1), alike, rated.replace(min=1), "auto")[:2] == (2, 4)
        assert choose_bits(predicted(13), alike, "auto", rated.replace(mbit_per_s=None)) == (6, 7, True)
        assert choose_bits(predicted(1), alike, "auto", "auto", 3) == (3, 4, False)
        both = uniform(3, 1e6)
        assert choose_bits(lambda f, b: sum(f) + b, both, (8, rated), 5) == ((8, 3), 5, False)

    @pytest.mark.parametrize("way", [0, 1])
    def test_a_line_that_is_fast_one_way_gets_more_that_way(self, way):
        """The slow way takes as long as all others together; the fast one ten times less than it."""
        fast, slow = (Channel(bits_per_s=1e7),), (Channel(bits_per_s=1e6),)
        network = LinkNetwork(forward=slow, backward=fast) if way else LinkNetwork(forward=fast, backward=slow)

        def predicted(f, b):
            return max((f, b)[1 - way] / 1, (f, b)[way] / 3, 0.1)

        # A third of the slow way's 2 or 4 bits: 6 back, 8 forward.
        assert choose_bits(predicted, network) == ((2, 6, False) if way else (8, 4, False))

    def test_a_fast_link_needs_no_compression(self):
        found = choose(job(), AQSGD, uniform(2, 1e12))
        assert (found.forward_bits, found.backward_bits) == (8, 8)
        assert not found.pays

    def test_a_slow_link_gets_few_bits(self):
        found = choose(job(), AQSGD, uniform(2, 1e5))
        assert (found.forward_bits, found.backward_bits, found.fits) == (2, 4, False)
        assert found.pays

    def test_between_them_messages_are_as_long_as_compute(self):
        """20 ms for a micro-batch; 64,000 values take 18.3 ms at 28 Mbit/s with 8 bits, and at 21 Mbit/s with 6."""
        found = choose(job(M=64), AQSGD, uniform(2, 28e6))
        assert (found.forward_bits, found.backward_bits) in {(8, 8), (7, 8), (6, 8), (5, 8), (4, 8)}
        half = choose(job(M=64), AQSGD, uniform(2, 21e6))
        assert (half.forward_bits, half.backward_bits) == (3, 6)

    def test_each_link_has_its_own(self):
        lines = (Channel(bits_per_s=1e12), Channel(bits_per_s=21e6))
        found = choose(job(K=3, M=64), AQSGD, LinkNetwork(forward=lines, backward=lines))
        bits = [found.prediction.config.activations.bits(k) for k in range(2)]
        assert bits[0] == (8, 8)
        assert bits[1] in {(3, 6), (4, 8)}
        sizes = found.prediction.forward_bytes
        assert sizes[0] > 1.9 * sizes[1]

    def test_slower_machines_get_less(self):
        model, profile = without_weights(llama(8)), job(K=4).profile
        assert balanced(model, profile, 2).cuts == (0, 4, 8)
        split = balanced(model, profile, 2, slowdowns=(1.0, 1 / 3))
        assert split.cuts == (0, 2, 8)
        one = replace(job(K=4), plan=split, slowdowns=(1.0, 1 / 3))
        (first, _), (second, _) = one.stage_seconds()
        assert first == pytest.approx(second)
        with pytest.raises(SplitError, match=r"slowdowns: got .*, allowed: 2 numbers above 0"):
            balanced(model, profile, 2, slowdowns=(1.0,))

    def test_averages(self):
        slow, fast = uniform(2, 1e6), uniform(2, 1e15)
        method, *_ = choose_average(Config(), 10**6, 2, slow, MachineSpeeds())[0]
        assert method == "double_squeeze"
        kernels = MachineSpeeds(average={"quantize": 1e-8, "reduce": 1e-8, "decode": 1e-8})
        assert choose_average(Config(), 10**6, 2, fast, kernels)[0][0] == "none"
        assert len(choose_average(Config(), 10**6, 2, slow, MachineSpeeds())) == 4

    def test_local_steps_are_the_fewest_that_leave_averaging_a_small_share(self):
        assert choose_local_steps(1.0, 0.01) is None
        assert choose_local_steps(1.0, 0.1) == 2
        assert choose_local_steps(1.0, 0.21) == 4, "0.21 of 4.21 s"
        assert choose_local_steps(1.0, 0.7) == 16
        assert choose_local_steps(1.0, 100.0) == 32

    def test_local_steps_are_proposed_with_the_length_of_training_that_they_need(self):
        found = choose(job(K=2, M=8), AQSGD, uniform(2, 21e6))
        step_s = (found.prediction if found.pays else found.plain).step_s
        *_, said = advice(PlanResult(choice=found, averages=[("double_squeeze", 0.1 * step_s), ("none", step_s)]))
        assert "With gradients.local_steps 2 replicas average after every 2 steps only" in said
        assert said.endswith("It needs a fine-tuning of at least 48 steps.")
        assert "local_steps" not in " ".join(advice(PlanResult(choice=found, averages=[("none", 0.001 * step_s)])))

    @pytest.mark.parametrize("plain_s", [1.0, 5.0])
    def test_the_reason_says_what_steps_take_while_samples_are_new(self, plain_s):
        """In a training of one epoch these are all steps."""
        found = choose(job(K=2, M=8), AQSGD, uniform(2, 21e6))
        plain = replace(found.plain, step_s=plain_s)
        for factor, told in ((1.02, False), (2.0, True)):
            p = replace(found.prediction, step_s=1.25, first_epoch_s=1.25 * factor)
            made = replace(found, prediction=p, plain=plain)
            said = " ".join(advice(PlanResult(choice=made)))
            assert made.pays == (plain_s == 5.0)
            assert "1.25 s" in said
            assert ("(2.5 s in the first epoch)" in said) == told

    def test_tied_weights_that_take_long_are_named(self):
        slow, made = uniform(2, 1e6), job(tied=True)
        found = choose(made, AQSGD, slow)
        expected = predict_average("none", 200 * 64, 2, bandwidth_bit_per_s=1e6).total_s
        assert found.taken.tied_s == pytest.approx(expected)
        assert any(
            f"{expected:.3g} s are for the gradients of tied" in text for text in advice(PlanResult(choice=found))
        )
        squeezed = choose(made, AQSGD.replace(gradients=Gradients(method="double_squeeze")), slow)
        assert squeezed.taken.tied_s < expected / 4
        for other in (squeezed, choose(job(), AQSGD, slow), choose(made, AQSGD, uniform(2, 1e9))):
            assert not any("tied" in text for text in advice(PlanResult(choice=other)))

    def test_layouts_and_shares(self):
        assert layouts(4, None, 12) == [(1, 4), (2, 2), (4, 1)]
        assert layouts(4, 2, 12) == [(2, 2)]
        assert layouts(6, None, 2) == [(1, 6), (2, 3)]
        assert divisible(layouts(3, None, 12), 32, None) == [(3, 1)]
        assert divisible(layouts(4, None, 12), 6, 3) == [(2, 2), (4, 1)]
        assert divisible([(1, 3)], 32, None) == [(1, 3)]
        with pytest.raises(ConfigError, match="divisor of 4"):
            layouts(4, 3, 12)
        with pytest.raises(ConfigError, match=r"stages: got 16, allowed: at most 12: the model has so many blocks$"):
            layouts(16, 16, 12)
        assert micro_batch_splits(12, 2, None) == [(6, 1), (3, 2), (2, 3), (1, 6)]
        assert micro_batch_splits(12, 2, 3) == [(3, 2)]
        with pytest.raises(ConfigError, match="batch"):
            micro_batch_splits(12, 2, 4)


def test_tables_have_the_predictions_numbers():
    network = LinkNetwork(forward=(Channel(bits_per_s=8e6, latency_s=0.02),), backward=(Channel(bits_per_s=1e6),))
    config = Config.from_dict({"activations": {"method": "aqsgd", "forward_bits": 3, "backward_bits": 6}})
    sizes = {"forward_bytes": (2000,), "first_visit_bytes": (3000,), "backward_bytes": (4000,)}
    p = replace(predict(job(), config, network), **sizes, step_s=1.0, first_epoch_s=2.5)
    plain = replace(predict(job(), Config(), network), forward_bytes=(10_000,), step_s=1.0, first_epoch_s=1.004)

    def rows(found):
        return list(zip(*(column.cells for column in found.columns), strict=True))

    links = ("0→1", "8 Mbit/s", "1 Mbit/s", "20 ms", "10.0", "3.0", "2.0", "4.0", "fw3 bw6")
    assert rows(link_table(network, p, plain)) == [links]
    assert rows(method_table([("plain", [plain]), ("AQ-SGD", [p])], ["lab"])) == [("plain", "1"), ("AQ-SGD", "1 (2.5)")]
    (forward_s, backward_s), _ = p.job.stage_seconds()
    first, _ = rows(stage_seconds_table(p))
    values, memory = p.job.plan.parameters[0] / 1e6, p.memory_bytes()[0] / 1e9
    told = (f"{values:.1f}", f"{1e3 * forward_s:.1f}", f"{1e3 * backward_s:.1f}", f"{memory:.2f}")
    assert first == ("0", f"0–{p.job.plan.cuts[1] - 1}", *told)
    assert forward_s != backward_s


def test_rates_of_the_command():
    assert parse_networks("100mbit, 1gbit", "20ms") == {
        "100 Mbit/s": ((1e8 * TCP_SHARE,), 0.02),
        "1 Gbit/s": ((1e9 * TCP_SHARE,), 0.02),
    }
    assert parse_networks("1gbit/ 100mbit", None) == {
        "1 Gbit/s/100 Mbit/s": ((1e9 * TCP_SHARE, 1e8 * TCP_SHARE), 0.0),
    }
    assert len(parse_networks(None, None)) == 5


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    config = {**llama(8, 256).to_dict(), "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_command(folder):
    """Given numbers: tables, a recommendation, and the same as JSON."""
    out = folder / "plan.json"
    arguments = ["--stages", "4", "--tokens", "64", "--micro-batch", "1", "--batch", "8", "--speed", "0.05"]
    arguments += ["--bandwidth", "10mbit,1gbit", "--delay", "1ms", "--json", str(out)]
    done = CliRunner().invoke(app, ["plan", "--model", str(folder / "model"), *arguments])
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert "Stages (estimated for 0.05 TFLOP/s)" in text
    assert "AQ-SGD fw2 bw4" in text
    assert "4 stages × 1 replica, 8 micro-batches of 1 for 8 samples per step, 64 tokens each." in text
    found = json.loads(out.read_text())
    assert found["cuts"][0] == 0
    assert found["cuts"][-1] == 8
    assert found["pays"]
    most = found["chosen"]["forward_bits"], found["chosen"]["backward_bits"]
    assert most == (2, 4), "10 Mbit/s are the limit"
    assert "Take AQ-SGD with changes both ways and at most 2 bits forward and 4 back (fewer in packets that" in text
    assert found["config"]["pipecomp"]["activations"] == {
        **{"method": "aqsgd", "forward_bits": 2, "backward_bits": {"error": 0.1, "min": 2, "max": 4}},
        **{"first_visit": {"error": 0.05}, "backward_first_visit": {"error": 0.1}, "backward_method": "delta"},
        "scale": "auto",
    }
    assert "scales of channels forward (unbiased) and channels back (unbiased)" in text
    assert len(found["methods"]) == 7 * 2
    at = {(row["name"], row["network"]): row["step_s"] for row in found["methods"]}
    assert at["AQ-SGD fw2 bw4", "10 Mbit/s"] < at["AQ-SGD fw4 bw8", "10 Mbit/s"] < at["none", "10 Mbit/s"]
    assert at["none", "1 Gbit/s"] < at["none", "10 Mbit/s"]
    Config.from_dict(found["config"]["pipecomp"])


def test_tied_weights_are_named_with_what_they_take(folder):
    """Their gradients cross the link in every step, whatever bits activations have; --gradients compresses them."""
    model = folder / "model" / "config.json"
    model.write_text(json.dumps({**json.loads(model.read_text()), "tie_word_embeddings": True}))
    weight = "model.embed_tokens.weight of stages 0 and 1 (0.2 MB in float32)"
    arguments = ["plan", "--model", str(model.parent), "--tokens", "64", "--batch", "8", "--stages", "2"]

    def told(*more: str) -> str:
        done = CliRunner().invoke(app, [*arguments, *more])
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    assert f"sum the gradients of tied weights in every step: {weight}" in told()
    out = folder / "plan.json"
    timed = ["--speed", "1", "--bandwidth", "1mbit", "--json", str(out)]
    plain = told(*timed, "--gradients", "none")
    assert f"are for the gradients of tied weights, which stages sum in every step: {weight}." in plain
    found = [json.loads(out.read_text())]
    assert "gradients" not in found[0]["config"]["pipecomp"]
    own = told(*timed)
    assert (
        f"double_squeeze with 8 bits for the gradients of tied weights, which stages sum in every step: {weight}."
        in own
    )
    found.append(json.loads(out.read_text()))
    assert found[1]["config"]["pipecomp"]["gradients"] == {"method": "double_squeeze", "bits": 8}
    Config.from_dict(found[1]["config"]["pipecomp"])
    took = [f"{each['chosen']['tied_s']:.3g} s" for each in found]
    assert f"That takes {took[1]} of the step instead of {took[0]}" in own
    told(*timed, "--gradients", "double_squeeze")
    found.append(json.loads(out.read_text()))
    assert found[2]["config"]["pipecomp"]["gradients"] == {"method": "double_squeeze"}
    for less, more in itertools.pairwise(reversed(found)):
        assert less["chosen"]["tied_s"] < more["chosen"]["tied_s"] / 1.8
        assert less["chosen"]["step_s"] < more["chosen"]["step_s"]
    assert "tied weights" not in told(*timed, "--no-tie")
    fast = told("--speed", "0.001", "--bandwidth", "10gbit", "--json", str(out))
    assert "tied weights" not in fast, "there they take little of a step"
    assert "gradients" not in json.loads(out.read_text())["config"]["pipecomp"]
    done = CliRunner().invoke(app, [*arguments, "--gradients", "topk"])
    assert "gradients: got 'topk', allowed: none, fp16, global_qsgd, double_squeeze" in " ".join(done.output.split())


@pytest.mark.parametrize(("gpu", "bits"), [(False, MIN_BITS_OF_CLASSIFIERS - 1), (True, MIN_BITS_OF_CLASSIFIERS)])
def test_on_gpus_changes_with_dropout_take_the_bits_of_tokens_scales(tmp_path, monkeypatch, gpu, bits):
    """Automatic scales are those of tokens there."""
    config = transformers.BertConfig(num_hidden_layers=4, hidden_size=64, num_attention_heads=2, vocab_size=256)
    config.architectures = ["BertForSequenceClassification"]
    config.save_pretrained(tmp_path)
    options = PlanOptions(model=str(tmp_path), stages=2, tokens=64, measure=True, bandwidth="1mbit")
    profile = count(*command.model_size(options)).estimated(1e12)
    survey = command.SurveyResult(profile=profile, speeds=MachineSpeeds())
    monkeypatch.setattr(command, "_survey", lambda *given: survey)
    monkeypatch.setattr(command, "computes_on_cpu", lambda: not gpu)
    plan = run_plan(Console(file=io.StringIO()), options)
    assert plan["config"]["pipecomp"]["activations"]["forward_bits"] == bits


def test_with_dropout_no_fewer_bits_are_proposed_than_its_changes_take(tmp_path):
    """Masks are new at each visit; cluster centers do not know them. Two bits do for a decoder."""
    arguments = ["plan", "--model", str(tmp_path), "--tokens", "64", "--stages", "2", "--speed", "1", "--json"]
    arguments += [str(tmp_path / "plan.json"), "--bandwidth", "1mbit"]

    def told(dropout: float, *more: str) -> tuple[object, bool]:
        config = transformers.BertConfig(num_hidden_layers=4, hidden_size=64, num_attention_heads=2, vocab_size=256)
        config.hidden_dropout_prob, config.attention_probs_dropout_prob = dropout, 0.0
        config.architectures = ["BertForSequenceClassification"]
        if "--decoder" in more:
            config = transformers.GPT2Config(n_layer=4, n_embd=64, n_head=2, vocab_size=256, resid_pdrop=dropout)
            config.architectures = ["GPT2LMHeadModel"]
            more = ()
        config.save_pretrained(tmp_path)
        done = CliRunner().invoke(app, [*arguments, *more])
        assert done.exit_code == 0, done.output
        section = json.loads((tmp_path / "plan.json").read_text())["config"]["pipecomp"]
        bits = section.get("activations", {}).get("forward_bits")
        return bits, "fewer than 3 bits forward may cost" in " ".join(done.output.split())

    assert told(0.0) == (2, False)
    assert told(0.1) == (3, True)
    assert told(0.1, "--decoder") == (2, False)
    assert told(0.1, "--dropout", "0") == (2, False)
    assert told(0.0, "--dropout", "0.1") == (3, True)
    assert told(0.1, "--one-pass") == (2, False)
    assert told(0.1, "--bandwidth", "10gbit", "--speed", "0.0001") == (None, False)


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification"])
def test_an_encoder_counts_as_a_classifier(head):
    """Those of the hub are named after the task that they were pre-trained for."""
    config = transformers.BertConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=32)
    model = getattr(transformers, f"Bert{head}")(config)
    assert fewest_bits(model, AQSGD) == MIN_BITS_OF_CLASSIFIERS
    assert fewest_bits(model, AQSGD, 0.0) == 2


def test_gradients_are_sent_themselves_where_the_disk_is_the_limit(folder):
    """As changes they are stored, too."""
    found = choose(job(M=64), CHANGES, uniform(2, 21e6), MachineSpeeds(disk_bytes_s=1e9))
    assert found.prediction.config.activations.backward_method == "delta"
    slow = [choose(job(M=64), made, uniform(2, 1e6), MachineSpeeds(disk_bytes_s=2e5)) for made in (CHANGES, AQSGD)]
    assert slow[0].prediction.step_s == slow[1].prediction.step_s == slow[0].prediction.store_s
    section = configuration(slow[0])["pipecomp"]["activations"]
    assert "backward_method" not in section
    Config.from_dict({"activations": section})
    assert "AQ-SGD with changes forward and at most" in " ".join(advice(PlanResult(choice=slow[0])))
    out = folder / "plan.json"
    given = ["plan", "--model", str(folder / "model"), "--stages", "2", "--bandwidth", "10kbit", "--json", str(out)]
    assert CliRunner().invoke(app, [*given, "--tokens", "64", "--speed", "1"]).exit_code == 0
    noted = json.loads(out.read_text())
    noted["speeds"]["disk_bytes_s"] = 3e3
    out.write_text(json.dumps(noted))
    done = CliRunner().invoke(app, [*given, "--profile", str(out)])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert "the limit is the message store's disk. " in " ".join(done.output.split()), done.output
    rows = {row["name"]: row["step_s"] for row in found["methods"]}
    chosen = found["chosen"]
    name = f"AQ-SGD fw{chosen['forward_bits']} bw{chosen['backward_bits']}"
    assert rows[name] == chosen["step_s"] == chosen["store_s"], "the table has what is taken"


def test_bits_of_a_plan_are_the_most_of_an_error():
    assert constant_error_bits("forward_bits", 8) == ConstantError(error=0.025)
    assert constant_error_bits("forward_bits", 3) == ConstantError(error=0.05, max=3)
    assert constant_error_bits("backward_bits", (8, 6, 2)) == (
        ConstantError(error=0.05),
        ConstantError(error=0.1, max=6),
        2,
    )
    assert constant_error_bits("forward_bits", (8, 3, 4), 3) == (
        ConstantError(error=0.025, min=3),
        3,
        ConstantError(error=0.025, min=3, max=4),
    )


def test_first_visits_keep_the_error_of_the_slowest_link():
    def made(forward, backward):
        a = aqsgd_sections(
            constant_error_bits("forward_bits", forward), constant_error_bits("backward_bits", backward), one_pass=False
        )
        return [a["activations"][key]["error"] for key in ("first_visit", "backward_first_visit")]

    assert made(8, 8) == [0.025, 0.05]
    assert made((8, 2), (8, 4)) == made((8, 3), (8, 6)) == made(2, 4) == [0.05, 0.1]
    assert made(4, 8) == [0.05, 0.05], "first visits may take more bits than links hide"


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_configuration_has_the_precision_that_was_planned(folder, dtype):
    out = folder / "plan.json"
    arguments = ["plan", "--model", str(folder / "model"), "--tokens", "64", "--stages", "2", "--speed", "1"]
    assert CliRunner().invoke(app, [*arguments, "--dtype", dtype, "--json", str(out)]).exit_code == 0
    config = json.loads(out.read_text())["config"]
    check_precision(config)
    assert [name for name in ("bf16", "fp16") if config.get(name) == {"enabled": True}] == [dtype] * (dtype != "fp32")
    assert config.get("zero_optimization") == (None if dtype == "fp32" else {"stage": 1})
    assert config.get("data_types") == ({"grad_accum_dtype": "fp32"} if dtype == "bf16" else None)


def test_replicas_of_a_whole_model_average_over_the_network(folder):
    """One stage on each node: all gradients cross the links in every step, which is worth local steps."""
    out = folder / "plan.json"
    arguments = ["plan", "--model", str(folder / "model"), "--tokens", "64", "--batch", "8", "--speed", "1"]
    arguments += ["--nodes", "4", "--bandwidth", "10mbit", "--delay", "20ms", "--json", str(out)]
    done = CliRunner().invoke(app, [*arguments, "--stages", "1"])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    bits = 32 * sum(found["parameters"])
    averages = {each["method"]: each["seconds"] for each in found["averages"]}
    assert averages["none"] > bits / 1e7, "a ring of four sends 1.5 times as much"
    method = found["config"]["pipecomp"]["gradients"]["method"]
    assert found["chosen"]["average_s"] == averages[method] == min(averages.values()), "of what is recommended"
    assert all(row["average_s"] == averages[method] for row in found["methods"])
    assert f"gradients by {method}" in " ".join(done.output.split())
    assert "With gradients.local_steps 32 replicas average after every 32 steps only" in " ".join(done.output.split())
    half = CliRunner().invoke(app, [*arguments, "--stages", "1", "--dtype", "bf16"])
    assert half.exit_code == 0, half.output
    assert "local_steps" not in half.output, "DeepSpeed's optimizers for it share their states among replicas"
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert json.loads(out.read_text())["chosen"]["stages"] > 1, "fewer bytes cross the links between stages"


def test_a_profile_is_of_the_precision_that_it_was_measured_in(folder):
    out = folder / "plan.json"
    given = ["plan", "--model", str(folder / "model"), "--stages", "2"]
    measured = [*given, "--tokens", "16", "--speed", "1", "--dtype", "bf16", "--json", str(out)]
    assert CliRunner().invoke(app, measured).exit_code == 0
    assert CliRunner().invoke(app, [*given, "--profile", str(out), "--dtype", "bf16"]).exit_code == 0
    other = CliRunner().invoke(app, [*given, "--profile", str(out)])
    assert other.exit_code == 1
    assert "dtype: got 'fp32', allowed: bf16. The profile" in " ".join(other.output.split())
    other = CliRunner().invoke(app, [*given, "--profile", str(out), "--dtype", "bf16", "--one-pass"])
    assert "one-pass: got True, allowed: False. The profile" in " ".join(other.output.split())


def test_the_command_recomputes(folder):
    def memory(*more):
        out = folder / "plan.json"
        arguments = ["plan", "--model", str(folder / "model"), "--tokens", "64", "--speed", "0.05", "--stages", "2"]
        done = CliRunner().invoke(app, [*arguments, "--micro-batch", "4", "--json", str(out), *more])
        assert done.exit_code == 0, done.output
        return json.loads(out.read_text())["plain"]

    plain, again = memory(), memory("--recompute")
    assert again["step_s"] > plain["step_s"]
    assert all(less < more for less, more in zip(again["memory_bytes"], plain["memory_bytes"], strict=True))


def test_where_no_sample_comes_back_changes_build_on_cluster_centers(folder):
    out = folder / "plan.json"
    arguments = ["plan", "--model", str(folder / "model"), "--tokens", "64", "--speed", "1", "--stages", "2"]
    arguments += ["--bandwidth", "1mbit", "--json", str(out), "--one-pass"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert "as changes from 256 cluster centers, since no sample is seen twice" in " ".join(done.output.split())
    assert found["chosen"]["first_epoch_s"] == found["chosen"]["step_s"], "no packet is a first visit"
    section = found["config"]["pipecomp"]
    assert section["store"] == {"clusters": 256, "in_checkpoints": True}
    assert Config.from_dict(section).activations.method == "aqsgd"


def test_a_number_of_stages_is_found_where_the_batch_cannot_be_divided_among_all_replicas(folder):
    done = CliRunner().invoke(app, ["plan", "--model", str(folder / "model"), "--nodes", "3", "--speed", "1"])
    assert done.exit_code == 0, done.output
    assert "3 stages × 1 replica" in " ".join(done.output.split())


@pytest.mark.parametrize(("size", "told"), [(12.34, 13.0), (0.00123, 0.0013), (97.0, 97.0), (99.5, 100.0), (1e4, 1e4)])
def test_memory_that_is_asked_for_is_enough(size, told):
    assert round_up(size) == told >= size


def test_a_profile_keeps_what_machines_do_besides_the_model(folder):
    out, again = folder / "plan.json", folder / "again.json"
    given = ["plan", "--model", str(folder / "model"), "--stages", "4", "--bandwidth", "10mbit"]
    assert CliRunner().invoke(app, [*given, "--tokens", "16", "--speed", "1", "--json", str(out)]).exit_code == 0
    found = json.loads(out.read_text())
    assert found["speeds"]["encode_values_s"] is None
    found["speeds"] |= {"encode_values_s": 1e4, "average": {}}  # slow enough to be seen
    out.write_text(json.dumps(found))
    done = CliRunner().invoke(app, [*given, "--profile", str(out), "--json", str(again)])
    assert done.exit_code == 0, done.output
    planned = json.loads(again.read_text())
    assert planned["speeds"] == found["speeds"]
    assert planned["methods"][-1]["step_s"] > 2 * found["methods"][-1]["step_s"]
    found["speeds"] = {"encode": 1}
    out.write_text(json.dumps(found))
    done = CliRunner().invoke(app, [*given, "--profile", str(out)])
    assert done.exit_code == 1
    assert "allowed: a file from pipecomp plan" in " ".join(done.output.split())


def test_links_and_machines_that_differ(folder):
    out = folder / "plan.json"
    arguments = ["plan", "--model", str(folder / "model"), "--tokens", "64", "--micro-batch", "1", "--batch", "8"]
    more = ["--speed", "0.05/0.01/0.05", "--bandwidth", "1gbit/1mbit", "--json", str(out)]
    done = CliRunner().invoke(app, [*arguments, *more])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert len(found["cuts"]) == 4
    blocks = [hi - lo for lo, hi in pairwise(found["cuts"])]
    assert blocks[1] < min(blocks[0], blocks[2])
    assert [round(link["forward"]["bits_per_s"] / TCP_SHARE) for link in found["links"]] == [10**9, 10**6]
    assert found["bits"][0] == [8, 8]
    assert found["bits"][1][0] < 8
    section = Config.from_dict(found["config"]["pipecomp"])
    assert section.activations.forward_bits == constant_error_bits("forward_bits", tuple(f for f, _ in found["bits"]))
    assert section.activations.backward_bits == constant_error_bits("backward_bits", tuple(b for _, b in found["bits"]))


class TestWithoutASpeed:
    """`--model` and `--stages` alone: what depends on neither speed nor network."""

    @pytest.fixture
    def planned(self, folder):
        """Return a function that runs the command with more arguments, for its output and file."""

        def run(*more):
            out = folder / "plan.json"
            arguments = ("--model", str(folder / "model"), "--tokens", "64", "--batch", "8", "--json", str(out))
            done = CliRunner().invoke(app, ["plan", *arguments, *more])
            assert done.exit_code == 0, done.output
            return " ".join(done.output.split()), json.loads(out.read_text())

        return run

    @pytest.mark.parametrize("more", [(), ("--micro-batch", "4", "--dtype", "bf16", "--nodes", "8")], ids=["", "more"])
    def test_cuts_memory_and_bytes_are_those_of_a_whole_plan(self, planned, more):
        text, found = planned("--stages", "4", *more)
        # So slow that no stage has to run further ahead than 1F1B does.
        slow = ("--speed", "0.0001", "--bandwidth", "10gbit", "--micro-batch", "1", "--gradients", "none")
        _, whole = planned("--stages", "4", *slow, *more)
        assert found["cuts"] == whole["cuts"]
        assert found["parameters"] == whole["parameters"]
        for key in ("replicas", "micro_batch", "micro_batches", "in_flight", "memory_bytes"):
            assert found[key] == whole["plain"][key], key
        rows = {row["name"]: row for row in whole["methods"]}
        assert [row["name"] for row in found["methods"]] == list(rows)
        for row in found["methods"]:
            assert all(len(row[key]) == 3 for key in row if key != "name")
            assert all(row[key] == rows[row["name"]][key] for key in row), row["name"]
        assert f"AQ-SGD fw2 bw4 │ {rows['AQ-SGD fw2 bw4']['first_visit_bytes'][0] / 1e3:.1f} │" in text
        columns = (pairwise(found["cuts"]), found["parameters"], found["in_flight"], found["memory_bytes"])
        for (lo, hi), parameters, flying, memory in zip(*columns, strict=True):
            assert f"│ {lo}–{hi - 1} │ {parameters / 1e6:.1f} │ {flying} │ {memory / 1e9:.2f} │" in text

    def test_a_bandwidth_alone_predicts_nothing(self, planned):
        text, found = planned("--bandwidth", "1gbit/100mbit/1gbit", "--delay", "1ms")
        assert "4 stages × 1 replica, 8 micro-batches of 1 for 8 samples per step, 64 tokens each." in text
        assert text.endswith("give --speed (or --profile, or --measure) and --bandwidth.")
        assert not {"stage_s", "bits", "chosen", "plain", "config", "profile"} & set(found)
        assert not any(word in text for word in ("seconds", " ms", "train_micro_batch_size_per_gpu"))

    def test_one_stage_has_no_links(self, planned):
        text, found = planned("--stages", "1")
        assert [row["name"] for row in found["methods"]] == ["none"]
        assert "per micro-batch" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stages", "3", "--bandwidth", "1gbit/1gbit/1gbit"), "one rate, or 2 for 3 stages"),
        (("--stages", "2", "--recompute"), "recompute: got True, allowed: no value without --speed"),
        (("--stages", "2", "--one-pass"), "one-pass: got True, allowed: no value without --speed"),
        (
            ("--stages", "2", "--memory", "0.001"),
            "memory: got 0.001, allowed: at least 0.56 GB for each node.",
        ),
        (("--stages", "9"), "stages: got 9, allowed: at most 8: the model has so many blocks"),
        (("--speed", "1/2", "--nodes", "3"), "speed: got '1/2', allowed: one number, or one for each of 3 nodes"),
        (("--speed", "1/fast"), "speed: got '1/fast', allowed: numbers above 0"),
        (
            ("--speed", "1", "--bandwidth", "1gbit/1gbit,1gbit/1gbit/1gbit"),
            "bandwidth: got '1gbit/1gbit,1gbit/1gbit/1gbit', allowed: one rate, or 2 for 3 stages",
        ),
        (
            ("--speed", "1", "--nodes", "2", "--bandwidth", "1gbit,1gbit/1gbit"),
            "bandwidth: got '1gbit,1gbit/1gbit', allowed: one rate; --stages says how many links there are",
        ),
        ((), "speed: got None, allowed: TFLOP/s"),
        (("--speed", "1", "--bandwidth", "fast"), "bandwidth: got 'fast', allowed: a number and bit"),
        (("--speed", "1", "--nodes", "3", "--stages", "2"), "stages: got 2, allowed: a divisor of 3 nodes"),
    ],
)
def test_errors_are_one_line(folder, arguments, message):
    done = CliRunner().invoke(app, ["plan", "--model", str(folder / "model"), "--tokens", "16", *arguments])
    assert done.exit_code == 1
    assert message in " ".join(done.output.split())
    assert "Traceback" not in done.output


@pytest.mark.parametrize(("option", "share"), [("load_in_4bit", 0.26), ("load_in_8bit", 0.504)])
def test_memory_of_quantized_weights(option: str, share: float, tmp_path: Path) -> None:
    """From the config alone; --lora without bits has them in the training precision."""
    from transformers import LlamaConfig

    pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 128}
    LlamaConfig(**sizes, num_attention_heads=4, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    given = {"model": str(tmp_path), "stages": 2, "lora": 4, "dtype": "bf16", "tokens": 16, "batch": 1}
    rows = [run_plan(Console(quiet=True), PlanOptions(**given, **more)) for more in ({}, {option: True})]
    plain, quantized = (max(row["memory_bytes"]) for row in rows if row is not None)
    assert plain - quantized == pytest.approx((1 - share) * 2 * 2 * (4 * 512 * 512 + 3 * 512 * 1024), rel=0.02)
    with pytest.raises(ConfigError, match=r"--load-in-.bit.*only with LoRA"):
        PlanOptions(**given | {"lora": None}, **{option: True})
