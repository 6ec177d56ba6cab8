"""Checkpoints that a run goes on from with another optimizer, rates, precision or clipping than they were made with."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S
from tests.models import ds_config, gpt2, samples

pytestmark = pytest.mark.ranks

QUANTIZED = {"method": "quantized_adam", "freeze_step": 2, "bits": 8, "group_size": 16}
BF16 = {
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 1, "load_from_fp32_weights": False},
}


def groups(stage: Any) -> list[dict[str, Any]]:
    """Embeddings learn faster; the last of several stages has none."""
    named = [(".wte." in n or ".wpe." in n, p) for n, p in stage.named_parameters()]
    both = (
        {"params": [p for first, p in named if first is fast], "lr": 4e-3 if fast else 1e-3} for fast in (True, False)
    )
    return [group for group in both if group["params"]]


def start(stages: int, gradients: dict[str, Any] | None = None, **more: Any) -> Any:
    import pipecomp

    return pipecomp.initialize(
        gpt2(2, tied=False, seed=more.pop("seed", 9)),
        num_stages=stages,
        config=ds_config({"gradients": gradients or {}}, **more),
        training_data=samples(),
        parameter_groups=groups,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    )


def train(engine: Any, steps: int) -> None:
    for _ in range(steps):
        engine.train_batch()


def kept(engine: Any) -> dict[str, Any]:
    """By name what the next step has of each parameter: momentum, roots of the corrected variance, and the rate."""
    out, names = {}, {id(p): name for name, p in engine.stage.named_parameters()}
    for group in engine.optimizer.param_groups:
        for p in group["params"]:
            moments = engine.optimizer.state[p]
            t = moments.get("frozen_at") or float(moments["step"])
            root = (moments["exp_avg_sq"] / (1 - group["betas"][1] ** t)).sqrt()
            out[names[id(p)]] = moments["exp_avg"].clone(), root, float(moments["step"]), group["lr"], len(moments)
    return out


def optimizers(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    """Two replicas with `quantized_adam`, then torch's Adam in two stages and in two replicas, then back again."""
    out = {}
    engine = start(1, QUANTIZED, seed=0)
    train(engine, 5)
    engine.save_checkpoint(folder, tag="quantized")
    out["quantized"] = kept(engine)
    engine.close()
    for stages in (2, 1):
        engine = start(stages)
        engine.load_checkpoint(folder, tag="quantized")
        out[f"plain {stages}"] = kept(engine)
        train(engine, 1)
        engine.save_checkpoint(folder, tag=f"plain {stages}")
        out[f"trained {stages}"] = kept(engine)
        engine.close()
    engine = start(1, QUANTIZED)
    for stages in (2, 1):
        engine.load_checkpoint(folder, tag=f"plain {stages}")
        out[f"quantized {stages}"] = kept(engine)
        train(engine, 2)
        out[f"frozen {stages}"] = {engine.optimizer.state[p]["frozen_at"] for p in engine.stage.parameters()}
    engine.close()
    return out


def masters(engine: Any) -> bool:
    """Return True if these are the weights."""
    from deepspeed.utils import safe_get_full_fp32_param

    pairs = [(safe_get_full_fp32_param(p), p.float()) for p in engine.stage.parameters()]
    return all(torch.equal(master, weight) for master, weight in pairs)


def halved(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    """Weights of float32 go on in BF16 with ZeRO 1, whose masters are made of the weights, and clip otherwise."""
    gc.freeze()  # DeepSpeed collects garbage in every step of bf16, in all that was imported
    out = {}
    engine = start(1, seed=0)
    train(engine, 1)
    engine.save_checkpoint(folder, tag="float32")
    weights = {name: p.detach().bfloat16() for name, p in engine.stage.named_parameters()}
    engine.close()
    engine = start(2, **BF16)
    engine.load_checkpoint(folder, tag="float32", load_module_only=True)
    out["weights alone"] = all(torch.equal(p, weights[name]) for name, p in engine.stage.named_parameters())
    out["masters alone"] = masters(engine), engine.global_steps
    train(engine, 2)
    engine.save_checkpoint(folder, tag="bf16")
    out["trained"] = masters(engine)
    engine.close()
    for stages in (2, 1):
        engine = start(stages, **BF16, gradient_clipping=0.25)
        engine.load_checkpoint(folder, tag="bf16")
        out[f"masters {stages}"] = masters(engine)
        out[f"clipped {stages}"] = engine.optimizer.clip_grad
        engine.close()
    return out


def everything(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    found = {**optimizers(rank, world, note, folder), **halved(rank, world, note, folder)}
    return tree_map(lambda x: x.float().numpy() if isinstance(x, torch.Tensor) else x, found)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    return run_ranks(2, everything, str(tmp_path_factory.mktemp("others")), timeout_s=HANG_S)


@pytest.mark.parametrize("stages", [2, 1])
def test_adam_and_quantized_adam_go_on_with_each_others_states(ran: dict[int, Any], stages: int) -> None:
    trained = ran[0][f"trained {stages}"] | ran[1][f"trained {stages}"]
    for out in ran.values():
        for then, before, size in (
            (out[f"plain {stages}"], out["quantized"], 3),
            (out[f"quantized {stages}"], trained, 5),
        ):
            assert then.keys() <= before.keys()
            for name, (momentum, root, step, rate, values) in then.items():
                assert (momentum == before[name][0]).all()
                assert root == pytest.approx(before[name][1], rel=1e-5), name
                assert (step, rate) == before[name][2:4]
                assert values == size, "no more than the optimizer itself keeps"
        assert out[f"frozen {stages}"] == {7}, "the variance of the first step that replicas average"


@pytest.mark.parametrize("stages", [2, 1])
def test_each_stage_goes_on_with_the_rates_of_its_own_groups(ran: dict[int, Any], stages: int) -> None:
    for out in ran.values():
        for name, (*_, rate, _) in out[f"trained {stages}"].items():
            assert rate == pytest.approx((4e-3 if ".wte." in name or ".wpe." in name else 1e-3) * 0.5**6), name


def test_weights_alone_go_on_in_another_precision(ran: dict[int, Any]) -> None:
    for out in ran.values():
        assert out["weights alone"]
        assert out["masters alone"] == (True, 0)


@pytest.mark.parametrize("stages", [2, 1])
def test_masters_are_made_of_the_weights_where_that_is_asked_for(ran: dict[int, Any], stages: int) -> None:
    for out in ran.values():
        assert not out["trained"], "masters are finer than weights"
        assert out[f"masters {stages}"]


@pytest.mark.parametrize("stages", [2, 1])
def test_gradients_are_clipped_as_this_run_says(ran: dict[int, Any], stages: int) -> None:
    assert [out[f"clipped {stages}"] for out in ran.values()] == [0.25, 0.25]
