"""Arguments, error output and the run of all recipes, from configuration to saved model.

A recipe's train.py adds its own arguments, its data and its model:

    parser = run.arguments("gpt2_wikitext2", "Fine-tune GPT-2 on text.")
    def main(args):
        start.start_processes(args.seed, args.deepspeed_config)
        with start.all_ranks().collective_errors():
            ...                                   # data and model; an error on one rank stops all ranks
        run.train(args, run.Workload(model=..., training=..., trained=..., held_out=...))
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pipecomp.config import MOST_SEED
from pipecomp.data import default_collate, eval_batches
from pipecomp.distributed import preemption, rendezvous
from pipecomp.distributed.rendezvous import check_processes, silence_stderr
from pipecomp.errors import PipecompError
from pipecomp.interfaces import TrainingEngine
from pipecomp.recipes import resume
from pipecomp.recipes.fit import Fit
from pipecomp.recipes.steps import check_config, make_plan, read_config
from pipecomp.utils.tables import outlast_readers, replace_unprintable

_FIRST_S = 10.0


class UsageError(PipecompError, ValueError):
    """Error in the command line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the arguments)")


def arguments(name: str, description: str, *, text: bool = True) -> argparse.ArgumentParser:
    """Make a parser with the arguments that every recipe has (recipes/README.md); add the recipe's own to it.

    Args:
        name: The recipe's name.
        description: For `--help`.
        text: Add the arguments of recipes for text, which train in epochs and over any number of stages.
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
    add("--dataset", metavar="NAME[:CONFIG]", help="for datasets.load_dataset, instead of the files")
    add("--max-steps", type=at_least(1), metavar="N", help="stop after N optimizer steps")
    add(
        "--seed",
        type=at_least(0, MOST_SEED),
        metavar="S",
        help="order of samples and stochastic rounding (default: the configuration's), dropout (default 0)",
    )
    add("--metrics", metavar="FILE", help="write JSON lines: one per step, one with 'eval' per epoch or round")
    add("--trace", metavar="FILE", help="write a timeline of all ranks in Chrome's trace format")
    add("--tensorboard", metavar="FOLDER", help="write the same curves for TensorBoard")
    add("--run", metavar="FOLDER", help="folder for metrics and report (default runs/RECIPE-DATE-TIME)")
    add(
        "--report-to",
        nargs="+",
        default=[],
        metavar="NAME",
        help="log to tensorboard, trackio, mlflow or wandb through Hugging Face's integrations; files go to --run",
    )
    add("--no-report", dest="report", action="store_false", help="write the run's folder without report.html")
    parser.set_defaults(recipe=name)
    resume.add_arguments(parser, at_least)
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # launchers add it
    return parser


def at_least(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return a type for argparse: integers of at least `low`, and at most `high` if there is one."""
    allowed = f"of at least {low}" if high is None else f"from {low} to {high}"

    def whole_number(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"got {value}, allowed: a whole number {allowed}")
        return value

    whole_number.__name__ = "whole number"  # for argparse's own message
    return whole_number


# -- starting and ending


def run(main: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser) -> NoReturn:
    """Run `main` with the parsed command line and exit.

    The exit status is 0; 2 for an error in the command line and 1 for pipecomp's other errors, both printed as one line
    on standard error (once per machine if all ranks have the same error); 75 for a run that was stopped by a signal and
    has saved a checkpoint; 130 after Ctrl-C without a checkpoint. Other exceptions are bugs and print a traceback.

    Args:
        main: Takes the parsed arguments.
        parser: From `arguments`.
    """
    preemption.end_with_exception()  # signals during the imports end the process silently
    replace_unprintable()
    outlast_readers()
    try:
        main(parser.parse_args())
        status = 0
    except PipecompError as error:
        _print_once(f"{parser.prog}: error: {error}")
        status = 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            line = f"{parser.prog}: stopped by Ctrl-C without saving a checkpoint (see --save-every in --help)"
            print(line, file=sys.stderr, flush=True)
        status = 130
    sys.exit(status)


def _print_once(line: str) -> None:
    """Print a line unless another rank of this machine has printed it."""
    first = True
    if dist.is_initialized():
        key = hashlib.sha256(f"{socket.gethostname()} {line}".encode()).hexdigest()
        # If the rank that serves the store has ended, print.
        with contextlib.suppress(RuntimeError), silence_stderr():
            first = distributed_c10d._get_default_store().add(f"pipecomp-said-{key}", 1) == 1
    elif int(os.environ.get("LOCAL_RANK", "0")) != 0:
        time.sleep(_FIRST_S)  # rank 0 prints the same error, and the launcher stops all ranks meanwhile
    if first:
        print(line, file=sys.stderr, flush=True)


# -- the run


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A recipe's model and data.

    Attributes:
        model: As for `pipecomp.initialize`.
        training: Samples with a length.
        trained: From `resume.what_is_trained`.
        held_out: Samples to evaluate after every epoch, or None.
        collate: Makes a micro-batch from a list of samples.
        evaluation: Takes the engine and the held-out batches and returns the numbers of an `eval` line, with "loss";
            called on every rank.
        tokenizer: Saved with the model.
        cuts: The model's cuts; None for stages of about equal size.
        config: DeepSpeed's configuration; None to read --deepspeed_config.
    """

    model: Any
    training: Any
    trained: Mapping[str, Any]
    held_out: Any = None
    collate: Callable[[list], Any] = default_collate
    evaluation: Callable[[Any, list], dict[str, float]] = lambda engine, batches: evaluate(engine, batches)
    tokenizer: Any = None
    cuts: Sequence[int] | None = None
    config: dict[str, Any] | None = None


def train(args: argparse.Namespace, work: Workload) -> None:
    """Train, evaluate and save. Every rank must call this.

    Args:
        args: From a parser of `arguments`.
        work: Model and data.

    Raises:
        PipecompError: On every rank, if one has an error or they have different arguments or data.
    """
    fit = _prepare(args, work)

    from pipecomp.initialization import initialize

    count = _TokenCount(work.collate)
    stages = None if work.cuts is not None else fit.stages
    engine = initialize(work.model, stages, fit.config, training_data=work.training, collate_fn=count, cuts=work.cuts)
    batches = [] if work.held_out is None else eval_batches(work.held_out, fit.plan.micro_batch, work.collate)
    count.taken()  # reset, because the engine has read some batches

    def save(folder: str) -> None:
        engine.save_pretrained(folder)
        if work.tokenizer is not None and dist.get_rank() == 0:
            work.tokenizer.save_pretrained(folder)

    fit.run(
        engine,
        samples=len(work.training),
        held_out=0 if work.held_out is None else len(work.held_out),
        units=count.taken,
        evaluate=lambda: work.evaluation(engine, batches) if batches else None,
        save=save,
    )


def _prepare(args: argparse.Namespace, work: Workload) -> Fit:
    """Prepare the run and compare it on all ranks, before the engine is made."""
    ranks = rendezvous.all_ranks()
    with ranks.collective_errors():
        world = dist.get_world_size()
        stages = args.stages or world
        check_processes("--stages", stages)
        samples = len(work.training)
        config = read_config(args.deepspeed_config) if work.config is None else check_config(work.config)
        plan = make_plan(
            config, samples=samples, replicas=world // stages, epochs=args.epochs, max_steps=args.max_steps
        )
        fit = Fit(args, config, plan, work.trained, stages=stages)
    ranks.assert_same_on_all_ranks({**fit.facts(), "held-out data": work.held_out is not None})
    with ranks.collective_errors():
        fit.begin()
        if args.save and dist.get_rank() == 0:
            resume.make_folder("--save", args.save)
    return fit


def evaluate(engine: TrainingEngine, batches: list) -> dict[str, float]:
    """Evaluate held-out data on every replica.

    Args:
        engine: The engine.
        batches: From `eval_batches`.

    Returns:
        The mean "loss" over all samples with equal weights.
    """
    total, samples = 0.0, 0
    size = len(batches[0].ids)
    full = [batch for batch in batches if len(batch.ids) == size]
    for part in (full, batches[len(full) :]):  # eval_batch weights micro-batches equally; the last may be incomplete
        if part:
            loss = engine.eval_batch(iter(part), num_micro_batches=len(part))
            count = sum(len(batch.ids) for batch in part)
            total, samples = total + float(loss) * count, samples + count
    return {"loss": total / samples}


class _TokenCount:
    """A collator that counts tokens without padding."""

    def __init__(self, collate: Callable[[list], Any]) -> None:
        self._collate, self._tokens = collate, 0

    def __call__(self, samples: list) -> Any:
        batch = self._collate(samples)
        mask = batch.get("attention_mask")
        self._tokens += batch["input_ids"].numel() if mask is None else int(mask.sum())
        return batch

    def taken(self) -> int:
        """Return the number of tokens since the last call."""
        tokens, self._tokens = self._tokens, 0
        return tokens
