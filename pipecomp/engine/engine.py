"""A DeepSpeed PipelineEngine whose sends and receives go through compressed links.

DeepSpeed keeps what it is good at (optimizers, precision, data-parallel reduction, checkpoints); this subclass replaces
its instructions for loading, sending and receiving, its schedule, the reduction of tied weights and the global norm.
What it does beside that, the objects do that it holds: see `GradientReduction`, `FailureGuard`, `Checkpoints`,
`Reporting`, `RunAhead` and `StageWork`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from deepspeed.runtime.pipe import engine as deepspeed_pipe
from deepspeed.runtime.pipe import schedule as ds_schedule
from torch import Tensor

from pipecomp.checkpoint.run_id import Run
from pipecomp.config import Config
from pipecomp.data import TrainLoader
from pipecomp.distributed.collectives import gathered
from pipecomp.distributed.consistency import AllRanks
from pipecomp.distributed.heartbeat import Heartbeat
from pipecomp.engine.checkpointing import Checkpoints, LoadOptions, Progress, Resumed
from pipecomp.engine.export import save_pretrained
from pipecomp.engine.facts import run_facts
from pipecomp.engine.failure_guard import FailureGuard
from pipecomp.engine.gradient_exchange import GradientExchange, ReplicaAdam
from pipecomp.engine.local_steps import LocalExchanges, LocalTraining
from pipecomp.engine.matching import kept_buffers, match_replicas
from pipecomp.engine.reduction import GradientReduction
from pipecomp.engine.reporting import Reporting
from pipecomp.engine.run_ahead import RunAhead
from pipecomp.engine.schedule import EvalSchedule, TrainSchedule
from pipecomp.engine.stage_work import StageWork
from pipecomp.engine.starting import silent_stages
from pipecomp.errors import SplitError, require
from pipecomp.schedule.in_flight import InFlight
from pipecomp.stages.link.links import Links
from pipecomp.stages.partition.modules import ModuleStage
from pipecomp.stages.partition.planning import SplitPlan
from pipecomp.stages.partition.splitting import Stage

_NEVER = 10**9  # steps_per_print of those that report by themselves


def _counted(part: str, instruction: Callable[..., None]) -> Callable[..., None]:
    """Wrap an instruction, its time in training counted to `part`."""

    def run(self: PipelineEngine, **place: int) -> None:
        if not self.module.training:
            instruction(self, **place)
            return
        with self.reporting.part(part, place.get("micro_batch")):
            instruction(self, **place)

    return run


class PipelineEngine(deepspeed_pipe.PipelineEngine):
    """Train with `train_batch`, evaluate with `eval_batch`; made by `pipecomp.initialize`.

    DeepSpeed's own signatures hold: see `deepspeed.runtime.pipe.engine.PipelineEngine`.

    Attributes:
        pipecomp_config: The section "pipecomp", with what is measured in place of "auto" and of rates.
        configured: The same as it was given.
        links: This rank's endpoints of its links.
        run: Whose cached activations these are; None where none are kept.
        resumed: How the run goes on, set by `load_checkpoint`; None before.
        data_facts: Of the training data, by which a checkpoint knows them again; empty where their places are no ids.
    """

    data_iterator: Any  # DeepSpeed's

    def __init__(
        self,
        *,
        pipecomp_config: Config,
        plan: SplitPlan,
        tied_groups: dict[str, Any],
        exchange: GradientExchange | None = None,
        local: LocalExchanges | None = None,
        **ds: Any,
    ) -> None:
        """tied_groups: process group of each tied weight that this stage holds, by the name in `plan`.

        exchange: averages gradients where they are compressed; otherwise DeepSpeed does. local: what replicas exchange
        that take local steps, None where they do not. ds: DeepSpeed's arguments.
        """
        self.pipecomp_config, self.plan = pipecomp_config, plan
        self.configured = pipecomp_config
        self.links = Links()
        self.run: Run | None = None
        self.resumed: Resumed | None = None
        self.progress = Progress()
        self.data_facts: dict[str, Any] = {}
        self._loader: TrainLoader | None = None
        # Of this replica in the step to come, where its loss is their mean; None where it is that of micro-batches.
        self.step_samples: int | None = None
        with silent_stages():
            super().__init__(**ds)
        self.local = None if local is None else LocalTraining(self, local)
        self.gradients = GradientReduction(self, tied_groups, exchange, self.local)
        self.guard = FailureGuard(self.global_rank, self.device)
        self.reporting = Reporting(self)
        self.run_ahead = RunAhead(self, pipecomp_config.in_flight)
        self._checkpoints = Checkpoints(self)
        if self.global_rank == 0:
            self._checkpoints.warn_of_precision()
        self._work = StageWork(self)

    @property
    def stage(self) -> Stage | ModuleStage:
        """The part of the model that this rank trains."""
        return self.module.forward_funcs[0]

    @property
    def in_flight(self) -> InFlight:
        """How many micro-batches are under way."""
        return self.run_ahead.in_flight

    def open_links(self, links: Links, run: Run | None, heartbeat: Heartbeat) -> None:
        """Use these links, for this run where they keep messages; called once by `initialize`.

        heartbeat: of all ranks.
        """
        self.links, self.run = links, run
        self.guard.watch(links, heartbeat)
        prefetching = self.pipecomp_config.store.prefetch > 0
        if links.to_previous is not None and links.environment is not None and prefetching:
            links.to_previous.arrivals.then = links.prefetch_arrived
        if links.to_next is not None and links.gradients and prefetching:
            links.to_next.arrivals.then = links.prefetch_arrived

    def take_bits(self, settings: Config) -> None:
        """Train with the bits of these settings from now on; every rank must call this, between two steps."""
        self.pipecomp_config = settings
        for end in self.links:
            end.take_bits(settings)

    def set_loader(self, loader: TrainLoader) -> None:
        """Train on this loader's micro-batches."""
        self._loader = loader
        self.set_dataloader(loader)

    @property
    def micro_batches_per_epoch(self) -> int | None:
        """How many a replica takes of the training data in an epoch; None without training data."""
        return None if self._loader is None else self._loader.sampler.per_epoch

    def seek_loader(self) -> None:
        """Go on in the training data where `progress` says."""
        if self._loader is not None:
            self._loader.taken = self.progress.batches_taken
            self.set_dataloader(self._loader)

    def propagate_failure(self) -> AbstractContextManager[None]:
        """Wrap what all ranks do together: whatever ends it here ends it on all ranks, with an error that says why."""
        return self.guard.propagate_failure()

    # -- the calls of DeepSpeed's engine

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """Take one optimizer step over `gradient_accumulation_steps` micro-batches of each replica.

        Args:
            data_iter: Batches for the first and the last stage, with "sample_ids" where messages are kept; by default
                the training data.

        Returns:
            The mean loss, on every rank; in local steps that of this rank's replica.

        Raises:
            PeerLostError: Another rank is gone. After this, and after any other error, the run is over.
        """
        step, training_data = self.global_steps, self.data_iterator
        with self.propagate_failure():
            if self.run is not None:
                self.run.begin_step()
            if self.local is not None:
                self.local.begin_step()
            began = time.perf_counter()
            self.run_ahead.begin_step()
            self.reporting.begin_step(step)
            loss = super().train_batch(data_iter)
            if (self.steps_per_print() or _NEVER) >= _NEVER:  # DeepSpeed forgets a step's times where it prints
                self.timers(deepspeed_pipe.TRAIN_BATCH_TIMER).reset()
            self.run_ahead.end_step(time.perf_counter() - began)
            if self.local is not None:
                self.local.end_step()
            if data_iter is None:
                self.progress.batches_taken += self.micro_batches
            elif self._loader is not None:
                self.data_iterator = training_data  # DeepSpeed would go on with what was given for this step
            self.links.end_step()
            every = self.pipecomp_config.store.drift_check
            if self.run is not None and every is not None and self.global_steps % every == 0:
                self.links.check_drift(step)
            if self.links.environment is not None:
                with self.reporting.event("commit"):
                    self.links.environment.commit()
            self.reporting.trace.end_step()
        return loss

    def eval_batch(
        self,
        data_iter: Any,
        *args: Any,
        on_logits: Callable[[Tensor, Tensor | None], Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Evaluate batches without touching the message stores; arguments and result as DeepSpeed's.

        All replicas evaluate with the first one's buffers, such as batch norm's statistics: a checkpoint has these.

        Args:
            data_iter: Batches for the first and the last stage, each of at most 64 samples, or as many as a training
                micro-batch has; `allow_evaluation` allows more.
            *args: DeepSpeed's.
            on_logits: Called on the last stage as `on_logits(logits, labels)` for every micro-batch in place of the
                loss function; labels may be missing then.
            **kwargs: DeepSpeed's.

        Returns:
            The mean loss; with `on_logits` the list of what it returned (tensors), on the last stage only.

        Raises:
            DataError: A batch has more samples than allowed; nothing of it was sent.
            ConfigError: `num_micro_batches` is less than 1: there is no mean of no losses.
        """
        count = kwargs.get("num_micro_batches")
        require(on_logits is not None or count is None or count >= 1, "num_micro_batches", count, "1 or more, or None")
        if on_logits is not None:
            kwargs.update(compute_loss=False, reduce_output=None)
        with self.propagate_failure(), self._work.handing_over(on_logits), self.common_weights():
            match_replicas(kept_buffers(self.stage), self.seq_data_parallel_group)
            result = super().eval_batch(data_iter, *args, **kwargs)
        self.progress.evaluations += 1
        return result

    def allow_evaluation(self, samples: int) -> None:
        """Let the batches of `eval_batch` have so many samples; every rank must call this, with the same number.

        Each rank takes no more from the stage before than all have agreed on: that is what its memory must hold.

        Args:
            samples: Of a batch at most. Fewer than 64, or than a training micro-batch has, change nothing.

        Raises:
            ConfigError: It is no number of samples.
            LinkError: On every rank, if they differ.
        """
        allowed = "a whole number, 1 or more"
        require(isinstance(samples, int) and samples >= 1, "samples", samples, allowed)
        with self.propagate_failure():
            for end in self.links:
                end.allow_evaluation(samples)
            # A stage that is ahead sends only when all have come here, and take what it sends.
            ranks = AllRanks(missed=self.guard.missed)
            ranks.assert_same_on_all_ranks({"samples of an evaluation batch": samples})

    def save_checkpoint(
        self, save_dir: str, tag: Any = None, client_state: dict | None = None, save_latest: bool = True, **kwargs: Any
    ) -> Any:
        """Save as DeepSpeed does, and all else that the run needs to go on; every rank must call this.

        Saved too are the place in the training data, random generators, error-feedback residuals, what the message
        stores hold, and with `store.in_checkpoints` a copy of them. With a LoRA adapter frozen weights are left out,
        unless `exclude_frozen_parameters=False`. A run that is killed meanwhile leaves the checkpoint before as
        `latest`, unless that has the same tag: one of the same tag is deleted first.

        Raises:
            ConfigError: bf16 without ZeRO, which DeepSpeed 0.19 saves but cannot load; a key of `client_state` that the
                checkpoint has itself.
            CheckpointError: On every rank, if one of them cannot write. Nothing of the checkpoint is left, and training
                can go on.
        """
        self._checkpoints.check_precision()
        self._checkpoints.check_state(client_state)
        kwargs.setdefault("exclude_frozen_parameters", self.stage.adapter is not None)
        stock = functools.partial(super().save_checkpoint, **kwargs)
        with self.propagate_failure():
            return self._checkpoints.save(save_dir, tag, client_state, latest=save_latest, stock=stock)

    def load_checkpoint(
        self,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[Any, Any]:
        """Load as DeepSpeed does, and go on where training was in its data; every rank must call this.

        Cached activations go on as the checkpoint's if the stores still hold these or the checkpoint has a copy, else
        as what both ends of each link have in common; `resumed` says which.

        The checkpoint may be of other cuts, another K and another number of replicas. Then every rank takes its
        parameters and their optimizer states out of the files of all stages, which must be on its machine; every
        sample is sent as a first visit once more, error-feedback residuals start empty, and random generators stay as
        they are. If it is of other training data, of which samples are known by their places, or of other settings of
        the links, only the cached activations are not taken.

        Raises:
            StoreError: On every rank, if the stores are of another run than the checkpoint.
            SplitError: The checkpoint is of another model.
            ConfigError: It is of another precision or ZeRO stage, was not finished, was damaged, or is not there. Where
                no file `latest` says that there is one, nothing is loaded, and both results are None.
        """
        options = LoadOptions(
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            custom_load_fn=custom_load_fn,
        )
        with self.propagate_failure():
            return self._checkpoints.load(load_dir, tag, options, stock=super().load_checkpoint)

    def common_weights(self) -> AbstractContextManager[None]:
        """Let weights be, inside, what replicas last had in common (`comm_stats` says when); local steps go on after.

        Evaluation and saving do that by themselves. Without local steps weights are common at any time.
        """
        return nullcontext() if self.local is None else self.local.outer.common_weights()

    def average_replicas(self) -> None:
        """Let replicas that take local steps average now, as at the end of training; every rank must call this.

        All have the same weights then, and the next interval begins. Without local steps they always have.
        """
        if self.local is not None:
            with self.propagate_failure(), self.reporting.part("reduce", None):
                self.local.outer.meet(self.global_steps)

    def save_pretrained(self, folder: str) -> None:
        """Write the model as a Hugging Face folder that `from_pretrained` reads; every rank must call this.

        The folder is complete on the machine of rank 0, whether or not the machines share a disk. Raises OutputError
        on every rank if one of them cannot write.
        """
        if isinstance(self.stage, ModuleStage):
            raise SplitError("a model of plain modules has no Hugging Face folder: save each stage's state_dict()")
        owners = [self.grid._topo.get_rank(pipe=stage, data=0) for stage in range(self.num_stages)]
        with self.propagate_failure(), self.common_weights():
            save_pretrained(self.stage, folder, owners=owners)

    def close(self) -> None:
        """Finish stores and averages and end the connections in order; safe to call twice. Runs at exit by itself."""
        self.guard.close()
        self.gradients.close(failed=self.guard.failed)

    # -- what it tells

    def comm_stats(self) -> dict[str, Any]:
        """Tell this rank's traffic and time so far.

        Returns:
            "rank", "stage", "replica". "links": by "k->k+1", bytes raw and sent per direction, seconds waited, error,
            store hit rate. "groups": by name, bytes raw and sent, and "wait_seconds": of the whole reduction, or of
            waiting alone where it is compressed. "seconds": by part, see `stats.Seconds`. "steps". "store_bytes": of
            the store's file, or of its values in memory. "in_flight": micro-batches that may be under way.
            "micro_batches": the last step's seconds by micro-batch. "local_steps": see `LocalTraining.stats`, where
            replicas take them.
        """
        return self.reporting.stats()

    def gather_comm_stats(self) -> list[dict[str, Any]]:
        """Tell `comm_stats` of all ranks, on every rank; all ranks must call this."""
        with self.propagate_failure():
            return gathered(self.comm_stats())

    def describe(self) -> dict[str, Any]:
        """Tell what runs here, as JSON values: model, stages, batch sizes, settings, links. See `facts.run_facts`."""
        return run_facts(self)

    def gather_last_step(self) -> list[dict[str, Any]]:
        """Tell what every rank did in the last training step, as events of Chrome's trace format.

        Returns:
            The same on every rank; all ranks must call this. What the network did, and what stores read and put, is
            among it only after `start_trace`.
        """
        with self.propagate_failure():
            return self.reporting.last_step()

    def start_trace(self) -> None:
        """Keep the events of the training steps from here on, for `save_trace`: a rank's last 200,000."""
        self.reporting.start_trace()

    def save_trace(self, path: str | Path, *, title: str = "") -> None:
        """Write all ranks' events since `start_trace` to one file, and a picture of the last step beside it (.png).

        Chrome's trace format; of a long run the last steps only. Every rank must call this; rank 0 writes.
        """
        with self.propagate_failure():
            self.reporting.save_trace(path, title)

    # -- DeepSpeed's hooks

    def _train_schedule(self) -> TrainSchedule:
        return TrainSchedule(self.micro_batches, self.num_stages, self.stage_id, self.in_flight.value)

    def _inference_schedule(self, micro_batches: int) -> EvalSchedule:
        return EvalSchedule(micro_batches=micro_batches, stages=self.num_stages, stage_id=self.stage_id)

    def _get_all_ckpt_names(self, checkpoints_path: str, tag: str) -> list[str]:
        """This stage's own file for every stage: DeepSpeed counts them, and other machines may have the others."""
        return [self._get_ckpt_name(checkpoints_path, tag)] * self.num_stages

    def _broadcast_model(self) -> None:
        match_replicas([*self.module.parameters(), *self.module.buffers()], self.seq_data_parallel_group)

    def _aggregate_total_loss(self) -> Tensor:
        with nullcontext() if self.local is None else self.local.own_loss():
            return super()._aggregate_total_loss()

    def clip_fp32_gradients(self) -> None:
        """Clip by the norm over all stages (DeepSpeed counts the first stage only)."""
        if not isinstance(self.optimizer, ReplicaAdam):
            self._global_grad_norm = self.gradients.clip(self.gradient_clipping())

    # -- the instructions of a step

    def _exec_reduce_grads(self) -> None:
        self.gradients.average_replicas(super()._exec_reduce_grads)

    def _exec_optimizer_step(self) -> None:
        super()._exec_optimizer_step()
        self.gradients.updated()

    _STOCK = deepspeed_pipe.PipelineEngine._INSTRUCTION_MAP
    _INSTRUCTION_MAP = {  # noqa: RUF012 (DeepSpeed's name and form)
        ds_schedule.LoadMicroBatch: lambda self, **place: self._work.load(**place),
        ds_schedule.ForwardPass: _counted("forward", lambda self, **place: self._work.forward(**place)),
        ds_schedule.BackwardPass: _counted("backward", _STOCK[ds_schedule.BackwardPass]),
        ds_schedule.SendActivation: _counted("encode", lambda self, **place: self._work.send_activation(**place)),
        ds_schedule.RecvActivation: _counted("decode", lambda self, **place: self._work.recv_activation(**place)),
        ds_schedule.SendGrad: _counted("encode", lambda self, **place: self._work.send_grad(**place)),
        ds_schedule.RecvGrad: _counted("decode", lambda self, **place: self._work.recv_grad(**place)),
        ds_schedule.ReduceTiedGrads: _counted("reduce", lambda self: self.gradients.sum_tied()),
        ds_schedule.ReduceGrads: _counted("reduce", _exec_reduce_grads),
        ds_schedule.OptimizerStep: _counted("update", _exec_optimizer_step),
    }
