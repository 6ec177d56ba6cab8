"""QLoRA over a pipeline: trains what peft trains in one process on the same quantized base, saves adapters only."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S
from tests.models import ds_config, llama, samples, train_alone

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.ranks

STEPS, MICRO_BATCHES, MICRO_BATCH, RATE = 4, 3, 2, 2e-2
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01}}}
BF16_ZERO1 = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 10_000},
    "data_types": {"grad_accum_dtype": "fp32"},
}
RECOMPUTE = {"pipeline": {"activation_checkpoint_interval": 1}}


def bits(kind: str = "4", **more: Any) -> Any:
    from transformers import BitsAndBytesConfig

    if kind == "8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, **more)


def quantized(folder: str, kind: str = "4") -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(f"{folder}/base", quantization_config=bits(kind))


def adapted(folder: str, kind: str = "4") -> Any:
    import peft  # here and below: it takes seconds, which every process that collects tests would pay

    return peft.PeftModel.from_pretrained(quantized(folder, kind), f"{folder}/start", is_trainable=True).train()


def write_start(folder: Path) -> None:
    """A base model, and an adapter that changes something."""
    import peft

    base = llama(tied=False)
    with torch.no_grad():
        for parameter in base.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)  # else a fresh model's logits are near 0, whatever its adapter
    base.save_pretrained(folder / "base")
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(quantized(str(folder)), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder / "start")


def frozen_bytes(stage: Any) -> dict[str, bytes]:
    """Content of what must not change: quantized weights, scales, norms, embeddings."""
    trained = {name for name, p in stage.named_parameters() if p.requires_grad}
    state = {n: t for n, t in stage.state_dict().items() if n not in trained}
    return {n: t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in state.items()}


def evaluated(engine: Any) -> float:
    from pipecomp.data import eval_batches

    return float(engine.eval_batch(iter(eval_batches(samples(4, seed=3), 2)), num_micro_batches=2))


def train(engine: Any, steps: int = STEPS) -> list[float]:
    return [float(engine.train_batch()) for _ in range(steps)]


def engine_for(model: Any, stages: int, section: dict | None = None, **more: Any) -> Any:
    import pipecomp

    config = ds_config(section, **ADAM, **more)
    return pipecomp.initialize(model, num_stages=stages, config=config, training_data=samples())


def source(folder: str, kind: str = "4", **more: Any) -> Any:
    from pipecomp.stages import pretrained

    return pretrained(f"{folder}/base", lora=f"{folder}/start", quantization_config=bits(kind, **more))


def over_all_stages(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    """Training over as many stages as ranks."""
    gc.freeze()  # DeepSpeed collects garbage in every step of bf16, in all that was imported
    out: dict[str, Any] = {}
    for name, model, more in (
        ("4", source(folder), {}),
        ("8", source(folder, "8"), {}),
        ("recompute", source(folder), RECOMPUTE),
        ("memory", adapted(folder), {}),
    ):
        engine = engine_for(model, world, **more)
        before = frozen_bytes(engine.stage)
        out[name] = train(engine)
        out[f"{name} frozen"] = before == frozen_bytes(engine.stage) and len(before) > 20
        if name in ("4", "8"):
            engine.save_pretrained(f"{folder}/adapter {name} {world}")
            out[f"{name} evaluated"] = evaluated(engine)
        engine.close()
    return out


def more_on_two(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    """Train on two ranks as `over_all_stages`, then try checkpoints, half precision, replicas, the trainer."""
    out = over_all_stages(rank, world, note, folder)
    engine = engine_for(source(folder), 2)
    train(engine)
    engine.save_checkpoint(f"{folder}/checkpoint")
    out["after"], out["evaluated after"] = train(engine, 2), evaluated(engine)
    out["after evaluation"] = train(engine, 1)
    engine.close()
    engine = engine_for(source(folder), 2)
    engine.load_checkpoint(f"{folder}/checkpoint")
    out["resumed"] = train(engine, 2)
    engine.close()
    for name, kind in (("resharded", "4"), ("replicas", "4")):
        engine = engine_for(source(folder, kind), 1)
        if name == "resharded":
            engine.load_checkpoint(f"{folder}/checkpoint")
            train(engine, 0)
            out["resharded"] = evaluated(engine)
        else:
            out["replicas"] = train(engine)
        engine.close()

    # Weights of another start on the second replica: the first one's must win, scales and all.
    model = adapted(folder)
    if rank == 1:
        for parameter in model.parameters():
            state = getattr(parameter, "quant_state", None)
            if state is not None:
                parameter.data.zero_()
                state.absmax.zero_()
    engine = engine_for(model, 1)
    out["other replica"] = train(engine)
    engine.close()

    engine = engine_for(
        source(folder, bnb_4bit_compute_dtype="bfloat16", bnb_4bit_quant_storage="float32"), 2, **BF16_ZERO1
    )
    before = frozen_bytes(engine.stage)
    out["bf16"] = train(engine)
    out["bf16 frozen"] = before == frozen_bytes(engine.stage)
    out["bf16 dtypes"] = {(type(p).__name__, str(p.dtype)) for p in engine.stage.parameters()}
    engine.save_checkpoint(f"{folder}/checkpoint16")
    more = train(engine, 2)
    engine.close()
    engine = engine_for(
        source(folder, bnb_4bit_compute_dtype="bfloat16", bnb_4bit_quant_storage="float32"), 2, **BF16_ZERO1
    )
    engine.load_checkpoint(f"{folder}/checkpoint16")
    out["bf16 resumed"] = more, train(engine, 2)
    engine.close()

    section = {"activations": {"method": "aqsgd"}, "store": {"backend": "memory"}}
    engine = engine_for(source(folder), 2, section)
    out["compressed"] = train(engine)
    engine.close()
    try:
        engine_for(quantized(folder), 2)
    except Exception as error:
        out["no adapter"] = f"{type(error).__name__}: {error}"
    out["trainer"] = trained_by_trainer(folder)
    return out


def trained_by_trainer(folder: str) -> dict[str, Any]:
    import tests.dist.trainer_work as work
    from pipecomp import PipelineTrainer

    args = work.arguments(f"{folder}/trainer", learning_rate=RATE, num_train_epochs=2, gradient_checkpointing=True)
    made = PipelineTrainer(source(folder), args, train_dataset=samples(), eval_dataset=samples(4, seed=3))
    made.train()
    out = {"losses": work.losses(made), "evaluated": made.evaluate()["eval_loss"], "flos": made.state.total_flos}
    made.save_model(f"{folder}/by trainer")
    made.end()
    return out


def alone(
    folder: str, kind: str = "4", steps: int = STEPS, rate: float = RATE
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training by torch and peft in this process; losses and the adapter."""
    import peft

    model = adapted(folder, kind)
    losses = train_alone(model, steps, rate, micro_batch=MICRO_BATCH, micro_batches=MICRO_BATCHES)
    return losses, peft.get_peft_model_state_dict(model)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qlora")
    write_start(folder)
    return folder


@pytest.fixture(scope="module")
def two(started: Path) -> dict[int, Any]:
    return run_ranks(2, more_on_two, str(started), timeout_s=HANG_S)


@pytest.fixture(scope="module")
def three(started: Path) -> dict[int, Any]:
    return run_ranks(3, over_all_stages, str(started), timeout_s=HANG_S)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("kind", ["4", "8"])
def test_trains_as_peft_does_alone(kind: str, stages: int, started: Path, request: pytest.FixtureRequest) -> None:
    from safetensors.torch import load_file

    ran = request.getfixturevalue("two" if stages == 2 else "three")
    torch.set_num_threads(1)
    losses, adapter = alone(str(started), kind)
    assert abs(losses[-1] - alone(str(started), kind, rate=0.0)[0][-1]) > 0.001, "training changes the loss"
    for result in ran.values():
        assert result[kind] == pytest.approx(losses, rel=1e-5)
        assert result[f"{kind} frozen"]
    found = load_file(started / f"adapter {kind} {stages}" / "adapter_model.safetensors")
    assert found.keys() == adapter.keys()
    for name, value in adapter.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-5 * float(value.abs().max()))


def test_checkpointed_blocks_and_models_in_memory(two: dict[int, Any], three: dict[int, Any]) -> None:
    for ran in (two, three):
        for result in ran.values():
            assert result["recompute"] == pytest.approx(result["4"], rel=1e-6)
            assert result["memory"] == pytest.approx(result["4"], rel=1e-6)
            assert result["recompute frozen"]
            assert result["memory frozen"]


@pytest.mark.parametrize("kind", ["4", "8"])
def test_the_adapter_is_read_by_peft(kind: str, started: Path, two: dict[int, Any]) -> None:
    from peft import PeftModel

    from pipecomp.data import eval_batches

    model = PeftModel.from_pretrained(quantized(str(started), kind), started / f"adapter {kind} 2").train()
    losses = [model(**b.inputs, labels=b.labels).loss.detach() for b in eval_batches(samples(4, seed=3), 2)]
    tolerance = 1e-5 if kind == "4" else 1e-2  # in 8 bits activations are quantized, too, when bitsandbytes evaluates
    assert float(torch.stack(losses).mean()) == pytest.approx(two[0][f"{kind} evaluated"], rel=tolerance)


def test_checkpoints_hold_adapters_only(started: Path, two: dict[int, Any]) -> None:
    files = [*(started / "checkpoint").rglob("layer_*"), *(started / "checkpoint16").rglob("layer_*")]
    assert len(files) == 4
    for file in files:
        names = set(torch.load(file, weights_only=False))
        assert names
        assert all("lora_" in name for name in names)
    for result in two.values():
        assert result["resumed"] == result["after"]
        assert result["bf16 resumed"][0] == result["bf16 resumed"][1]


def test_resumes_with_other_cuts_and_after_evaluation(started: Path, two: dict[int, Any]) -> None:
    torch.set_num_threads(1)
    losses, _ = alone(str(started), steps=STEPS + 3)
    for result in two.values():
        assert [*result["after"], *result["after evaluation"]] == pytest.approx(losses[STEPS:], rel=2e-5)
        assert result["resharded"] == pytest.approx(result["4 evaluated"], rel=1e-5)


def test_replicas_start_with_the_first_ones_weights(two: dict[int, Any]) -> None:
    for result in two.values():
        assert result["other replica"] == pytest.approx(result["replicas"], rel=1e-6)
        assert result["replicas"] == two[0]["replicas"]


def test_half_precision_and_compression(two: dict[int, Any]) -> None:
    for result in two.values():
        assert result["bf16"] == pytest.approx(result["4"], rel=0.02)
        assert result["bf16 frozen"], "bytes that are stored as float32 are not cast"
        assert result["bf16 dtypes"] == {("Params4bit", "torch.float32"), ("Parameter", "torch.bfloat16")}
        assert result["compressed"] == pytest.approx(result["4"], rel=0.02)


def test_refused_without_an_adapter(two: dict[int, Any]) -> None:
    for result in two.values():
        assert "SplitError: model: its weights are quantized and cannot be trained" in result["no adapter"]


def test_pipeline_trainer(started: Path, two: dict[int, Any]) -> None:
    from peft import PeftModel

    found = two[0]["trainer"]
    assert found == two[1]["trainer"]
    batch = {key: torch.stack([s[key] for s in samples(4, seed=3)]) for key in ("input_ids", "labels")}
    trained, start = (
        float(PeftModel.from_pretrained(quantized(str(started)), started / name).train()(**batch).loss)
        for name in ("by trainer", "start")
    )
    assert trained == pytest.approx(found["evaluated"], rel=1e-5)
    assert abs(trained - start) > 0.002
    weights = 4 * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48 + 64) + 32 + 97 * 32
    adapters = 4 * 4 * (32 + 32 + 48 + 32)
    assert found["flos"] == pytest.approx(6 * (weights + adapters) * 24 * 24 * 2, rel=0.02)
