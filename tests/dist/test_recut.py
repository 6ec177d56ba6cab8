"""Checkpoints that other numbers of stages or replicas go on with: same weights, optimizer states and losses."""

from __future__ import annotations

import gc
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S
from tests.models import ds_config, gpt2, samples

pytestmark = [pytest.mark.ranks, pytest.mark.soak]

BF16_ZERO1 = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "data_types": {"grad_accum_dtype": "fp32"},
}
MODES: dict[str, dict[str, Any]] = {"fp32": {}, "zero1": {"zero_optimization": {"stage": 1}}, "bf16": BF16_ZERO1}
SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 1e-3}}}
QUANTIZED = {"gradients": {"method": "quantized_adam", "freeze_step": 2, "bits": 8, "group_size": 64}}


def engine_for(stages: int, mode: str = "fp32", section: dict | None = None, *, seed: int = 0, **more: Any) -> Any:
    """Return an engine of four ranks; always 8 samples to a step."""
    import pipecomp

    config = ds_config(section, micro_batches=stages, **{**SCHEDULE, **MODES[mode], **more})
    if mode != "fp32":
        config["zero_optimization"] = {"stage": 1, "reduce_bucket_size": 100_000}
    return pipecomp.initialize(gpt2(seed=seed), num_stages=stages, config=config, training_data=samples())


def train(engine: Any, steps: int) -> list[float]:
    """On the same samples in every step, however many replicas share them."""
    grid, data = engine.grid, samples()

    def batches() -> Any:
        while True:
            first = engine.global_steps * 8 % 24
            own = range(first + grid.data_parallel_id, first + 8, grid.data_parallel_size)
            for ids in zip(*[iter(own)] * 2, strict=True):
                x = torch.stack([data[i]["input_ids"] for i in ids])
                yield {"input_ids": x, "labels": x, "sample_ids": list(ids)}

    iterator = batches()
    return [float(engine.train_batch(iterator)) for _ in range(steps)]


def hashed(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


def contents(engine: Any) -> dict[str, str]:
    """Digests of this stage's weights and of what the optimizer keeps, by name; ZeRO's gathered by DeepSpeed itself."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    out = {}
    if engine.zero_optimization():
        engine.optimizer._lazy_init_hp_params_optimizer_state()  # as a step does, for what is called below
    for name, p in engine.stage.named_parameters():
        name = name.replace("lm_head", "transformer.wte")
        out[name] = hashed(p)
        if engine.zero_optimization():
            kept = {key: safe_get_full_optimizer_state(p, key) for key in ("exp_avg", "exp_avg_sq")}
            kept["master"] = safe_get_full_fp32_param(p)
        else:
            kept = {key: x for key, x in engine.optimizer.state[p].items() if torch.is_tensor(x) and x.dim()}
            assert kept
        out |= {f"{name} {key}": hashed(x) for key, x in kept.items()}
    return out


def evaluated(engine: Any) -> float:
    from pipecomp.data import eval_batches

    return float(engine.eval_batch(iter(eval_batches(samples(4, seed=3), 2)), num_micro_batches=2))


def everything(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    gc.freeze()  # DeepSpeed collects garbage in every step of bf16, in all that was imported
    out: dict[str, Any] = {mode: four_to_two(f"{folder}/{mode}", mode) for mode in MODES}
    out["replicas"] = replicas_to_stages(f"{folder}/replicas")
    out["quantized"] = quantized(f"{folder}/quantized")
    out["messages"] = messages(folder)
    out["refused"] = refused(folder, rank)
    return out


def four_to_two(folder: str, mode: str) -> dict[str, Any]:
    """Saved at four stages, gone on with as two replicas of two stages."""
    engine = engine_for(4, mode)
    train(engine, 3)
    engine.save_checkpoint(folder, client_state={"mine": 7})
    out: dict[str, Any] = {"held": contents(engine), "evaluated": evaluated(engine)}
    out |= {"losses": train(engine, 3), "rate": engine.get_lr()}
    engine.close()
    engine = engine_for(2, mode, seed=9)
    path, state = engine.load_checkpoint(folder)
    out["path"], out["state"] = path == f"{folder}/global_step3", {key: state.get(key) for key in ("mine", "pipecomp")}
    out |= {"held again": contents(engine), "evaluated again": evaluated(engine)}
    out |= {"losses again": train(engine, 3), "rate again": engine.get_lr()}
    engine.close()
    return out


def replicas_to_stages(folder: str) -> dict[str, Any]:
    """Saved by four replicas of one stage, which share ZeRO's states, gone on with as four stages."""
    engine = engine_for(1, "zero1")
    for _ in range(5):
        engine.train_batch()
    engine.save_checkpoint(folder)
    out: dict[str, Any] = {"held": contents(engine), "evaluated": evaluated(engine)}
    engine.close()
    engine = engine_for(4, "zero1", seed=9)
    engine.load_checkpoint(folder, load_module_only=True)
    out["weights alone"] = evaluated(engine), engine.global_steps
    engine.load_checkpoint(folder)
    out |= {
        "held again": contents(engine),
        "evaluated again": evaluated(engine),
        "taken": engine.progress.batches_taken,
    }
    engine.close()
    return out


def quantized(folder: str) -> dict[str, Any]:
    """Two replicas of two stages, gone on with as four of one, the variance frozen and residuals left behind."""
    plain = {"type": "WarmupLR", "params": {}}
    engine = engine_for(2, section=QUANTIZED, scheduler=plain)
    train(engine, 4)
    engine.save_checkpoint(folder)
    out: dict[str, Any] = {"held": contents(engine), "evaluated": evaluated(engine)}
    engine.close()
    engine = engine_for(1, section=QUANTIZED, seed=9, scheduler=plain)
    engine.load_checkpoint(folder)
    out |= {"held again": contents(engine), "evaluated again": evaluated(engine), "losses": train(engine, 2)}
    out["after"] = hashed(torch.cat([p.flatten() for p in engine.stage.parameters()]))
    engine.close()
    return out


def messages(folder: str) -> dict[str, Any]:
    """A store is of one cut: with another it is refused, or another one is taken, and messages are sent whole once."""
    from pipecomp.buffers.admin import forget_other_cuts
    from pipecomp.errors import PipecompError

    scales = {"forward": "cached_channels", "backward": "channels"}  # whole messages have none to begin with
    section = {"activations": {"method": "aqsgd", "scale": scales}, "store": {"path": f"{folder}/messages"}}
    engine = engine_for(4, section=section)
    train(engine, 3)
    engine.save_checkpoint(f"{folder}/aqsgd")
    out: dict[str, Any] = {"run": engine.run.id}
    engine.close()
    try:
        engine_for(2, section=section)
    except PipecompError as error:
        out["refused"] = f"{type(error).__name__}: {error}"
    engine = engine_for(2, section={**section, "store": {"path": f"{folder}/messages-of-two"}})
    engine.load_checkpoint(f"{folder}/aqsgd")
    out["run again"], out["resumed"] = engine.run.id, tuple(engine.resumed)
    train(engine, 6)
    (out["link"],) = engine.comm_stats()["links"].values()
    out["cuts"] = list(engine.plan.cuts)
    engine.close()
    out["kept"] = forget_other_cuts(f"{folder}/messages-of-two", torch.distributed.get_rank(), out["cuts"])
    out["dropped"] = forget_other_cuts(f"{folder}/messages", torch.distributed.get_rank(), out["cuts"])
    torch.distributed.barrier()
    return out


def refused(folder: str, rank: int) -> dict[str, Any]:
    from pipecomp.errors import PipecompError

    if rank == 0:
        target = Path(folder, "broken", "global_step3")
        target.mkdir(parents=True)
        for file in Path(folder, "zero1", "global_step3").iterdir():
            if "optim_states" not in file.name:
                (target / file.name).symlink_to(file)
        (target.parent / "latest").write_text("global_step3")
    torch.distributed.barrier()
    out = {}
    engine = engine_for(2, "zero1")
    for name in ("fp32", "broken", "none"):
        try:
            out[name] = engine.load_checkpoint(f"{folder}/{name}")
        except PipecompError as error:
            out[name] = f"{type(error).__name__}: {error}"
    engine.close()
    return out


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    return run_ranks(4, everything, str(tmp_path_factory.mktemp("recut")), timeout_s=HANG_S)


def merged(parts: list[dict[str, str]]) -> dict[str, str]:
    """One table; what several ranks hold must be equal."""
    out: dict[str, str] = {}
    for part in parts:
        for name, value in part.items():
            assert out.setdefault(name, value) == value, name
    return out


def table(ran: dict[int, Any], part: str, key: str) -> dict[str, str]:
    return merged([result[part][key] for result in ran.values()])


@pytest.mark.parametrize("mode", MODES)
def test_four_stages_go_on_as_two(ran: Any, mode: str) -> None:
    held = table(ran, mode, "held")
    assert table(ran, mode, "held again") == held
    assert len(held) > 100
    for result in (r[mode] for r in ran.values()):
        assert result["path"]
        assert result["state"] == {"mine": 7, "pipecomp": None}
        assert result["evaluated again"] == result["evaluated"]
        assert result["losses again"] == pytest.approx(result["losses"], rel=2e-3 if mode == "bf16" else 1e-6)
        assert result["rate again"] == result["rate"]


def test_four_replicas_of_one_stage_go_on_as_four_stages(ran: Any) -> None:
    assert table(ran, "replicas", "held again") == table(ran, "replicas", "held")
    for result in (r["replicas"] for r in ran.values()):
        assert result["evaluated again"] == pytest.approx(result["evaluated"], rel=1e-6)
        assert result["weights alone"] == (result["evaluated again"], 0)
        assert result["taken"] == 5 * 4  # micro-batches, of one replica instead of four


def test_messages_of_another_cut_are_sent_whole_once(ran: Any) -> None:
    for rank, result in ((rank, r["messages"]) for rank, r in ran.items()):
        assert result["refused"].startswith(("StoreError", "LinkError: rank"))
        assert "set another store.path" in result["refused"]
        assert result["kept"] == []
        assert result["dropped"] == [f"link-{index}" for index in (rank - 1, rank) if 0 <= index < 3]
        assert result["run again"] == result["run"] == ran[0]["messages"]["run"]
        assert result["resumed"] == (False, 0)
        assert result["link"]["full_samples"] == 12  # of this replica
        assert result["link"]["delta_samples"] == 6 * 4 - 12


def test_quantized_adam_goes_on(ran: Any) -> None:
    assert table(ran, "quantized", "held again") == table(ran, "quantized", "held")
    for result in (r["quantized"] for r in ran.values()):
        assert result["evaluated again"] == pytest.approx(result["evaluated"], rel=1e-6)
        assert result["after"] == ran[0]["quantized"]["after"], "replicas drifted apart"
        assert result["losses"] == ran[0]["quantized"]["losses"]


def test_what_is_refused(ran: Any) -> None:
    for result in (r["refused"] for r in ran.values()):
        assert "zero_optimization.stage: got 1, allowed: 0, as in the checkpoint" in result["fp32"]
        assert "optim_states.pt is missing" in result["broken"]
        assert result["none"] == (None, None)
