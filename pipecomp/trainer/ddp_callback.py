"""Compressed gradients in `transformers.Trainer` on several processes: one callback, nothing else to change.

    trainer = Trainer(..., callbacks=[pipecomp.CompressionCallback(method="global_qsgd", bits=8)])
    trainer.train()                                   # started by torchrun or accelerate, one process per replica

Trainer wraps the model in DistributedDataParallel (DDP); the callback registers `pipecomp.allreduce` there. With
gradient accumulation DDP averages at each last micro-batch only, with autocast gradients are float32 as the weights
are: neither needs anything here. With fp16 gradients are multiplied by the loss scale, which the callback tells the
method before each step: error-feedback residuals are kept without it, because it changes.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from pipecomp.allreduce import State, ddp_hook
from pipecomp.allreduce.call import Counters
from pipecomp.allreduce.named import submit_named
from pipecomp.config.gradients import LocalSteps
from pipecomp.errors import ConfigError, require
from pipecomp.gradient_config import Gradients
from pipecomp.local_steps.outer_steps import OuterSteps
from pipecomp.local_steps.row_statistics import SecondMoments
from pipecomp.trainer.checkpoints import numbered

RESIDUALS = "pipecomp_gradients"  # in a checkpoint folder: RESIDUALS_RANK.safetensors
REFUSED = {
    "none": "a method that compresses; to send gradients in full precision, leave the callback out",
    "quantized_adam": "a method for gradients; this one is an optimizer, which averages by itself",
}
TRAINING_LOGS = {"loss", "train_loss"}  # one of these is in what Trainer logs about training, not about evaluation

_log = logging.getLogger(__name__)


class CompressionCallback(TrainerCallback):
    """Average a Trainer's gradients with a method of `pipecomp.allreduce`.

    It adds to Trainer's own training logs, on the first process: `grad_bytes_raw`, `grad_bytes_sent` (the bytes that
    this process put on its links since `train()` was called, without and with compression), `grad_compression` (their
    ratio) and `grad_error` (mean of ‖g − sent‖ / ‖g‖ so far; absent with "none", "powersgd" and "fp16"). `stats()` has
    them on every process.

    Each process writes its error-feedback residuals to Trainer's checkpoints and loads them again with
    `resume_from_checkpoint`; not in a hyperparameter search, nor with `save_only_model`. A rank that is silent for
    `TrainingArguments.ddp_timeout` seconds counts as lost, and training ends with an error.

    With `local_steps` processes train by themselves, and average how far their weights have moved after so many steps,
    see docs/algorithms.md, 2.12. Trainer then evaluates and saves the weights that they last had in common; checkpoints
    have each process's own too. The last step ends with an average, so that all processes finish with the same weights.

    Args:
        method: Any of `pipecomp.gradient_config.Gradients` that compresses gradients; with `local_steps` also "none".
        seed: Of the method's random draws, the same on all ranks.
        options: Those of the method, and of local steps, in `pipecomp.gradient_config.Gradients`.

    Raises:
        ConfigError: For a wrong method or option; and when training begins where this cannot work: in one process,
            with DataParallel, FSDP, DeepSpeed, another kind of sharding, or another DDP communication hook; with
            local steps and fp16, and for a checkpoint of other ones.

    Example:
        >>> trainer = Trainer(..., callbacks=[pipecomp.CompressionCallback(method="global_qsgd", bits=8)])
        >>> far = pipecomp.CompressionCallback(method="double_squeeze", bits=2, local_steps=16)
    """

    def __init__(self, method: str, *, seed: int = 0, **options: Any) -> None:
        known = [name for name in Gradients.model_fields if name != "method"]
        for name, value in options.items():
            require(name in known, name, value, f"method, seed, {', '.join(known)}")
        if method in REFUSED and not (method == "none" and options.get("local_steps")):
            raise ConfigError("method", method, REFUSED[method])
        checked = Gradients(method=method, **options)  # now, not when training begins
        ok = isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0
        require(ok, "seed", seed, "a whole number of at least 0")
        self.method, self.seed, self.options = method, seed, options
        self._gradients = checked
        self._local: LocalStepsOfTrainer | None = None
        self._state: State | None = None
        self._hooked: weakref.ref[DistributedDataParallel] | None = None
        self._own_group: Any = None
        self._scaler: Any = None

    def stats(self) -> dict[str, Any]:
        """Return what `pipecomp.allreduce.State.stats` returns, for this process and the last `train()`.

        All counters are zero before that.
        """
        return self._state.stats() if self._state is not None else Counters().as_dict()

    def _group_of(self, ddp: DistributedDataParallel, timeout_s: float) -> Any:
        """Give the group of DDP's ranks.

        PowerSGD needs one of its own: over gloo its later all-reduces are started by other threads, and in DDP's group
        they would come before one of DDP's own on one rank and after it on another.
        """
        if self.method != "powersgd":
            return ddp.process_group
        if self._own_group is None:
            ranks = dist.get_process_group_ranks(ddp.process_group)
            self._own_group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
        return self._own_group

    # -- events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make a State for this training and put it into DDP; load the residuals of the checkpoint, if any."""
        trainer, checkpoint = _caller()
        ddp, self._scaler = ddp_of(trainer), trainer.accelerator.scaler
        handlers = trainer.callback_handler.callbacks
        # Trainer adds TensorBoard and the like before all other callbacks. What on_log writes into the logs is seen
        # only by callbacks after this one, so it has to be the first. Nobody's turn is lost: those that move, from
        # before this one's place to one later, had this event already.
        handlers.remove(self)
        handlers.insert(0, self)
        if self._state is not None:
            self._state.close()
        given = self._gradients.state_options()
        timeout_s = float(args.ddp_timeout)
        group = self._group_of(ddp, timeout_s)
        self._state = State(group=group, seed=self.seed, timeout_s=timeout_s, **given)
        self._state.number_parameters(p for p in ddp.module.parameters() if p.requires_grad)
        if checkpoint is not None:
            _restore(self._state, Path(checkpoint), args.device)
        self._begin_local_steps(trainer, ddp, checkpoint)
        if self._hooked is None or self._hooked() is not ddp:
            try:
                ddp.register_comm_hook(self, _average)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                raise ConfigError(
                    "CompressionCallback", f"a model that takes no hook ({reason})", "one without another DDP hook"
                ) from error
            self._hooked = weakref.ref(ddp)

    def _begin_local_steps(self, trainer: Any, ddp: DistributedDataParallel, checkpoint: str | None) -> None:
        handlers, local = trainer.callback_handler.callbacks, self._gradients.local
        if self._local is not None:  # of an earlier training
            handlers[:] = [each for each in handlers if each is not self._local]
            self._local.give_back()
        self._local = None
        if local is None:
            return
        scaled = self._scaler is not None
        require(not scaled, "fp16", True, "bf16 with local_steps: each process would have a loss scale of its own")
        assert self._state is not None
        self._local = LocalStepsOfTrainer(local, ddp, self._state, trainer.optimizer, trainer.args)
        if checkpoint is not None:
            self._local.load(Path(checkpoint), trainer.optimizer, trainer.state.global_step)
        handlers.append(self._local)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell the method what this step's loss is multiplied by."""
        if self._state is not None and self._scaler is not None:
            self._state.loss_scale = self._scaler.get_scale()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add what was sent to what Trainer logs about training."""
        if self._state is None or logs is None or not state.is_world_process_zero or not TRAINING_LOGS & set(logs):
            return
        stats = self._state.stats()
        new = {"grad_bytes_raw": stats["bytes_raw"], "grad_bytes_sent": stats["bytes_sent"]}
        if stats["bytes_sent"]:
            new["grad_compression"] = stats["bytes_raw"] / stats["bytes_sent"]
        if stats["relative_error"] is not None:
            new["grad_error"] = stats["relative_error"]
        logs.update(new)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(new)  # Trainer puts a copy there before it calls this

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write this process's error-feedback residuals into the checkpoint that was just written."""
        if self._state is None or args.save_only_model or state.is_hyper_param_search:
            return
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        if self._local is not None:
            self._local.save(folder, kwargs["optimizer"])
        self._state.save(residuals_file(folder, self._state.group.rank))
        if args.save_total_limit is not None:
            self._remove_old(args.output_dir)

    def _remove_old(self, output_dir: str) -> None:
        """Delete this process's files of checkpoints that Trainer has deleted where the first process runs.

        On another machine, without a common disk, they would fill that. Every process must call this.
        """
        assert self._state is not None
        group = self._state.group
        steps = [float(step) for step, _ in numbered(output_dir)] if group.rank == 0 else []
        count = int(group.gather_numbers([float(len(steps))])[0][0])
        kept = {int(step) for step in group.gather_numbers((steps or [0.0] * count) or [0.0])[0]}
        for step, folder in numbered(output_dir):
            if group.rank and step not in kept:
                for file in (*folder.glob(f"pipecomp_*_{group.rank}.*"), folder / f"rng_state_{group.rank}.pth"):
                    file.unlink(missing_ok=True)
                with suppress(OSError):  # another process here still has files in it
                    folder.rmdir()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the thread that averages; it starts again if the model goes on training outside Trainer."""
        if self._state is not None:
            self._state.close()


def residuals_file(folder: Path, rank: int) -> Path:
    """Where a rank's error-feedback residuals are in a checkpoint."""
    return folder / f"{RESIDUALS}_{rank}.safetensors"


def ddp_of(trainer: Any) -> DistributedDataParallel:
    """Find the DDP that a Trainer wrapped its model in, once training has begun. ConfigError says why there is none."""
    start = "start it with torchrun --nproc-per-node N or accelerate launch"
    if trainer.args.n_gpu > 1:
        got = f"one process with {trainer.args.n_gpu} GPUs (DataParallel)"
        raise ConfigError("CompressionCallback", got, f"one process per GPU: {start}")
    require(
        not trainer.is_deepspeed_enabled,
        "CompressionCallback",
        "DeepSpeed",
        "DDP: train without DeepSpeed, or give pipecomp.initialize a configuration with a 'gradients' section",
    )
    require(
        not trainer.is_fsdp_enabled,
        "CompressionCallback",
        "FSDP",
        "DDP: train without fsdp, whose gradients are never whole",
    )
    if trainer.args.world_size == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        got = f"{os.environ['WORLD_SIZE']} processes that each train alone"
        raise ConfigError("CompressionCallback", got, "DDP; without a GPU it takes TrainingArguments(use_cpu=True)")
    require(trainer.args.world_size != 1, "CompressionCallback", "one process", f"several processes: {start}")
    wrapped = trainer.model_wrapped
    model = getattr(wrapped, "_orig_mod", wrapped)  # torch.compile is put around DDP
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError("CompressionCallback", type(model).__name__, "a model that Trainer wraps in DDP")
    return model


def _average(callback: CompressionCallback, bucket: Any) -> Future[Tensor]:
    """DDP keeps a hook for good, but each `train()` has a state of its own: the hook looks it up."""
    assert callback._state is not None, "the hook is registered after the state is made"
    return ddp_hook(callback._state, bucket)


_average.__annotations__.clear()  # DDP reads them, and refuses strings, which they are in this file


def _caller() -> tuple[Any, str | None]:
    """Find the Trainer that is training, and the checkpoint it resumed from.

    An event gets Trainer's `model`, which is never the wrapped one, and neither the Trainer nor the checkpoint. But it
    runs inside `Trainer.train(resume_from_checkpoint=…)`: that call is on the stack, whatever subclasses and decorators
    are in between, and `Trainer.model_wrapped` is documented as the outermost model.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller, names = frame.f_locals.get("self"), frame.f_locals
        if isinstance(caller, Trainer) and frame.f_code.co_name == "train" and "resume_from_checkpoint" in names:
            resume = names["resume_from_checkpoint"]
            return caller, get_last_checkpoint(caller.args.output_dir) if resume is True else resume or None
        frame = frame.f_back
    raise ConfigError("CompressionCallback", "an event from elsewhere", "to be called by transformers.Trainer.train")


def _restore(state: State, folder: Path, device: Any) -> None:
    """Load this rank's residuals. If no rank has any they start empty; ConfigError if only some have."""
    file = residuals_file(folder, state.group.rank)
    found = [bool(row[0]) for row in state.group.gather_numbers([float(file.is_file())])]
    if all(found):
        state.load(file, device)
    elif any(found):
        missing = [residuals_file(folder, rank).name for rank, there in enumerate(found) if not there]
        raise ConfigError("resume_from_checkpoint", str(folder), f"a folder that also has {', '.join(missing)}")
    else:
        _log.warning("%s has no %s files: error-feedback residuals start empty", folder, RESIDUALS)


# -- local steps


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
            self.outer.synchronize(state.global_step)
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
            self.outer.synchronize(state.global_step)
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
