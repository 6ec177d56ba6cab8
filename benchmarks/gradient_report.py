"""The table of `gradients.py`."""

from __future__ import annotations

import os
import platform
import statistics
from pathlib import Path
from typing import Any

TITLES = {
    "resnet": "ResNet-8 (78,000 weights) on 4,000 CIFAR-10 images, 5 epochs of batches of 64, SGD with momentum",
    "gpt2": "GPT-2 (8 layers, d = 128), pre-trained, fine-tuned 3 epochs on 512 sequences of WikiText-2, batches of 16",
}


def write_report(out: Path, runs: list[dict[str, Any]], order: list[str]) -> None:
    """Write gradients.md."""
    import torch

    out.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Convergence with compressed gradients",
        "",
        f"`python benchmarks/gradients.py`, on {os.cpu_count()} cores ({platform.machine()}, no GPU), torch "
        f"{torch.__version__}.",
        "",
        "n workers share each batch; gradients are clipped at norm 1 after averaging. Training loss: mean over the "
        "last epoch. Sent: bytes of one worker as a share of a float32 ring all-reduce's. Error: of one worker's "
        "compression, ‖x − sent‖ / ‖x‖. ± is the standard deviation over seeds.",
    ]
    for task, title in TITLES.items():
        mine = [r for r in runs if r["task"] == task]
        if not mine:
            continue
        accuracy = "accuracy" in mine[0]
        headings = [
            "method",
            "n",
            "seeds",
            "training loss",
            "held-out loss",
            *(["accuracy"] if accuracy else []),
            "sent",
            "error",
        ]
        lines += ["", f"## {title}", "", f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
        for n in sorted({r["n"] for r in mine}):
            for method in order:
                rows = [r for r in mine if r["method"] == method and r["n"] == n]
                if rows:
                    lines.append(f"| {' | '.join(_cells(method, n, rows, accuracy))} |")
    (out / "gradients.md").write_text("\n".join(lines) + "\n")


def _cells(method: str, n: int, rows: list[dict[str, Any]], accuracy: bool) -> list[str]:
    share = statistics.mean(r["bytes_sent"] / r["bytes_raw"] for r in rows)
    errors = [r["relative_error"] for r in rows if r["relative_error"] is not None]
    return [
        method,
        str(n),
        str(len(rows)),
        _spread(rows, "train_loss"),
        _spread(rows, "eval_loss"),
        *([_spread(rows, "accuracy", 3)] if accuracy else []),
        f"{100 * share:.1f} %",
        f"{statistics.mean(errors):.3f}" if errors else "–",
    ]


def _spread(rows: list[dict[str, Any]], key: str, digits: int = 4) -> str:
    values = [r[key] for r in rows]
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"
