"""Micro-batches in flight in the engine: measurements after a step, and the choice of all stages."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipecomp.engine import schedule
from pipecomp.engine.schedule import InFlightControl
from pipecomp.stats import LinkStats

WHOLE = SimpleNamespace(lowest_trained=0)  # all stages train


def after(own: list[dict[int, float]], others: list[float], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the first of two stages. own: its waits by micro-batch, step by step; others: the other stage's report."""

    def all_reduce(seen: torch.Tensor, op: Any, group: Any) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        torch.maximum(seen, torch.tensor(others), out=seen)

    monkeypatch.setattr(schedule.dist, "all_reduce", all_reduce)
    grid = SimpleNamespace(get_pipe_parallel_group=lambda: None)
    context: Any = SimpleNamespace(stage_id=0, num_stages=2, plan=WHOLE, device=torch.device("cpu"), grid=grid)
    found, stats = InFlightControl(context, "auto", 8), LinkStats()
    for waits in own:
        found.begin_step()
        for micro_batch, seconds in waits.items():
            with found.waiting(micro_batch, stats):
                stats.wait_seconds += seconds
        found.end_step(1.0)
    return found.in_flight


def test_the_longest_wait_of_any_stage_counts(monkeypatch):
    assert after([{}] * 2, [0.5, 1.0, -7], monkeypatch).value == 3
    assert after([{1: 0.25, 2: 0.25}] * 2, [0.0, 1.0, -7], monkeypatch).value == 3
    assert after([{1: 0.005, 2: 0.005}] * 2, [0.0, 1.0, -7], monkeypatch).value == 2, "a hundredth of a step"
    assert after([{0: 0.5}] * 2, [0.0, 1.0, -7], monkeypatch).value == 2, "the first one's is waited for at any number"


def test_every_step_is_looked_at_by_itself(monkeypatch):
    """One more in flight was enough: it stays."""
    assert after([{1: 0.5}] * 2 + [{1: 0.01}] * 2, [0.0, 1.0, -7], monkeypatch).value == 3


def test_the_stage_with_the_least_memory_limits_all(monkeypatch):
    """A stage that ran further ahead than the others would wait for what they never send."""
    assert after([{}], [0.5, 1.0, -1], monkeypatch).limit == 1
    assert after([{}] * 4, [0.5, 1.0, -1], monkeypatch).value == 2


class Event:
    """torch.cuda.Event of a GPU whose clock is `now`, in milliseconds."""

    now = 0.0

    def __init__(self, *, enable_timing: bool, blocking: bool) -> None:
        assert enable_timing
        assert blocking, "a thread that waits keeps a core busy"
        self.at, self.come = 0.0, False

    def record(self, stream: Any) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        self.come = True

    def elapsed_time(self, end: Event) -> float:
        assert end.come
        return end.at - self.at


def test_on_a_gpu_it_is_idle_time_that_counts(monkeypatch):
    """The host waits for each gradient for as long as its GPU computes; one more in flight helps against idleness."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(schedule.dist, "all_reduce", lambda seen, op, group: None)
    monkeypatch.setattr(schedule.torch, "tensor", lambda values, device, dtype: torch.Tensor(values))
    grid = SimpleNamespace(get_pipe_parallel_group=lambda: None)
    context: Any = SimpleNamespace(stage_id=0, num_stages=2, plan=WHOLE, device=torch.device("cuda"), grid=grid)
    found, stats = InFlightControl(context, "auto", 8), LinkStats()
    for idle_ms in (90.0, 90.0, 10.0, 10.0):
        found.begin_step()
        with found.waiting(3, stats):
            stats.wait_seconds += 0.9 + idle_ms / 1e3
            Event.now += idle_ms
        found.end_step(0.9 + idle_ms / 1e3)
    assert found.in_flight.value == 3, "9 % of a step is worth one more, and 1 % not another"
    assert not found.in_flight.observing


def test_weights_are_not_what_a_micro_batch_keeps(monkeypatch):
    """Autograd saves them, too, but once for all micro-batches."""
    stage = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
    stage.count_checkpointed_values = lambda samples, tokens: 0
    stage.dtype = torch.float32
    context: Any = SimpleNamespace(stage_id=0, num_stages=2, plan=WHOLE, device=torch.device("cpu"), stage=stage)
    found = InFlightControl(context, "auto", 8)
    with found.measuring_memory(SimpleNamespace(batch_size=2, tokens=1)):
        stage(torch.ones(2, 64))
    assert found.saved is not None
    assert found.saved.bytes == 2 * 4 * 2 * 64, "the input of each"
