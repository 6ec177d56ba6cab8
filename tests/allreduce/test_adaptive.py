"""Adaptive compression: the same plan on all ranks, fewer bytes at the same error, resumed alike, refused settings."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipecomp.allreduce import State, allreduce_mean, predict
from pipecomp.allreduce.adaptive import Planner
from pipecomp.allreduce.call import Counters
from pipecomp.allreduce.error_feedback import Residuals
from pipecomp.allreduce.loopback import LoopbackGroup, run_threads
from pipecomp.allreduce.methods import create_method
from pipecomp.config import Config
from pipecomp.errors import ConfigError
from pipecomp.gradient_config import Gradients

Options = dict[str, Any]

SIZES = (4096, 640, 130, 2048, 1024)
SCALES = (1e-3, 3.0, 0.5, 1e-2, 1.0)
SLICES = tuple(enumerate(SIZES))
EVERY = 3
PLAN: Options = {"every": EVERY}
METHODS: list[Options] = [
    {"method": "double_squeeze", "bits": 4, "group_size": 64},
    {"method": "global_qsgd", "levels": "linear", "bits": 4},
    {"method": "global_qsgd", "bits": 8},
    {"method": "qsgd_mn", "bits": 5},
    {"method": "qsgd", "bits": 4},
    {"method": "nuqsgd", "bits": 8},
    {"method": "grandk_mn", "k": 0.2, "error_feedback": True},
    {"method": "grandk_mn_ts", "k": 0.2, "rescale": True},
]


def name(options: Options) -> str:
    return " ".join(str(v) for v in options.values())


def gradient(rank: int, step: int) -> Tensor:
    """Layers of very different scales, alike in part on all ranks."""
    shared = torch.Generator().manual_seed(step)
    own = torch.Generator().manual_seed(1000 * step + rank)
    layers = [
        scale * (torch.randn(d, generator=shared) + 0.3 * torch.randn(d, generator=own))
        for d, scale in zip(SIZES, SCALES, strict=True)
    ]
    return torch.cat(layers)


def averages(state: State, rank: int, steps: range, slices: Any = SLICES) -> list[Tensor]:
    return [state.submit(gradient(rank, step), "bucket", slices=slices).wait() for step in steps]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("options", METHODS, ids=name)
def test_ranks_plan_and_average_alike(options: Options, n: int) -> None:
    def work(group: LoopbackGroup) -> tuple[dict[Any, Any], list[Tensor]]:
        state = State(group=group, adaptive=PLAN, **options)
        assert state.layer_values() == {}
        means = averages(state, group.rank, range(EVERY + 2))
        state.close()
        return state.layer_values(), means

    found = run_threads(n, work)
    assert set(found[0][0]) == set(range(len(SIZES)))
    for values, means in found[1:]:
        assert values == found[0][0]
        assert all(torch.equal(a, b) for a, b in zip(means, found[0][1], strict=True))


@pytest.mark.parametrize("options", [METHODS[0], METHODS[1], METHODS[4]], ids=name)
def test_fewer_bytes_at_no_more_error(options: Options) -> None:
    """Against the same method with its own bits in every layer, each layer averaged by itself."""
    n, steps = 2, 12

    def work(group: LoopbackGroup) -> tuple[list[float], list[int]]:
        adaptive, uniform = (State(group=group, adaptive=plan, **options) for plan in (PLAN, {**PLAN, "every": 1000}))
        errors, sent = [0.0, 0.0], [0, 0]
        for step in range(EVERY + steps):
            exact = sum(gradient(rank, step) for rank in range(n)) / n
            for i, state in enumerate((adaptive, uniform)):
                before = state.stats()["bytes_sent"]
                (mean,) = averages(state, group.rank, range(step, step + 1))
                if step % EVERY:  # planning is told apart
                    errors[i] += float((mean - exact).square().sum())
                    sent[i] += state.stats()["bytes_sent"] - before
        assert len(set(adaptive.layer_values().values())) > 1
        assert uniform.layer_values() == {}
        return errors, sent

    errors, sent = run_threads(n, work)[0]
    assert sent[0] < 0.95 * sent[1]
    assert errors[0] < 1.1 * errors[1]


def test_a_larger_error_takes_fewer_bytes() -> None:
    def work(group: LoopbackGroup) -> list[int]:
        sent = []
        for error in (0.1, 1.0, 10.0):
            state = State(group=group, method="double_squeeze", bits=4, adaptive={**PLAN, "error": error})
            averages(state, group.rank, range(8))
            sent.append(state.stats()["bytes_sent"])
        return sent

    sent = run_threads(2, work)[0]
    assert sent[0] > sent[1] > sent[2]


def test_errors_are_those_of_the_values_themselves() -> None:
    """Whatever a layer was divided by before it was quantized."""
    x = gradient(0, 0)[:2000]
    state = State(method="qsgd_mn", bits=4, adaptive={"every": 4})
    state.submit(torch.cat([x, 1000 * x]), "b", slices=((0, 2000), (1, 2000))).wait()
    small, large = state.state_dict()["adaptive"]["errors"].values()
    state.close()
    assert large == pytest.approx([1e6 * error for error in small], rel=0.1)


@pytest.mark.parametrize("rescale", [False, True])
def test_the_error_of_leaving_coordinates_out_is_its_mean_over_all_choices(rescale: bool) -> None:
    x, k = torch.tensor([1.0, -2.0, 3.0, 0.5]), 0.5
    method = create_method(Gradients(method="grandk_mn", k=k, rescale=rescale))
    average: Any = method.average(Residuals())
    sent = [torch.zeros(4).index_put((torch.tensor(chosen),), x[list(chosen)]) for chosen in combinations(range(4), 2)]
    errors = [float((x - (1 / k if rescale else 1) * each).square().sum()) for each in sent]
    assert average.squared_error(x, None) == pytest.approx(sum(errors) / len(errors))


def test_a_plan_is_made_of_what_was_measured_since_the_last() -> None:
    """First one layer has all the error, then the other, a little less of it."""
    adaptive = Gradients(method="qsgd_mn", bits=4, adaptive={"every": 4, "bits": [2, 4, 8]}).adaptive_options
    planner = Planner(adaptive, 4, lambda bits, size, n: bits * size)
    for step in range(9):
        planner.begin("b", Counters(), lambda row: [row])
        for layer, size in (("a", 1.0 if step < 4 else 0.0), ("b", 0.0 if step < 4 else 0.5)):
            planner.add_errors(layer, 100, [size * 4.0**-bits for bits in adaptive.values])
        if step == 4:
            assert planner.values == {"a": 4, "b": 2}
    assert planner.values == {"a": 2, "b": 4}


def test_residuals_stay_with_their_layers() -> None:
    """The residual of one input comes out in the mean over many calls, although plans change between them."""
    inputs = [gradient(rank, 0) for rank in range(2)]

    def work(group: LoopbackGroup) -> tuple[Tensor, Tensor, set[Any]]:
        state = State(group=group, method="double_squeeze", bits=2, adaptive={"every": 20, "error": 0.7})
        means = [state.submit(inputs[group.rank], "b", slices=SLICES).wait() for _ in range(120)]
        return means[0], torch.stack(means).mean(0), set(state.layer_values().values())

    wanted = (inputs[0] + inputs[1]) / 2
    once, mean, values = run_threads(2, work)[0]
    assert len(values) > 1
    ends = [sum(SIZES[: i + 1]) for i in range(len(SIZES))]
    for end, d in zip(ends, SIZES, strict=True):
        layer = slice(end - d, end)
        assert float((mean - wanted)[layer].norm()) < 0.3 * float((once - wanted)[layer].norm())


def test_buckets_of_ddp_may_change() -> None:
    """Layers keep their values when they come in other buckets."""

    def work(group: LoopbackGroup) -> tuple[dict[Any, Any], dict[Any, Any], list[Tensor]]:
        state = State(group=group, method="double_squeeze", bits=3, adaptive=PLAN)
        averages(state, group.rank, range(EVERY + 1))
        before, x, first = state.layer_values(), gradient(group.rank, 9), sum(SIZES[:2])
        means = [
            state.submit(x[:first], "0", slices=SLICES[:2]).wait(),
            state.submit(x[first:], "1", slices=SLICES[2:]).wait(),
        ]
        return before, state.layer_values(), means

    found = run_threads(2, work)
    assert found[0][0] == found[0][1]
    exact = (gradient(0, 9) + gradient(1, 9)) / 2
    mean = torch.cat(found[0][2])
    assert float((mean - exact).norm()) < 0.5 * float(exact.norm())


def test_tensors_without_parameters_are_layers_by_their_keys() -> None:
    def work(group: LoopbackGroup) -> dict[Any, Any]:
        state = State(group=group, method="qsgd_mn", bits=4, adaptive=PLAN)
        for step in range(EVERY + 1):
            for key, part in zip("abcde", gradient(group.rank, step).split(SIZES), strict=True):
                assert allreduce_mean(state, part, key).shape == part.shape
        return state.layer_values()

    found = run_threads(2, work)
    assert list(found[0]) == list("abcde")
    assert found[0] == found[1]
    assert len(set(found[0].values())) > 1


@pytest.mark.parametrize("options", [METHODS[0], METHODS[1], METHODS[6]], ids=name)
@pytest.mark.parametrize("stop", [2, EVERY, EVERY + 2])
def test_a_saved_state_goes_on_alike(tmp_path: Path, options: Options, stop: int) -> None:
    """Stopped within the first window, where a plan is due, and after one."""

    def work(group: LoopbackGroup) -> bool:
        first, second = (State(group=group, adaptive=PLAN, **options) for _ in range(2))
        averages(first, group.rank, range(stop))
        first.save(tmp_path / f"{group.rank}")
        second.load(tmp_path / f"{group.rank}")
        after = [averages(state, group.rank, range(stop, stop + 5)) for state in (first, second)]
        assert first.layer_values() == second.layer_values() != {}
        return all(torch.equal(a, b) for a, b in zip(*after, strict=True))

    assert all(run_threads(2, work))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("options", [METHODS[0], METHODS[1]], ids=name)
def test_nan_reaches_every_rank_and_no_residual(options: Options, bad: float) -> None:
    def work(group: LoopbackGroup) -> tuple[Tensor, Tensor, Tensor]:
        states = [State(group=group, adaptive=PLAN, **options) for _ in range(2)]
        for state in states:
            averages(state, group.rank, range(EVERY + 1))
        broken = gradient(group.rank, 5)
        if group.rank == 1:
            broken[-1] = bad  # in the last layer alone
        found = states[0].submit(broken, "bucket", slices=SLICES).wait()
        for state in states:  # the same place in the random numbers
            state._calls = 9
        after = [averages(state, group.rank, range(6, 7))[0] for state in states]
        return found, after[0], after[1]

    for found, after, without in run_threads(2, work):
        assert bool(found.isnan().all())
        assert torch.equal(after, without)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_half_precision_zeros_and_lone_values(dtype: torch.dtype) -> None:
    x = gradient(0, 0).to(dtype)
    x[: SIZES[0]] = 0
    state = State(group=LoopbackGroup(0, 1, {}), method="qsgd_mn", bits=8, adaptive=PLAN)
    for _ in range(EVERY + 1):
        mean = state.submit(x, "bucket", slices=SLICES).wait()
        assert mean.dtype == dtype
        assert not bool(mean[: SIZES[0]].any())
        assert float((mean - x).double().norm()) < float(x.double().norm())
    assert allreduce_mean(state, torch.ones(1, dtype=dtype), "one").dtype == dtype


def test_values_whose_squares_leave_float32_are_planned_too() -> None:
    state = State(group=LoopbackGroup(0, 1, {}), method="double_squeeze", bits=4, adaptive=PLAN)
    for step in range(EVERY + 1):
        mean = state.submit(1e26 * gradient(0, step), "bucket", slices=SLICES).wait()
    assert bool(mean.isfinite().all())
    assert len(set(state.layer_values().values())) > 1


def test_a_prediction_is_that_of_the_first_window() -> None:
    d = 64 * 128
    found = predict("double_squeeze", d, 2, bandwidth_bit_per_s=1e9, adaptive={})
    uniform = predict("double_squeeze", d, 2, bandwidth_bit_per_s=1e9)
    assert not found.exact
    assert found.bytes_sent_by_rank == uniform.bytes_sent_by_rank


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"method": "none", "adaptive": {}}, "gradients.adaptive"),
        ({"method": "terngrad", "adaptive": {}}, "gradients.adaptive"),
        ({"method": "casq", "adaptive": {}}, "gradients.adaptive"),
        ({"method": "qsgd_mn_ts", "adaptive": {}}, "gradients.adaptive"),
        ({"method": "fp16", "adaptive": {}}, "gradients.adaptive"),
        ({"method": "global_qsgd", "sparse": True, "adaptive": {}}, "gradients.adaptive"),
        ({"method": "grandk_mn", "adaptive": {}}, "gradients.adaptive"),
        ({"method": "quantized_adam", "freeze_step": 3, "adaptive": {}}, "gradients.adaptive"),
        ({"method": "qsgd", "adaptive": True}, "gradients.adaptive"),
        ({"method": "qsgd", "adaptive": {"evry": 3}}, "gradients.adaptive.evry"),
        ({"method": "qsgd", "adaptive": {"k": [0.1]}}, "gradients.adaptive.k"),
        ({"method": "qsgd", "adaptive": {"every": 0}}, "gradients.adaptive.every"),
        ({"method": "qsgd", "adaptive": {"error": 0}}, "gradients.adaptive.error"),
        ({"method": "qsgd", "adaptive": {"error": math.nan}}, "gradients.adaptive.error"),
        ({"method": "qsgd", "adaptive": {"error": 10**400}}, "gradients.adaptive.error"),
        ({"method": "qsgd", "adaptive": {"bits": 4}}, "gradients.adaptive.bits"),
        ({"method": "qsgd", "adaptive": {"bits": [8]}}, "gradients.adaptive.bits"),
        ({"method": "qsgd", "adaptive": {"bits": [1, 4]}}, "gradients.adaptive.bits"),
        ({"method": "nuqsgd", "adaptive": {"bits": [5]}}, "gradients.adaptive.bits"),
        ({"method": "grandk_mn", "k": 0.1, "adaptive": {"k": [100]}}, "gradients.adaptive.k"),
    ],
)
def test_settings_that_could_not_take_effect_are_named(section: Options, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({"gradients": section})
    assert caught.value.key == key


def test_the_settings_are_kept_complete_and_only_where_they_are_set() -> None:
    plain = Config.from_dict({"gradients": {"method": "qsgd"}})
    assert "adaptive" not in plain.shared()["gradients"]
    found = Config.from_dict({"gradients": {"method": "qsgd", "adaptive": {"bits": [2, 4]}}})
    assert found.gradients.adaptive == {"every": 100, "error": 1.0, "bits": (2, 4, 8)}
    assert found.shared()["gradients"]["adaptive"] == found.gradients.adaptive
