"""Work of the ranks of `kill_rounds.py` and `fault_run.py`: train a tiny GPT-2 as recipes do, and report the place.

A rank writes its notes, a JSON array each, to a file of its own: a queue that the ranks share could be left locked by
the one that is killed. The first element says what has just begun: start, engine, training, saving, training again, …,
closing. Others tell what was found: step, dropped, compared.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PHASES = ("start", "engine", "loading", "training", "outer", "saving", "closing")
VOCABULARY, LENGTH, WIDTH, SAMPLES, MICRO_BATCH, MICRO_BATCHES = 61, 16, 32, 32, 2, 2
ACTIVATIONS = {"method": "aqsgd", "forward_bits": 4, "backward_method": "delta", "backward_bits": 4}

Job = dict[str, Any]
Note = Callable[..., None]


def make_job(
    folder: Path,
    *,
    seed: int,
    stages: int,
    epochs: int,
    save_every: int,
    timeout_s: float,
    store: dict[str, Any],
    gradients: dict[str, Any] | None = None,
    activations: dict[str, Any] = ACTIVATIONS,
) -> Job:
    """A run's folder with its configuration; plain values.

    store: settings of the message store besides its path. gradients, activations: these sections, the first one where
    there are replicas.
    """
    folder.mkdir(parents=True)
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
        "pipecomp": {
            "activations": activations,
            "store": {"path": str(folder / "messages"), **store},
            "transport": {"timeout_s": timeout_s},
            **({} if gradients is None else {"gradients": gradients}),
        },
    }
    (folder / "ds_config.json").write_text(json.dumps(config))
    return {"folder": str(folder), "seed": seed, "stages": stages, "epochs": epochs, "save_every": save_every}


def steps_of_epoch(replicas: int) -> int:
    """Optimizer steps of a pass over the samples."""
    return SAMPLES // (MICRO_BATCH * MICRO_BATCHES * replicas)


def one_rank(rank: int, world: int, port: int, job: Job, start: int, environment: dict[str, str]) -> None:
    """Train, or go on training, then end as an interpreter does.

    start: number of this start, in the names of what the rank writes. environment: what is set besides.
    """
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
        **environment,
    )
    folder = Path(job["folder"])
    said = os.open(folder / f"said-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    notes = os.open(folder / f"notes-{start}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(*words: Any) -> None:
        os.write(notes, json.dumps([*words, round(time.monotonic(), 4)]).encode() + b"\n")

    note("start")
    try:
        _train(job, note)
    finally:
        note("closing")
        atexit._run_exitfuncs()  # multiprocessing ends its processes without
        note("closed")


def _train(job: Job, note: Note) -> None:
    import torch

    from pipecomp.demo.task import Sequences, gpt2
    from pipecomp.distributed import heartbeat, rendezvous
    from pipecomp.recipes import run

    torch.set_num_threads(1)
    heartbeat.DEFAULT_TIMEOUT_S = job.get("start_timeout_s") or heartbeat.DEFAULT_TIMEOUT_S
    _instrument(job, note)
    rows = [
        torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(i)).tolist()
        for i in range(SAMPLES)
    ]
    folder = job["folder"]
    parser = run.arguments("restarts", "")
    args = parser.parse_args(
        [
            "--deepspeed_config",
            f"{folder}/ds_config.json",
            "--model",
            "tiny",
            "--tokenizer",
            "none",
            "--stages",
            str(job["stages"]),
            "--epochs",
            str(job["epochs"]),
            "--seed",
            str(job["seed"]),
            "--metrics",
            f"{folder}/metrics.jsonl",
            "--checkpoint",
            f"{folder}/checkpoints",
            "--save-every",
            str(job["save_every"]),
            "--resume",
            "auto",
        ]
    )

    def main(args: argparse.Namespace) -> None:
        rendezvous.start_processes(args.seed)
        note("engine")
        model = gpt2(VOCABULARY, LENGTH, layers=job["stages"], width=WIDTH, heads=2, seed=job["seed"])
        run.train(args, run.Workload(model=model, training=Sequences(rows), trained={}))

    parser.parse_args = lambda: args  # type: ignore[assignment,method-assign]
    try:
        run.run(main, parser)
    except SystemExit as ended:
        if ended.code:
            note("failed")
            raise


def _instrument(job: Job, note: Note) -> None:
    """Notes from inside the run, and a comparison of what the ends of links hold after a resume and at the end."""
    from pipecomp.engine.engine import PipelineEngine
    from pipecomp.local_steps.outer_steps import OuterSteps
    from pipecomp.stages.link.links import Links
    from pipecomp.trainer.training import Training

    load, finish, write = PipelineEngine.load_checkpoint, Training._log_evaluate_save, PipelineEngine.save_checkpoint
    reconcile_stores = Links.reconcile_stores
    send, land = OuterSteps._send, OuterSteps._apply_due
    faults = None
    if job.get("faults"):
        from tests.soak.fault_work import Faults

        faults = Faults(Path(job["folder"]), note)  # as they are ordered from outside

    def checked_load(engine: Any, *args: Any, **more: Any) -> Any:
        note("loading")
        done = load(engine, *args, **more)
        note("resumed", engine.global_steps, bool(engine.resumed and engine.resumed.exact))
        note("compared", *compare(engine))
        note("training")
        return done

    last = [0]

    def noted_finish(self: Any, logs: dict[str, float]) -> None:
        step, before = self._trainer.state.global_step, last[0]
        if step != before and step % job.get("note_every", 1) == 0:
            note("step", step)
        finish(self, logs)
        last[0] = step
        if step == before:  # of an epoch, whose last step this was
            return
        if step == self._length.max_steps:
            note("compared", *compare(self._engine))
        elif faults is not None:
            faults.after_step(self._engine)

    def noted_write(self: Any, *args: Any, **more: Any) -> Any:
        note("saving")
        done = write(self, *args, **more)
        note("training")
        return done

    def noted_reconcile(self: Links) -> int:
        dropped = reconcile_stores(self)
        note("dropped", dropped)
        return dropped

    def noted_send(self: Any, fragment: int, step: int, *, overlap: int) -> None:
        note("outer")
        if job.get("late_in_outer_steps") == int(os.environ["RANK"]):
            time.sleep(job["slow_s"])
        send(self, fragment, step, overlap=overlap)

    def noted_land(self: Any, step: int | None) -> None:
        before = len(self._running)
        land(self, step)
        if before and not self._running:
            note("training")

    if job.get("slow_rank") == int(os.environ["RANK"]):
        _write_slowly(job["slow_s"])
    if not job.get("agreement", True):
        _forget_to_drop()
    PipelineEngine.load_checkpoint, Training._log_evaluate_save = checked_load, noted_finish  # type: ignore[method-assign]
    PipelineEngine.save_checkpoint, Links.reconcile_stores = noted_write, noted_reconcile  # type: ignore[method-assign]
    OuterSteps._send, OuterSteps._apply_due = noted_send, noted_land  # type: ignore[method-assign]


def _write_slowly(seconds: float) -> None:
    """As on a slow disk: this rank's store is up to two steps behind its peer's, and a kill leaves it so."""
    from pipecomp.buffers.lmdb_store import StepWriter

    write = StepWriter.write

    def late(self: Any, *args: Any) -> None:
        time.sleep(seconds)
        write(self, *args)

    StepWriter.write = late  # type: ignore[method-assign]


def _forget_to_drop() -> None:
    """The defect that the rounds must find: ends compare what they hold, and keep what differs."""
    from pipecomp.buffers.store import LinkStore

    LinkStore.drop = lambda self, samples: None  # type: ignore[method-assign]


def compare(engine: Any) -> tuple[int, int]:
    """Samples that this rank's upstream end holds, and how many of them, or of its peer's, the two do not hold alike.

    By version and SHA-256 of the values, not by the store's own digests; every rank must call it.
    """
    import torch.distributed as dist

    held: dict[str, dict[int, tuple[int, str]]] = {}
    for end in engine.links:
        ids = [line.sample for line in end.store.inventory()]
        found = zip(ids, end.store.get(ids), strict=True)
        key = f"{end.index} {engine.grid.data_parallel_id}"
        held[key] = {i: (m.version, hashlib.sha256(m.m_nH.numpy().tobytes()).hexdigest()) for i, m in found}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, held)
    if engine.links.to_next is None:
        return 0, 0
    key = f"{engine.links.to_next.index} {engine.grid.data_parallel_id}"
    ends = [of_rank[key] for of_rank in everyone if key in of_rank]
    assert len(ends) == 2
    return len(held[key]), len({i for i, _ in ends[0].items() ^ ends[1].items()})
