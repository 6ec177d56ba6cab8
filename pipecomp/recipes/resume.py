"""Checkpoints of recipes: written every so many steps, and found again by a run that starts over.

A supervisor only has to start the same command again: with `--resume auto` it continues from the last checkpoint that
is good on all machines, or begins where there is none. A folder holds the checkpoints of one run: without `--resume` it
must have none, and a run that goes on deletes those of later steps before it writes its own.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipecomp.checkpoint import manifest
from pipecomp.checkpoint.run_id import model_values
from pipecomp.checkpoint.writing import private_files
from pipecomp.distributed.collectives import gathered, while_others_wait
from pipecomp.distributed.consistency import differences
from pipecomp.distributed.preemption import say_here
from pipecomp.errors import CheckpointError, ConfigError, require, writable
from pipecomp.interfaces import TrainingEngine

# Arguments that may change where a run goes on: where it writes, how long it trains, what it started from, and those
# that are compared by their meaning: files by their content, a model and the seed with the configurations.
MAY_DIFFER = frozenset(
    {
        "metrics",
        "run",
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
        "start",
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
_STATE_KEY, _TRAINED_KEY, _DUE_KEY = "recipe", "recipe_trained", "recipe_evaluation_due"
_Found = tuple[list[int] | None, dict[int, str]]
_held: dict[str, int] = {}  # folders and their locks, of this process
# Settings that change how bytes go and are kept, not what is trained: a run that timed out may get a longer timeout.
_HOW_BYTES_GO = (
    "pipecomp.transport.",
    "pipecomp.in_flight",
    "pipecomp.store.prefetch",
    "pipecomp.store.drift_check",
    "pipecomp.store.in_checkpoints",
    "pipecomp.store.run",
    "pipecomp.store.on_write_error",
)
_HOW_A_STEP_IS_SHARED = ("gradient_accumulation_steps", "train_batch_size")  # by more or fewer replicas
_OF_LINKS, _OF_GRADIENTS = ("pipecomp.activations.", "pipecomp.store."), ("pipecomp.gradients.",)


def add_arguments(parser: argparse.ArgumentParser, at_least: Callable[[int], Callable[[str], int]]) -> None:
    """Add the arguments of this module."""
    add = parser.add_argument
    add(
        "--checkpoint",
        metavar="FOLDER",
        help="write checkpoints there, after every epoch and at the end; a new run needs one without any",
    )
    add("--save-every", type=at_least(1), metavar="N", help="write them every N optimizer steps instead")
    add("--keep", type=at_least(1), metavar="N", help="checkpoints that are kept (default 2)")
    add(
        "--save-on-signal",
        action=argparse.BooleanOptionalAction,
        help="at SIGTERM or Ctrl-C write one after the step and exit with status 75 (default with --checkpoint)",
    )
    add("--resume", choices=("auto",), help="go on from the last good checkpoint, or begin if there is none")


def what_is_trained(args: argparse.Namespace, meanings: Mapping[str, Any], model: Any = None) -> dict[str, Any]:
    """Return what identifies a run besides DeepSpeed's configuration.

    Args:
        args: Every argument counts, under its flag, that is not in `MAY_DIFFER`.
        meanings: What the recipe knows: a hash of its data, an argument's default.
        model: A Hugging Face configuration.

    Returns:
        JSON values by flat keys.
    """
    given = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items() if name not in MAY_DIFFER}
    of_model = {f"model.{key}": value for key, value in model_values(model).items()}
    return dict(json.loads(json.dumps({**given, **of_model, **meanings}, sort_keys=True, default=str)))


def data_facts(training: Any, held_out: Any) -> dict[str, str | None]:
    """Tell what must be equal on all ranks before they make an engine: hashes of the data, which have a `digest()`."""
    return {
        "the training data or the tokenizer (a hash)": training.digest(),
        "the held-out data (a hash)": None if held_out is None else held_out.digest(),
    }


def make_folder(argument: str, path: str) -> None:
    """Make the folder that an argument names before training, so that one that cannot be written is known at once.

    Only its owner can open it, if it was not there.

    Raises:
        ConfigError: If it cannot be made.
    """
    with writable(argument, path), private_files():
        Path(path).mkdir(parents=True, exist_ok=True)


def hold_folder(argument: str, path: str | Path) -> None:
    """Make the folder that an argument names, and keep it for this run until its process ends; rank 0 calls it.

    Two that write to one folder would delete and overwrite each other's files.

    Raises:
        ConfigError: If it cannot be made, or another run has it.
    """
    place = os.path.realpath(path)
    if place in _held:
        return
    with writable(argument, path):
        os.makedirs(place, exist_ok=True)
        handle = os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise ConfigError(argument, str(path), "a folder that no other run is writing to, as one is to this") from error
    except OSError:  # a file system without locks cannot tell
        os.close(handle)
        return
    _held[place] = handle


def _let_go() -> None:
    while _held:
        os.close(_held.popitem()[1])


os.register_at_fork(after_in_child=_let_go)  # one that outlives the run would hold its folders


class RunCheckpoints:
    """A run's checkpoints.

    Args:
        args: The recipe's arguments.
        config: DeepSpeed's configuration.
        settings: The same as JSON values by flat keys; they must be equal where a run goes on.
        trained: From `what_is_trained`; the same holds.
        auto: Keys of the settings that were "auto" before the run's length was known.

    Attributes:
        step: Of the checkpoint that this run goes on from, 0 if it begins.
        on_signal: Whether a run that is asked to stop writes one.
        evaluation_due: Whether the run that wrote it was asked to stop before the evaluation after that step.

    Raises:
        ConfigError: For arguments that would have no effect, or a configuration that cannot be saved.
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
        self._own = False  # whether all of later steps are this run's
        self.step = 0  # of the checkpoint that this run goes on from; 0: it begins
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
            allowed = "with bf16 only with zero_optimization.stage 1: DeepSpeed cannot load what it saves without"
            raise ConfigError("--checkpoint", args.checkpoint, allowed)
        make_folder("--checkpoint", args.checkpoint)

    def find(self) -> str:
        """Look for what to go on from and set `step`; every rank must call this.

        One rank of each machine reads its checkpoints, to see which are complete, from the newest one on.

        Returns:
            What was found, in words.

        Raises:
            ConfigError: If the last good one is of a run with other settings; on every rank, if this run is to begin
                and a machine has checkpoints, finished or not: they would be mistaken for its own; or if it is to go
                on and a machine has none, while another has good ones: beginning anew would delete those.
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
        words = f"goes on after step {self.step}" if self.step else "no good checkpoint: begins"
        return words + "".join(f"; passed over step {step}: {problem}" for step, problem in sorted(problems.items()))

    def _check_unused(self, folder: Path) -> None:
        here = list(manifest.steps(folder)) if _first_of_machine() else []
        there = sorted({step for steps in gathered(here) for step in steps})
        words = ", ".join(map(str, there))
        allowed = (
            f"a folder without checkpoints: this one has step {words}; --resume auto goes on from the last good one"
        )
        require(not there, "--checkpoint", str(folder), allowed)

    def _check(self, folder: Path) -> None:
        """Before anything of the checkpoint is used, or anything of its run is overwritten."""
        from pipecomp.checkpoint.reshard import read_state

        state = read_state(folder)
        if state is None:
            return  # this machine has no stage's file: loading says so
        saved = state.get(_STATE_KEY, {})
        # Older checkpoints lack all of what was trained, other versions some: what both know is compared.
        trained = state.get(_TRAINED_KEY, {})
        both = (trained.keys() & self._trained.keys()) - {REPLICAS, STAGES}
        stages, replicas = ({run.get(what) for run in (trained, self._trained)} for what in (STAGES, REPLICAS))
        alone = {run.get(STAGES) == run.get(REPLICAS) == 1 for run in (trained, self._trained)}
        not_compared: tuple[str, ...] = _HOW_BYTES_GO
        if SAMPLES in both and len(replicas) > 1:
            # They leave out other samples at the end of an epoch, too: "auto" means other numbers.
            not_compared += _HOW_A_STEP_IS_SHARED + self._auto
        # One stage, one replica and one process have nothing to exchange, and are refused settings of how.
        if 1 in stages and len(stages) > 1:
            not_compared += _OF_LINKS
        if (1 in replicas and len(replicas) > 1) or len(alone) > 1:
            not_compared += _OF_GRADIENTS
        keys = {key for key in saved.keys() | self._settings.keys() if not key.startswith(not_compared)}
        differ = _differences(saved, self._settings, keys) + _differences(trained, self._trained, both)
        if differ:
            words = "; ".join(differ).replace("on rank 0", "in the checkpoint").replace("on rank 1", "in this run")
            anew = f"To begin anew, take another folder than {self.folder}"
            raise ConfigError("--resume", "auto", f"the settings of the checkpoint: {words}. {anew}")

    def load(self, engine: TrainingEngine) -> str:
        """Load what `find` found, if anything; every rank must call this.

        Returns:
            How the run goes on, in words.
        """
        if not self.step:
            return ""
        _, state = engine.load_checkpoint(str(self.folder), tag=f"global_step{self.step}")
        self.evaluation_due = bool((state or {}).get(_DUE_KEY))
        if engine.resumed is None:
            return "as it was"
        if engine.resumed.exact:
            return "with the cached activations of that step: losses will be as without a break"
        both = "with the cached activations that both ends of each link have in common"
        return f"{both}; what differs is forgotten"

    def save(self, engine: TrainingEngine, step: int, *, ends_epoch: bool, last: bool) -> None:
        """Write a checkpoint after step `step` if it is time to; every rank must call this."""
        due = ends_epoch if self._every is None else step % self._every == 0
        if (due or last) and not self.save_now(engine):
            say_here(
                "the run ends without this checkpoint"
                if last
                else "the run goes on without this checkpoint, and tries again when the next one is due"
            )

    def save_now(self, engine: TrainingEngine, *, evaluation_due: bool = False) -> bool:
        """Write a checkpoint, if there is a folder for it; every rank must call this.

        Where the disk is full, the older ones go, but for the last good one, and it is tried again.

        Args:
            engine: Whose.
            evaluation_due: For `load`: that the evaluation after this step has not been made.

        Returns:
            False if it could not be written, which is said on every rank.
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
            say_here(f"{error}. It is tried again without the older ones, but for the last")
            folder = self.folder  # from which they are gone then, on every machine
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
        """Delete what this run was not resumed from, and did not write: by their steps they would be its last ones."""
        if _first_of_machine():
            manifest.remove_after(folder, self.step)
        gathered(None)  # one of them may have the name of the one that is written next
        self._own = True


def _read_until_good(folder: Path) -> list[_Found]:
    """Read checkpoints, on each machine the newest first, until one is good on all; no older one is read then.

    Returns:
        By rank, as gathered: on a machine's first the steps of good ones, and what is wrong with others.
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


def _on_all(found: list[_Found]) -> set[int]:
    """Steps that are good on every machine."""
    return set.intersection(*(set(steps) for steps, _ in found if steps is not None))


def _check_everywhere(folder: Path, found: list[_Found]) -> None:
    """ConfigError where a run would begin anew that some machine has good checkpoints of: they would be deleted.

    So where another machine has none of it or only damaged ones, and where no step is good on all of them. A run that
    was killed leaves an unfinished one on each machine, and may begin anew from that. found: by rank, as gathered.
    """
    machines = {rank: (good, bad) for rank, (good, bad) in enumerate(found) if good is not None}
    some = sorted({step for good, _ in machines.values() for step in good})
    if not some or _on_all(found):
        return
    wanted = "a folder with the run's checkpoints on every machine"
    anew = "To begin anew, take another folder"
    others = f"and others have step {', '.join(map(str, some))}"
    killed = False
    for rank, (good, bad) in machines.items():
        if good:
            continue
        if bad and set(bad.values()) == {manifest.NOT_FINISHED}:
            killed = True
            continue
        damaged = "; ".join(f"step {step}: {problem}" for step, problem in sorted(bad.items()))
        none = f"that of rank {rank} has none{f' that is good ({damaged})' if bad else ''}"
        raise ConfigError("--checkpoint", str(folder), f"{wanted}: {none}, {others}. {anew}")
    good_on = "; ".join(f"rank {rank}'s has step {', '.join(map(str, good))}" for rank, (good, _) in machines.items())
    require(killed, "--checkpoint", str(folder), f"{wanted}: no step is good on all, {good_on}. {anew}")


def _first_of_machine() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _differences(saved: Mapping[str, Any], own: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    # Compared as values: 4 is 4.0.
    unlike = {key for key in keys if key not in saved or key not in own or saved[key] != own[key]}
    return differences([{key: value for key, value in of.items() if key in unlike} for of in (saved, own)])
