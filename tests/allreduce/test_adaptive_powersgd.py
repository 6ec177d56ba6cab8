"""PowerSGD with a rank for each layer, over real ranks: plans alike, nothing lost, bytes as counted, resumed alike."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipecomp.allreduce import State, ddp_hook, predict
from pipecomp.allreduce.methods.powersgd import squared_errors
from pipecomp.allreduce.predict import plan_of
from pipecomp.config import Config
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import ConfigError
from pipecomp.gradient_config import Gradients
from tests.limits import HANG_S

EVERY = 3
OWN = 2
SHAPES = {"flat spectrum": (40, 32), "steep": (24, 4, 5), "weak": (48, 30), "vector": (33,), "small": (2, 2)}
MATRICES = ("flat spectrum", "steep", "weak")
OPTIONS: dict[str, Any] = {"method": "powersgd", "rank": OWN, "adaptive": {"every": EVERY, "rank": [1, 4, 8]}}
UNIFORM: dict[str, Any] = {"method": "powersgd", "rank": OWN}


def gradient(name: str, rank: int, step: int) -> Tensor:
    """Alike in part on all ranks. Up to the sixth step the steep one has three strong directions."""
    shape = SHAPES[name]
    draws = [torch.Generator().manual_seed(1000 * step + 31 * list(SHAPES).index(name) + r) for r in (99, rank)]
    x = sum(w * torch.randn(shape, generator=draw) for w, draw in zip((1.0, 0.3), draws, strict=True))
    assert isinstance(x, Tensor)
    if name == "steep":
        strong = torch.randn(shape[0], 3, generator=draws[0]) @ torch.randn(3, 20, generator=draws[0])
        x = ((3.0 if step < 6 else 1e-3) * strong + 0.01 * x.view(shape[0], -1)).view(shape)
    return 0.1 * x if name == "weak" else x


class Bucket:
    """A bucket as DDP gives to hooks: some gradients, one behind the other."""

    def __init__(self, number: int, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        self._number, self._parameters = number, parameters
        self._flat = torch.cat([g.view(-1) for g in gradients])
        pieces = self._flat.split([g.numel() for g in gradients])
        self._gradients = [piece.view_as(g) for piece, g in zip(pieces, gradients, strict=True)]

    def index(self) -> int:
        return self._number

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        return self._gradients

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def is_last(self) -> bool:
        return True


def digest(*tensors: Tensor) -> str:
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()


class Training:
    """Buckets of a model without DDP; `sent` has what each step put on this rank's links."""

    def __init__(self, rank: int, options: dict[str, Any] = OPTIONS) -> None:
        self.rank, self.state = rank, State(**options)
        self.parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.means: dict[int, dict[str, Tensor]] = {}
        self.values: list[dict[Any, int]] = []
        self.sent: list[int] = []
        for number, parameter in enumerate(self.parameters.values()):
            self.state._numbers[parameter] = number

    def step(self, number: int, layout: tuple[tuple[str, ...], ...] = (tuple(SHAPES),)) -> dict[str, Tensor]:
        """layout: the names in each bucket."""
        before, means = self.state.stats()["bytes_sent"], {}
        for i, names in enumerate(layout):
            parameters = [self.parameters[name] for name in names]
            bucket = Bucket(i, parameters, [gradient(name, self.rank, number) for name in names])
            found = self.state.run_bucket(bucket).wait()
            assert found.data_ptr() == bucket.buffer().data_ptr()
            means |= {name: g.clone() for name, g in zip(names, bucket.gradients(), strict=True)}
        self.means[number] = means
        self.values.append(self.state.layer_values())
        self.sent.append(self.state.stats()["bytes_sent"] - before)
        return means

    def residuals(self) -> dict[str, Tensor]:
        """The mean over ranks of what each keeps."""
        kept = {name: self.state.state_dict()["adaptive"]["layers"][i][0].clone() for i, name in enumerate(SHAPES)}
        for residual in kept.values():
            dist.all_reduce(residual)
        return {name: e.view(SHAPES[name]) / dist.get_world_size() for name, e in kept.items()}


SPLIT = (("flat spectrum", "vector"), ("steep", "small", "weak"))


def several(rank: int, n: int, note: Any, folder: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    found = {
        "steps": steps(rank, n),
        "tensors": tensors(rank),
        "ddp": in_ddp(rank),
        "resumed": [resumed(rank, stop, folder) for stop in (1, 2, EVERY, EVERY + 2)],
        "against uniform": against_uniform(rank, n),
        "nan": nan(rank),
    }
    dist.destroy_process_group()
    return found


def steps(rank: int, n: int) -> dict[str, Any]:
    training = Training(rank)
    lost = []
    totals = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for number in range(4 * EVERY):
        training.step(number, SPLIT if number >= 2 * EVERY + 1 else (tuple(SHAPES),))
        for name, total in totals.items():
            exact = sum(gradient(name, r, number).double() for r in range(n)) / n
            total += exact - training.means[number][name]
        if number >= 2:
            residuals = training.residuals()
            lost.append(max(float((totals[name] - residuals[name]).abs().max()) for name in SHAPES))
    return {
        "digests": [digest(*means.values()) for means in training.means.values()],
        "values": training.values,
        "sent": training.sent,
        "lost": lost,
        "residual": max(float(e.norm()) for e in training.residuals().values()),
    }


def tensors(rank: int) -> dict[str, Any]:
    """As the engine does it: each by itself, under its name."""
    state = State(**OPTIONS)
    for number in range(EVERY + 1):
        means = [state.submit(gradient(name, rank, number), name).wait() for name in SHAPES]
    return {"digest": digest(*means), "values": state.layer_values()}


def in_ddp(rank: int) -> dict[str, Any]:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(40, 40), nn.ReLU()) for _ in range(6)), nn.Linear(40, 10))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    state = State(group=dist.new_group(), **OPTIONS)
    ddp.register_comm_hook(state, ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(2 * EVERY + 1):
        x = torch.randn(16, 40, generator=draw)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x), x[:, :10]).backward()
        optimizer.step()
    return {"weights": digest(*(p.detach() for p in model.parameters())), "values": state.layer_values()}


def resumed(rank: int, stop: int, folder: str) -> bool:
    first, second = Training(rank), Training(rank)
    for number in range(stop):
        first.step(number)
    first.state.save(Path(folder) / f"{dist.get_world_size()}-{stop}-{rank}")
    second.state.load(Path(folder) / f"{dist.get_world_size()}-{stop}-{rank}")
    after = [digest(*training.step(n).values()) for n in range(stop, stop + 6) for training in (first, second)]
    assert first.values[-1] == second.values[-1] != {}
    return after[::2] == after[1::2]


def against_uniform(rank: int, n: int) -> dict[str, list[float]]:
    """Squared errors of the mean, and bytes, after the first plan."""
    found: dict[str, list[float]] = {"error": [], "sent": []}
    for options in (OPTIONS, UNIFORM):
        training = Training(rank, options)
        error = 0.0
        for number in range(EVERY, EVERY + 24):  # without what the first steps' other gradients leave behind
            means = training.step(number % 6)
            for name in MATRICES if number >= 2 * EVERY else ():
                error += float((sum(gradient(name, r, number % 6) for r in range(n)) / n - means[name]).square().sum())
        found["error"].append(error)
        found["sent"].append(sum(training.sent[EVERY:]))
    return found


def nan(rank: int) -> dict[str, Any]:
    """Measured in the step before a plan."""
    state = State(**OPTIONS)
    for number in range(EVERY + 1):
        for name in MATRICES:
            g = gradient(name, rank, number)
            if number == EVERY - 1 and rank == 0 and name == "weak":
                g[0, 0] = torch.nan
            mean = state.submit(g, name).wait()
    return {"last": bool(mean.isfinite().all()), "values": state.layer_values()}


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("saved")
    return run_ranks(request.param, several, str(folder), timeout_s=HANG_S)


pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]
Ranks = dict[int, dict[str, Any]]


def test_ranks_plan_and_average_alike(ranks: Ranks) -> None:
    for out in ranks.values():
        assert out["steps"]["digests"] == ranks[0]["steps"]["digests"]
        assert out["steps"]["values"] == ranks[0]["steps"]["values"]
        assert out["tensors"] == ranks[0]["tensors"]
        assert out["ddp"] == ranks[0]["ddp"]
    plans = ranks[0]["steps"]["values"]
    assert plans[:EVERY] == [{}] * EVERY
    assert set(plans[EVERY]) == {list(SHAPES).index(name) for name in MATRICES}  # the others have no rank
    assert len({tuple(plan.items()) for plan in plans}) > 2
    assert set(ranks[0]["tensors"]["values"]) == set(MATRICES)
    assert set(ranks[0]["ddp"]["values"]) == set(range(0, 14, 2))  # weights; which number each has is DDP's


def test_nothing_is_lost_when_ranks_and_buckets_change(ranks: Ranks) -> None:
    """The part that has not come out of the average yet is the mean of the residuals, after every step."""
    for out in ranks.values():
        assert out["steps"]["residual"] > 1
        assert max(out["steps"]["lost"]) < 1e-4


def test_bytes_are_those_that_plans_count(ranks: Ranks) -> None:
    n = len(ranks)
    for out in ranks.values():
        found = out["steps"]
        for number, (values, sent) in enumerate(zip(found["values"], found["sent"], strict=True)):
            buckets = SPLIT if number >= 2 * EVERY + 1 else (tuple(SHAPES),)
            wanted = 8 * len(MATRICES) * 4 * (n - 1) if number in (EVERY, 2 * EVERY, 3 * EVERY) else 0
            for names in buckets:
                if number < 2:
                    wanted += predicted("fp16", names, n, None) * 2
                    continue
                having = {name: values.get(list(SHAPES).index(name), OWN) for name in names if name in MATRICES}
                for rank in set(having.values()):
                    rest = [name for name in names if name not in MATRICES and rank == min(having.values())]
                    wanted += predicted("powersgd", [*(k for k, v in having.items() if v == rank), *rest], n, rank)
            assert sent == wanted, number


def predicted(method: str, names: Any, n: int, rank: int | None) -> int:
    """Bytes of one bucket of these parameters."""
    shapes = [SHAPES[name] for name in names]
    d = sum(torch.Size(shape).numel() for shape in shapes)
    options = {} if rank is None else {"rank": rank, "shapes": shapes}
    found = predict(method, d, n, bandwidth_bit_per_s=1e9, **options)
    assert found.exact
    return found.bytes_sent


def test_a_prediction_is_that_of_the_first_window(ranks: Ranks) -> None:
    shapes, n = list(SHAPES.values()), len(ranks)
    d = sum(torch.Size(shape).numel() for shape in shapes)
    found = predict(d=d, n=n, bandwidth_bit_per_s=1e9, shapes=shapes, **OPTIONS)
    assert found.bytes_sent == ranks[0]["steps"]["sent"][2]
    assert not found.exact
    assert plan_of(Gradients(**UNIFORM), d, n, shapes).exact


def test_fewer_bytes_at_no_more_error(ranks: Ranks) -> None:
    """Also of what is averaged, not only of what plans measure."""
    (error, uniform), (sent, all_sent) = (ranks[0]["against uniform"][key] for key in ("error", "sent"))
    assert error < uniform
    assert sent < all_sent


def test_a_saved_state_goes_on_alike(ranks: Ranks) -> None:
    """Stopped while all is sent uncompressed, where a plan is due, and after one."""
    assert all(all(out["resumed"]) for out in ranks.values())


def test_a_gradient_that_is_not_finite_is_not_planned_with(ranks: Ranks) -> None:
    for out in ranks.values():
        assert out["nan"]["last"], "it is in a later mean"
        assert out["nan"]["values"] == ranks[0]["nan"]["values"]
        assert set(out["nan"]["values"]) == set(MATRICES)


@pytest.mark.parametrize("shape", [(40, 32), (7, 90), (64, 4, 9)])
def test_measured_errors_are_those_of_the_best_low_rank_matrices(shape: tuple[int, ...]) -> None:
    for scale in (1.0, 1e25, 1e-25):
        steep = torch.logspace(0, -3, min(shape[0], torch.Size(shape[1:]).numel()))
        u, _, v = torch.linalg.svd(torch.randn(shape).view(shape[0], -1), full_matrices=False)
        x = scale * (u * steep) @ v
        strengths = (scale * steep.double()).square()
        found = squared_errors(x.view(shape), (1, 2, 5))
        exact = [float(strengths[r:].sum()) for r in (1, 2, 5)]
        assert found == pytest.approx(exact, rel=0.02, abs=1e-6 * float(strengths.sum()))


def test_matrices_that_are_not_compressed_have_no_error() -> None:
    found = squared_errors(torch.randn(6, 6), (1, 2, 3))
    assert found[0] > found[1] > 0  # 12 and 24 values in place of 36
    assert found[2] == 0


@pytest.mark.parametrize(
    ("adaptive", "key"),
    [
        ({"bits": [4]}, "gradients.adaptive.bits"),
        ({"rank": [2]}, "gradients.adaptive.rank"),
        ({"rank": [0, 2]}, "gradients.adaptive.rank"),
        ({"rank": [1.5]}, "gradients.adaptive.rank"),
        ({"rank": 4}, "gradients.adaptive.rank"),
    ],
)
def test_settings_that_could_not_take_effect_are_named(adaptive: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({"gradients": {**UNIFORM, "adaptive": adaptive}})
    assert caught.value.key == key


def test_ranks_that_are_tried_by_default_are_around_the_methods_own() -> None:
    found = {rank: Gradients(method="powersgd", rank=rank, adaptive={}).adaptive["rank"] for rank in (1, 2, 4)}
    assert found == {1: (1, 2, 4), 2: (1, 2, 4, 8), 4: (1, 2, 4, 8, 16)}
