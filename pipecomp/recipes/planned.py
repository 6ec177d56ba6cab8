"""What each rank of `pipecomp train` does: measure, plan, write the configuration down, and train on a text.

It is a recipe for causal language models whose DeepSpeed configuration is not given but made: batch sizes, cuts, bits,
or no compression, from what the ranks measure of each other. `pipecomp train` starts it (pipecomp/cli/train.py).
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from pipecomp.distributed import preemption

if __name__ == "__main__":
    preemption.end_quietly()  # for the many seconds that the imports below take

import torch
import torch.distributed as dist
from rich.console import Console

from pipecomp.checkpoint import manifest
from pipecomp.distributed import rendezvous
from pipecomp.distributed.collectives import broadcast
from pipecomp.distributed.placement import GLOO_VARIABLE, interface_towards, is_loopback, loopback
from pipecomp.distributed.rendezvous import KEYS, check_processes
from pipecomp.errors import ConfigError, DataError, require, writable
from pipecomp.netlab.software import throttle_to
from pipecomp.plan.command import run_plan
from pipecomp.plan.options import PlanOptions
from pipecomp.plan.report import precision
from pipecomp.plan.search import AVERAGES
from pipecomp.recipes import language, run, text
from pipecomp.recipes.resume import hold_folder
from pipecomp.report.recorder import CHECKPOINTS, PLAN
from pipecomp.utils.files import atomic_write_text

_BATCH = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_STEPS = "scheduler.params.total_num_steps"
MOST_SAMPLES = 32  # of a step, where nobody says: fewer where the text has fewer


def arguments() -> argparse.ArgumentParser:
    """The command line: a recipe's, where --deepspeed_config names a file to write."""
    parser = run.arguments("train", "Fine-tune a causal language model on a text, by a plan made from measurements.")
    text.add_arguments(parser)
    language.add_document_arguments(parser)
    parser.add_argument("--batch", type=run.at_least(1), metavar="N", help="samples of a step, over all replicas")
    parser.add_argument("--lr", type=float, required=True, metavar="RATE", help="AdamW's rate, after its warm-up")
    parser.add_argument("--store", metavar="FOLDER", help="for cached activations (default: in --run)")
    parser.add_argument("--gradients", choices=AVERAGES, help="how those of replicas and of tied weights travel")
    parser.add_argument("--no-tie", action="store_true", help="each stage trains its copy of tied weights apart")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="training precision")
    return parser


def main(args: argparse.Namespace) -> None:
    """One rank of the run."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if not rendezvous.computes_on_cpu():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    documents = holds_documents(args)
    choose_interface()
    rendezvous.start_processes(args.seed)
    with rendezvous.all_ranks().collective_errors():
        if args.model != "tiny":
            text.model_config(args.model)  # before the tokenizer, which is looked for in the same place
    try:
        language.fine_tune(
            args,
            language.read_documents if documents else text.read,
            documents=documents,
            configure=configure,
        )
    except ConfigError as error:
        raise in_words_of_train(error, args.run) from error


def holds_documents(args: argparse.Namespace) -> bool:
    """Say whether the data are JSON lines. ConfigError if some of the files are, and others are not."""
    files = {"--data": args.train_file or [], "--eval": [args.eval_file] if args.eval_file is not None else []}
    kinds = {language.is_json_lines(file) for of in files.values() for file in of}
    if len(kinds) > 1:
        other = not language.is_json_lines(files["--data"][0])
        key, file = next((k, f) for k, of in files.items() for f in of if language.is_json_lines(f) == other)
        raise ConfigError(key, file, "files of one kind with the first --data: all .jsonl or .json, or all plain text")
    return True in kinds


def in_words_of_train(error: ConfigError, folder: str) -> ConfigError:
    """Name what people gave `pipecomp train`, where an error names what it has made of that for recipes.

    Args:
        error: Of a recipe.
        folder: Of --out.
    """
    got = folder if error.key == "--resume" else error.got
    key = {"--block-size": "--tokens", "--resume": "--out", "--run": "--out"}.get(error.key, error.key)
    allowed = error.allowed.replace("--block-size", "--tokens")
    return ConfigError(key, got, allowed.replace(_STEPS, f"{_STEPS} (by --epochs, --max-steps)"))


def choose_interface() -> None:
    """Let gloo use the interface that leads to rank 0, unless GLOO_SOCKET_IFNAME or keys settle it.

    By itself gloo takes the address of the host name, which many systems set to 127.0.1.1.
    """
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if os.environ.get(GLOO_VARIABLE) or os.environ.get(KEYS) or is_loopback(master):
        return
    found = interface_towards(master)
    if found is not None and found != loopback():
        os.environ[GLOO_VARIABLE] = found


def configure(args: argparse.Namespace, config: Any, size: int, samples: int) -> list[int]:
    """Plan the run, or take the plan of the run that goes on here, and write its configuration to --deepspeed_config.

    Args:
        args: From a parser of `arguments`.
        config: The model's, of Hugging Face.
        size: Tokens of a sample.
        samples: In the training data.

    Returns:
        Where the model is cut.

    Raises:
        ConfigError: On every rank, for a batch that cannot be, or a folder that cannot be written, is another run's
            meanwhile, or has checkpoints that this run does not go on from.
    """
    folder, world = Path(args.run), dist.get_world_size()
    stages = args.stages or world
    ranks = rendezvous.all_ranks()
    with ranks.collective_errors():
        check_processes("--stages", stages)
        check_unused(args, folder)
        batch = batch_of(args.batch, samples, world // stages)
        with writable("--run", folder):
            folder.mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0:
            hold_folder("--run", folder)
    with ranks.collective_errors():
        made = _earlier(args, folder, stages, world) if dist.get_rank() == 0 else None
    made = broadcast(made)
    if made is None:
        with ranks.collective_errors():
            options = PlanOptions(
                model=config,
                stages=stages,
                batch=batch,
                tokens=size,
                dtype=args.dtype,
                tie=not args.no_tie,
                gradients=args.gradients,
                measure=True,
                store=Path(args.store or folder / "messages"),
                dropout=args.dropout,
                one_pass=args.epochs == 1,
            )
            made = run_plan(Console(), options, throttle_to, settings=False)
            if made is not None:
                with writable("--run", folder):
                    atomic_write_text(folder / PLAN, json.dumps(made, indent=2) + "\n")
        made = broadcast(made)
    written, file = json.dumps(ds_config(args, made["config"], folder), indent=2) + "\n", Path(args.deepspeed_config)
    for rank in range(world):  # one after the other: machines may share the folder, too
        with ranks.collective_errors(), writable("--run", folder):
            if rank == dist.get_rank() and not (file.is_file() and file.read_text() == written):
                atomic_write_text(file, written)
    cuts: list[int] = made["cuts"]
    return cuts


def check_unused(args: argparse.Namespace, folder: Path) -> None:
    """Raise ConfigError where a run that keeps no checkpoints would overwrite what those in its folder need."""
    there = args.checkpoint is None and manifest.steps(folder / CHECKPOINTS)
    allowed = (
        f"a number, as {folder} has checkpoints: the run goes on from the last good one. To begin anew, take another "
        "folder"
    )
    require(not there, "--save-every", None, allowed)


def batch_of(given: int | None, samples: int, replicas: int = 1) -> int:
    """Choose the samples of a step, so that replicas can share them.

    Raises ConfigError if the text has fewer than were asked for, DataError if it has fewer than there are replicas.
    """
    if given is None:
        most = next((n for n in (MOST_SAMPLES, 16, 8, 4, 2, 1) if n <= samples), 0)
        if samples < replicas:
            raise DataError(f"the text makes {samples} samples, too few for {replicas} replicas")
        return max(most // replicas, 1) * replicas
    require(given <= samples, "--batch", given, f"at most {samples}, the samples that the text makes")
    return given


def ds_config(args: argparse.Namespace, planned: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make DeepSpeed's configuration. planned: what the plan says of batches, links and gradients."""
    section = dict(planned["pipecomp"])
    if section.get("activations", {}).get("method") == "aqsgd":
        section["store"] = {"path": args.store or str(folder / "messages"), **section.get("store", {})}
    # What a plan of before says may be something else: going on is refused then.
    if args.gradients is not None:
        section["gradients"] = {"method": args.gradients}
    if args.no_tie:
        section["tie"] = False
    warmup = {"warmup_type": "linear", "warmup_num_steps": "auto", "warmup_max_lr": "auto", "total_num_steps": "auto"}
    return {
        **{key: planned[key] for key in _BATCH if key in planned},
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupDecayLR", "params": warmup},
        "gradient_clipping": 1.0,
        **precision(args.dtype),
        "pipecomp": section,
    }


def _earlier(args: argparse.Namespace, folder: Path, stages: int, world: int) -> dict[str, Any] | None:
    """Read the plan of the run that goes on in this folder; None where there is none to go on.

    Raises ConfigError for a plan of other stages or processes: its cuts and batch sizes are for those.
    """
    file = folder / PLAN
    if args.resume is None or not any(map(manifest.finished, manifest.steps(args.checkpoint).values())):
        return None
    try:
        made = json.loads(file.read_text())
        found = {"config": made["config"], "cuts": made["cuts"]}
        K, replicas = len(found["cuts"]) - 1, made["chosen"]["replicas"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        allowed = f"a folder with the {PLAN} that its run has written, where rank 0 was then ({error})"
        raise ConfigError("--run", args.run, allowed) from error
    anew = f"as in the plan of the run that goes on in {folder}. To begin anew, take another folder"
    require(stages == K, "--stages", stages, f"{K}, {anew}")
    require(K * replicas == world, "number of processes", world, f"{K * replicas}, {anew}")
    return found


if __name__ == "__main__":
    run.run(main, arguments())
