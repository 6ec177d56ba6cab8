"""A stage's work on a micro-batch, as far as one process shows it."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipecomp.config import Config
from pipecomp.engine import stage_work
from pipecomp.engine.stage_work import StageWork, copy_async
from pipecomp.errors import ConfigError
from pipecomp.stages.link.layout import Layout

CONTEXT: Any = SimpleNamespace(
    device=torch.device("cpu"),
    settings=Config(),
    stage=SimpleNamespace(float32_parameters=()),
    stage_id=0,
    plan=SimpleNamespace(lowest_trained=0),
)
CONTROL: Any = SimpleNamespace(measuring_memory=lambda layout: nullcontext())


class Noted:
    """A tensor that notes what is asked of it."""

    def __init__(self, device: str) -> None:
        self.device, self.asked, self.refused = torch.device(device), list[str](), False

    def pin_memory(self) -> Noted:
        self.asked.append("pin")
        if self.refused:
            raise RuntimeError("CUDA error: out of memory")
        return self

    def to(self, device: torch.device, *, non_blocking: bool) -> Noted:
        assert non_blocking
        self.asked.append(device.type)
        return self


@pytest.mark.parametrize(
    ("here", "there", "asked"),
    [("cpu", "cuda", ["pin", "cuda"]), ("cpu", "cpu", ["cpu"]), ("cuda", "cuda", ["cuda"])],
)
def test_the_gpu_copies_from_pinned_memory(here, there, asked):
    """With pageable memory the driver may wait for it, and on a GPU there is nothing to pin."""
    x: Any = Noted(here)
    copy_async(x, torch.device(there))
    assert x.asked == asked


def test_without_pinned_memory_the_gpu_copies_all_the_same():
    x: Any = Noted("cpu")
    x.refused = True
    assert copy_async(x, torch.device("cuda")) is x
    assert x.asked == ["pin", "cuda"]


@pytest.mark.parametrize(("mask", "full"), [([[1, 1], [1, 1]], True), ([[1, 1], [1, 0]], False)])
def test_a_forward_is_told_whether_there_is_padding(
    mask: list[list[int]], full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, told = Layout.of_mask((0, 1), torch.tensor(mask), 2), list[Any]()
    engine: Any = SimpleNamespace(
        tput_timer=SimpleNamespace(start=lambda: None), is_last_stage=lambda: False, pipe_buffers={"outputs": {}}
    )
    monkeypatch.setattr(stage_work, "assume_masks", lambda **known: told.append(known) or nullcontext())
    monkeypatch.setattr(stage_work.DeepSpeedEngine, "forward", lambda engine, inputs: {"hidden_states": inputs})
    work = StageWork(CONTEXT, engine, CONTROL)
    work._batches[0] = stage_work._InFlightBatch(layout, layout, {})
    work.forward(0, 0)
    assert told == [{"full": full, "device": CONTEXT.device, "packed": False}]


@pytest.mark.parametrize("returned", [1.5, (torch.tensor(1.5), {})])
def test_a_loss_that_is_no_tensor_is_an_error(returned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.of_mask((0,), None, 2)
    engine: Any = SimpleNamespace(
        tput_timer=SimpleNamespace(start=lambda: None),
        is_last_stage=lambda: True,
        module=SimpleNamespace(loss_fn=lambda logits, labels: returned),
        pipe_buffers={"labels": {0: None}},
        _compute_loss=True,
    )
    monkeypatch.setattr(stage_work.DeepSpeedEngine, "forward", lambda engine, inputs: inputs)
    work = StageWork(CONTEXT, engine, CONTROL)
    work._batches[0] = stage_work._InFlightBatch(layout, layout, {})
    with pytest.raises(ConfigError, match=r"^loss_fn: got .*1\.5.*, allowed: a function of logits and labels"):
        work.forward(0, 0)
