"""The "gradients" section of the configuration, under the name by which programs import it."""

from pipecomp.allreduce.options import Gradients

__all__ = ["Gradients"]
