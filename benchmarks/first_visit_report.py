"""The table of `first_visit.py`."""

from __future__ import annotations

import os
import platform
import statistics
from pathlib import Path
from typing import Any

Run = dict[str, Any]
HEADINGS = ("first visit", "seeds", "training loss above FP32", "held-out above FP32", "first epoch", "all", "less")


def write_report(folder: Path, runs: list[Run], order: list[str]) -> None:
    """Write first_visit.md; `order`: the lines as they stand in the table."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = sorted(runs, key=lambda run: (run["epochs"], order.index(run["method"]), run["seed"]))
    lines = _head(runs)
    for epochs in sorted({run["epochs"] for run in runs}):
        lines += _table(epochs, [run for run in runs if run["epochs"] == epochs])
    (folder / "first_visit.md").write_text("\n".join(lines) + "\n")


def _head(runs: list[Run]) -> list[str]:
    import torch

    seconds = statistics.mean(run["cpu_seconds"] / run["epochs"] for run in runs)
    return [
        "# First visits with fewer bits",
        "",
        f"`python benchmarks/first_visit.py`, on {os.cpu_count()} cores ({platform.machine()}, no GPU), torch "
        f"{torch.__version__}; an epoch takes one thread and {seconds:.0f} s of it.",
        "",
        "The set-up of [convergence.md](convergence.md) over 4 stages with 2 bits forward and 4 back: a pre-trained "
        "GPT-2, fine-tuned for 1, 2, 3 or 10 epochs, each with its own warm-up (an eighth of all steps) and decay. "
        '"full" is the paper\'s first visit in float32; "DirectQ" quantizes every visit to 2 bits. Rotated: after a '
        "randomized Walsh–Hadamard rotation.",
        "",
        "Above FP32: the mean over seeds of the difference to FP32 with the same seed, ± its standard deviation; the "
        "training loss is the mean over the last epoch. First epoch, all: forward bytes as a share of float32's. "
        "Less: bytes both ways over the whole run, how many times less than float32's.",
    ]


def _table(epochs: int, runs: list[Run]) -> list[str]:
    exact = {run["seed"]: run for run in runs if run["method"] == "FP32"}
    lines = ["", f"## {epochs} epoch{'s' if epochs > 1 else ''}", "", f"| {' | '.join(HEADINGS)} |"]
    lines.append("|" + "---|" * len(HEADINGS))
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run["method"], []).append(run)
    for method, group in groups.items():
        one = group[0]
        sent = one["forward_bytes_sent"] + one["backward_bytes_sent"]
        raw = one["forward_bytes_raw"] + one["backward_bytes_raw"]
        cells = [
            method,
            str(len(group)),
            _above(group, exact, "train_loss"),
            _above(group, exact, "eval_loss"),
            _share(one, first=True),
            _share(one, first=False),
            f"{raw / sent:.1f}×",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if exact:
        plain = [statistics.mean(run[key] for run in exact.values()) for key in ("train_loss", "eval_loss")]
        lines += ["", f"FP32: training loss {plain[0]:.4f}, held-out loss {plain[1]:.4f}."]
    return lines


def _above(group: list[Run], exact: dict[int, Run], key: str) -> str:
    if group[0]["method"] == "FP32":
        return "–"
    above = [run[key] - exact[run["seed"]][key] for run in group if run["seed"] in exact]
    if not above:
        return "?"
    deviation = f" ± {statistics.stdev(above):.4f}" if len(above) > 1 else ""
    return f"{statistics.mean(above):+.4f}{deviation}"


def _share(run: Run, first: bool) -> str:
    """Forward bytes sent of the first epoch, or of all, as a share of the values' bytes."""
    sent, raw = run["forward_bytes_sent"], run["forward_bytes_raw"]
    if first:
        sent -= run["forward_bytes_sent_after_first_epoch"]
        raw -= run["forward_bytes_raw_after_first_epoch"]
    return f"{100 * sent / raw:.1f} %"
