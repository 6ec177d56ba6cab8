"""Error-feedback residuals belong to parameters: nothing is lost or sent twice, whatever buckets carry them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipecomp.allreduce import State
from pipecomp.allreduce.call import Slices
from pipecomp.allreduce.error_feedback import Residuals
from pipecomp.allreduce.loopback import LoopbackGroup, run_threads
from pipecomp.allreduce.reduce_scatter import owned_spans

CPU = torch.device("cpu")
SIZES = (300, 7, 150, 64, 401)
Layout = list[list[int]]  # the parameters of each bucket
FIRST: Layout = [[4, 3], [2, 1], [0]]
REBUILT: Layout = [[0, 4, 1], [3, 2]]
METHODS: list[dict[str, Any]] = [
    {"method": "double_squeeze", "bits": 2, "group_size": 32},
    {"method": "double_squeeze", "bits": 1, "group_size": 32},
    {"method": "double_squeeze", "bits": 4, "group_size": 32, "adaptive": {"every": 5, "error": 1.5}},
    {"method": "casq", "bits": 3, "interval": 3},
    {"method": "grandk_mn", "k": 0.2, "error_feedback": True},
    {"method": "grandk_mn", "k": 0.2, "error_feedback": True, "adaptive": {"every": 5, "error": 1.5}},
    {"method": "grandk_mn_ts", "k": 100, "error_feedback": True},
]


def name(options: dict[str, Any]) -> str:
    return " ".join(str(v) for v in options.values())


def slices(bucket: list[int]) -> Slices:
    return tuple((p, SIZES[p]) for p in bucket)


def gradient(rank: int, step: int, parameter: int, scale: float = 1.0) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * step + 10 * parameter + rank)
    return scale * torch.randn(SIZES[parameter], generator=draw)


def average(
    state: State, layout: Layout, step: int, sums: list[Tensor], means: list[Tensor], scale: float = 1.0
) -> None:
    """One step with these buckets: what went in and came out is added up by parameter."""
    for number, bucket in enumerate(layout):
        x = [gradient(state.group.rank, step, p, scale) for p in bucket]
        found = state.submit(torch.cat(x), str(number), slices=slices(bucket)).wait()
        for p, g, mean in zip(bucket, x, found.split([SIZES[p] for p in bucket]), strict=True):
            sums[p] += g.double()
            means[p] += mean.double()


def left_by_parameter(state: State, sizes: Sequence[int] = SIZES) -> list[Tensor]:
    """Return each parameter's residual on a rank: as a worker, and n times that as an owner."""
    kept, n = state.state_dict()["memory"], state.group.size
    found = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    seen: list[int] = []
    for parts, e_d in kept["worker"].values():
        for (p, _), e in zip(parts, e_d.split([count for _, count in parts]), strict=True):
            found[p] += e.double()
            seen.append(p)
    assert len(seen) == len(set(seen)), "a parameter has one residual"
    for (_, parts), e in kept["owner"].items():
        counts = [count for _, count in parts]
        whole = torch.zeros(sum(counts), dtype=torch.float64)
        spans = owned_spans(len(whole), n, state.group.rank)
        for span, part in zip(spans, e.split([span.count for span in spans]), strict=True):
            span.of(whole).copy_(part)
        for (p, _), part in zip(parts, whole.split(counts), strict=True):
            found[p] += n * part
    return found


def run(options: dict[str, Any], layouts: list[Layout], n: int = 3, *, restart_at: int | None = None) -> list[float]:
    """‖Σ in − Σ out − left‖ / ‖Σ in‖ of each parameter, over all ranks."""

    def work(group: LoopbackGroup) -> Any:
        state = State(group=group, seed=4, **options)
        sums, means = ([torch.zeros(size, dtype=torch.float64) for size in SIZES] for _ in range(2))
        for step, layout in enumerate(layouts):
            if step == restart_at:
                saved, state = state.state_dict(), State(group=group, seed=4, **options)
                state.load_state_dict(saved)
            average(state, layout, step, sums, means)
        return sums, means, left_by_parameter(state)

    ranks = run_threads(n, work)
    found = []
    for p in range(len(SIZES)):
        went_in, left = (sum(rank[part][p] for rank in ranks) for part in (0, 2))
        missing = went_in - n * ranks[0][1][p] - left
        found.append(float(missing.norm() / went_in.norm()))
    return found


@pytest.mark.parametrize("options", METHODS, ids=name)
@pytest.mark.parametrize("n", [1, 3, 4])
def test_nothing_is_lost_when_buckets_change(options: dict[str, Any], n: int) -> None:
    assert max(run(options, [FIRST] * 4 + [REBUILT] * 8 + [FIRST] * 2, n)) < 2e-6


@pytest.mark.parametrize("options", METHODS, ids=name)
@pytest.mark.parametrize("layouts", [[FIRST] * 3 + [REBUILT] * 3, [REBUILT] * 3 + [FIRST] * 3, [FIRST] * 6])
def test_nothing_is_lost_or_taken_twice_after_a_restart(options: dict[str, Any], layouts: list[Layout]) -> None:
    """Buckets change with the restart, and once more later."""
    for restart_at in (3, 4):
        assert max(run(options, [*layouts, REBUILT, REBUILT], restart_at=restart_at)) < 2e-6


@pytest.mark.parametrize("options", METHODS, ids=name)
def test_a_saved_state_may_be_loaded_again(options: dict[str, Any]) -> None:
    """Averaging on, from there or from it, changes residuals in place, but not those that were saved."""
    state = State(group=LoopbackGroup(0, 1, {}), **options)
    ignored = [[torch.zeros(size, dtype=torch.float64) for size in SIZES] for _ in range(2)]
    for step in range(2):
        average(state, FIRST, step, *ignored)
    saved, means = state.state_dict(), []
    for again in range(3):
        if again:
            state.load_state_dict(saved)
        means.append([torch.zeros(size, dtype=torch.float64) for size in SIZES])
        for step in (2, 3):
            average(state, FIRST, step, ignored[0], means[-1])
    state.close()
    assert all(torch.equal(went_on, x) for went_on, *loaded in zip(*means, strict=True) for x in loaded)


def test_a_parameter_that_takes_anothers_place_gets_a_number_of_its_own() -> None:
    class Bucket:
        def __init__(self, parameters: list[Tensor]) -> None:
            self._parameters, self._values = parameters, torch.cat([p.detach() for p in parameters])

        def index(self) -> int:
            return 0

        def buffer(self) -> Tensor:
            return self._values

        def parameters(self) -> list[Tensor]:
            return self._parameters

    parameters: list[Tensor] = [torch.nn.Parameter(torch.linspace(0, 1, 50 + i)) for i in range(3)]
    state = State("double_squeeze", group=LoopbackGroup(0, 1, {}), bits=2)
    state.run_bucket(Bucket(parameters)).wait()
    del parameters[0]
    parameters.append(torch.nn.Parameter(torch.ones(7)))
    state.run_bucket(Bucket(parameters)).wait()
    kept = state.state_dict()["memory"]["worker"]
    state.close()
    assert kept["0"][0] == ((1, 51), (2, 52), (3, 7))


def test_a_residual_is_kept_while_no_bucket_has_its_parameter() -> None:
    options = METHODS[0]
    assert max(run(options, [FIRST] * 3 + [[[0, 1]]] * 2 + [REBUILT] * 2)) < 2e-6
    assert max(run(options, [FIRST] * 3 + [[[0, 1]]] * 2, restart_at=4)) < 2e-6


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_buckets_at_any_time(data: st.DataObject) -> None:
    """A plain dict by parameter is the reference."""
    residuals, reference = Residuals(), dict.fromkeys(range(len(SIZES)), 0.0)
    for value in range(1, data.draw(st.integers(2, 12))):
        order = data.draw(st.permutations(range(len(SIZES))))
        cuts = sorted(data.draw(st.sets(st.integers(1, len(SIZES) - 1), max_size=3)))
        for number, (lo, hi) in enumerate(
            itertools.pairwise([0, *cuts, data.draw(st.integers(cuts[-1] if cuts else 0, 5))])
        ):
            bucket = list(order[lo:hi])
            d = sum(SIZES[p] for p in bucket)
            e_d = residuals.worker(str(number), slices(bucket), d, CPU)
            for p, e in zip(bucket, e_d.split([SIZES[p] for p in bucket]), strict=True):
                assert bool((e == reference[p]).all())
                e.fill_(10.0 * value + p)
                reference[p] = 10.0 * value + p
        if data.draw(st.booleans()):
            saved, residuals = residuals.state_dict(), Residuals()
            residuals.load_state_dict(saved, CPU)


def test_files_from_before_residuals_belonged_to_parameters() -> None:
    """Buckets without slices, as the pipeline engine used to have them."""
    residuals = Residuals(0, 2)
    d = SIZES[0] + SIZES[1]
    old = {
        "worker": {"bucket-0": (((-1, d),), torch.arange(d).float())},
        "owner": {("bucket-0", ((-1, 192),)): torch.ones(192)},
    }
    residuals.load_state_dict(old, CPU)
    assert torch.equal(residuals.worker("bucket-0", slices([0, 1]), d, CPU), torch.arange(d).float())
    assert torch.equal(residuals.owner("bucket-0", slices([0, 1]), d), torch.ones(192))


# -- what other rules residuals keep


@pytest.mark.parametrize("options", METHODS, ids=name)
def test_residuals_are_kept_without_the_loss_scale(options: dict[str, Any]) -> None:
    """A scale that halves and doubles changes nothing but the unit of what comes out."""

    def work(group: LoopbackGroup) -> tuple[list[Tensor], dict, dict]:
        plain, scaled = (State(group=group, seed=4, **options) for _ in range(2))
        differences = []
        for step, scale in enumerate([1024.0, 1024.0, 512.0, 2.0**15, 1.0]):
            sums, means, found = ([torch.zeros(size, dtype=torch.float64) for size in SIZES] for _ in range(3))
            average(plain, FIRST, step, sums, means)
            scaled.loss_scale = scale
            average(scaled, FIRST, step, sums, found, scale)
            differences += [mean * scale - other for mean, other in zip(means, found, strict=True)]
        return differences, plain.state_dict()["memory"]["worker"], scaled.state_dict()["memory"]["worker"]

    for differences, plain, scaled in run_threads(3, work):
        assert not any(bool(difference.any()) for difference in differences)
        assert all(torch.equal(plain[key][1], scaled[key][1]) for key in plain)


@pytest.mark.parametrize("large", [1e38, 2e30])
def test_a_norm_that_overflows_leaves_residuals_as_they_were(large: float) -> None:
    """Values that float32 holds, whose L2 norm it does not, or only without the residual."""

    def work(group: LoopbackGroup) -> tuple[Tensor, bool]:
        state = State("grandk_mn", group=group, k=0.2, error_feedback=True)
        x = gradient(group.rank, 0, 0)
        state.submit(x, "x").wait()
        before = state.state_dict()["memory"]["worker"]["x"][1]
        found = state.submit(x.sign() * large, "x").wait()
        return found, torch.equal(before, state.state_dict()["memory"]["worker"]["x"][1])

    for found, same in run_threads(2, work):
        assert bool(found.isnan().all())
        assert same


def test_casqs_clusters_are_of_the_parameters_that_are_sent() -> None:
    """A bucket of much smaller values takes the place of another: its own centers, at once."""

    def work(group: LoopbackGroup) -> tuple[float, float]:
        def relative(state: State, key: str, parameter: int, scale: float) -> float:
            x = gradient(0, 0, parameter, scale)
            return float((state.submit(x, key, slices=slices([parameter])).wait() - x).norm() / x.norm())

        state = State("casq", group=group, bits=4, interval=100)
        relative(state, "0", 0, 1.0)
        return relative(state, "0", 4, 1e-4), relative(State("casq", group=group, bits=4), "0", 4, 1e-4)

    for after, fresh in run_threads(2, work):
        assert after < 1.5 * fresh


def test_memory_of_a_file_is_not_given_away_while_averages_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it is of another stream, which would have it at once when it is let go."""
    used: list[int] = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "averages")
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: used.append(x.data_ptr()))

    def loaded(key: str, parts: Slices | None) -> tuple[Residuals, list[int]]:
        residuals, size = Residuals(0, 2), sum(count for _, count in parts or [(key, 50)])
        whole = ((-1, size),) if parts is None else parts
        file = {
            "worker": {key: (whole, torch.ones(size))},
            "owner": {(key, whole): torch.ones(size)},
        }  # rank 0 owns all
        residuals.load_state_dict(file, CPU)
        used.clear()
        return residuals, [piece.data_ptr() for piece in residuals._pieces.values()]

    parts = ((0, 30), (1, 20))
    again, (first, _) = loaded("a", parts)
    assert again.worker("a", parts, 50, CPU).data_ptr() == first
    assert used == [first]
    rebuilt, pieces = loaded("a", parts)
    for key, bucket in (("b", parts[1:]), ("c", parts[:1])):
        rebuilt.worker(key, bucket, bucket[0][1], CPU)
    assert sorted(used) == sorted(pieces)
    older, pieces = loaded("a", None)
    older.worker("a", parts, 50, CPU)
    assert used == pieces
    owner, pieces = loaded("a", parts)
    owner.owner("b", parts[1:], 20)
    assert used == pieces


class _Bucket:
    """A bucket of DDP: gradients of some parameters, one after the other."""

    def __init__(self, index: int, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        self._index, self._parameters, self._buffer = index, parameters, torch.cat(gradients)

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[Tensor]:
        return self._parameters


USES: dict[str, list[list[list[int]]]] = {  # by step and rank, the parameters with a gradient
    "in turns": [[[0, 1], [0, 1]], [[2, 3, 4], [2, 3, 4]]],
    "by some ranks": [[[0, 1, 2], [2, 3]], [[4], [1]], [[], [0]]],
    "never two, then none": [[[0, 1, 4], [0, 1, 4]], [[], []]],
}


@pytest.mark.parametrize("uses", USES.values(), ids=USES)
@pytest.mark.parametrize("options", METHODS, ids=name)
def test_nothing_is_lost_of_parameters_whose_mean_ddp_drops(
    options: dict[str, Any], uses: list[list[list[int]]]
) -> None:
    """DDP drops the mean of a parameter that no rank has used in a step (`find_unused_parameters`)."""
    steps = 3 * len(uses)

    def rank_main(group: LoopbackGroup) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        state = State(**options, group=group)
        parameters = [torch.zeros(size) for size in SIZES]
        state.number_parameters(parameters)
        sums, means = ([torch.zeros(size, dtype=torch.float64) for size in SIZES] for _ in range(2))
        for step in range(steps):
            used = uses[step % len(uses)]
            for number, layout in enumerate(FIRST):
                x = [gradient(group.rank, step, p) * (p in used[group.rank]) for p in layout]
                found = state.run_bucket(_Bucket(number, [parameters[p] for p in layout], x)).wait()
                for p, g, mean in zip(layout, x, found.split([SIZES[p] for p in layout]), strict=True):
                    sums[p] += g.double()
                    means[p] += mean.double() * any(p in of_rank for of_rank in used)
        left = left_by_parameter(state)
        state.close()
        return sums, means, left

    results = run_threads(2, rank_main)
    for p in range(len(SIZES)):
        handed_in = sum(sums[p] for sums, _, _ in results)
        remembered = sum(left[p] for _, _, left in results)
        assert torch.allclose(2 * results[0][1][p] + remembered, handed_in, atol=1e-4), f"parameter {p}"
