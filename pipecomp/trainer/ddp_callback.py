"""`CompressionCallback`: compressed gradients in `transformers.Trainer` on several processes.

    trainer = Trainer(..., callbacks=[pipecomp.CompressionCallback(method="global_qsgd", bits=8)])
    trainer.train()                                   # started by torchrun or accelerate, one process per replica

Trainer wraps the model in DistributedDataParallel (DDP); the callback registers `pipecomp.allreduce` there. With
gradient accumulation DDP averages only at the last micro-batch, and with autocast gradients are float32 like the
weights, so neither needs special treatment. With fp16 the callback passes the loss scale to the method before each
step: it changes, so error-feedback residuals are stored unscaled.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from contextlib import ExitStack, suppress
from datetime import timedelta
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
from pipecomp.config.gradients import LocalSteps
from pipecomp.errors import ConfigError, require
from pipecomp.gradient_config import Gradients
from pipecomp.local_steps.outer_steps import OuterSteps
from pipecomp.local_steps.row_statistics import SecondMoments
from pipecomp.trainer.checkpoints import list_checkpoints

RESIDUALS = "pipecomp_gradients"  # in a checkpoint folder: RESIDUALS_RANK.safetensors
UNSUPPORTED_METHODS = {
    "none": "a method that compresses; to send gradients in full precision, leave the callback out",
    "quantized_adam": "a method for gradients; this one is an optimizer that exchanges its own states",
}
TRAINING_LOGS = {"loss", "train_loss"}  # Trainer's training logs have one of these, evaluation logs have none

_log = logging.getLogger(__name__)


class CompressionCallback(TrainerCallback):
    """Average a Trainer's gradients with a method of `pipecomp.allreduce`.

    The first process adds to Trainer's training logs: `grad_bytes_raw` and `grad_bytes_sent` (the bytes that this
    process has sent since `train()` was called, without and with compression), `grad_compression` (their ratio) and
    `grad_error` (mean of ‖g − sent‖ / ‖g‖ so far; absent with "none", "powersgd" and "fp16"). `stats()` returns them
    on every process.

    Each process writes its error-feedback residuals to Trainer's checkpoints and loads them with
    `resume_from_checkpoint`, except in a hyperparameter search and with `save_only_model`. If a rank is silent for
    `TrainingArguments.ddp_timeout` seconds, training fails.

    With `local_steps` each process trains on its own, and every so many steps they average the change of their weights,
    see docs/algorithms.md, 2.12. Trainer then evaluates and saves the last common weights; checkpoints also have each
    process's own. The last step ends with an average, so that all processes finish with the same weights.

    Args:
        method: A method of `pipecomp.gradient_config.Gradients` that compresses gradients; with `local_steps` also
            "none".
        seed: For the method's random draws; the same on all ranks.
        options: Options of the method and of local steps, see `pipecomp.gradient_config.Gradients`.

    Raises:
        ConfigError: If the method or an option is wrong; when training begins, if there is only one process, or with
            DataParallel, FSDP, DeepSpeed, other kinds of sharding, another DDP communication hook, local steps with
            fp16, or a checkpoint with other local steps.

    Example:
        >>> trainer = Trainer(..., callbacks=[pipecomp.CompressionCallback(method="global_qsgd", bits=8)])
        >>> far = pipecomp.CompressionCallback(method="double_squeeze", bits=2, local_steps=16)
    """

    def __init__(self, method: str, *, seed: int = 0, **options: Any) -> None:
        known = [name for name in Gradients.model_fields if name != "method"]
        for name, value in options.items():
            require(name in known, name, value, f"method, seed, {', '.join(known)}")
        if method in UNSUPPORTED_METHODS and not (method == "none" and options.get("local_steps")):
            raise ConfigError("method", method, UNSUPPORTED_METHODS[method])
        checked = Gradients(method=method, **options)
        ok = isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0
        require(ok, "seed", seed, "a whole number of at least 0")
        self.method, self.seed, self.options = method, seed, options
        self._gradients = checked
        self._local: LocalStepsCallback | None = None
        self._state: State | None = None
        self._hooked: weakref.ref[DistributedDataParallel] | None = None
        self._own_group: Any = None
        self._scaler: Any = None

    def stats(self) -> dict[str, Any]:
        """Return `pipecomp.allreduce.State.stats` of this process for the last `train()`; zeros before the first."""
        return self._state.stats() if self._state is not None else Counters().as_dict()

    def _process_group(self, ddp: DistributedDataParallel, timeout_s: float) -> Any:
        """Return a process group of DDP's ranks."""
        # Note: PowerSGD needs a separate group. Over gloo other threads start its later all-reduces, and in DDP's group
        # their order relative to DDP's own would differ between ranks.
        if self.method != "powersgd":
            return ddp.process_group
        if self._own_group is None:
            ranks = dist.get_process_group_ranks(ddp.process_group)
            self._own_group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
        return self._own_group

    # -- events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make a State, register the hook with DDP, and load the residuals of the checkpoint, if any."""
        trainer, checkpoint = _calling_trainer()
        ddp, self._scaler = find_ddp(trainer), trainer.accelerator.scaler
        handlers = trainer.callback_handler.callbacks
        # Note: this callback must be the first. Trainer adds TensorBoard and the like before all others, and only later
        # callbacks see the values that on_log adds. Moving it skips nobody: the callbacks that move back by one place
        # have already received this event.
        handlers.remove(self)
        handlers.insert(0, self)
        if self._state is not None:
            self._state.close()
        timeout_s = float(args.ddp_timeout)
        group = self._process_group(ddp, timeout_s)
        self._state = State(group=group, seed=self.seed, timeout_s=timeout_s, **self._gradients.state_options())
        self._state.number_parameters(p for p in ddp.module.parameters() if p.requires_grad)
        if checkpoint is not None:
            _restore(self._state, Path(checkpoint), args.device)
        self._start_local_steps(trainer, ddp, checkpoint)
        if self._hooked is None or self._hooked() is not ddp:
            try:
                ddp.register_comm_hook(self, _average)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                raise ConfigError(
                    "CompressionCallback", f"a model that takes no hook ({reason})", "one without another DDP hook"
                ) from error
            self._hooked = weakref.ref(ddp)

    def _start_local_steps(self, trainer: Any, ddp: DistributedDataParallel, checkpoint: str | None) -> None:
        handlers, local = trainer.callback_handler.callbacks, self._gradients.local
        if self._local is not None:  # from an earlier training
            handlers[:] = [each for each in handlers if each is not self._local]
            self._local.restore_settings()
        self._local = None
        if local is None:
            return
        scaled = self._scaler is not None
        require(not scaled, "fp16", True, "bf16 with local_steps, because loss scales differ between processes")
        assert self._state is not None
        self._local = LocalStepsCallback(local, ddp, self._state, trainer.optimizer, trainer.args)
        if checkpoint is not None:
            self._local.load(Path(checkpoint), trainer.optimizer, trainer.state.global_step)
        handlers.append(self._local)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pass this step's loss scale to the method."""
        if self._state is not None:
            self._state.loss_scale = 1.0 if self._scaler is None else self._scaler.get_scale()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add bytes, compression and error to Trainer's training logs."""
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
            state.log_history[-1].update(new)  # Trainer has already appended a copy of the logs

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write this process's error-feedback residuals into the new checkpoint."""
        if self._state is None or args.save_only_model or state.is_hyper_param_search:
            return
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        if self._local is not None:
            self._local.save(folder, kwargs["optimizer"])
        self._state.save(residuals_file(folder, self._state.group.rank))
        if args.save_total_limit is not None:
            self._remove_old_files(args.output_dir)

    def _remove_old_files(self, output_dir: str) -> None:
        """Delete this process's files of checkpoints that Trainer has deleted on the first process's machine.

        Otherwise they would pile up on machines without a shared disk. Every process must call this.
        """
        assert self._state is not None
        group = self._state.group
        steps = [float(step) for step, _ in list_checkpoints(output_dir)] if group.rank == 0 else []
        count = int(group.gather_numbers([float(len(steps))])[0][0])
        kept = {int(step) for step in group.gather_numbers((steps or [0.0] * count) or [0.0])[0]}
        for step, folder in list_checkpoints(output_dir):
            if group.rank and step not in kept:
                for file in (*folder.glob(f"pipecomp_*_{group.rank}.*"), folder / f"rng_state_{group.rank}.pth"):
                    file.unlink(missing_ok=True)
                with suppress(OSError):  # other processes of this machine still have files in it
                    folder.rmdir()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the averaging thread; it restarts if the model trains on outside Trainer."""
        if self._state is not None:
            self._state.close()


def residuals_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's error-feedback residuals in a checkpoint."""
    return folder / f"{RESIDUALS}_{rank}.safetensors"


def find_ddp(trainer: Any) -> DistributedDataParallel:
    """Return the DDP instance around a Trainer's model once training has begun. ConfigError if there is none."""
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
        "DDP: train without fsdp, which shards gradients",
    )
    if trainer.args.world_size == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        got = f"{os.environ['WORLD_SIZE']} processes that each train alone"
        raise ConfigError("CompressionCallback", got, "DDP; without a GPU set TrainingArguments(use_cpu=True)")
    require(trainer.args.world_size != 1, "CompressionCallback", "one process", f"several processes: {start}")
    wrapped = trainer.model_wrapped
    model = getattr(wrapped, "_orig_mod", wrapped)  # torch.compile wraps DDP
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError("CompressionCallback", type(model).__name__, "a model that Trainer wraps in DDP")
    return model


def _average(callback: CompressionCallback, bucket: Any) -> Future[Tensor]:
    # Note: DDP keeps a hook forever, while each `train()` makes a new state, so the hook looks up the state.
    assert callback._state is not None, "the hook is registered after the state is made"
    return ddp_hook(callback._state, bucket)


_average.__annotations__.clear()  # DDP rejects annotations that are strings, as all are in this file


def _calling_trainer() -> tuple[Any, str | None]:
    """Return the running Trainer and the checkpoint it resumes from."""
    # Note: an event receives only Trainer's unwrapped `model`, neither the Trainer nor the checkpoint. But it runs
    # inside `Trainer.train(resume_from_checkpoint=…)`, so the stack has that call below any subclasses and decorators.
    # `Trainer.model_wrapped` is documented as the outermost model.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller, names = frame.f_locals.get("self"), frame.f_locals
        if isinstance(caller, Trainer) and frame.f_code.co_name == "train" and "resume_from_checkpoint" in names:
            resume = names["resume_from_checkpoint"]
            return caller, get_last_checkpoint(caller.args.output_dir) if resume is True else resume or None
        frame = frame.f_back
    raise ConfigError("CompressionCallback", "another caller", "events of transformers.Trainer.train")


def _restore(state: State, folder: Path, device: Any) -> None:
    """Load this rank's residuals. They start empty if no rank has a file. ConfigError if only some have one."""
    file = residuals_file(folder, state.group.rank)
    has_file = [bool(row[0]) for row in state.group.gather_numbers([float(file.is_file())])]
    if all(has_file):
        state.load(file, device)
    elif any(has_file):
        missing = [residuals_file(folder, rank).name for rank, exists in enumerate(has_file) if not exists]
        raise ConfigError("resume_from_checkpoint", str(folder), f"a folder that also has {', '.join(missing)}")
    else:
        _log.warning("%s has no %s files: error-feedback residuals start empty", folder, RESIDUALS)


# -- local steps


LOCAL_STEPS_FILE = "pipecomp_local_steps"  # in a checkpoint folder: FILE_RANK.pt


class LocalStepsCallback(TrainerCallback):
    """Take the outer steps of one process. It runs after all other callbacks, which decide on evaluating and saving.

    Args:
        options: H, the outer optimizer, fragments and overlap.
        ddp: The DDP instance around Trainer's model.
        state: Averages the changes of weights.
        optimizer: Trainer's optimizer.
        args: TrainingArguments. `average_tokens_across_devices` waits for all processes, so it is off in local steps.

    Raises:
        ConfigError: If there are more fragments than weights.
    """

    def __init__(
        self, options: LocalSteps, ddp: DistributedDataParallel, state: State, optimizer: Any, args: Any
    ) -> None:
        weights = {name: p for name, p in ddp.module.named_parameters() if p.requires_grad}
        self._exact = State("none", group=state.group) if options.shares_rows else None
        moments = SecondMoments(weights, lambda: optimizer.state) if options.second_moments == "rows" else None
        self.outer = OuterSteps(options, weights, set(), state, state.group.size, self._exact, moments)
        self._rank = state.group.rank
        self._group = state.group
        self._common = ExitStack()
        self._args, self._average_tokens = args, args.average_tokens_across_devices
        self._set_token_averaging()
        self._ddp = ddp
        ddp.broadcast_buffers = False

    # -- events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Use the common weights for an evaluation at the start."""
        if args.eval_on_start:
            self._common.enter_context(self.outer.common_weights())

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the process's own weights, and disable DDP's synchronization in local steps."""
        # Note: in a local step DDP would wait for all processes to find out which weights have gradients.
        self._common.close()
        self.outer.start(state.global_step)
        self._ddp.require_backward_grad_sync = self.outer.synchronous

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the outer step if it is due; the last step of a training always ends with one."""
        self.outer.after_step(state.global_step)
        if state.global_step >= state.max_steps:
            self.outer.synchronize(state.global_step)
        self._set_token_averaging()
        self._use_common_weights(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate and save the common weights."""
        self._use_common_weights(control)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Synchronize the weights after the last step, before Trainer may load its best checkpoint.

        During training another callback may have requested a checkpoint because of the logged values.
        """
        if logs is not None and "train_loss" in logs:
            self._common.close()
            self.outer.synchronize(state.global_step)
        else:
            self._use_common_weights(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the thread that averages rows, and restore Trainer's arguments."""
        if self._exact is not None:
            self._exact.close()
        self.restore_settings()

    def restore_settings(self) -> None:
        """Restore the changed settings of Trainer's arguments and of DDP."""
        self._args.average_tokens_across_devices = self._average_tokens
        self._ddp.require_backward_grad_sync = True

    def _set_token_averaging(self) -> None:
        """Count the next step's labels over all processes or over this one. Trainer counts before the step begins."""
        self._args.average_tokens_across_devices = self._average_tokens and self.outer.synchronous

    def _use_common_weights(self, control: Any) -> None:
        if control.should_evaluate or control.should_save:
            self._common.close()
            self._common.enter_context(self.outer.common_weights())

    # -- checkpoints

    def save(self, folder: Path, optimizer: Any) -> None:
        """Write this process's own weights and optimizer states; Trainer writes the common weights."""
        self._common.close()
        state = {**self.outer.state_dict(), "optimizer": optimizer.state_dict() if self._rank else None}
        torch.save(state, folder / f"{LOCAL_STEPS_FILE}_{self._rank}.pt")

    def load(self, folder: Path, optimizer: Any, step: int) -> None:
        """Load the file of `save`. Trainer has loaded the common weights and the first process's optimizer.

        Raises ConfigError if only some processes have a file. Without any file a new interval begins.
        """
        file = folder / f"{LOCAL_STEPS_FILE}_{self._rank}.pt"
        has_file = [bool(row[0]) for row in self._group.gather_numbers([float(file.is_file())])]
        if not any(has_file):
            _log.warning("%s has no %s files: a new interval of local steps begins", folder, LOCAL_STEPS_FILE)
            self.outer.start(step)
            self._set_token_averaging()
            return
        if not all(has_file):
            missing = [f"{LOCAL_STEPS_FILE}_{rank}.pt" for rank, exists in enumerate(has_file) if not exists]
            raise ConfigError("resume_from_checkpoint", str(folder), f"a folder that also has {', '.join(missing)}")
        state = torch.load(file, map_location="cpu", weights_only=True)
        options = state["shared"]["options"]
        require(self.outer.fits(state["shared"]), "local_steps", options, "the options of the checkpoint")
        self.outer.load_state_dict(state, step)
        self._set_token_averaging()
        if state["optimizer"] is not None:
            optimizer.load_state_dict(state["optimizer"])
