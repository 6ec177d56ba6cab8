"""Predicted bytes are those that states count; predicted seconds are those of cases worked out by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.clusters import GBIT, NETWORKS, papers_model, this_projects
from pipecomp.allreduce import Prediction, State, allreduce_mean, compression_pays, predict
from pipecomp.allreduce.loopback import LoopbackGroup, run_threads
from pipecomp.errors import ConfigError

Options = dict[str, Any]

EXACT: list[Options] = [
    {"method": "none"},
    {"method": "global_qsgd", "bits": 8},
    {"method": "global_qsgd", "bits": 4},
    {"method": "global_qsgd", "levels": "linear", "bits": 3, "norm": [3, 1.5]},
    {"method": "global_qsgd", "levels": "linear", "bits": 8},
    {"method": "qsgd_mn", "bits": 6},
    {"method": "qsgd_mn_ts", "bits": [4, 8]},
    {"method": "qsgd_mn_ts", "bits": [2, 4, 6, 12]},
    {"method": "grandk_mn", "k": 0.25, "rescale": True},
    {"method": "grandk_mn", "k": 100},
    {"method": "grandk_mn_ts", "k": 0.1, "error_feedback": True},
    {"method": "grandk_mn", "k": 0.25, "norm": "inf"},
    {"method": "qsgd", "bits": 5},
    {"method": "terngrad"},
    {"method": "nuqsgd", "bits": 4},
    {"method": "double_squeeze", "bits": 4, "group_size": 64},
    {"method": "double_squeeze", "bits": 1},
]
SPARSE: list[Options] = [
    {"method": "global_qsgd", "sparse": True},
    {"method": "global_qsgd", "sparse": True, "levels": "linear"},
    {"method": "global_qsgd", "sparse": True, "levels": "linear", "bits": 4},
]
PIECE = 1 << 20  # values; as many bytes at 8 bits


def name(options: Options) -> str:
    return " ".join(str(v) for v in options.values())


def gradients(n: int, d: int, *, equal: bool = False) -> list[Tensor]:
    draw = torch.Generator().manual_seed(d)
    found = [torch.randn(d, generator=draw) for _ in range(n)]
    return [g.sign() for g in found] if equal else found


def counted(options: Options, inputs: list[Tensor], *, calls: int = 1) -> list[dict[str, Any]]:
    """Return the counters of each rank's state over `calls` calls."""

    def work(group: LoopbackGroup) -> dict[str, Any]:
        state = State(group=group, **options)
        for _ in range(calls):
            allreduce_mean(state, inputs[group.rank])
        state.close()
        return state.stats()

    return run_threads(len(inputs), work)


def predicted(options: Options, d: int, n: int, **more: Any) -> Prediction:
    return predict(d=d, n=n, **({"bandwidth_bit_per_s": 1e9} | more | options))


def check_bytes(options: Options, d: int, n: int) -> None:
    found = counted(options, gradients(n, d))
    wanted = predicted(options, d, n)
    assert wanted.exact
    assert list(wanted.bytes_sent_by_rank) == [stats["bytes_sent"] for stats in found]
    assert wanted.bytes_sent == max(stats["bytes_sent"] for stats in found)
    assert {stats["bytes_raw"] for stats in found} == {wanted.bytes_raw}


@pytest.mark.parametrize("options", EXACT, ids=name)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_bytes_are_those_that_states_count(options: Options, n: int) -> None:
    for d in (1, 77, 1003, 6400):
        check_bytes(options, d, n)


@pytest.mark.parametrize("options", [EXACT[1], EXACT[6], EXACT[11], EXACT[14]], ids=name)
def test_bytes_of_buckets_of_several_pieces(options: Options) -> None:
    check_bytes(options, 2 * PIECE + 12_345, 3)


@settings(max_examples=40, deadline=None)
@given(d=st.integers(1, 4000), n=st.integers(1, 6), options=st.sampled_from(EXACT))
def test_bytes_of_any_length(d: int, n: int, options: Options) -> None:
    check_bytes(options, d, n)


@pytest.mark.parametrize("options", SPARSE, ids=name)
@pytest.mark.parametrize("n", [2, 3, 5])
def test_sparse_bytes_are_close_to_the_bound_for_equal_values_and_below_it_for_others(options: Options, n: int) -> None:
    d = 40_000
    wanted = predicted(options, d, n)
    assert not wanted.exact
    equal, normal = (counted(options, gradients(n, d, equal=e)) for e in (True, False))
    mean = [sum(stats["bytes_sent"] for stats in found) / n for found in (equal, normal)]
    assert mean[0] == pytest.approx(wanted.bytes_sent, rel=0.2)  # as many non-zeros as expected, give or take
    assert 0.5 * wanted.bytes_sent < mean[1] < 1.05 * wanted.bytes_sent


@pytest.mark.parametrize("n", [2, 3])
def test_casq_sends_no_more_in_an_interval(n: int) -> None:
    options = {"method": "casq", "bits": 3, "interval": 4, "buckets": 0.01}
    found = counted(options, gradients(n, 5000), calls=8)
    wanted = predicted(options, 5000, n)
    assert not wanted.exact
    for stats, size in zip(found, wanted.bytes_sent_by_rank, strict=True):
        assert 0.95 * size < stats["bytes_sent"] / 8 <= size + 1
    sizes = wanted.bytes_sent_by_rank
    assert 8 * (sizes[0] - sizes[1]) == found[0]["bytes_sent"] - found[1]["bytes_sent"] > 0  # the first one's centers


def test_more_pieces_cross_the_link_one_after_the_other() -> None:
    """Kernels take no time: a norm of 8 bytes, then half of each of three pieces to the owner, and half of it back."""
    half = PIECE // 2
    found = predicted({"method": "global_qsgd"}, 3 * PIECE, 2, bandwidth_bit_per_s=8 * half, latency_s=0.25)
    assert found.total_s == pytest.approx(8 / half + 0.25 + 6 + 0.25)
    assert found.wait_s == found.total_s
    assert found.send_s == pytest.approx(8 / half + 6 + 7 * 0.25)
    assert found.fp32_s == pytest.approx(4 * 6 + 0.25)
    assert found.speedup == pytest.approx(found.fp32_s / found.total_s)


def test_a_bucket_of_one_piece_hides_nothing() -> None:
    kernels = {"quantize": 0.5, "reduce": 0.25, "decode": 0.125, "wait": 99.0}
    found = predicted(
        {"method": "global_qsgd"}, 1280, 2, bandwidth_bit_per_s=8 * 640, latency_s=2, kernel_seconds=kernels
    )
    assert found.total_s == pytest.approx(8 / 640 + 2 + 0.5 + 1 + 2 + 0.25 + 1 + 2 + 0.125)
    assert found.wait_s == pytest.approx(found.send_s)


def test_kernels_of_other_pieces_run_while_one_is_on_the_link() -> None:
    """Each piece takes a second to quantize and a second to send, both ways: all but the first are hidden."""
    kernels = {"quantize": 4.0, "reduce": 0.0, "decode": 0.0}
    link = {"bandwidth_bit_per_s": 8 * PIECE, "kernel_seconds": kernels}
    found = predicted({"method": "qsgd", "bits": 8}, 4 * PIECE, 2, **link)
    assert found.total_s == pytest.approx(5 + 8 / PIECE)
    assert found.wait_s == pytest.approx(1 + 8 / PIECE)


def test_what_is_told_before_is_waited_for() -> None:
    """GRandK: two limits, then a norm; sparse: a norm, then the length of each piece."""
    slow = {"bandwidth_bit_per_s": 1e15, "latency_s": 1.0}
    assert predicted({"method": "grandk_mn", "k": 10}, 1000, 4, **slow).total_s == pytest.approx(4)
    assert predicted({"method": "global_qsgd", "sparse": True}, 2 * PIECE, 2, **slow).total_s == pytest.approx(4)
    assert predicted({"method": "qsgd_mn_ts"}, 1000, 2, **slow).total_s == pytest.approx(5)
    assert predicted({"method": "fp16"}, 1000, 4, **slow).total_s == pytest.approx(6)


def test_matrices_of_powersgd() -> None:
    shapes = [(64, 32, 3, 3), (64,), (10, 64), (2, 3)]  # the last is no smaller as two vectors
    d = sum(map(math.prod, shapes))
    sent = (64 + 32 * 9) * 2 + 64 + (10 + 64) * 2 + 6
    found = predicted({"method": "powersgd", "rank": 2}, d, 2, shapes=shapes, latency_s=1, bandwidth_bit_per_s=1e15)
    assert found.bytes_sent == 4 * sent
    assert found.total_s == pytest.approx(3 * 2)  # three all-reduces, two steps of a ring each
    assert predicted({"method": "powersgd"}, d, 2).bytes_sent == 4 * d
    assert predicted({"method": "fp16"}, d, 3).bytes_sent == 2 * 2 * d * 2 // 3


@settings(max_examples=80, deadline=None)
@given(
    options=st.sampled_from(EXACT + SPARSE + [{"method": "casq"}, {"method": "fp16"}, {"method": "powersgd"}]),
    d=st.integers(1, 8 * PIECE),
    n=st.integers(1, 40),
    kernels=st.fixed_dictionaries({part: st.floats(0, 10) for part in ("quantize", "reduce", "decode")}),
    latency_s=st.floats(0, 0.1),
)
def test_no_faster_than_kernels_or_link_and_no_slower_than_both(
    options: Options, d: int, n: int, kernels: dict[str, float], latency_s: float
) -> None:
    slow, fast = (
        predicted(options, d, n, bandwidth_bit_per_s=rate, latency_s=latency_s, kernel_seconds=kernels)
        for rate in (1e7, 1e9)
    )
    for found in (slow, fast):
        work = sum(kernels.values())
        alone = predicted(options, d, n, bandwidth_bit_per_s=1e7 if found is slow else 1e9)
        assert max(work, alone.send_s) <= found.total_s * (1 + 1e-9) + 1e-12
        assert found.total_s <= (work + found.send_s) * (1 + 1e-9)
        assert found.wait_s == pytest.approx(found.total_s - work, abs=1e-9)
    assert fast.total_s <= slow.total_s
    assert slow.bytes_sent_by_rank == fast.bytes_sent_by_rank
    assert len(slow.bytes_sent_by_rank) == n


@settings(max_examples=200, deadline=None)
@given(*(st.floats(1e-3, 1e3) for _ in range(3)), st.floats(1.01, 50))
def test_compression_pays_when_the_costs_say_so(beta: float, gamma: float, omega: float, rho: float) -> None:
    """Per plain byte and level of the tree: 2/β + 1/γ plainly, 1/ρ of that with the slower reduction ω·γ."""
    plain = 2 / beta + 1 / gamma
    compressed = (2 / beta + 1 / (omega * gamma)) / rho
    if not math.isclose(plain, compressed, rel_tol=1e-9):
        assert compression_pays(beta, gamma, omega, rho) == (compressed < plain)


def test_compression_of_the_paper() -> None:
    """Standard dithering (ω = 1) always pays; exponential (ω = 1/79) where β < 0.08 γ; both at a ratio of 4."""
    for beta in (1.0, 1e6, 1e12):
        assert compression_pays(beta, 1.0, 1.0, 4)
        assert compression_pays(beta, 1.0, 0.25, 4)  # 1 − ωρ is 0
    assert compression_pays(0.0799, 1.0, 1 / 79, 4)
    assert not compression_pays(0.0801, 1.0, 1 / 79, 4)
    assert compression_pays(53.9e9, 2e12, 1 / 79, 4)  # NVLink beside an A100's reductions


@pytest.mark.parametrize(
    ("given_", "key"),
    [
        ({"method": "signsgd"}, "gradients.method"),
        ({"method": "none", "bits": 4}, "gradients.bits"),
        ({"method": "none", "d": 0}, "d"),
        ({"method": "none", "n": 0}, "n"),
        ({"method": "none", "bandwidth_bit_per_s": 0}, "bandwidth_bit_per_s"),
        ({"method": "none", "latency_s": -1}, "latency_s"),
        ({"method": "none", "kernel_seconds": {"encode": 1}}, "kernel_seconds.encode"),
        ({"method": "none", "kernel_seconds": {"decode": -1}}, "kernel_seconds.decode"),
        ({"method": "none", "shapes": [(10, 10)]}, "shapes"),
        ({"method": "powersgd", "shapes": [(9, 9)]}, "shapes"),
    ],
)
def test_wrong_settings_are_named(given_: Options, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        predict(**({"d": 100, "n": 2, "bandwidth_bit_per_s": 1e9} | given_))
    assert caught.value.key == key


@pytest.mark.parametrize(("position", "key"), list(enumerate(("beta", "gamma", "omega", "rho"))))
def test_wrong_rates_are_named(position: int, key: str) -> None:
    for bad in (0.0, -1.0, *([1.0] if key == "rho" else [])):
        values = [1.0, 1.0, 1.0, 2.0]
        values[position] = bad
        with pytest.raises(ConfigError) as caught:
            compression_pays(*values)
        assert caught.value.key == key


PUBLISHED = {  # images a second at 32 nodes of 4 GPUs, read from the plots that the QSGD-MN paper's author published
    ("ResNet-50", 1): {
        ("none", 8): 4375,
        ("qsgd_mn", 2): 35430,
        ("qsgd_mn", 8): 14632,
        ("grandk_mn", 2): 68192,
        ("qsgd_mn_ts", 2): 34998,
        ("qsgd_mn_ts", 8): 14558,
        ("grandk_mn_ts", 8): 67616,
    },
    ("ResNet-50", 10): {("none", 8): 27770, ("qsgd_mn", 4): 57039, ("qsgd_mn_ts", 4): 55929, ("grandk_mn", 4): 68214},
    ("VGG-16", 1): {
        ("none", 8): 7047,
        ("qsgd_mn", 2): 60847,
        ("qsgd_mn", 8): 24063,
        ("grandk_mn", 2): 125351,
        ("qsgd_mn_ts", 8): 23946,
        ("grandk_mn_ts", 2): 124086,
    },
    ("VGG-16", 10): {("none", 8): 46889, ("qsgd_mn", 8): 87583, ("qsgd_mn_ts", 2): 109831, ("grandk_mn", 8): 125406},
}


def test_the_qsgd_mn_papers_model_gives_its_figures() -> None:
    sizes = {network: sum(map(math.prod, shapes)) for network, shapes in NETWORKS.items()}
    assert sizes == {"ResNet-50": 23_520_842, "VGG-16": 14_728_266}  # section 6.7
    for (network, gbit), bars in PUBLISHED.items():
        for (method, bits), images in bars.items():
            assert papers_model(network, method, bits, 32, gbit * GBIT) == pytest.approx(images, rel=1e-4, abs=2)


def test_throughput_of_this_projects_collective() -> None:
    """Compression pays more the slower the link; a node's four GPUs that share its link send four times as much."""
    for network in NETWORKS:
        gains = []
        for gbit in (0.1, 1, 10, 1000):
            plain = this_projects(network, "none", 32, 32, gbit * GBIT, ranks="nodes")
            codes = this_projects(network, "qsgd_mn", 4, 32, gbit * GBIT, ranks="nodes")
            gains.append(codes / plain)
        assert gains == sorted(gains, reverse=True)
        assert gains[0] > 4 * 0.8
        slow = [this_projects(network, "none", 32, 32, 1e-4 * GBIT, ranks=ranks) for ranks in ("nodes", "gpus")]
        assert slow[0] / slow[1] == pytest.approx(4 * (127 / 128) / (31 / 32), rel=0.01)


def test_more_ranks_never_cost_fewer_bytes_a_rank() -> None:
    for options in EXACT:
        sizes = [predicted(options, 1 << 16, n).bytes_sent for n in (1, 2, 4, 8, 16)]
        assert sizes[0] == 0
        assert all(a <= b for a, b in itertools.pairwise(sizes))
