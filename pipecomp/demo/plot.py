"""The demo's results for people: a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipecomp.demo.results import epoch_means
from pipecomp.demo.settings import NAMES, WARM_UP
from pipecomp.utils.tables import table
from pipecomp.utils.units import format_duration

_HEADINGS = (
    "method",
    "training\nloss",
    "held-out\nloss",
    "MB there,\nback",
    "s a\nstep",
    "time to AQ-\nSGD's loss",
)
_STYLE: dict[str, Any] = {
    "left": ("method",),
    "title_justify": "left",
    "title_style": "bold",
    "box": SIMPLE_HEAD,
    "collapse_padding": True,
}


def label(result: dict[str, Any]) -> str:
    """Name a method, as in "AQ-SGD fw2 bw4"."""
    name = NAMES.get(result["method"], result["method"])
    if result["method"] in ("direct", "aqsgd"):
        return f"{name} fw{result['forward_bits']} bw{result['backward_bits']}"
    return name


def megabytes(size: float) -> str:
    """Write bytes as a number of MB with three digits, of large numbers with all."""
    return f"{size / 1e6:.3g}" if size < 1e8 else f"{size / 1e6:.0f}"


def result_table(found: dict[str, Any]) -> Table:
    """Tabulate what `compare` found: what each method reached, sent and took; * marks times that are derived."""
    rows = []
    for r in found["results"]:
        mark = "*" if r["measured_steps"] < len(r["losses"]) else ""
        until = f"{format_duration(r['seconds'][r['reached'] - 1])}{mark}" if r["reached"] else "not reached"
        row = (
            label(r),
            f"{r['train_loss']:.3f}",
            f"{r['eval_loss']:.3f}",
            f"{megabytes(r['forward_bytes_sent'])} + {megabytes(r['backward_bytes_sent'])}",
            f"{r['step_s']:.2f}",
            "–" if found["loss"] is None else until,
        )
        rows.append(row)
    title = f"Over a link of {found['link']}, {len(found['results'][0]['losses'])} steps"
    return table(_HEADINGS, rows, title=title, **_STYLE)


def notes(found: dict[str, Any]) -> list[str]:
    """Say what the table's numbers are, a sentence each."""
    said = [
        "Training loss: mean over the last epoch. Held-out loss: evaluated without quantization.",
        "pipecomp itself slows the link down, each way, and counts headers. Input and output embeddings are untied, so "
        "that only activations and their gradients are sent.",
    ]
    for r in found["results"]:
        count = r["measured_steps"]
        if count < len(r["losses"]):
            said.append(
                f"* Derived: {count} steps were run over this link, and {r['step_s']:.3g} s is what the last "
                f"{count - min(WARM_UP, count - 1)} of them took on average. {label(r)}'s losses and bytes are those "
                f"of a run without a limit on its link; checked: the first {count} losses of both are equal, bit for "
                "bit."
            )
    if found["gap_closed"] is not None:
        said.append(
            f"AQ-SGD closes {100 * found['gap_closed']:.0f} % of the gap between DirectQ's training loss and FP32's."
        )
    return said


def plot(found: dict[str, Any], file: Path) -> None:
    """Draw the loss over steps and over the time on the slow link, as means over an epoch's steps; PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    first = found["per_epoch"]
    for r in found["results"]:
        means = epoch_means(r["losses"], first)
        steps = range(first, len(r["losses"]) + 1)
        derived = r["measured_steps"] < len(r["losses"])
        how = {"linestyle": "--"} if derived else {}
        left.plot(steps, means, label=label(r))
        right.plot(
            [s / 60 for s in r["seconds"][first - 1 :]],
            means,
            label=f"{label(r)}{' (time of a step measured, losses equal)' if derived else ''}",
            **how,
        )
    left.set_xlabel("optimizer step")
    left.set_ylabel("training loss (mean over an epoch's steps)")
    right.set_xlabel(f"minutes over a link of {found['link']}")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)
