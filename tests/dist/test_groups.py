"""Groups that only their members make, in whatever number and order, among groups that all ranks make."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipecomp.allreduce.group import Group
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.distributed.rendezvous import join_processes
from tests.limits import HANG_S

pytestmark = pytest.mark.ranks


def numbers(rank: int, world: int, note: Any) -> list[Any]:
    """Gather with this rank's groups: of pairs, twice each, and then of a group that torch makes of all ranks."""
    join_processes()
    found: list[Any] = []
    for pair in combinations(range(world), 2):
        if rank in pair:
            for shared in (True, True, False):
                group = Group(list(pair), shared=shared)
                found.append((pair, group.gather_numbers([rank])))
    everyone = dist.new_group()
    rows = [torch.zeros(1) for _ in range(world)]
    dist.all_gather(rows, torch.full((1,), float(rank)), group=everyone)
    return [*found, [row.item() for row in rows]]


def test_ranks_are_in_different_numbers_of_groups() -> None:
    world = 4
    found = run_ranks(world, numbers, timeout_s=HANG_S)
    for rank in range(world):
        pairs = [pair for pair in combinations(range(world), 2) if rank in pair]
        expected = [(pair, [[float(r)] for r in pair]) for pair in pairs for _ in range(3)]
        assert found[rank] == [*expected, [0.0, 1.0, 2.0, 3.0]]
