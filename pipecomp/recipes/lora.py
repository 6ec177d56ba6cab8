"""LoRA in recipes: arguments, and the model with adapters."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipecomp.errors import ConfigError, PipecompError, require
from pipecomp.recipes.text import model_config

# Defaults of a new adapter. The parser's default is None, so that values given together with --adapter are found.
RANK, ALPHA, DROPOUT = 8, 16, 0.0
ALL_LINEAR = "all-linear"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of LoRA to a recipe's."""
    add = parser.add_argument
    add("--lora-rank", type=int, metavar="R", help=f"rank of the adapters (default {RANK})")
    add("--lora-alpha", type=float, metavar="A", help=f"adapters are scaled by A / R (default {ALPHA})")
    add("--lora-dropout", type=float, metavar="P", help=f"dropout before the adapters (default {DROPOUT:g})")
    targets = "layers with adapters, by the ends of their names, or all-linear (default: peft's for the model)"
    add("--lora-targets", nargs="+", metavar="NAME", help=targets)
    add("--dora", action="store_true", help="also train a magnitude for each output of an adapted layer (DoRA)")
    add("--rslora", action="store_true", help="scale adapters by A / sqrt(R) (rank-stabilized LoRA)")
    add("--adapter", metavar="FOLDER", help="continue training a saved adapter instead of a new one")
    add("--bits", type=int, choices=(4, 8), help="bits of the model's linear layers, by bitsandbytes (default: plain)")
    compute = "dtype in which layers of 4 bits compute (default float32)"
    add("--compute-dtype", choices=("float32", "bfloat16"), default="float32", help=compute)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigError for arguments that are wrong regardless of data and model."""
    for name in ("rank", "alpha", "dropout", "targets") if args.adapter is not None else ():
        value = getattr(args, f"lora_{name}")
        require(value is None, f"--lora-{name}", value, "not set with --adapter: a saved adapter has its own")
    for name in ("dora", "rslora") if args.adapter is not None else ():
        require(not getattr(args, name), f"--{name}", True, "not set with --adapter: a saved adapter has its own")
    require(
        args.lora_rank is None or args.lora_rank >= 1, "--lora-rank", args.lora_rank, "a whole number of at least 1"
    )
    require(args.lora_alpha is None or args.lora_alpha > 0, "--lora-alpha", args.lora_alpha, "a number above 0")
    require(
        args.lora_dropout is None or 0 <= args.lora_dropout < 1,
        "--lora-dropout",
        args.lora_dropout,
        "a number from 0 to below 1",
    )
    require(args.dropout is None, "--dropout", args.dropout, "not set: use --lora-dropout for the adapters")
    require(
        args.model != "tiny" and not args.model.endswith(".json"),
        "--model",
        args.model,
        "a model with trained weights, which LoRA adapts",
    )


def causal_model(args: argparse.Namespace, tokenizer: Any) -> tuple[Any, Any]:
    """Return the model of `--model` with adapters, as `pipecomp.initialize` takes it, and its config.

    Each rank reads only its own stage of the folder.

    Args:
        args: The recipe's arguments.
        tokenizer: Not used; for the signature of `text.causal_model`.

    Raises:
        ConfigError: If there is no such model or adapter, or the model does not have the layers.
        SplitError: If the model cannot be split.
    """
    import peft

    from pipecomp.stages import pretrained
    from pipecomp.stages.partition.loading import skeleton
    from pipecomp.stages.partition.quantization import standard_config

    targets = args.lora_targets
    lora = args.adapter or peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=RANK if args.lora_rank is None else args.lora_rank,
        lora_alpha=ALPHA if args.lora_alpha is None else args.lora_alpha,
        lora_dropout=DROPOUT if args.lora_dropout is None else args.lora_dropout,
        target_modules=targets[0] if targets == [ALL_LINEAR] else targets,
        use_dora=args.dora,
        use_rslora=args.rslora,
    )
    model_config(args.model)
    bits = standard_config(args.bits, args.compute_dtype)
    if targets is not None and targets != [ALL_LINEAR]:
        _check_targets(targets, skeleton(pretrained(args.model)))
    source = pretrained(args.model, lora=lora, quantization_config=bits)
    if args.adapter is not None:
        _check_adapter(args, source)
        return source, source.config
    try:
        skeleton(source)
    except PipecompError:
        raise
    except ValueError as error:  # of peft, for a model of which it knows no layers
        raise ConfigError("--lora-targets", targets, f"layers of the model, or all-linear ({error})") from error
    return source, source.config


def _check_adapter(args: argparse.Namespace, source: Any) -> None:
    """Raise ConfigError unless the names and shapes of a saved adapter are those of the model."""
    from pipecomp.stages.partition import adapters
    from pipecomp.stages.partition.loading import skeleton

    try:
        whole = skeleton(source)
        adapters.read_saved(source.adapter, whole, adapters.saved_names(whole, source.adapter), whole.state_dict())
    except ValueError as error:  # of stages, and of peft for names of layers
        allowed = f"an adapter of {args.model}, not of {source.adapter.config.base_model_name_or_path} ({error})"
        raise ConfigError("--adapter", args.adapter, allowed) from error


def _check_targets(targets: Sequence[str], model: Any) -> None:
    """Raise ConfigError for a target that no layer's name ends with; peft refuses it only if no other one is found."""
    names = [name for name, module in model.named_modules() if name and not list(module.children())]
    linear = [name for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D")]
    ends = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in linear))
    for target in targets:
        found = any(f".{name}".endswith(f".{target}") for name in names)
        require(found, "--lora-targets", target, f"all-linear, or ends of names of layers: {', '.join(ends)}")


def meanings(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Return the `meanings` of `resume.what_is_trained`, with the settings of a new or a saved adapter.

    Checkpoints do not have the base model's weights, so the model is compared too: by the last part of its name, since
    its folder may differ between machines.

    Args:
        args: The recipe's arguments.
        model: From `causal_model`.
    """
    config = model.adapter.config
    targets = config.target_modules
    return {
        "--model": Path(args.model).absolute().name,
        "--bits": args.bits,
        "--lora-rank": config.r,
        "--lora-alpha": config.lora_alpha,
        "--lora-dropout": config.lora_dropout,
        "--dora": bool(config.use_dora),
        "--rslora": bool(config.use_rslora),
        "--lora-targets": targets if targets is None or isinstance(targets, str) else sorted(targets),
    }
