"""`pipecomp demo`: fine-tune one small GPT-2 over a slow link with several methods and compare what each cost.

The caller's process makes the task; then all ranks are started once, on the CPU, pre-train without compression, and
fine-tune from the same weights with one method after the other. The link is slowed down by the network lab's software
throttle. Without compression it would take many minutes: that run has no limit on its link, and its first steps are run
again over the slow one, for the time of a step.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipecomp.demo.results import check_same_start, compare, extend_run, plot, summarize
from pipecomp.demo.settings import MICRO_BATCH, NAMES, TIMED, WARM_UP, Settings, ds_config
from pipecomp.demo.task import Sequences, Task, documentation_task, gpt2
from pipecomp.distributed.local_launcher import preload_large_packages, run_ranks, start_fork_server
from pipecomp.errors import writable
from pipecomp.interfaces import TrainingEngine
from pipecomp.netlab.shape import read_shape
from pipecomp.netlab.software import VARIABLE, SoftwareNetwork
from pipecomp.report.recorder import Recorder
from pipecomp.utils.serialization import replace_nonfinite
from pipecomp.utils.units import format_nominal_rate, parse_rate

UNLIMITED = "none-without-limit"  # the folder of FP32's run on an unlimited link
_OUT = "a folder that is there or can be made, and"

Progress = Callable[[str, int, int, float | None], None]  # what, step, of how many, loss


def run_demo(settings: Settings, progress: Progress | None = None) -> dict[str, Any]:
    """Run the whole demo and write OUT/demo.json, OUT/losses.png and a folder for each run.

    progress(what, step, steps, loss) is called as work goes on, loss None where there is none yet.

    Returns:
        What demo.json holds: see `pipecomp.demo.results.compare`.

    Raises:
        ConfigError: A setting, or nothing can be written to OUT.
        DataError: FP32's losses depend on the link, or there is too little documentation to train on.
        RankFailedError: A rank failed.
    """
    report = progress or (lambda what, step, steps, loss: None)
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
        ranks = run_ranks(
            settings.stages,
            train_rank,
            settings,
            task,
            links,
            timeout_s=settings.timeout_s,
            on_note=lambda rank, value: report(*value),
        )
    results = [summarize(settings, [ranks[r][i] for r in sorted(ranks)]) for i in range(len(settings.methods))]
    found = compare(settings, results)
    with writable("out", settings.out, _OUT):
        (out / "demo.json").write_text(json.dumps(replace_nonfinite(found), indent=2) + "\n")
        plot(found, out / "losses.png")
    return found


def train_rank(
    rank: int, world: int, note: Callable[[Any], None], settings: Settings, task: Task, links: list[str | None]
) -> list[dict[str, Any]]:
    """Pre-train on every rank, then fine-tune from there with each method in turn. links: what makes them slow."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # read when the engine is imported: times are a CPU's on any machine
    work = _Rank(rank, world, note, settings, task, links[rank])
    work.pretrain()
    return [work.uncompressed() if method == "none" else work.fine_tune(method) for method in settings.methods]


@contextmanager
def slow_link(throttle: str | None) -> Iterator[None]:
    """Let engines that are made inside have slow links; None: links without a limit, in a network lab too."""
    before = os.environ.pop(VARIABLE, None)
    if throttle is not None:
        os.environ[VARIABLE] = throttle
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


class _Rank:
    """One rank's part of the demo. throttle: what makes its link slow."""

    def __init__(
        self,
        rank: int,
        world: int,
        note: Callable[[Any], None],
        settings: Settings,
        task: Task,
        throttle: str | None,
    ) -> None:
        self._rank, self._world, self._note = rank, world, note
        self._settings, self._task, self._throttle = settings, task, throttle
        self._out = Path(settings.out)
        self._link = format_nominal_rate(parse_rate("bandwidth", settings.bandwidth))

    def pretrain(self) -> None:
        """Make the weights that every fine-tuning starts from."""
        from pipecomp.initialization import initialize

        s = self._settings
        model = gpt2(self._task.vocabulary, s.length, layers=s.layers, width=s.width, heads=4, seed=s.seed)
        config = ds_config(s, "none", self._out, steps=s.pretraining_steps, lr=s.pretraining_lr)
        with slow_link(None):
            data = Sequences(self._task.pretraining)
            engine = initialize(model, num_stages=self._world, config=config, training_data=data)
            for step in range(s.pretraining_steps):
                self._progress("Pre-training, no limit on the link", step, s.pretraining_steps, engine.train_batch())
            engine.save_pretrained(str(self._out / "pretrained"))
            engine.close()

    def uncompressed(self) -> dict[str, Any]:
        """Fine-tune without compression: whole without a limit, its first steps again over the slow link."""
        timed = min(WARM_UP + TIMED, self._settings.steps)
        whole = self.fine_tune("none", limited=False)
        slow = self.fine_tune("none", steps=timed)
        check_same_start(slow["losses"], whole["losses"])
        if self._rank == 0:
            extend_run(self._out / "none", self._out / UNLIMITED, slow["seconds"], warm_up=WARM_UP)
        return {**whole, "seconds": slow["seconds"]}

    def fine_tune(self, method: str, *, limited: bool = True, steps: int | None = None) -> dict[str, Any]:
        """Fine-tune with one method.

        Args:
            method: Of the settings' methods.
            limited: Whether the link is slow.
            steps: Only the first so many, without an evaluation; None: all.

        Returns:
            "losses" and "seconds" since the start, of each step; "stats" of this rank; "store_bytes"; "eval_loss".
        """
        from pipecomp.initialization import initialize

        s = self._settings
        store = self._out / "messages" / method
        shutil.rmtree(store / f"rank-{self._rank}", ignore_errors=True)  # of an earlier demo
        config = ds_config(s, method, store, steps=s.steps, lr=s.lr)
        with slow_link(self._throttle if limited else None):
            data = Sequences(self._task.training)
            engine = initialize(
                str(self._out / "pretrained"), num_stages=self._world, config=config, training_data=data
            )
            try:
                found = self._train(engine, method, limited=limited, steps=steps)
            finally:
                engine.close()
        size = sum(file.stat().st_size for file in (store / f"rank-{self._rank}").rglob("data.mdb"))
        return {"method": method, **found, "store_bytes": size}

    def _train(self, engine: TrainingEngine, method: str, *, limited: bool, steps: int | None) -> dict[str, Any]:
        from pipecomp.data import eval_batches

        name = NAMES[method]
        what = f"{name}, {self._link}" if limited else f"{name}, no limit on the link"
        folder = self._out / (method if limited else UNLIMITED)
        recorder = Recorder(folder if self._rank == 0 else None)
        total = steps or self._settings.steps
        recorder.start(
            total, kind="demo", name=name if limited else f"{name}, no limit on the link", **engine.describe()
        )
        losses: list[float] = []
        seconds: list[float] = []
        began = time.perf_counter()
        for step in range(total):
            losses.append(float(engine.train_batch()))
            seconds.append(time.perf_counter() - began)
            spent = seconds[-1] - (seconds[-2] if step else 0.0)
            recorder.step(step + 1, engine.gather_comm_stats(), loss=losses[-1], step_s=spent)
            self._progress(what if steps is None else f"{what}, {steps} steps", step, total, losses[-1])
        found: dict[str, Any] = {"losses": losses, "seconds": seconds}
        if steps is None:
            held_out = eval_batches(Sequences(self._task.held_out), MICRO_BATCH)
            found["eval_loss"] = float(engine.eval_batch(iter(held_out), num_micro_batches=len(held_out)))
            recorder.evaluated(total, {"loss": found["eval_loss"]})
        recorder.end(engine.gather_comm_stats(), engine.gather_last_step())
        return {**found, "stats": engine.comm_stats()}

    def _progress(self, what: str, step: int, steps: int, loss: Any) -> None:
        if self._rank == 0:
            self._note((what, step + 1, steps, float(loss)))
