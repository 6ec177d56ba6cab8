"""Many trainings one after the other in each of two processes: threads, open files and memory after 1, 10 and all.

python -m tests.soak.trainings --rounds 50

Engines that are closed, dropped or leave a `with`, over gloo and TLS, and PipelineTrainers. The status is 1 if the
losses of two trainings differ, or if threads or files grow after the first ten.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipecomp.distributed.local_launcher import run_ranks
from tests.dist.test_several_trainings import engines, trainers
from tests.tls.meshes import keys_for

SLACK = 3  # threads that are about to end


def main(rounds: int) -> int:
    """Run all kinds and print a table. Returns the exit status."""
    marks = sorted({1, min(10, rounds), rounds})
    print("| trainings | " + " | ".join(f"threads, files, MB after {mark}" for mark in marks) + " |")
    print("|---" * (1 + len(marks)) + "|")
    grown = False
    for name, backend, work, more in (
        ("engines over gloo, closed", "gloo", engines, ("close",)),
        ("engines over gloo, dropped", "gloo", engines, ("drop",)),
        ("engines over TLS, `with`", "tls", engines, ("with",)),
        ("PipelineTrainer, `end()` after every second", "gloo", trainers, None),
    ):
        with tempfile.TemporaryDirectory() as folder:
            grown |= _run(name, backend, work, more, folder, rounds, marks)
    return int(grown)


def _run(
    name: str, backend: str, work: Callable, more: tuple | None, folder: str, rounds: int, marks: list[int]
) -> bool:
    """Print one row, the largest values of both ranks. Returns whether something grew."""
    keys = None
    if backend == "tls":
        keys = f"{folder}/keys"
        keys_for(Path(keys), 2)
    given: tuple[Any, ...] = (folder, rounds) if more is None else (folder, keys, *more, rounds)
    results = run_ranks(2, work, *given, timeout_s=60.0 * rounds)
    cells = []
    for mark in marks:
        threads, files, _, rss = (max(results[rank][0][mark - 1][k] for rank in (0, 1)) for k in range(4))
        cells.append(f"{threads}, {files}, {rss >> 20}")
    print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    grown = False
    for counts, losses in results.values():
        grown |= any(each != losses[0] for each in losses)
        early = counts[: marks[-2] if len(marks) > 1 else 1]
        for place in (0, 1):
            grown |= counts[-1][place] > max(count[place] for count in early) + SLACK
    return grown


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    sys.exit(main(parser.parse_args().rounds))
