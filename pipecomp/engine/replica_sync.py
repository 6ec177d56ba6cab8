"""Equal weights where training must start with equal ones: on all replicas, and in all copies of a tied weight.

Ranks compare digests and send only what differs: usually all have read the same file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from pipecomp.distributed.consistency import AllRanks
from pipecomp.interfaces import PipelineGrid, TrainingEngine
from pipecomp.stages.partition.modules import ModuleStage
from pipecomp.stages.partition.planning import SplitPlan
from pipecomp.stages.partition.stage import Stage


def pipelines(grid: PipelineGrid) -> list[list[int]]:
    """Global ranks of the stages of each replica."""
    return [
        [grid._topo.get_rank(pipe=stage, data=replica) for stage in range(grid.pipe_parallel_size)]
        for replica in range(grid.data_parallel_size)
    ]


def match_tied(stage: Stage | ModuleStage, split_plan: SplitPlan, grid: PipelineGrid, all_ranks: AllRanks) -> None:
    """Copy a tied weight from its first holder to the others if they differ; every rank must call this.

    They differ if each process has initialized its own model, with other seeds or none.
    """
    if not split_plan.tied:
        return
    copies = stage.tied_parameters()
    digests = all_ranks.all_gather_object({name: _digest(p) for name, p in copies.items()})
    replicas = pipelines(grid)
    for tied in split_plan.tied:
        if all(len({digests[ranks[s]][tied.name] for s in tied.stages}) == 1 for ranks in replicas):
            continue
        for ranks in replicas:
            members = [ranks[s] for s in tied.stages]
            group = dist.new_group(members)
            if dist.get_rank() in members:
                dist.broadcast(copies[tied.name].detach(), src=members[0], group=group)
                dist.destroy_process_group(group)


def saved_buffers(module: torch.nn.Module) -> list[torch.Tensor]:
    """The buffers that a checkpoint has, such as batch norm's statistics, which each replica collects on its own."""
    saved = module.state_dict(keep_vars=True).keys()
    return [buffer for name, buffer in module.named_buffers() if name in saved]


def match_replicas(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Copy tensors from the first rank of the group to the others if they differ; every rank in it must call this.

    DeepSpeed would send all of them, which takes minutes over a slow link.
    """
    if not parameters or dist.get_world_size(group) == 1:
        return
    own = torch.tensor([list(bytes.fromhex(_digest(p))) for p in parameters], dtype=torch.uint8)
    own = own.to(parameters[0].device)
    digests = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(digests, own, group=group)
    equal = (torch.stack(digests) == digests[0]).flatten(2).all(2).all(0)
    for parameter, same in zip(parameters, equal.tolist(), strict=True):
        if not same:
            dist.broadcast(parameter.detach(), src=dist.get_global_rank(group, 0), group=group)


def optimizer_facts(engine: TrainingEngine) -> dict[str, Any]:
    """The parameter groups of this stage's optimizer with their order and options, which replicas must have in common.

    A function of the user makes them on every rank. With ZeRO and bf16, replicas share states by position.
    """
    optimizer = cast(Any, engine.optimizer)  # DeepSpeed's optimizers have no common type
    if optimizer is None:  # for evaluation alone
        return {}
    names = {id(p): name for name, p in engine.stage.named_parameters()}
    plain = [group["params"] for group in optimizer.param_groups]
    groups = getattr(optimizer, "bit16_groups", getattr(optimizer, "bf16_groups", plain))
    order = "; ".join(",".join(names.get(id(p), "") for p in group) for group in groups)
    of = f"groups of parameters on stage {engine.stage_id}"
    kinds = (bool, int, float, str, tuple, list)
    options = [{k: v for k, v in g.items() if k != "params" and isinstance(v, kinds)} for g in optimizer.param_groups]
    return {
        f"order of the optimizer's {of} (digest)": hashlib.sha256(order.encode()).hexdigest()[:12],
        f"options of the optimizer's {of}": options,
    }


def _digest(parameter: torch.Tensor) -> str:
    values = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy()).hexdigest()


def has_modes(optimizer: Any) -> bool:
    """Return whether an optimizer holds other weights for training than for evaluation (schedule-free ones do)."""
    return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))
