"""What a stage does with a micro-batch, as far as one process shows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipecomp.engine.stage_work import start_copying


class Noted:
    """A tensor that notes what is asked of it."""

    def __init__(self, device: str) -> None:
        self.device, self.asked = torch.device(device), list[str]()

    def pin_memory(self) -> Noted:
        self.asked.append("pin")
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
    start_copying(x, torch.device(there))
    assert x.asked == asked
