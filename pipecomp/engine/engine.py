"""A DeepSpeed PipelineEngine whose stages communicate over compressed links.

DeepSpeed keeps optimizers, precision, data-parallel reduction and checkpoints. This subclass replaces its schedule, its
instructions for loading, sending and receiving, the reduction of tied weights, and the global norm.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from deepspeed.runtime.pipe import engine as deepspeed_pipe
from deepspeed.runtime.pipe import schedule as ds_schedule
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from pipecomp.checkpoint.reshard import LoadOptions
from pipecomp.checkpoint.run_id import RunIdentity
from pipecomp.config import Config
from pipecomp.data import TrainLoader
from pipecomp.distributed.collectives import gathered
from pipecomp.distributed.consistency import AllRanks
from pipecomp.distributed.heartbeat import Heartbeat
from pipecomp.elastic.second_home import RankState, SecondHome, choose_homes, data_limit
from pipecomp.elastic.transfer import HomePlan
from pipecomp.engine.checkpointing import CheckpointManager
from pipecomp.engine.deepspeed_patches import no_stage_messages
from pipecomp.engine.export import save_pretrained
from pipecomp.engine.failure import FailureGuard
from pipecomp.engine.local_steps import LocalTraining, TrafficPriority
from pipecomp.engine.reduction import GradientReduction, ReplicaAdam, ReplicaExchanges
from pipecomp.engine.replica_sync import has_modes, match_replicas, pipelines, saved_buffers
from pipecomp.engine.reporting import Reporting
from pipecomp.engine.schedule import EvalSchedule, InFlightControl, TrainSchedule
from pipecomp.engine.stage_work import StageWork
from pipecomp.errors import ConfigError, SplitError, require
from pipecomp.interfaces import EngineState, ResumeState, StageContext, TrainingProgress
from pipecomp.schedule import InFlight
from pipecomp.stages.link.links import Links
from pipecomp.stages.partition.modules import ModuleStage
from pipecomp.stages.partition.planning import SplitPlan
from pipecomp.stages.partition.quantization import state_tensors, without_quantized
from pipecomp.stages.partition.stage import Stage
from pipecomp.utils.activity import Activity, local_activity, progress

_NEVER = 10**9  # steps_per_print of callers that report themselves


_PARTS = {  # of a step, for reports to other ranks
    "forward": "computes the forward of micro-batch {micro_batch}",
    "backward": "computes a backward",
    "encode": "sends micro-batch {micro_batch}",
    "decode": "waits for a packet of micro-batch {micro_batch}",
    "reduce": "averages gradients",
    "update": "updates its weights",
}


def _timed(part: str, instruction: Callable[..., None]) -> Callable[..., None]:
    """Wrap an instruction; in training its time counts as `part`."""

    def run(self: PipelineEngine, **place: int) -> None:
        progress.part = _PARTS[part].format(**place)
        with self.reporting.part(part, place.get("micro_batch")) if self.module.training else nullcontext():
            instruction(self, **place)

    return run


class PipelineEngine(deepspeed_pipe.PipelineEngine, EngineState):
    """Trains with `train_batch` and evaluates with `eval_batch`; made by `pipecomp.initialize`.

    DeepSpeed's signatures apply: see `deepspeed.runtime.pipe.engine.PipelineEngine`.

    Attributes:
        pipecomp_config: The section "pipecomp", with measured bits in place of "auto" and of rates.
        links: This rank's ends of its links.
        run: Owner of the cached activations; None if none are cached.
        resumed: How the run continues, set by `load_checkpoint`; None before.
        data_facts: Identify the training data in a checkpoint; empty if sample ids are not their places.
        step_samples: Samples of this replica in the next step, if its loss is their mean; None if it is the mean over
            micro-batches.
        second_home: Takes records of this rank's state; None with "elastic.second_home" "off".
    """

    data_iterator: Any  # DeepSpeed's
    is_data_parallel: bool

    def __init__(
        self,
        *,
        pipecomp_config: Config,
        plan: SplitPlan,
        tied_groups: dict[str, Any],
        exchanges: ReplicaExchanges,
        **ds: Any,
    ) -> None:
        """Build DeepSpeed's engine and the parts of this one.

        Args:
            pipecomp_config: The section "pipecomp".
            plan: Plan of the model.
            tied_groups: Process group of each tied weight of this stage, by its name in the plan.
            exchanges: Exchanges of compressed gradients and local steps.
            **ds: DeepSpeed's arguments.
        """
        self.pipecomp_config, self.plan = pipecomp_config, plan
        self.links = Links()
        self.run: RunIdentity | None = None
        self.resumed: ResumeState | None = None
        self.progress = TrainingProgress()
        self.data_facts: dict[str, Any] = {}
        self.loader: TrainLoader | None = None
        self.step_samples: int | None = None
        self.second_home: SecondHome | None = None
        self._step_s = 0.0
        self._collects = False
        with no_stage_messages():
            super().__init__(**ds)
        self.context = context = StageContext(
            rank=self.global_rank,
            grid=self.grid,
            device=self.device,
            stage=self.stage,
            plan=plan,
            settings=pipecomp_config,
        )
        takes_local_steps = pipecomp_config.gradients.local is not None
        self.local = LocalTraining(context, self.optimizer, exchanges) if takes_local_steps else None
        self.gradients = GradientReduction(context, self, tied_groups, exchanges)
        self.guard = FailureGuard(context.rank, context.device)
        self.in_flight_control = InFlightControl(context, pipecomp_config.in_flight, self.micro_batches)
        self.reporting = Reporting(context, self.gradients, self.in_flight_control, self.local)
        self._checkpoints = CheckpointManager(context, self, self.gradients, self.local, self.guard)
        self._checkpoints.warn_of_precision()
        self._work = StageWork(context, self, self.in_flight_control)
        self._requires_grad = [(name, p, p.requires_grad) for name, p in self.stage.named_parameters()]

    @property
    def stage(self) -> Stage | ModuleStage:
        """The part of the model that this rank trains."""
        stage: Stage | ModuleStage = self.module.forward_funcs[0]
        return stage

    @property
    def state_number(self) -> int:
        """The number in the names of files with this rank's state, the same in every layout of ranks."""
        return self.context.state_number

    @property
    def in_flight(self) -> InFlight:
        """The number of micro-batches in flight."""
        return self.in_flight_control.in_flight

    def open_links(self, links: Links, run: RunIdentity | None, heartbeat: Heartbeat) -> None:
        """Use these links; called once by `initialize`.

        Args:
            links: This rank's ends.
            run: Owner of the cached activations; None if none are cached.
            heartbeat: Heartbeat of all ranks.
        """
        self.links = self.reporting.links = links
        self.run = self._checkpoints.run = run
        self.guard.watch(links, heartbeat)
        self._open_second_home(heartbeat)
        prefetching = self.pipecomp_config.store.prefetch > 0
        if links.to_previous is not None and links.environment is not None and prefetching:
            links.to_previous.receive_staging.on_header = links.prefetch_arrived
        if links.to_next is not None and links.gradients and prefetching:
            links.to_next.receive_staging.on_header = links.prefetch_arrived

    def _open_second_home(self, heartbeat: Heartbeat) -> None:
        """Start sending records, if the settings ask for it; every rank must call this."""
        settings, grid, plan = self.pipecomp_config.elastic, self.grid, self.plan
        if not settings.active:
            return
        hosts, machines = [place.host for place in heartbeat.places], [place.machine for place in heartbeat.places]
        homes = choose_homes(settings.second_home, pipelines(grid), hosts, machines)
        self._checkpoints.prepare_records()
        stages = [place.stage for place in heartbeat.places]
        home_plan = HomePlan(
            rank=self.global_rank,
            stage=self.stage_id,
            cuts=tuple(plan.cuts),
            homes=homes,
            limits=[data_limit(plan.trained[stage], plan.parameters[stage]) for stage in stages],
            timeout_s=max(self.pipecomp_config.transport.timeout_s, default_pg_timeout.total_seconds()),
            stall_s=self.pipecomp_config.transport.timeout_s,
        )
        give_way = TrafficPriority([end.transport for end in self.links]).wait
        with AllRanks(missed=self.guard.missed).collective_errors():
            home = SecondHome(settings, home_plan, give_way)
        self.second_home = self._checkpoints.second_home = self.reporting.second_home = home

    def set_bits(self, settings: Config) -> None:
        """Train with the bits of these settings from now on; every rank must call this between two steps."""
        self.pipecomp_config = settings
        for end in self.links:
            end.set_bits(settings)

    def set_loader(self, loader: TrainLoader) -> None:
        """Train on the micro-batches of this loader."""
        self.loader = loader
        self.set_dataloader(loader)

    @property
    def micro_batches_per_epoch(self) -> int | None:
        """Micro-batches of a replica in one epoch of the training data; None without training data."""
        return None if self.loader is None else self.loader.sampler.per_epoch

    def seek_loader(self) -> None:
        """Continue in the training data at `progress`."""
        if self.loader is not None:
            self.loader.taken = self.progress.batches_taken
            self.set_dataloader(self.loader)

    def propagate_failure(self) -> AbstractContextManager[None]:
        """Wrap an action of all ranks: an error that ends it here ends it on all ranks, with the reason."""
        return self.guard.propagate_failure()

    # -- training and evaluation

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """Take one optimizer step over `gradient_accumulation_steps` micro-batches of each replica.

        Args:
            data_iter: Batches for the first and the last stage, with "sample_ids" if activations are cached. Default:
                the training data.

        Returns:
            The mean loss, on every rank; in local steps that of this rank's replica.

        Raises:
            PeerLostError: Another rank is gone. The run is over after this and any other error.
            ConfigError: A parameter was frozen or unfrozen since the engine was built.
        """
        step, training_data = self.global_steps, self.data_iterator
        progress.step = step + 1
        with self.propagate_failure(), Activity("trains"):
            self._check_trained()
            if self.run is not None:
                self.run.begin_step()
            if self.local is not None:
                self.local.begin_step(step)
                self.gradients.synchronous = self.local.synchronous
            began = time.perf_counter()
            self.in_flight_control.begin_step()
            self.reporting.begin_step(step)
            with self._optimizer_mode(training=True):
                loss: Tensor = super().train_batch(data_iter)
            self.loss: Tensor = (
                self.loss.detach()
            )  # its graph has hooks that refer to this engine: it would never be freed
            if (self.steps_per_print() or _NEVER) >= _NEVER:  # DeepSpeed resets the timer only when it prints
                self.timers(deepspeed_pipe.TRAIN_BATCH_TIMER).reset()
            self.in_flight_control.end_step(time.perf_counter() - began)
            if self.local is not None:
                with self.reporting.part("reduce"):
                    self.local.outer.after_step(self.global_steps)
            if data_iter is None:
                self.progress.batches_taken += self.micro_batches
            elif self.loader is not None:
                self.data_iterator = training_data  # DeepSpeed would continue with `data_iter`
            self.links.end_step()
            every = self.pipecomp_config.store.drift_check
            if self.run is not None and every is not None and self.global_steps % every == 0:
                self.links.check_drift(step)
            if self.links.environment is not None:
                with self.reporting.event("commit"), local_activity("waits for the disk of its message store"):
                    self.links.environment.commit()
            self.reporting.trace.end_step()
            self._step_s = time.perf_counter() - began
            if self._checkpoints.trainer_state is None:
                self.end_step()
        return loss

    def use_trainer_state(self, state: Callable[[], RankState] | None) -> None:
        """Let records have a trainer's files, too. The trainer then calls `end_step` after every step.

        Args:
            state: Returns the trainer's files in a checkpoint of the last step; None for no trainer.
        """
        self._checkpoints.trainer_state = state

    def end_step(self) -> None:
        """Send a record of the last step to the second home if one is due; every rank must call this."""
        if self.second_home is not None:
            with self.propagate_failure():
                self.second_home.end_step(self.global_steps, self._step_s, self._checkpoints.state_of_rank)

    def collect_checkpoint(self) -> None:
        """Hand the contents of DeepSpeed's files of this rank to `checkpoint_engine`, without collectives."""
        exclude = self.stage.adapter is not None
        self._collects = True
        try:
            self._save_checkpoint("", "", client_state={}, exclude_frozen_parameters=exclude)
            if self.save_zero_checkpoint:
                self._save_zero_checkpoint("", "")
        finally:
            self._collects = False

    def _check_trained(self) -> None:
        """Raise ConfigError if parameters were frozen or unfrozen since the engine was built."""
        for name, parameter, trained in self._requires_grad:
            if parameter.requires_grad is not trained:
                hint = "The optimizer has the parameters that were trained at the start: build a new engine."
                raise ConfigError(f"{name}.requires_grad", parameter.requires_grad, f"{trained}, as at the start", hint)

    def begins_local_step(self) -> bool:
        """True if the next step is local to the replica."""
        return self.local is not None and self.local.begins_alone(self.global_steps)

    def average_replicas(self) -> None:
        """Average replicas that take local steps now, as at the end of training; every rank must call this.

        All replicas then have the same weights, and the next interval begins. Does nothing without local steps.
        """
        if self.local is not None:
            with self.propagate_failure(), self.reporting.part("reduce"):
                self.local.outer.synchronize(self.global_steps)

    def common_weights(self) -> AbstractContextManager[None]:
        """In the body, use the weights that replicas last had in common; `comm_stats` reports their step.

        Evaluation and saving do this themselves. Without local steps weights are always common.
        """
        return nullcontext() if self.local is None else self.local.outer.common_weights()

    @contextmanager
    def _optimizer_mode(self, *, training: bool) -> Iterator[None]:
        """In the body, use the weights for training or for evaluation of an optimizer that holds both, as in Trainer.

        Schedule-free optimizers do. A saved model has the weights for evaluation, a checkpoint those in place.
        """
        optimizer: Any = self.basic_optimizer
        if has_modes(optimizer):
            (optimizer.train if training else optimizer.eval)()
        yield
        if has_modes(optimizer) and not training:
            optimizer.train()

    def eval_batch(
        self,
        data_iter: Any,
        *args: Any,
        on_logits: Callable[[Tensor, Tensor | None], Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Evaluate batches without changing the message stores; arguments and result as DeepSpeed's.

        All replicas evaluate with the buffers of the first one, such as batch norm's statistics, as a checkpoint has.

        Args:
            data_iter: Batches for the first and the last stage, each of at most 64 samples or a training micro-batch's
                number; `allow_evaluation` allows more.
            *args: DeepSpeed's.
            on_logits: Called on the last stage as `on_logits(logits, labels)` for every micro-batch instead of the loss
                function; labels may be missing then.
            **kwargs: DeepSpeed's.

        Returns:
            The mean loss; with `on_logits` the list of its results (tensors), on the last stage only.

        Raises:
            DataError: A batch has too many samples; it was not sent.
            ConfigError: `num_micro_batches` is less than 1.
        """
        count = kwargs.get("num_micro_batches")
        require(on_logits is not None or count is None or count >= 1, "num_micro_batches", count, "1 or more, or None")
        if on_logits is not None:
            kwargs.update(compute_loss=False, reduce_output=None)
        evaluating = self._optimizer_mode(training=False)
        with (
            Activity("evaluates"),
            self.propagate_failure(),
            self._work.using(on_logits),
            self.common_weights(),
            evaluating,
        ):
            match_replicas(saved_buffers(self.stage), self.seq_data_parallel_group)
            result = super().eval_batch(data_iter, *args, **kwargs)
        self.progress.evaluations += 1
        return result

    def allow_evaluation(self, samples: int) -> None:
        """Allow larger batches in `eval_batch`; every rank must call this with the same number.

        A rank accepts no more from the stage before than all have agreed on, because its memory must hold it.

        Args:
            samples: Maximum of a batch. Numbers below 64 or the size of a training micro-batch change nothing.

        Raises:
            ConfigError: `samples` is not a positive whole number.
            LinkError: On every rank, if the numbers differ.
        """
        allowed = "a whole number, 1 or more"
        require(isinstance(samples, int) and samples >= 1, "samples", samples, allowed)
        with self.propagate_failure():
            for end in self.links:
                end.allow_evaluation(samples)
            # A stage sends larger batches only after this, when all ranks accept them.
            ranks = AllRanks(missed=self.guard.missed)
            ranks.assert_same_on_all_ranks({"samples of an evaluation batch": samples})

    def allow_documents(self, documents: int) -> None:
        """Allow more packed samples in a micro-batch; every rank must call this with the same number.

        A packed micro-batch may have all samples of an optimizer step, `train_micro_batch_size_per_gpu` ×
        `gradient_accumulation_steps`, and the tokens of `train_micro_batch_size_per_gpu` samples.

        Args:
            documents: Maximum of a micro-batch, in training and evaluation. Smaller numbers change nothing.

        Raises:
            ConfigError: `documents` is not a positive whole number.
            LinkError: On every rank, if the numbers differ.
        """
        allowed = "a whole number, 1 or more"
        require(isinstance(documents, int) and documents >= 1, "documents", documents, allowed)
        with self.propagate_failure():
            for end in self.links:
                end.allow_documents(documents)
            ranks = AllRanks(missed=self.guard.missed)
            ranks.assert_same_on_all_ranks({"documents of a packed micro-batch": documents})

    # -- checkpoints

    def save_checkpoint(
        self, save_dir: str, tag: Any = None, client_state: dict | None = None, save_latest: bool = True, **kwargs: Any
    ) -> Any:
        """Save as DeepSpeed does, and all other state of the run; every rank must call this.

        This adds the place in the training data, random generators, error-feedback residuals, the versions in the
        message stores, and with `store.in_checkpoints` a copy of them. With a LoRA adapter frozen weights are left out,
        unless `exclude_frozen_parameters=False`. If the run is killed meanwhile, `latest` still names the checkpoint
        before, unless that has the same tag: then it is deleted first.

        Raises:
            ConfigError: bf16 without ZeRO, which DeepSpeed 0.19 saves but cannot load; a key of `client_state` that the
                checkpoint uses itself.
            CheckpointError: On every rank, if one of them cannot write. No part of the checkpoint remains, and training
                can continue.
        """
        self._checkpoints.check_precision()
        self._checkpoints.check_state(client_state)
        exclude = kwargs.setdefault("exclude_frozen_parameters", self.stage.adapter is not None)
        hint = "Quantized weights are not loaded from a checkpoint, but from the model's folder."
        require(exclude or not self.stage.quantized, "exclude_frozen_parameters", exclude, "True", hint)
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
        """Load as DeepSpeed does, and continue in the training data; every rank must call this.

        Cached activations are the checkpoint's if the stores still hold them or the checkpoint has a copy, otherwise
        those that both ends of each link have in common; `resumed` reports which.

        The checkpoint may have other cuts, another K and another number of replicas. Every rank then takes its
        parameters and optimizer states from the files of all stages, which must be on its machine; every sample is sent
        as a first visit again, error-feedback residuals start empty, and random generators stay as they are. If its
        training data or link settings differ, only the cached activations are dropped.

        Returns:
            DeepSpeed's path and client state; both None if there is no file `latest` and no tag is given.

        Raises:
            StoreError: On every rank, if the stores belong to another run than the checkpoint.
            SplitError: The checkpoint is of another model.
            ConfigError: It has another precision or ZeRO stage, is unfinished, damaged or missing.
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

    def save_pretrained(self, folder: str) -> None:
        """Write the model as a Hugging Face folder for `from_pretrained`; every rank must call this.

        The folder is complete on the machine of rank 0, whether or not the machines share a disk.

        Raises:
            OutputError: On every rank, if one of them cannot write.
            SplitError: The model is of plain modules.
        """
        if isinstance(self.stage, ModuleStage):
            raise SplitError("a model of plain modules has no Hugging Face folder: save each stage's state_dict()")
        owners = [self.grid._topo.get_rank(pipe=stage, data=0) for stage in range(self.num_stages)]
        with self.propagate_failure(), self.common_weights(), self._optimizer_mode(training=False):
            save_pretrained(self.stage, folder, owners=owners)

    def close(self) -> None:
        """Finish stores and averages, and close connections and process groups in order; may be called twice.

        It runs at exit too, and `initialize` closes engines that nothing refers to any more. Gloo's threads and sockets
        end with the last reference to the engine.
        """
        if self.second_home is not None:
            self.second_home.close(failed=self.guard.failed)
        self.guard.close()
        self.gradients.close(failed=self.guard.failed)
        self.guard.destroy_groups()

    def __enter__(self) -> PipelineEngine:
        """Return the engine; `with` closes it at the end."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, SystemExit):
            self.guard.report(error)
        self.close()

    # -- reports

    def comm_stats(self) -> dict[str, Any]:
        """Traffic and times of this rank so far.

        Returns:
            "rank", "stage", "replica". "links": by "k->k+1", bytes raw and sent per direction, seconds waited, error,
            store hit rate. "groups": by name, bytes raw and sent, and "wait_seconds", of the whole reduction or, if it
            is compressed, of waits alone. "seconds": by part, see `stats.Seconds`. "steps". "store_bytes": of the
            store's file, or of its values in memory. "in_flight": micro-batches that may be in flight. "micro_batches":
            the last step's seconds by micro-batch. "local_steps": see `LocalTraining.stats`, with local steps.
            "second_home": see `SecondHome.stats`, with a second home. "streams": TCP connections by link.
        """
        return self.reporting.stats(self.global_steps)

    def gather_comm_stats(self) -> list[dict[str, Any]]:
        """`comm_stats` of all ranks, on every rank; every rank must call this."""
        with self.propagate_failure():
            return gathered(self.comm_stats())

    def describe(self) -> dict[str, Any]:
        """Model, stages, batch sizes, settings and links as JSON values. See `Reporting.run_metadata`."""
        return self.reporting.run_metadata(self.pipecomp_config, self.micro_batch_size, self.micro_batches)

    def gather_last_step(self) -> list[dict[str, Any]]:
        """Events of all ranks in the last training step, in Chrome's trace format; every rank must call this.

        Returns:
            The same on every rank. Transfers and store accesses are among them only after `start_trace`.
        """
        with self.propagate_failure():
            return self.reporting.last_step()

    def start_trace(self) -> None:
        """Keep the events of training steps from here on for `save_trace`, the last 200,000 of each rank."""
        self.reporting.start_trace()

    def save_trace(self, path: str | Path) -> None:
        """Write all ranks' events since `start_trace` to a file of rank 0; every rank must call this.

        The file is in Chrome's trace format.
        """
        with self.propagate_failure():
            self.reporting.save_trace(path)

    # -- DeepSpeed's hooks

    def _train_schedule(self) -> TrainSchedule:
        lowest = self.plan.lowest_trained
        return TrainSchedule(self.micro_batches, self.num_stages, self.stage_id, self.in_flight.value, lowest)

    def _inference_schedule(self, micro_batches: int) -> EvalSchedule:
        return EvalSchedule(micro_batches=micro_batches, stages=self.num_stages, stage_id=self.stage_id)

    def _copy_recovery_script(self, save_path: str) -> None:
        if not self._collects:
            super()._copy_recovery_script(save_path)

    def _get_all_ckpt_names(self, checkpoints_path: str, tag: str) -> list[str]:
        """Name this stage's own file for every stage: DeepSpeed counts them, and others may be on other machines."""
        return [self._get_ckpt_name(checkpoints_path, tag)] * self.num_stages

    def _broadcast_model(self) -> None:
        tensors = [*self.module.parameters(), *self.module.buffers(), *state_tensors(self.module)]
        match_replicas(tensors, self.seq_data_parallel_group)

    def _cast_module_mixed_precision(self, *args: Any, **kwargs: Any) -> None:
        """Cast parameters, except for those that stay in float32, and for quantized ones, whose bytes may be floats."""
        kept = [(p, p.data.float()) for p in self.stage.float32_parameters]
        with without_quantized(self.module, lambda x: x):
            super()._cast_module_mixed_precision(*args, **kwargs)
        for parameter, values in kept:
            parameter.data = values

    def _aggregate_total_loss(self) -> Tensor:
        """In a local step average over this replica alone: DeepSpeed would wait for the others."""
        before = self.is_data_parallel
        self.is_data_parallel = before and self.gradients.synchronous
        try:
            loss: Tensor = super()._aggregate_total_loss()
            return loss
        finally:
            self.is_data_parallel = before

    def clip_fp32_gradients(self) -> None:
        """Clip by the norm over all stages (DeepSpeed counts the first stage only). ReplicaAdam clips itself."""
        if not isinstance(self.optimizer, ReplicaAdam):
            self._global_grad_norm = self.gradients.clip(self.gradient_clipping())

    # -- the instructions of a step

    def _exec_reduce_grads(self) -> None:
        self.gradients.average_replicas(super()._exec_reduce_grads)

    def _exec_optimizer_step(self) -> None:
        super()._exec_optimizer_step()
        self.gradients.count_weights()

    _STOCK = deepspeed_pipe.PipelineEngine._INSTRUCTION_MAP
    _INSTRUCTION_MAP = {  # noqa: RUF012 (DeepSpeed's name and form)
        ds_schedule.LoadMicroBatch: lambda self, **place: self._work.load(**place),
        ds_schedule.ForwardPass: _timed("forward", lambda self, **place: self._work.forward(**place)),
        ds_schedule.BackwardPass: _timed("backward", _STOCK[ds_schedule.BackwardPass]),
        ds_schedule.SendActivation: _timed("encode", lambda self, **place: self._work.send_activation(**place)),
        ds_schedule.RecvActivation: _timed("decode", lambda self, **place: self._work.recv_activation(**place)),
        ds_schedule.SendGrad: _timed("encode", lambda self, **place: self._work.send_grad(**place)),
        ds_schedule.RecvGrad: _timed("decode", lambda self, **place: self._work.recv_grad(**place)),
        ds_schedule.ReduceTiedGrads: _timed("reduce", lambda self: self.gradients.sum_tied()),
        ds_schedule.ReduceGrads: _timed("reduce", _exec_reduce_grads),
        ds_schedule.OptimizerStep: _timed("update", _exec_optimizer_step),
    }
