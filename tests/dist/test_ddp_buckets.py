"""Nothing of a gradient is lost when DDP cuts its buckets anew, as it does after the first step of most models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipecomp.distributed.local_launcher import run_ranks
from tests.allreduce.test_error_feedback import left_by_parameter
from tests.limits import HANG_S

pytestmark = pytest.mark.ranks

WIDTH, LAYERS, STEPS, CAP_MB = 48, 6, 5, 0.02  # two layers to a bucket
USED = (3, 0, 5, 1, 4, 2)  # gradients come in another order than DDP expects at first
METHODS: list[dict[str, Any]] = [
    {"method": "double_squeeze", "bits": 2, "group_size": 32},
    {"method": "casq", "bits": 3, "interval": 2},
]


class Shuffled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in USED:
            x = self.layers[number](x).tanh()
        return x


def averaged_by_ddp(rank: int, world: int, note: Any, options: dict[str, Any]) -> Any:
    """Σ in, Σ out and what is left of each parameter, and the parameters of each bucket of each step."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from pipecomp.allreduce import State, ddp_hook
    from pipecomp.distributed.rendezvous import join_processes

    join_processes()
    model = Shuffled()
    parameters = list(model.parameters())
    place = {parameter: number for number, parameter in enumerate(parameters)}
    sizes = [parameter.numel() for parameter in parameters]
    went_in, came_out = ([torch.zeros(size, dtype=torch.float64) for size in sizes] for _ in range(2))
    buckets: list[list[list[int]]] = []
    order: list[int] = []  # in which the state has met them: its own numbers

    def hook(state, bucket):  # without annotations, which DDP would read
        numbers = [place[parameter] for parameter in bucket.parameters()]
        order.extend(number for number in numbers if number not in order)
        buckets[-1].append(numbers)
        for number, gradient in zip(numbers, bucket.gradients(), strict=True):
            went_in[number] += gradient.double().flatten()
        return ddp_hook(state, bucket)

    ddp = DistributedDataParallel(model, bucket_cap_mb=CAP_MB)
    state = State(seed=4, **options)
    ddp.register_comm_hook(state, hook)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        buckets.append([])
        ddp(torch.randn(4, WIDTH, generator=draw)).square().sum().backward()
        for number, parameter in enumerate(parameters):
            came_out[number] += parameter.grad.double().flatten()
            parameter.grad = None
    left = dict(zip(order, left_by_parameter(state, [sizes[number] for number in order]), strict=True))
    state.close()
    dist.destroy_process_group()
    return [[x.numpy() for x in found] for found in (went_in, came_out, [left[n] for n in range(len(sizes))])], buckets


@pytest.mark.parametrize("options", METHODS, ids=lambda options: options["method"])
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_ddps_own_buckets(options, world):
    ranks = run_ranks(world, averaged_by_ddp, options, timeout_s=HANG_S)
    buckets = ranks[0][1]
    assert sorted(map(sorted, buckets[0])) != sorted(map(sorted, buckets[-1])), "DDP has not cut its buckets anew"
    for p in range(2 * LAYERS):
        went_in, left = (sum(found[part][p] for found, _ in ranks.values()) for part in (0, 2))
        missing = went_in - world * ranks[0][0][1][p] - left
        assert (missing**2).sum() ** 0.5 < 2e-6 * (went_in**2).sum() ** 0.5
