"""A recipe's arguments for LoRA, and the model that they describe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pipecomp.errors import ConfigError, PipecompError, require
from pipecomp.recipes.text import model_config

# Of a new adapter. The parser's own default is None, so that what was given beside a saved one is seen.
RANK, ALPHA, DROPOUT = 8, 16, 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of LoRA to a recipe's."""
    add = parser.add_argument
    add("--lora-rank", type=int, metavar="R", help=f"rank of the adapters (default {RANK})")
    add("--lora-alpha", type=float, metavar="A", help=f"adapters are scaled by A / R (default {ALPHA})")
    add("--lora-dropout", type=float, metavar="P", help=f"dropout before the adapters (default {DROPOUT:g})")
    targets = "layers with adapters, by the ends of their names, or all-linear (default: peft's for the model)"
    add("--lora-targets", nargs="+", metavar="NAME", help=targets)
    add("--adapter", metavar="FOLDER", help="continue training a saved adapter instead of a new one")


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigError for what can be seen without reading anything."""
    for name in ("rank", "alpha", "dropout", "targets") if args.adapter is not None else ():
        given = getattr(args, f"lora_{name}")
        require(given is None, f"--lora-{name}", given, "nothing beside --adapter: a saved adapter has its own")
    require(
        args.lora_rank is None or args.lora_rank >= 1, "--lora-rank", args.lora_rank, "a whole number of at least 1"
    )
    require(args.lora_alpha is None or args.lora_alpha > 0, "--lora-alpha", args.lora_alpha, "a number above 0")
    require(
        args.lora_dropout is None or 0 <= args.lora_dropout < 1,
        "--lora-dropout",
        args.lora_dropout,
        "0, or a share below 1",
    )
    require(args.dropout is None, "--dropout", args.dropout, "nothing: --lora-dropout is the adapters'")
    require(
        args.model != "tiny" and not args.model.endswith(".json"),
        "--model",
        args.model,
        "a model with weights: LoRA adapts what is there",
    )


def causal_model(args: argparse.Namespace, tokenizer: Any) -> tuple[Any, Any]:
    """Return the model of `--model` with adapters, as `pipecomp.initialize` takes it, and its config.

    Each rank reads only its own stage of the folder.

    Args:
        args: The recipe's arguments.
        tokenizer: Not used; `text.causal_model` takes one.

    Raises:
        ConfigError: For a model or an adapter that is not there, or layers that the model does not have.
        SplitError: For a model that cannot be split.
    """
    import peft

    from pipecomp.stages import pretrained
    from pipecomp.stages.partition.loading import skeleton

    targets = args.lora_targets
    lora = args.adapter or peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=RANK if args.lora_rank is None else args.lora_rank,
        lora_alpha=ALPHA if args.lora_alpha is None else args.lora_alpha,
        lora_dropout=DROPOUT if args.lora_dropout is None else args.lora_dropout,
        target_modules=targets[0] if targets == ["all-linear"] else targets,
    )
    model_config(args.model)
    source = pretrained(args.model, lora=lora)
    if targets is not None:
        try:
            skeleton(source)
        except PipecompError:
            raise
        except ValueError as error:  # peft's
            raise ConfigError("--lora-targets", targets, f"layers of the model ({error})") from error
    return source, source.config


def meanings(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Return what `resume.what_is_trained` asks for: an adapter that is given has settings of its own.

    The model is compared too, as its weights are not in checkpoints: by the last part of its name, since a folder may
    be elsewhere on another machine.

    Args:
        args: The recipe's arguments.
        model: From `causal_model`.
    """
    config = model.adapter.config
    targets = config.target_modules
    return {
        "--model": Path(args.model).absolute().name,
        "--lora-rank": config.r,
        "--lora-alpha": config.lora_alpha,
        "--lora-dropout": config.lora_dropout,
        "--lora-targets": targets if targets is None or isinstance(targets, str) else sorted(targets),
    }
