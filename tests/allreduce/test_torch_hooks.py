"""Averages of torch's own hooks: over the state's ranks, one of several too, and tensors of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from pipecomp.allreduce.call import Counters
from pipecomp.allreduce.methods.baselines import HalfPrecisionHook, SingleTensorBucket
from pipecomp.allreduce.methods.powersgd import PowerSgdHook
from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S

pytestmark = pytest.mark.ranks

METHODS = ("none", "fp16", "powersgd")


def averaged_alone(rank: int, world: int, note: Any) -> dict[str, Any]:
    """By a group of this rank: a mean, the bytes that it took, and the mean of no values."""
    import torch
    import torch.distributed as dist

    from pipecomp.allreduce import State, allreduce_mean
    from pipecomp.distributed.rendezvous import join_processes

    join_processes()
    found = {}
    for method in METHODS:
        state = State(method, group=[rank])
        mean = allreduce_mean(state, torch.full((2, 2), float(rank + 1)))
        empty = allreduce_mean(state, torch.empty(0, 3), key="empty")
        found[method] = mean.flatten().tolist(), state.stats()["bytes_sent"], tuple(empty.shape)
        state.close()
    found["saved"] = saved_stays_as_it_was(State("powersgd", group=[rank]))
    found["begun"] = begins_as_saved(*(State("powersgd", group=[rank]) for _ in range(2)))
    found["after"] = after_an_overflow(rank)
    dist.barrier()  # the first rank has the store that the other one's groups are made with
    return found


def saved_stays_as_it_was(state: Any) -> bool:
    """Return True if averaging on from a state's dict leaves that alone."""
    import torch

    x = torch.randn(20, 20, generator=torch.Generator().manual_seed(0))
    for _ in range(3):  # the third compresses
        state.submit(x, "x").wait()
    saved = state.state_dict()
    before = saved["torch"]["x"]["error_dict"][0].clone()
    state.load_state_dict(saved)
    for _ in range(2):
        state.submit(x, "x").wait()
    state.close()
    return bool(before.any()) and torch.equal(before, saved["torch"]["x"]["error_dict"][0])


def begins_as_saved(state: Any, new: Any) -> bool:
    """Return True if a state that has averaged goes on as a new one does from what was saved at the beginning."""
    import torch

    x, saved, means = torch.randn(20, 20, generator=torch.Generator().manual_seed(0)), state.state_dict(), []
    for _ in range(4):
        state.submit(x, "x").wait()
    for each in (state, new):
        each.load_state_dict(saved)
        assert not each.state_dict()["torch"]
        means.append([each.submit(x, "x").wait().clone() for _ in range(4)])
        each.close()
    return all(torch.equal(*pair) for pair in zip(*means, strict=True))


def after_an_overflow(rank: int) -> list[list[bool]]:
    """Return for each step if its mean over both ranks is finite, where one has an infinite gradient in step 4."""
    import torch

    from pipecomp.allreduce import State

    out = []
    for more in ({}, {"adaptive": {"every": 3, "rank": [1, 4]}}):
        state, draw, finite = State("powersgd", group=[0, 1], **more), torch.Generator().manual_seed(rank), []
        for step in range(7):
            x = torch.randn(20, 20, generator=draw)
            if step == 4 and rank == 1:
                x[3, 3] = torch.inf
            finite.append(bool(state.submit(x, "x").wait().isfinite().all()))
        state.close()
        out.append(finite)
    return out


def test_torchs_hooks_average_over_the_states_ranks_and_take_tensors_without_values() -> None:
    for rank, found in run_ranks(2, averaged_alone, timeout_s=HANG_S).items():
        assert found.pop("saved"), "what goes on from a saved state changes it"
        assert found.pop("begun"), "a state keeps what a saved one has not"
        assert found.pop("after") == [[True] * 4 + [False] + [True] * 2] * 2, "an overflow stays in what torch keeps"
        assert found == dict.fromkeys(METHODS, ([rank + 1.0] * 4, 0, (0, 3)))


@pytest.mark.parametrize("made", [HalfPrecisionHook, lambda group: PowerSgdHook(1, group)], ids=["fp16", "powersgd"])
def test_bytes_are_counted_after_torch_has_begun(monkeypatch: pytest.MonkeyPatch, made: Any) -> None:
    """A thread may wait there, and a log that is written meanwhile has none of a bucket's bytes, as of those raw."""
    counters, before = Counters(), []

    def begin(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        before.append(counters.bytes_sent)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(default_hooks, "fp16_compress_hook", begin)
    monkeypatch.setattr(powerSGD_hook, "powerSGD_hook", begin)
    bucket = SingleTensorBucket(torch.ones(4, 5), 0)
    assert made(None).run(bucket, "x", counters, ["x"]).wait().tolist() == [1.0] * 20
    assert (before, counters.bytes_sent) == ([0], 40 if made is HalfPrecisionHook else 80)
