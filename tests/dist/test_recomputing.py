"""Activation checkpointing: the same training, bit for bit, with less memory; settings without effect are refused."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.engine.validation import take_activation_checkpointing
from pipecomp.errors import ConfigError
from pipecomp.stages import split
from tests.limits import HANG_S
from tests.models import ds_config, gpt2, samples

INTERVAL = {"pipeline": {"activation_checkpoint_interval": 1}}


def trained(rank: int, world: int, note: Any) -> dict[str, Any]:
    import pipecomp

    out = {}
    for name, more in (("kept", {}), ("recomputed", INTERVAL)):
        model = gpt2()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1
        section = {"activations": {"method": "aqsgd"}, "store": {"backend": "memory"}}
        engine = pipecomp.initialize(model, num_stages=2, config=ds_config(section, **more), training_data=samples())
        torch.manual_seed(rank)
        losses = [float(engine.train_batch()) for _ in range(6)]
        weights = b"".join(p.detach().numpy().tobytes() for p in engine.stage.parameters())
        out[name] = (
            losses,
            hashlib.sha256(weights).hexdigest(),
            engine.stage.count_checkpointed_values(2, 24),
            engine.in_flight_control.saved.bytes,
        )
        engine.close()
    return out


@pytest.mark.ranks
def test_the_same_training_bit_for_bit() -> None:
    for result in run_ranks(2, trained, timeout_s=HANG_S).values():
        kept, recomputed = result["kept"], result["recomputed"]
        assert recomputed[:2] == kept[:2]
        assert len(set(kept[0])) == 6
        assert (kept[2], recomputed[2]) == (0, 2 * 2 * 24 * 32)
        assert recomputed[3] < kept[3]  # what limits the micro-batches in flight


def test_less_memory_is_kept() -> None:
    model = gpt2(layers=6, width=128)
    stages = split(model, num_stages=2)
    ids = torch.zeros(64, 24, dtype=torch.int64)

    def kept() -> int:
        """Bytes of the tensors that the graph holds on to for the backward."""
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        x: Any = {"input_ids": ids}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            for stage in stages:
                x = stage(x)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        x.sum().backward()
        return sum(size for at, size in storages.items() if at not in weights)

    whole = kept()
    for stage in stages:
        stage.gradient_checkpointing_enable()
    assert 0 < kept() < 0.2 * whole


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"pipeline": {"activation_checkpoint_interval": 2}}, "pipeline.activation_checkpoint_interval: got 2"),
        ({"pipeline": {"activation_checkpoint_interval": True}}, "pipeline.activation_checkpoint_interval: got True"),
        ({"pipeline": {**INTERVAL["pipeline"], "use_reentrant": True}}, "pipeline.use_reentrant"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "activation_checkpointing.cpu_checkpointing"),
    ],
)
def test_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        take_activation_checkpointing(config)


def test_deepspeed_does_nothing_itself() -> None:
    config = {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False, "seed_layers": False}}
    assert take_activation_checkpointing(config)
    assert config == {"pipeline": {"activation_checkpoint_interval": 0, "use_reentrant": False, "seed_layers": False}}
    for plain in ({}, {"pipeline": {}}, {"activation_checkpointing": {"cpu_checkpointing": False}}):
        before = dict(plain)
        assert not take_activation_checkpointing(plain)
        assert plain == before
