"""What may a sample's first visit cost? Fine-tune with first visits of several bits, over 1, 2, 3 and 10 epochs.

    python benchmarks/first_visit.py [--seeds 3] [--epochs 3 1 2 10] [--only NAME ...] [--workers 2]
                                     [--data FOLDER] [--cache FOLDER] [--out FOLDER]

The model, the data and the settings are those of convergence.py, with 4 stages and 2 bits forward, 4 back, where a bad
first message has the most to spoil. Finished runs are kept in --out. Writes first_visit.md.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

from convergence import Method, fine_tune, setup_digest
from jobs import chosen, finished, parser, work_off

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


def train(name: str, epochs: int, seed: int, data: Path, cache: Path) -> dict[str, Any]:
    """One run; plain values."""
    method = next(m for m in methods() if m.name == name)
    return {**fine_tune(method, STAGES, seed, epochs, data, cache), "epochs": epochs}


def main() -> None:
    """See the top of the file."""
    from first_visit_report import write_report

    arguments = _arguments()
    setup, kept = setup_digest(), arguments.out / "first_visit.jsonl"
    arguments.cache.mkdir(parents=True, exist_ok=True)
    runs = finished(kept, setup)
    done = {(run["method"], run["epochs"], run["seed"]) for run in runs}
    names = [m.name for m in methods()]
    wanted = chosen(names, arguments.only)
    every = [(n, epochs, seed) for epochs in arguments.epochs for seed in range(arguments.seeds) for n in wanted]
    report = functools.partial(write_report, arguments.out, order=names)
    work_off(
        train,
        [job for job in every if job not in done],
        (arguments.data, arguments.cache),
        runs,
        workers=arguments.workers,
        kept=kept,
        setup=setup,
        line=_line,
        report=report,
    )


def _line(run: dict[str, Any]) -> str:
    return (
        f"{run['epochs']:>2} epochs  {run['method']:<16} seed {run['seed']}  train {run['train_loss']:.4f}  "
        f"held out {run['eval_loss']:.4f}  {run['cpu_seconds']:.0f} s"
    )


def _arguments() -> argparse.Namespace:
    options = parser(__doc__, "--seeds", "--only", "--workers", "--data", "--cache")
    add = options.add_argument
    add("--epochs", type=int, nargs="+", default=[3, 1, 2, 10], metavar="N", help="lengths of training (3 1 2 10)")
    return options.parse_args()


if __name__ == "__main__":
    main()
