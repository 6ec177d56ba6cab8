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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipecomp.checkpoint import manifest
from pipecomp.checkpoint.run_id import model_values
from pipecomp.checkpoint.writing import private_files
from pipecomp.data import DataPosition
from pipecomp.distributed.collectives import gathered, while_others_wait
from pipecomp.distributed.consistency import differences
from pipecomp.distributed.preemption import say_here
from pipecomp.errors import CheckpointError, ConfigError, require, writable
from pipecomp.interfaces import TrainingEngine
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
STEPS = "steps of the run"  # compared if the schedule depends on them
_STATE_KEY, _TRAINED_KEY, _DUE_KEY = "recipe", "recipe_trained", "recipe_evaluation_due"
_MachineCheckpoints = tuple[list[int] | None, dict[int, str]]
_locked: set[str] = set()  # folders, by this process
# Settings of transport and storage that do not change what is trained: a run that timed out may get a longer timeout.
_TRANSPORT_AND_STORAGE = (
    "pipecomp.transport.",
    "pipecomp.in_flight",
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
    try:
        locked = lock_file(handle)
    except OSError:  # the file system locks no folders
        os.close(handle)
        return
    if not locked:
        os.close(handle)
        raise ConfigError(argument, str(path), "another folder: this one is in use by another run")
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
        step: Step of the checkpoint that this run resumes from; 0 for a new run.
        on_signal: The run writes a checkpoint after a signal.
        evaluation_due: The run that wrote the checkpoint was stopped before the evaluation after its last step.

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
        self._every, self._keep = args.save_every, args.keep or 2
        self._settings, self._trained, self._auto = dict(settings), dict(trained), tuple(auto)
        self._resume = args.resume is not None
        self.on_signal = self.folder is not None and args.save_on_signal is not False
        self.evaluation_due = False
        self._own = False  # all checkpoints of later steps are this run's
        self.step = 0
        self._position: DataPosition | None = None
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

    def find(self) -> str:
        """Find the checkpoint to resume from and set `step`. Every rank must call this.

        One rank of each machine reads its checkpoints, newest first, until one is good on all machines.

        Returns:
            A text for the report.

        Raises:
            ConfigError: If the last good checkpoint's run has other settings. On every rank, if a new run finds
                checkpoints on any machine; or if a resumed run finds good checkpoints on some machines only, which a
                run from the beginning would delete.
        """
        if self.folder is None:
            return ""
        if not self._resume:
            self._check_unused(self.folder)
            return ""
        found = _read_until_good(self.folder)
        _check_everywhere(self.folder, found)
        self.step = max(_on_all(found), default=0)
        problems = {step: problem for _, of_rank in found for step, problem in of_rank.items() if step > self.step}
        if self.step:
            self._check(self.folder / f"global_step{self.step}")
        text = f"continues after step {self.step}" if self.step else "no good checkpoint: starts from the beginning"
        return text + "".join(f"; skipped step {step}: {problem}" for step, problem in sorted(problems.items()))

    def _check_unused(self, folder: Path) -> None:
        own = list(manifest.steps(folder)) if _first_of_machine() else []
        steps = sorted({step for steps in gathered(own) for step in steps})
        listed = ", ".join(map(str, steps))
        hint = f"It has step {listed}; --resume auto resumes from the last good one"
        require(not steps, "--checkpoint", str(folder), "a folder without checkpoints", hint)

    def _check(self, folder: Path) -> None:
        """Compare the checkpoint's settings with this run's, before it is loaded or files are overwritten."""
        from pipecomp.checkpoint.reshard import read_state, saved_position

        state = read_state(folder)
        if state is None:
            return  # this machine has no stage's file; loading raises the error
        saved = state.get(_STATE_KEY, {})
        # Older versions saved none or fewer of these values, so only common ones are compared.
        trained = state.get(_TRAINED_KEY, {})
        pipeline = state.get("pipecomp", {}).get("pipeline")
        if pipeline is not None and SAMPLES in trained:
            accumulation = trained[SAMPLES] // (pipeline["micro_batch"] * pipeline["replicas"])
            self._position = saved_position(state["pipecomp"], accumulation)
        both = (trained.keys() & self._trained.keys()) - {REPLICAS, STAGES}
        stages, replicas = ({run.get(what) for run in (trained, self._trained)} for what in (STAGES, REPLICAS))
        alone = {run.get(STAGES) == run.get(REPLICAS) == 1 for run in (trained, self._trained)}
        not_compared: tuple[str, ...] = _TRANSPORT_AND_STORAGE
        if len(replicas) > 1:
            both -= {STEPS}
        if SAMPLES in both and len(replicas) > 1:
            # The samples dropped at the end of an epoch differ too, and with them the values of "auto".
            not_compared += _BATCH_SIZES + self._auto
        # A single stage, replica or process exchanges nothing, and configurations with such settings are invalid.
        if 1 in stages and len(stages) > 1:
            not_compared += _OF_LINKS
        if (1 in replicas and len(replicas) > 1) or len(alone) > 1:
            not_compared += _OF_GRADIENTS
        keys = {key for key in saved.keys() | self._settings.keys() if not key.startswith(not_compared)}
        differ = _differences(saved, self._settings, keys) + _differences(trained, self._trained, both)
        if differ:
            listed = "; ".join(differ).replace("on rank 0", "in the checkpoint").replace("on rank 1", "in this run")
            remedy = f"To start over, choose another folder than {self.folder}"
            raise ConfigError("--resume", "auto", f"the settings of the checkpoint: {listed}. {remedy}")

    def position(self) -> DataPosition | None:
        """Return the place in the training data of the checkpoint of `find`; None if it has none.

        Every rank must call this.
        """
        saved = gathered(None if self._position is None else asdict(self._position))
        return next((DataPosition.of(position) for position in saved if position is not None), None)

    def load(self, engine: TrainingEngine) -> str:
        """Load the checkpoint of `find`, if there is one. Every rank must call this.

        Returns:
            A text for the report.
        """
        if not self.step:
            return ""
        _, state = engine.load_checkpoint(str(self.folder), tag=f"global_step{self.step}")
        self.evaluation_due = bool((state or {}).get(_DUE_KEY))
        if engine.resumed is None:
            return "all state restored"
        if engine.resumed.exact:
            return "with the cached activations of that step: losses equal those of an uninterrupted run"
        return "with the cached activations that both ends of each link have in common; others are dropped"

    def is_due(self, step: int, *, ends_epoch: bool, last: bool) -> bool:
        """Return whether a checkpoint is due after step `step`."""
        return self.folder is not None and (last or (ends_epoch if self._every is None else step % self._every == 0))

    def save(self, engine: TrainingEngine, *, last: bool) -> bool:
        """Write a checkpoint that is due. Every rank must call this. Returns False if it could not be written."""
        saved = self.save_now(engine)
        if not saved:
            say_here(
                "the run ends without this checkpoint"
                if last
                else "the run continues without this checkpoint, and tries again when the next one is due"
            )
        return saved

    def save_now(self, engine: TrainingEngine, *, evaluation_due: bool = False) -> bool:
        """Write a checkpoint, if there is a folder for it. Every rank must call this.

        If the disk is full, all older checkpoints but the last good one are deleted before a second attempt.

        Args:
            engine: The engine.
            evaluation_due: The evaluation after this step is pending; see `load`.

        Returns:
            False if it could not be written; every rank prints the reason.
        """
        if self.folder is None:
            return True
        if not self._own:
            self._remove_later(self.folder)
        state: dict[str, Any] = {_STATE_KEY: self._settings, _TRAINED_KEY: self._trained}
        if evaluation_due:
            state[_DUE_KEY] = True
        try:
            engine.save_checkpoint(str(self.folder), client_state=state)
        except CheckpointError as error:
            say_here(f"{error}. Trying again after deleting all older checkpoints but the last good one")
            folder = self.folder
            while_others_wait(lambda: manifest.keep_last_good(folder) if _first_of_machine() else None)
            try:
                engine.save_checkpoint(str(self.folder), client_state=state)
            except CheckpointError as again:
                say_here(str(again))
                return False
        if _first_of_machine():
            manifest.remove_old(self.folder, self._keep, written=engine.global_steps)
        return True

    def _remove_later(self, folder: Path) -> None:
        """Delete checkpoints of later steps, left by an earlier run, which would count as this run's last ones."""
        if _first_of_machine():
            manifest.remove_after(folder, self.step)
        gathered(None)  # all machines finish first, because the next checkpoint may have the same name
        self._own = True


def _read_until_good(folder: Path) -> list[_MachineCheckpoints]:
    """Read checkpoints on each machine, newest first, until one is good on all machines.

    Returns:
        By rank: the steps of good checkpoints (on a machine's first rank, else None), and the problems of others.
    """
    first = _first_of_machine()
    unread = list(manifest.steps(folder).items()) if first else []
    good, bad = list[int](), dict[int, str]()

    def read() -> None:
        if unread:
            step, path = unread.pop()
            problem = manifest.problem(path)
            if problem is None:
                good.append(step)
            else:
                bad[step] = problem

    before = None
    while True:
        while_others_wait(read)
        found = gathered((list(good) if first else None, dict(bad)))
        if found == before or _on_all(found):
            return found
        before = found


def _on_all(found: list[_MachineCheckpoints]) -> set[int]:
    """Return the steps that are good on every machine."""
    return set.intersection(*(set(steps) for steps, _ in found if steps is not None))


def _check_everywhere(folder: Path, found: list[_MachineCheckpoints]) -> None:
    """Raise ConfigError if some machines have good checkpoints that a run from the beginning would delete.

    That is so if another machine has none or only damaged ones, and if no step is good on all machines. An unfinished
    checkpoint on each machine is no error: a killed run leaves it. found: from `_read_until_good`.
    """
    machines = {rank: (good, bad) for rank, (good, bad) in enumerate(found) if good is not None}
    some = sorted({step for good, _ in machines.values() for step in good})
    if not some or _on_all(found):
        return
    wanted = "a folder with the run's checkpoints on every machine"
    remedy = "To start over, choose another folder"
    others = f"and others have step {', '.join(map(str, some))}"
    killed = False
    for rank, (good, bad) in machines.items():
        if good:
            continue
        if bad and set(bad.values()) == {manifest.NOT_FINISHED}:
            killed = True
            continue
        damaged = "; ".join(f"step {step}: {problem}" for step, problem in sorted(bad.items()))
        none = f"rank {rank}'s machine has no {f'good ones ({damaged})' if bad else 'checkpoints'}"
        raise ConfigError("--checkpoint", str(folder), f"{wanted}: {none}, {others}. {remedy}")
    good_on = "; ".join(f"rank {rank}'s has step {', '.join(map(str, good))}" for rank, (good, _) in machines.items())
    require(killed, "--checkpoint", str(folder), f"{wanted}: no step is good on all, {good_on}. {remedy}")


def _first_of_machine() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _differences(saved: Mapping[str, Any], own: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    # Compared as values: 4 is 4.0.
    unlike = {key for key in keys if key not in saved or key not in own or saved[key] != own[key]}
    return differences([{key: value for key, value in of.items() if key in unlike} for of in (saved, own)])
