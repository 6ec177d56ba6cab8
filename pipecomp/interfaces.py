"""The training engine as other rooms use it: Protocols without implementation, and the context of a stage.

Note: [Why Protocols] `pipecomp.engine.engine.PipelineEngine` inherits from DeepSpeed's engine, which has no types, so a
type checker would accept any attribute of it. It implements `TrainingEngine`; checkpoints, trainer, recipes, demo and
benchmarks depend on this Protocol, and none of them imports DeepSpeed. Names that start with an underscore are
DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from pipecomp.config import Config
from pipecomp.data import TrainLoader
from pipecomp.rank_layout import state_number
from pipecomp.schedule import InFlight
from pipecomp.stages.link.links import Links
from pipecomp.stages.partition.modules import ModuleStage
from pipecomp.stages.partition.planning import SplitPlan
from pipecomp.stages.partition.stage import Stage


class ResumeState(NamedTuple):
    """Continuation of a run after `load_checkpoint`.

    exact: every rank holds the cached activations of the checkpoint's step, so losses will be the same bit for bit.
    dropped: samples that the links of this rank dropped because their ends differed.
    """

    exact: bool
    dropped: int


@dataclass(slots=True)
class TrainingProgress:
    """batches_taken: micro-batches of the training data that this replica has used. evaluations: number so far."""

    batches_taken: int = 0
    evaluations: int = 0


class PipelineTopology(Protocol):
    """Positions of ranks in the pipeline."""

    def get_rank(self, *, pipe: int, data: int) -> int:
        """Global rank of stage `pipe` of replica `data`."""


class PipelineGrid(Protocol):
    """DeepSpeed's grid of stages and replicas."""

    data_parallel_id: int
    data_parallel_size: int
    pipe_parallel_size: int
    _topo: PipelineTopology

    def get_stage_id(self) -> int:
        """Index of this rank's stage."""

    def get_pipe_parallel_group(self) -> dist.ProcessGroup:
        """The stages of this rank's replica."""

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The replicas of this rank's stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """Constants of a run: this rank, its place in the pipeline, its stage, and the settings as given.

    Bits that are measured at the start, or loaded, are in `TrainingEngine.pipecomp_config`.
    """

    rank: int
    grid: PipelineGrid
    device: torch.device
    stage: Stage | ModuleStage
    plan: SplitPlan
    settings: Config

    @property
    def stage_id(self) -> int:
        """Index of this rank's stage, from 0."""
        return self.stage.index

    @property
    def num_stages(self) -> int:
        """K."""
        return self.plan.num_stages

    @property
    def replica(self) -> int:
        """Index of this rank's replica, from 0."""
        return self.grid.data_parallel_id

    @property
    def replicas(self) -> int:
        """Number of replicas of the pipeline."""
        return self.grid.data_parallel_size

    @property
    def state_number(self) -> int:
        """The number in the names of files with this rank's state."""
        return state_number(self.stage_id, self.replica, self.replicas)


class TrainedModule(Protocol):
    """DeepSpeed's PipelineModule, whose one layer on this rank is the stage."""

    training: bool
    loss_fn: Callable[[Any, Any], Tensor]
    has_own_loss: bool
    forward_funcs: list[Any]

    def parameters(self) -> Iterator[Parameter]:
        """The parameters of the stage."""

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """The parameters of the stage, named by layer."""

    def buffers(self) -> Iterator[Tensor]:
        """The buffers of the stage."""


class TrainingEngine(Protocol):
    """A rank's engine: trains, evaluates, saves and reports. `PipelineEngine` documents its own methods."""

    device: torch.device
    grid: PipelineGrid
    module: TrainedModule
    optimizer: Optimizer  # or DeepSpeed's wrapper, which has the same methods
    basic_optimizer: Optimizer  # inside the wrapper
    lr_scheduler: Any
    global_rank: int
    stage_id: int
    num_stages: int
    micro_batch_size: int
    micro_batches: int
    global_steps: int
    global_samples: int
    skipped_steps: int
    plan: SplitPlan
    pipecomp_config: Config
    links: Links
    resumed: ResumeState | None
    data_facts: dict[str, Any]
    step_samples: int | None
    progress: TrainingProgress
    _INSTRUCTION_MAP: dict[Any, Callable[..., None]]

    @property
    def stage(self) -> Stage | ModuleStage: ...

    @property
    def state_number(self) -> int: ...

    @property
    def in_flight(self) -> InFlight: ...

    @property
    def micro_batches_per_epoch(self) -> int | None: ...

    def is_first_stage(self) -> bool: ...

    def is_last_stage(self) -> bool: ...

    def was_step_applied(self) -> bool: ...

    def get_global_grad_norm(self) -> float | None: ...

    def set_train_batch_size(self, train_batch_size: int) -> None: ...

    def bfloat16_enabled(self) -> bool: ...

    def fp16_enabled(self) -> bool: ...

    def zero_optimization(self) -> bool: ...

    def zero_optimization_stage(self) -> int: ...

    def zero_load_from_fp32_weights(self) -> bool: ...

    def _get_ckpt_name(self, checkpoints_path: str, tag: str) -> str: ...

    def set_loader(self, loader: TrainLoader) -> None: ...

    def train_batch(self, data_iter: Any = None) -> Tensor: ...

    def use_trainer_state(self, state: Callable[[], Any] | None) -> None: ...

    def end_step(self) -> None: ...

    def begins_local_step(self) -> bool: ...

    def average_replicas(self) -> None: ...

    def eval_batch(self, data_iter: Any, *args: Any, **kwargs: Any) -> Any: ...

    def allow_evaluation(self, samples: int) -> None: ...

    def allow_documents(self, documents: int) -> None: ...

    def save_checkpoint(
        self, save_dir: str, tag: Any = None, client_state: dict | None = None, save_latest: bool = True, **kwargs: Any
    ) -> Any: ...

    def load_checkpoint(
        self,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[Any, Any]: ...

    def save_pretrained(self, folder: str) -> None: ...

    def propagate_failure(self) -> AbstractContextManager[None]: ...

    def comm_stats(self) -> dict[str, Any]: ...

    def gather_comm_stats(self) -> list[dict[str, Any]]: ...

    def gather_last_step(self) -> list[dict[str, Any]]: ...

    def describe(self) -> dict[str, Any]: ...

    def start_trace(self) -> None: ...

    def save_trace(self, path: str | Path) -> None: ...

    def close(self) -> None: ...


class ThroughputTimer(Protocol):
    """DeepSpeed's timer of samples per second."""

    def start(self) -> None: ...


class EngineState(TrainingEngine, Protocol):
    """The engine as its own parts use it: with DeepSpeed's state of a step."""

    pipe_buffers: dict[str, dict[int, Any]]
    loss: Any
    total_loss: Tensor | None
    fwd_outputs: list[Tensor]
    outputs: Any
    grad_layer: Tensor | None
    eval_return_logits: bool
    _compute_loss: bool
    tput_timer: ThroughputTimer
    using_bf16_optimizer: bool
    communication_data_type: torch.dtype
    is_data_parallel: bool
    data_iterator: Any
    checkpoint_engine: object  # writes the files of a checkpoint
    loader: TrainLoader | None

    def seek_loader(self) -> None: ...

    def set_bits(self, settings: Config) -> None: ...

    def common_weights(self) -> AbstractContextManager[None]: ...

    def collect_checkpoint(self) -> None: ...

    def _next_batch(self) -> Any: ...

    def gradient_clipping(self) -> float: ...
