"""Weights that all replicas have read alike are not sent to anyone; what differs becomes the first one's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.stages import modules
from tests.limits import HANG_S
from tests.models import ds_config

pytestmark = pytest.mark.ranks


def matched(rank: int, world: int, note: Any, other: int) -> tuple[list[list[float]], int]:
    """Return the replicas' weights where rank `other` has another second weight, and the number of weights sent."""
    import torch.distributed as dist

    from pipecomp.distributed.rendezvous import join_processes
    from pipecomp.engine.replica_sync import match_replicas

    join_processes()
    sent, broadcast = [], dist.broadcast
    dist.broadcast = lambda tensor, **given: (sent.append(tensor.numel()), broadcast(tensor, **given))
    weights = [torch.nn.Parameter(torch.arange(4.0).view(2, 2) + i) for i in range(3)]
    weights.append(torch.nn.Parameter(torch.tensor(7.0, dtype=torch.bfloat16), requires_grad=False))
    if rank == other:
        with torch.no_grad():
            weights[1][0, 0] = -0.0 if other else 5.0
    match_replicas(weights, dist.group.WORLD)
    match_replicas([], dist.group.WORLD)
    return [w.detach().float().view(-1).tolist() for w in weights], len(sent)


@pytest.mark.parametrize(("other", "first"), [(0, 5.0), (2, 1.0), (9, 1.0)])
def test_only_what_differs_is_sent(other: int, first: float) -> None:
    found = run_ranks(3, matched, other, timeout_s=HANG_S)
    for weights, sent in found.values():
        assert weights == [[0, 1, 2, 3], [first, 2, 3, 4], [2, 3, 4, 5], [7]]
        assert sent == (other < 3)


def statistics(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    """A model with buffers that each process draws for itself, and with batch norm's, of other data on each replica."""
    import pipecomp
    from pipecomp.data import eval_batches

    def start() -> Any:
        torch.manual_seed(rank)
        norm = torch.nn.BatchNorm1d(5)
        norm.register_buffer("drawn", torch.randn(3), persistent=False)
        net = torch.nn.Sequential(torch.nn.Linear(5, 5), norm, torch.nn.Linear(5, 2))
        return pipecomp.initialize(
            modules(net, (5,)), 1, ds_config(), data(24), loss_fn=torch.nn.functional.cross_entropy
        )

    def data(count: int) -> list[dict[str, torch.Tensor]]:
        draw = torch.Generator().manual_seed(count)
        return [{"pixel_values": torch.randn(5, generator=draw), "labels": torch.tensor(i % 2)} for i in range(count)]

    def evaluated(engine: Any) -> float:
        return float(engine.eval_batch(iter(eval_batches(data(8), 4)), num_micro_batches=2))

    engine = start()
    norm = engine.stage.get_submodule("1")
    out: dict[str, Any] = {"drawn": norm.drawn.tolist()}
    for _ in range(3):
        engine.train_batch()
    engine.save_checkpoint(folder)
    out["own"] = norm.running_mean.tolist()
    out["evaluated"] = [evaluated(engine)]
    out["common"] = [norm.running_mean.tolist(), norm.num_batches_tracked.tolist()]
    engine.close()
    engine = start()
    engine.load_checkpoint(folder)
    out["evaluated"].append(evaluated(engine))
    engine.close()
    return out


def test_buffers_are_the_first_replicas_at_the_start_and_in_evaluation(tmp_path: Path) -> None:
    found = run_ranks(2, statistics, str(tmp_path), timeout_s=HANG_S)
    first, second = found[0], found[1]
    assert first["drawn"] == second["drawn"]
    assert first["own"] != second["own"]
    assert first["common"] == second["common"] == [first["own"], 9]
    assert first["evaluated"] == second["evaluated"]
    assert len(set(first["evaluated"])) == 1, "of the checkpoint as of what it was made of"
