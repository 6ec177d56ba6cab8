"""A plan with LoRA adapters counts what they need: frozen weights have no gradients and no optimizer state."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from rich.console import Console

from pipecomp.errors import ConfigError
from pipecomp.plan.command import plan_sizes, resolve_request, run_plan
from pipecomp.plan.options import PlanOptions
from pipecomp.plan.prediction import HEAP_SHARE, RUNTIME_BYTES, in_flight_counts, memory_bytes
from pipecomp.plan.profile import count
from pipecomp.stages.partition.loading import with_adapter

peft = pytest.importorskip("peft")
NETWORKS: dict[str, Any] = {"1gbit": ((1e9,), 0.0)}


@pytest.fixture
def config() -> Any:
    from transformers import LlamaConfig

    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 2}
    return LlamaConfig(vocab_size=97, tie_word_embeddings=True, max_position_embeddings=32, **size)


def test_memory_is_that_of_frozen_weights_and_trained_adapters(config: Any) -> None:
    from transformers import LlamaForCausalLM

    options = PlanOptions(model=config, stages=2, lora=4, batch=4, tokens=8)
    job = plan_sizes(resolve_request(options, NETWORKS, None), count(with_adapter(config, 4), 8))
    whole = peft.get_peft_model(LlamaForCausalLM(config), peft.LoraConfig(r=4, target_modules="all-linear"))
    trained, everything = whole.get_nb_trainable_parameters()
    assert sum(job.plan.trained) == trained
    embedding = 97 * 64  # of which both stages hold a copy
    assert sum(job.plan.parameters) == everything + embedding
    assert job.plan.tied == (), "frozen copies exchange nothing"
    kept = job.profile.kept_bytes(job.plan, job.samples)
    flights = in_flight_counts(1, 2, job.micro_batches)
    for stage, size in enumerate(memory_bytes(job)):
        values, own = job.plan.parameters[stage], job.plan.trained[stage]
        moment = job.profile.working_bytes(job.plan, job.samples)[stage]
        activations = (flights[stage] + HEAP_SHARE) * kept[stage]
        assert size == RUNTIME_BYTES + 16 * own + 4 * (values - own) + activations + moment
    assert "M parameters are trained" in job.text()


def test_a_step_with_adapters_takes_less_time_and_memory(config: Any) -> None:
    def chosen(**more: Any) -> dict[str, Any]:
        options = PlanOptions(model=config, stages=2, speed="0.001", batch=4, tokens=8, **more)
        made = run_plan(Console(quiet=True), options)
        assert made is not None
        return made["chosen"]

    full, lora = chosen(), chosen(lora=4)
    assert max(lora["memory_bytes"]) < max(full["memory_bytes"])
    assert lora["step_s"] < full["step_s"]
    assert lora["tied_s"] == 0 < full["tied_s"]


def test_a_profile_is_of_the_adapters_that_it_was_measured_with(config: Any, tmp_path: Any) -> None:
    made = run_plan(Console(quiet=True), PlanOptions(model=config, stages=2, speed="1", batch=4, tokens=8, lora=4))
    (tmp_path / "plan.json").write_text(json.dumps(made))
    for lora in (None, 8):
        with pytest.raises(ConfigError, match=rf"lora: got {lora}, allowed: 4\."):
            run_plan(
                Console(quiet=True),
                PlanOptions(model=config, stages=2, profile=tmp_path / "plan.json", batch=4, lora=lora),
            )


def test_measured_stages_have_adapters(config: Any) -> None:
    from pipecomp.plan.measure import time_model

    made = time_model(with_adapter(config, 4), 8, torch.float32, torch.device("cpu"))
    assert made.blocks[0].forward_s is not None
    assert made.hidden == 64
