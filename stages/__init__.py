"""Splitting a model into stages, and the links between them."""

from pipecomp.stages.architectures import Architecture, Head, default_loss, register
from pipecomp.stages.planning import SplitPlan, TiedGroup
from pipecomp.stages.splitting import Stage, split

__all__ = ["Architecture", "Head", "SplitPlan", "Stage", "TiedGroup", "default_loss", "register", "split"]
