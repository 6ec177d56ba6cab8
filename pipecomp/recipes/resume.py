"""Checkpoints of recipes, and resuming from them.

A supervisor can restart the same command: with `--resume auto` it continues from the last checkpoint that is good on
all machines, or starts from the beginning if there is none. A folder holds the checkpoints of one run: without
`--resume` it must have none, and a resumed run deletes those of later steps before it writes its own.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipecomp.checkpoint.run_id import model_values
from pipecomp.checkpoint.writing import private_files
from pipecomp.distributed.collectives import gathered
from pipecomp.distributed.consistency import differences
from pipecomp.distributed.launch_env import retry_after_restart
from pipecomp.errors import ConfigError, require, writable
from pipecomp.report.recorder import RUN, read_object
from pipecomp.utils.files import lock_file

# Arguments that may differ when a run resumes: outputs, the length of training, the starting point, and those compared
# by content: data files by a hash, model and seed with the configurations.
MAY_DIFFER = frozenset(
    {
        "metrics",
        "out",
        "recipe",
        "report",
        "report_to",
        "tensorboard",
        "trace",
        "save",
        "checkpoint",
        "save_every",
        "store",
        "keep",
        "resume",
        "save_on_signal",
        "overwrite",
        "epochs",
        "rounds",
        "max_steps",
        "eval_file",
        "stages",
        "weights",
        "adapter",
        "local_rank",
        "deepspeed_config",
        "train_file",
        "dataset",
        "model",
        "tokenizer",
        "seed",
    }
)
DATA, SAMPLES, REPLICAS, STAGES = "hash of the training data", "samples of a step", "replicas", "stages"
KEPT = 2  # checkpoints, by default
OVERWRITE = "--overwrite replaces the results of the earlier run"
_locked: set[str] = set()  # folders, by this process
# Settings of transport and storage that do not change what is trained: a run that timed out may get a longer timeout.
_TRANSPORT_AND_STORAGE = (
    "pipecomp.transport.",
    "pipecomp.elastic.",
    "pipecomp.in_flight",
    "pipecomp.layout",
    "pipecomp.store.prefetch",
    "pipecomp.store.drift_check",
    "pipecomp.store.in_checkpoints",
    "pipecomp.store.run",
    "pipecomp.store.overwrite",
    "pipecomp.store.on_write_error",
)
_BATCH_SIZES = ("gradient_accumulation_steps", "train_batch_size")  # they depend on the number of replicas
_OF_LINKS, _OF_GRADIENTS = ("pipecomp.activations.", "pipecomp.store."), ("pipecomp.gradients.",)


def add_arguments(parser: argparse.ArgumentParser, at_least: Callable[[int], Callable[[str], int]]) -> None:
    """Add the arguments of this module."""
    add = parser.add_argument
    add(
        "--checkpoint",
        metavar="FOLDER",
        help="write checkpoints there, after every epoch and at the end; a new run needs a folder without checkpoints",
    )
    add("--save-every", type=at_least(1), metavar="N", help="write checkpoints every N optimizer steps instead")
    add("--keep", type=at_least(1), metavar="N", help="number of checkpoints to keep (default 2)")
    add(
        "--save-on-signal",
        action=argparse.BooleanOptionalAction,
        help="after SIGTERM or Ctrl-C write a checkpoint and exit with status 75 (default with --checkpoint)",
    )
    add("--resume", choices=("auto",), help="resume from the last good checkpoint, or start if there is none")
    add("--overwrite", action="store_true", help="start over in folders with the results of an earlier run")


def what_is_trained(args: argparse.Namespace, meanings: Mapping[str, Any], model: Any = None) -> dict[str, Any]:
    """Return the values that identify a run besides DeepSpeed's configuration.

    Args:
        args: The recipe's arguments; those in `MAY_DIFFER` are left out.
        meanings: Values that replace arguments or add to them, such as a hash of the data or an argument's default.
        model: A Hugging Face configuration.

    Returns:
        JSON values by flat keys.
    """
    own = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items() if name not in MAY_DIFFER}
    of_model = {f"model.{key}": value for key, value in model_values(model).items()}
    return dict(json.loads(json.dumps({**own, **of_model, **meanings}, sort_keys=True, default=str)))


def data_facts(training: Any, held_out: Any) -> dict[str, str | None]:
    """Return hashes of the data, which all ranks compare before they make an engine. Data have a `digest()`."""
    return {
        "the training data or the tokenizer (a hash)": training.digest(),
        "the held-out data (a hash)": None if held_out is None else held_out.digest(),
    }


def make_folder(argument: str, path: str) -> None:
    """Make an argument's folder before training, readable by its owner only, to find write errors early.

    Raises:
        ConfigError: If it cannot be made.
    """
    with writable(argument, path), private_files():
        Path(path).mkdir(parents=True, exist_ok=True)


def check_no_results(out: str | Path | None, model: str | Path | None, key: str | None = None) -> None:
    """Check that a new run overwrites nothing that another has finished.

    Args:
        out: The run's folder, or None.
        model: The folder of the trained model, or None.
        key: The argument for errors; None for --out and --save.

    Raises:
        ConfigError: If there is a model, or a finished run.
    """
    from pipecomp.trainer.checkpoints import has_model  # imports transformers, which takes seconds

    hint = f"{OVERWRITE}; another folder keeps them"
    if model is not None:
        require(not has_model(model), key or "--save", str(model), "a folder without a trained model", hint)
    if out is not None:
        finished = read_object(Path(out) / RUN, []).get("status") == "finished"
        require(not finished, key or "--out", str(out), "a folder without a finished run", hint)


def lock_folder(argument: str, path: str | Path) -> None:
    """Make an argument's folder and lock it until this process ends. Rank 0 calls it.

    The lock keeps two runs from deleting and overwriting each other's files.

    Raises:
        ConfigError: If it cannot be made, or is in use by another run.
    """
    folder = os.path.realpath(path)
    if folder in _locked:
        return
    with writable(argument, path):
        os.makedirs(folder, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)

    def lock() -> None:
        if not lock_file(handle):
            raise ConfigError(argument, str(path), "another folder: this one is in use by another run")

    try:
        retry_after_restart(lock, lambda error: isinstance(error, ConfigError))
    except OSError:  # the file system locks no folders
        os.close(handle)
        return
    except ConfigError:
        os.close(handle)
        raise
    _locked.add(folder)


class RunCheckpoints:
    """A run's checkpoints.

    Args:
        args: The recipe's arguments.
        config: DeepSpeed's configuration.
        settings: The same as JSON values by flat keys; a resumed run must have equal ones.
        trained: From `what_is_trained`; a resumed run must have equal values.
        auto: Keys of the settings that were "auto" in the configuration file.

    Attributes:
        folder: Folder of all checkpoints; None for a run without.
        found: The checkpoint that this run resumes from; None for a new run.
        keep: The number of checkpoints to keep.
        on_signal: The run writes a checkpoint after a signal.

    Raises:
        ConfigError: If arguments have no effect, or the configuration cannot be saved.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        config: Mapping[str, Any],
        settings: Mapping[str, Any],
        trained: Mapping[str, Any],
        auto: Sequence[str] = (),
    ) -> None:
        self.folder = None if args.checkpoint is None else Path(args.checkpoint)
        self.found: str | None = None
        self.keep, self._every = args.keep or KEPT, args.save_every
        self._settings, self._trained, self._auto = dict(settings), dict(trained), tuple(auto)
        self._resume, self._overwrite = args.resume is not None, args.overwrite
        self.on_signal = self.folder is not None and args.save_on_signal is not False
        if self.folder is None:
            for name in ("save_every", "keep", "resume", "save_on_signal"):
                require(
                    getattr(args, name) is None,
                    f"--{name.replace('_', '-')}",
                    getattr(args, name),
                    "only with --checkpoint",
                )
            return
        half = config.get("bf16", {}).get("enabled", False)
        if half and not config.get("zero_optimization", {}).get("stage", 0):
            allowed = "with bf16 only with zero_optimization.stage 1: DeepSpeed cannot load bf16 checkpoints of stage 0"
            raise ConfigError("--checkpoint", args.checkpoint, allowed)
        make_folder("--checkpoint", args.checkpoint)

    @property
    def step(self) -> int:
        """Step of the checkpoint that this run resumes from; 0 for a new run."""
        return 0 if self.found is None else int(self.found.rpartition("-")[2])

    def find(self) -> str:
        """Find the checkpoint to resume from and set `found`. Every rank must call this.

        Returns:
            A text for the report.

        Raises:
            ConfigError: If the last good checkpoint's run has other settings. On every rank, if a new run finds
                checkpoints on any machine; or if a resumed run finds good checkpoints on some machines only, which a
                run from the beginning would delete.
        """
        from pipecomp.trainer.checkpoints import last_good, read

        if self.folder is None:
            return ""
        self._check_unused(self.folder)
        if not self._resume or self._overwrite:
            return ""
        self.found, skipped = last_good("--checkpoint", str(self.folder), None)
        if self.found is not None:
            self._check(read(self.found, None, None).run)
        text = f"continues after step {self.step}" if self.step else "no good checkpoint: starts from the beginning"
        return text + "".join(f"; skipped step {step}: {problem}" for step, problem in sorted(skipped.items()))

    def _check_unused(self, folder: Path) -> None:
        from pipecomp.trainer.checkpoints import list_checkpoints

        first = os.environ.get("LOCAL_RANK", "0") == "0"
        own = [[step for step, _ in list_checkpoints(str(folder))], [p.name for p in folder.glob("global_step*")]]
        by_rank = gathered(own if first else [[], []])
        steps, older = (sorted({value for of_rank in by_rank for value in of_rank[k]}) for k in (0, 1))
        hint = f"It has {', '.join(older)} of an earlier version, which engine.load_checkpoint reads"
        require(not older, "--checkpoint", str(folder), "a folder without them", hint)
        listed = ", ".join(map(str, steps))
        hint = f"It has step {listed}; --resume auto resumes from the last good one"
        unused = not steps or self._resume or self._overwrite
        require(unused, "--checkpoint", str(folder), "a folder without checkpoints", f"{hint}. {OVERWRITE}")

    def _check(self, run: Mapping[str, Any]) -> None:
        """Compare the settings of a checkpoint's run with this run's, before files are overwritten."""
        saved, trained = run.get("settings", {}), run.get("trained", {})
        # Another version may have recorded fewer of these values, so only common ones are compared.
        both = (trained.keys() & self._trained.keys()) - {REPLICAS, STAGES}
        stages, replicas = ({run.get(what) for run in (trained, self._trained)} for what in (STAGES, REPLICAS))
        alone = {run.get(STAGES) == run.get(REPLICAS) == 1 for run in (trained, self._trained)}
        not_compared = (*_TRANSPORT_AND_STORAGE, *self._auto)  # values of "auto" follow from the number of steps
        if SAMPLES in both and len(replicas) > 1:
            not_compared += _BATCH_SIZES
        # A single stage, replica or process exchanges nothing, and configurations with such settings are invalid.
        if 1 in stages and len(stages) > 1:
            not_compared += _OF_LINKS
        if (1 in replicas and len(replicas) > 1) or len(alone) > 1:
            not_compared += _OF_GRADIENTS
        keys = {key for key in saved.keys() | self._settings.keys() if not key.startswith(not_compared)}
        keys -= {key for key in keys if key.startswith("pipecomp.") and key not in saved}  # of a later version
        differ = _differences(saved, self._settings, keys) + _differences(trained, self._trained, both)
        if differ:
            listed = "; ".join(differ).replace("on rank 0", "in the checkpoint").replace("on rank 1", "in this run")
            remedy = f"To start over, give --overwrite or another folder than {self.folder}"
            raise ConfigError("--resume", "auto", f"the settings of the checkpoint: {listed}. {remedy}")

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint records of the run."""
        return {"settings": self._settings, "trained": self._trained}

    def is_due(self, step: int, *, ends_epoch: bool, last: bool) -> bool:
        """Return whether a checkpoint is due after step `step`."""
        return self.folder is not None and (last or (ends_epoch if self._every is None else step % self._every == 0))


def loaded_text(resumed: Any) -> str:
    """Describe for the report what a checkpoint has restored. resumed: `engine.resumed`."""
    if resumed is None:
        return "all state restored"
    if resumed.exact:
        return "with the cached activations of that step: losses equal those of an uninterrupted run"
    return "with the cached activations that both ends of each link have in common; others are dropped"


def _differences(saved: Mapping[str, Any], own: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    # Compared as values: 4 is 4.0.
    unlike = {key for key in keys if key not in saved or key not in own or saved[key] != own[key]}
    return differences([{key: value for key, value in of.items() if key in unlike} for of in (saved, own)])
