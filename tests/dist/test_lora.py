"""LoRA over a pipeline: trains what peft trains in one process, saves adapters only, and goes on from checkpoints."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S
from tests.models import ds_config, llama, samples, train_alone

pytestmark = pytest.mark.ranks

STEPS, MICRO_BATCHES, MICRO_BATCH, RATE = 5, 3, 2, 2e-2
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01}}}
BF16_ZERO1 = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 10_000},
    "data_types": {"grad_accum_dtype": "fp32"},
}


def lora(**more: Any) -> Any:
    import peft  # here and below: it takes seconds, which every process that collects tests would pay

    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], **more)


def adapted() -> Any:
    import peft

    torch.manual_seed(1)
    return peft.get_peft_model(llama(), lora())


def checked(engine: Any, expected: dict[str, torch.Tensor]) -> bool:
    """Return True if all frozen weights are unchanged."""
    frozen = {n: p for n, p in engine.stage.named_parameters() if not p.requires_grad}
    return len(frozen) > 10 and all(torch.equal(p.float(), expected[n].to(p.dtype).float()) for n, p in frozen.items())


def evaluated(engine: Any) -> float:
    from pipecomp.data import eval_batches

    return float(engine.eval_batch(iter(eval_batches(samples(4, seed=3), 2)), num_micro_batches=2))


def everything(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    import pipecomp
    from pipecomp.errors import PipecompError
    from pipecomp.stages import pretrained

    gc.freeze()  # DeepSpeed collects garbage in every step of bf16, in all that was imported
    data = samples()
    named = adapted().get_base_model().named_parameters(remove_duplicate=False)
    before = {n: p.detach().clone() for n, p in named}
    out: dict[str, Any] = {}

    def engine_for(model: Any, stages: int = 2, section: dict | None = None, **more: Any) -> Any:
        config = ds_config(section, **ADAM, **more)
        return pipecomp.initialize(model, num_stages=stages, config=config, training_data=data)

    def train(engine: Any, steps: int = STEPS) -> list[float]:
        return [float(engine.train_batch()) for _ in range(steps)]

    engine = engine_for(adapted())
    out["fp32"] = {"losses": train(engine), "frozen": checked(engine, before), "evaluated": evaluated(engine)}
    trained = sum(p.numel() for group in engine.optimizer.param_groups for p in group["params"])
    out["fp32"]["trained"] = trained, engine.plan.trained[rank], set(engine.comm_stats()["groups"])
    engine.save_pretrained(f"{folder}/adapter")
    engine.save_checkpoint(f"{folder}/checkpoint")
    out["fp32"]["after"] = train(engine, 3)
    engine.close()
    engine = engine_for(adapted())
    engine.load_checkpoint(f"{folder}/checkpoint")
    out["resumed"] = train(engine, 3)
    engine.close()
    engine = engine_for(adapted(), 1)
    engine.load_checkpoint(f"{folder}/checkpoint")
    out["recut"] = evaluated(engine)
    engine.close()

    if rank == 0:
        llama().save_pretrained(f"{folder}/base")
    torch.distributed.barrier()
    section = {"activations": {"method": "aqsgd"}, "store": {"backend": "memory"}}
    engine = engine_for(pretrained(f"{folder}/base", lora=lora()), section=section, **BF16_ZERO1)
    out["bf16"] = {"losses": train(engine), "frozen": checked(engine, before)}
    engine.save_pretrained(f"{folder}/bf16")
    engine.close()
    section = {"gradients": {"method": "qsgd_mn", "bits": 8}}
    engine = engine_for(pretrained(f"{folder}/base", lora=lora()), 1, section)
    out["replicas"] = {"losses": train(engine), "frozen": checked(engine, before)}
    engine.close()

    out["trainer"] = trainer(f"{folder}/trainer")
    try:
        engine_for(adapted(), section=section)
    except PipecompError as error:
        out["gradients"] = f"{type(error).__name__}: {error}"
    engine = engine_for(llama())
    try:
        engine.load_checkpoint(f"{folder}/checkpoint")
    except Exception as error:
        out["whole"] = str(error)
    engine.close()
    return out


def trainer(folder: str) -> dict[str, Any]:
    """An adapter trained by PipelineTrainer, configured by `TrainingArguments.deepspeed`."""
    import tests.dist.trainer_work as work
    from pipecomp import PipelineTrainer

    section = {"activations": {"method": "aqsgd", "first_visit": 8}, "store": {"backend": "memory"}}
    config = {"gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 0}, "pipecomp": section}
    args = work.arguments(folder, deepspeed=config, learning_rate=RATE, save_strategy="epoch", num_train_epochs=3)
    made = PipelineTrainer(adapted(), args, train_dataset=samples(), eval_dataset=samples(4, seed=3))
    made.train()
    out = {"losses": work.losses(made), "evaluated": made.evaluate()["eval_loss"]}
    out["sent"] = [line["link_compression"] for line in made.state.log_history if "link_compression" in line]
    made.end()
    return out


def alone(rate: float) -> list[float]:
    """The same training by torch and peft in this process."""
    return train_alone(adapted(), STEPS, rate, micro_batch=MICRO_BATCH, micro_batches=MICRO_BATCHES)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    folder = tmp_path_factory.mktemp("lora")
    return folder, run_ranks(2, everything, str(folder), timeout_s=HANG_S)


def test_trains_as_peft_does_alone(ran: Any) -> None:
    torch.set_num_threads(1)
    expected = alone(RATE)
    assert abs(alone(0.0)[-1] - expected[-1]) > 0.01
    for result in ran[1].values():
        assert result["fp32"]["losses"] == pytest.approx(expected, rel=1e-5)
        assert result["fp32"]["frozen"]
        optimized, planned, groups = result["fp32"]["trained"]
        assert optimized == planned == 2 * (32 * 4 * 2 + 4 * (32 + 16))  # A and B of q_proj and v_proj in two blocks
        assert groups == set(), "the frozen embedding's gradients are not exchanged"


def test_the_adapter_is_read_by_peft(ran: Any) -> None:
    from transformers import AutoModelForCausalLM

    from pipecomp.data import eval_batches

    folder, ranks = ran
    from peft import PeftModel

    model = PeftModel.from_pretrained(llama(), folder / "adapter").eval()
    losses = [model(**b.inputs, labels=b.labels).loss.detach() for b in eval_batches(samples(4, seed=3), 2)]
    assert float(torch.stack(losses).mean()) == pytest.approx(ranks[0]["fp32"]["evaluated"], rel=1e-6)
    assert sorted(p.name for p in (folder / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    again = AutoModelForCausalLM.from_pretrained(folder / "bf16")  # it says what its base model is
    assert any("lora_A" in name for name, _ in again.named_parameters())
    assert again.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False).shape == (1, 5)


def test_checkpoints_hold_adapters_only(ran: Any) -> None:
    folder, ranks = ran
    files = list((folder / "checkpoint").rglob("layer_*"))
    assert len(files) == 2
    for file in files:
        names = set(torch.load(file, weights_only=False))
        assert names
        assert all("lora_" in name for name in names)
    for result in ranks.values():
        assert result["resumed"] == result["fp32"]["after"]
        assert result["recut"] == pytest.approx(result["fp32"]["evaluated"], rel=1e-6)


def test_from_disk_in_bf16_and_with_compressed_gradients(ran: Any) -> None:
    for result in ran[1].values():
        assert result["bf16"]["frozen"]
        assert result["bf16"]["losses"] == pytest.approx(alone(RATE), rel=0.02)  # its adapters start otherwise
        assert result["replicas"]["frozen"]
        assert result["replicas"]["losses"] == ran[1][0]["replicas"]["losses"]


def test_refused(ran: Any) -> None:
    for result in ran[1].values():
        assert "gradients.method" in result["gradients"]  # one replica, and the tied weight is frozen
        assert result["whole"], "a checkpoint of adapters is not one of the whole model"


def test_pipeline_trainer_trains_and_saves_an_adapter(ran: Any) -> None:
    folder, ranks = ran
    found = ranks[0]["trainer"]
    assert found == ranks[1]["trainer"]
    assert sum(found["losses"][-3:]) < sum(found["losses"][:3]) - 0.03
    assert min(found["sent"]) > 2
    last = sorted((folder / "trainer").glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))[-1]
    from peft import PeftModel

    model = PeftModel.from_pretrained(llama(), last).eval()
    batch = {key: torch.stack([s[key] for s in samples(4, seed=3)]) for key in ("input_ids", "labels")}
    assert model(**batch).loss.item() == pytest.approx(found["evaluated"], rel=1e-5)
