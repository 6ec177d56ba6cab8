"""Methods that average gradients, over ranks that are threads: unbiased, bounded, the same bits everywhere, edges."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipecomp.allreduce import State, allreduce_mean
from pipecomp.allreduce.call import SAMPLE
from pipecomp.allreduce.loopback import LoopbackGroup, run_threads
from pipecomp.errors import ConfigError, ShapeError
from pipecomp.kernels import ops

Options = dict[str, Any]

UNBIASED: list[Options] = [
    {"method": "global_qsgd", "bits": 8},
    {"method": "global_qsgd", "bits": 4},
    {"method": "global_qsgd", "levels": "linear", "bits": 4},
    {"method": "global_qsgd", "levels": "linear", "bits": 8, "norm": 2},
    {"method": "global_qsgd", "levels": "linear", "bits": 3, "norm": [3, 1.5]},
    {"method": "global_qsgd", "sparse": True},
    {"method": "global_qsgd", "sparse": True, "levels": "linear"},
    {"method": "qsgd_mn", "bits": 6},
    {"method": "qsgd_mn_ts", "bits": [4, 8]},
    {"method": "qsgd_mn_ts", "bits": [2, 4, 6, 12]},
    {"method": "grandk_mn", "k": 0.25, "rescale": True},
    {"method": "grandk_mn_ts", "k": 0.25, "rescale": True},
    {"method": "qsgd_mn_ts", "bits": [2, 6], "norm": "inf"},
    {"method": "grandk_mn", "k": 0.3, "rescale": True, "coordinates": "walk", "norm": "inf"},
    {"method": "qsgd", "bits": 4},
    {"method": "terngrad"},
    {"method": "nuqsgd", "bits": 4},
]
BIASED: list[Options] = [
    {"method": "grandk_mn", "k": 100},
    {"method": "grandk_mn_ts", "k": 0.1, "error_feedback": True},
    {"method": "grandk_mn_ts", "k": 0.1, "error_feedback": True, "coordinates": "walk"},
    {"method": "casq", "bits": 3, "interval": 5},
    {"method": "casq", "bits": 3, "interval": 5, "allocation": "equal", "sample": 0.5},
    {"method": "casq", "bits": 2, "error_feedback": False},
    {"method": "double_squeeze", "bits": 4, "group_size": 64},
    {"method": "double_squeeze", "bits": 1, "group_size": 16},
]
ALL = UNBIASED + BIASED
SIZES = (1, 2, 3, 4, 5)


def name(options: Options) -> str:
    return " ".join(str(v) for v in options.values())


def gradients(n: int, d: int, *, seed: int = 0) -> list[Tensor]:
    """Workers' gradients: alike in part, with a few large values."""
    draw = torch.Generator().manual_seed(seed)
    shared = torch.randn(d, generator=draw)
    return [
        shared + 0.5 * torch.randn(d, generator=draw) * (1 + 5 * (torch.rand(d, generator=draw) < 0.02))
        for _ in range(n)
    ]


def averages(options: Options, inputs: list[Tensor], *, calls: int = 1, seed: int = 5) -> list[Tensor]:
    """Each rank's mean after `calls` calls with the same input."""

    def work(group: LoopbackGroup) -> Tensor:
        state = State(group=group, seed=seed, **options)
        for _ in range(calls):
            mean = allreduce_mean(state, inputs[group.rank])
        state.close()
        return mean

    return run_threads(len(inputs), work)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("options", ALL, ids=name)
def test_ranks_agree_bit_for_bit(options: Options, n: int) -> None:
    means = averages(options, gradients(n, 1003), calls=3)
    for mean in means[1:]:
        assert torch.equal(mean.view(torch.int32), means[0].view(torch.int32))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("options", UNBIASED, ids=name)
def test_unbiased(options: Options, n: int) -> None:
    """Every coordinate is drawn `draws` times, as that many copies side by side."""
    d, draws = 48, 1500
    few = gradients(n, d, seed=n)
    means = averages(options, [g.repeat(draws) for g in few])[0].view(draws, d).double()
    wanted = sum(g.double() for g in few) / n
    error = (means.mean(0) - wanted).abs()
    # Where a value was rarely drawn, or never, its variance is that of a rare event of the smallest value's size.
    rare = wanted.abs() * float(means[means != 0].abs().min())
    standard_error = (torch.maximum(means.var(0), rare) / draws).sqrt()
    # One of the 3,600 coordinates of all cases may be past four standard errors by chance, none past five.
    assert int((error > 4 * standard_error + 1e-6).sum()) <= 1
    assert bool((error <= 5 * standard_error + 1e-6).all())


@pytest.mark.parametrize("options", [o for o in UNBIASED if "k" not in o], ids=name)
def test_reported_error_is_that_of_the_buckets_beginning(options: Options) -> None:
    """One rank alone gets its own decoded values, so what is missing in them can be seen."""
    x = gradients(1, 100_000)[0]
    x[SAMPLE:] *= 3
    state = State(group=LoopbackGroup(0, 1, {}), **options)
    mean = allreduce_mean(state, x)
    sample, decoded = x[:SAMPLE].double(), mean[:SAMPLE].double()
    reported = state.stats()["relative_error"]
    state.close()
    assert reported == pytest.approx(float((sample - decoded).norm() / sample.norm()), rel=1e-4)


@pytest.mark.parametrize("scale", [1e-28, 1e28])
@pytest.mark.parametrize("options", [{"method": "qsgd_mn", "bits": 4}, {"method": "double_squeeze"}], ids=name)
def test_reported_error_is_relative_where_squares_leave_float32(options: Options, scale: float) -> None:
    """One such call must not spoil what is said of all others."""
    errors = []
    for size in (1.0, scale):
        state = State(group=LoopbackGroup(0, 1, {}), **options)
        allreduce_mean(state, size * gradients(1, 1000)[0])
        errors.append(state.stats()["relative_error"])
        state.close()
    assert errors[1] == pytest.approx(errors[0], rel=1e-2)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bits", [2, 4])
def test_variance_of_linear_dithering_is_under_its_bound(n: int, bits: int) -> None:
    """Theorem 3.3: E‖Q(x) − mean‖² ≤ √d / (√n · s) · (1/n) Σ‖x_i‖², for s ≤ √(n·d)."""
    inputs, s = gradients(n, 400), 2 ** (bits - 1) - 1
    options = {"method": "global_qsgd", "levels": "linear", "bits": bits, "norm": 2}
    wanted = sum(inputs) / n
    found = [float((averages(options, inputs, seed=seed)[0] - wanted).square().sum()) for seed in range(30)]
    bound = math.sqrt(400) / (math.sqrt(n) * s) * float(sum(g.square().sum() for g in inputs)) / n
    assert 0 < sum(found) / len(found) <= bound


def node_of(var_a: Tensor, a: Tensor, var_b: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Variance and largest magnitude of Algorithm 2's sum of two values."""
    return 9 / 8 * (var_a + var_b) + (a + b).square() / 8, a + b


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bits", [4, 8])
def test_variance_of_exponential_dithering_is_under_its_bound(n: int, bits: int) -> None:
    """Leaves: x²/8, and what lies below the smallest level. Nodes: Var ≤ 9/8 (Var a + Var b) + (A + B)²/8."""
    d = 64
    inputs = gradients(n, d)
    norm = max(float(g.abs().max()) for g in inputs)
    smallest = norm * 2.0 ** -(ops.exponential_levels(bits, n) - 1)
    nodes = [(g.double().square() / 8 + g.double().abs() * smallest, g.double().abs()) for g in inputs]
    while len(nodes) > 1:
        pairs = [node_of(*nodes[i], *nodes[i + 1]) for i in range(0, len(nodes) - 1, 2)]
        nodes = pairs + nodes[len(nodes) - len(nodes) % 2 :]
    draws = 1500
    options = {"method": "global_qsgd", "bits": bits}
    means = averages(options, [g.repeat(draws) for g in inputs])[0].view(draws, d).double()
    variance = means.var(0)
    assert float(variance.sum()) > 0
    assert bool((variance <= 1.2 * nodes[0][0] / n**2 + 1e-12).all())  # a variance of 1,500 draws is not exact


@pytest.mark.parametrize("n", [2, 3, 5])
def test_bytes_are_those_of_the_formula(n: int) -> None:
    d = 64 * 60 * n  # chunks of equal length
    own = (n - 1) * d // n  # values whose codes leave this rank, and as many sums

    def sent(options: Options) -> int:
        def work(group: LoopbackGroup) -> int:
            state = State(group=group, **options)
            allreduce_mean(state, gradients(n, d)[group.rank])
            state.close()
            return state.stats()["bytes_sent"]

        return run_threads(n, work)[0]

    norm = 8 * (n - 1)
    assert sent({"method": "global_qsgd", "bits": 8}) == 2 * own + norm
    assert sent({"method": "global_qsgd", "bits": 4}) == own + norm
    for bits in (2, 4, 8):
        width = (2 * n * (2 ** (bits - 1) - 1)).bit_length()  # just enough for 2·n·s + 1 sums
        linear = {"levels": "linear", "bits": bits}
        assert sent({"method": "global_qsgd", **linear}) == own * (bits + width) // 8 + norm
    width = (2 * n * 7).bit_length()
    assert sent({"method": "qsgd_mn_ts", "bits": [4, 8]}) == own * (4 + width + 2) // 8 + norm
    assert sent({"method": "qsgd", "bits": 4}) == (n - 1) * d // 2 + norm
    assert sent({"method": "terngrad"}) == (n - 1) * d // 4 + norm
    scales = 2 * -(-(d // n) // 128) * n  # a scale for 128 values of a chunk
    limits = 2 * norm  # least and largest value
    assert sent({"method": "double_squeeze"}) == (n - 1) * d // n + 2 * (n - 1) * scales // n + limits


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("options", ALL, ids=name)
def test_edges(options: Options, n: int) -> None:
    """Zeros, d = 1, one huge value, denormals, odd lengths, rows of a larger tensor, half precisions."""
    zeros = averages(options, [torch.zeros(77)] * n, calls=2)[0]
    assert torch.equal(zeros, torch.zeros(77))
    one = averages(options, [torch.tensor([2.0])] * n)[0]
    assert 0 <= float(one) <= 8
    huge = torch.zeros(131)
    huge[7] = 1e30
    for x in (huge, torch.full((131,), 1e-40), 1e-25 * gradients(1, 131)[0]):
        mean = averages(options, [x] * n)[0]
        assert bool(mean.isfinite().all())
        assert float(mean.abs().max()) <= 40 * float(x.abs().max()) * (131 if "rescale" in options else 1)
    wide = gradients(1, 600)[0].view(20, 30)
    view = wide[:, 3:20]
    assert not view.is_contiguous()
    assert torch.equal(averages(options, [view] * n)[0], averages(options, [view.contiguous()] * n)[0])
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        mean = averages(options, [view.to(dtype)] * n)[0]
        assert mean.dtype == dtype
        assert mean.shape == view.shape
        assert bool(mean.isfinite().all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", ALL, ids=name)
def test_nan_reaches_every_rank_and_no_memory(options: Options, bad: float) -> None:
    inputs = gradients(3, 300)

    def work(group: LoopbackGroup) -> tuple[Tensor, Tensor, Tensor]:
        states = [State(group=group, seed=1, **options) for _ in range(2)]
        broken = inputs[group.rank].clone()
        if group.rank == 1:
            broken[150] = bad
        x = inputs[group.rank]
        for state in states:
            allreduce_mean(state, x)
        found = allreduce_mean(states[0], broken)
        for state in states:  # the same place in the random numbers
            state._calls = 7
        return found, allreduce_mean(states[0], x), allreduce_mean(states[1], x)

    for found, after, without in run_threads(3, work):
        assert not bool(found.isfinite().any())
        assert torch.equal(after, without)


REMEMBERING = [o for o in BIASED if o.get("error_feedback", o["method"] != "grandk_mn")]


@pytest.mark.parametrize("options", REMEMBERING, ids=name)
def test_error_memories_send_what_was_left_out(options: Options) -> None:
    """The mean of many calls on one input comes near the true mean, and the memory does not grow."""
    n, calls = 3, 150
    inputs = gradients(n, 500)
    wanted = sum(inputs) / n

    def work(group: LoopbackGroup) -> tuple[Tensor, float, float]:
        state = State(group=group, **options)
        total, early = torch.zeros(500), 0.0
        for i in range(calls):
            total += allreduce_mean(state, inputs[group.rank])
            if i == calls // 2:
                early = state.memory.norm()
        return total / calls, early, state.memory.norm()

    mean, early, late = run_threads(n, work)[0]
    once = averages(options, inputs)[0]
    assert float((mean - wanted).norm()) < 0.35 * float((once - wanted).norm())
    assert late < 1.5 * early


def test_torchs_generators_are_untouched() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for options in ALL:
        averages(options, gradients(2, 100))
    assert torch.equal(torch.get_rng_state(), before)


@settings(max_examples=40, deadline=None)
@given(d=st.integers(1, 3000), n=st.integers(1, 5), seed=st.integers(0, 100), choice=st.sampled_from(ALL))
def test_any_length_and_number_of_ranks(d: int, n: int, seed: int, choice: Options) -> None:
    inputs = gradients(n, d, seed=seed)
    means = averages(choice, inputs, seed=seed)
    assert all(torch.equal(mean, means[0]) for mean in means)
    assert bool(means[0].isfinite().all())


RESTORED: list[Options] = [
    {"method": "double_squeeze"},
    {"method": "casq"},
    {"method": "casq", "interval": 3},
    {"method": "global_qsgd"},
    {"method": "grandk_mn", "k": 0.1},
    {"method": "grandk_mn", "k": 0.15, "coordinates": "walk"},
]


@pytest.mark.parametrize("options", RESTORED, ids=name)
def test_restored_memories_continue_alike(options: Options) -> None:
    """Random draws too, and CASQ's next clustering."""
    inputs = gradients(2, 700)

    def work(group: LoopbackGroup) -> tuple[Tensor, Tensor]:
        state = State(group=group, seed=2, **options)
        for _ in range(3):
            allreduce_mean(state, inputs[group.rank])
        restored = State(group=group, seed=2, **options)
        restored.load_state_dict(state.state_dict())
        return allreduce_mean(state, inputs[group.rank]), allreduce_mean(restored, inputs[group.rank])

    for went_on, restored in run_threads(2, work):
        assert torch.equal(went_on, restored)


def test_options_that_were_added_later_are_not_in_files_of_defaults() -> None:
    """A file from before they were there is loaded, and one with another value is another state's."""
    for method, more in (("casq", {"sample": 0.5}), ("grandk_mn", {"norm": "inf"}), ("qsgd_mn_ts", {"norm": 2})):
        file = State(method).state_dict()
        assert file["options"]["norm"] is None
        assert not {"coordinates", "sample", "allocation"} & file["options"].keys()
        assert method != "casq" or file["options"]["error_feedback"] is None
        State(method).load_state_dict(file)
        with pytest.raises(ConfigError, match="options"):
            State(method, **more).load_state_dict(file)


def test_a_state_of_another_method_is_refused() -> None:
    state = State("double_squeeze", bits=4)
    with pytest.raises(ConfigError, match="options"):
        State("double_squeeze", bits=8).load_state_dict(state.state_dict())


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"method": "signsgd"}, "gradients.method"),
        ({"method": "global_qsgd", "bits": 5}, "gradients.bits"),
        ({"method": "global_qsgd", "levels": "log"}, "gradients.levels"),
        ({"method": "global_qsgd", "norm": 0.5}, "gradients.norm"),
        ({"method": "global_qsgd", "sparse": True, "norm": "inf"}, "gradients.norm"),
        ({"method": "global_qsgd", "rank": 2}, "gradients.rank"),
        ({"method": "qsgd_mn_ts", "bits": 4}, "gradients.bits"),
        ({"method": "grandk_mn", "k": 0}, "gradients.k"),
        ({"method": "grandk_mn", "rescale": True, "error_feedback": True}, "gradients.rescale"),
        ({"method": "casq", "interval": 0}, "gradients.interval"),
        ({"method": "casq", "sample": 0}, "gradients.sample"),
        ({"method": "casq", "buckets": 0, "allocation": "equal"}, "gradients.allocation"),
        ({"method": "grandk_mn", "coordinates": "first"}, "gradients.coordinates"),
        ({"method": "qsgd_mn", "norm": "inf"}, "gradients.norm"),
        ({"method": "terngrad", "bits": 2}, "gradients.bits"),
        ({"method": "quantized_adam"}, "gradients.freeze_step"),
        ({"method": "quantized_adam", "freeze_step": 5}, "method"),
        ({"method": "double_squeeze", "bit": 4}, "gradients.bit"),
    ],
)
def test_wrong_options_are_named(options: Options, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        State(**options)
    assert caught.value.key == key


def test_wrong_tensors_are_named() -> None:
    state = State("double_squeeze")
    with pytest.raises(ShapeError, match="int64"):
        allreduce_mean(state, torch.ones(3, dtype=torch.int64))
    allreduce_mean(state, torch.ones(3), key="w")
    with pytest.raises(ShapeError, match=r"gradient 'w': 4 values now, 3 before"):
        allreduce_mean(state, torch.ones(4), key="w")
