"""`pipecomp demo`: fine-tune one small GPT-2 over a slow link with several methods and compare their costs.

The caller's process makes the task and starts all ranks once, on the CPU. They pre-train without compression, and
fine-tune from the same weights with one method after the other. The network lab's software throttle limits the link's
bandwidth. Without compression fine-tuning would take many minutes, so that run has an unlimited link, and only its
first steps are repeated over the slow link to measure the time of a step.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipecomp.demo.results import check_same_start, compare, extend_run, plot, summarize
from pipecomp.demo.settings import MICRO_BATCH, NAMES, TIMED, WARM_UP, Settings, ds_config
from pipecomp.demo.task import DemoTask, Sequences, documentation_task, gpt2
from pipecomp.distributed.local_launcher import preload_large_packages, run_ranks, start_fork_server
from pipecomp.errors import writable
from pipecomp.interfaces import TrainingEngine
from pipecomp.netlab.shape import read_shape
from pipecomp.netlab.software import VARIABLE, SoftwareNetwork
from pipecomp.report.recorder import Recorder
from pipecomp.utils.serialization import replace_nonfinite
from pipecomp.utils.units import format_nominal_rate, parse_rate

UNLIMITED = "none-without-limit"  # the folder of FP32's run on an unlimited link
_OUT = "an existing folder or one that can be made, and"

Progress = Callable[[str, int, int, float | None], None]  # phase, step, steps, loss


def run_demo(settings: Settings, progress: Progress | None = None) -> dict[str, Any]:
    """Run the whole demo and write OUT/demo.json, OUT/losses.png and a folder for each run.

    Calls progress(phase, step, steps, loss) after every step; loss is None before training.

    Returns:
        The contents of demo.json, see `pipecomp.demo.results.compare`.

    Raises:
        ConfigError: If a setting is wrong, or OUT cannot be written.
        DataError: If FP32's losses depend on the link, or there is too little documentation to train on.
        RankFailedError: If a rank failed.
    """
    report = progress or (lambda phase, step, steps, loss: None)
    out = Path(settings.out)
    with writable("out", settings.out, _OUT):
        out.mkdir(parents=True, exist_ok=True)
    report("Reading Python's documentation", 0, 1, None)
    preload_large_packages()
    start_fork_server()  # it imports while this process reads
    task = documentation_task(vocabulary=settings.vocabulary, length=settings.length, training=settings.training)
    report("Reading Python's documentation", 1, 1, None)
    with tempfile.TemporaryDirectory() as folder:
        network = SoftwareNetwork(read_shape(nodes=settings.stages, bandwidth=settings.bandwidth), Path(folder))
        links = [network.settings(node, 1) for node in range(settings.stages)]
        options: dict[str, Any] = {"timeout_s": settings.timeout_s, "on_note": lambda rank, value: report(*value)}
        ranks = run_ranks(settings.stages, train_rank, settings, task, links, **options)
    results = [summarize(settings, [ranks[r][i] for r in sorted(ranks)]) for i in range(len(settings.methods))]
    comparison = compare(settings, results)
    with writable("out", settings.out, _OUT):
        (out / "demo.json").write_text(json.dumps(replace_nonfinite(comparison), indent=2) + "\n")
        plot(comparison, out / "losses.png")
    return comparison


def train_rank(
    rank: int, world: int, note: Callable[[Any], None], settings: Settings, task: DemoTask, links: list[str | None]
) -> list[dict[str, Any]]:
    """Pre-train on every rank, then fine-tune from there with each method in turn. links: throttle settings by rank."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # before the engine's import; times are comparable on all machines
    work = _Rank(rank, world, note, settings, task, links[rank])
    work.pretrain()
    return [work.uncompressed() if method == "none" else work.fine_tune(method) for method in settings.methods]


@contextmanager
def slow_link(throttle: str | None) -> Iterator[None]:
    """Throttle the links of engines made inside the context; None for unlimited links, even in a network lab."""
    before = os.environ.pop(VARIABLE, None)
    if throttle is not None:
        os.environ[VARIABLE] = throttle
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


@dataclass(frozen=True)
class _Rank:
    """One rank's part of the demo. throttle: settings of its link."""

    rank: int
    world: int
    note: Callable[[Any], None]
    settings: Settings
    task: DemoTask
    throttle: str | None

    @property
    def out(self) -> Path:
        """Folder of the demo's files."""
        return Path(self.settings.out)

    def pretrain(self) -> None:
        """Train the weights that all methods start from."""
        from pipecomp.initialization import initialize

        s = self.settings
        model = gpt2(self.task.vocabulary, s.length, layers=s.layers, width=s.width, heads=4, seed=s.seed)
        config = ds_config(s, "none", self.out, steps=s.pretraining_steps, lr=s.pretraining_lr)
        with slow_link(None):
            data = Sequences(self.task.pretraining)
            engine = initialize(model, num_stages=self.world, config=config, training_data=data)
            for step in range(s.pretraining_steps):
                self._progress("Pre-training, no limit on the link", step, s.pretraining_steps, engine.train_batch())
            engine.save_pretrained(str(self.out / "pretrained"))
            engine.close()

    def uncompressed(self) -> dict[str, Any]:
        """Fine-tune without compression: all steps over an unlimited link, the first ones again over the slow link."""
        timed = min(WARM_UP + TIMED, self.settings.steps)
        whole = self.fine_tune("none", limited=False)
        slow = self.fine_tune("none", steps=timed)
        check_same_start(slow["losses"], whole["losses"])
        if self.rank == 0:
            extend_run(self.out / "none", self.out / UNLIMITED, slow["seconds"], warm_up=WARM_UP)
        return {**whole, "seconds": slow["seconds"]}

    def fine_tune(self, method: str, *, limited: bool = True, steps: int | None = None) -> dict[str, Any]:
        """Fine-tune with one method.

        Args:
            method: One of the settings' methods.
            limited: Throttle the link.
            steps: Number of steps, without an evaluation; None for all steps with one.

        Returns:
            "losses" and "seconds" since the start for each step; "stats" of this rank; "store_bytes"; "eval_loss".
        """
        from pipecomp.initialization import initialize

        s = self.settings
        store = self.out / "messages" / method
        shutil.rmtree(store / f"rank-{self.rank}", ignore_errors=True)  # from an earlier demo
        config = ds_config(s, method, store, steps=s.steps, lr=s.lr)
        with slow_link(self.throttle if limited else None):
            data = Sequences(self.task.training)
            engine = initialize(str(self.out / "pretrained"), num_stages=self.world, config=config, training_data=data)
            try:
                results = self._train(engine, method, limited=limited, steps=steps)
            finally:
                engine.close()
        size = sum(file.stat().st_size for file in (store / f"rank-{self.rank}").rglob("data.mdb"))
        return {"method": method, **results, "store_bytes": size}

    def _train(self, engine: TrainingEngine, method: str, *, limited: bool, steps: int | None) -> dict[str, Any]:
        from pipecomp.data import eval_batches

        name = NAMES[method]
        title = name if limited else f"{name}, no limit on the link"
        phase = f"{name}, {format_nominal_rate(parse_rate('bandwidth', self.settings.bandwidth))}" if limited else title
        folder = self.out / (method if limited else UNLIMITED)
        recorder = Recorder(folder if self.rank == 0 else None)
        total = steps or self.settings.steps
        recorder.start(total, kind="demo", name=title, **engine.describe())
        losses: list[float] = []
        seconds: list[float] = []
        began = time.perf_counter()
        for step in range(total):
            losses.append(float(engine.train_batch()))
            seconds.append(time.perf_counter() - began)
            spent = seconds[-1] - (seconds[-2] if step else 0.0)
            recorder.step(step + 1, engine.gather_comm_stats(), loss=losses[-1], step_s=spent)
            self._progress(phase if steps is None else f"{phase}, {steps} steps", step, total, losses[-1])
        results: dict[str, Any] = {"losses": losses, "seconds": seconds}
        if steps is None:
            held_out = eval_batches(Sequences(self.task.held_out), MICRO_BATCH)
            results["eval_loss"] = float(engine.eval_batch(iter(held_out), num_micro_batches=len(held_out)))
            recorder.evaluated(total, {"loss": results["eval_loss"]})
        recorder.end(engine.gather_comm_stats(), engine.gather_last_step())
        return {**results, "stats": engine.comm_stats()}

    def _progress(self, phase: str, step: int, steps: int, loss: Any) -> None:
        if self.rank == 0:
            self.note((phase, step + 1, steps, float(loss)))
