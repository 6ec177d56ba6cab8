"""Weights that all replicas have read alike are not sent to anyone; what differs becomes the first one's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipecomp.cluster.local_ranks import run_ranks
from tests.limits import HANG_S

pytestmark = pytest.mark.ranks


def matched(rank: int, world: int, note: Any, other: int) -> tuple[list[list[float]], int]:
    """What the replicas end with where rank `other` has another second weight, and how many weights were sent."""
    import torch.distributed as dist

    from pipecomp.cluster.rendezvous import join_processes
    from pipecomp.engine.matching import match_replicas

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
