"""Run the demo's three trainings from other initial weights and orders of data, DirectQ in all its forms.

    python -m benchmarks demo_seeds [--seeds 3] [--workers 2] [--out FOLDER] [--redraw]

All stages of a run are in one process on one thread (see inprocess.py), with the demo's own model, text and settings.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import direct, page
from benchmarks.page import Row, prose, spread, values
from benchmarks.runner import Runs, arguments, digest
from pipecomp.demo.settings import FIRST_VISIT_BITS, MICRO_BATCH, NAMES, SCALES, Settings, ds_config

METHODS = {NAMES[method]: method for method in ("none", "direct", "aqsgd")}
OWN_FORM = next(name for name, form in direct.FORMS.items() if form == SCALES["direct"])  # the demo's own


def train(seed: int) -> Row:
    """The demo's trainings with one seed: training and held-out loss of each method."""
    import torch

    torch.set_num_threads(1)
    from benchmarks.inprocess import InProcessPipeline
    from pipecomp.data import eval_batches
    from pipecomp.demo.results import epoch_means
    from pipecomp.demo.task import Sequences, documentation_task, gpt2, untie

    s = Settings(seed=seed)
    task = documentation_task(vocabulary=s.vocabulary, length=s.length, training=s.training)
    model = gpt2(task.vocabulary, s.length, layers=s.layers, width=s.width, heads=4, seed=seed)
    untie(model)  # as the demo's configuration says
    config = ds_config(s, "none", Path(), steps=s.pretraining_steps, lr=s.pretraining_lr)
    pipeline = InProcessPipeline(model, s.stages, config, Sequences(task.pretraining))
    began = time.process_time()
    for _ in range(s.pretraining_steps):
        pipeline.train_batch()
    weights = {name: value for stage in pipeline.stages for name, value in stage.state_dict().items()}
    model.load_state_dict(weights)
    row: Row = {"seed": seed}

    def fine_tune(name: str, method: str, activations: dict[str, Any] | None = None, rival: Any = None) -> None:
        config = ds_config(s, method, Path(), steps=s.steps, lr=s.lr)
        if activations is not None:
            config["pipecomp"]["activations"] = activations
        if method == "aqsgd":
            config["pipecomp"]["store"] = {"backend": "memory"}
        pipeline = InProcessPipeline(model, s.stages, config, Sequences(task.training), rival=rival)
        losses = [float(pipeline.train_batch()) for _ in range(s.steps)]
        row[name] = epoch_means(losses, s.per_epoch)[-1]
        row[f"{name} held out"] = float(pipeline.eval_batch(eval_batches(Sequences(task.held_out), MICRO_BATCH)))

    for name, method in METHODS.items():
        fine_tune(name, method)
    for form, setting in direct.forms(s.forward_bits, s.backward_bits).items():
        if callable(setting):
            fine_tune(_long(form), "none", rival=setting)
        elif form != OWN_FORM:
            fine_tune(_long(form), "direct", setting)
    return {**row, "cpu_seconds": time.process_time() - began}


def _long(form: str) -> str:
    """The name of a form of DirectQ."""
    return f"DirectQ{form or ', max scale'}"


def gap(row: Row) -> float:
    """Return DirectQ's training loss less FP32's."""
    return row["DirectQ"] - row["FP32"]


def results(rows: list[Row]) -> list[str]:
    """The page."""
    rows = sorted(rows, key=lambda row: row["seed"])
    s, gaps = Settings(), [gap(row) for row in rows]
    compared = ""
    if len(rows) > 1:
        times = f"{statistics.mean(gaps) / statistics.stdev(gaps):.0f}"
        compared = f"""
            The gap between DirectQ and FP32 with the same seed is {spread(gaps)}: {times} times its spread over seeds.
            The losses themselves differ by more than that between seeds, as each pre-trains a model of its own.
        """
    text = f"""
        # The demo with other seeds

        `python -m benchmarks demo_seeds`, on {page.machine(rows)}; a run takes one thread and
        {statistics.mean(values(rows, "cpu_seconds")):.0f} s of it.

        The demo's GPT-2 ({s.layers} layers, d = {s.width}, {s.vocabulary} tokens, no dropout) over {s.stages} stages,
        pre-trained on {s.pretraining} sequences of {s.length} tokens of Python's documentation and fine-tuned
        {s.epochs} epochs on {s.training} of other modules; {s.forward_bits} bits forward, {s.backward_bits} back, and
        {FIRST_VISIT_BITS} for AQ-SGD's first visits. A seed sets initial weights and the order of data. Training loss:
        mean over the last epoch. Held-out loss: evaluated without quantization. ± is the standard deviation over seeds.

        {compared}
    """
    cells: dict[str, Any] = {"seed": lambda row: row["seed"]}
    for name in METHODS:
        cells[name] = lambda row, name=name: f"{row[name]:.4f}"
    cells["gap closed"] = lambda row: f"{(row['DirectQ'] - row['AQ-SGD']) / gap(row):.2f}"
    for name in METHODS:
        cells[f"{name}, held out"] = lambda row, name=name: f"{row[f'{name} held out']:.4f}"
    table = page.columns(cells, rows)
    names = [*METHODS, *(f"{name} held out" for name in METHODS)]
    means = [spread(values(rows, name)) for name in names]
    closed = spread([(row["DirectQ"] - row["AQ-SGD"]) / gap(row) for row in rows], 2)
    table[-1:] = [f"| all | {' | '.join([*means[:3], closed, *means[3:]])} |", ""]
    forms = [form for form in direct.names("") if form != OWN_FORM]
    keys = {f"DirectQ{OWN_FORM}": "DirectQ", **{_long(form): _long(form) for form in forms}}

    def above(name: str, end: str = "") -> str:
        return spread([row[f"{keys[name]}{end}"] - row[f"FP32{end}"] for row in rows])

    order = sorted(keys, key=lambda name: statistics.mean(values(rows, keys[name])))
    columns = {
        "form": lambda name: name,
        "training loss above FP32's": above,
        "held-out loss above FP32's": lambda name: above(name, " held out"),
    }
    return [*prose(text), *table, "## DirectQ's forms", "", *page.columns(columns, order)]


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    given = arguments(argv, __doc__, "workers", seeds=(3, "initial weights and orders of data, from 0"))
    settings = {**asdict(Settings()), "out": "", "bandwidth": "", "timeout_s": 0}
    Runs(given, "demo_seeds", digest([settings, SCALES, direct.names("")]), ("seed",)).complete(
        train,
        [(seed,) for seed in range(given.seeds)],
        line=lambda row: "  ".join(f"{name} {row[name]:.4f}" for name in METHODS),
        page=results,
    )
