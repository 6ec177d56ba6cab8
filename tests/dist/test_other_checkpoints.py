"""Checkpoints of other data or settings than the run that goes on from them, damaged ones, and folders of any name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import tests.dist.trainer_work as work
from pipecomp.distributed.local_launcher import run_ranks
from tests.dist.reliability_work import AQSGD, error_of, losses, make, redirect
from tests.limits import HANG_S
from tests.models import gpt2, samples

pytestmark = pytest.mark.ranks
FINER = {"section": {"activations": AQSGD | {"forward_bits": 6}}}


def cut_off(file: Path) -> None:
    """As a machine that lost its power leaves it. Every rank calls it, one does it."""
    dist.barrier()
    if dist.get_rank() == 0:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    dist.barrier()


def visits(engine: Any) -> tuple[int, int]:
    """First ones, and others, since the start."""
    (link,) = engine.comm_stats()["links"].values()
    return link["full_samples"], link["delta_samples"]


def engines(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    redirect(f"{folder}/said-{rank}")
    saved = f"{folder}/run [1] *"  # which DeepSpeed would take for a pattern
    copied, out = {"in_checkpoints": True}, {}
    engine = make(f"{folder}/m", store=copied)
    losses(engine, 4)
    engine.save_checkpoint(saved)
    expected = losses(engine, 1)
    engine.close()
    for name, more in {
        "same": {},
        "other data": {"data": samples(seed=7)},
        "longer": {"data": samples(30)},
        "other settings": FINER,
    }.items():
        engine = make(f"{folder}/{name}", store=copied, **more)
        engine.load_checkpoint(saved)
        out[name] = engine.resumed.exact, losses(engine, 1) == expected, visits(engine)
        engine.close()
    cut_off(Path(saved, "global_step4", "layer_01-model_states.pt"))
    engine = make(f"{folder}/last", store=copied)
    out["cut off"] = error_of(lambda: engine.load_checkpoint(saved))
    return out


@pytest.mark.timeout(HANG_S)
def test_an_engine_takes_no_cached_activations_of_other_samples_or_settings(tmp_path: Path) -> None:
    ranks = run_ranks(2, engines, str(tmp_path), timeout_s=HANG_S)
    for rank, out in ranks.items():
        assert out["same"] == (True, True, (0, 6))
        for name in ("other data", "longer", "other settings"):
            assert out[name] == (False, False, (6, 0)), name
        assert "step4-model" not in out["cut off"]
        assert "layer_01-model_states.pt was changed" in out["cut off"], rank
    said = (tmp_path / "said-0").read_text()
    assert said.count("is of other training data (length of training_data: 30, then 24") == 1
    assert said.count("is of other training data (order or content of training_data") == 1
    assert "pipecomp-messages-rank-0 is not used: link-0 was stored with other settings (forward_bits: 6, " in said


def trainers(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    redirect(f"{folder}/said-{rank}")
    warnings.simplefilter("always")
    finer = {"activations": work.AQSGD["activations"] | {"forward_bits": 6}}

    def trained(resume: bool | str = True, section: Any = work.AQSGD, data: Any = None) -> Any:
        from pipecomp import PipelineTrainer

        args = work.arguments(f"{folder}/run", max_steps=3 + bool(resume), save_strategy="steps", save_steps=1)
        store = {"store": {"path": f"{folder}/messages"}}
        trainer = PipelineTrainer(
            gpt2(2, 16), args, train_dataset=data or samples(9), pipecomp=section | store, report=False
        )
        trainer.train(resume_from_checkpoint=resume)
        found = trainer.state.global_step, work.losses(trainer), visits(trainer.engine)
        rates.append([line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line])
        trainer.end()
        dist.barrier()
        if rank == 0 and resume:
            for file in Path(f"{folder}/run/checkpoint-4").rglob("*.json"):
                file.unlink()  # the next one goes on from the third again
        dist.barrier()
        return found

    rates: list[list[float]] = []
    trained(resume=False)
    out: dict[str, Any] = {
        "same": trained(),
        "other data": trained(data=samples(9, seed=7)),
        "finer": trained(section=finer),
    }
    cut_off(Path(f"{folder}/run/checkpoint-3/deepspeed/pipecomp-messages-rank-1/data.mdb"))
    out["without messages"] = trained(resume=f"{folder}/run/checkpoint-3")
    cut_off(Path(f"{folder}/run/checkpoint-3/deepspeed/layer_00-model_states.pt"))
    out["passed over"] = trained()
    from pipecomp import PipelineTrainer

    made: Callable[[], Any] = lambda: PipelineTrainer(gpt2(2, 16), work.arguments(f"{folder}/said-0/out"))  # noqa: E731
    out["no folder"] = error_of(made)
    return {**out, "rates": rates}


@pytest.mark.timeout(HANG_S)
def test_a_trainer_goes_on_from_what_is_whole_and_its_own(tmp_path: Path) -> None:
    ranks = run_ranks(2, trainers, str(tmp_path), timeout_s=HANG_S)
    said = [(tmp_path / f"said-{rank}").read_text() for rank in (0, 1)]
    for out in ranks.values():
        first, then = out["rates"][:2]
        assert first == pytest.approx([2e-3, 2e-3 * 2 / 3, 2e-3 / 3])
        assert then == pytest.approx([*first, 2e-3 / 4])  # the last of four steps
        step, expected, seen = out["same"]
        assert (step, seen) == (4, (0, 4))
        for name in ("other data", "finer", "without messages"):
            step, found, seen = out[name]
            assert (step, seen) == (4, (4, 0)), name
            assert found != expected
        assert out["passed over"][0] == 4
        # Bit for bit, from the one before; its next step has the rate of a training of four steps.
        assert out["passed over"][1][:3] == expected[:3]
        assert out["rates"][-1] == pytest.approx([*first[:2], 2e-3 * 2 / 4, 2e-3 / 4])
        assert "output_dir: got " in out["no folder"]
    assert "is of other training data (order or content of train_dataset" in said[0]
    assert "was stored with other settings (forward_bits: 6, stored with 3)" in said[0]
    assert "pipecomp-messages-rank-1 is damaged and is not used: " in said[1]
    assert "checkpoint-3: layer_00-model_states.pt was changed" in said[0]
