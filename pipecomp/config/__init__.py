"""The "pipecomp" section of a DeepSpeed configuration, as validated objects. Imports no torch."""

from pipecomp.config.activations import Activations, ConstantError
from pipecomp.config.gradients import Gradients
from pipecomp.config.schema import MOST_SEED, Config, read_json_object
from pipecomp.config.store import MAX_CLUSTERS, RUN_NAME, Store
from pipecomp.config.transport import TransportConfig as Transport

__all__ = [
    "MAX_CLUSTERS",
    "MOST_SEED",
    "RUN_NAME",
    "Activations",
    "Config",
    "ConstantError",
    "Gradients",
    "Store",
    "Transport",
    "read_json_object",
]
