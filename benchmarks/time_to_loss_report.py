"""The table and the picture of `time_to_loss.py`."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

Run = dict[str, Any]
HEADINGS = ("line", "seconds", "faster", "final loss", "above FP32", "seconds to FP32's loss", "faster", "MB")
WITHIN = 0.005


def write_report(folder: Path, runs: list[Run], r: float, order: list[str]) -> None:
    """Write time_to_loss.md and .png; the first of `order` is the reference."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    runs = sorted(runs, key=lambda run: (run["epochs"], order.index(run["method"])))
    lines = [
        "# Time to the loss of FP32 over a slow link",
        "",
        f"`python benchmarks/time_to_loss.py`, on {os.cpu_count()} cores ({platform.machine()}, no GPU), torch "
        f"{torch.__version__}. Link: {runs[0]['rate'] / 1e6:.1f} Mbit/s, r = {r:g}.",
        "",
        "Whole trainings with their first epoch, without start and evaluation. Loss: the training loss, mean over an "
        f"epoch's steps. Seconds to FP32's loss: until the mean over the last epoch's number of steps is at most "
        f"{100 * WITHIN:g} % above what {order[0]} ends with. MB: on the nodes' interfaces. "
        "![loss over time](time_to_loss.png)",
    ]
    for epochs in sorted({run["epochs"] for run in runs}):
        lines += _table(epochs, [run for run in runs if run["epochs"] == epochs], order[0])
    (folder / "time_to_loss.md").write_text("\n".join(lines) + "\n")
    _draw(folder / "time_to_loss.png", runs, r)


def epoch_means(run: Run) -> list[float]:
    """For every step from the end of the first epoch on: the mean loss of as many steps as an epoch has."""
    window = len(run["losses"]) // run["epochs"]
    return [sum(run["losses"][i - window : i]) / window for i in range(window, len(run["losses"]) + 1)]


def seconds_to(run: Run, loss: float) -> float | None:
    """Seconds until `epoch_means` is at most `loss`; None if it never is."""
    means = epoch_means(run)
    first = len(run["losses"]) - len(means)
    return next((run["seconds"][first + i] for i, mean in enumerate(means) if mean <= loss), None)


def _table(epochs: int, runs: list[Run], reference: str) -> list[str]:
    lines = ["", f"## {epochs} epochs", "", f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS)]
    base = next((run for run in runs if run["method"] == reference), None)
    for run in runs:
        final = epoch_means(run)[-1]
        cells = [run["method"], f"{run['seconds'][-1]:.0f}", "–", f"{final:.4f}", "–", "–", "–"]
        if base is not None:
            goal = epoch_means(base)[-1]
            mine, theirs = seconds_to(run, goal * (1 + WITHIN)), seconds_to(base, goal * (1 + WITHIN))
            cells[2] = f"{base['seconds'][-1] / run['seconds'][-1]:.2f}×"
            cells[4] = f"{100 * (final / goal - 1):+.2f} %"
            if mine is not None and theirs is not None:
                cells[5:7] = [f"{mine:.0f}", f"{theirs / mine:.2f}×"]
        cells.append(f"{run['bytes'] / 1e6:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _draw(path: Path, runs: list[Run], r: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = sorted({run["epochs"] for run in runs})
    figure, axes = pyplot.subplots(1, len(lengths), figsize=(6 * len(lengths), 4.5), squeeze=False)
    for axis, epochs in zip(axes[0], lengths, strict=True):
        for run in (run for run in runs if run["epochs"] == epochs):
            means = epoch_means(run)
            axis.plot([s / 60 for s in run["seconds"][-len(means) :]], means, label=run["method"])
        axis.set(title=f"{epochs} epochs, r = {r:g}", xlabel="minutes", ylabel="training loss", xscale="log")
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
