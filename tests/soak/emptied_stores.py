"""What lost caches do to losses: stores are emptied at the steps after which a run of `lost_machines.py` went on.

    python -m tests.soak.emptied_stores [--seeds 3] [--out FOLDER]

The training of `lost_machines.py spare --full` on 127.0.0.1, once undisturbed and once with the message stores of all
links emptied after these steps, so that samples are sent as first visits again. Nothing is killed. Rows are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.runner import Kept, digest, read_rows
from pipecomp.distributed.placement import free_port
from tests.soak.lost_machines import BLOCKS, LAST, NAME, ROOT, STAGES, make_model
from tests.soak.lost_report import EMPTIED, page, processor

_STEPS = "PIPECOMP_TEST_EMPTIED_AFTER"


def resumed_steps(rows: Path) -> tuple[list[int], int]:
    """Return the steps after which the newest run with a spare machine went on, all weights, and how many it has."""
    run = [row for row in read_rows(rows) if (row["scenario"], row["full"]) == ("spare", True)][-1]
    return sorted({one["resumed"] for one in run["lost"]}), run["steps"]


def train(seed: int, after: list[int], steps: int, plan: Path) -> float:
    """Train on three ranks; return the mean of the last losses."""
    with tempfile.TemporaryDirectory(prefix="emptied-stores-") as folder:
        work = Path(folder)
        make_model(work)
        given = {"model": "model", "data": ["text.txt"], "out": "mine", "plan": str(plan), "stages": STAGES}
        given |= {"epochs": 100000, "max_steps": steps, "batch": 8, "lr": 1e-3, "seed": seed}
        shared = {"WORLD_SIZE": STAGES, "LOCAL_WORLD_SIZE": STAGES, "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": free_port(), "OMP_NUM_THREADS": 1, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": 1}
        shared |= {"PYTHONPATH": ROOT, _STEPS: json.dumps(after)}
        command = [sys.executable, "-m", "tests.soak.emptied_stores", "--rank", json.dumps(given)]
        ranks = []
        for rank in range(STAGES):
            own = {key: str(value) for key, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
            ranks.append(subprocess.Popen(command, cwd=work, env=os.environ | own, stdout=subprocess.DEVNULL))
        if any([rank.wait() for rank in ranks]):
            raise SystemExit("a rank failed")
        lines = map(json.loads, (work / "mine" / "metrics.jsonl").read_text().splitlines())
        losses = {row["step"]: row["loss"] for row in lines if "loss" in row}
    return statistics.fmean([losses[step] for step in sorted(losses)][-LAST:])


def rank_main(given: str) -> None:
    """One rank: a training that empties its stores before the step after each of the given ones."""
    import pipecomp.recipes.planned  # noqa: F401 (the engine's class is complete then)
    from pipecomp.engine.engine import PipelineEngine

    after, train_batch = json.loads(os.environ[_STEPS]), PipelineEngine.train_batch

    def emptying(engine: Any, data_iter: Any = None) -> Any:
        if engine.global_steps in after:
            for end in engine.links:
                end.store.drop([held.sample for held in end.store.inventory()])
                end.reload()
        return train_batch(engine, data_iter)

    PipelineEngine.train_batch = emptying  # type: ignore[method-assign]
    sys.argv = ["planned", given]
    runpy.run_module("pipecomp.recipes.planned", run_name="__main__")


def main() -> None:
    """Make the rows that are missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        return rank_main(given.rank)
    file, plan = given.out / f"{NAME}.jsonl", given.out / f"{NAME}_full.plan.json"
    after, steps = resumed_steps(file)
    kept = Kept(file, digest([EMPTIED, after, steps, BLOCKS, LAST, json.loads(plan.read_text())]))
    for seed in range(given.seeds):
        if all(row["seed"] != seed for row in kept.rows):
            row = {
                "scenario": EMPTIED,
                "full": True,
                "run": seed,
                "seed": seed,
                "steps": steps,
                "processor": processor(),
            }
            row |= {"undisturbed": train(seed, [], steps, plan), "loss": train(seed, after, steps, plan)}
            kept.add(row)
            print(f"seed {seed}: {row['undisturbed']:.4f} undisturbed, {row['loss']:.4f}", flush=True)
    (given.out / f"{NAME}.md").write_text(page(file))


if __name__ == "__main__":
    main()
