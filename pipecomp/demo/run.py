"""`pipecomp demo`: fine-tune one small GPT-2 over real processes with several methods and compare what each cost.

The caller's process makes the task; then all ranks are started once, pre-train without compression, and fine-tune from
the same weights with one method after the other.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipecomp.cluster.local_ranks import preload_large_packages, run_ranks
from pipecomp.config import Activations
from pipecomp.demo.plot import NAMES, plot
from pipecomp.demo.task import Sequences, Task, documentation_task, gpt2
from pipecomp.errors import require
from pipecomp.plan.network import uniform
from pipecomp.plan.simulation import Step, measured_costs, measured_end, play
from pipecomp.report.record import Recorder
from pipecomp.stats import total_bytes

RATES = {"1 Gbit/s": 1e9, "100 Mbit/s": 1e8, "10 Mbit/s": 1e7}
MICRO_BATCH, MICRO_BATCHES = 4, 8


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is run: model and data sizes, methods, and where results go."""

    stages: int = 2
    methods: tuple[str, ...] = ("none", "direct", "aqsgd")
    forward_bits: int = 2
    backward_bits: int = 4
    seed: int = 0
    out: str = "demo-out"
    layers: int = 4
    width: int = 256
    length: int = 64
    vocabulary: int = 1024
    training: int = 384
    epochs: int = 5
    pretraining: int = 3840
    pretraining_lr: float = 2e-3
    lr: float = 5e-4
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        require(1 <= self.stages <= self.layers, "stages", self.stages, f"1 to {self.layers}, the model's blocks")
        for method in self.methods:
            require(method in Activations.METHODS, "methods", method, ", ".join(Activations.METHODS))
        require(self.methods, "methods", self.methods, "at least one method")
        require(
            self.stages != 1 or self.methods == ("none",),
            "methods",
            ",".join(self.methods),
            "none, with one stage: it has no links",
        )
        Activations(method="direct", forward_bits=self.forward_bits, backward_bits=self.backward_bits)


Progress = Callable[[str, int, int, float | None], None]  # what, step, of how many, loss


def run_demo(settings: Settings, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Run the whole demo and write OUT/demo.json, OUT/losses.png; returns what demo.json holds.

    progress(what, step, steps, loss) is called as work goes on, loss None where there is none yet.
    """
    report = progress or (lambda what, step, steps, loss: None)
    out = Path(settings.out)
    out.mkdir(parents=True, exist_ok=True)
    report("reading Python's documentation", 0, 1, None)
    task = documentation_task(
        vocabulary=settings.vocabulary, length=settings.length, training=settings.training, held_out=96
    )
    report("reading Python's documentation", 1, 1, None)
    preload_large_packages()
    ranks = run_ranks(
        settings.stages,
        train_rank,
        settings,
        task,
        timeout_s=settings.timeout_s,
        on_note=lambda rank, value: report(*value),
    )
    results = [_summary(settings, [ranks[r][i] for r in sorted(ranks)]) for i in range(len(settings.methods))]
    (out / "demo.json").write_text(json.dumps(results, indent=2) + "\n")
    plot(results, out / "losses.png")
    return results


def ds_config(settings: Settings, method: str, store: Path, *, steps: int, lr: float) -> dict[str, Any]:
    """Make the configuration of one run, as a user would write it."""
    activations: dict[str, Any] = {"method": method}
    if method in Activations.QUANTIZED:
        activations |= {"forward_bits": settings.forward_bits, "backward_bits": settings.backward_bits}
    section: dict[str, Any] = {"activations": activations, "seed": settings.seed, "tie": False}
    if method == "aqsgd":
        section["store"] = {"backend": "lmdb", "path": str(store)}
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.01}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": max(2, steps // 20), "total_num_steps": steps, "warmup_max_lr": lr},
        },
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "pipecomp": section,
    }


def train_rank(
    rank: int, world: int, note: Callable[[Any], None], settings: Settings, task: Task
) -> list[dict[str, Any]]:
    """Pre-train on every rank, then fine-tune from there with each method in turn."""
    from pipecomp.engine.initialize import initialize

    out = Path(settings.out)
    folder = out / "pretrained"
    model = gpt2(
        task.vocabulary, settings.length, layers=settings.layers, width=settings.width, heads=4, seed=settings.seed
    )
    steps = settings.pretraining // (MICRO_BATCH * MICRO_BATCHES)
    config = ds_config(settings, "none", out, steps=steps, lr=settings.pretraining_lr)
    engine = initialize(model, num_stages=world, config=config, training_data=Sequences(task.pretraining))
    _train(engine, steps, "pre-training", note if rank == 0 else None)
    engine.save_pretrained(str(folder))
    engine.close()
    return [_fine_tune(rank, world, note, settings, task, folder, method) for method in settings.methods]


def _train(
    engine: Any, steps: int, what: str, note: Callable[[Any], None] | None, recorder: Recorder | None = None
) -> list[float]:
    losses: list[float] = []
    for step in range(steps):
        began = time.perf_counter()
        losses.append(float(engine.train_batch()))
        if recorder is not None:
            spent = time.perf_counter() - began
            recorder.step(engine.global_steps, engine.gather_comm_stats(), loss=losses[-1], step_s=spent)
        if note is not None:
            note((what, step + 1, steps, losses[-1]))
    return losses


def _fine_tune(
    rank: int, world: int, note: Callable[[Any], None], settings: Settings, task: Task, folder: Path, method: str
) -> dict[str, Any]:
    from pipecomp.data import eval_batches
    from pipecomp.engine.initialize import initialize

    per_epoch = settings.training // (MICRO_BATCH * MICRO_BATCHES)
    store = Path(settings.out) / "messages" / method
    shutil.rmtree(store / f"rank-{rank}", ignore_errors=True)  # of an earlier demo
    config = ds_config(settings, method, store, steps=settings.epochs * per_epoch, lr=settings.lr)
    engine = initialize(str(folder), num_stages=world, config=config, training_data=Sequences(task.training))
    report = note if rank == 0 else None
    recorder = Recorder(Path(settings.out) / method if rank == 0 else None)
    recorder.start(settings.epochs * per_epoch, kind="demo", name=NAMES[method], **engine.describe())
    began = time.perf_counter()
    losses = _train(engine, per_epoch, f"{NAMES[method]}, first epoch", report, recorder)
    first_epoch = {k: link["forward"]["bytes_sent"] for k, link in engine.comm_stats()["links"].items()}
    losses += _train(engine, (settings.epochs - 1) * per_epoch, f"{NAMES[method]}, later epochs", report, recorder)
    seconds = time.perf_counter() - began
    held_out = eval_batches(Sequences(task.held_out), MICRO_BATCH)
    eval_loss = float(engine.eval_batch(iter(held_out), num_micro_batches=len(held_out)))
    recorder.evaluated(engine.global_steps, {"loss": eval_loss})
    recorder.end(engine.gather_comm_stats(), engine.gather_last_step())
    stats = engine.comm_stats()
    engine.close()
    stats["store_bytes"] = sum(file.stat().st_size for file in (store / f"rank-{rank}").rglob("data.mdb"))
    return {
        "method": method,
        "losses": losses,
        "eval_loss": eval_loss,
        "seconds": seconds,
        "stats": stats,
        "first_epoch": first_epoch,
    }


def _summary(settings: Settings, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One method's line of the table, from what its ranks measured."""
    first = ranks[0]
    plain = {"none": 32, "fp16": 16, "bf16": 16}
    per_epoch = settings.training // (MICRO_BATCH * MICRO_BATCHES)
    # Both ends count a link alike; take link k from rank k, which sends its activations.
    names = [f"{k}->{k + 1}" for k in range(len(ranks) - 1)]
    links = [r["stats"]["links"][name] for r, name in zip(ranks, names, strict=False)]
    first_epoch = [r["first_epoch"][name] for r, name in zip(ranks, names, strict=False)]
    forward_raw, forward_sent = total_bytes(links, "forward")
    backward_raw, backward_sent = total_bytes(links, "backward")
    later = [link["forward"]["bytes_sent"] - sent for link, sent in zip(links, first_epoch, strict=True)]
    micro_batches = first["stats"]["steps"] * MICRO_BATCHES
    step = Step(
        stages=[measured_costs(r["stats"], MICRO_BATCHES) for r in ranks],
        forward_bytes=[sent / (micro_batches * (1 - 1 / settings.epochs)) for sent in later],
        backward_bytes=[link["backward"]["bytes_sent"] / micro_batches for link in links],
        micro_batches=MICRO_BATCHES,
        together_s=measured_end([r["stats"] for r in ranks]),
    )
    return {
        "method": first["method"],
        "forward_bits": plain.get(first["method"], settings.forward_bits),
        "backward_bits": plain.get(first["method"], settings.backward_bits),
        "train_loss": sum(first["losses"][-per_epoch:]) / per_epoch,
        "eval_loss": first["eval_loss"],
        "forward_bytes_raw": forward_raw,
        "forward_bytes_sent": forward_sent,
        "forward_bytes_sent_after_first_epoch": sum(later),
        "backward_bytes_raw": backward_raw,
        "backward_bytes_sent": backward_sent,
        "store_bytes": sum(r["stats"]["store_bytes"] for r in ranks),
        "seconds": first["seconds"],
        "step_seconds_at": {name: play(step, uniform(len(ranks), rate)).seconds for name, rate in RATES.items()},
        "losses": first["losses"],
        "costs": asdict(step),
    }
