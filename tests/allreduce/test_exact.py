"""Gradient methods, number by number: which norm they go by, what they draw, and that nothing is lost or sent twice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pipecomp.allreduce import State, allreduce_mean
from pipecomp.allreduce.loopback import LoopbackGroup, run_threads
from pipecomp.allreduce.methods.casq import k_means, share_buckets
from pipecomp.kernels import ops

Options = dict[str, Any]
SQUEEZE: Options = {"method": "double_squeeze", "bits": 8, "group_size": 16}
CASQ: Options = {"method": "casq", "bits": 8, "buckets": 0.5, "interval": 1}


def randn(d: int, *seed: int) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(1000 * seed[0] + sum(seed[1:])))


def name(options: Options) -> str:
    return " ".join(str(v) for v in options.values())


def averaged(options: Options, inputs: list[Tensor]) -> Tensor:
    """The mean that all ranks get."""

    def work(group: LoopbackGroup) -> Tensor:
        state = State(group=group, **options)
        mean = allreduce_mean(state, inputs[group.rank])
        state.close()
        return mean

    means = run_threads(len(inputs), work)
    assert all(torch.equal(mean, means[0]) for mean in means)
    return means[0]


# -- what values are relative to


def is_whole(x: Tensor) -> bool:
    return bool((x - x.round()).abs().max() < 1e-4)


@pytest.mark.parametrize(
    ("options", "levels", "norm"),
    [
        ({"method": "qsgd_mn", "bits": 3}, 3, 5.0),  # the largest L2 norm of a worker
        ({"method": "global_qsgd", "levels": "linear", "bits": 3, "norm": [1, "inf"]}, 3, 7.0),  # L1, then the largest
        ({"method": "global_qsgd", "levels": "linear", "bits": 3, "norm": ["inf", 1]}, 3, 5.2),  # largest, then summed
        ({"method": "global_qsgd", "levels": "linear", "bits": 3, "norm": 2}, 3, math.sqrt(25 + 2.25)),
        ({"method": "global_qsgd", "levels": "linear", "bits": 3}, 3, 4.0),
        ({"method": "qsgd_mn_ts", "bits": [3, 3 + 1], "norm": 1}, 3 * 7, 7.0 + 2.1),  # levels are multiples of both
        ({"method": "grandk_mn", "k": 2, "bits": 3}, 3, 5.0),
        ({"method": "grandk_mn", "k": 2, "bits": 3, "norm": "inf"}, 3, 4.0),
        ({"method": "grandk_mn_ts", "k": 2, "bits": [3, 4], "norm": "inf"}, 3 * 7, 4.0),
    ],
    ids=lambda value: name(value) if isinstance(value, dict) else "",
)
def test_the_norm_of_all_workers(options: Options, levels: int, norm: float) -> None:
    """A mean of two workers is a whole number of norm / (2 · levels)."""
    x, y = torch.tensor([3.0, -4.0]), torch.tensor([-0.9, 1.2])
    draws = torch.stack([averaged({**options, "seed": seed}, [x, y]) for seed in range(12)])
    assert is_whole(draws * (2 * levels / norm))
    assert len(draws.unique()) > 4


@pytest.mark.parametrize(
    ("options", "levels", "norm"),
    [({"method": "qsgd", "bits": 3}, 3, 5.0), ({"method": "terngrad"}, 1, 4.0)],
    ids=lambda value: name(value) if isinstance(value, dict) else "",
)
def test_a_workers_own_norm(options: Options, levels: int, norm: float) -> None:
    x = torch.tensor([3.0, -4.0])
    draws = torch.stack([averaged({**options, "seed": seed}, [x]) for seed in range(12)])
    assert is_whole(draws * (levels / norm))
    assert len(draws.unique()) > 2


def test_nuqsgd_sends_powers_of_two_of_the_l2_norm() -> None:
    x = torch.tensor([3.0, -4.0])
    draws = torch.stack([averaged({"method": "nuqsgd", "seed": seed}, [x]) for seed in range(12)])
    assert set((draws.abs() / 5).flatten().tolist()) == {0.5, 1.0}


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("options", [{"method": "none"}, {"method": "terngrad"}], ids=name)
def test_what_needs_no_rounding_is_averaged_exactly(options: Options, n: int) -> None:
    inputs = [torch.tensor([1.0, -1.0, 0.0, 1.0]).roll(rank) for rank in range(n)]
    assert torch.equal(averaged(options, inputs), torch.stack(inputs).mean(0))


# -- what is drawn

DRAWING: list[Options] = [
    {"method": "global_qsgd", "levels": "linear", "bits": 4},
    {"method": "global_qsgd", "levels": "exponential", "bits": 4},
    {"method": "qsgd_mn_ts", "bits": [4, 8]},
    {"method": "grandk_mn", "k": 0.25},
    {"method": "qsgd", "bits": 4},
    {"method": "terngrad"},
    {"method": "nuqsgd", "bits": 4},
]


@pytest.mark.parametrize("options", DRAWING, ids=name)
def test_every_call_draws_anew_and_every_rank_for_itself(options: Options) -> None:
    x = randn(400, 1)

    def work(group: LoopbackGroup) -> list[Tensor]:
        state = State(group=group, seed=3, **options)
        means = [allreduce_mean(state, x) for _ in range(3)]
        state.close()
        return means

    alone, both = run_threads(1, work)[0], run_threads(2, work)[0]
    for means in (alone, both):
        for a, b in ((0, 1), (0, 2), (1, 2)):
            assert not torch.equal(means[a], means[b])
    assert not torch.equal(alone[0], both[0])  # two ranks with one noise would give what one gives


@pytest.mark.parametrize("k", [30, 0.29])
def test_a_walk_takes_every_coordinate_once_before_any_again(k: int | float) -> None:
    """Of each key for itself; rescaling makes each call's mean unbiased, also that of the shorter last part."""
    state = State(group=LoopbackGroup(0, 1, {}), method="grandk_mn", k=k, coordinates="walk", rescale=True)
    chosen = []
    for _ in range(8):
        chosen.append(allreduce_mean(state, torch.ones(100), "one").nonzero().flatten().tolist())
        allreduce_mean(state, torch.ones(77), "another")
    state.close()
    length = 30 if k == 30 else 29
    assert [len(part) for part in chosen] == 2 * [length, length, length, 100 - 3 * length]
    first, second = chosen[:4], chosen[4:]
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(100))
    assert first != second, "another order"


def test_what_exponential_codes_are_reduced_with_is_drawn_anew() -> None:
    """Powers of two are not rounded when they are encoded; only their sum is."""
    inputs = [torch.ones(400), torch.full((400,), 0.25)]

    def work(group: LoopbackGroup) -> list[Tensor]:
        state = State(group=group, method="global_qsgd", bits=8)
        means = [allreduce_mean(state, inputs[group.rank]) for _ in range(3)]
        state.close()
        return means

    means = run_threads(2, work)[0]
    assert set(means[0].tolist()) == {0.5, 1.0}  # of 1 + 0.25: 1, or with a probability of a quarter 2
    assert not torch.equal(means[0], means[1])
    assert not torch.equal(means[1], means[2])


def test_grandk_chooses_other_coordinates_in_every_call_and_the_same_on_every_rank() -> None:
    def work(group: LoopbackGroup) -> list[list[int]]:
        state = State(group=group, method="grandk_mn", k=0.25)
        found = [allreduce_mean(state, torch.ones(400)).nonzero().flatten().tolist() for _ in range(4)]
        state.close()
        return found

    one, other = run_threads(2, work)
    assert one == other
    assert all(0 < len(chosen) <= 100 for chosen in one)
    assert len({tuple(chosen) for chosen in one}) == 4
    assert len(set().union(*one)) > 200  # of four independent choices, about 68 %


# -- nothing is lost

Submit = Callable[[State, int], Tensor]


def drained(options: Options, n: int, steps: list[Submit]) -> tuple[Tensor, list[float]]:
    """The sum of what all ranks got in `steps`, and the largest value in each of them."""

    def work(group: LoopbackGroup) -> tuple[Tensor, list[float]]:
        state = State(group=group, seed=2, **options)
        got = [step(state, group.rank) for step in steps]
        state.close()
        return torch.stack([g.double() for g in got]).sum(0), [float(g.abs().max()) for g in got]

    return run_threads(n, work)[0]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("options", [SQUEEZE, CASQ], ids=name)
def test_what_is_left_out_is_sent_later(options: Options, n: int) -> None:
    """Σ inputs = Σ means + residuals; and zeros drain residuals, so the sums of both are equal then.

    CASQ's centers are those of the first rank's values: where its residual is empty, others' do not drain.
    """
    d, calls = 300, 6
    inputs = [[randn(d, call, rank * (options is SQUEEZE)) for rank in range(n)] for call in range(calls)]
    wanted = torch.stack([torch.stack(x).double().mean(0) for x in inputs]).sum(0)

    def with_inputs(call: int) -> Submit:
        return lambda state, rank: allreduce_mean(state, inputs[call][rank])

    zeros: list[Submit] = [lambda state, rank: allreduce_mean(state, torch.zeros(d))] * 12
    total, sizes = drained(options, n, [*map(with_inputs, range(calls)), *zeros])
    assert sizes[calls] > 1e-4  # there was something left
    assert sizes[-1] < 1e-6
    assert float((total - wanted).norm() / wanted.norm()) < 1e-6


FIRST = ((0, 40), (1, 60))  # two parameters in a bucket
LATER = ((1, 60), (0, 40))  # DDP makes its buckets anew


def in_place(slices: tuple, parameters: dict[int, Tensor]) -> Tensor:
    return torch.cat([parameters[number] for number, _ in slices])


def by_parameter(slices: tuple, bucket: Tensor) -> Tensor:
    """In the order of parameters' numbers."""
    parts = dict(zip((number for number, _ in slices), bucket.split([count for _, count in slices]), strict=True))
    return torch.cat([parts[number] for number in sorted(parts)])


@pytest.mark.parametrize(
    ("options", "n"), [({**SQUEEZE, "bits": 4}, 1), ({**SQUEEZE, "bits": 4}, 2), ({**CASQ, "bits": 5}, 1)]
)
def test_residuals_go_with_their_parameters(options: Options, n: int) -> None:
    """Ranks send, as workers and owners; their bucket is cut anew, and zeros bring the rest of each parameter.

    With 4 bits: what is rounded to 8 once is hardly changed by rounding it again, so that owners leave nothing out.
    """
    parameters = [{0: randn(40, 3, rank), 1: randn(60, 4, rank)} for rank in range(n)]

    def submit(slices: tuple, scale: float) -> Submit:
        def step(state: State, rank: int) -> Tensor:
            x = in_place(slices, parameters[rank]) * scale
            return by_parameter(slices, state.submit(x, "0", slices=slices).wait())

        return step

    total, sizes = drained(options, n, [submit(FIRST, 1.0), *[submit(LATER, 0.0)] * 20])
    wanted = torch.stack([in_place(FIRST, mine) for mine in parameters]).double().mean(0)
    assert sizes[1] > 1e-4
    assert sizes[-1] < 1e-6
    assert float((total - wanted).norm() / wanted.norm()) < 1e-6


@pytest.mark.parametrize("n", [1, 2])
def test_a_residual_never_reaches_another_parameter(n: int) -> None:
    """Whose gradients were zero has a mean of zero, also in a bucket that others filled before, under the same key."""
    noisy = {0: randn(50, 5), 2: randn(50, 6)}
    quiet = {1: torch.zeros(50), 3: torch.zeros(50)}

    def submit(slices: tuple, parameters: dict[int, Tensor]) -> Submit:
        return lambda state, rank: state.submit(in_place(slices, parameters), "0", slices=slices).wait()

    first, later = ((0, 50), (2, 50)), ((1, 50), (3, 50))
    _, sizes = drained({**SQUEEZE, "bits": 2}, n, [submit(first, noisy), submit(later, quiet)])
    assert sizes[0] > 0
    assert sizes[1] == 0


# -- CASQ


def test_casq_clusters_every_tensor_for_itself() -> None:
    """Whatever other keys were averaged before: here values a thousand times as large."""
    small, large = randn(500, 7), 1000 * randn(500, 8)

    def work(keys: tuple[str, ...]) -> dict[str, Tensor]:
        state = State(group=LoopbackGroup(0, 1, {}), method="casq", bits=4, interval=100)
        found = {}
        for _ in range(2):
            found = {key: allreduce_mean(state, large if key == "large" else small, key) for key in keys}
        state.close()
        return found

    assert torch.equal(work(("large", "small"))["small"], work(("small",))["small"])
    assert torch.equal(work(("small", "large"))["large"], work(("large",))["large"])


@pytest.mark.parametrize("sign", [-1, 1])
def test_casq_has_a_center_on_each_side_of_zero(sign: int) -> None:
    """Also where a side has so few values that its part of the centers rounds to none: they would go to the other."""
    values = sign * torch.cat([torch.linspace(1.0, 2.0, 999), torch.tensor([-3.0])])
    assert float((sign * k_means(values, 4)).min()) == -3.0


def test_casq_shares_buckets_by_entropy_and_number() -> None:
    """H · μ: 5 bits times a half, 1 bit times a quarter, and one value that repeats, which needs no bucket."""
    spread = torch.linspace(8.0, 70.0, 32)  # values of different bins of the histogram: 5 bits
    two = torch.tensor([100.0, 104.0]).repeat(8)  # 1 bit
    same = torch.full((16,), 200.0)
    centers = torch.tensor([39.0, 102.0, 200.0])
    values = torch.cat([spread, two, same])
    assert share_buckets(values, centers, 111).tolist() == [100, 10, 0]
    assert share_buckets(values, centers, 111, equal=True).tolist() == [37, 37, 37]
    assert share_buckets(values, centers, 0).tolist() == [0, 0, 0]
    assert share_buckets(torch.ones(9), centers, 10).tolist() == [0, 0, 0], "one value for all: no means are needed"


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("tail", ["normal", "Laplace"])
def test_casq_gives_wide_clusters_more_buckets_for_each_value(tail: str, bits: int) -> None:
    """The paper's section 3.2: a large interval requires many buckets, a small one few."""
    torch.manual_seed(0)
    values = torch.randn(50_000) if tail == "normal" else torch.distributions.Laplace(0.0, 1.0).sample((50_000,))
    centers = k_means(values, 1 << bits)
    counts = share_buckets(values, centers, 500)
    cluster = ops.kmeans_assign(values, centers).long()
    members = [values[cluster == k] for k in range(1 << bits)]
    by_width = sorted(range(1 << bits), key=lambda k: float(members[k].max() - members[k].min()))
    each = [float(counts[k]) / len(members[k]) for k in by_width]
    half = len(each) // 2
    assert max(each[:half]) < min(each[half:])
    assert 480 <= int(counts.sum()) <= 500


def test_casq_without_error_feedback_keeps_nothing() -> None:
    """All of the paper's results on CIFAR; the mean is then that of one call, whatever came before."""
    x = randn(3000, 3)
    state = State(group=LoopbackGroup(0, 1, {}), method="casq", bits=2, error_feedback=False)
    first, second = (allreduce_mean(state, x).clone() for _ in range(2))
    assert torch.equal(first, second)
    assert state.memory.norm() == 0
    state.close()
    kept = State(group=LoopbackGroup(0, 1, {}), method="casq", bits=2)
    assert torch.equal(allreduce_mean(kept, x), first), "the first call has no residual"
    assert not torch.equal(allreduce_mean(kept, x), first)
    kept.close()


def test_casq_without_buckets_decodes_to_centers() -> None:
    x = randn(2000, 4)
    state = State(group=LoopbackGroup(0, 1, {}), method="casq", bits=2, buckets=0)
    centers = k_means(x, 4)
    assert torch.equal(allreduce_mean(state, x), centers[ops.kmeans_assign(x, centers).long()])
    state.close()
