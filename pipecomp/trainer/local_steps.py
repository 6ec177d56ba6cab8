"""Local steps under `transformers.Trainer`: gradients stay with each process, and the callback averages weights.

Trainer wraps its model in DDP, which gives every process the first one's weights and then, in a process's own steps,
leaves gradients alone. Trainer evaluates and saves what processes have in common.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from pipecomp.allreduce.local_options import LocalSteps
from pipecomp.allreduce.named import submit_named
from pipecomp.allreduce.state import State
from pipecomp.errors import ConfigError, require
from pipecomp.local_steps.outer_steps import OuterSteps
from pipecomp.local_steps.second_moments import SecondMoments

FILE = "pipecomp_local_steps"  # in a checkpoint folder: FILE_RANK.pt

_log = logging.getLogger(__name__)


class _Averages:
    """Averages by a state. See `outer_steps.Averages`."""

    def __init__(self, state: State) -> None:
        self.submit = partial(submit_named, state)


class LocalStepsOfTrainer(TrainerCallback):
    """The outer steps of one process, after all other callbacks: these decide whether to evaluate and to save.

    Args:
        options: H, the outer optimizer, fragments and overlap.
        ddp: Around Trainer's model.
        state: Averages.
        optimizer: Trainer's.
        args: Trainer's; `average_tokens_across_devices`, which waits for all processes, is switched off for the steps
            that a process takes alone.

    Raises:
        ConfigError: For more fragments than weights.
    """

    def __init__(
        self, options: LocalSteps, ddp: DistributedDataParallel, state: State, optimizer: Any, args: Any
    ) -> None:
        weights = {name: p for name, p in ddp.module.named_parameters() if p.requires_grad}
        self._exact = State("none", group=state.group) if options.shares_rows else None
        exact = None if self._exact is None else _Averages(self._exact)
        moments = SecondMoments(weights, lambda: optimizer.state) if options.second_moments == "rows" else None
        self.outer = OuterSteps(options, weights, set(), _Averages(state), state.group.size, exact, moments)
        self._rank = state.group.rank
        self._group = state.group
        self._common = ExitStack()
        self._args, self._average_tokens = args, args.average_tokens_across_devices
        self._count_labels()
        self._ddp = ddp
        ddp.broadcast_buffers = False

    # -- events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate the common weights at the start, too."""
        if args.eval_on_start:
            self._common.enter_context(self.outer.common_weights())

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on with the process's own weights.

        In a step of its own DDP has nothing to do: it would wait for all processes only to learn which weights have
        gradients, as Trainer asks it to.
        """
        self._common.close()
        self.outer.start(state.global_step)
        self._ddp.require_backward_grad_sync = self.outer.synchronous

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the outer step, if it is time to; the last step of a training always ends with one."""
        self.outer.after_step(state.global_step)
        if state.global_step >= state.max_steps:
            self.outer.meet(state.global_step)
        self._count_labels()
        self._before_evaluation(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate and save the common weights."""
        self._before_evaluation(control)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """When training is over, before Trainer may load its best checkpoint: weights are the same on all processes.

        Before that another callback may have asked for a checkpoint by what was logged.
        """
        if logs is not None and "train_loss" in logs:
            self._common.close()
            self.outer.meet(state.global_step)
        else:
            self._before_evaluation(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the thread that averages rows; see `CompressionCallback.on_train_end`."""
        if self._exact is not None:
            self._exact.close()
        self.give_back()

    def give_back(self) -> None:
        """Leave Trainer's arguments and DDP as they were."""
        self._args.average_tokens_across_devices = self._average_tokens
        self._ddp.require_backward_grad_sync = True

    def _count_labels(self) -> None:
        """Over all processes, or over this one, in the step to come: Trainer counts before it begins."""
        self._args.average_tokens_across_devices = self._average_tokens and self.outer.synchronous

    def _before_evaluation(self, control: Any) -> None:
        if control.should_evaluate or control.should_save:
            self._common.close()
            self._common.enter_context(self.outer.common_weights())

    # -- checkpoints

    def save(self, folder: Path, optimizer: Any) -> None:
        """Write this process's own weights and optimizer states; Trainer has written the common weights."""
        self._common.close()
        state = {**self.outer.state_dict(), "optimizer": optimizer.state_dict() if self._rank else None}
        torch.save(state, folder / f"{FILE}_{self._rank}.pt")

    def load(self, folder: Path, optimizer: Any, step: int) -> None:
        """Go on with what `save` wrote; Trainer has loaded the common weights and the first process's optimizer.

        Raises ConfigError if only some processes have a file. Without any, an interval begins.
        """
        file = folder / f"{FILE}_{self._rank}.pt"
        found = [bool(row[0]) for row in self._group.gather_numbers([float(file.is_file())])]
        if not any(found):
            _log.warning("%s has no %s files: local steps begin anew", folder, FILE)
            self.outer.start(step)
            self._count_labels()
            return
        if not all(found):
            missing = [f"{FILE}_{rank}.pt" for rank, there in enumerate(found) if not there]
            raise ConfigError("resume_from_checkpoint", str(folder), f"a folder that also has {', '.join(missing)}")
        state = torch.load(file, map_location="cpu", weights_only=True)
        options = state["shared"]["options"]
        require(self.outer.fits(state["shared"]), "local_steps", options, "those of the checkpoint, to go on with it")
        self.outer.load_state_dict(state, step)
        self._count_labels()
        if state["optimizer"] is not None:
            optimizer.load_state_dict(state["optimizer"])
