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
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pipecomp.config import MOST_SEED
from pipecomp.data import default_collate
from pipecomp.distributed import preemption
from pipecomp.distributed.heartbeat import is_collective_error
from pipecomp.distributed.placement import machine
from pipecomp.distributed.rendezvous import first_line, silence_stderr
from pipecomp.errors import LinkTimeoutError, PeerLostError, PipecompError
from pipecomp.interfaces import TrainingEngine
from pipecomp.recipes import resume
from pipecomp.recipes.steps import Plan
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
    add("--train-file", "--data", nargs="+", metavar="FILE", help="training data; several files are read in this order")
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
    add("--out", metavar="FOLDER", help="folder for metrics and report (default runs/RECIPE-DATE-TIME)")
    add("--run", dest="out", help=argparse.SUPPRESS)  # the former name, which torchrun takes for its own --run-path
    add(
        "--report-to",
        nargs="+",
        default=[],
        metavar="NAME",
        help="log to tensorboard, trackio, mlflow or wandb through Hugging Face's integrations; files go to --out",
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

    The exit status is 0; 2 for an error in the command line, 13 for a lost rank and 1 for pipecomp's other errors, all
    printed as one line on standard error (once per machine if all ranks have the same error); 75 for a run that was
    stopped by a signal and has saved a checkpoint; 130 after Ctrl-C without a checkpoint. A collective that fails
    prints a traceback and counts as a lost rank. Other exceptions are bugs and print a traceback.

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
        lost = isinstance(error, (PeerLostError, LinkTimeoutError))
        status = 2 if isinstance(error, UsageError) else preemption.LOST_STATUS if lost else 1
    except Exception as error:
        if not is_collective_error(error):
            raise
        traceback.print_exc()
        _print_once(f"{parser.prog}: error: lost another rank, whose output says more: {first_line(error)}")
        status = preemption.LOST_STATUS
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
        key = hashlib.sha256(f"{machine()} {line}".encode()).hexdigest()
        # If the rank that serves the store has ended, print.
        with contextlib.suppress(RuntimeError), silence_stderr():
            first = distributed_c10d._get_default_store().add(f"pipecomp-said-{key}", 1) == 1
    elif int(os.environ.get("LOCAL_RANK", "0")) != 0:
        time.sleep(_FIRST_S)  # rank 0 prints the same error, and the launcher stops all ranks meanwhile
    if first:
        print(line, file=sys.stderr, flush=True)


# -- the run


def _save_model(engine: TrainingEngine, folder: str, tokenizer: Any) -> None:
    engine.save_pretrained(folder)
    if tokenizer is not None and dist.get_rank() == 0:
        tokenizer.save_pretrained(folder)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A recipe's model and data.

    Attributes:
        model: As for `pipecomp.initialize`.
        training: Samples with a length.
        trained: From `resume.what_is_trained`.
        training_samples: Their number for reports; None for the length of `training`.
        held_out: Samples to evaluate after every epoch, or None.
        collate: Makes a micro-batch from a list of samples.
        padding: Makes it instead where `collate` packs and the model refuses packing; None for an error.
        compute_metrics: As for `PipelineTrainer`; None to keep no logits.
        derived: Further metrics by name, from an evaluation's mean loss.
        measures: The metrics of an `eval` line.
        tokenizer: Saved with the model.
        cuts: The model's cuts; None for stages of about equal size.
        config: DeepSpeed's configuration; None to read --deepspeed_config.
        plan: Number and size of steps; None to compute them from --epochs, --max-steps and the samples.
        sampler: The order of samples; None for a new one in every epoch.
        loss: Mean loss of outputs and labels, for a model of plain modules.
        lr_scheduler: Makes a scheduler from the optimizer, if the configuration has none.
        schedule: The same from the number of steps and the optimizer.
        unit: Unit of the speed: "tokens", or "images" for samples.
        period: Interval of evaluations, for reports.
        is_compared: The data are compared, or only some ranks have them.
        save_parts: Writes the part of a stage into a folder; None for a from_pretrained folder.
        on_step: Called after every step with all ranks' `comm_stats`.
    """

    model: Any
    training: Any
    trained: Mapping[str, Any]
    training_samples: int | None = None
    held_out: Any = None
    collate: Callable[[list], Any] = default_collate
    padding: Callable[[list], Any] | None = None
    compute_metrics: Callable[[Any], dict[str, float]] | None = None
    derived: Callable[[float], dict[str, float]] = lambda loss: {}
    measures: Sequence[str] = ("loss",)
    tokenizer: Any = None
    cuts: Sequence[int] | None = None
    config: dict[str, Any] | None = None
    plan: Plan | None = None
    sampler: Any = None
    loss: Callable[[Any, Any], Any] | None = None
    lr_scheduler: Callable[[Any], Any] | None = None
    schedule: Callable[[int, Any], Any] | None = None
    unit: str = "tokens"
    period: str = "epoch"
    is_compared: bool = False
    save_parts: Callable[[Any, str], None] | None = None
    on_step: Callable[[Sequence[Mapping[str, Any]]], None] | None = None

    def save(self, engine: TrainingEngine, folder: str) -> None:
        """Write the trained model. Every rank must call this."""
        if self.save_parts is not None:
            self.save_parts(engine.stage, folder)
        else:
            _save_model(engine, folder, self.tokenizer)


def train(args: argparse.Namespace, work: Workload) -> None:
    """Train, evaluate and save. Every rank must call this.

    Args:
        args: From a parser of `arguments`.
        work: Model and data.

    Raises:
        PipecompError: On every rank, if one has an error or they have different arguments or data.
    """
    from pipecomp.recipes.trainer import RecipeTrainer  # imports transformers, which takes seconds

    RecipeTrainer(args, work).run()
