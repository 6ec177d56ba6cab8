"""How long until the loss of FP32 is reached over a slow link? Whole trainings, first epoch included.

    python benchmarks/time_to_loss.py [--r 5.8] [--epochs 3 10] [--only NAME ...]
                                      [--data FOLDER] [--cache FOLDER] [--out FOLDER]

A GPT-2 that was pre-trained on WikiText-2's training text is fine-tuned on articles of its validation text over two
stages in two network namespaces (root needed), one thread each. The link's rate is such that the float32 messages of a
micro-batch, both ways, take r times what a stage computes on it, measured first without a limit. Finished runs are kept
in --out. Writes time_to_loss.md and .png.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs import chosen, digest, finished, parser, work_off

STAGES, BATCH, MICRO_BATCH = 2, 16, 1
TRAINING, LENGTH, WIDTH = 256, 128, 256
LEARNING_RATE = 3e-4
BITS = {"forward_bits": 3, "backward_bits": 6}
METHODS: dict[str, dict[str, Any] | None] = {
    "DeepSpeed FP32": None,
    "FP32": {},
    "DirectQ fw3 bw6": {"activations": {"method": "direct", **BITS}},
    "AQ-SGD fw3 bw6, full first visit": {"activations": {"method": "aqsgd", **BITS}},
    "AQ-SGD fw3 bw6, 8-bit first visit": {"activations": {"method": "aqsgd", **BITS, "first_visit": 8}},
    "AQ-SGD fw3 bw6, 4-bit first visit": {
        "activations": {"method": "aqsgd", **BITS, "first_visit": 4, "rotation": True}
    },
}


def train(name: str, epochs: int, rate: int | None, data: Path, cache: Path, steps: int | None = None) -> dict:
    """One training in a lab; rate in bit/s. `steps`: only so many."""
    import time_to_loss as this  # the nodes import it by name

    from pipecomp.netlab import Lab

    with Lab(nodes=STAGES, bandwidth=None if rate is None else f"{rate}bit") as lab:
        with tempfile.TemporaryDirectory() as store:
            ranks = lab.run(this.one_rank, name, epochs, steps, str(data), str(cache), store, timeout_s=7200)
        sent = sum(node.sent for node in lab.bytes())
    compute = [rank["compute_s"] for rank in ranks.values() if rank["compute_s"]]
    return {
        "method": name,
        "epochs": epochs,
        "rate": rate,
        "bytes": sent,
        "losses": ranks[0]["losses"],
        "seconds": ranks[0]["seconds"],
        "compute_s": sum(compute) / len(compute) if compute else None,
    }


def one_rank(
    rank: int, world: int, note: Any, name: str, epochs: int, stop: int | None, data: str, cache: str, store: str
) -> dict[str, Any]:
    """Losses and, for each step, the seconds since the first one began."""
    import torch

    torch.set_num_threads(1)
    engine = _engine(name, epochs, Path(data), Path(cache), store)
    losses, seconds = [], []
    began = time.perf_counter()
    for _ in range(stop or epochs * (TRAINING // BATCH)):
        losses.append(float(engine.train_batch()))
        seconds.append(time.perf_counter() - began)
    compute = None
    if hasattr(engine, "comm_stats"):
        spent = engine.comm_stats()["seconds"]
        compute = (spent["forward"] + spent["backward"]) / (len(losses) * (BATCH // MICRO_BATCH))
        engine.close()
    return {"losses": losses, "seconds": seconds, "compute_s": compute}


def _engine(name: str, epochs: int, data: Path, cache: Path, store: str) -> Any:
    import torch
    from wikitext import pretrained_model, wikitext_task

    task = wikitext_task(data, cache, length=LENGTH, training=TRAINING)
    model, _ = pretrained_model(task, cache, 0, width=WIDTH)
    model.config.tie_word_embeddings = False  # stock DeepSpeed splits it without the tie
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    steps = epochs * (TRAINING // BATCH)
    schedule = {"total_num_steps": steps, "warmup_num_steps": steps // 8, "warmup_max_lr": LEARNING_RATE}
    config: dict[str, Any] = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {**schedule, "warmup_type": "linear"}},
        "steps_per_print": 10**9,
    }
    section = METHODS[name]
    if section is None:
        from pipecomp.bench.stock_deepspeed import stock_engine

        engine = stock_engine(model, STAGES, config)
        batches = _batches(task.training)
        one_batch = engine.train_batch
        engine.train_batch = lambda: one_batch(batches)
        return engine
    import pipecomp
    from pipecomp.demo.task import Sequences

    if section.get("activations", {}).get("method") == "aqsgd":
        section = {**section, "store": {"path": store}}
    rows = Sequences(task.training.tolist())
    return pipecomp.initialize(
        model, num_stages=STAGES, config={**config, "pipecomp": {"tie": False, **section}}, training_data=rows
    )


def _batches(training: Any) -> Iterator[tuple[Any, Any]]:
    """The product's order of samples, for stock DeepSpeed."""
    import torch

    from pipecomp.data import ShardedSampler

    sampler, number = ShardedSampler(TRAINING, MICRO_BATCH), 0
    while True:
        x = torch.stack([training[i] for i in sampler.batch(number)])
        number += 1
        yield x, x


def link_rate(r: float, data: Path, cache: Path) -> int:
    """bit/s at which the messages of a micro-batch take r times a stage's compute."""
    compute = train("FP32", 3, None, data, cache, steps=6)["compute_s"]
    return int(8 * 2 * 4 * MICRO_BATCH * LENGTH * WIDTH / (r * compute))


def main() -> None:
    """See the top of the file."""
    from time_to_loss_report import write_report
    from wikitext import PRETRAINING, VOCABULARY

    arguments = _arguments()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    kept = arguments.out / "time_to_loss.jsonl"
    setup = digest([BATCH, MICRO_BATCH, TRAINING, LENGTH, WIDTH, LEARNING_RATE, PRETRAINING, VOCABULARY, arguments.r])
    runs = finished(kept, setup)
    done = {(run["method"], run["epochs"]) for run in runs}
    rate = runs[0]["rate"] if runs else link_rate(arguments.r, arguments.data, arguments.cache)
    names = chosen(METHODS, arguments.only)
    todo = [(m, epochs, rate) for epochs in arguments.epochs for m in names if (m, epochs) not in done]
    work_off(
        train,
        todo,
        (arguments.data, arguments.cache),
        runs,
        workers=1,
        kept=kept,
        setup=setup,
        line=_line,
        report=lambda found: write_report(arguments.out, found, arguments.r, list(METHODS)),
    )


def _line(run: dict[str, Any]) -> str:
    return f"{run['epochs']:>2} epochs  {run['method']:<36} {run['seconds'][-1]:.0f} s  loss {run['losses'][-1]:.4f}"


def _arguments() -> argparse.Namespace:
    options = parser(__doc__, "--only", "--data", "--cache")
    add = options.add_argument
    add("--r", type=float, default=5.8, help="the link: float32 transfer over compute of a micro-batch (5.8)")
    add("--epochs", type=int, nargs="+", default=[3, 10], metavar="N", help="lengths of training (3 10)")
    return options.parse_args()


if __name__ == "__main__":
    main()
