"""The simulation of a step: schedules worked out by hand, the engine's own instructions, the paper's tables."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from pipecomp.engine.schedule import TrainSchedule
from pipecomp.errors import ConfigError
from pipecomp.plan.simulation import (
    ACKNOWLEDGED,
    Channel,
    LinkNetwork,
    SharedCores,
    StageCosts,
    StepSpec,
    active_rates,
    measured_costs,
    simulate_step,
    uniform,
)
from pipecomp.schedule import in_flight_counts

FREE = math.inf


def step(K, M, C_f=1.0, C_b=2.0, V_f=0.0, V_b=0.0, slack=1, **more):
    """All stages and links alike."""
    stages = [StageCosts(forward_s=C_f, backward_s=C_b, **more)] * K
    return StepSpec(
        stages=stages,
        micro_batches=M,
        forward_bytes=[V_f] * (K - 1),
        backward_bytes=[V_b] * (K - 1),
        in_flight=in_flight_counts(slack, K, M),
    )


def seconds(made, bits_per_s=FREE, latency_s=0.0, shared=True):
    return simulate_step(made, uniform(len(made.stages), bits_per_s, latency_s, shared=shared)).seconds


class TestByHand:
    """K stages, M micro-batches, forward 1 s, backward 2 s."""

    @pytest.mark.parametrize(("K", "M"), [(1, 1), (1, 5), (2, 2), (2, 9), (4, 4), (4, 32), (8, 3)])
    def test_without_a_network_it_is_1f1b(self, K, M):
        assert seconds(step(K, M)) == pytest.approx((M + K - 1) * 3)

    @pytest.mark.parametrize("slack", [1, 2, 3])
    def test_running_ahead_costs_nothing(self, slack):
        assert seconds(step(4, 16, slack=slack)) == pytest.approx(19 * 3)

    def test_one_micro_batch_crosses_each_link_twice(self):
        """Forward 4 × 1, back 4 × 2, three links of 0.5 s (1 byte at 16 bits a second) plus 0.25 s on each way."""
        assert seconds(step(4, 1, V_f=1, V_b=2), 16, 0.25) == pytest.approx(12 + 3 * (0.5 + 0.25) + 3 * (1 + 0.25))

    def test_two_stages_two_micro_batches(self):
        """T = 1 s each way, two in flight.

        Stage 0: F0 0-1, F1 1-2; messages 1-2, 2-3. Stage 1: F0 2-3, B0 3-5, F1 5-6, B1 6-8. Gradients 5-6, 8-9.
        Stage 0: B0 6-8, B1 9-11.
        """
        played = simulate_step(step(2, 2, V_f=1, V_b=1), uniform(2, 8))
        assert played.seconds == pytest.approx(11)
        found = {(e.place, e.what, e.micro_batch): (e.start, e.end) for e in played.events}
        assert found[0, "forward", 1] == (1, 2)
        assert found[0, "forward packet", 1] == (2, 3)
        assert found[1, "backward", 0] == (3, 5)
        assert found[0, "backward packet", 1] == (8, 9)
        assert found[0, "wait", 0] == (2, 6)
        assert played.waits == pytest.approx((4 + 1, 2))

    def test_messages_queue_on_a_slow_link(self):
        """T = 5 s forward, nothing back: the second message leaves at 6, is there at 11; F1 11-12, B1 12-14, 14-16."""
        assert seconds(step(2, 2, V_f=5), 8) == pytest.approx(16)

    def test_encoding_and_decoding_take_the_stage(self):
        """One micro-batch: 1 + 0.5 encode, 0.25 decode + 1 + 2 + 0.5, 0.25 + 2; then 3 to reduce and 1 to update."""
        made = step(2, 1, encode_s=0.5, decode_s=0.25, reduce_s=3.0, update_s=1.0)
        assert seconds(made) == pytest.approx(7.5 + 3 + 1)

    def test_the_slowest_stage_ends_the_step(self):
        stages = [StageCosts(forward_s=1, backward_s=2), StageCosts(forward_s=1, backward_s=2, reduce_s=5, update_s=2)]
        made = StepSpec(stages=stages, micro_batches=1, forward_bytes=[0], backward_bytes=[0], together_s=0.5)
        assert seconds(made) == pytest.approx(1 + 1 + 2 + 5 + 0.5 + 2)  # while stage 0 does its backward

    @pytest.mark.parametrize(("T", "slack", "each"), [(0.9, 1, 3 + 0.9), (0.9, 2, 3), (5.0, 9, 5 / ACKNOWLEDGED)])
    def test_steady_state_of_two_stages(self, T, slack, each):
        """c + T with two micro-batches in flight, max(c, T) with more; T one way, both ways alike."""
        assert seconds(step(2, 200, V_f=T, V_b=T, slack=slack), 8) / 200 == pytest.approx(each, rel=0.03)


def test_measured_costs_are_of_a_micro_batch_and_of_a_packet():
    """Costs of a stage in the middle, with packets on two links."""
    seconds = {"forward": 6.0, "backward": 12.0, "encode": 2.4, "decode": 4.8}
    found = measured_costs({"seconds": seconds, "steps": 2, "links": {"0->1": {}, "1->2": {}}}, micro_batches=3)
    assert found == StageCosts(forward_s=1.0, backward_s=2.0, encode_s=pytest.approx(0.2), decode_s=pytest.approx(0.4))


class TestNetwork:
    def test_lines_are_shared_by_both_neighbours(self):
        """The middle of three stages sends forward and back at once: each has half of its line."""
        net = uniform(3, 100.0)
        assert active_rates(net, [("forward", 1), ("backward", 0)]) == [50.0, 50.0]
        assert active_rates(net, [("forward", 0), ("backward", 0)]) == [100 * ACKNOWLEDGED] * 2
        assert active_rates(net, [("forward", 0), ("backward", 1)]) == [50.0, 50.0]  # what it receives
        apart = uniform(3, 100.0, shared=False)
        assert active_rates(apart, [("forward", 1), ("backward", 0)]) == [100.0, 100.0]
        assert active_rates(apart, [("forward", 0), ("backward", 0), ("backward", 1)]) == [
            *[100 * ACKNOWLEDGED] * 2,
            100.0,
        ]

    def test_acknowledgements(self):
        """Sockets between two shaped namespaces, both directions full, at 6 and at 36 Mbit/s: 0.953 of one alone."""
        assert pytest.approx(0.953, abs=0.006) == ACKNOWLEDGED

    def test_a_slow_link_leaves_the_rest_to_the_other(self):
        lines = (Channel(bits_per_s=100.0), Channel(bits_per_s=10.0))
        net = LinkNetwork(forward=lines, backward=lines)
        assert active_rates(net, [("forward", 1), ("backward", 0)]) == [10.0, 90.0]

    def test_sharing_takes_longer(self):
        """K = 3: in the steady state a middle stage sends 2 messages of 3 s for each micro-batch."""
        made = step(3, 100, V_f=3, V_b=3, slack=4)
        assert 6 < seconds(made, 8) / 100 < 6.8
        assert 3 < seconds(made, 8, shared=False) / 100 < 3.6

    def test_directions_differ(self):
        net = LinkNetwork(forward=(Channel(bits_per_s=8),), backward=(Channel(bits_per_s=80, latency_s=1.0),))
        assert simulate_step(step(2, 1, V_f=10, V_b=10), net).seconds == pytest.approx(6 + 10 + 1 + 1)

    @pytest.mark.parametrize("wrong", [{"bits_per_s": 0.0}, {"bits_per_s": -1.0}, {"latency_s": -0.1}])
    def test_wrong_lines(self, wrong):
        with pytest.raises(ConfigError):
            Channel(**wrong)

    def test_stages_that_train_nothing_have_no_backward_and_get_no_gradients(self):
        """Stage 0 computes 1 s a micro-batch, stage 1 3 s; a packet takes 2 s there and none comes back."""
        frozen, trained = StageCosts(forward_s=1.0, backward_s=0.0), StageCosts(forward_s=1.0, backward_s=2.0)
        made = StepSpec(
            stages=[frozen, trained], micro_batches=5, forward_bytes=[2], backward_bytes=[0], lowest=1, in_flight=[1, 1]
        )
        played = simulate_step(made, uniform(2, 8))
        assert played.seconds == pytest.approx(1 + 2 + 5 * 3)
        assert not [e for e in played.events if "gradient" in e.what or e.what == "backward packet"]
        assert {e.place for e in played.events if e.what == "backward"} == {1}

    def test_stages_that_share_a_core_compute_one_after_the_other(self):
        """Over free links some stage always has work: a step takes the work of all stages."""
        made = step(3, 4)
        alone = simulate_step(made, uniform(3, math.inf)).seconds
        work = sum(4 * (costs.forward_s + costs.backward_s) for costs in made.stages)
        for at_once, least in ((1.0, work), (2.0, max(alone, work / 2)), (3.0, alone)):
            shared = replace(made, shared_cores=(SharedCores(members=(0, 1, 2), at_once=at_once),))
            found = simulate_step(shared, uniform(3, math.inf)).seconds
            assert least - 1e-9 <= found <= work + 1e-9
            assert at_once == 2.0 or found == pytest.approx(least)

    def test_only_stages_that_share_cores_wait_for_each_other(self):
        made = step(2, 1)
        shared = SharedCores(members=(1,), at_once=0.5)  # other processes have the other half
        found = simulate_step(replace(made, shared_cores=(shared,)), uniform(2, math.inf)).seconds
        costs = made.stages
        assert found == pytest.approx(sum((1 + k) * (c.forward_s + c.backward_s) for k, c in enumerate(costs)))

    def test_wrong_steps(self):
        with pytest.raises(ConfigError, match="links"):
            simulate_step(step(3, 2), uniform(2, 1.0))
        with pytest.raises(ConfigError, match="forward_bytes"):
            StepSpec(stages=step(2, 1).stages, micro_batches=1, forward_bytes=[], backward_bytes=[1])


@pytest.mark.parametrize("slack", [1, 2, 4])
@pytest.mark.parametrize(("K", "M"), [(1, 3), (2, 1), (3, 6), (4, 2), (5, 11)])
def test_what_is_played_is_what_the_engine_runs(K, M, slack):
    """Stage by stage the same instructions on the same micro-batches in the same order."""
    played = simulate_step(step(K, M, V_f=3, V_b=7, slack=slack), uniform(K, 8, 0.1))
    names = {
        "RecvActivation": "receive activation",
        "LoadMicroBatch": "load",
        "ForwardPass": "forward",
        "SendActivation": "send activation",
        "RecvGrad": "receive gradient",
        "BackwardPass": "backward",
        "SendGrad": "send gradient",
    }
    for k in range(K):
        schedule = TrainSchedule(M, K, k, in_flight_counts(slack, K, M)[k])
        wanted, backwards = [], 0
        for instruction in (i for works in schedule.steps() for i in works):
            name = names.get(type(instruction).__name__)
            if name == "backward":
                wanted.append((name, backwards))
                backwards += 1
            elif name is not None:
                wanted.append((name, instruction.micro_batch))
        ours = [e for e in played.events if e.place == k and e.what in names.values()]
        assert [(e.what, e.micro_batch) for e in ours] == wanted
        assert all(a.end <= b.start for a, b in pairwise(ours))


@pytest.mark.parametrize("K", [2, 3, 5])
def test_links_are_hidden_with_enough_in_flight(K):
    """2.8 s there and 3.2 s back for 3 s of compute: with 1F1B's number a stage waits for each micro-batch."""
    M = 60
    found = [seconds(step(K, M, V_f=2.6, V_b=3, slack=slack), 8, 0.2, shared=False) / M for slack in (1, 2, 3, 4)]
    assert found[0] > 1.7 * found[2]
    assert found[2] == pytest.approx(3, rel=0.05 * K + 0.1)


def test_equal_numbers_on_neighbours_would_stall():
    """`numbers` falls from stage to stage: a forward would wait for a neighbour's that waits for a backward."""
    falling, equal = (
        StepSpec(
            stages=[StageCosts(forward_s=1, backward_s=2)] * 4,
            micro_batches=32,
            forward_bytes=[0] * 3,
            backward_bytes=[0] * 3,
            in_flight=ahead,
        )
        for ahead in ([7, 5, 3, 1], [7, 7, 7, 1])
    )
    assert seconds(equal) > 2 * seconds(falling)


# arXiv:2206.01299 (AQ-SGD), Table 2, and with the same numbers Table 5, GPT2-1.5B on WikiText2: sequences a second of
# FP32, then of AQ-SGD and DirectQ with fw3 bw6 and with fw4 bw8. Eight stages, 32 micro-batches of 1 × 1,024 × 1,600.
TABLE_2 = {
    10_000: (3.8, (4.0, 4.0), (4.0, 4.1)),
    1_000: (3.2, (4.0, 4.0), (3.9, 4.0)),
    500: (2.7, (3.9, 3.9), (3.9, 3.9)),
    300: (1.8, (3.8, 3.9), (3.8, 3.8)),
    100: (0.5, (3.4, 3.5), (3.0, 3.0)),
}
# Table 5, DeBERTa-1.5B on QNLI: FP32, AQ-SGD and DirectQ with fw2 bw4 and with fw3 bw6.
# 8 micro-batches of 8 × 256 × 1,536.
TABLE_5 = {
    10_000: (12.9, (13.6, 13.6), (13.5, 13.6)),
    1_000: (9.6, (13.3, 13.3), (13.0, 13.1)),
    500: (6.2, (12.9, 13.0), (12.5, 12.6)),
    300: (4.4, (12.4, 12.5), (11.8, 11.9)),
    100: (1.6, (10.6, 10.7), (9.1, 9.4)),
}
MBIT = 2**20  # Table 3's times are those of 2^20 bits for a Mbit


def sequences_a_second(K, M, samples, C, update_s, values, bits, mbit):
    """All micro-batches in flight, as the paper's own code runs them; one network card for each stage."""
    sizes = [values * b / 8 + (0 if b == 32 else 4 * values / 1600) for b in bits]
    made = StepSpec(
        stages=[StageCosts(forward_s=C / 4, backward_s=3 * C / 4)] * K,
        micro_batches=M,
        together_s=update_s,
        forward_bytes=[sizes[0]] * (K - 1),
        backward_bytes=[sizes[1]] * (K - 1),
        in_flight=in_flight_counts(M, K, M),
    )
    return samples / seconds(made, mbit * MBIT)


def test_table_3_of_the_paper():
    """Milliseconds on the link of fw4 bw8, forward and backward, to the rounding of the table."""
    for mbit, forward, backward in ((500, 13, 25), (300, 21, 42), (200, 31, 63), (100, 63, 125)):
        line = Channel(bits_per_s=mbit * MBIT)
        assert 1e3 * line.seconds(1024 * 1600 * 4 / 8) == pytest.approx(forward, abs=0.55)
        assert 1e3 * line.seconds(1024 * 1600 * 8 / 8) == pytest.approx(backward, abs=0.55)


def report(table, bits, **model):
    """Predicted over measured, less 1: (all quantized cells, the FP32 cells)."""
    quantized, plain = [], []
    for mbit, (fp32, *rest) in table.items():
        plain.append(sequences_a_second(**model, bits=(32, 32), mbit=mbit) / fp32 - 1)
        for pair, cells in zip(bits, rest, strict=True):
            found = sequences_a_second(**model, bits=pair, mbit=mbit)
            quantized += [found / cell - 1 for cell in cells]
    return quantized, plain


UPDATE_S = 32 / 4.05 - (32 + 8 - 1) * 0.18
"""GPT2-1.5B: the time of the quantized runs at 10 Gbit/s (4.0 and 4.1 a second) beyond Table 3's 45 + 135 ms."""


def test_table_2_of_the_paper():
    """One number is fitted, UPDATE_S. Quantized runs are within 8 %, the 17 cells from 300 Mbit/s on within 3 %.

    FP32 is within 20 %, at 100 Mbit/s as exactly as "0.5" says: its rounding alone is 10 %.
    """
    values, bits = 1024 * 1600, ((3, 6), (4, 8))
    model = {"K": 8, "M": 32, "samples": 32, "C": 0.18, "update_s": UPDATE_S, "values": values}
    quantized, plain = report(TABLE_2, bits, **model)
    assert max(map(abs, quantized)) < 0.08
    assert max(map(abs, quantized[:-4])) < 0.03
    assert max(map(abs, plain)) < 0.20


def test_table_5_of_the_paper():
    """The paper gives no times for DeBERTa: its compute is fitted to 13.6 a second at 10 Gbit/s, with the same share of
    it for the update as GPT2-1.5B. Quantized runs are then within 10 %, within 4 % from 300 Mbit/s on; FP32 within 30
    %: it was measured slower than this network allows at every bandwidth.
    """
    share = UPDATE_S / (32 / 4.05)
    whole = 64 / 13.6
    model = {"K": 8, "M": 8, "samples": 64, "C": whole * (1 - share) / 15, "update_s": whole * share}
    quantized, plain = report(TABLE_5, ((2, 4), (3, 6)), values=8 * 256 * 1536, **model)
    assert max(map(abs, quantized)) < 0.10
    assert max(map(abs, quantized[:-4])) < 0.04
    assert max(map(abs, plain)) < 0.30
    assert min(plain) > 0
