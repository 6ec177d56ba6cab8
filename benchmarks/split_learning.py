"""Split learning of a ResNet on CIFAR-10 with compressed links: accuracy, bytes, the gain of following crops.

    python -m benchmarks split_learning [--seeds 3] [--only NAME ...] [--workers 2] [--data FILE] [--cache FOLDER]
                                        [--out FOLDER] [--redraw]

Client, server and client are in one process on one thread (see inprocess.py): the network, the data, the order of the
clients, the links and the message stores are those of the recipe resnet_split. The network is trained on half of the
images first, as on public ones; the clients share the other half.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.page import Row, prose, share, spread, values
from benchmarks.runner import SHARED, Runs, arguments, beside, chosen, digest
from benchmarks.training import byte_counts, in_memory, in_order

CLIENTS, CONCENTRATION, LOCAL_EPOCHS, BATCH = 16, 0.5, 3, 64
ROUNDS, DECAY_ROUNDS = 8, 5
LEARNING_RATE, CROP = 0.003, 4
PUBLIC = {"images": 2000, "epochs": 10, "rate": 0.05}  # what the network is trained on before, centrally
WIRE = {"forward_bits": 2, "backward_bits": 8, "backward_top_k": 0.2}
AQSGD = "AQ-SGD fw2 bw8[0.2]"
METHODS: dict[str, dict[str, Any]] = {
    "FP32": {"activations": {"method": "none"}},
    "DirectQ fw2 bw8[0.2]": {"activations": {"method": "direct", **WIRE}},
    AQSGD: {"activations": {"method": "aqsgd", **WIRE}},
    f"{AQSGD}, messages do not follow crops and flips": {"activations": {"method": "aqsgd", **WIRE}, "matched": False},
    f"{AQSGD}, first visit 8 bits": {"activations": {"method": "aqsgd", "first_visit": 8, **WIRE}},
}
SETUP = digest(
    [CLIENTS, CONCENTRATION, LOCAL_EPOCHS, BATCH, ROUNDS, DECAY_ROUNDS, LEARNING_RATE, CROP, PUBLIC, METHODS]
)


def train(name: str, seed: int, data: Path, cache: Path) -> Row:
    """One run. Loads what it needs, so that it can be a process of its own."""
    import torch

    torch.set_num_threads(1)
    from benchmarks.inprocess import InProcessPipeline
    from pipecomp.data import eval_batches
    from pipecomp.recipes.images import ClientTurns, Views, read_images, shares
    from pipecomp.recipes.resnet import client_cuts
    from pipecomp.stages import modules

    began = time.process_time()
    matched = METHODS[name].get("matched", True)
    images, held_out = (read_images([str(data)], part=part) for part in ("train", "test"))
    views = Views(images, CROP, matched=matched)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    own = order[PUBLIC["images"] :]
    parts = [own[part] for part in shares(images.labels[own], CLIENTS, CONCENTRATION, seed)]
    turns = ClientTurns(views, parts, batch=BATCH, micro_batch=BATCH, epochs=LOCAL_EPOCHS, seed=seed)
    network = pretrained(images, order[: PUBLIC["images"]], cache, seed)
    pipeline = InProcessPipeline(
        modules(network, images.shape, margin=CROP if matched else 0),
        3,
        ds_config(name, seed),
        views,
        cuts=client_cuts(network),
        loss_fn=torch.nn.functional.cross_entropy,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.1 ** (step // (DECAY_ROUNDS * turns.per_round))
        ),
        sampler=turns,
    )

    def evaluate() -> dict[str, float]:
        outputs = pipeline.eval_batch(eval_batches(held_out, 100), on_logits=measure)
        return dict(zip(("eval_loss", "accuracy"), torch.stack(outputs).mean(0).tolist(), strict=True))

    start, rounds = evaluate(), []
    for _ in range(ROUNDS):
        before = counters(pipeline)
        losses = [float(pipeline.train_batch()) for _ in range(turns.per_round)]
        sent = {key: value - before[key] for key, value in counters(pipeline).items()}
        rounds.append({"train_loss": sum(losses) / len(losses), **evaluate(), **sent})
    if not pipeline.same_messages():
        raise AssertionError("the two ends of a link hold different cached activations")
    spent = {"store_bytes": pipeline.store_bytes(), "cpu_seconds": time.process_time() - began}
    return {"method": name, "seed": seed, "weights": pipeline.weights, "start": start, "rounds": rounds, **spent}


def pretrained(images: Any, public: Any, cache: Path, seed: int) -> Any:
    """The network that all methods start from, trained once per seed: plainly, on random views of the public images."""
    import torch

    from benchmarks.wikitext import one_at_a_time
    from pipecomp.recipes.images import Views
    from pipecomp.recipes.resnet import resnet

    file = cache / f"split-{seed}-{SETUP}.pt"
    with one_at_a_time(file):
        torch.manual_seed(seed)
        network = resnet("tiny", 10, norm="group")
        if file.exists():
            network.load_state_dict(torch.load(file, weights_only=True))
            return network
        views, draw = Views(images, CROP), torch.Generator().manual_seed(seed)
        steps = int(PUBLIC["epochs"]) * (len(public) // BATCH)
        optimizer = torch.optim.SGD(network.parameters(), PUBLIC["rate"], momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PUBLIC["rate"], total_steps=steps + 1)
        for step in range(steps):
            if step % (len(public) // BATCH) == 0:
                order = public[torch.randperm(len(public), generator=draw)]
            start = BATCH * (step % (len(public) // BATCH))
            shown = [views[index] for index in views.draw(order[start : start + BATCH], draw)]
            x, y = (torch.stack([sample[key] for sample in shown]) for key in ("pixel_values", "labels"))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()
            schedule.step()
        torch.save(network.state_dict(), file)
    return network


def measure(logits: Any, labels: Any) -> Any:
    """Loss and accuracy of one batch."""
    import torch

    loss = torch.nn.functional.cross_entropy(logits, labels)
    return torch.stack([loss, (logits.argmax(1) == labels).float().mean()])


def counters(pipeline: Any) -> dict[str, float]:
    """Bytes of training over both links so far, and the links' errors, added up."""
    row: dict[str, float] = {**byte_counts(pipeline)}
    for number, link in enumerate(pipeline.links):
        row |= {f"error_sum_{number}": link.stats.error_sum, f"error_count_{number}": link.stats.error_count}
    return row


def ds_config(name: str, seed: int) -> dict[str, Any]:
    """The configuration, as `pipecomp.initialize` would take it."""
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE, "momentum": 0.9}},
        "gradient_clipping": 0.0,
        "pipecomp": in_memory(METHODS[name]["activations"], seed),
    }


def results(rows: list[Row]) -> list[str]:
    """The page."""
    starts = [row["start"] for row in rows if row["method"] == rows[0]["method"]]
    text = f"""
        # Split learning with compressed links

        `python -m benchmarks split_learning`, on {page.machine(rows)}.

        The recipe `resnet_split` at CPU size: the network `tiny` with group norm, split after its first block and
        before its last. It is first trained in one place on {PUBLIC["images"]} CIFAR-10 images, to an accuracy of
        {spread(values(starts, "accuracy"), 3)} and a held-out loss of {spread(values(starts, "eval_loss"))}. {CLIENTS}
        clients in turn share 2000 others, by Dirichlet({CONCENTRATION}): {ROUNDS} rounds of {LOCAL_EPOCHS} local
        epochs, batches of {BATCH}, SGD with momentum 0.9 and a rate of {LEARNING_RATE}, a tenth of it after round
        {DECAY_ROUNDS}, random crops of ±{CROP} pixels and flips.

        Accuracy on 1,000 images, evaluated without compression. Training loss: mean over the last round. Bytes: of both
        links' packets, headers and scales included, as shares of the float32 values', in the last round; all rounds in
        brackets. Error: ‖a − m‖ / ‖a‖ on each link in the last round. ± is the standard deviation over seeds; above
        FP32 is the mean of the differences to FP32 with the same seed, and the smallest and the largest.
    """

    def last(group: list[Row]) -> list[Row]:
        return [{**row["rounds"][-1], "seed": row["seed"], "weights": row["weights"]} for row in group]

    exact = last([row for row in rows if row["method"] == "FP32"])

    def above(group: list[Row]) -> str:
        differences = page.above(last(group), exact, "train_loss")
        if not any(differences):  # FP32 itself, or no run of it yet
            return "–"
        return f"{statistics.mean(differences):+.4f} ({min(differences):+.4f} … {max(differences):+.4f})"

    def sent(group: list[Row], way: str) -> str:
        both = (last(group), [one for row in group for one in row["rounds"]])
        shares = [[sum(one[f"{way}_bytes_{kind}"] for one in some) for kind in ("sent", "raw")] for some in both]
        return f"{share(*shares[0])} ({share(*shares[1])})"

    def errors(group: list[Row]) -> str:
        counted = [one for one in last(group) if one["error_count_0"]]
        error_means = [
            statistics.mean(r[f"error_sum_{n}"] / r[f"error_count_{n}"] for r in counted) for n in (0, 1) if counted
        ]
        return ", ".join(f"{error:.3f}" for error in error_means) or "–"

    cells = {
        "method": lambda group: group[0]["method"],
        "seeds": len,
        "accuracy": lambda group: spread(values(last(group), "accuracy"), 3),
        "held-out loss": lambda group: spread(values(last(group), "eval_loss")),
        "training loss": lambda group: spread(values(last(group), "train_loss")),
        "above FP32": above,
        "forward bytes": lambda group: sent(group, "forward"),
        "backward bytes": lambda group: sent(group, "backward"),
        "error": errors,
    }
    return [*prose(text), *page.columns(cells, page.grouped(in_order(rows, METHODS, "method"), "method"))]


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    images = SHARED / "cifar10" / "cifar10_4k_1k.npz"
    data = (images, "an .npz with x_train, y_train, x_test and y_test")
    given = arguments(argv, __doc__, "seeds", "only", "workers", "cache", data=data)
    Runs(given, "split_learning", SETUP, ("method", "seed"), exact=beside("FP32", "seed")).complete(
        train,
        [(name, seed) for seed in range(given.seeds) for name in chosen(METHODS, given.only)],
        given.data,
        given.cache,
        line=lambda row: (
            f"train {row['rounds'][-1]['train_loss']:.4f}  accuracy {row['rounds'][-1]['accuracy']:.3f}  "
            f"{row['cpu_seconds']:.0f} s"
        ),
        page=results,
    )
