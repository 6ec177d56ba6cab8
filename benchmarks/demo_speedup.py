"""Repeat the demo's FP32 and AQ-SGD trainings over links that the kernel shapes, in network namespaces.

    python -m benchmarks demo_speedup DEMO-OUT [--within 0.1]

DEMO-OUT is the folder of a demo that has ended (`pipecomp demo --out`), on the same machine. Its model is fine-tuned
again with its settings, each stage in a network namespace whose link has the demo's rate by the kernel's shaping (root
needed): AQ-SGD whole, and FP32 until it has the loss that AQ-SGD ended with, which takes minutes. Exit status 1 if the
times differ by more than --within from the demo's. Nothing is derived or recorded here.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipecomp.demo.results import seconds_until
from pipecomp.demo.settings import Settings, ds_config


def one_rank(
    rank: int, world: int, note: Any, settings: Settings, method: str, steps: int, store: str
) -> dict[str, list[float]]:
    """Losses, and the seconds since the first step began, of `steps` steps."""
    import torch

    import pipecomp
    from pipecomp.demo.task import Sequences, documentation_task

    torch.set_num_threads(1)
    s = settings
    task = documentation_task(vocabulary=s.vocabulary, length=s.length, training=s.training)
    config = ds_config(settings, method, Path(store), steps=settings.steps, lr=settings.lr)
    model = str(Path(settings.out).resolve() / "pretrained")
    engine = pipecomp.initialize(model, num_stages=world, config=config, training_data=Sequences(task.training))
    losses, seconds = [], []
    began = time.perf_counter()
    for _ in range(steps):
        losses.append(float(engine.train_batch()))
        seconds.append(time.perf_counter() - began)
    engine.close()
    return {"losses": losses, "seconds": seconds}


def measure(settings: Settings, bandwidth: int, method: str, steps: int) -> dict[str, list[float]]:
    """Run so many steps in network namespaces."""
    from pipecomp.netlab import Lab

    with Lab(nodes=settings.stages, bandwidth=f"{bandwidth}bit") as lab, tempfile.TemporaryDirectory() as store:
        return lab.run(one_rank, settings, method, steps, store, timeout_s=7200)[0]


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DEMO-OUT", type=Path, help="of a demo that has ended")
    parser.add_argument("--within", type=float, default=0.1, help="how far the times may differ (0.1)")
    given = parser.parse_args(argv)
    record = json.loads((given.folder / "demo.json").read_text())
    by_name = {r["method"]: r for r in record["results"]}
    if record["faster"] is None:
        raise SystemExit(f"{given.folder}: this demo has no FP32 and AQ-SGD to compare")
    settings = Settings(
        **{**record["settings"], "methods": tuple(record["settings"]["methods"]), "out": str(given.folder)}
    )
    print(
        f"{record['link']}, by the kernel in {settings.stages} network namespaces. The demo said: {record['sentence']}"
    )
    seconds, apart = {}, []
    for method in ("aqsgd", "none"):
        demo = by_name[method]
        run_here = measure(settings, record["bandwidth"], method, demo["reached"])
        same = run_here["losses"] == demo["losses"][: demo["reached"]]
        seconds[method] = run_here["seconds"][-1]
        apart.append(seconds_until(demo) / seconds[method] - 1)
        times = f"{seconds[method]:.1f} s here, {seconds_until(demo):.1f} s in the demo ({100 * apart[-1]:+.1f} %)"
        equal = "equal, bit for bit" if same else "DIFFERENT"
        print(f"{method:<6} {demo['reached']} steps: {times}; losses {equal}", flush=True)
        if not same:
            raise SystemExit("The losses are not those of the demo: not the same machine, versions or settings?")
    faster = seconds["none"] / seconds["aqsgd"]
    apart.append(record["faster"] / faster - 1)
    print(f"faster: {faster:.2f} times here, {record['faster']:.2f} times in the demo ({100 * apart[-1]:+.1f} %)")
    if abs(apart[-1]) > given.within:
        raise SystemExit(f"The speed-ups differ by more than {100 * given.within:.0f} %.")
