"""The same weights where training must begin with the same ones: on all replicas, and in all copies of a tied one.

What of the optimizer must be the same on all replicas of a stage is told here, too.

What each rank has is told by digests, and only what differs is sent: mostly all have read the same file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipecomp.distributed.consistency import AllRanks
from pipecomp.stages.partition.modules import ModuleStage
from pipecomp.stages.partition.planning import SplitPlan
from pipecomp.stages.partition.splitting import Stage


def pipelines(grid: Any) -> list[list[int]]:
    """For each replica the global ranks of its stages."""
    return [
        [grid._topo.get_rank(pipe=stage, data=replica) for stage in range(grid.pipe_parallel_size)]
        for replica in range(grid.data_parallel_size)
    ]


def match_tied(stage: Stage | ModuleStage, split_plan: SplitPlan, grid: Any, all_ranks: AllRanks) -> None:
    """Give every copy of a tied weight the values of its first holder, where they differ; every rank must call this.

    They differ where each process has drawn its model's weights for itself, with another seed or none.
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


def kept_buffers(module: torch.nn.Module) -> list[torch.Tensor]:
    """The buffers that a checkpoint has, such as batch norm's statistics, which each replica collects for itself."""
    kept = module.state_dict(keep_vars=True).keys()
    return [buffer for name, buffer in module.named_buffers() if name in kept]


def match_replicas(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Give each of them the values of the group's first rank, where they differ; every rank in it must call this.

    DeepSpeed sends all of them, which over a slow line takes minutes, and mostly all have read the same file.
    """
    if not parameters or dist.get_world_size(group) == 1:
        return
    own = torch.tensor([list(bytes.fromhex(_digest(p))) for p in parameters], dtype=torch.uint8)
    own = own.to(parameters[0].device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    alike = (torch.stack(found) == found[0]).flatten(2).all(2).all(0)
    for parameter, same in zip(parameters, alike.tolist(), strict=True):
        if not same:
            dist.broadcast(parameter.detach(), src=dist.get_global_rank(group, 0), group=group)


def optimizer_facts(engine: Any) -> dict[str, Any]:
    """Which parameters the groups of this stage's optimizer have, in their order, and with which options.

    A function of the user's has made them on every rank for itself. With ZeRO and bf16 replicas share states by places.
    """
    optimizer, names = engine.optimizer, {id(p): name for name, p in engine.stage.named_parameters()}
    if optimizer is None:  # for evaluation alone
        return {}
    plain = [group["params"] for group in optimizer.param_groups]
    groups = getattr(optimizer, "bit16_groups", getattr(optimizer, "bf16_groups", plain))
    ordered = "; ".join(",".join(names.get(id(p), "") for p in group) for group in groups)
    of = f"groups of parameters on stage {engine.stage_id}"
    kinds = (bool, int, float, str, tuple, list)
    options = [{k: v for k, v in g.items() if k != "params" and isinstance(v, kinds)} for g in optimizer.param_groups]
    return {
        f"order of the optimizer's {of} (digest)": hashlib.sha256(ordered.encode()).hexdigest()[:12],
        f"options of the optimizer's {of}": options,
    }


def _digest(parameter: torch.Tensor) -> str:
    values = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy()).hexdigest()
