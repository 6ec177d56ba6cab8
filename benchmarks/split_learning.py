"""Split learning of a ResNet on CIFAR-10 with compressed links: accuracy and bytes, and what following crops is worth.

    python benchmarks/split_learning.py [--seeds 3] [--only NAME ...] [--workers 2] [--data FILE] [--cache FOLDER]
                                        [--out FOLDER]

Client, server and client are in one process on one thread (see inprocess.py): the network, the data, the order of the
clients, the links and the message stores are those of the recipe resnet_split. The network is trained on half of the
images first, as on public ones; the clients share the other half. Finished runs are kept in --out, so that a benchmark
that was stopped continues. Writes split_learning.md beside them.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from jobs import SHARED, chosen, digest, finished, parser, work_off

CLIENTS, CONCENTRATION, LOCAL_EPOCHS, BATCH = 16, 0.5, 3, 64
ROUNDS, DECAY_ROUNDS = 8, 5
LEARNING_RATE, CROP = 0.003, 4
PUBLIC = {"images": 2000, "epochs": 10, "rate": 0.05}  # what the network is trained on before, centrally
WIRE = {"forward_bits": 2, "backward_bits": 8, "backward_top_k": 0.2}
HEADINGS = (
    *("method", "seeds", "accuracy", "held-out loss", "training loss", "above FP32"),
    *("forward bytes", "backward bytes", "error"),
)
AQSGD = "AQ-SGD fw2 bw8[0.2]"
METHODS: dict[str, dict[str, Any]] = {
    "FP32": {"activations": {"method": "none"}},
    "DirectQ fw2 bw8[0.2]": {"activations": {"method": "direct", **WIRE}},
    AQSGD: {"activations": {"method": "aqsgd", **WIRE}},
    f"{AQSGD}, messages do not follow crops and flips": {
        "activations": {"method": "aqsgd", **WIRE},
        "matched": False,
    },
    f"{AQSGD}, first visit 8 bits": {"activations": {"method": "aqsgd", "first_visit": 8, **WIRE}},
}


def train(name: str, seed: int, data: Path, cache: Path) -> dict[str, Any]:
    """One run; plain values. Loads what it needs, so that it can be a process of its own."""
    import torch

    torch.set_num_threads(1)
    from inprocess import InProcessPipeline

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
    loss, accuracy = torch.stack(pipeline.eval_batch(eval_batches(held_out, 100), on_logits=measure)).mean(0).tolist()
    start = {"eval_loss": loss, "accuracy": accuracy}
    rounds = []
    for _ in range(ROUNDS):
        before = counters(pipeline)
        losses = [float(pipeline.train_batch()) for _ in range(turns.per_round)]
        sent = {key: value - before[key] for key, value in counters(pipeline).items()}
        found = pipeline.eval_batch(eval_batches(held_out, 100), on_logits=measure)
        loss, accuracy = torch.stack(found).mean(0).tolist()
        rounds.append({"train_loss": sum(losses) / len(losses), "eval_loss": loss, "accuracy": accuracy, **sent})
    if not pipeline.same_messages():
        raise AssertionError("the two ends of a link hold different messages")
    return {
        "method": name,
        "seed": seed,
        "start": start,
        "rounds": rounds,
        "store_bytes": pipeline.store_bytes(),
        "cpu_seconds": time.process_time() - began,
    }


def pretrained(images: Any, public: Any, cache: Path, seed: int) -> Any:
    """The network that all methods start from, trained once per seed: plainly, on random views of the public images."""
    import torch
    from wikitext import one_at_a_time

    from pipecomp.recipes.images import Views
    from pipecomp.recipes.resnet import resnet

    kept = cache / f"split-{seed}-{setup_digest()}.pt"
    with one_at_a_time(kept):
        torch.manual_seed(seed)
        network = resnet("tiny", 10, norm="group")
        if kept.exists():
            network.load_state_dict(torch.load(kept, weights_only=True))
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
        torch.save(network.state_dict(), kept)
    return network


def measure(logits: Any, labels: Any) -> Any:
    """Loss and accuracy of one batch."""
    import torch

    loss = torch.nn.functional.cross_entropy(logits, labels)
    return torch.stack([loss, (logits.argmax(1) == labels).float().mean()])


def counters(pipeline: Any) -> dict[str, float]:
    """Bytes of training over both links so far, and the links' errors, added up."""
    links = [sender.stats for sender, _ in pipeline.links]
    found: dict[str, float] = {
        f"{way}_{kind}": sum(getattr(getattr(link, way), kind) for link in links)
        for way in ("forward", "backward")
        for kind in ("bytes_raw", "bytes_sent")
    }
    for number, link in enumerate(links):
        found |= {f"error_sum_{number}": link.error_sum, f"error_count_{number}": link.error_count}
    return found


def ds_config(name: str, seed: int) -> dict[str, Any]:
    """The configuration, as `pipecomp.initialize` would take it."""
    activations = METHODS[name]["activations"]
    section: dict[str, Any] = {"seed": seed, "activations": activations}
    if activations["method"] == "aqsgd":
        section["store"] = {"backend": "memory"}
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE, "momentum": 0.9}},
        "gradient_clipping": 0.0,
        "pipecomp": section,
    }


def setup_digest() -> str:
    """What runs must have in common to stand in one table."""
    values = [CLIENTS, CONCENTRATION, LOCAL_EPOCHS, BATCH, ROUNDS, DECAY_ROUNDS, LEARNING_RATE, CROP, PUBLIC, METHODS]
    return digest(values)


def write_report(out: Path, runs: list[dict[str, Any]]) -> None:
    """Write split_learning.md."""
    import torch

    starts = [run["start"] for run in runs if run["method"] == runs[0]["method"]]
    out.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Split learning with compressed links",
        "",
        f"`python benchmarks/split_learning.py`, on {os.cpu_count()} cores ({platform.machine()}, no GPU), torch "
        f"{torch.__version__}.",
        "",
        f"The recipe `resnet_split` at CPU size: the network `tiny` with group norm, cut after its first block and "
        f"before its last. It is trained plainly on {PUBLIC['images']} CIFAR-10 images first, to an accuracy of "
        f"{_spread(starts, 'accuracy', 3)} and a held-out loss of {_spread(starts, 'eval_loss')}. {CLIENTS} clients in "
        f"turn share 2000 others, by Dirichlet({CONCENTRATION}): {ROUNDS} rounds of {LOCAL_EPOCHS} local epochs, "
        f"batches of {BATCH}, SGD with momentum 0.9 and a rate of {LEARNING_RATE}, a tenth of it after round "
        f"{DECAY_ROUNDS}, random crops of ±{CROP} pixels and flips.",
        "",
        "Accuracy on 1,000 images, evaluated with uncompressed messages. Training loss: mean over the last round. "
        "Bytes: of both links' messages, headers and scales included, as shares of the float32 values', in the last "
        "round; all rounds in brackets. Error: ‖a − m‖ / ‖a‖ on each link in the last round. ± is the standard "
        "deviation over seeds; above FP32 is the mean of the differences to FP32 with the same seed, and the smallest "
        "and the largest.",
        "",
        f"| {' | '.join(HEADINGS)} |",
        "|" + "---|" * len(HEADINGS),
    ]
    exact = {run["seed"]: run["rounds"][-1] for run in runs if run["method"] == "FP32"}
    for name in METHODS:
        rows = [run for run in runs if run["method"] == name]
        if rows:
            lines.append(f"| {' | '.join(_cells(name, rows, exact))} |")
    (out / "split_learning.md").write_text("\n".join(lines) + "\n")


def _cells(name: str, rows: list[dict[str, Any]], exact: dict[int, dict[str, float]]) -> list[str]:
    last = [run["rounds"][-1] for run in rows]
    counted = [r for r in last if r["error_count_0"]]
    errors = [_mean([r[f"error_sum_{n}"] / r[f"error_count_{n}"] for r in counted]) for n in (0, 1) if counted]
    shares = []
    for way in ("forward", "backward"):
        once, ever = (
            sum(r[f"{way}_bytes_sent"] for r in some) / sum(r[f"{way}_bytes_raw"] for r in some)
            for some in (last, [r for run in rows for r in run["rounds"]])
        )
        shares.append(f"{100 * once:.1f} % ({100 * ever:.1f} %)")
    above = [run["rounds"][-1]["train_loss"] - exact[run["seed"]]["train_loss"] for run in rows if run["seed"] in exact]
    return [
        name,
        str(len(rows)),
        _spread(last, "accuracy", 3),
        _spread(last, "eval_loss"),
        _spread(last, "train_loss"),
        _above(above),
        *shares,
        ", ".join(f"{e:.3f}" for e in errors) or "–",
    ]


def _above(differences: list[float]) -> str:
    if not any(differences):  # FP32 itself, or no run of it yet
        return "–"
    return f"{_mean(differences):+.4f} ({min(differences):+.4f} … {max(differences):+.4f})"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _spread(rows: list[dict[str, Any]], key: str, digits: int = 4) -> str:
    values = [row[key] for row in rows]
    mean = f"{_mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def main() -> None:
    """See the top of the file."""
    arguments = _arguments()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    setup, kept = setup_digest(), arguments.out / "split_learning.jsonl"
    runs = finished(kept, setup)
    done = {(run["method"], run["seed"]) for run in runs}
    names = chosen(METHODS, arguments.only)
    todo = [(name, seed) for seed in range(arguments.seeds) for name in names if (name, seed) not in done]
    work_off(
        train,
        todo,
        (arguments.data, arguments.cache),
        runs,
        workers=arguments.workers,
        kept=kept,
        setup=setup,
        line=_line,
        report=functools.partial(write_report, arguments.out),
    )


def _line(run: dict[str, Any]) -> str:
    last = run["rounds"][-1]
    return (
        f"{run['method']:<60} seed {run['seed']}  train {last['train_loss']:.4f}  accuracy {last['accuracy']:.3f}  "
        f"{run['cpu_seconds']:.0f} s"
    )


def _arguments() -> argparse.Namespace:
    options = parser(__doc__, "--seeds", "--only", "--workers", "--cache")
    images = SHARED / "cifar10" / "cifar10_4k_1k.npz"
    options.add_argument("--data", type=Path, default=images, help="an .npz with x_train, y_train, x_test and y_test")
    return options.parse_args()


if __name__ == "__main__":
    main()
