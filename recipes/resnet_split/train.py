"""Split learning: a ResNet whose ends stay with the clients, over links compressed with AQ-SGD. See README.md."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipecomp.distributed import preemption

if __name__ == "__main__":
    preemption.end_quietly()  # for the seconds that the imports below take

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from pipecomp.config import Config
from pipecomp.config.checks import batch_sizes
from pipecomp.distributed import rendezvous
from pipecomp.distributed.collectives import gathered
from pipecomp.distributed.consistency import settings_of
from pipecomp.errors import DataError, require
from pipecomp.recipes import images, run, steps
from pipecomp.recipes.resnet import client_cuts, resnet
from pipecomp.recipes.resume import DATA, what_is_trained
from pipecomp.recipes.text import check_one_source
from pipecomp.stages import modules
from pipecomp.utils.serialization import serializable

STAGES, SERVER = 3, 1  # client, server, client
DECAY_ROUNDS = 20  # the paper's


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = run.arguments("resnet_split", "Split learning of a ResNet over compressed links.", text=False)
    add = parser.add_argument
    positive, pixels = run.at_least(1), run.at_least(0)
    add("--model", default="resnet34", metavar="SIZE", help="resnet34, or tiny: three small blocks (default resnet34)")
    add("--norm", default="batch", metavar="KIND", help="batch or group (default batch)")
    add("--clients", type=positive, default=16, metavar="N", help="clients trained in turn (default 16)")
    add("--concentration", type=float, default=0.5, metavar="A", help="less makes clients differ more (default 0.5)")
    add("--rounds", type=positive, default=1, metavar="N", help="how often every client has its turn (default 1)")
    add("--epochs", type=positive, default=3, metavar="N", help="passes over its images in a client's turn (default 3)")
    add("--decay-rounds", type=positive, metavar="N", help="after so many the rate falls to a tenth (default 20)")
    add("--crop", type=pixels, default=4, metavar="P", help="random crops move images by up to P pixels (default 4)")
    add("--weights", metavar="FOLDER", help="begin with the weights of an earlier run's --save, not with random ones")
    add("--start", dest="weights", help=argparse.SUPPRESS)  # the former name, which torchrun takes for its own
    add("--no-flip", action="store_true", help="do not flip images at random")
    add("--unmatched", action="store_true", help="messages do not follow crops and flips; to see what that is worth")
    add("--save", metavar="FOLDER", help="every process writes its part of the trained model")
    return parser


@serializable
@dataclass(frozen=True, kw_only=True)
class Task:
    """The server's knowledge of the clients' data: numbers, and a hash of all training images, to know them again.

    per_round: optimizer steps of a round.
    """

    shape: tuple[int, ...]
    classes: int
    images: int
    held_out: int
    per_round: int
    digest: str


Found = tuple[Task, str | None]  # in a client's process, with a hash of its held-out images


@dataclass(frozen=True, kw_only=True)
class ClientData:
    """The data that the clients' processes hold."""

    views: images.Views
    turns: images.ClientTurns
    held_out: images.Images | None


def main(args: argparse.Namespace) -> None:
    """One rank of the run."""
    check_arguments(args)
    rendezvous.start_processes(args.seed, args.deepspeed_config)
    ranks = rendezvous.all_ranks()
    config: dict[str, Any] = {}
    with ranks.collective_errors():
        config, seed = read_settings(args)
        settings = Config.from_dict(config.get("pipecomp", {}))
    ranks.assert_same_on_all_ranks(
        {**settings_of(config, "pipecomp", settings.shared()), **shown_arguments(args), "seed of the run": seed}
    )
    micro, accumulation = batch_sizes(config, 1)
    data, mine = None, None
    with ranks.collective_errors():
        if dist.get_rank() != SERVER:
            data, mine = read(args, micro, accumulation, seed)
    task = agreed(mine)
    count = min(args.rounds * task.per_round, args.max_steps or args.rounds * task.per_round)
    per_epoch = task.per_round * accumulation
    with ranks.collective_errors():
        network = make_network(args, task, seed)
    run.train(
        args,
        run.Workload(
            model=modules(network, task.shape, margin=0 if args.unmatched else args.crop),
            cuts=client_cuts(network),
            loss=mean_loss,
            lr_scheduler=None if "scheduler" in config else partial(falling, args, task),
            config=config,
            plan=steps.Plan(steps=count, per_epoch=per_epoch, micro_batch=micro, accumulation=accumulation, replicas=1),
            training=images.Elsewhere(task.images) if data is None else data.views,
            held_out=held_out_images(data, task),
            sampler=images.OtherOrder(per_epoch, micro) if data is None else data.turns,
            trained=what_is_trained(args, meanings(args, config, task)),
            training_samples=task.images,
            compute_metrics=accuracy,
            measures=("loss", "accuracy"),
            unit="images",
            period="round",
            is_compared=True,
            save_parts=save,
        ),
    )


def held_out_images(data: ClientData | None, task: Task) -> Any:
    """The held-out images, on the server their number; None if there are none."""
    if not task.held_out:
        return None
    return images.Elsewhere(task.held_out) if data is None else data.held_out


def falling(args: argparse.Namespace, task: Task, optimizer: Any) -> Any:
    """A schedule that falls to a tenth after every --decay-rounds rounds."""
    every = (args.decay_rounds or DECAY_ROUNDS) * task.per_round
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 ** (step // every))


def read_settings(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """DeepSpeed's configuration and the seed of data and weights. Raises ConfigError."""
    require(
        dist.get_world_size() == STAGES,
        "processes",
        dist.get_world_size(),
        "3: a client's first part, the server, its last part",
    )
    config = steps.read_config(args.deepspeed_config)
    batch_sizes(config, 1)
    require(
        "scheduler" not in config or args.decay_rounds is None,
        "--decay-rounds",
        args.decay_rounds,
        "only without a scheduler in the configuration",
    )
    seed = args.seed if args.seed is not None else Config.from_dict(config.get("pipecomp", {})).seed
    return config, seed


def make_network(args: argparse.Namespace, task: Task, seed: int) -> torch.nn.Sequential:
    """The whole network with the same weights on every rank, each of which keeps its own part."""
    torch.manual_seed(seed)
    network = resnet(args.model, task.classes, norm=args.norm)
    if args.weights:
        load(network, args.weights)
    return network


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigError for what can be seen without reading anything."""
    check_one_source(args)
    require(0 < args.concentration < math.inf, "--concentration", args.concentration, "a number above 0")


def shown_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that all ranks must have alike; where files are is each machine's own affair."""
    own = ("deepspeed_config", "train_file", "eval_file", "metrics", "tensorboard", "local_rank", "weights")
    return {key: value for key, value in vars(args).items() if key not in own}


def meanings(args: argparse.Namespace, config: dict[str, Any], task: Task) -> dict[str, Any]:
    """Facts that must be equal where a run goes on, and cannot be told from the arguments that all recipes have."""
    decay_rounds = None if "scheduler" in config else args.decay_rounds or DECAY_ROUNDS
    return {"--model": args.model, "--epochs": args.epochs, "--decay-rounds": decay_rounds, DATA: task.digest}


def read(args: argparse.Namespace, micro: int, accumulation: int, seed: int) -> tuple[ClientData, Found]:
    """The images as the clients train on them, and what `agreed` compares. Raises DataError."""
    held_out: images.Images | None = None
    if args.dataset is not None:
        training, held_out = (images.dataset_images(args.dataset, part=part) for part in ("train", "test"))
    else:
        training = images.read_images(args.train_file, part="train")
        if args.eval_file is not None:
            held_out = images.read_images([args.eval_file], part="test")
    if held_out is not None and held_out.shape != training.shape:
        raise DataError(f"held-out images of {held_out.shape}, the training images are {training.shape}")
    views = images.Views(training, args.crop, flip=not args.no_flip, matched=not args.unmatched)
    parts = images.shares(training.labels, args.clients, args.concentration, seed)
    turns = images.ClientTurns(
        views, parts, batch=micro * accumulation, micro_batch=micro, epochs=args.epochs, seed=seed
    )
    task = Task(
        shape=training.shape,
        classes=max(training.classes, 0 if held_out is None else held_out.classes),
        images=len(training),
        held_out=0 if held_out is None else len(held_out),
        per_round=turns.per_round,
        digest=training.digest(),
    )
    held_out_digest = None if held_out is None else held_out.digest()
    return ClientData(views=views, turns=turns, held_out=held_out), (task, held_out_digest)


def agreed(mine: Found | None) -> Task:
    """Share the findings of both of the client's processes with every rank. Raises DataError if they differ."""
    everyones = gathered(mine)
    if everyones[0] != everyones[-1]:
        raise DataError("the client's two processes have different images: give both the same files")
    task: Task = everyones[0][0]
    return task


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of images, float32: half precision is too coarse for a mean of many."""
    return torch.nn.functional.cross_entropy(logits.float(), labels)


def accuracy(predicted: Any) -> dict[str, float]:
    """The share of right answers; predicted: logits and labels of all held-out images."""
    return {"accuracy": float((predicted.predictions.argmax(1) == predicted.label_ids).mean())}


def load(network: torch.nn.Sequential, folder: str) -> None:
    """Fill the network from what `save` wrote; only this rank's part has to be there. Raises DataError."""
    from safetensors.torch import load_file

    path = Path(folder) / f"part-{dist.get_rank()}.safetensors"
    try:
        missing, unknown = network.load_state_dict(load_file(path), strict=False)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise DataError(f"{path}: not a part of this network: {str(error).splitlines()[0]}") from error
    lo, hi = client_cuts(network)[dist.get_rank() :][:2]
    lacking = [name for name in missing if lo <= int(name.partition(".")[0]) < hi]
    if lacking or unknown:
        raise DataError(f"{path}: {'lacks' if lacking else 'has no use for'} {(lacking or unknown)[0]}")


def save(stage: Any, folder: str) -> None:
    """This rank's weights, under the names that they have in the whole network."""
    from safetensors.torch import save_file

    tensors = {name: value.detach().cpu().contiguous() for name, value in stage.state_dict().items()}
    save_file(tensors, Path(folder) / f"part-{stage.index}.safetensors")
    dist.barrier()  # the report says next that the model is saved


if __name__ == "__main__":
    run.run(main, arguments())
