"""The demo's settings, and the configuration of each run as a user would write it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipecomp.config import MOST_SEED, Activations
from pipecomp.errors import require
from pipecomp.utils.units import parse_rate

MICRO_BATCH, MICRO_BATCHES = 4, 4
BATCH = MICRO_BATCH * MICRO_BATCHES
FIRST_VISIT_BITS = 8
NAMES = {"none": "FP32", "fp16": "FP16", "bf16": "BF16", "direct": "DirectQ", "aqsgd": "AQ-SGD"}
SCALES: dict[str, dict[str, Any]] = {  # the best of each; benchmarks/demo_seeds.py compares DirectQ's
    "direct": {"scale": "rms"},
    "aqsgd": {"scale": "channels", "gain": "unbiased"},
}
WARM_UP, TIMED = 3, 5  # steps of FP32 over the slow link: until it runs ahead as far as it will, and then timed


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Model and data sizes, methods, the link, and the output folder.

    Attributes:
        stages: Each is a process, and a node of the slow network.
        methods: Values of `activations.method`.
        bandwidth: Rate of the links, each way, as in "5mbit".
        training: Sequences, of `length` tokens.
        pretraining: Sequences too, each seen once.
    """

    stages: int = 4
    methods: tuple[str, ...] = ("none", "direct", "aqsgd")
    forward_bits: int = 2
    backward_bits: int = 4
    bandwidth: str = "5mbit"
    seed: int = 0
    out: str = "demo-out"
    layers: int = 4
    width: int = 128
    length: int = 64
    vocabulary: int = 512
    training: int = 192
    epochs: int = 10
    pretraining: int = 4800
    pretraining_lr: float = 3e-3
    lr: float = 5e-4
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        require(2 <= self.stages <= self.layers, "stages", self.stages, f"2 to {self.layers}, the model's blocks")
        for method in self.methods:
            require(method in Activations.METHODS, "methods", method, ", ".join(Activations.METHODS))
        require(self.methods, "methods", self.methods, "at least one method")
        require(len(set(self.methods)) == len(self.methods), "methods", ",".join(self.methods), "each method once")
        Activations(method="direct", forward_bits=self.forward_bits, backward_bits=self.backward_bits)
        parse_rate("bandwidth", self.bandwidth)
        require(0 <= self.seed <= MOST_SEED, "seed", self.seed, f"a whole number from 0 to {MOST_SEED}")

    @property
    def per_epoch(self) -> int:
        """Optimizer steps in which every sample is seen once."""
        return self.training // BATCH

    @property
    def steps(self) -> int:
        """Optimizer steps of each fine-tuning."""
        return self.epochs * self.per_epoch

    @property
    def pretraining_steps(self) -> int:
        """Optimizer steps of the pre-training."""
        return self.pretraining // BATCH


def ds_config(settings: Settings, method: str, store: Path, *, steps: int, lr: float) -> dict[str, Any]:
    """Make the configuration of one run, as a user would write it."""
    activations: dict[str, Any] = {"method": method}
    if method in Activations.QUANTIZED:
        activations |= {"forward_bits": settings.forward_bits, "backward_bits": settings.backward_bits}
        activations |= SCALES[method]
    section: dict[str, Any] = {"activations": activations, "seed": settings.seed, "tie": False}
    if method == "aqsgd":
        activations["first_visit"] = FIRST_VISIT_BITS
        section["store"] = {
            "backend": "lmdb",
            "path": str(store),
            "run": "demo",
        }  # a run that ends keeps what has a name
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.01}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": max(2, steps // 20), "total_num_steps": steps, "warmup_max_lr": lr},
        },
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "pipecomp": section,
    }
