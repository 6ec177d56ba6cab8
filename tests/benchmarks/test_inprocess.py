"""The in-process pipeline of the benchmarks trains exactly as the engine does over processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.inprocess import InProcessPipeline
from pipecomp.data import eval_batches
from pipecomp.demo.task import Sequences, gpt2
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import ConfigError
from tests.limits import HANG_S

STEPS = 8
SECTIONS: dict[str, dict[str, Any]] = {
    "none": {"activations": {"method": "none"}},
    "direct": {"activations": {"method": "direct", "forward_bits": 3, "backward_bits": 6}},
    "aqsgd": {
        "activations": {"method": "aqsgd", "forward_bits": 3, "backward_bits": 6},
        "store": {"backend": "memory", "bits": 8},
    },
    "bf16": {
        "activations": {"method": "aqsgd", "forward_bits": 2, "backward_bits": 4, "rounding": "stochastic"},
        "store": {"backend": "memory"},
    },
}


def configuration(name: str) -> dict[str, Any]:
    half = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}}
    return {
        "train_batch_size": 6,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.01}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": STEPS, "warmup_num_steps": 2, "warmup_max_lr": 2e-3, "warmup_type": "linear"},
        },
        "gradient_clipping": 0.5,
        "steps_per_print": 1000,
        "pipecomp": SECTIONS[name],
        **(half if name == "bf16" else {}),
    }


def task() -> tuple[Any, Sequences]:
    """A model of four blocks and 14 samples: 8 steps of 6 are several visits, and the epochs end within a step."""
    rows = torch.randint(0, 100, (14, 12), generator=torch.Generator().manual_seed(1)).tolist()
    return gpt2(100, 12, layers=4, width=32, heads=2, seed=0), Sequences(rows)


def engine_losses(rank: int, world: int, note: Any) -> dict[str, list[float]]:
    import pipecomp

    found = {}
    for name in SECTIONS:
        model, data = task()
        engine = pipecomp.initialize(model, num_stages=world, config=configuration(name), training_data=data)
        losses = [float(engine.train_batch()) for _ in range(STEPS)]
        batches = eval_batches(Sequences(data._rows.tolist()[:6]), 2)
        losses.append(float(engine.eval_batch(iter(batches))))
        found[name] = losses
        engine.close()
    return found


@pytest.mark.ranks
def test_losses_are_those_of_the_engine_bit_for_bit() -> None:
    expected = run_ranks(2, engine_losses, timeout_s=HANG_S)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in SECTIONS:
            model, data = task()
            pipeline = InProcessPipeline(model, 2, configuration(name), data)
            losses = [float(pipeline.train_batch()) for _ in range(STEPS)]
            losses.append(float(pipeline.eval_batch(eval_batches(Sequences(data._rows.tolist()[:6]), 2))))
            assert pipeline.same_messages()
            pipeline.close()
            assert losses == expected[0][name] == expected[1][name], name
    finally:
        torch.set_num_threads(threads)
    assert len({tuple(losses) for losses in expected[0].values()}) == len(SECTIONS), "the methods do differ"


def test_uncompressed_losses_do_not_depend_on_the_number_of_stages() -> None:
    found = []
    for stages in (2, 3, 4):
        model, data = task()
        pipeline = InProcessPipeline(model, stages, configuration("none"), data)
        found.append([float(pipeline.train_batch()) for _ in range(STEPS)])
    assert found[0] == found[1] == found[2]


def test_settings_without_meaning_are_refused() -> None:
    model, data = task()
    on_disk = {"activations": {"method": "aqsgd"}}
    with pytest.raises(ConfigError, match="fp16"):
        InProcessPipeline(model, 2, {**configuration("none"), "fp16": {"enabled": True}}, data)
    with pytest.raises(ConfigError, match=r"store\.backend"):
        InProcessPipeline(model, 2, {**configuration("none"), "pipecomp": on_disk}, data)
    with pytest.raises(ConfigError, match=r"activations\.method"):
        InProcessPipeline(model, 1, configuration("direct"), data)
