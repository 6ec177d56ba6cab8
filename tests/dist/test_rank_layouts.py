"""Training with ranks in another order: the same numbers, and a run that goes on in the other order."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.elastic.assembly import assemble
from pipecomp.errors import ConfigError
from pipecomp.rank_layout import LAYOUTS, REPLICAS_ACROSS, STAGES_ACROSS, RankLayout
from tests.dist import trainer_work as work
from tests.limits import HANG_S
from tests.models import ds_config, gpt2, samples

pytestmark = pytest.mark.ranks

AQSGD = {"method": "aqsgd", "forward_bits": 3, "backward_bits": 6, "rounding": "stochastic"}
SQUEEZE = {"method": "double_squeeze", "bits": 4, "group_size": 16}
HALF = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all weights": ({"gradients": SQUEEZE}, {}),
    "BF16, ZeRO 1": ({}, HALF),
    "local steps": ({"gradients": {**SQUEEZE, "local_steps": 4}}, {"gradient_clipping": 0.0}),
}
STEPS, SAVED = 6, 3


def start(name: str, layout: str, folder: str, **section: Any) -> Any:
    import pipecomp

    more, ds = CASES[name]
    store = {"path": f"{folder}/store-{layout}", "in_checkpoints": True}
    config = ds_config({"activations": AQSGD, "store": store, "layout": layout, **more, **section}, **ds)
    return pipecomp.initialize(gpt2(tied=True), num_stages=2, config=config, training_data=samples())


def steps(engine: Any, count: int) -> list[float]:
    return [float(engine.train_batch()) for _ in range(count)]


def case(name: str, folder: str) -> dict[str, Any]:
    """Losses of a whole run in each layout, and of one that changes its layout both ways."""
    out: dict[str, Any] = {}
    for layout in LAYOUTS:
        engine = start(name, layout, f"{folder}/{layout}")
        out[layout] = (engine.stage_id, engine.grid.data_parallel_id), steps(engine, SAVED)
        engine.save_checkpoint(f"{folder}/{layout}/saved")
        out[layout][1].extend(steps(engine, STEPS - SAVED))
        engine.close()
    for before, after in (LAYOUTS, LAYOUTS[::-1]):
        engine = start(name, after, f"{folder}/resumed {after}")
        engine.load_checkpoint(f"{folder}/{before}/saved")
        out[f"resumed {after}"] = bool(engine.resumed.exact), steps(engine, STEPS - SAVED)
        engine.close()
    return out


def kept_store(folder: str) -> tuple[bool, list[float]]:
    """Go on with the stores on disk, of which the checkpoint has no copy."""
    found: list[float] = []
    exact = False
    for layout in LAYOUTS:
        store = {"path": f"{folder}/store", "in_checkpoints": False}
        engine = start("all weights", layout, folder, store=store)
        if found:
            engine.load_checkpoint(f"{folder}/saved")
            exact = engine.resumed.exact
        found += steps(engine, SAVED)
        engine.save_checkpoint(f"{folder}/saved")
        engine.close()
    return exact, found


def records(folder: str) -> list[float]:
    """Losses after a start in the first layout from the records of a run in the second."""
    elastic = {"second_home": "next", "path": f"{folder}/records", "every_steps": 3}
    engine = start("all weights", REPLICAS_ACROSS, folder, elastic=elastic)
    steps(engine, SAVED)
    assert engine.second_home.wait(HANG_S)
    engine.close()
    dist.barrier()
    if dist.get_rank() == 0:
        assemble([f"{folder}/records"], f"{folder}/assembled")
    dist.barrier()
    engine = start("all weights", STAGES_ACROSS, f"{folder}/after")
    engine.load_checkpoint(f"{folder}/assembled")
    engine.links.forget()
    out = steps(engine, STEPS - SAVED)
    engine.close()
    engine = start("all weights", STAGES_ACROSS, f"{folder}/plain")
    steps(engine, SAVED)
    engine.links.forget()
    plain = steps(engine, STEPS - SAVED)
    engine.close()
    return [out, plain]


def trainers(folder: str) -> dict[str, Any]:
    """Losses of a trainer with dropout: of a whole run, and of one that goes on in the other layout."""
    from pipecomp import PipelineTrainer

    def losses(name: str, layout: str, resume: bool, last: int) -> list[float]:
        model = gpt2(resid_pdrop=0.1)
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": last, "lr_scheduler_type": "constant"}
        args = work.arguments(f"{folder}/{name}", **options)
        section = {**work.AQSGD, "layout": layout}
        trainer = PipelineTrainer(model, args, train_dataset=samples(), pipecomp=section, num_stages=2)
        taken = [int(i) for batch in trainer.get_train_dataloader().batch_sampler for i in batch]
        place = trainer.engine.grid.data_parallel_id
        trainer.train(resume_from_checkpoint=resume or None)
        found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        trainer.end()
        return [place, taken, found]

    return {
        "whole": losses("whole", STAGES_ACROSS, False, 4),
        "first": losses("changed", STAGES_ACROSS, False, 2),
        "second": losses("changed", REPLICAS_ACROSS, True, 4),
    }


def error(stages: int) -> str:
    try:
        start_config = ds_config({"layout": REPLICAS_ACROSS})
        import pipecomp

        pipecomp.initialize(gpt2(), num_stages=stages, config=start_config)
    except ConfigError as problem:
        return str(problem)
    return ""


def every(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    out: dict[str, Any] = {name: case(name, f"{folder}/{name}") for name in CASES}
    out["kept store"] = kept_store(f"{folder}/kept")
    out["records"] = records(f"{folder}/records")
    out["trainers"] = trainers(f"{folder}/trainers")
    out["errors"] = [error(1), error(4)]
    out["files"] = sorted(os.listdir(f"{folder}/kept/store"))
    return out


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("layouts")
    return run_ranks(4, every, str(folder), timeout_s=2 * HANG_S)


def by_place(ran: dict[int, dict[str, Any]], name: str, layout: str) -> dict[tuple[int, int], list[float]]:
    return {out[name][layout][0]: out[name][layout][1] for out in ran.values()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_engine_has_the_layout(ran: dict[int, dict[str, Any]], layout: str) -> None:
    ranks = RankLayout(2, 2, layout)
    assert {rank: out["all weights"][layout][0] for rank, out in ran.items()} == {r: ranks.place(r) for r in range(4)}


@pytest.mark.parametrize("name", CASES)
def test_the_same_losses_in_both(ran: dict[int, dict[str, Any]], name: str) -> None:
    first, second = (by_place(ran, name, layout) for layout in LAYOUTS)
    assert first == second
    assert all(losses[-1] < losses[0] for losses in first.values())


@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_goes_on_in_the_other(ran: dict[int, dict[str, Any]], name: str, after: str) -> None:
    whole, places = by_place(ran, name, after), RankLayout(2, 2, after)
    for rank, out in ran.items():
        exact, losses = out[name][f"resumed {after}"]
        assert exact
        assert losses == whole[places.place(rank)][SAVED:]


def test_stores_without_a_copy_go_on(ran: dict[int, dict[str, Any]]) -> None:
    whole = by_place(ran, "all weights", STAGES_ACROSS)
    for out in ran.values():
        exact, losses = out["kept store"]
        assert exact
        assert losses == whole[0, 0], "the mean over replicas, on every rank"
        assert out["files"] == [f"rank-{number}" for number in range(4)]


def test_records_go_on_in_the_other(ran: dict[int, dict[str, Any]]) -> None:
    for out in ran.values():
        resumed, plain = out["records"]
        assert resumed == plain


def test_a_trainer_goes_on_in_the_other(ran: dict[int, dict[str, Any]]) -> None:
    for rank, out in ran.items():
        whole, first, second = (out["trainers"][run] for run in ("whole", "first", "second"))
        assert first[2] == whole[2][:2]
        assert second[2] == whole[2], "random generators belong to a stage and replica, not to a rank"
        assert second[0] == RankLayout(2, 2, REPLICAS_ACROSS).place(rank)[1]
    assert {tuple(out["trainers"]["second"][1]): out["trainers"]["second"][0] for out in ran.values()} == {
        tuple(out["trainers"]["whole"][1]): out["trainers"]["whole"][0] for out in ran.values()
    }, "each replica's own samples"


def test_a_layout_without_effect_is_an_error_on_all_ranks(ran: dict[int, dict[str, Any]]) -> None:
    for out in ran.values():
        for problem in out["errors"]:
            assert "layout: got 'replicas-across'" in problem
