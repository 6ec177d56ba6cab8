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
WITHIN = 0.01  # of a loss that is as good as another
# What a paper finds: the first method ends with a lower loss than the second, or with one as good.
LOWER, AS_GOOD = "below", "as good as"
ORDERINGS = (
    ("Global-QSGD, table 3", "Global-QSGD exponential, 8 bits", AS_GOOD, "FP32"),
    ("Global-QSGD, figure 2", "Global-QSGD exponential, 8 bits", LOWER, "PowerSGD, rank 2"),
    ("QSGD-MN, figure 3", "QSGD-MN, 8 bits", AS_GOOD, "FP32"),
    ("QSGD-MN, figure 3", "QSGD-MN, 4 bits", AS_GOOD, "FP32"),
    ("QSGD-MN, figure 1", "QSGD-MN, 4 bits", LOWER, "PowerSGD, rank 2"),
    ("QSGD-MN, figure 1", "QSGD-MN, 8 bits", LOWER, "PowerSGD, rank 2"),
    ("QSGD-MN, figure 1", "QSGD-MN-TS, 4 and 8 bits", LOWER, "QSGD-MN, 4 bits"),
    ("QSGD-MN, figure 7", "QSGD-MN-TS, 2 and 6 bits", AS_GOOD, "FP32"),
    ("QSGD-MN, figure 1", "GRandK-MN, 8 bits, as published", LOWER, "PowerSGD, rank 2"),
    ("QSGD-MN, figure 5", "GRandK-MN, 2 bits, as published", AS_GOOD, "GRandK-MN, 8 bits, as published"),
    ("not in a paper", "GRandK-MN, 8 bits, 5 %, error feedback", LOWER, "GRandK-MN, 8 bits, as published"),
    ("CASQ, table 1", "CASQ, 2 bits, no error feedback", AS_GOOD, "FP32"),
    ("CASQ, table 1", "CASQ, 2 bits, no error feedback", LOWER, "TernGrad"),
    ("CASQ, table 1", "CASQ, 3 bits, no error feedback", LOWER, "NUQSGD, 4 bits"),
    *(
        ("CASQ, table 1", f"CASQ, {bits} bits, no error feedback", LOWER, f"{peer}, {bits} bits")
        for bits in (2, 3)
        for peer in ("Qinf", "AMQ", "ALQ")
    ),
    ("CASQ, table 1", "AMQ, 2 bits", LOWER, "ALQ, 2 bits"),
    ("CASQ, table 1", "ALQ, 3 bits", LOWER, "Qinf, 3 bits"),
    ("CASQ, figure 10", "CASQ, 2 bits", LOWER, "CASQ, 2 bits, equal shares"),
    ("CASQ, figure 13", "CASQ, 3 bits", AS_GOOD, "CASQ, 4 bits"),
    ("CASQ, figure 14", "CASQ, 2 bits", LOWER, "CASQ, 2 bits, no sketch"),
)


def results(rows: list[Row], order: Sequence[str]) -> list[str]:
    """The page; `order`: the methods as they stand in the tables."""
    text = f"""
        # Convergence with compressed gradients

        `python -m benchmarks gradients`, on {page.machine(rows)}.

        n workers share each batch; gradients are clipped at norm 1 after averaging. Training loss: mean over the last
        epoch. Sent: bytes of one worker as a share of a float32 ring all-reduce's. Error: of one worker's compression,
        ‖x − sent‖ / ‖x‖. ± is the standard deviation over seeds. CASQ has 0.5 % buckets and a sample of 10 % unless a
        line says otherwise; a sample has at least 4,096 values, 5 % of ResNet-8's. Qinf, ALQ, AMQ, IntSGD, NatSGD and
        SignSGD are not in the product (`peer_averages.py`); ALQ and AMQ fit their levels every 10 steps.
    """
    lines = [*prose(text), *_orderings(rows)]
    for task, title in TITLES.items():
        mine = in_order([row for row in rows if row["task"] == task], order, "n", "method")
        if mine:
            lines += [f"## {title}", "", *_table(mine)]
    return lines


def _orderings(rows: list[Row]) -> list[str]:
    """Table of the papers' orderings of methods by training loss, and which hold here."""
    text = f"""
        ## Orderings of the papers

        By the means of training loss over the seeds that both have; "as good as": at most {100 * WITHIN:g} % above. The
        papers train larger networks from random weights for many more epochs; theirs is the ordering at the end.
    """
    cases = sorted({(row["task"], row["n"]) for row in rows}, key=lambda case: (list(TITLES).index(case[0]), case[1]))

    def by_seed(case: tuple[str, int], method: str) -> dict[int, float]:
        own = [row for row in rows if (row["task"], row["n"], row["method"]) == (*case, method)]
        return {row["seed"]: row["train_loss"] for row in own}

    def verdict(case: tuple[str, int], first: str, relation: str, second: str) -> str:
        losses = by_seed(case, first), by_seed(case, second)
        seeds = set.intersection(*map(set, losses))
        if not seeds:
            return "not run"
        a, b = (statistics.mean(own[seed] for seed in seeds) for own in losses)
        holds = a < b if relation == LOWER else a <= b * (1 + WITHIN)
        return f"{'agrees' if holds else 'contradicts'}: {a:.3f}, {b:.3f}"

    headings = ["source", "ordering", *(f"{task}, n = {n}" for task, n in cases)]
    lines = [
        [source, f"{first} {relation} {second}", *(verdict(case, first, relation, second) for case in cases)]
        for source, first, relation, second in ORDERINGS
    ]
    return [*prose(text), *page.table(headings, lines)]


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
