"""The "pipecomp" section of a DeepSpeed configuration."""

from pipecomp.config.activations import Activations, ConstantError
from pipecomp.config.schema import MAX_CLUSTERS, MOST_SEED, RUN_NAME, Config, Store, Transport, read_json_object

__all__ = [
    "MAX_CLUSTERS",
    "MOST_SEED",
    "RUN_NAME",
    "Activations",
    "Config",
    "ConstantError",
    "Store",
    "Transport",
    "read_json_object",
]
