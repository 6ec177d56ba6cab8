"""The trainer's setup: rendezvous, comparison of arguments, partitioning of the model, choice of the optimizer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.trainer_utils import enable_full_determinism, set_seed
from transformers.utils import logging as transformers_logging

from pipecomp.allreduce.group import host_backend
from pipecomp.config import Config
from pipecomp.distributed.collectives import open_groups
from pipecomp.distributed.consistency import AllRanks, versions
from pipecomp.distributed.placement import own_gpu, some_share
from pipecomp.distributed.rendezvous import all_ranks, check_processes, start_processes, wanted_keys
from pipecomp.errors import PipecompError, SplitError, require
from pipecomp.rank_layout import RankLayout
from pipecomp.stages.partition.adapters import without_peft
from pipecomp.stages.partition.loading import resolve, skeleton
from pipecomp.stages.partition.modules import Modules, plan_modules
from pipecomp.stages.partition.planning import SplitPlan, plan_model
from pipecomp.stages.partition.quantization import count_values
from pipecomp.tls.process_group import BACKEND
from pipecomp.trainer import arguments, deepspeed_config, stage_options
from pipecomp.utils.activity import limits


def join(
    args: Any,
    model: Any,
    model_init: Callable[..., Any] | None,
    pipecomp: str | os.PathLike | dict[str, Any] | None = None,
) -> Any:
    """Join the other processes, compare their arguments, and seed. Returns a group of all ranks for CPU tensors.

    pipecomp: as for `PipelineTrainer`; its "transport" section has the keys. Raises ConfigError if a pipeline does not
    support the arguments, LinkError if ranks differ.
    """
    if args.use_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before the first import of deepspeed, which reads it
    config = deepspeed_config.rendezvous_config(args, pipecomp)
    if dist.is_initialized() and dist.get_backend() != BACKEND and dist.get_world_size() > 1 and wanted_keys(config):
        dist.destroy_process_group()  # TrainingArguments made accelerate join over gloo; the group is still unused
    start_processes(args.seed, config)
    ranks = all_ranks()
    with ranks.collective_errors():
        arguments.check(args)
        stage_options.check(args)
        require(
            (model is None) != (model_init is None), "model", model, "either a model or a model_init that makes one"
        )
    check_equal_arguments(ranks, args, **versions())  # accelerate joins processes without comparing versions
    gpu = own_gpu(int(os.environ["LOCAL_RANK"])) if dist.get_backend() == "nccl" else None
    _check_shared_gpus(ranks.all_gather_object(None if gpu is None else gpu.whole), args)
    group = _group_of_all(args.ddp_timeout)
    (enable_full_determinism if args.full_determinism else set_seed)(args.seed)
    transformers_logging.set_verbosity(args.get_process_log_level())
    return group


_groups: dict[float, Any] = {}  # by timeout


def _group_of_all(timeout_s: float) -> Any:
    """Return a group of all ranks for CPU tensors; trainers of one process share it, as its threads stay."""
    if _groups.get(timeout_s) not in open_groups():
        _groups[timeout_s] = dist.new_group(backend=host_backend(), timeout=timedelta(seconds=timeout_s))
    return _groups[timeout_s]


def _check_shared_gpus(gpus: Sequence[str | None], args: Any) -> None:
    """Raise ConfigError on every rank if processes share a GPU over NCCL, accelerate's default. gpus: by rank."""
    allowed = "'gloo' if processes share a GPU: NCCL needs one GPU per process"
    require(not some_share(gpus), "ddp_backend", args.ddp_backend, allowed)


@dataclass(frozen=True, kw_only=True)
class PipelineSetup:
    """The partition of a run's model over its processes.

    Attributes:
        model_class: Class of the unsplit model.
        model_config: Its Hugging Face configuration.
        engine_config: DeepSpeed's configuration.
        settings: Its "pipecomp" section.
        plan: The blocks of each stage.
        replicas: Number of pipeline replicas: processes divided by stages.
        flos_per_token: Trainer's estimate of a step's floating-point operations per token.
        trained_values: Number of trained values of the whole model.
    """

    model_class: Any
    model_config: Any
    engine_config: dict[str, Any]
    settings: Config
    plan: SplitPlan
    replicas: int
    flos_per_token: int
    trained_values: int

    @property
    def ranks(self) -> RankLayout:
        """The order of the ranks."""
        return RankLayout(self.plan.num_stages, self.replicas, self.settings.layout)

    @property
    def flattens_parameters(self) -> bool:
        """True if DeepSpeed's optimizer gets one vector instead of the parameters."""
        half = any(self.engine_config.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
        return bool(half or self.engine_config.get("zero_optimization", {}).get("stage"))

    @classmethod
    def of(
        cls,
        args: Any,
        model: Any,
        pipecomp: str | os.PathLike | dict[str, Any] | None,
        num_stages: int | None,
        cuts: Sequence[int] | None,
        *,
        complete_config: bool = False,
        sequences: int = 1,
        save_messages: bool = True,
    ) -> PipelineSetup:
        """Plan the partition. Parameters as for `PipelineTrainer`. Raises ConfigError and SplitError.

        complete_config, sequences, save_messages: see `deepspeed_config.engine_config`.
        """
        world = dist.get_world_size()
        config = deepspeed_config.engine_config(
            args, pipecomp, complete=complete_config, sequences=sequences, save_messages=save_messages
        )
        settings = Config.from_dict(config[deepspeed_config.SECTION])
        limits.set(settings.transport.data_timeout_s)
        stages = num_stages if num_stages is not None or cuts is not None else world
        if isinstance(model, Modules):
            split_plan = plan_modules(model, stages, cuts)
            check_processes("num_stages", split_plan.num_stages)
            return cls(
                model_class=type(model.model),
                model_config=None,
                engine_config=config,
                settings=settings,
                plan=split_plan,
                replicas=world // split_plan.num_stages,
                flos_per_token=0,
                trained_values=sum(p.numel() for p in model.model.parameters() if p.requires_grad),
            )
        source = resolve(model)
        whole = source.model if source.model is not None else skeleton(source)
        split_plan = plan_model(whole, stages, cuts, tie=settings.tie)
        check_not_trained(model, split_plan.cuts)
        check_gradient_hooks(model, split_plan)
        for name in ("output_attentions", "output_hidden_states"):
            require(
                not getattr(source.config, name, False),
                f"config.{name}",
                True,
                "False: a pipeline's last stage returns only logits",
            )
        check_processes("num_stages", split_plan.num_stages)
        zero = config.get("zero_optimization", {})
        if zero.get("stage") == 1 and not complete_config:  # DeepSpeed's default is 5e8 values for any model
            zero.setdefault("reduce_bucket_size", min(500_000_000, max(split_plan.parameters)))
        return cls(
            model_class=source.model_class,
            model_config=source.config,
            engine_config=config,
            settings=settings,
            plan=split_plan,
            replicas=world // split_plan.num_stages,
            flos_per_token=6 * _count_without_embeddings(whole),
            trained_values=sum(p.numel() for p in whole.parameters() if p.requires_grad),
        )


def _count_without_embeddings(model: Any) -> int:
    """Count weights as Trainer does; transformers' own method counts those in 4 bits wrongly if they are not loaded."""
    embeddings = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return sum(count_values(p) for name, p in model.named_parameters() if name not in embeddings)


# -- arguments that all ranks must share


# Arguments that may differ: those of a process, its machine or its reports, and deepspeed, compared in the engine.
_PER_RANK = (
    "local_rank",
    "output_dir",
    "logging_dir",
    "run_name",
    "project",
    "report_to",
    "disable_tqdm",
    "log_level",
    "log_level_replica",
    "log_on_each_node",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_prefetch_factor",
    "dataloader_persistent_workers",
    "dataloader_multiprocessing_context",
    "ddp_backend",
    "ddp_timeout",
    "deepspeed",
    "eval_accumulation_steps",
    "use_cpu",
    "tf32",
    "resume_from_checkpoint",
    "torch_empty_cache_steps",
)
_PER_RANK_PREFIXES = ("hub_", "push_to_hub", "trackio_")


def check_equal_arguments(ranks: AllRanks, args: Any, **more: Any) -> None:
    """Compare TrainingArguments of all ranks. Every rank must call this.

    Args:
        ranks: Compares values over all ranks.
        args: This rank's arguments.
        more: Further JSON values by name that must be equal.

    Raises:
        LinkError: On every rank if arguments differ; the error names argument, ranks and values.
    """
    values = json.loads(args.to_json_string())
    shared = {
        name: v for name, v in values.items() if name not in _PER_RANK and not name.startswith(_PER_RANK_PREFIXES)
    }
    ranks.assert_same_on_all_ranks({**shared, **more})


# -- the script's model


_WHOLE_MODEL_METHODS = ("generate", "merge_and_unload", "merge_adapter", "push_to_hub", "save_pretrained", "state_dict")
_DISABLED = "_pipecomp_hidden"  # attribute set by `disable_model`: the stages' cuts, a hook, the original dtypes


def parameter_dtypes(model: Any) -> dict[str, torch.dtype]:
    """Return each parameter's dtype; empty for the name of a folder."""
    return {name: p.dtype for name, p in model.named_parameters()} if isinstance(model, nn.Module) else {}


def disable_model(model: Any, cuts: Sequence[int], before: dict[str, torch.dtype]) -> None:
    """Make a model in memory raise an error when it is called or saved.

    Args:
        model: The script's model; the name of a folder is ignored.
        cuts: Cuts of the stages made from it.
        before: Its `parameter_dtypes` before training.
    """
    if not isinstance(model, nn.Module):
        return
    enable_model(model)
    kind = type(model).__name__

    def refuse(*_: Any, **__: Any) -> Any:
        raise PipecompError(
            f"{kind}: this object is not the trained model, because each process has trained only its stage. "
            "Use trainer.predict, or write the model with trainer.save_model(folder) and load it with from_pretrained"
        )

    hook = model.register_forward_pre_hook(refuse)
    for name in _WHOLE_MODEL_METHODS:
        if hasattr(model, name):
            model.__dict__[name] = refuse
    model.__dict__[_DISABLED] = (tuple(cuts), hook, before)


def enable_model(model: Any) -> None:
    """Undo `disable_model`, so that stages can be made from the model."""
    hidden = getattr(model, "__dict__", {}).pop(_DISABLED, None)
    if hidden is not None:
        hidden[1].remove()
        for name in _WHOLE_MODEL_METHODS:
            model.__dict__.pop(name, None)


def check_gradient_hooks(model: Any, plan: SplitPlan) -> None:
    """Raise SplitError if a weight tied across stages has a gradient hook: its copies in other stages have none."""
    if not isinstance(model, nn.Module):
        return
    parameters = dict(without_peft(model).named_parameters(remove_duplicate=False))
    for name in [name for group in plan.tied for name in group.parameters]:
        if parameters[name]._backward_hooks:
            raise SplitError(
                f"{name}: a gradient hook would change only the first stage's part of the gradient, because "
                f"{plan.model_class} ties this weight across stages. Untie it, or change gradients in "
                "on_pre_optimizer_step"
            )


def check_not_trained(model: Any, cuts: Sequence[int]) -> None:
    """Raise SplitError if the model was trained with other cuts, or training changed the precision of its stage."""
    # Note: each process has trained only its own blocks, with bf16 or fp16 in that precision. Other cuts would mix
    # trained with untrained blocks, and processes would disagree on the model's precision.
    hidden = getattr(model, "__dict__", {}).get(_DISABLED)
    if hidden is None:
        return
    trained_cuts, _, dtypes = hidden
    remedy = "Pass the folder written by the first trainer's save_model"
    if trained_cuts != tuple(cuts):
        raise SplitError(
            f"model: its stages were trained with the cuts {list(trained_cuts)}, so it cannot be cut at {list(cuts)}. "
            f"{remedy}"
        )
    for name, dtype in parameter_dtypes(model).items():
        if dtypes.get(name, dtype) != dtype:
            raise SplitError(
                f"model: this process has trained a stage of it in {dtype} ({name} was {dtypes[name]}), while the "
                f"other stages' blocks are unchanged. {remedy}"
            )
