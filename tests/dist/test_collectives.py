"""Objects that ranks exchange: as many bytes as are allowed, and none that are nobody's business."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import WireError
from tests.limits import HANG_S

pytestmark = pytest.mark.ranks


def exchanges(rank: int, world: int, note: Any) -> dict[str, Any]:
    """Rank 1 does by hand what the functions do, with sizes of its own."""
    from pipecomp.distributed import collectives
    from pipecomp.distributed.rendezvous import join_processes

    join_processes()
    value = {"rank": rank, "pair": (1, None), 3: {"text": "x" * rank}}
    out: dict[str, Any] = {
        "gathered": collectives.gathered(value),
        "told": collectives.broadcast(value, 2),
        "pair": collectives.gathered(rank, dist.new_group([0, 2])) if rank != 1 else dist.new_group([0, 2]) and None,
    }
    long = torch.tensor([4096])
    if rank == 1:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(sizes, long)
        rows = [torch.empty(4096, dtype=torch.uint8) for _ in range(world)]
        dist.all_gather(rows, torch.full((4096,), ord(" "), dtype=torch.uint8).fill_(ord("7")))
        out["beyond"] = [int(row[int(size) :].sum()) for row, size in zip(rows, sizes, strict=True)][::2]
    else:
        collectives.gathered(value)
    for size in (collectives.MAX_OBJECT_BYTES + 1, -1):
        if rank == 1:
            dist.all_gather([torch.zeros(1, dtype=torch.int64) for _ in range(world)], torch.tensor([size]))
            dist.broadcast(torch.tensor([size]), 1)
        else:
            for call in (lambda: collectives.gathered(value), lambda: collectives.broadcast(None, 1)):
                with pytest.raises(WireError, match=f"rank 1 sends an object of {size} bytes, allowed: 268435456"):
                    call()
    dist.barrier()
    return out


def test_objects_have_limits_and_nothing_beside_them_is_sent() -> None:
    ranks = run_ranks(3, exchanges, timeout_s=HANG_S)
    values = [{"rank": rank, "pair": (1, None), 3: {"text": "x" * rank}} for rank in range(3)]
    for rank, out in ranks.items():
        assert out["gathered"] == values
        assert out["told"] == values[2]
        assert out["pair"] == (None if rank == 1 else [0, 2])
    assert ranks[1]["beyond"] == [0, 0], "what happened to be in memory"
