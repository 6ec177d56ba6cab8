"""Steps of a GPT-2 on two ranks that share one GPU, for `pipecomp bench gpu`: their time, and their waits.

The links are a lab's: the kernel's where it can make one, else a software lab, in which stock DeepSpeed's sends are
held back as well. Both ranks talk over gloo, since NCCL gives a GPU to one rank only.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pipecomp.bench.training import (
    STOCK_BF16,
    Line,
    Model,
    Row,
    aqsgd,
    rate_for,
    start_engine,
    through_float32,
    untied_gpt2,
)
from pipecomp.netlab import namespaces
from pipecomp.netlab.lab import Lab
from pipecomp.plan.search import aqsgd_sections, constant_error_bits

GPT2 = Model(blocks=12, width=768, heads=12, tokens=1024, vocabulary=50257, samples=8)
RATES = (0.0, 5.8, 12.0)
STAGES, STEPS = 2, 10
SOFTWARE = "software throttle"
FIXED = "AQ-SGD fw3 bw6 BF16"
EVERYTHING = "AQ-SGD, constant error, at most fw3 bw6, BF16"  # as plans make it
TRIALS = 14  # steps after which the number in flight is settled: two with each that 8 micro-batches allow
_MOST = constant_error_bits("forward_bits", 3), constant_error_bits("backward_bits", 6)
_PLANNED = {**aqsgd_sections(*_MOST, one_pass=False), "store": {"backend": "lmdb"}}
LINES = (
    Line(name=STOCK_BF16, engine="deepspeed", dtype="bf16"),
    Line(name="BF16", dtype="bf16", against=STOCK_BF16),
    Line(name=FIXED, dtype="bf16", section=aqsgd(3, 6), against=STOCK_BF16),
    Line(name=EVERYTHING, dtype="bf16", section=_PLANNED, against=STOCK_BF16),
)
Run = Callable[..., dict[int, Any]]


def measure_steps(
    model: Model, rates: Sequence[float], compute_s: float, run: Run, steps: int = STEPS
) -> Iterator[Row]:
    """Measure every line at r = 0 (no limit), and at others in `rates` all but uncompressed ones of pipecomp.

    A row: "line", "against", "r", "bits_per_s" (None without a limit), "ms" (median step), "least", "most", "loss" (of
    the second step), "sent" (bytes, all steps), "links" (what slows them down). compute_s: of a micro-batch on one
    stage, see `stage_seconds`. run: called as `run(lab, function, *args)`, as `Lab.run` with a limit is.
    """
    for r in rates:
        rate = rate_for(model, r, compute_s) if r else None
        for line in LINES if not r else (LINES[0], LINES[-1]):
            with shared_lab(rate) as lab, tempfile.TemporaryDirectory() as folder:
                ranks = run(lab, train, line, model, steps, folder)
                sent = sum(node.sent for node in lab.bytes())
            times = [1e3 * max(rank["seconds"][i] for rank in ranks.values()) for i in range(steps)]
            yield {
                "line": line.name,
                "against": line.against,
                "r": r,
                "bits_per_s": rate,
                "ms": statistics.median(times),
                "least": min(times),
                "most": max(times),
                "loss": ranks[0]["loss"],
                "sent": sent,
                "links": links_are(),
            }


def links_are() -> str:
    """Return the means that limits links on this machine: "kernel" or "software throttle"."""
    return "kernel" if namespaces.missing() is None else SOFTWARE


def shared_lab(rate: int | None) -> Lab:
    """Connect the two ranks by a link of this rate, in bit/s."""
    bandwidth = None if rate is None else f"{rate}bit"
    return Lab(nodes=STAGES, bandwidth=bandwidth, software=links_are() == SOFTWARE)


def stage_seconds(model: Model, device: str, repeats: int = 10) -> float:
    """Measure how long a stage computes on one micro-batch with the device to itself: the mean of both stages."""
    from pipecomp.stages import default_loss, split

    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.vocabulary, (1, model.tokens), generator=draw).to(device)
    first, last = (stage.to(device, torch.bfloat16) for stage in split(untied_gpt2(model), num_stages=STAGES))
    loss_of = default_loss(first.config)
    times = []
    with through_float32(LINES[0], torch.device(device)):
        for _ in range(repeats + 2):
            began = _now(device)
            hidden = first({"input_ids": tokens})["hidden_states"]
            received = hidden.detach().requires_grad_()
            loss_of(last({"hidden_states": received, "attention_mask": None}), tokens).backward()
            hidden.backward(received.grad)
            times.append((_now(device) - began) / STAGES)
    return statistics.median(times[2:])


def _now(device: str | torch.device) -> float:
    """Return the time when the device has finished all its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def share_a_device(world: int) -> None:
    """Make `pipecomp.initialize` treat all ranks as one machine with one GPU, although a lab's nodes look separate."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # all ranks share the first GPU
    os.environ.update(LOCAL_WORLD_SIZE=str(world), LOCAL_RANK="0", CUDA_VISIBLE_DEVICES=first)


def settled_engine(line: Line, model: Model, folder: str, losses: list[float]) -> Any:
    """Start a line's engine and take its warm-up steps; their losses are appended to `losses`."""
    engine = start_engine(line, model, STAGES, folder)
    with through_float32(line, engine.device):
        while not line.counts(len(losses), engine, TRIALS):
            losses.append(float(engine.train_batch()))
    return engine


def train(rank: int, world: int, note: Any, line: Line, model: Model, steps: int, folder: str) -> Row:
    """Take one rank's steps: "seconds" of each, and "loss" of the second."""
    import torch.distributed as dist

    share_a_device(world)
    losses: list[float] = []
    seconds = []
    engine = settled_engine(line, model, folder, losses)
    with through_float32(line, engine.device):
        for _ in range(steps):
            dist.barrier()
            began = _now(engine.device)
            loss = engine.train_batch()
            dist.barrier()
            seconds.append(_now(engine.device) - began)
            losses.append(float(loss))
    if hasattr(engine, "comm_stats"):
        engine.close()
    return {"seconds": seconds, "loss": losses[1]}


# -- waits for the GPU

MAIN = "MainThread"
_WARNING = "called a synchronizing CUDA operation"  # torch's
_ROOT = Path(__file__).parents[2]


class Place(NamedTuple):
    """Code that waited. owner: "pipecomp", or the package that is not torch and called it. line: "file:number name"."""

    thread: str
    owner: str
    line: str


def find_waits(model: Model, run: Run) -> dict[int, list[list[Any]]]:
    """Return for each rank the waits of a step with everything on and no limit on the link, see `count_waits`."""
    with shared_lab(None) as lab, tempfile.TemporaryDirectory() as folder:
        return run(lab, count_waits, LINES[-1], model, folder)


def count_waits(rank: int, world: int, note: Any, line: Line, model: Model, folder: str) -> list[list[Any]]:
    """Take a step, and return [thread, owner, line, count] for each place of it that waited for the GPU."""
    share_a_device(world)
    engine = settled_engine(line, model, folder, [])
    with through_float32(line, engine.device), synchronizing_calls() as places:
        engine.train_batch()
    engine.close()
    return [[*place, count] for place, count in sorted(places.items())]


@contextmanager
def synchronizing_calls() -> Iterator[Counter[Place]]:
    """Count the calls of all threads of this process that wait for the GPU, by place, while inside.

    Note: torch does not count waiting for an event, as the sending thread and the store's writer do, nor
    `torch.cuda.synchronize`, nor copies of pageable memory that are asked not to wait, though the driver may. A
    backward pass reports its waits when it ends, as of its caller. Threads that Python does not know, such as gloo's,
    are not counted. On a machine without a GPU nothing is found.
    """
    places: Counter[Place] = Counter()
    on_gpu = torch.cuda.is_available()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{_WARNING}")
        others = warnings.showwarning

        def note(message: Any, *rest: Any, **more: Any) -> None:
            if _WARNING in str(message):
                places[_place(traceback.extract_stack())] += 1
            else:
                others(message, *rest, **more)

        warnings.showwarning = note
        if on_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            if on_gpu:
                torch.cuda.set_sync_debug_mode("default")


def _place(stack: list[traceback.FrameSummary]) -> Place:
    """Return the innermost frame outside torch."""
    name = threading.current_thread().name
    for frame in reversed(stack):
        path = Path(frame.filename)
        if path == Path(__file__):
            continue
        if path.is_relative_to(_ROOT / "pipecomp"):
            where = path.relative_to(_ROOT)
        elif "site-packages" in path.parts:
            where = Path(*path.parts[path.parts.index("site-packages") + 1 :])
        else:
            continue
        if where.parts[0] != "torch":
            return Place(name, where.parts[0], f"{where}:{frame.lineno} {frame.name}")
    return Place(name, "torch", "")
