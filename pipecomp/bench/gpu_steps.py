"""Steps of a GPT-2 on two ranks that share one GPU, for `pipecomp bench gpu`: how long they take, what they do.

The links are a lab's: the kernel's where it can make one, else a software lab, in which stock DeepSpeed's sends are
held back as well. Both ranks talk over gloo, since NCCL gives a GPU to one rank only.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from pipecomp.bench.gpu_profile import MAIN, device_activity, sync_debug_mode, synchronizing_calls
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
from pipecomp.interfaces import TrainingEngine
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
# What raises if it waits. Not the others, nor what follows them: DeepSpeed waits there, and with a collective's tensors
# a thread of gloo, which the mode would end too. None of these has a collective of tensors on the GPU.
RAISING = ("LoadMicroBatch", "ForwardPass", "BackwardPass", "SendActivation", "RecvActivation", "SendGrad", "RecvGrad")
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
    found = []
    with through_float32(LINES[0], torch.device(device)):
        for _ in range(repeats + 2):
            began = _now(device)
            hidden = first({"input_ids": tokens})["hidden_states"]
            received = hidden.detach().requires_grad_()
            loss_of(last({"hidden_states": received, "attention_mask": None}), tokens).backward()
            hidden.backward(received.grad)
            found.append((_now(device) - began) / STAGES)
    return statistics.median(found[2:])


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


def look(model: Model, run: Run) -> dict[int, Row]:
    """Look at two steps with everything on, without a limit: by rank "waits" and "activity", see `examine`."""
    with shared_lab(None) as lab, tempfile.TemporaryDirectory() as folder:
        return run(lab, examine, LINES[-1], model, folder)


def examine(rank: int, world: int, note: Any, line: Line, model: Model, folder: str) -> Row:
    """Take a step under watch, one in which waiting raises, and one under the profiler.

    "waits": [thread, owner, line, count] for each place that waited for the GPU, see `synchronizing_calls`. "raising":
    the instructions that the second step ran under `torch.cuda.set_sync_debug_mode("error")`: those of `RAISING` in
    which nothing had waited, none if another thread had. "activity": what the GPU did for this rank in the last step,
    see `device_activity`.
    """
    share_a_device(world)
    engine = settled_engine(line, model, folder, [])
    waiting: set[str] = set()
    with through_float32(line, engine.device):
        with synchronizing_calls() as found:

            @contextmanager
            def watched(name: str) -> Iterator[None]:
                before = found.total()
                yield
                if found.total() > before:
                    waiting.add(name)

            with around_instructions(engine, watched):
                engine.train_batch()
        alone = torch.cuda.is_available() and all(place.thread == MAIN for place in found)
        raising = [name for name in RAISING if alone and name not in waiting]
        with around_instructions(engine, lambda name: sync_debug_mode("error" if name in raising else "default")):
            engine.train_batch()
        activity = device_activity(engine.train_batch)
    engine.close()
    waits = [[*place, count] for place, count in sorted(found.items())]
    return {"waits": waits, "raising": raising, "activity": [list(interval) for interval in activity]}


@contextmanager
def around_instructions(
    engine: TrainingEngine, around: Callable[[str], AbstractContextManager[None]]
) -> Iterator[None]:
    """Run each instruction of the engine's steps, while inside, within what `around` gives for its name."""

    def wrapped(name: str, instruction: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any, **place: int) -> None:
            with around(name):
                instruction(self, **place)

        return run

    stock = engine._INSTRUCTION_MAP.items()
    engine._INSTRUCTION_MAP = {kind: wrapped(kind.__name__, run) for kind, run in stock}
    try:
        yield
    finally:
        del engine._INSTRUCTION_MAP
