"""Half precision with parts that stay in float32: batch norms, what a class names, what a model in memory has so."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S
from tests.models import ds_config, llama, samples

pytestmark = pytest.mark.ranks

STEPS = 4
BF16 = {"bf16": {"enabled": True}}
ZERO1 = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 10_000}}
BF16_ZERO1 = {**BF16, **ZERO1, "data_types": {"grad_accum_dtype": "fp32"}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}, **ZERO1}
RECOMPUTE = {"pipeline": {"activation_checkpoint_interval": 1}}
NORMS = 2 * 4 + 1


def images() -> nn.Sequential:
    torch.manual_seed(0)
    first = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(*first, nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 4))


def pictures(count: int = 12) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [{"pixel_values": torch.randn(3, 8, 8, generator=draw), "labels": torch.tensor(i % 4)} for i in range(count)]


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.float(), labels)


def with_float_norms() -> Any:
    """A Llama whose class keeps its norms in float32."""
    from transformers import LlamaForCausalLM

    class Named(LlamaForCausalLM):
        _keep_in_fp32_modules_strict = ("norm",)

    whole = llama(tied=False)
    named = Named(whole.config)
    named.load_state_dict(whole.state_dict())
    return named


def engine_for(model: Any, cuts: list[int], data: Any, **more: Any) -> Any:
    import pipecomp

    own_loss = loss if isinstance(data[0].get("pixel_values"), torch.Tensor) else None
    config = ds_config(**more)
    return pipecomp.initialize(model, cuts=cuts, config=config, training_data=data, loss_fn=own_loss)


def trained(engine: Any, folder: str = "") -> dict[str, Any]:
    """Losses, dtypes, and the losses after a checkpoint that is loaded again; closes the engine."""
    out: dict[str, Any] = {"losses": [float(engine.train_batch()) for _ in range(STEPS)]}
    out["float32"] = sorted(n for n, p in engine.stage.named_parameters() if p.dtype == torch.float32)
    out["dtypes"] = {str(p.dtype) for p in engine.stage.parameters()}
    out["sent"] = engine.comm_stats()["links"]["0->1"]["forward"]["bytes_raw"]
    if folder:
        engine.save_checkpoint(folder)
        out["after"] = [float(engine.train_batch()) for _ in range(2)]
        engine.load_checkpoint(folder)
        out["again"] = [float(engine.train_batch()) for _ in range(2)]
        if hasattr(engine.stage, "_model"):
            engine.save_pretrained(f"{folder}/saved")
    engine.close()
    return out


def everything(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    from deepspeed.accelerator import get_accelerator

    from pipecomp import stages
    from pipecomp.errors import PipecompError

    type(get_accelerator()).is_fp16_supported = lambda self: True
    gc.freeze()  # DeepSpeed collects garbage in every step of bf16, in all that was imported
    out: dict[str, Any] = {}
    for name, more in (("fp32", {}), ("bf16", BF16), ("bf16 zero", BF16_ZERO1), ("fp16", FP16)):
        saves = f"{folder}/{name}" if "zero" in name or name == "fp16" else ""
        model = stages.modules(images(), (3, 8, 8))
        out[f"images, {name}"] = trained(engine_for(model, [0, 3, 8], pictures(), **more), saves)
        saves = saves and f"{saves}-norms"
        out[f"norms, {name}"] = trained(engine_for(with_float_norms(), [0, 2, 4], samples(), **more), saves)
    out["norms, recomputed"] = trained(engine_for(with_float_norms(), [0, 2, 4], samples(), **BF16, **RECOMPUTE))
    listed = {"data_types": {"keep_in_fp32_modules": []}}
    out["norms, none listed"] = trained(engine_for(with_float_norms(), [0, 2, 4], samples(), **BF16, **listed))
    mixed = llama(tied=False).to(torch.bfloat16)
    mixed.model.norm.float()
    mixed.model.layers[0].mlp.down_proj.float()
    out["mixed"] = trained(engine_for(mixed, [0, 2, 4], samples(), **BF16))

    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pipecomp").addHandler(handler)
    out["pure"] = trained(engine_for(llama(tied=False).to(torch.bfloat16), [0, 2, 4], samples()))
    out["warned"] = [text for text in warned if "neither bf16 nor fp16" in text]
    halves = llama(tied=False)
    for module in (*halves.model.layers[2:], halves.model.norm, halves.lm_head):
        module.bfloat16()
    try:
        engine_for(halves, [0, 2, 4], samples())
    except PipecompError as error:
        out["border"] = str(error)
    return out


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    folder = tmp_path_factory.mktemp("float32")
    return folder, run_ranks(2, everything, str(folder), timeout_s=HANG_S)


@pytest.mark.parametrize("name", ["bf16", "bf16 zero", "fp16"])
def test_batch_norms_stay_in_float32_and_train(ran: Any, name: str) -> None:
    _, ranks = ran
    half = "torch.float16" if name == "fp16" else "torch.bfloat16"
    expected = ranks[0]["images, fp32"]
    assert abs(expected["losses"][0] - expected["losses"][-1]) > 0.01
    for rank, out in ranks.items():
        found = out[f"images, {name}"]
        assert found["losses"] == pytest.approx(expected["losses"], rel=0.02)
        norm = 1 + 2 * rank  # the second stage begins with one: that its weight is float32 makes no border of it
        assert found["float32"] == [f"{norm}.bias", f"{norm}.weight"]
        assert found["dtypes"] == {half, "torch.float32"}
        assert found["sent"] == expected["sent"] / 2


@pytest.mark.parametrize("name", ["bf16", "bf16 zero", "fp16", "recomputed"])
def test_what_a_class_names_stays_in_float32(ran: Any, name: str) -> None:
    _, ranks = ran
    expected = ranks[0]["norms, fp32"]["losses"]
    kept = [n for out in ranks.values() for n in out[f"norms, {name}"]["float32"]]
    assert len(kept) == NORMS
    assert all("norm" in n for n in kept)
    for out in ranks.values():
        assert out[f"norms, {name}"]["losses"] == pytest.approx(expected, rel=0.01)
    if name == "recomputed":
        assert ranks[0][f"norms, {name}"]["losses"] == ranks[0]["norms, bf16"]["losses"]


def test_a_list_in_the_configuration_replaces_the_names_of_the_class(ran: Any) -> None:
    for out in ran[1].values():
        assert out["norms, none listed"]["dtypes"] == {"torch.bfloat16"}


@pytest.mark.parametrize("case", ["images, bf16 zero", "images, fp16", "norms, bf16 zero", "norms, fp16"])
def test_checkpoints_keep_float32(ran: Any, case: str) -> None:
    for out in ran[1].values():
        assert out[case]["again"] == out[case]["after"]


def test_a_saved_model_has_float32_where_the_training_has(ran: Any) -> None:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in (ran[0] / "bf16 zero-norms" / "saved").glob("*.safetensors"):
        tensors |= load_file(file)
    dtypes = {("norm" in name, tensor.dtype) for name, tensor in tensors.items()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}


def test_what_a_model_in_memory_has_in_float32_stays_so(ran: Any) -> None:
    _, ranks = ran
    assert ranks[0]["mixed"]["float32"] == ["model.layers.0.mlp.down_proj.weight"]
    assert ranks[1]["mixed"]["float32"] == ["model.norm.weight"]
    assert ranks[0]["mixed"]["losses"] == pytest.approx(ranks[0]["norms, fp32"]["losses"], rel=0.01)


def test_a_model_in_half_precision_trains_as_it_is_with_a_warning(ran: Any) -> None:
    _, ranks = ran
    for rank, out in ranks.items():
        assert out["pure"]["dtypes"] == {"torch.bfloat16"}
        assert len(out["warned"]) == (rank == 0)


def test_stages_of_different_dtypes_are_refused(ran: Any) -> None:
    for out in ran[1].values():
        assert "stage 0 computes in float32, stage 1 in bfloat16" in out["border"]
