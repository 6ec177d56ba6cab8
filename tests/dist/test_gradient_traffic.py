"""Exchanges that give way: asked before every slice, and the same bits as exchanges that do not."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch

from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S

pytestmark = pytest.mark.ranks

METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "fp16": {},
    "powersgd": {"rank": 2},
    "double_squeeze": {"bits": 1, "group_size": 64},
    "global_qsgd": {"bits": 4, "levels": "linear"},
}
VALUES = (700, 1000)  # at 32 bits more than a slice, also for each of three ranks


def both_ways(rank: int, world: int, note: Any, method: str) -> tuple[list[str], int]:
    from pipecomp.allreduce import State, allreduce_mean
    from pipecomp.distributed.rendezvous import join_processes

    join_processes()
    means, asked = [], [0]

    def ask() -> None:
        asked[0] += 1

    for gives_way in (False, True):
        state = State(method, seed=3, **METHODS[method])
        state.group.give_way = ask if gives_way else None
        found = []
        for step in range(4):
            x = torch.randn(VALUES, generator=torch.Generator().manual_seed(10 * step + rank))
            found.append(allreduce_mean(state, x, "x"))
        state.close()
        means.append(torch.stack(found))
    assert torch.equal(*means)
    return means[0].view(torch.int32).sum().item(), asked[0]


@pytest.mark.parametrize("method", METHODS)
def test_giving_way_changes_no_bit(method):
    found = run_ranks(3, both_ways, method, timeout_s=HANG_S)
    assert len({bits for bits, _ in found.values()}) == 1
    assert all(asked >= 4 for _, asked in found.values())


def two_at_a_time(rank: int, world: int, note: Any, method: str) -> list[bool]:
    """Two states of the same ranks, whose threads come to send in another order on each rank."""
    from pipecomp.allreduce import State
    from pipecomp.distributed.rendezvous import join_processes

    join_processes()
    states = [State(method, group=[0, 1], **METHODS[method]) for _ in range(2)]
    for number, state in enumerate(states):
        state.group.give_way = partial(time.sleep, 0.3 if number == rank else 0.0)
    x = [torch.full((5, 500), 1.0 + rank), torch.full((5, 100), 3.0 + rank)]
    means = [state.submit(each, "x") for state, each in zip(states, x, strict=True)]
    found = [torch.allclose(mean.wait(), each - rank + 0.5) for mean, each in zip(means, x, strict=True)]
    for state in states:
        state.close()
    return found


@pytest.mark.parametrize("method", ["fp16", "powersgd", "none"])
def test_states_of_the_same_ranks_do_not_meet_each_other(method):
    assert run_ranks(2, two_at_a_time, method, timeout_s=HANG_S) == {0: [True, True], 1: [True, True]}


def in_slices(rank: int, world: int, note: Any) -> tuple[list[Any], bool]:
    """Return the operations with the bytes before each, and True if the received values are right."""
    from pipecomp.allreduce import group as of_groups
    from pipecomp.allreduce.group import SLICE, Group
    from pipecomp.distributed.rendezvous import join_processes

    join_processes()
    group, left = Group(), []
    group.give_way = lambda: left.append(("asked", group.bytes_sent))
    of_groups.wait_until_sent = lambda sockets, most_s: left.append((f"{len(sockets)} left", group.bytes_sent))
    counts = [2 * SLICE + 5, 0, SLICE]  # what each rank sends to all
    data = torch.full((counts[rank],), rank, dtype=torch.uint8)
    pending = group.gather(data, counts)
    right = all(bool((part == r).all()) and part.numel() == counts[r] for r, part in enumerate(pending.wait()))
    pending.finish()
    return left, right


def test_every_slice_waits_for_the_one_before_and_is_asked_for():
    """In the system one waits at a time: what is handed over cannot give way any more."""
    found = run_ranks(3, in_slices, timeout_s=HANG_S)
    assert all(right for _, right in found.values())
    one = 1 << 16
    sent = [one, 2 * one, 2 * one + 5, 3 * one + 5, 4 * one + 5]  # before each slice but the first
    assert found[0][0] == [("asked", 0), *((did, count) for count in sent for did in ("2 left", "asked"))]
    assert found[1][0] == []
    assert found[2][0] == [("asked", 0), ("2 left", one), ("asked", one)]
