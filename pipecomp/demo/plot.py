"""The demo's results for people: a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipecomp.tables import table

_REACHED = (
    "method",
    "training\nloss",
    "held-out\nloss",
    "MB sent\nforward",
    "MB sent\nbackward",
    "raw /\nsent",
    "store\nMB",
    "time\ns",
)
_STYLE: dict[str, Any] = {
    "left": ("method",),
    "wrap": False,
    "title_justify": "left",
    "title_style": "bold",
    "box": SIMPLE_HEAD,
    "collapse_padding": True,
}
NAMES = {"none": "FP32", "fp16": "FP16", "bf16": "BF16", "direct": "DirectQ", "aqsgd": "AQ-SGD"}


def label(result: dict[str, Any]) -> str:
    """Name a method, as in "AQ-SGD fw2 bw4"."""
    name = NAMES.get(result["method"], result["method"])
    if result["method"] in ("direct", "aqsgd"):
        return f"{name} fw{result['forward_bits']} bw{result['backward_bits']}"
    return name


def megabytes(size: float) -> str:
    """Write bytes as a number of MB with three digits."""
    return f"{size / 1e6:.3g}" if size < 1e9 else f"{size / 1e6:.0f}"


def tables(results: list[dict[str, Any]]) -> list[Table]:
    """Tabulate what each method reached and sent, and what its steps take on slower links."""
    reached, rates = [], []
    for r in results:
        raw = r["forward_bytes_raw"] + r["backward_bytes_raw"]
        sent = r["forward_bytes_sent"] + r["backward_bytes_sent"]
        row = (
            label(r),
            f"{r['train_loss']:.3f}",
            f"{r['eval_loss']:.3f}",
            megabytes(r["forward_bytes_sent"]),
            megabytes(r["backward_bytes_sent"]),
            f"{raw / sent:.1f}" if sent else "–",
            megabytes(r["store_bytes"]) if r["store_bytes"] else "–",
            f"{r['seconds']:.0f}",
        )
        reached.append(row)
        rates.append((label(r), *(f"{s:.2f}" for s in r["step_seconds_at"].values())))
    at = "Seconds per step, after the first epoch, on a link of"
    return [
        table(_REACHED, reached, title="What each method reached and sent", **_STYLE),
        table(("method", *results[0]["step_seconds_at"]), rates, title=at, **_STYLE),
    ]


def plot(results: list[dict[str, Any]], file: Path) -> None:
    """Draw the loss over steps, and over the time that the steps would take on the slowest link; PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for r in results:
        smooth = _smoothed(r["losses"])
        left.plot(range(1, len(smooth) + 1), smooth, label=label(r))
        rate, seconds = list(r["step_seconds_at"].items())[-1]
        right.plot([seconds * (i + 1) / 60 for i in range(len(smooth))], smooth, label=label(r))
    left.set_xlabel("optimizer step")
    left.set_ylabel("training loss (mean of the last 8 steps)")
    right.set_xlabel(f"minutes at {rate} (predicted; step time after the first epoch)")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _smoothed(losses: list[float], window: int = 8) -> list[float]:
    return [
        sum(losses[max(0, i - window + 1) : i + 1]) / len(losses[max(0, i - window + 1) : i + 1])
        for i in range(len(losses))
    ]
