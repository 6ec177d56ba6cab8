"""Optimizers of TrainingArguments over two stages: the same weights as Trainer's, and checkpoints of their states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tests.dist.trainer_work as work
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import ConfigError
from tests.limits import HANG_S
from tests.models import gpt2

pytestmark = pytest.mark.ranks

NAMES = ("adamw_torch", "adafactor", "adamw_8bit", "lion_32bit", "lion_8bit", "sgd")
NOISE = 5e-6  # of weights of size 1, by the order of sums


def settings(folder: str, optim: str, **more: Any) -> Any:
    options = {"optim_args": "momentum=0.9"} if optim == "sgd" else {}
    steps = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    return work.arguments(f"{folder}/{optim}", optim=optim, **options, **steps, **more)


def model() -> Any:
    """Of parameters below and above 4096 values, from which on 8-bit optimizers quantize."""
    made = gpt2(2, 48, tied=False)
    made.loss_type = "ForCausalLM"
    return made


def weights(module: Any) -> dict[str, Any]:
    return {name: p.detach().float().clone().numpy() for name, p in module.named_parameters()}


def states(engine: Any) -> dict[str, set[str]]:
    """Name the dtypes of each parameter's states."""
    names = {id(p): name for name, p in engine.stage.named_parameters()}
    return {
        names.get(id(p), ""): {str(v.dtype) for v in state.values() if torch.is_tensor(v) and v.dim() > 1}
        for p, state in engine.basic_optimizer.state.items()
    }


def trained(folder: str, optim: str, resume: bool = False, stages: int = 2, **more: Any) -> dict[str, Any]:
    from pipecomp import PipelineTrainer

    trainer = PipelineTrainer(
        model(), settings(folder, optim, **more), work.padded, work.unequal(), pipecomp={}, num_stages=stages
    )
    trainer.train(resume_from_checkpoint=f"{folder}/{optim}/checkpoint-2" if resume else None)
    found = {"weights": weights(trainer.engine.stage), "states": states(trainer.engine)}
    trainer.end()
    return found


def everything(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in NAMES:
        out[name] = trained(folder, name)
        out[f"{name} again"] = trained(folder, name, resume=True)["weights"]
    for name in ("adafactor", "adamw_8bit"):  # of two replicas of one stage
        out[f"{name} whole"] = trained(folder, name, resume=True, stages=1, per_device_train_batch_size=1)["weights"]
    try:
        trained(folder, "adafactor", bf16=True)
    except ConfigError as error:
        out["flattened"] = str(error)
    trained(f"{folder}/zero", "adamw_8bit", bf16=True)
    try:
        trained(f"{folder}/zero", "adamw_8bit", resume=True, stages=1, bf16=True, per_device_train_batch_size=1)
    except ConfigError as error:
        out["blocks"] = str(error)
    return out


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    return run_ranks(2, everything, str(tmp_path_factory.mktemp("optimizers")), timeout_s=HANG_S)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_trainers_optimizer(ran: dict[int, Any], name: str, tmp_path: Path) -> None:
    from transformers import Trainer

    trainer = Trainer(model(), settings(str(tmp_path), name), work.padded, work.unequal())
    trainer.train()
    expected = weights(trainer.model)
    found = ran[0][name]["weights"] | ran[1][name]["weights"]
    assert found.keys() == expected.keys()
    start = weights(model())
    share = 2e-2 if "8bit" in name else 1e-3  # of a value that is rounded to the next of 256 codes
    for key, value in expected.items():
        if key.endswith("c_attn.bias"):  # the keys' third has no gradient but noise, which some optimizers scale up
            continue
        assert abs(found[key] - value).max() < NOISE + share * abs(value - start[key]).max(), key


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_training_has_the_same_bits(ran: dict[int, Any], name: str) -> None:
    for out in ran.values():
        for key, value in out[name]["weights"].items():
            assert (out[f"{name} again"][key] == value).all(), key


@pytest.mark.parametrize("name", ["adamw_8bit", "lion_8bit"])
def test_embeddings_have_states_of_32_bits(ran: dict[int, Any], name: str) -> None:
    found = ran[0][name]["states"] | ran[1][name]["states"]
    assert found["transformer.wte.weight"] == {"torch.float32"}
    assert found["transformer.h.1.mlp.c_fc.weight"] == {"torch.uint8"}


@pytest.mark.parametrize("name", ["adafactor", "adamw_8bit"])
def test_states_are_resharded(ran: dict[int, Any], name: str) -> None:
    found = ran[0][name]["weights"] | ran[1][name]["weights"]
    start = weights(model())
    for key, value in ran[0][f"{name} whole"].items():
        if not key.endswith("c_attn.bias"):
            assert abs(found[key] - value).max() < NOISE + 1e-2 * abs(value - start[key]).max(), key


def test_what_goes_by_shapes_or_blocks_is_refused_where_parameters_are_flattened(ran: dict[int, Any]) -> None:
    for out in ran.values():
        assert "optimizer: got 'Adafactor'" in out["flattened"]
        assert "train in float32 without ZeRO" in out["flattened"]
        assert "a checkpoint of the same stages and replicas" in out["blocks"]
