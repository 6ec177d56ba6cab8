"""Configuration of benchmarks that train, and their losses and bytes by epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.page import Row, share


def adamw(section: dict[str, Any], *, samples: tuple[int, int], lr: float, steps: tuple[int, int], **more: Any) -> Any:
    """A configuration as `pipecomp.initialize` takes it: AdamW, linear warm-up and decay, clipping at norm 1.

    Args:
        section: "pipecomp".
        samples: samples of a step and of a micro-batch.
        lr: the largest learning rate.
        steps: in all, and of warm-up.
        more: further parameters of the optimizer.
    """
    schedule = {"total_num_steps": steps[0], "warmup_num_steps": steps[1], "warmup_max_lr": lr}
    return {
        "train_batch_size": samples[0],
        "train_micro_batch_size_per_gpu": samples[1],
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.01, **more}},
        "scheduler": {"type": "WarmupDecayLR", "params": {**schedule, "warmup_type": "linear"}},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "pipecomp": section,
    }


def in_memory(activations: dict[str, Any], seed: int, **store: Any) -> dict[str, Any]:
    """The section "pipecomp" with these activations, and with a store in memory if they need one."""
    stores = {"store": {"backend": "memory", **store}} if activations["method"] == "aqsgd" else {}
    return {"seed": seed, "activations": activations, **stores}


def byte_counts(pipeline: Any) -> dict[str, int]:
    """Bytes of training over all links so far."""
    links = pipeline.comm_stats().values()
    ways = [(way, kind) for way in ("forward", "backward") for kind in ("bytes_raw", "bytes_sent")]
    return {f"{way}_{kind}": sum(link[way][kind] for link in links) for way, kind in ways}


def train_epochs(
    pipeline: Any,
    epochs: int,
    evaluate: Callable[[], Any] = lambda: None,
    each_step: Callable[[float], Any] = lambda loss: None,
) -> tuple[list[Any], Row]:
    """Train an `InProcessPipeline`; both ends of every link must hold the same messages then.

    Args:
        pipeline: what is trained.
        epochs: how often every sample is seen.
        evaluate: is called after each epoch.
        each_step: is told each step's loss.

    Returns:
        What `evaluate` returned after each epoch, and the part of a row that every such run has: a digest of the first
        weights, mean losses of the epochs, bytes over all links in all and after the first epoch, bytes of the stores.
    """
    losses, evaluations, counts = [], [], []
    for _ in range(epochs):
        epoch = []
        for _ in range(pipeline.steps_per_epoch):
            epoch.append(float(pipeline.train_batch()))
            each_step(epoch[-1])
        losses.append(sum(epoch) / len(epoch))
        evaluations.append(evaluate())
        counts.append(byte_counts(pipeline))
    if not pipeline.same_messages():
        raise AssertionError("the two ends of a link hold different messages")
    later = {f"{key}_after_first_epoch": total - counts[0][key] for key, total in counts[-1].items()}
    return evaluations, {
        "weights": pipeline.weights,
        "train_loss": losses[-1],
        "train_losses": losses,
        **counts[-1],
        **later,
        "store_bytes": pipeline.store_bytes(),
    }


def byte_columns() -> Any:
    """The tables' columns with the bytes of `train_epochs`, for groups of rows that all sent as much."""
    columns = {
        "forward sent": "forward_bytes_{}",
        "after epoch 1": "forward_bytes_{}_after_first_epoch",
        "backward sent": "backward_bytes_{}",
    }
    return {heading: lambda group, key=key: sent(group[0], key) for heading, key in columns.items()}


def sent(row: Row, key: str) -> str:
    """The bytes sent as a share of the values' bytes; key: of a row, with {} for "sent" and "raw"."""
    return share(row[key.format("sent")], row[key.format("raw")])


def in_order(rows: Iterable[Row], order: Iterable[str], *keys: str) -> list[Row]:
    """The rows of known methods, sorted by `keys`: methods as in `order`, "-key" from the largest on."""
    place = {name: number for number, name in enumerate(order)}

    def rank(row: Row, key: str) -> Any:
        return place[row[key]] if key == "method" else -row[key[1:]] if key.startswith("-") else row[key]

    known = [row for row in rows if row["method"] in place]
    return sorted(known, key=lambda row: [rank(row, key) for key in keys])
