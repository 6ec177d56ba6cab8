"""Train a ResNet on CIFAR-10 and a GPT-2 on WikiText-2 data-parallel with compressed gradients.

    python -m benchmarks gradients [--seeds 3] [--workers-per-run 2 4] [--tasks resnet gpt2] [--only NAME ...]
                                   [--jobs 2] [--data FOLDER] [--cache FOLDER] [--out FOLDER] [--redraw]

All n workers of a run are in one process on one thread: each computes the gradient of its part of the batch, and the
product's own methods average them (PowerSGD and fp16, which are torch's, over real processes), or those of
peer_averages.py. The batch of all workers together is the same for every n.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gradient_report import results
from benchmarks.peer_averages import PEERS
from benchmarks.runner import SHARED, Runs, arguments, beside, chosen, digest, weights_digest

PAIRS = ((4, 8), (2, 6), (6, 10), (8, 12))  # bits of two scales, the paper's
# As the code of GRandK's paper does it, but for values that are not chosen, which it leaves different on each worker.
PUBLISHED = {"k": 10_000, "coordinates": "walk", "norm": "inf"}
CASQ = {"method": "casq", "allocation": "entropy"}
METHODS: dict[str, dict[str, Any]] = {
    "FP32": {"method": "none"},
    "Global-QSGD exponential, 8 bits": {"method": "global_qsgd", "bits": 8},
    "Global-QSGD exponential, 4 bits": {"method": "global_qsgd", "bits": 4},
    "Global-QSGD linear, 8 bits": {"method": "global_qsgd", "levels": "linear", "bits": 8},
    "Global-QSGD linear, 4 bits": {"method": "global_qsgd", "levels": "linear", "bits": 4},
    "Global-QSGD sparse, exponential, 4 bits": {"method": "global_qsgd", "sparse": True},
    **{f"QSGD-MN, {bits} bits": {"method": "qsgd_mn", "bits": bits} for bits in (8, 4, 2)},
    **{f"QSGD-MN-TS, {a} and {b} bits": {"method": "qsgd_mn_ts", "bits": [a, b]} for a, b in PAIRS},
    "QSGD-MN-TS, 4 and 8 bits, largest value as norm": {"method": "qsgd_mn_ts", "bits": [4, 8], "norm": "inf"},
    **{
        f"GRandK-MN, {bits} bits, as published": {**PUBLISHED, "method": "grandk_mn", "bits": bits}
        for bits in (8, 4, 2)
    },
    **{
        f"GRandK-MN-TS, {a} and {b} bits, as published": {**PUBLISHED, "method": "grandk_mn_ts", "bits": [a, b]}
        for a, b in PAIRS
    },
    "GRandK-MN, 8 bits, 5 %, error feedback": {"method": "grandk_mn", "k": 0.05, "error_feedback": True},
    "GRandK-MN-TS, 4 and 8 bits, 5 %, error feedback": {"method": "grandk_mn_ts", "k": 0.05, "error_feedback": True},
    "QSGD, 8 bits": {"method": "qsgd", "bits": 8},
    "QSGD, 4 bits": {"method": "qsgd", "bits": 4},
    "TernGrad": {"method": "terngrad"},
    "NUQSGD, 4 bits": {"method": "nuqsgd", "bits": 4},
    **{f"CASQ, {bits} bits": {**CASQ, "bits": bits} for bits in (4, 3, 2)},
    "CASQ, 4 bits, every 10 steps": {**CASQ, "bits": 4, "interval": 10},
    **{f"CASQ, {bits} bits, no error feedback": {**CASQ, "bits": bits, "error_feedback": False} for bits in (3, 2)},
    "CASQ, 2 bits, equal shares": {**CASQ, "bits": 2, "allocation": "equal"},
    "CASQ, 2 bits, no sketch": {**CASQ, "bits": 2, "buckets": 0},
    **{f"CASQ, 2 bits, {100 * m:g} % buckets": {**CASQ, "bits": 2, "buckets": m} for m in (0.002, 0.02)},
    **{f"CASQ, 2 bits, {100 * s:g} % sampled": {**CASQ, "bits": 2, "sample": s} for s in (0.001, 0.01, 1.0)},
    "DoubleSqueeze, 4 bits": {"method": "double_squeeze", "bits": 4, "group_size": 128},
    "DoubleSqueeze, 1 bit": {"method": "double_squeeze", "bits": 1, "group_size": 128},
    "DoubleSqueeze, 4 bits, L-GreCo": {"method": "double_squeeze", "bits": 4, "adaptive": {"every": 16}},
    "DoubleSqueeze, 4 bits, L-GreCo, error 0.1": {
        "method": "double_squeeze",
        "bits": 4,
        "adaptive": {"every": 16, "error": 0.1},
    },
    "Global-QSGD linear, 4 bits, a norm for each layer": {
        "method": "global_qsgd",
        "levels": "linear",
        "bits": 4,
        "adaptive": {"every": 1_000_000},  # more than all steps: no plan is ever made
    },
    "Global-QSGD linear, 4 bits, L-GreCo, error 0.1": {
        "method": "global_qsgd",
        "levels": "linear",
        "bits": 4,
        "adaptive": {"every": 16, "error": 0.1},
    },
    "QSGD-MN, 4 bits, L-GreCo, error 0.1": {
        "method": "qsgd_mn",
        "bits": 4,
        "adaptive": {"every": 16, "error": 0.1},
    },
    "PowerSGD, rank 1": {"method": "powersgd", "rank": 1},
    "PowerSGD, rank 2": {"method": "powersgd", "rank": 2},
    "PowerSGD, rank 2, L-GreCo": {"method": "powersgd", "rank": 2, "adaptive": {"every": 16}},
    "PowerSGD, rank 2, L-GreCo, error 0.8": {
        "method": "powersgd",
        "rank": 2,
        "adaptive": {"every": 16, "error": 0.8},
    },
    "PowerSGD, rank 2, L-GreCo, error 0.6": {
        "method": "powersgd",
        "rank": 2,
        "adaptive": {"every": 16, "error": 0.6},
    },
    "fp16": {"method": "fp16"},
    **{name: {"method": "peer", "name": name} for name in PEERS},
}
TORCHS = ("powersgd", "fp16")


def train(task_name: str, name: str, n: int, seed: int, data: Path, cache: Path) -> dict[str, Any]:
    """One run; plain values. Loads what it needs, so that it can be a process of its own."""
    from pipecomp.distributed.local_launcher import run_ranks

    began = time.process_time()
    if METHODS[name]["method"] in TORCHS:
        ranks = run_ranks(n, one_rank, task_name, name, seed, str(data), str(cache), timeout_s=3000)
        # the others' models are the same, but each has seen its own part of the batches
        result = {**ranks[0], "train_loss": sum(r["train_loss"] for r in ranks.values()) / n}
    else:
        result = run(task_name, name, n, seed, data, cache, list(range(n)))
    return {
        "task": task_name,
        "method": name,
        "options": METHODS[name],
        "n": n,
        "seed": seed,
        "cpu_seconds": time.process_time() - began,
        **result,
    }


def one_rank(
    rank: int, n: int, note: Any, task_name: str, name: str, seed: int, data: str, cache: str
) -> dict[str, Any]:
    """The same, as one of n processes."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    result = run(task_name, name, n, seed, Path(data), Path(cache), [rank])
    dist.destroy_process_group()
    return result


def run(task_name: str, name: str, n: int, seed: int, data: Path, cache: Path, ranks: list[int]) -> dict[str, Any]:
    """Train with the gradients of all n workers, of which `ranks` are computed here."""
    import torch

    from benchmarks.gradient_tasks import TASKS

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = TASKS[task_name](data, cache, seed)
    weights = weights_digest(task.model)
    parameters = [p for p in task.model.parameters() if p.requires_grad]
    average, stats = averager(name, n, seed, ranks, [p.shape for p in parameters])
    losses = []
    for batch in task.batches(seed):
        size = len(batch) // n
        grads, loss = [], 0.0
        for rank in ranks:
            task.model.zero_grad()
            part = task.loss(batch[rank * size : (rank + 1) * size])
            part.backward()
            grads.append([p.grad.detach().clone() for p in parameters])
            loss += float(part.detach()) / len(ranks)
        for p, mean in zip(parameters, average(grads), strict=True):
            p.grad = mean
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        task.optimizer.step()
        task.schedule.step()
        losses.append(loss)
    counters = stats()
    return {
        "weights": weights,
        "train_loss": sum(losses[-task.steps_per_epoch :]) / task.steps_per_epoch,
        **task.evaluate(),
        "bytes_raw": counters["bytes_raw"],
        "bytes_sent": counters["bytes_sent"],
        "relative_error": counters["relative_error"],
    }


def averager(
    name: str, n: int, seed: int, ranks: list[int], shapes: list[Any]
) -> tuple[Callable[[list[list[Any]]], list[Any]], Callable[[], dict[str, Any]]]:
    """Return the function that averages the workers' gradients, and the first worker's counters."""
    import torch

    from pipecomp.allreduce import State
    from pipecomp.allreduce.loopback import LoopbackGroup

    counts = [shape.numel() for shape in shapes]

    def split(flat: Any) -> list[Any]:
        return [part.view(shape) for part, shape in zip(flat.split(counts), shapes, strict=True)]

    if name in PEERS:
        peer = PEERS[name](n, seed)
        return lambda grads: split(peer.average([torch.cat([g.view(-1) for g in own]) for own in grads])), peer.stats
    if len(ranks) < n:  # torch's own, over processes: low rank needs the matrices one by one
        state = State(seed=seed, **METHODS[name])

        def over_processes(grads: list[list[Any]]) -> list[Any]:
            return [state.submit(g, str(i)).wait().view(shapes[i]) for i, g in enumerate(grads[0])]

        return over_processes, state.stats

    mail: Any = {}
    layers = tuple(enumerate(counts)) if "adaptive" in METHODS[name] else None
    states = [State(group=LoopbackGroup(r, n, mail, timeout_s=300), seed=seed, **METHODS[name]) for r in range(n)]

    def in_process(grads: list[list[Any]]) -> list[Any]:
        flat = [torch.cat([g.view(-1) for g in own]) for own in grads]
        waiting = [state.submit(x, "all", slices=layers, out=x) for state, x in zip(states, flat, strict=True)]
        means = [future.wait() for future in waiting]
        return split(means[0])

    return in_process, states[0].stats


def setup_digest() -> str:
    """Marks the settings of both tasks."""
    from benchmarks.gradient_tasks import BATCH, EPOCHS, RATE
    from benchmarks.wikitext import HELD_OUT, LENGTH, PRETRAINING, TRAINING, VOCABULARY

    return digest([BATCH, EPOCHS, RATE, HELD_OUT, LENGTH, PRETRAINING, TRAINING, VOCABULARY])


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    given = arguments(
        argv,
        __doc__,
        *("seeds", "only", "cache"),
        workers_per_run=([2, 4], "n"),
        tasks=(["resnet", "gpt2"], "one or both", ("resnet", "gpt2")),
        jobs=(2, "runs at the same time, one thread each"),
        data=(SHARED, "folder with cifar10 and wikitext-2"),
    )
    keys, exact = ("task", "method", "n", "seed"), beside("FP32", "task", "n", "seed")

    def current(row: dict[str, Any]) -> bool:
        return row["options"] == METHODS.get(row["method"])

    runs = Runs(given, "gradients", setup_digest(), keys, current=current, exact=exact)
    cases = [
        (task, method, n, seed)
        for seed in range(given.seeds)
        for n in given.workers_per_run
        for task in given.tasks
        for method in chosen(METHODS, given.only)
    ]
    runs.complete(
        train,
        cases,
        given.data,
        given.cache,
        line=lambda row: f"train {row['train_loss']:.4f}  {row['cpu_seconds']:.0f} s",
        page=lambda rows: results(rows, list(METHODS)),
        workers=given.jobs,
    )
