"""A packet's path from a stage to the transport and back goes through at most 12 files, and its header is parsed once.

Two stages in one process send each other activations and gradients over the loopback transport. Every call of a product
function on any thread counts. Message store and kernels lie behind seams, `MessageStore` and `kernels.ops`: the files
behind a seam count as one.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from pipecomp.buffers import MemoryStore
from pipecomp.config import Config
from pipecomp.engine.stage_work import StageWork, _InFlightBatch
from pipecomp.stages.link.endpoint import LinkReceiver, LinkSender
from pipecomp.stages.link.layout import Layout
from pipecomp.stages.link.packet import PacketLimits
from pipecomp.stages.link.transport import loopback_pair

ROOT = Path(os.path.realpath(__file__)).parents[2]
MOST_FILES = 12
SEAMS = {"buffers": "buffers (MessageStore)", "kernels": "kernels (ops, one backend)"}
STAGING = "kernels/staging"  # a seam of its own
B, S, H = 3, 8, 16
LAYOUT = Layout((1, 2, 3), (0, 0, 0), (8, 5, 1), S)
PATHS = {
    "aqsgd": {"method": "aqsgd", "forward_bits": 4, "backward_bits": 8},
    "quantized first visits": {"method": "aqsgd", "first_visit": 8, "rotation": True},
    "gradients as changes": {"method": "aqsgd", "backward_method": "delta"},
    "constant error": {"method": "aqsgd", "forward_bits": {"error": 0.1}, "first_visit": {"error": 0.1}},
    "direct": {"method": "direct", "forward_bits": 4},
    "plain": {"method": "none"},
}


class Calls:
    """Calls of product functions, as file and function, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call":
            return
        path = Path(os.path.realpath(frame.f_code.co_filename))
        if path.is_file() and path.is_relative_to(ROOT):
            name = path.relative_to(ROOT)
            if name.parts[0] in ("pipecomp", "stages", "buffers", "kernels"):
                self.calls.append((str(name), frame.f_code.co_qualname))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        self.calls.clear()
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def until(self, function: str) -> list[tuple[str, str]]:
        ends = [i for i, call in enumerate(self.calls) if call[1] == function]
        assert ends, f"{function} was not called"
        return self.calls[: ends[0] + 1]


def path_of(calls: list[tuple[str, str]]) -> dict[str, str]:
    """File, or seam -> the first function called in it."""
    path: dict[str, str] = {}
    for file, function in calls:
        room = file.split("/")[0]
        path.setdefault(file if file.startswith(STAGING) else SEAMS.get(room, file), function)
    return path


def check(calls: list[tuple[str, str]], direction: str) -> None:
    path = path_of(calls)
    listed = "\n".join(f"{i}. {file}: {function}" for i, (file, function) in enumerate(path.items(), 1))
    assert len(path) <= MOST_FILES, f"{direction}: {len(path)} files\n{listed}"
    if os.environ.get("PIPECOMP_SHOW_PATH"):
        print(f"\n{direction}\n{listed}")


def stages(section: dict[str, Any]) -> tuple[StageWork, StageWork, Any, Any]:
    """Both stages' work, and what stands for their engines."""
    store = {"store": {"backend": "memory"}} if section["method"] == "aqsgd" else {}
    config = Config.from_dict({"activations": section, **store})
    ends = loopback_pair()
    stores = [MemoryStore("link-0") if store else None for _ in ends]
    up, down = LinkSender(0, config, ends[0], stores[0]), LinkReceiver(0, config, ends[1], stores[1])
    for end in (up, down):
        end.set_limits(PacketLimits(B, S, H), torch.float32)
        end.receive_staging.on_header = lambda header: None
    stage, plan = SimpleNamespace(hidden_size=H, next_layout=lambda layout: layout), SimpleNamespace(lowest_trained=0)
    contexts: list[Any] = [
        SimpleNamespace(stage=stage, stage_id=i, plan=plan, device=torch.device("cpu"), settings=config) for i in (0, 1)
    ]
    control: Any = SimpleNamespace(waiting=lambda micro_batch, stats: nullcontext())

    def engine(**links: Any) -> Any:
        return SimpleNamespace(
            links=SimpleNamespace(**{"to_next": None, "to_previous": None, **links}),
            pipe_buffers={"outputs": {}},
            module=SimpleNamespace(training=True),
            optimizer=None,
            step_samples=B,
            micro_batches=1,
            global_steps=0,
        )

    first, second = engine(to_next=up), engine(to_previous=down)
    works = [StageWork(*pair, control) for pair in zip(contexts, (first, second), strict=True)]
    return works[0], works[1], first, second


@pytest.mark.parametrize("name", PATHS)
def test_a_packet_goes_through_few_files(name):
    one, two, first, second = stages(PATHS[name])
    trace = Calls()

    def record(call: Callable[[int, int], None]) -> None:
        with trace.recorded():
            call(0, 0)

    for step, visit in enumerate(("first visit", "change")):
        first.global_steps = second.global_steps = step
        one._batches[0] = _InFlightBatch(LAYOUT, LAYOUT, {})
        first.pipe_buffers["outputs"][0] = torch.randn(B, S, H)
        parsed = 0
        record(one.send_activation)
        check(trace.until("LoopbackTransport.send"), f"{name}, {visit}: activation out")
        parsed += sum(call[1] == "parse" for call in trace.calls)
        record(two.recv_activation)
        check(trace.calls, f"{name}, {visit}: activation in")
        parsed += sum(call[1] == "parse" for call in trace.calls)
        assert parsed == 1

        x_BSH = two._batches[0].inputs["hidden_states"]
        assert x_BSH is not None
        x_BSH.grad = torch.randn(B, S, H)
        record(two.send_grad)
        check(trace.until("LoopbackTransport.send"), f"{name}, {visit}: gradient out")
        record(one.recv_grad)
        check(trace.calls, f"{name}, {visit}: gradient in")
