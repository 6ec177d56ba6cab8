"""Splitting a model into stages, and the links between them."""

from pipecomp.stages.partition import losses
from pipecomp.stages.partition.architectures import default_loss, register
from pipecomp.stages.partition.loading import Source, build_stage, plan, pretrained
from pipecomp.stages.partition.modules import Modules, ModuleStage, modules
from pipecomp.stages.partition.planning import SplitPlan, TiedGroup
from pipecomp.stages.partition.saving import save_pretrained, write_index, write_shard
from pipecomp.stages.partition.splitting import split
from pipecomp.stages.partition.stage import Stage
from pipecomp.stages.partition.structure import Architecture, Head

__all__ = [
    "Architecture",
    "Head",
    "ModuleStage",
    "Modules",
    "Source",
    "SplitPlan",
    "Stage",
    "TiedGroup",
    "build_stage",
    "default_loss",
    "losses",
    "modules",
    "plan",
    "pretrained",
    "register",
    "save_pretrained",
    "split",
    "write_index",
    "write_shard",
]
