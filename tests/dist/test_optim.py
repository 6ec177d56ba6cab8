"""QuantizedAdam over real processes: with DDP and without, the same bits on all ranks and as with threads."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from pipecomp.allreduce.loopback import LoopbackGroup, run_threads
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.optim import QuantizedAdam
from tests.limits import HANG_S

pytestmark = pytest.mark.ranks


def train(rank: int, group: Any, *, ddp: bool, bad_at: int = -1) -> tuple[str, float, int]:
    """Digest of the parameters after 20 steps on this rank's own data, last loss, skipped steps."""
    draw = torch.Generator().manual_seed(4)
    shapes = ((16, 48), (48,), (5, 48), (5,))
    inner, outer = torch.nn.Linear(16, 48), torch.nn.Linear(48, 5)
    model: torch.nn.Module = torch.nn.Sequential(inner, torch.nn.Tanh(), outer)
    for p, shape in zip((inner.weight, inner.bias, outer.weight, outer.bias), shapes, strict=True):
        p.data = torch.randn(shape, generator=draw).view(p.shape) / 4
    parameters = list(model.parameters())
    if ddp:
        model = torch.nn.parallel.DistributedDataParallel(model)
        model.register_comm_hook(None, QuantizedAdam.keep_local)
    optimizer = QuantizedAdam(parameters, lr=1e-2, freeze_step=6, group=group)
    own = torch.Generator().manual_seed(rank)
    loss = torch.zeros(())
    for step in range(20):
        x = torch.randn(8, 16, generator=own)
        if step == bad_at and rank == 1:
            x[0, 0] = float("nan")
        optimizer.zero_grad()
        loss = (model(x) - x[:, :5].square()).square().mean()
        loss.backward()
        optimizer.step()
    skipped = optimizer.stats()["skipped_steps"]
    optimizer.close()
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest(), float(loss.detach()), skipped


def real_rank(rank: int, world: int, note: Any, bad_at: int) -> tuple[str, str, int]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    with_ddp = train(rank, None, ddp=True, bad_at=bad_at)
    without = train(rank, dist.new_group(list(range(world))), ddp=False, bad_at=bad_at)
    dist.destroy_process_group()
    return with_ddp[0], without[0], without[2]


@pytest.mark.filterwarnings("ignore:a gradient is NaN")
@pytest.mark.parametrize(("world", "bad_at"), [(2, -1), (3, 9)])
def test_real_ranks_agree_with_each_other_and_with_threads(world: int, bad_at: int) -> None:
    ranks = run_ranks(world, real_rank, bad_at, timeout_s=HANG_S)
    before = torch.get_num_threads()
    torch.set_num_threads(1)

    def as_thread(group: LoopbackGroup) -> tuple[str, float, int]:
        return train(group.rank, group, ddp=False, bad_at=bad_at)

    threads = run_threads(world, as_thread)
    torch.set_num_threads(before)
    skipped = int(bad_at >= 0)
    assert set(ranks.values()) == {(threads[0][0], threads[0][0], skipped)}
    assert {t[0] for t in threads} == {threads[0][0]}
    assert train(0, None, ddp=False)[0] != threads[0][0]
