"""Splitting a model into stages, and the links between them."""

from pipecomp.stages.architectures import Architecture, Head, default_loss, register
from pipecomp.stages.loading import Source, build_stage, plan, pretrained
from pipecomp.stages.modules import Modules, ModuleStage, modules
from pipecomp.stages.planning import SplitPlan, TiedGroup
from pipecomp.stages.saving import save_pretrained, write_index, write_shard
from pipecomp.stages.splitting import Stage, split

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
    "modules",
    "plan",
    "pretrained",
    "register",
    "save_pretrained",
    "split",
    "write_index",
    "write_shard",
]
