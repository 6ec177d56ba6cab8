"""Replicas that average after H steps only: does the loss stay that of averaging in every step, and what is sent?

    python -m benchmarks local_steps [--seeds 3] [--epochs 6] [--replicas 2 4] [--steps 1 4 8 16 32] [--only NAME ...]
                                     [--data FOLDER] [--cache FOLDER] [--out FOLDER] [--redraw]

Fine-tunes convergence.py's pre-trained GPT-2 with its settings: every line trains on the same number of samples. Each
rank is a process on this machine.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.convergence import BATCH, LEARNING_RATE, SETUP, WARM_UP
from benchmarks.page import Row, prose, spread, values
from benchmarks.runner import Runs, arguments, chosen
from benchmarks.training import adamw

PLAIN = "FP32"
AQSGD = {"method": "aqsgd", "forward_bits": 3, "backward_bits": 6}
GRADIENTS: dict[str, dict[str, Any]] = {
    PLAIN: {"method": "none"},
    **{f"{bits} bits": {"method": "double_squeeze", "bits": bits} for bits in (8, 4, 2, 1)},
}
STREAMED, POST_LOCAL, PIPELINE = "4 bits, 2 fragments overlapped", "post-local SGD", "4 bits, AQ-SGD between 2 stages"
LINES = (*GRADIENTS, STREAMED, POST_LOCAL, PIPELINE)


def section(name: str, local_steps: int, seed: int, store: str) -> dict[str, Any]:
    """The section "pipecomp" of a line."""
    found: dict[str, Any] = {"seed": seed}
    gradients = dict(GRADIENTS["4 bits" if name in (STREAMED, PIPELINE) else PLAIN if name == POST_LOCAL else name])
    if local_steps > 1:
        gradients["local_steps"] = local_steps
        if name == STREAMED:
            gradients |= {"fragments": 2, "overlap": max(1, local_steps // 4)}
        if name == POST_LOCAL:
            gradients |= {"outer": {"optimizer": "sgd"}, "local_steps_warmup": WARM_UP}
    if name == PIPELINE:
        found |= {"activations": AQSGD, "store": {"path": store}}
    return {**found, "gradients": gradients}


def train(name: str, local_steps: int, replicas: int, seed: int, epochs: int, data: Path, cache: Path) -> Row:
    """One run."""
    from pipecomp.cluster.local_ranks import run_ranks

    stages = 2 if name == PIPELINE else 1
    with tempfile.TemporaryDirectory() as store:
        options = (name, local_steps, replicas, seed, epochs, str(data), str(cache), store)
        ranks = run_ranks(stages * replicas, one_rank, *options, timeout_s=6000)
    every = [group for rank in ranks.values() for group in rank["groups"].items()]
    groups = [group for group_name, group in every if not group_name.startswith("local ")]  # those are in one replica
    return {
        "method": name,
        "local_steps": local_steps,
        "replicas": replicas,
        "seed": seed,
        "epochs": epochs,
        "train_loss": statistics.fmean(rank["train_loss"] for rank in ranks.values()),
        "eval_loss": ranks[0]["eval_loss"],
        "sent": sum(group["bytes_sent"] for group in groups),
        "every_step": sum(rank["every_step"] for rank in ranks.values()),
    }


def one_rank(
    rank: int, world: int, note: Any, name: str, local_steps: int, replicas: int, seed: int, epochs: int, *folders: str
) -> dict[str, Any]:
    """Train one stage of one replica. folders: of the data, of what is kept, and for a store."""
    import torch

    import pipecomp
    from benchmarks.wikitext import pretrained_model, wikitext_task
    from pipecomp.data import eval_batches
    from pipecomp.demo.task import Sequences
    from pipecomp.stats import ring_bytes

    torch.set_num_threads(1)
    data, cache, store = folders
    task = wikitext_task(Path(data), Path(cache))
    model, _ = pretrained_model(task, Path(cache), seed)
    steps, micro_batch = epochs * (len(task.training) // BATCH), max(1, BATCH // replicas // 2)
    config = adamw(
        section(name, local_steps, seed, store),
        samples=(BATCH, micro_batch),
        lr=LEARNING_RATE,
        steps=(steps, WARM_UP),
        torch_adam=True,
    )
    rows = Sequences(task.training.tolist())
    engine = pipecomp.initialize(model, num_stages=world // replicas, config=config, training_data=rows)
    losses = [float(engine.train_batch()) for _ in range(steps)]
    engine.average_replicas()
    groups = engine.comm_stats()["groups"]
    held_out = eval_batches(Sequences(task.held_out.tolist()), micro_batch)
    eval_loss = float(engine.eval_batch(iter(held_out), num_micro_batches=len(held_out)))
    trained = sum(p.numel() for p in engine.stage.parameters() if p.requires_grad)
    engine.close()
    return {
        "train_loss": statistics.fmean(losses[-(steps // epochs) :]),
        "eval_loss": eval_loss,
        "groups": groups,
        "every_step": steps * ring_bytes(4 * trained, replicas),
    }


def cases(given: Any) -> list[tuple[str, int, int, int, int]]:
    """All runs; averaging in every step is neither streamed nor post-local SGD."""
    names = [name for name in LINES if name == PLAIN or name in chosen(LINES, given.only)]
    return [
        (name, h, replicas, seed, given.epochs)
        for seed in range(given.seeds)
        for replicas in given.replicas
        for name in names
        for h in given.steps
        if h > 1 or name not in (STREAMED, POST_LOCAL)
    ]


def results(rows: list[Row]) -> list[str]:
    """The page."""
    text = f"""
        # Replicas that average after H steps

        `python -m benchmarks local_steps`, on {page.machine(rows)}.

        The pre-trained GPT-2 of [convergence.md](convergence.md) and its settings, on the same samples in every line.
        Outer steps are Nesterov's with lr 0.7 and momentum 0.9 ([algorithm](../../docs/algorithms.md#212-local-steps));
        of post-local SGD plain averages of weights, after a warm-up with growing intervals. Training loss: mean over
        the last epoch and over replicas, each of its own weights, ± over seeds; above FP32: mean of the held-out
        losses' differences to FP32 averaged in every step, with the same seed and number of replicas. Sent: all ranks'
        bytes for averaging, and how many times less than float32 gradients in every step.
    """
    plain = {
        (row["seed"], row["replicas"]): row["eval_loss"]
        for row in rows
        if row["method"] == PLAIN and row["local_steps"] == 1
    }

    def above(group: list[Row]) -> str:
        exact = [(row["eval_loss"], plain.get((row["seed"], row["replicas"]))) for row in group]
        found = [100 * (mine / other - 1) for mine, other in exact if other is not None]
        return f"{statistics.mean(found):+.2f} %" if found else "–"

    cells = {
        "outer gradients": lambda group: group[0]["method"],
        "replicas": lambda group: group[0]["replicas"],
        "H": lambda group: group[0]["local_steps"],
        "seeds": len,
        "training loss": lambda group: spread(values(group, "train_loss")),
        "held-out loss": lambda group: spread(values(group, "eval_loss")),
        "above FP32": above,
        "sent, MB": lambda group: f"{group[0]['sent'] / 1e6:.1f}",
        "less": lambda group: f"{group[0]['every_step'] / group[0]['sent']:.0f}×",
    }
    ordered = sorted(
        rows, key=lambda row: (row["replicas"], LINES.index(row["method"]), row["local_steps"], row["seed"])
    )
    return [*prose(text), *page.columns(cells, page.grouped(ordered, "replicas", "method", "local_steps"))]


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    given = arguments(
        argv,
        __doc__,
        *("seeds", "only", "data", "cache"),
        epochs=(6, "passes over the training data"),
        replicas=([2, 4], "numbers of replicas"),
        steps=([1, 4, 8, 16, 32], "values of H, steps between averages"),
    )
    keys, current = ("method", "local_steps", "replicas", "seed", "epochs"), lambda row: row["epochs"] == given.epochs
    Runs(given, "local_steps", SETUP, keys, current=current).complete(
        train,
        cases(given),
        given.data,
        given.cache,
        line=lambda row: f"train {row['train_loss']:.4f}  held out {row['eval_loss']:.4f}",
        page=results,
        workers=0,
    )
