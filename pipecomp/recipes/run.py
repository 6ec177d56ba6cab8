"""What all recipes share: arguments, errors as one line on every rank, the run from configuration to saved model.

A recipe's train.py adds its own arguments, its data and its model:

    parser = run.arguments("gpt2_wikitext2", "Fine-tune GPT-2 on text.")
    def main(args):
        run.join(args)
        with run.together():
            ...                                   # data and model; an error of one rank ends all of them
        run.train(args, model=..., training=..., trained=..., held_out=...)
    run.run(main, parser)
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pipecomp.cluster.agreement import settings_of
from pipecomp.config import Config
from pipecomp.data import default_collate, eval_batches
from pipecomp.errors import ConfigError, DataError, PipecompError
from pipecomp.recipes import resume
from pipecomp.recipes.report import Report, Traffic
from pipecomp.recipes.resume import Checkpoints
from pipecomp.recipes.steps import complete, make_plan, read_config

DEFAULT_SEED = 0


class UsageError(PipecompError, ValueError):
    """The command line is wrong."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the arguments)")


def arguments(name: str, description: str, *, text: bool = True) -> argparse.ArgumentParser:
    """A parser with the arguments that every recipe has (recipes/README.md); add the recipe's own to it.

    text: with those of recipes whose samples are text, seen once an epoch and split over any number of stages.
    """
    parser = _Parser(prog=name, description=description, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--deepspeed_config",
        "--deepspeed-config",
        required=True,
        metavar="FILE",
        help="DeepSpeed's configuration with a 'pipecomp' section",
    )
    if text:
        add("--model", required=True, metavar="NAME", help="a from_pretrained folder or a name on the Hugging Face hub")
        add("--tokenizer", required=True, metavar="NAME", help="a tokenizer folder or a name on the hub")
        add("--stages", type=at_least(1), metavar="K", help="pipeline stages; default: one per process")
        add("--epochs", type=at_least(1), default=1, metavar="N", help="passes over the training data (default 1)")
        add("--save", metavar="FOLDER", help="write the trained model as a from_pretrained folder")
    add("--train-file", nargs="+", metavar="FILE", help="training data; several files are read in this order")
    add("--eval-file", metavar="FILE", help="held-out data, evaluated after every epoch or round")
    add("--dataset", metavar="NAME[:CONFIG]", help="for datasets.load_dataset, in place of the files")
    add("--max-steps", type=at_least(1), metavar="N", help="stop after so many optimizer steps")
    add("--seed", type=at_least(0), metavar="S", help="order of samples, dropout, stochastic rounding (default 0)")
    add("--metrics", metavar="FILE", help="write JSON lines: one per step, one with 'eval' per epoch or round")
    add("--trace", metavar="FILE", help="write what every rank did when, in Chrome's trace format, and a picture")
    add("--tensorboard", metavar="FOLDER", help="write the same curves for TensorBoard")
    resume.add_arguments(parser, at_least)
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher adds it
    return parser


def at_least(low: int) -> Callable[[str], int]:
    """For argparse: whole numbers from `low` on."""

    def whole_number(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"got {value}, allowed: a whole number of at least {low}")
        return value

    whole_number.__name__ = "whole number"  # for argparse's own message
    return whole_number


# -- starting and ending


def run(main: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser) -> NoReturn:
    """Run `main` with the parsed command line and exit.

    Exit status: 0; 2 for a wrong command line, 1 for this project's other errors, both told in one line on standard
    error (once per machine where all ranks have the same); 130 after Ctrl-C. Anything else is a bug: a traceback.
    """
    try:
        main(parser.parse_args())
        status = 0
    except PipecompError as error:
        _say_once(f"{parser.prog}: error: {error}")
        status = 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def _say_once(line: str) -> None:
    """Print unless another rank of this machine has printed the same."""
    first = True
    if dist.is_initialized():
        key = hashlib.sha256(f"{socket.gethostname()} {line}".encode()).hexdigest()
        with contextlib.suppress(RuntimeError):  # the rank that serves the store may be gone: then print
            first = distributed_c10d._get_default_store().add(f"pipecomp-said-{key}", 1) == 1
    elif int(os.environ.get("LOCAL_RANK", "0")) != 0:
        time.sleep(3)  # the launcher ends all ranks when the first one fails: let the one that prints be first
        first = False
    if first:
        print(line, file=sys.stderr, flush=True)


def join(args: argparse.Namespace) -> None:
    """Join the other processes, share the cores of this machine among them, seed torch. Call it before all else."""
    from pipecomp.cluster.rendezvous import join_processes, ranks_here

    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, _cores() // (ranks_here() or 1)))
    if os.environ.get("MASTER_ADDR", "").startswith("127.") and "lo" in [name for _, name in socket.if_nameindex()]:
        # Otherwise gloo takes the address that the host name resolves to, which need not be reachable.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    join_processes()
    torch.manual_seed((args.seed if args.seed is not None else DEFAULT_SEED) * 65536 + dist.get_rank())


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def together() -> Iterator[Callable[[str, Any], None]]:
    """What every rank does for itself, ending on all ranks if it fails on one.

    Yields `same(what, value)`, to be called with what must be equal on all ranks (the repr of value is compared).
    Raises on every rank PipecompError with the first rank's error, DataError if what must be equal is not.
    """
    values: list[tuple[str, str]] = []
    error: Exception | None = None
    try:
        yield lambda what, value: values.append((what, repr(value)))
    except Exception as raised:
        error = raised
    mine = (None if error is None else str(error) or type(error).__name__, values)
    all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, mine)
    if error is not None and not isinstance(error, PipecompError):
        raise error
    failed = [(rank, text) for rank, (text, _) in enumerate(all_ranks) if text is not None]
    if failed:
        rank, text = failed[0]
        raise PipecompError(text if len(failed) == len(all_ranks) else f"rank {rank}: {text}") from error
    for rank, (_, others) in enumerate(all_ranks):
        for (what, theirs), (_, first) in zip(others, all_ranks[0][1], strict=True):
            if theirs != first:
                raise DataError(f"rank {rank} differs from rank 0 in {what}: give all ranks the same")


# -- the run


def train(
    args: argparse.Namespace,
    *,
    model: Any,
    training: Any,
    trained: Mapping[str, Any],
    held_out: Any = None,
    collate: Callable[[list], Any] = default_collate,
    measures: Callable[[float], dict[str, float]] | None = None,
    evaluation: Callable[[Any, list], dict[str, float]] | None = None,
    tokenizer: Any = None,
) -> None:
    """Train and evaluate as the command line and the configuration say, and save; call it on every rank.

    model: as for `pipecomp.initialize`. training, held_out: samples with a length. trained: of
    `resume.what_is_trained`. measures(loss): what an `eval` line adds to the held-out loss. evaluation(engine,
    batches): makes the numbers of an `eval` line, "loss" among them, where a loss alone does not tell them; `measures`
    is not called then. tokenizer: saved beside the model. Raises this project's errors.
    """
    with together() as same:
        world = dist.get_world_size()
        stages = args.stages or world
        if world % stages:
            raise ConfigError("--stages", stages, f"a divisor of the {world} processes of this run")
        config = read_config(args.deepspeed_config)
        plan = make_plan(
            config, samples=len(training), replicas=world // stages, epochs=args.epochs, max_steps=args.max_steps
        )
        config = complete(config, plan, args.seed)
        settings = Config.from_dict(config.get("pipecomp", {}))
        same("arguments or configuration", (stages, plan, config, args.save is None, held_out is None))
        same("arguments or the model's configuration", trained)
        checkpoints = Checkpoints(args, config, settings_of(config, "pipecomp", settings.shared()), trained)
        same("arguments", (args.checkpoint is None, args.save_every, args.resume))
    with together():
        goes_on = checkpoints.find()
        if not checkpoints.step:
            forget_messages(settings, dist.get_rank())
        report = Report(args.metrics, args.tensorboard, silent=dist.get_rank() != 0, after=checkpoints.step)
        if args.save and dist.get_rank() == 0:
            make_folder(args.save)

    from pipecomp.engine.initialize import initialize

    count = _TokenCount(collate)
    engine = initialize(model, stages, config, training_data=training, collate_fn=count)
    if args.trace:
        engine.start_trace()
    batches = None if held_out is None else eval_batches(held_out, plan.micro_batch, collate)
    with report:
        report.start(args, plan, settings, stages, len(training), 0 if held_out is None else len(held_out))
        report.resumed(goes_on)
        report.resumed(checkpoints.load(engine))
        for step in range(checkpoints.step + 1, plan.steps + 1):
            lr, began = float(engine.optimizer.param_groups[0]["lr"]), time.perf_counter()
            count.tokens = 0
            loss = float(engine.train_batch())
            seconds = time.perf_counter() - began
            traffic = Traffic.of(engine.gather_comm_stats())
            tokens_per_s = count.tokens * plan.replicas / seconds
            report.step(step, plan.epoch(step), loss=loss, lr=lr, per_s=tokens_per_s, traffic=traffic)
            if plan.ends_epoch(step):
                found = None
                if batches is not None and evaluation is not None:
                    found = evaluation(engine, batches)
                elif batches is not None:
                    held_out_loss = evaluate(engine, batches)
                    found = {"loss": held_out_loss, **(measures(held_out_loss) if measures else {})}
                report.epoch(step, plan.epoch(step), found, Traffic.of(engine.gather_comm_stats()))
            checkpoints.save(engine, step, ends_epoch=plan.ends_epoch(step), last=step == plan.steps)
        if args.trace:
            engine.save_trace(args.trace)
        if args.save:
            engine.save_pretrained(args.save)
            if tokenizer is not None and dist.get_rank() == 0:
                tokenizer.save_pretrained(args.save)
        report.end(Traffic.of(engine.gather_comm_stats()), args.save)
    engine.close()


def evaluate(engine: Any, batches: list) -> float:
    """Mean loss over all samples of `eval_batches`, each counted alike; every replica evaluates all of them."""
    total, samples = 0.0, 0
    size = len(batches[0].ids)
    full = [batch for batch in batches if len(batch.ids) == size]
    for part in (full, batches[len(full) :]):  # eval_batch weighs micro-batches alike, and the last may be short
        if part:
            loss = engine.eval_batch(iter(part), num_micro_batches=len(part))
            count = sum(len(batch.ids) for batch in part)
            total, samples = total + float(loss) * count, samples + count
    return total / samples


class _TokenCount:
    """Collates, and counts the real tokens of what it collated."""

    def __init__(self, collate: Callable[[list], Any]) -> None:
        self._collate, self.tokens = collate, 0

    def __call__(self, samples: list) -> Any:
        batch = self._collate(samples)
        mask = batch.get("attention_mask")
        self.tokens += batch["input_ids"].numel() if mask is None else int(mask.sum())
        return batch


def forget_messages(settings: Config, rank: int) -> None:
    """Empty this rank's message store: a recipe starts from its model, and an earlier run's messages are of another."""
    from pipecomp.buffers.admin import prune
    from pipecomp.buffers.lmdb_folder import DATA_FILE

    folder = Path(settings.store.path) / f"rank-{rank}"
    if settings.activations.method == "aqsgd" and settings.store.backend == "lmdb" and (folder / DATA_FILE).is_file():
        prune(folder, everything=True)


def make_folder(path: str) -> None:
    """The folder of --save, made before training so that one that cannot be written is known at once."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--save", path, f"a folder that can be written ({error.strerror})") from error
