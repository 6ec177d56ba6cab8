"""What a trainer decides once, when it is made: who takes part, how the model is partitioned, which optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from transformers.trainer_utils import enable_full_determinism, set_seed
from transformers.utils import logging as transformers_logging

from pipecomp.allreduce.group import host_backend
from pipecomp.config import Config
from pipecomp.distributed.consistency import versions
from pipecomp.distributed.placement import own_gpu, some_share
from pipecomp.distributed.rendezvous import all_ranks, check_processes, start_processes, wanted_keys
from pipecomp.errors import ConfigError, require
from pipecomp.stages.partition.loading import resolve, skeleton
from pipecomp.stages.partition.planning import SplitPlan, plan_model
from pipecomp.tls.process_group import BACKEND
from pipecomp.trainer import alike, arguments, deepspeed_config, given_model


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
    alike.check_arguments(ranks, args, **versions())  # accelerate may have joined the processes, unchecked
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
        given_model.check_again(model, split_plan.cuts)
        given_model.check_hooks(model, split_plan)
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
