"""Pipeline-parallel fine-tuning of Hugging Face models over slow links.

    engine = pipecomp.initialize(model=…, num_stages=2, config="ds_config.json", training_data=…, collate_fn=…)
    loss = engine.train_batch()

Importing this package is cheap: torch, DeepSpeed and transformers are imported on first use.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

_FOLDER = Path(__file__).parent
if not all((_FOLDER / name).is_dir() for name in ("stages", "buffers", "kernels")):
    # In a checkout without symbolic links or an unpacked sdist, these three are beside this folder.
    __path__.append(str(_FOLDER.parent))

from pipecomp.errors import PipecompError

# When the process that serves torch's key-value store ends, torch prints a C++ stack in each client. The heartbeat
# reports the failure. torch reads this variable when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

if TYPE_CHECKING:
    from pipecomp import allreduce, buffers, kernels, netlab, optim, stages
    from pipecomp.config import Config
    from pipecomp.engine.engine import PipelineEngine
    from pipecomp.initialization import initialize
    from pipecomp.kernels import ops as _ops  # noqa: F401 (pipecomp.kernels.ops)
    from pipecomp.trainer import PipelineTrainer
    from pipecomp.trainer.ddp_callback import CompressionCallback
    from pipecomp.trainer.dpo import PipelineDPOTrainer
    from pipecomp.trainer.sft import PipelineSFTTrainer

__version__ = "0.1.0"
__all__ = [
    "CompressionCallback",
    "Config",
    "PipecompError",
    "PipelineDPOTrainer",
    "PipelineEngine",
    "PipelineSFTTrainer",
    "PipelineTrainer",
    "allreduce",
    "buffers",
    "initialize",
    "kernels",
    "netlab",
    "optim",
    "stages",
]

# Name -> module, imported on first use. A module with the same name is the value itself.
_LAZY = {
    "CompressionCallback": "pipecomp.trainer.ddp_callback",
    "Config": "pipecomp.config",
    "PipelineDPOTrainer": "pipecomp.trainer.dpo",
    "PipelineEngine": "pipecomp.engine.engine",
    "PipelineSFTTrainer": "pipecomp.trainer.sft",
    "PipelineTrainer": "pipecomp.trainer",
    "allreduce": "pipecomp.allreduce",
    "buffers": "pipecomp.buffers",
    "initialize": "pipecomp.initialization",
    "kernels": "pipecomp.kernels",
    "netlab": "pipecomp.netlab",
    "optim": "pipecomp.optim",
    "stages": "pipecomp.stages",
}
_NEED_TRL = ("PipelineDPOTrainer", "PipelineSFTTrainer")


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'pipecomp' has no attribute {name!r}")
    if name == "kernels":
        importlib.import_module("pipecomp.kernels.ops")  # reachable through it
    if name in _NEED_TRL and importlib.util.find_spec("trl") is None:
        raise ImportError(f"pipecomp.{name} needs TRL and peft: pip install 'pipecomp[chat]'")
    module = importlib.import_module(_LAZY[name])
    found = module if _LAZY[name] == f"pipecomp.{name}" else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
