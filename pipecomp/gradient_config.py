"""The "gradients" section under its public name."""

from pipecomp.config.gradients import Gradients

__all__ = ["Gradients"]
