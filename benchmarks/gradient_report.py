"""The page of `gradients.py`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks import page
from benchmarks.page import Row, prose, share, spread, values
from benchmarks.training import in_order

TITLES = {
    "resnet": "ResNet-8 (78,000 weights) on 4,000 CIFAR-10 images, 5 epochs of batches of 64, SGD with momentum",
    "gpt2": "GPT-2 (8 layers, d = 128), pre-trained, fine-tuned 3 epochs on 512 sequences of WikiText-2, batches of 16",
}


def results(rows: list[Row], order: Sequence[str]) -> list[str]:
    """The page; `order`: the methods as they stand in the tables."""
    text = f"""
        # Convergence with compressed gradients

        `python -m benchmarks gradients`, on {page.machine(rows)}.

        n workers share each batch; gradients are clipped at norm 1 after averaging. Training loss: mean over the last
        epoch. Sent: bytes of one worker as a share of a float32 ring all-reduce's. Error: of one worker's compression,
        ‖x − sent‖ / ‖x‖. ± is the standard deviation over seeds.
    """
    lines = prose(text)
    for task, title in TITLES.items():
        mine = in_order([row for row in rows if row["task"] == task], order, "n", "method")
        if mine:
            lines += [f"## {title}", "", *_table(mine)]
    return lines


def _table(rows: list[Row]) -> list[str]:
    def error(group: list[Row]) -> str:
        errors = [row["relative_error"] for row in group if row["relative_error"] is not None]
        return f"{statistics.mean(errors):.3f}" if errors else "–"

    cells = {
        "method": lambda group: group[0]["method"],
        "n": lambda group: group[0]["n"],
        "seeds": len,
        "training loss": lambda group: spread(values(group, "train_loss")),
        "held-out loss": lambda group: spread(values(group, "eval_loss")),
        "accuracy": lambda group: spread(values(group, "accuracy"), 3),
        "sent": lambda group: share(statistics.mean(row["bytes_sent"] / row["bytes_raw"] for row in group), 1),
        "error": error,
    }
    if "accuracy" not in rows[0]:
        del cells["accuracy"]
    return page.columns(cells, page.grouped(rows, "n", "method"))
