"""Checkpoints of recipes: written every so many steps, and found again by a run that starts over.

A supervisor needs nothing but to start the same command again: with `--resume auto` it goes on from the last checkpoint
that is good on all machines, or begins where there is none.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipecomp import sealing
from pipecomp.errors import ConfigError
from pipecomp.handshake import differences

_STATE_KEY = "recipe"


def add_arguments(parser: argparse.ArgumentParser, at_least: Callable[[int], Callable[[str], int]]) -> None:
    """The arguments of this module."""
    add = parser.add_argument
    add("--checkpoint", metavar="FOLDER", help="write checkpoints there, after every epoch and at the end")
    add("--save-every", type=at_least(1), metavar="N", help="write them every N optimizer steps instead")
    add("--keep", type=at_least(1), metavar="N", help="checkpoints that are kept (default 2)")
    add("--resume", choices=("auto",), help="go on from the last good checkpoint, or begin if there is none")


class Checkpoints:
    """A run's checkpoints. settings: what must be equal where a run goes on, flat keys and JSON values.

    Raises ConfigError for arguments that would have no effect, or a configuration that cannot be saved.
    """

    def __init__(self, args: argparse.Namespace, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self.folder = None if args.checkpoint is None else Path(args.checkpoint)
        self._every, self._keep, self._settings = args.save_every, args.keep or 2, dict(settings)
        self._resume = args.resume is not None
        self.step = 0  # of the checkpoint that this run goes on from; 0: it begins
        if self.folder is None:
            for name in ("save_every", "keep", "resume"):
                if getattr(args, name) is not None:
                    raise ConfigError(f"--{name.replace('_', '-')}", getattr(args, name), "only with --checkpoint")
            return
        half = config.get("bf16", {}).get("enabled", False)
        if half and not config.get("zero_optimization", {}).get("stage", 0):
            allowed = "with bf16 only with zero_optimization.stage 1: DeepSpeed cannot load what it saves without"
            raise ConfigError("--checkpoint", args.checkpoint, allowed)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            allowed = f"a folder that can be written ({error.strerror})"
            raise ConfigError("--checkpoint", args.checkpoint, allowed) from error

    def find(self) -> str:
        """Look for what to go on from, sets `step`; every rank must call this. What was found, in words.

        One rank of each machine reads its checkpoints, to see which are whole.
        """
        if self.folder is None or not self._resume:
            return ""
        good: list[int] | None = None
        bad = {}
        if os.environ.get("LOCAL_RANK", "0") == "0":
            good = []
            for step, path in reversed(sealing.steps(self.folder).items()):
                problem = sealing.problem(path)
                if problem is None:
                    good.append(step)
                else:
                    bad[step] = problem
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (good, bad))
        everywhere = set.intersection(*(set(steps) for steps, _ in found if steps is not None))
        self.step = max(everywhere, default=0)
        problems = {step: problem for _, of_rank in found for step, problem in of_rank.items() if step > self.step}
        words = f"goes on after step {self.step}" if self.step else "no good checkpoint: begins"
        return words + "".join(f"; passed over step {step}: {problem}" for step, problem in sorted(problems.items()))

    def load(self, engine: Any) -> str:
        """Go on from what `find` found, if anything; every rank must call this. How, in words."""
        if not self.step:
            return ""
        _, state = engine.load_checkpoint(str(self.folder), tag=f"global_step{self.step}")
        saved = (state or {}).get(_STATE_KEY, {})
        differ = differences([saved, self._settings]) if saved != self._settings else []
        if differ:
            words = "; ".join(differ).replace("on rank 0", "in the checkpoint").replace("on rank 1", "in this run")
            raise ConfigError("--resume", "auto", f"the settings of the checkpoint: {words}")
        if engine.resumed is None:
            return "as it was"
        if engine.resumed.exact:
            return "with the messages of that step: losses will be as without a break"
        return "with the messages that both ends of each link have in common; what differs is sent whole once"

    def save(self, engine: Any, step: int, *, ends_epoch: bool, last: bool) -> None:
        """After step `step`: write a checkpoint if it is time to; every rank must call this."""
        due = ends_epoch if self._every is None else step % self._every == 0
        if self.folder is None or not (due or last):
            return
        engine.save_checkpoint(str(self.folder), client_state={_STATE_KEY: self._settings})
        if os.environ.get("LOCAL_RANK", "0") == "0":
            sealing.remove_old(self.folder, self._keep)
