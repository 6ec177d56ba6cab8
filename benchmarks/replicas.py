"""Two stages with two replicas each, everything compressed: does the loss stay FP32's, and is every byte counted?

    python benchmarks/replicas.py [--seeds 3] [--epochs 6] [--only NAME ...]
                                  [--data FOLDER] [--cache FOLDER] [--out FOLDER]

Fine-tunes convergence.py's pre-trained GPT-2 with its settings over four processes, each in a network namespace of its
own (root needed), whose interfaces count what really travels. Finished runs are kept in --out. Writes replicas.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from convergence import BATCH, LEARNING_RATE, WARM_UP, setup_digest
from jobs import chosen, finished, parser, work_off

STAGES, REPLICAS, FREEZE_STEP = 2, 2, 40
HEADINGS = (
    *("method", "seeds", "training loss", "above FP32", "held-out loss"),
    *("forward", "backward", "gradients", "less", "interfaces"),
)
AQSGD = {"method": "aqsgd", "forward_bits": 3, "backward_bits": 6}
METHODS: dict[str, dict[str, Any]] = {
    "FP32": {},
    "AQ-SGD fw3 bw6, double_squeeze 4 bits": {
        "activations": AQSGD,
        "gradients": {"method": "double_squeeze", "bits": 4},
    },
    "AQ-SGD fw3 bw6, quantized_adam 4 bits": {
        "activations": AQSGD,
        "gradients": {"method": "quantized_adam", "bits": 4, "freeze_step": FREEZE_STEP},
    },
}


def train(name: str, seed: int, epochs: int, data: Path, cache: Path) -> dict[str, Any]:
    """One run over four nodes; plain values."""
    import replicas as this  # the nodes import it by name

    from pipecomp.netlab import Lab

    with Lab(nodes=STAGES * REPLICAS) as lab, tempfile.TemporaryDirectory() as store:
        counted: list[int] = []  # before the first step and after the last
        ranks = lab.run(
            this.one_rank,
            name,
            seed,
            epochs,
            str(data),
            str(cache),
            store,
            timeout_s=3000,
            on_note=lambda rank, value: counted.append(sum(node.sent for node in lab.bytes())),
        )
    links = [(rank, link) for rank in ranks.values() for link in rank["links"].values()]
    # both ends of a link count the same messages: take each direction's sender
    sent = {"forward": 0, "backward": 0}
    raw = dict(sent)
    for rank, link in links:
        way = "forward" if rank["stage"] == 0 else "backward"
        sent[way] += link[way]["bytes_sent"]
        raw[way] += link[way]["bytes_raw"]
    groups = [group for rank in ranks.values() for group in rank["groups"].values()]
    return {
        "method": name,
        "seed": seed,
        "epochs": epochs,
        "train_loss": ranks[0]["train_loss"],
        "eval_loss": ranks[0]["eval_loss"],
        "sent": {**sent, "gradients": sum(g["bytes_sent"] for g in groups)},
        "raw": {**raw, "gradients": sum(g["bytes_raw"] for g in groups)},
        "interfaces": counted[1] - counted[0],
    }


def one_rank(
    rank: int, world: int, note: Any, name: str, seed: int, epochs: int, data: str, cache: str, store: str
) -> dict[str, Any]:
    """Train one stage of one replica."""
    import torch
    from wikitext import pretrained_model, wikitext_task

    import pipecomp
    from pipecomp.data import eval_batches
    from pipecomp.demo.task import Sequences

    torch.set_num_threads(1)
    task = wikitext_task(Path(data), Path(cache))
    model, _ = pretrained_model(task, Path(cache), seed)
    section: dict[str, Any] = {"seed": seed, **METHODS[name]}
    if "activations" in section:
        section["store"] = {"path": store}
    steps = epochs * (len(task.training) // BATCH)
    schedule = {"total_num_steps": steps, "warmup_num_steps": WARM_UP, "warmup_max_lr": LEARNING_RATE}
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // REPLICAS // 2,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {**schedule, "warmup_type": "linear"}},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "pipecomp": section,
    }
    engine = pipecomp.initialize(
        model, num_stages=STAGES, config=config, training_data=Sequences(task.training.tolist())
    )
    _between_steps(rank, note)
    losses = [float(engine.train_batch()) for _ in range(steps)]
    _between_steps(rank, note)
    stats = engine.comm_stats()
    held_out = eval_batches(Sequences(task.held_out.tolist()), BATCH // REPLICAS // 2)
    eval_loss = float(engine.eval_batch(iter(held_out), num_micro_batches=len(held_out)))
    engine.close()
    last = losses[-(steps // epochs) :]
    return {
        "train_loss": sum(last) / len(last),
        "eval_loss": eval_loss,
        **{key: stats[key] for key in ("stage", "links", "groups")},
    }


def _between_steps(rank: int, note: Any) -> None:
    """Have the interfaces read while nobody sends."""
    import torch.distributed as dist

    dist.barrier()
    if rank == 0:
        note("read")
        time.sleep(1)
    dist.barrier()


def write_report(folder: Path, runs: list[dict[str, Any]]) -> None:
    """Write replicas.md."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    order = list(METHODS)
    runs = sorted(runs, key=lambda run: (order.index(run["method"]), run["seed"]))
    exact = {run["seed"]: run["train_loss"] for run in runs if run["method"] == "FP32"}
    lines = [
        "# Two stages, two replicas, everything compressed",
        "",
        f"`python benchmarks/replicas.py`, on {os.cpu_count()} cores ({platform.machine()}, no GPU), torch "
        f"{torch.__version__}.",
        "",
        "The pre-trained GPT-2 of [convergence.md](convergence.md) and its settings, over 2 stages × 2 replicas in "
        "four network namespaces; embeddings are tied across the stages. Training loss: mean over the last epoch, ± "
        "over seeds; above FP32: mean of the differences with the same seed. Sent: all ranks' bytes by the engine's "
        "count, in MB, and how many times less than float32's; interfaces: what the kernel counted on the nodes' "
        "interfaces meanwhile, so with TCP's headers and acknowledgements. quantized_adam sends float32 gradients "
        "for its first "
        f"{FREEZE_STEP} steps.",
        "",
        f"| {' | '.join(HEADINGS)} |",
        "|" + "---|" * len(HEADINGS),
    ]
    for method in order:
        group = [run for run in runs if run["method"] == method]
        if not group:
            continue
        above = [(run["train_loss"] / exact[run["seed"]] - 1) * 100 for run in group if run["seed"] in exact]
        share = "–" if method == "FP32" or not above else f"{statistics.mean(above):+.2f} %"
        one = group[0]
        ways = [f"{one['sent'][way] / 1e6:.1f}" for way in ("forward", "backward", "gradients")]
        less = sum(one["raw"].values()) / sum(one["sent"].values())
        cells = [
            method,
            str(len(group)),
            _spread([r["train_loss"] for r in group]),
            share,
            _spread([r["eval_loss"] for r in group]),
            *ways,
            f"{less:.2f}×",
            f"{one['interfaces'] / 1e6:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    (folder / "replicas.md").write_text("\n".join(lines) + "\n")


def _spread(values: list[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{deviation}"


def main() -> None:
    """See the top of the file."""
    arguments = _arguments()
    kept, setup = arguments.out / "replicas.jsonl", setup_digest()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    runs = [run for run in finished(kept, setup) if run["epochs"] == arguments.epochs]
    done = {(run["method"], run["seed"]) for run in runs}
    names = chosen(METHODS, arguments.only)
    todo = [(m, s, arguments.epochs) for s in range(arguments.seeds) for m in names if (m, s) not in done]
    work_off(
        train,
        todo,
        (arguments.data, arguments.cache),
        runs,
        workers=1,
        kept=kept,
        setup=setup,
        line=_line,
        report=lambda found: write_report(arguments.out, found),
    )


def _line(run: dict[str, Any]) -> str:
    return f"{run['method']:<40} seed {run['seed']}  train {run['train_loss']:.4f}  held out {run['eval_loss']:.4f}"


def _arguments() -> argparse.Namespace:
    options = parser(__doc__, "--seeds", "--only", "--data", "--cache")
    options.add_argument("--epochs", type=int, default=6, help="passes over the training data (6)")
    return options.parse_args()


if __name__ == "__main__":
    main()
