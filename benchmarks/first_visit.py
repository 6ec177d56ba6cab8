"""Fine-tune with first visits of several numbers of bits, over 1, 2, 3 and 10 epochs.

    python -m benchmarks first_visit [--seeds 3] [--epochs 3 1 2 10] [--only NAME ...] [--workers 2]
                                     [--data FOLDER] [--cache FOLDER] [--out FOLDER] [--redraw]

The model, the data and the settings are those of convergence.py, with 4 stages and 2 bits forward, 4 back, where a bad
first message has the most to spoil.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.convergence import SETUP, Method, fine_tune
from benchmarks.page import Row, prose, share, spread
from benchmarks.runner import Runs, arguments, beside, chosen
from benchmarks.training import in_order

STAGES, FORWARD, BACKWARD = 4, 2, 4
FIRST_BITS = (8, 6, 5, 4, 3)


def methods() -> list[Method]:
    """All lines of the table, in its order."""
    bits = {"forward_bits": FORWARD, "backward_bits": BACKWARD}
    lines = [Method("FP32", {"method": "none"}), Method("DirectQ", {"method": "direct", **bits})]
    lines.append(Method("full", {"method": "aqsgd", **bits}))
    for rotation in (False, True):
        for first in FIRST_BITS:
            extra: dict[str, Any] = {"first_visit": first, **({"rotation": True} if rotation else {})}
            name = f"{first} bits{', rotated' if rotation else ''}"
            lines.append(Method(name, {"method": "aqsgd", **bits, **extra}))
    return lines


def train(name: str, epochs: int, seed: int, data: Path, cache: Path) -> Row:
    """One run."""
    method = next(m for m in methods() if m.name == name)
    return {**fine_tune(method, STAGES, seed, epochs, data, cache), "epochs": epochs}


def results(rows: list[Row]) -> list[str]:
    """The page."""
    rows = in_order(rows, [m.name for m in methods()], "epochs", "method", "seed")
    text = f"""
        # First visits with fewer bits

        `python -m benchmarks first_visit`, on {page.machine(rows)}; an epoch takes one thread and
        {statistics.mean(row["cpu_seconds"] / row["epochs"] for row in rows):.0f} s of it.

        The set-up of [convergence.md](convergence.md) over 4 stages with 2 bits forward and 4 back: a pre-trained
        GPT-2, fine-tuned for 1, 2, 3 or 10 epochs, each with its own warm-up (an eighth of all steps) and decay. "full"
        is the paper's first visit in float32; "DirectQ" quantizes every visit to 2 bits. Rotated: after a randomized
        Walsh–Hadamard rotation.

        Above FP32: the mean over seeds of the difference to FP32 with the same seed, ± its standard deviation; the
        training loss is the mean over the last epoch. First epoch, all: forward bytes as a share of float32's. Less:
        bytes both ways over the whole run, how many times less than float32's.
    """
    return [*prose(text), *(line for group in page.grouped(rows, "epochs") for line in _section(group))]


def _section(rows: list[Row]) -> list[str]:
    """Return the section of trainings of one length."""
    exact = [row for row in rows if row["method"] == "FP32"]

    def above(group: list[Row], key: str) -> str:
        differences = page.above(group, exact, key)
        return "–" if group[0]["method"] == "FP32" else spread(differences, sign="+") if differences else "?"

    def first_epoch(row: Row, kind: str) -> int:
        return row[f"forward_bytes_{kind}"] - row[f"forward_bytes_{kind}_after_first_epoch"]

    def both_ways(row: Row, kind: str) -> int:
        return row[f"forward_bytes_{kind}"] + row[f"backward_bytes_{kind}"]

    cells = {
        "first visit": lambda group: group[0]["method"],
        "seeds": len,
        "training loss above FP32": lambda group: above(group, "train_loss"),
        "held-out above FP32": lambda group: above(group, "eval_loss"),
        "first epoch": lambda group: share(first_epoch(group[0], "sent"), first_epoch(group[0], "raw")),
        "all": lambda group: share(group[0]["forward_bytes_sent"], group[0]["forward_bytes_raw"]),
        "less": lambda group: f"{both_ways(group[0], 'raw') / both_ways(group[0], 'sent'):.1f}×",
    }
    epochs = rows[0]["epochs"]
    title = f"## {epochs} epoch{'s' if epochs > 1 else ''}"
    lines = [title, "", *page.columns(cells, page.grouped(rows, "method"))]
    if exact:
        plain = [statistics.mean(page.values(exact, key)) for key in ("train_loss", "eval_loss")]
        lines += [f"FP32: training loss {plain[0]:.4f}, held-out loss {plain[1]:.4f}.", ""]
    return lines


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    epochs = ([3, 1, 2, 10], "lengths of training")
    given = arguments(argv, __doc__, "seeds", "only", "workers", "data", "cache", epochs=epochs)
    names = chosen([m.name for m in methods()], given.only)
    keys, exact = ("method", "epochs", "seed"), beside("FP32", "epochs", "seed")
    Runs(given, "first_visit", SETUP, keys, exact=exact).complete(
        train,
        [(name, epochs, seed) for epochs in given.epochs for seed in range(given.seeds) for name in names],
        given.data,
        given.cache,
        line=lambda row: f"train {row['train_loss']:.4f}  held out {row['eval_loss']:.4f}  {row['cpu_seconds']:.0f} s",
        page=results,
    )
