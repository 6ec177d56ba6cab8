"""Does training converge with compressed links as it does without? Fine-tune a pre-trained GPT-2 and print the table.

    python benchmarks/convergence.py [--seeds 3] [--stages 4 2] [--only NAME ...] [--workers 2]
                                     [--data FOLDER] [--cache FOLDER] [--out FOLDER]

All stages of a run are in one process on one thread (see inprocess.py); runs are shared out among worker processes.
Finished runs are kept in --out, so that a benchmark that was stopped continues. Writes convergence.md
beside them.
"""

from __future__ import annotations

import argparse
import functools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs import chosen, digest, finished, parser, work_off

EPOCHS, BATCH, MICRO_BATCH = 6, 16, 8
LEARNING_RATE, WARM_UP = 5e-4, 24
BITS = ((2, 4), (3, 6), (4, 8))


@dataclass(frozen=True)
class Method:
    """One line of the table: sections of the configuration, and where it is run."""

    name: str
    activations: dict[str, Any]
    store: dict[str, Any] = field(default_factory=dict)
    bf16: bool = False
    main: bool = False
    every_k: bool = False


def methods() -> list[Method]:
    """All lines, the most important first."""
    lines = [Method("FP32", {"method": "none"}, main=True)]
    for forward, backward in BITS:
        for label, method in (("DirectQ", "direct"), ("AQ-SGD", "aqsgd")):
            name = f"{label} fw{forward} bw{backward}"
            lines.append(Method(name, _quantized(method, forward, backward), main=True, every_k=True))
    for name, forward, extra, bits in (
        ("first visit 8 bits, m8", 4, {"first_visit": 8}, 8),
        ("m8", 4, {}, 8),
        ("first visit 8 bits", 4, {"first_visit": 8}, 32),
        ("m8", 2, {}, 8),
        ("first visit 8 bits", 2, {"first_visit": 8}, 32),
        ("m2", 2, {}, 2),
        ("first visit 4 bits", 2, {"first_visit": 4}, 32),
        ("rms scale", 2, {"scale": "rms"}, 32),
        ("groups of 64", 2, {"group_size": 64}, 32),
        ("stochastic", 2, {"rounding": "stochastic"}, 32),
        ("bw8[0.2]", 2, {"backward_bits": 8, "backward_top_k": 0.2}, 32),
        ("bw8[0.2]", 4, {"backward_top_k": 0.2}, 32),
        ("m2", 4, {}, 2),
    ):
        backward = 2 * forward
        base = f"AQ-SGD fw{forward}" if "backward_top_k" in extra else f"AQ-SGD fw{forward} bw{backward},"
        activations = {**_quantized("aqsgd", forward, backward), **extra}
        store = {} if bits == 32 else {"bits": bits}
        lines.append(Method(f"{base} {name}", activations, store, every_k="backward_top_k" in extra))
    lines.append(Method("BF16", {"method": "none"}, bf16=True))
    lines.append(Method("BF16, AQ-SGD fw4 bw8", _quantized("aqsgd", 4, 8), bf16=True))
    return lines


def _quantized(method: str, forward: int, backward: int) -> dict[str, Any]:
    return {"method": method, "forward_bits": forward, "backward_bits": backward}


def ds_config(method: Method, seed: int, steps: int, warm_up: int = WARM_UP) -> dict[str, Any]:
    """The configuration, as `pipecomp.initialize` would take it."""
    section: dict[str, Any] = {"seed": seed, "activations": method.activations}
    if method.activations["method"] == "aqsgd":
        section["store"] = {"backend": "memory", **method.store}
    half = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}}
    schedule = {"total_num_steps": steps, "warmup_num_steps": warm_up, "warmup_max_lr": LEARNING_RATE}
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupDecayLR", "params": {**schedule, "warmup_type": "linear"}},
        "gradient_clipping": 1.0,
        "pipecomp": section,
        **(half if method.bf16 else {}),
    }


def train(name: str, stages: int, seed: int, data: Path, cache: Path) -> dict[str, Any]:
    """One run of a method of the table; plain values."""
    method = next(m for m in methods() if m.name == name)
    return fine_tune(method, stages, seed, EPOCHS, data, cache)


def fine_tune(method: Method, stages: int, seed: int, epochs: int, data: Path, cache: Path) -> dict[str, Any]:
    """One run; plain values. Loads what it needs, so that it can be a process of its own."""
    import torch

    torch.set_num_threads(1)
    from inprocess import InProcessPipeline
    from wikitext import pretrained_model, wikitext_task

    from pipecomp.bench.bf16 import products_in_float32
    from pipecomp.data import eval_batches
    from pipecomp.demo.task import Sequences

    task = wikitext_task(data, cache)
    model, report = pretrained_model(task, cache, seed)
    training, held_out = Sequences(task.training.tolist()), eval_batches(Sequences(task.held_out.tolist()), 16)
    steps = epochs * (len(training) // BATCH)
    config = ds_config(method, seed, steps, WARM_UP * epochs // EPOCHS)
    pipeline = InProcessPipeline(model, stages, config, training)
    began = time.process_time()
    losses_of: list[float] = []
    evaluations: list[float] = []
    first_epoch: dict[str, int] = {}
    with products_in_float32(method.bf16):
        before = float(pipeline.eval_batch(held_out))
        for _ in range(epochs):
            losses = [float(pipeline.train_batch()) for _ in range(pipeline.steps_per_epoch)]
            losses_of.append(sum(losses) / len(losses))
            evaluations.append(float(pipeline.eval_batch(held_out)))
            first_epoch = first_epoch or _bytes(pipeline)
    if not pipeline.same_messages():
        raise AssertionError("the two ends of a link hold different messages")
    total = _bytes(pipeline)
    return {
        "method": method.name,
        "stages": stages,
        "seed": seed,
        "train_loss": losses_of[-1],
        "eval_loss": evaluations[-1],
        "eval_loss_before": before,
        "train_losses": losses_of,
        "eval_losses": evaluations,
        **total,
        "forward_bytes_raw_after_first_epoch": total["forward_bytes_raw"] - first_epoch["forward_bytes_raw"],
        "forward_bytes_sent_after_first_epoch": total["forward_bytes_sent"] - first_epoch["forward_bytes_sent"],
        "store_bytes": pipeline.store_bytes(),
        "cpu_seconds": time.process_time() - began,
        **report,
    }


def _bytes(pipeline: Any) -> dict[str, int]:
    """Bytes of training over all links so far."""
    links = pipeline.comm_stats().values()
    return {
        f"{way}_{kind}": sum(link[way][kind] for link in links)
        for way in ("forward", "backward")
        for kind in ("bytes_raw", "bytes_sent")
    }


def setup_digest() -> str:
    """What runs must have in common to stand in one table."""
    from wikitext import HELD_OUT, LENGTH, PRETRAINING, TRAINING, VOCABULARY

    values = [EPOCHS, BATCH, MICRO_BATCH, LEARNING_RATE, WARM_UP, HELD_OUT, LENGTH, PRETRAINING, TRAINING, VOCABULARY]
    return digest(values)


def jobs(stages: list[int], seeds: int, only: list[str]) -> list[tuple[str, int, int]]:
    """(method, K, seed) in the order in which they are worth having."""
    lines = methods()
    names = chosen([m.name for m in lines], only)
    lines = [m for m in lines if m.name in names]
    main = [m for m in lines if m.main]
    first = [(m.name, stages[0], seed) for seed in range(seeds) for m in main]
    rest = [(m, stages[0]) for m in lines if m not in main and not m.bf16]
    rest += [(m, k) for k in stages[1:] for m in lines if m.every_k]  # FP32 is the same, bit for bit, for every K
    rest += [(m, stages[0]) for m in lines if m.bf16]
    return first + [(m.name, k, seed) for seed in range(seeds) for m, k in rest]


def main() -> None:
    """See the top of the file."""
    from convergence_report import write_report

    arguments = _arguments()
    setup, kept = setup_digest(), arguments.out / "convergence.jsonl"
    arguments.cache.mkdir(parents=True, exist_ok=True)
    runs = finished(kept, setup)
    done = {(run["method"], run["stages"], run["seed"]) for run in runs}
    todo = [job for job in jobs(arguments.stages, arguments.seeds, arguments.only) if job not in done]
    report = functools.partial(write_report, arguments.out, order=[m.name for m in methods()])
    work_off(
        train,
        todo,
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
        f"{run['method']:<40} K={run['stages']} seed {run['seed']}  train {run['train_loss']:.4f}  "
        f"held out {run['eval_loss']:.4f}  {run['cpu_seconds']:.0f} s"
    )


def _arguments() -> argparse.Namespace:
    options = parser(__doc__, "--seeds", "--only", "--workers", "--data", "--cache")
    add = options.add_argument
    add("--stages", type=int, nargs="+", default=[4, 2], help="K; variants are run for the first only (4 2)")
    return options.parse_args()


if __name__ == "__main__":
    main()
