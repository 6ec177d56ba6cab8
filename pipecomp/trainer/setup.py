"""Sets a trainer up: joins the ranks, compares their arguments, partitions the model and chooses the optimizer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.trainer_utils import enable_full_determinism, set_seed
from transformers.utils import logging as transformers_logging

from pipecomp.allreduce.group import host_backend
from pipecomp.config import Config
from pipecomp.distributed.consistency import AllRanks, versions
from pipecomp.distributed.placement import own_gpu, some_share
from pipecomp.distributed.rendezvous import all_ranks, check_processes, start_processes, wanted_keys
from pipecomp.errors import ConfigError, PipecompError, SplitError, require
from pipecomp.stages.partition.adapters import without_peft
from pipecomp.stages.partition.loading import resolve, skeleton
from pipecomp.stages.partition.planning import SplitPlan, plan_model
from pipecomp.tls.process_group import BACKEND
from pipecomp.trainer import arguments, deepspeed_config


def join(
    args: Any,
    model: Any,
    model_init: Callable[..., Any] | None,
    pipecomp: str | os.PathLike | dict[str, Any] | None = None,
) -> Any:
    """Join the other processes, compare what all must have in common, and seed; returns a group of all ranks, for
    tensors in memory. pipecomp: as for `PipelineTrainer`; its "transport" says where keys are.

    Raises ConfigError for arguments that a pipeline cannot follow, LinkError where the ranks differ.
    """
    if args.use_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported, which is next
    config = deepspeed_config.joining_config(args, pipecomp)
    if dist.is_initialized() and dist.get_backend() != BACKEND and dist.get_world_size() > 1 and wanted_keys(config):
        dist.destroy_process_group()  # TrainingArguments let accelerate join over gloo; nothing was sent over it yet
    start_processes(args.seed, config)
    ranks = all_ranks()
    with ranks.collective_errors():
        arguments.check(args)
        require(
            (model is None) != (model_init is None), "model", model, "a model, or a model_init that makes one; not both"
        )
    check_equal_arguments(ranks, args, **versions())  # accelerate may have joined the processes, unchecked
    gpu = own_gpu(int(os.environ["LOCAL_RANK"])) if dist.get_backend() == "nccl" else None
    _check_shared(ranks.all_gather_object(None if gpu is None else gpu.whole), args)
    group = dist.new_group(backend=host_backend(), timeout=timedelta(seconds=args.ddp_timeout))
    (enable_full_determinism if args.full_determinism else set_seed)(args.seed)
    transformers_logging.set_verbosity(args.get_process_log_level())
    return group


def _check_shared(gpus: Sequence[str | None], args: Any) -> None:
    """Refuse NCCL, which accelerate takes wherever there is a GPU, where processes share one. gpus: by rank, for NCCL.

    Raises ConfigError on every rank.
    """
    allowed = "'gloo' where processes share a GPU, which NCCL gives to one of them"
    require(not some_share(gpus), "ddp_backend", args.ddp_backend, allowed)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How this run's model is spread over its processes.

    Attributes:
        model_class: Of the unsplit model.
        model_config: Its Hugging Face configuration.
        engine_config: DeepSpeed's configuration.
        settings: The "pipecomp" section of it.
        plan: Which blocks are in which stage.
        replicas: Of the pipeline, all processes divided by the stages.
        flos_per_token: Floating-point operations that a step takes for a token, as Trainer estimates them.
    """

    model_class: Any
    model_config: Any
    engine_config: dict[str, Any]
    settings: Config
    plan: SplitPlan
    replicas: int
    flos_per_token: int

    @classmethod
    def of(
        cls,
        args: Any,
        model: Any,
        pipecomp: str | os.PathLike | dict[str, Any] | None,
        num_stages: int | None,
        cuts: Sequence[int] | None,
    ) -> Pipeline:
        """Plan it. Parameters as for `PipelineTrainer`. Raises ConfigError, and SplitError for the model."""
        world = dist.get_world_size()
        source = resolve(model)
        config = deepspeed_config.engine_config(args, pipecomp)
        settings = Config.from_dict(config[deepspeed_config.SECTION])
        stages = num_stages if num_stages is not None or cuts is not None else world
        whole = source.model if source.model is not None else skeleton(source)
        split_plan = plan_model(whole, stages, cuts, tie=settings.tie)
        check_not_trained(model, split_plan.cuts)
        check_gradient_hooks(model, split_plan)
        for name in ("output_attentions", "output_hidden_states"):
            require(
                not getattr(source.config, name, False),
                f"config.{name}",
                True,
                "False: a pipeline's last stage gives logits and nothing else",
            )
        check_processes("num_stages", split_plan.num_stages)
        zero = config.get("zero_optimization", {})
        if zero.get("stage") == 1:  # by default a buffer of 5e8 values, whatever the model
            zero.setdefault("reduce_bucket_size", min(500_000_000, max(split_plan.parameters)))
        return cls(
            model_class=source.model_class,
            model_config=source.config,
            engine_config=config,
            settings=settings,
            plan=split_plan,
            replicas=world // split_plan.num_stages,
            flos_per_token=6 * whole.num_parameters(exclude_embeddings=True),
        )


@dataclass(frozen=True, kw_only=True)
class Optimizers:
    """What the user gave to make them: of parameter groups, and of that optimizer. None: as `args` say."""

    optimizer: Callable[[list], Any] | None
    scheduler: Callable[[Any], Any] | None

    @classmethod
    def of(
        cls, given: tuple[Any, Any], class_and_options: tuple[type, dict[str, Any]] | None, settings: Config
    ) -> Optimizers:
        """Check `optimizers` and `optimizer_cls_and_kwargs` of `PipelineTrainer`. Raises ConfigError."""
        make, make_scheduler = given
        if class_and_options is not None:
            require(make is None, "optimizer_cls_and_kwargs", class_and_options, "None beside optimizers[0]")
            kind, options = class_and_options
            make = partial(kind, **options)
        for place, made in enumerate(given):
            if made is not None and not callable(made):
                allowed = "None, or a callable that takes " + ("parameter groups", "the optimizer")[place]
                raise ConfigError(f"optimizers[{place}]", type(made).__name__, allowed)
        if make is not None and settings.gradients.exchanges_in_optimizer:
            name = "optimizers[0]" if class_and_options is None else "optimizer_cls_and_kwargs"
            allowed = f"None: {settings.gradients.method!r} is the optimizer"
            raise ConfigError(name, class_and_options or given[0], allowed)
        return cls(optimizer=make, scheduler=make_scheduler)


# -- arguments that all ranks must share


# Arguments of a process, of its machine, of its reports, or compared elsewhere (deepspeed, with all of its content).
_OWN = (
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
_OWN_BEGINNINGS = ("hub_", "push_to_hub", "trackio_")


def check_equal_arguments(ranks: AllRanks, args: Any, **more: Any) -> None:
    """Compare TrainingArguments of all ranks; every rank must call this.

    Args:
        ranks: The round that this belongs to.
        args: This rank's.
        more: What else must be equal, JSON values by name.

    Raises:
        LinkError: On every rank, naming argument, ranks and values, where they differ.
    """
    given = json.loads(args.to_json_string())
    facts = {name: v for name, v in given.items() if name not in _OWN and not name.startswith(_OWN_BEGINNINGS)}
    ranks.assert_same_on_all_ranks({**facts, **more})


# -- the script's model


_WHOLE = ("generate", "merge_and_unload", "merge_adapter", "push_to_hub", "save_pretrained", "state_dict")
_HIDDEN = "_pipecomp_hidden"  # what `hide_model` put on a model: its stages' cuts, a hook, its precision before


def parameter_dtypes(model: Any) -> dict[str, torch.dtype]:
    """Each parameter's dtype; empty for a folder's name."""
    return {name: p.dtype for name, p in model.named_parameters()} if isinstance(model, nn.Module) else {}


def hide_model(model: Any, cuts: Sequence[int], before: dict[str, torch.dtype]) -> None:
    """Let a model in memory raise an error when it is called or saved.

    Args:
        model: What the script gave; of a folder's name there is nothing to hide.
        cuts: Of the stages that were made of it.
        before: Its `parameter_dtypes` before they were.
    """
    if not isinstance(model, nn.Module):
        return
    show_model(model)
    kind = type(model).__name__

    def refuse(*_: Any, **__: Any) -> Any:
        raise PipecompError(
            f"{kind}: each process has trained a stage of this model, so here it is not the trained one: "
            "trainer.save_model(folder) writes it, and from_pretrained reads it from there; trainer.predict uses it"
        )

    hook = model.register_forward_pre_hook(refuse)
    for name in _WHOLE:
        if hasattr(model, name):
            model.__dict__[name] = refuse
    model.__dict__[_HIDDEN] = (tuple(cuts), hook, before)


def show_model(model: Any) -> None:
    """Undo `hide_model`, so that stages can be made of the model: it is of the class that it was."""
    found = getattr(model, "__dict__", {}).pop(_HIDDEN, None)
    if found is not None:
        found[1].remove()
        for name in _WHOLE:
            model.__dict__.pop(name, None)


def check_gradient_hooks(model: Any, plan: SplitPlan) -> None:
    """Raise SplitError for a hook on the gradient of a weight that stages share: the others' copies of it have none."""
    if not isinstance(model, nn.Module):
        return
    held = dict(without_peft(model).named_parameters(remove_duplicate=False))
    for name in [name for group in plan.tied for name in group.parameters]:
        if held[name]._backward_hooks:
            raise SplitError(
                f"{name}: a hook on its gradient would change the first stage's part of it alone, since "
                f"{plan.model_class} ties it across stages: untie it, or change gradients in on_pre_optimizer_step"
            )


def check_not_trained(model: Any, cuts: Sequence[int]) -> None:
    """Raise SplitError for a model whose stages were trained and cannot be trained once more.

    Each process has trained other blocks of it, with BF16 or FP16 in that precision: other stages would mix trained
    blocks with others, and the processes would not agree on the model's precision.
    """
    found = getattr(model, "__dict__", {}).get(_HIDDEN)
    if found is None:
        return
    instead = "give the folder that the first trainer's save_model has written"
    if found[0] != tuple(cuts):
        raise SplitError(
            f"model: stages with the cuts {list(found[0])} were made of it and trained, so it cannot be cut at "
            f"{list(cuts)}: {instead}"
        )
    changed = [(name, dtype) for name, dtype in parameter_dtypes(model).items() if found[2].get(name, dtype) != dtype]
    for name, dtype in changed[:1]:
        raise SplitError(
            f"model: each process has trained a stage of it, this one in {dtype} ({name} was {found[2][name]}), and "
            f"has the other stages' blocks as they were: {instead}"
        )
