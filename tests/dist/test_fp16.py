"""FP16 with loss scaling, as far as a CPU goes: DeepSpeed refuses it there, but torch can compute it."""

from __future__ import annotations

from typing import Any

import pytest

from pipecomp.buffers.base import GRADIENT
from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S
from tests.models import ds_config, gpt2, samples

pytestmark = pytest.mark.ranks

STEPS = 8
SECTION = {"activations": {"method": "aqsgd"}, "store": {"backend": "memory"}}
CHANGES = {"activations": {"method": "aqsgd", "backward_method": "delta"}, "store": {"backend": "memory"}}
ZERO1 = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 100_000}}


def half(power: int) -> dict[str, Any]:
    """The first loss scale is 2**power; it doubles after five good steps and halves at every overflow."""
    return {**ZERO1, "fp16": {"enabled": True, "initial_scale_power": power, "hysteresis": 1, "loss_scale_window": 5}}


def everything(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    from deepspeed.accelerator import get_accelerator

    import pipecomp
    import pipecomp.initialization
    from pipecomp.errors import PipecompError

    type(get_accelerator()).is_fp16_supported = lambda self: True

    def engine_for(stages: int, section: dict, **more: Any) -> Any:
        return pipecomp.initialize(
            gpt2(), num_stages=stages, config=ds_config(section, **more), training_data=samples()
        )

    def train(engine: Any) -> dict[str, Any]:
        start = [p.detach().clone() for p in engine.stage.parameters()]
        out: dict[str, Any] = {"losses": [], "scales": [], "skipped": []}
        for _ in range(STEPS):
            out["losses"].append(float(engine.train_batch()))
            out["scales"].append(float(engine.optimizer.cur_scale))
            out["skipped"].append(engine.skipped_steps)
        out["changed"] = any(bool((a != b).any()) for a, b in zip(start, engine.stage.parameters(), strict=True))
        out["norm"] = float(engine.get_global_grad_norm())
        held = [end.store.inventory() for end in engine.links]
        out["messages"] = [[(h.sample, h.version, h.digest) for h in lines] for lines in held]
        return out

    out: dict[str, Any] = {}
    for name, power in (("plain", 8), ("overflows", 40), ("recovers", 24), ("changes", 24)):
        engine = engine_for(2, CHANGES if name == "changes" else SECTION, **half(power))
        out[name] = train(engine)
        if name == "recovers":
            engine.save_checkpoint(f"{folder}/checkpoint")
            out["saved"] = float(engine.optimizer.cur_scale), engine.global_steps, engine.skipped_steps
        engine.close()
    engine = engine_for(1, {}, **half(8))
    engine.load_checkpoint(f"{folder}/checkpoint")
    out["loaded"] = float(engine.optimizer.cur_scale), engine.global_steps, engine.skipped_steps
    engine.close()
    engine = engine_for(2, SECTION)
    out["fp32"] = [float(engine.train_batch()) for _ in range(STEPS)], float(engine.get_global_grad_norm())
    engine.close()
    try:
        engine_for(2, SECTION, fp16={"enabled": True})
    except PipecompError as error:
        out["without ZeRO"] = str(error)
    return out


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    return run_ranks(2, everything, str(tmp_path_factory.mktemp("fp16")), timeout_s=HANG_S)


def test_trains_as_float32_does(ran: Any) -> None:
    for out in ran.values():
        losses, norm = out["fp32"]
        assert out["plain"]["losses"] == pytest.approx(losses, rel=1e-3)
        assert out["plain"]["norm"] == pytest.approx(norm, rel=0.02)
        assert out["plain"]["skipped"][-1] == 0
        assert out["plain"]["scales"][-1] == 512
    assert ran[0]["plain"]["messages"] == ran[1]["plain"]["messages"]


def test_an_overflow_skips_the_step_on_all_stages(ran: Any) -> None:
    for out in ran.values():
        assert out["overflows"]["skipped"] == list(range(1, STEPS + 1))
        assert out["overflows"]["scales"] == [2.0 ** (39 - i) for i in range(STEPS)]
        assert not out["overflows"]["changed"]
        assert 0 < out["recovers"]["skipped"][-1] < STEPS
        assert out["recovers"]["changed"]
        assert out["recovers"]["skipped"] == ran[0]["recovers"]["skipped"]
    for name in ("overflows", "recovers"):
        assert ran[0][name]["messages"] == ran[1][name]["messages"]


def test_an_overflow_changes_no_gradient_that_is_kept(ran: Any) -> None:
    """Else the two ends would hold different ones, or what was kept would move with the loss scale."""
    for out in ran.values():
        assert out["changes"]["messages"] == ran[0]["changes"]["messages"]
        assert 0 < out["changes"]["skipped"][-1] < STEPS
        assert any(sample & GRADIENT for sample, _, _ in out["changes"]["messages"][0])
        after = out["changes"]["skipped"].count(out["changes"]["skipped"][-1])
        assert out["changes"]["losses"][-after:] == pytest.approx(out["recovers"]["losses"][-after:], rel=2e-3)


def test_another_cut_goes_on_with_the_loss_scale(ran: Any) -> None:
    for out in ran.values():
        assert out["loaded"] == out["saved"]


def test_refused_without_zero(ran: Any) -> None:
    for out in ran.values():
        assert "zero_optimization.stage: got 0, allowed: 1 with fp16" in out["without ZeRO"]
