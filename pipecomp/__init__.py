"""Pipeline-parallel fine-tuning of Hugging Face models over slow links.

    engine = pipecomp.initialize(model=…, num_stages=2, config="ds_config.json", training_data=…, collate_fn=…)
    loss = engine.train_batch()

Importing this package is cheap; DeepSpeed and transformers are imported when something needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipecomp import kernels
from pipecomp.config import Config
from pipecomp.errors import PipecompError
from pipecomp.kernels import ops as _ops  # noqa: F401 (makes pipecomp.kernels.ops reachable)

if TYPE_CHECKING:
    from pipecomp.engine.engine import PipelineEngine
    from pipecomp.engine.initialize import initialize
    from pipecomp.trainer import PipelineTrainer
    from pipecomp.trainer.ddp_callback import CompressionCallback

__version__ = "0.1.0"
__all__ = [
    "CompressionCallback",
    "Config",
    "PipecompError",
    "PipelineEngine",
    "PipelineTrainer",
    "initialize",
    "kernels",
    "stages",
]


def __getattr__(name: str) -> Any:
    if name == "initialize":
        from pipecomp.engine.initialize import initialize

        return initialize
    if name == "PipelineEngine":
        from pipecomp.engine.engine import PipelineEngine

        return PipelineEngine
    if name == "PipelineTrainer":
        from pipecomp.trainer import PipelineTrainer

        return PipelineTrainer
    if name == "CompressionCallback":
        from pipecomp.trainer.ddp_callback import CompressionCallback

        return CompressionCallback
    if name in ("stages", "buffers"):
        import importlib

        return importlib.import_module(f"pipecomp.{name}")
    raise AttributeError(f"module 'pipecomp' has no attribute {name!r}")
