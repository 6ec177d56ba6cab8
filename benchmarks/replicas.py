"""Train two stages with tied embeddings, of one replica or two, everything compressed, beside FP32.

    python -m benchmarks replicas [--seeds 3] [--epochs 6] [--only NAME ...]
                                  [--data FOLDER] [--cache FOLDER] [--out FOLDER] [--redraw]

Fine-tunes convergence.py's pre-trained GPT-2 with its settings over processes that each have a network namespace of
their own (root needed), whose interfaces count what really travels. With one replica the gradients that travel are
those of the embedding alone, which both stages hold.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.convergence import BATCH, LEARNING_RATE, SETUP, WARM_UP
from benchmarks.page import Row, prose, spread, values
from benchmarks.runner import Runs, arguments, chosen, weights_digest
from benchmarks.training import adamw, in_order

STAGES, FREEZE_STEP = 2, 40
ALONE = "one replica, "
AQSGD = {"method": "aqsgd", "forward_bits": 3, "backward_bits": 6}
DIRECT = AQSGD | {"method": "direct"}
QUANTIZED_ADAM = {"method": "quantized_adam", "bits": 4, "freeze_step": FREEZE_STEP}
SQUEEZED = {"method": "double_squeeze", "bits": 4}
METHODS: dict[str, dict[str, Any]] = {
    f"{ALONE}FP32": {},
    f"{ALONE}AQ-SGD fw3 bw6": {"activations": AQSGD},
    f"{ALONE}AQ-SGD fw3 bw6, global_qsgd 8 bits": {
        "activations": AQSGD,
        "gradients": {"method": "global_qsgd", "bits": 8},
    },
    f"{ALONE}AQ-SGD fw3 bw6, double_squeeze 4 bits": {"activations": AQSGD, "gradients": SQUEEZED},
    f"{ALONE}AQ-SGD fw3 bw6, double_squeeze 8 bits": {"activations": AQSGD, "gradients": SQUEEZED | {"bits": 8}},
    f"{ALONE}FP32, untied": {"tie": False},
    f"{ALONE}AQ-SGD fw3 bw6, untied": {"activations": AQSGD, "tie": False},
    "FP32": {},
    "AQ-SGD fw3 bw6": {"activations": AQSGD},
    "FP32, quantized_adam 4 bits": {"gradients": QUANTIZED_ADAM},
    "DirectQ fw3 bw6, quantized_adam 4 bits": {"activations": DIRECT, "gradients": QUANTIZED_ADAM},
    "DirectQ fw3 bw6 with channel scales, quantized_adam 4 bits": {
        "activations": DIRECT | {"scale": "channels"},
        "gradients": QUANTIZED_ADAM,
    },
    "AQ-SGD fw3 bw6, double_squeeze 4 bits": {"activations": AQSGD, "gradients": SQUEEZED},
    "AQ-SGD fw3 bw6, quantized_adam 4 bits": {"activations": AQSGD, "gradients": QUANTIZED_ADAM},
}


def replicas_of(name: str) -> int:
    """Return the number of pipelines in a method's run."""
    return 1 if name.startswith(ALONE) else 2


def exact_of(name: str) -> str:
    """Return the method that a method is compared with."""
    return f"{ALONE}FP32" if replicas_of(name) == 1 else "FP32"


def train(name: str, seed: int, epochs: int, data: Path, cache: Path) -> Row:
    """One run, each of its processes on a node."""
    from pipecomp.netlab import Lab

    counted: list[int] = []  # before the first step and after the last
    with Lab(nodes=STAGES * replicas_of(name)) as lab, tempfile.TemporaryDirectory() as store:

        def count(rank: int, note: str) -> None:
            counted.append(sum(node.sent for node in lab.bytes()))

        options = (name, seed, epochs, str(data), str(cache), store)
        ranks = lab.run(one_rank, *options, timeout_s=3000, on_note=count)
    links = [(rank["stage"], link) for rank in ranks.values() for link in rank["links"].values()]
    groups = [group for rank in ranks.values() for group in rank["groups"].values()]

    def total(kind: str) -> dict[str, int]:
        # both ends of a link count the same packets: take each direction's sender
        totals = {"forward": 0, "backward": 0, "gradients": sum(group[kind] for group in groups)}
        for stage, link in links:
            way = "forward" if stage == 0 else "backward"
            totals[way] += link[way][kind]
        return totals

    return {
        "method": name,
        "seed": seed,
        "epochs": epochs,
        "weights": ranks[0]["weights"],
        "train_loss": ranks[0]["train_loss"],
        "eval_loss": ranks[0]["eval_loss"],
        "sent": total("bytes_sent"),
        "raw": total("bytes_raw"),
        "interfaces": counted[1] - counted[0],
    }


def one_rank(
    rank: int, world: int, note: Any, name: str, seed: int, epochs: int, data: str, cache: str, store: str
) -> dict[str, Any]:
    """Train one stage of one replica."""
    import torch

    import pipecomp
    from benchmarks.wikitext import pretrained_model, wikitext_task
    from pipecomp.data import eval_batches
    from pipecomp.demo.task import Sequences

    torch.set_num_threads(1)
    task = wikitext_task(Path(data), Path(cache))
    model, _ = pretrained_model(task, Path(cache), seed)
    weights = weights_digest(model)
    section: dict[str, Any] = {"seed": seed, **METHODS[name]}
    if "activations" in section:
        section["store"] = {"path": store}
    steps, micro_batch = epochs * (len(task.training) // BATCH), BATCH // replicas_of(name) // 2
    config = adamw(section, samples=(BATCH, micro_batch), lr=LEARNING_RATE, steps=(steps, WARM_UP), torch_adam=True)
    rows = Sequences(task.training.tolist())
    engine = pipecomp.initialize(model, num_stages=STAGES, config=config, training_data=rows)
    _between_steps(rank, note)
    losses = [float(engine.train_batch()) for _ in range(steps)]
    _between_steps(rank, note)
    stats = engine.comm_stats()
    held_out = eval_batches(Sequences(task.held_out.tolist()), micro_batch)
    eval_loss = float(engine.eval_batch(iter(held_out), num_micro_batches=len(held_out)))
    engine.close()
    counters = {key: stats[key] for key in ("stage", "links", "groups")}
    mean = statistics.fmean(losses[-(steps // epochs) :])
    return {"weights": weights, "train_loss": mean, "eval_loss": eval_loss, **counters}


def _between_steps(rank: int, note: Any) -> None:
    """Have the interfaces read while nobody sends."""
    import torch.distributed as dist

    dist.barrier()
    if rank == 0:
        note("read")
        time.sleep(1)
    dist.barrier()


def results(rows: list[Row]) -> list[str]:
    """The page."""
    text = f"""
        # Two stages, one or two replicas, everything compressed

        `python -m benchmarks replicas`, on {page.machine(rows)}.

        The pre-trained GPT-2 of [convergence.md](convergence.md) and its settings, over 2 stages × 2 replicas in four
        network namespaces, or over one pipeline in two; embeddings are tied across the stages, and with one replica
        only their gradient is sent. Training loss: mean over the last epoch, ± over seeds; above FP32: mean of the
        differences with the same seed and as many replicas. Sent: all ranks' bytes by the engine's count, in MB, and
        how many times less than float32's; interfaces: what the kernel counted on the nodes' interfaces meanwhile, so
        with TCP's headers and acknowledgements. quantized_adam sends float32 gradients for its first
        {FREEZE_STEP} steps.
    """
    losses = {(row["method"], row["seed"]): row["train_loss"] for row in rows}

    def above(group: list[Row]) -> str:
        pairs = [(row["train_loss"], losses.get((exact_of(row["method"]), row["seed"]))) for row in group]
        percentages = [100 * (loss / base - 1) for loss, base in pairs if base is not None]
        return (
            "–"
            if group[0]["method"] == exact_of(group[0]["method"]) or not percentages
            else f"{statistics.mean(percentages):+.2f} %"
        )

    def less(group: list[Row]) -> str:
        return f"{sum(group[0]['raw'].values()) / sum(group[0]['sent'].values()):.2f}×"

    ways = ("forward", "backward", "gradients")
    cells = {
        "method": lambda group: group[0]["method"],
        "seeds": len,
        "training loss": lambda group: spread(values(group, "train_loss")),
        "above FP32": above,
        "held-out loss": lambda group: spread(values(group, "eval_loss")),
        **{way: lambda group, way=way: f"{group[0]['sent'][way] / 1e6:.1f}" for way in ways},
        "less": less,
        "interfaces": lambda group: f"{group[0]['interfaces'] / 1e6:.1f}",
    }
    return [*prose(text), *page.columns(cells, page.grouped(in_order(rows, METHODS, "method", "seed"), "method"))]


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    epochs = (6, "passes over the training data")
    given = arguments(argv, __doc__, "seeds", "only", "data", "cache", epochs=epochs)
    keys, current = ("method", "seed", "epochs"), lambda row: row["epochs"] == given.epochs

    def exact(row: Row) -> Row:
        return {"method": exact_of(row["method"]), "seed": row["seed"], "epochs": row["epochs"]}

    Runs(given, "replicas", SETUP, keys, current=current, exact=exact).complete(
        train,
        [(name, seed, given.epochs) for seed in range(given.seeds) for name in chosen(METHODS, given.only)],
        given.data,
        given.cache,
        line=lambda row: f"train {row['train_loss']:.4f}  held out {row['eval_loss']:.4f}",
        page=results,
    )
