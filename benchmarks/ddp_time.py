"""Time data-parallel trainings over a throttled link until they reach float32's loss, by method and workers.

    python -m benchmarks ddp_time [--workers 2 4 8] [--only NAME ...] [--bandwidth 50mbit]
                                  [--data FOLDER] [--cache FOLDER] [--out FOLDER] [--redraw]

Trains the GPT-2 of gradients.py with torch's DistributedDataParallel, each worker in a network namespace of its own
(root needed) on one thread. The batch of all workers together is the same for every number of them. Draws a picture
too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.gradients import METHODS as OPTIONS
from benchmarks.gradients import setup_digest
from benchmarks.page import Row, prose
from benchmarks.runner import SHARED, Runs, arguments, beside, chosen, digest, weights_digest
from benchmarks.time_to_loss import WITHIN, run_line, sections
from benchmarks.training import in_order

TASK, SEED = "gpt2", 0
REFERENCE = "FP32"
METHODS = (
    REFERENCE,
    "fp16",
    "Global-QSGD exponential, 8 bits",
    "Global-QSGD linear, 8 bits",
    "QSGD, 8 bits",
    "PowerSGD, rank 2",
    "PowerSGD, rank 2, L-GreCo",
    "DoubleSqueeze, 4 bits",
)


def train(name: str, workers: int, bandwidth: str, data: Path, cache: Path) -> Row:
    """One training in a lab."""
    from pipecomp.netlab import Lab

    with Lab(nodes=workers, bandwidth=bandwidth) as lab:
        ranks = lab.run(one_rank, name, str(data), str(cache), timeout_s=3600, threads=1)
        sent = sum(node.sent for node in lab.bytes())
    losses = [statistics.fmean(each) for each in zip(*(rank["losses"] for rank in ranks.values()), strict=True)]
    slowest = [max(each) for each in zip(*(rank["seconds"] for rank in ranks.values()), strict=True)]
    return {
        "method": name,
        "options": OPTIONS[name],
        "workers": workers,
        "bandwidth": bandwidth,
        "weights": ranks[0]["weights"],
        "epochs": ranks[0]["epochs"],
        "eval_loss": ranks[0]["eval_loss"],
        "losses": losses,
        "seconds": slowest,
        "bytes": sent,
    }


def one_rank(rank: int, world: int, note: Any, name: str, data: str, cache: str) -> dict[str, Any]:
    """Train one worker: its losses, and for each step the seconds since the first one began."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.gradient_tasks import EPOCHS, TASKS
    from pipecomp.allreduce import State, ddp_hook

    torch.manual_seed(SEED)
    dist.init_process_group("gloo")
    task = TASKS[TASK](Path(data), Path(cache), SEED)
    weights = weights_digest(task.model)
    model = DistributedDataParallel(task.model)
    task.model = model
    if name != REFERENCE:
        model.register_comm_hook(State(seed=SEED, **OPTIONS[name]), ddp_hook)
    losses, seconds = [], []
    dist.barrier()
    began = time.perf_counter()
    for batch in task.batches(SEED):
        size = len(batch) // world
        model.zero_grad()
        loss = task.loss(batch[rank * size : (rank + 1) * size])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        task.optimizer.step()
        task.schedule.step()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - began)
    dist.barrier()
    task.model = model.module
    result = {"weights": weights, "losses": losses, "seconds": seconds, "epochs": EPOCHS[TASK], **task.evaluate()}
    dist.barrier()
    dist.destroy_process_group()
    return result


def results(rows: list[Row], picture: Path) -> list[str]:
    """The page, and its picture beside it."""
    rows = in_order(rows, METHODS, "workers", "method")
    text = f"""
        # Data-parallel training over a throttled link

        `python -m benchmarks ddp_time`, on {page.machine(rows)}, whose cores all workers share. Each worker's link
        carries {rows[0]["bandwidth"]}.

        The GPT-2 of [gradients.md](gradients.md) and its training, with torch's DistributedDataParallel; gradients are
        averaged while the backward pass goes on. FP32 is gloo's all-reduce, fp16 and PowerSGD are torch's own hooks.
        Seconds to FP32's loss: until the mean training loss over an epoch's number of steps is at most
        {100 * WITHIN:g} % above what FP32 ends with on as many workers. MB: on all nodes' interfaces.

        ![loss over time]({picture.name})
    """
    groups = {f"{group[0]['workers']} workers": group for group in page.grouped(rows, "workers")}
    return [*prose(text), *sections(groups, REFERENCE, picture)]


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    given = arguments(
        argv,
        __doc__,
        *("only", "cache"),
        workers=([2, 4, 8], "numbers of workers"),
        bandwidth=("50mbit", "of each worker's link"),
        data=(SHARED, "folder with wikitext-2"),
    )
    setup = digest([setup_digest(), given.bandwidth])

    def current(row: Row) -> bool:
        return row["options"] == OPTIONS.get(row["method"])

    runs = Runs(given, "ddp_time", setup, ("method", "workers"), current=current, exact=beside(REFERENCE, "workers"))
    runs.complete(
        train,
        [(name, workers) for workers in given.workers for name in chosen(METHODS, given.only)],
        given.bandwidth,
        given.data,
        given.cache,
        line=run_line,
        page=lambda rows: results(rows, given.out / "ddp_time.png"),
    )
