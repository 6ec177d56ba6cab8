"""Local steps in the pipeline engine: replicas go apart and meet in the same bits; checkpoints go on in between."""

from __future__ import annotations

import copy
import hashlib
import time
from typing import Any

import pytest
import torch

from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import ConfigError
from tests.limits import HANG_S
from tests.models import ds_config, gpt2, samples

pytestmark = pytest.mark.ranks

STEPS = 6
LOCAL = {"local_steps": 3, "outer": {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.5}}
PLAIN = {"optimizer": "sgd", "lr": 1.0}
SQUEEZE = {"method": "double_squeeze", "bits": 4, "group_size": 64}
STREAMED = {"local_steps": 3, "fragments": 2, "overlap": 1, "local_steps_warmup": 2}
AQSGD = {"method": "aqsgd", "forward_bits": 4}
CASES: dict[str, dict[str, Any]] = {
    "none": {"method": "none", **LOCAL, "second_moments": "own"},
    "squeeze": {**SQUEEZE, **LOCAL},
    "one bit": {**SQUEEZE, "bits": 1, **LOCAL},
    "exponential": {"method": "global_qsgd", **LOCAL},
    "clusters": {"method": "casq", "interval": 2, **LOCAL},
    "low rank": {"method": "powersgd", "rank": 8, **LOCAL},
    "half": {"method": "fp16", **LOCAL},
    "adaptive": {**SQUEEZE, "adaptive": {"every": 2, "error": 0.5}, **LOCAL},
    "adaptive rank": {"method": "powersgd", "rank": 8, "adaptive": {"every": 2, "error": 0.5}, **LOCAL},
    "streamed": {**SQUEEZE, **STREAMED},
    "warm-up": {**SQUEEZE, **LOCAL, "local_steps_warmup": 2},
}
MEETINGS = {"streamed": set(), "warm-up": {1, 3, 6}}  # steps after which replicas are equal; others: 3 and 6


def digest(tensors: Any) -> str:
    joined = b"".join(t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)
    return hashlib.sha256(joined).hexdigest()[:12]


def engine_for(
    stages: int, gradients: dict[str, Any], section: dict | None = None, *, seed: int = 0, **more: Any
) -> Any:
    import pipecomp

    config = ds_config({**(section or {}), "gradients": gradients}, **more)
    return pipecomp.initialize(gpt2(seed=seed), stages, config, samples())


def tied_weight(engine: Any) -> torch.Tensor | None:
    return next(iter(engine.stage.tied_parameters().values()), None)


def train(stages: int, gradients: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    from pipecomp.data import eval_batches

    engine = engine_for(stages, gradients)
    out: dict[str, Any] = {"losses": [], "weights": [], "tied": [], "evaluated": []}
    for _ in range(steps):
        out["losses"].append(float(engine.train_batch()))
        out["weights"].append(digest(engine.stage.parameters()))
        tied = tied_weight(engine)
        out["tied"].append(None if tied is None else digest([tied]))
        with engine.common_weights():
            out["common"] = digest(engine.stage.parameters())
    out["evaluated"] = float(engine.eval_batch(iter(eval_batches(samples(4, seed=3), 2)), num_micro_batches=2))
    out["after"] = digest(engine.stage.parameters())
    out["stats"] = engine.comm_stats()
    out["patience_s"] = {name: state.group.timeout_s for name, state in engine.gradients.states()}
    engine.train_batch()
    engine.average_replicas()
    out["met"] = digest(engine.stage.parameters())
    engine.close()
    return out


def all_cases(rank: int, world: int, note: Any, stages: int, names: list[str]) -> dict[str, Any]:
    return {name: train(stages, CASES[name]) for name in names}


@pytest.fixture(scope="module")
def four() -> dict[int, dict]:
    """Two stages with two replicas: ranks 0, 1 are the first stage, 2, 3 the last."""
    return run_ranks(4, all_cases, 2, list(CASES), timeout_s=HANG_S)


@pytest.fixture(scope="module")
def three() -> dict[int, dict]:
    """One stage with three replicas."""
    return run_ranks(3, all_cases, 1, ["none", "squeeze", "streamed"], timeout_s=HANG_S)


def check_meetings(found: list[dict[str, Any]], case: str) -> None:
    meetings = MEETINGS.get(case, {3, 6})
    for step in range(1, STEPS + 1):
        digests = {replica["weights"][step - 1] for replica in found}
        alone = step not in meetings and not (case == "streamed" and step == 1)  # the first step is in its warm-up
        assert len(digests) == (len(found) if alone else 1), f"after step {step}"
    assert len({replica["common"] for replica in found}) == 1
    assert len({replica["met"] for replica in found}) == 1
    assert len({replica["evaluated"] for replica in found}) == 1
    assert all(replica["after"] == replica["weights"][-1] for replica in found), "evaluation changed weights"
    assert all(replica["losses"][-1] < replica["losses"][0] for replica in found)


@pytest.mark.parametrize("case", CASES)
def test_replicas_meet_in_the_same_bits(four, case):
    for stage in ((0, 1), (2, 3)):
        check_meetings([four[rank][case] for rank in stage], case)


@pytest.mark.parametrize("case", ["none", "squeeze", "streamed"])
def test_three_replicas_meet_in_the_same_bits(three, case):
    check_meetings([three[rank][case] for rank in range(3)], case)


@pytest.mark.parametrize("case", CASES)
def test_tied_weights_are_equal_on_a_replicas_stages_after_every_step(four, case):
    for first, last in ((0, 2), (1, 3)):
        assert four[first][case]["tied"] == four[last][case]["tied"]
        assert None not in four[first][case]["tied"]


def test_replicas_exchange_nothing_between_outer_steps(four):
    groups = four[0]["squeeze"]["stats"]["groups"]
    assert set(groups) == {
        "outer data parallel",
        "outer tied transformer.wte.weight",
        "rows data parallel",
        "rows tied transformer.wte.weight",
        "local tied transformer.wte.weight",
    }
    # One that is late is not lost, and a replica may be ahead by what all steps of an interval took less.
    assert four[0]["squeeze"]["patience_s"] == dict.fromkeys(groups, 1800.0)
    assert groups["rows data parallel"]["calls"] == 2
    assert groups["rows data parallel"]["bytes_sent"] < groups["outer data parallel"]["bytes_sent"]
    assert groups["outer tied transformer.wte.weight"]["calls"] == 2
    assert groups["local tied transformer.wte.weight"]["calls"] == STEPS
    assert four[0]["squeeze"]["stats"]["local_steps"]["averaged_at"] == 6
    plain = four[0]["none"]["stats"]["groups"]
    assert set(plain) == {
        "outer data parallel",
        "outer tied transformer.wte.weight",
        "tied transformer.wte.weight",
    }, "and those of moments that are each replica's own"


@pytest.mark.parametrize("case", [case for case in CASES if case != "none"])
def test_training_goes_on_as_without_compression(four, case):
    assert four[2][case]["losses"][-1] == pytest.approx(four[2]["none"]["losses"][-1], rel=0.03)


# -- one step an interval


def one_step(rank: int, world: int, note: Any) -> dict[str, Any]:
    """Plain averaging, and H = 1 with an outer SGD of rate 1."""
    out: dict[str, Any] = {}
    for name, method in (("none", {"method": "none"}), ("squeeze", SQUEEZE)):
        for kind in ("SGD", "AdamW"):
            for local in ({}, {"local_steps": 1, "outer": PLAIN}):
                optimizer = {"type": kind, "params": {"lr": 1e-2}}
                engine = engine_for(1, {**method, **local}, optimizer=optimizer)
                losses = [float(engine.train_batch()) for _ in range(3)]
                out[name, kind, bool(local)] = losses, digest(engine.stage.parameters())
                engine.close()
    return out


def test_one_step_with_an_outer_sgd_of_rate_one_is_plain_averaging():
    for found in run_ranks(3, one_step, timeout_s=HANG_S).values():
        for name in ("none", "squeeze"):
            for kind in ("SGD", "AdamW"):
                assert found[name, kind, True] == found[name, kind, False], (name, kind)


# -- against the algorithm, written down again


def own_batches(replica: int, step: int) -> list[tuple[list[int], torch.Tensor]]:
    """Three micro-batches of two samples."""
    data, ids = samples(), [(6 * step + 3 * replica + i) % 24 for i in range(6)]
    return [(ids[i : i + 2], torch.stack([data[id]["input_ids"] for id in ids[i : i + 2]])) for i in (0, 2, 4)]


def in_the_engine(rank: int, world: int, note: Any) -> dict[str, list[float]]:
    """The weights after two outer steps of Nesterov's on plain SGD of each replica, which clips its own gradients."""
    optimizer = {"type": "SGD", "params": {"lr": 0.5}}
    engine = engine_for(1, {"method": "none", **LOCAL}, optimizer=optimizer, gradient_clipping=0.5)
    batches = [
        {"input_ids": x, "labels": x, "sample_ids": ids} for step in range(6) for ids, x in own_batches(rank, step)
    ]
    iterator = iter(batches)
    for _ in range(6):
        engine.train_batch(iterator)
    found = {name: p.detach().flatten().tolist() for name, p in engine.stage.named_parameters()}
    engine.close()
    return found


def by_hand(replicas: int) -> dict[str, torch.Tensor]:
    """Algorithm 1 of arXiv:2311.08105 in one process."""
    models = [gpt2() for _ in range(replicas)]
    common = {name: p.detach().clone() for name, p in models[0].named_parameters()}
    momentum = {name: torch.zeros_like(p) for name, p in common.items()}
    for began in (0, 3):
        for replica, model in enumerate(models):
            inner = torch.optim.SGD(model.parameters(), lr=0.5)
            for step in range(began, began + 3):
                inner.zero_grad()
                for _, x in own_batches(replica, step):
                    (model(x, labels=x).loss / 3).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                inner.step()
        with torch.no_grad():
            for name, theta in common.items():
                gradient = theta - torch.stack([m.get_parameter(name) for m in models]).mean(0)
                momentum[name] = 0.5 * momentum[name] + gradient
                theta -= 0.7 * (gradient + 0.5 * momentum[name])
                for model in models:
                    model.get_parameter(name).copy_(theta)
    return common


@pytest.mark.parametrize("replicas", [2, 3])
def test_the_engine_takes_the_papers_steps(replicas):
    wanted = by_hand(replicas)
    for found in run_ranks(replicas, in_the_engine, timeout_s=HANG_S).values():
        assert set(found) == set(wanted)
        for name, values in found.items():
            torch.testing.assert_close(torch.tensor(values), wanted[name].flatten(), rtol=1e-4, atol=1e-5)


# -- checkpoints


def stop_and_go(rank: int, world: int, note: Any, stages: int, case: str, folder: str) -> tuple:
    gradients, section = CASES[case], {"activations": AQSGD, "store": {"backend": "lmdb", "in_checkpoints": True}}
    section = {} if stages == 1 else section
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 1e-3}}
    out = []
    engine = engine_for(stages, gradients, where(section, f"{folder}/a"), scheduler=scheduler)
    for _ in range(5):
        engine.train_batch()
    engine.save_checkpoint(folder)
    assert engine.local is not None
    for again in (False, True):
        if again:
            engine = engine_for(stages, gradients, where(section, f"{folder}/b"), seed=9, scheduler=scheduler)
            engine.load_checkpoint(folder)
            engine.save_checkpoint(folder)  # to the same tag: nothing in use lies in its files
        losses = [float(engine.train_batch()) for _ in range(4)]
        out.append((losses, digest(engine.stage.parameters()), engine.local.outer.stats()))
        engine.close()
    return tuple(out)


def where(section: dict[str, Any], path: str) -> dict[str, Any]:
    section = copy.deepcopy(section)
    if "store" in section:
        section["store"]["path"] = path
    return section


ALSO = [pytest.param(case, marks=pytest.mark.soak) for case in ("none", "squeeze", "adaptive")]


@pytest.mark.parametrize("case", ["streamed", "adaptive rank", *ALSO])
def test_training_that_stopped_within_an_interval_goes_on_with_the_same_bits(case, tmp_path):
    for rank, (straight, resumed) in run_ranks(2, stop_and_go, 1, case, str(tmp_path), timeout_s=HANG_S).items():
        assert resumed == straight, f"rank {rank}"


def test_a_pipeline_that_stopped_within_an_interval_goes_on_with_the_same_bits(tmp_path):
    for rank, (straight, resumed) in run_ranks(4, stop_and_go, 2, "streamed", str(tmp_path), timeout_s=HANG_S).items():
        assert resumed == straight, f"rank {rank}"


def rolled_back(rank: int, world: int, note: Any, folder: str) -> list[Any]:
    """The steps after a checkpoint, and the same ones again by the same engine, an average of which is on its way."""
    from pipecomp.engine import checkpointing

    engine = engine_for(1, CASES["streamed"])
    load = checkpointing.load_residuals

    def load_later(*given: Any) -> None:
        """It asks the same ranks, whose messages must not be taken for those of an average."""
        assert not any(flight.waits for flight in engine.local.outer._running)
        load(*given)

    checkpointing.load_residuals = load_later
    for _ in range(5):
        engine.train_batch()
    engine.save_checkpoint(folder)
    out = []
    for again in (False, True):
        if again:
            for exchange in (engine.local.exchanges.outer, engine.local.exchanges.rows):
                exchange.give_way(lambda: time.sleep(0.2))
            while not engine.local.outer.stats()["in_flight"]:
                engine.train_batch()
            engine.load_checkpoint(folder)
        losses = [float(engine.train_batch()) for _ in range(4)]
        out.append((losses, digest(engine.stage.parameters()), engine.local.outer.stats()["began"]))
    engine.close()
    return out


def test_an_engine_goes_back_while_an_average_is_on_its_way(tmp_path):
    for rank, (straight, again) in run_ranks(2, rolled_back, str(tmp_path), timeout_s=HANG_S).items():
        assert again == straight, f"rank {rank}"


def recut(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    """Saved by two replicas of two stages within an interval, gone on with in other pipelines."""
    out: dict[str, Any] = {}
    engine = engine_for(2, CASES["streamed"])
    for _ in range(5):
        engine.train_batch()
    engine.save_checkpoint(folder)
    engine.close()
    same = {**SQUEEZE, **STREAMED}
    others = {
        "four replicas": (1, same),
        "every step": (1, {**SQUEEZE, "local_steps": 1, "outer": {"optimizer": "nesterov", "momentum": 0.5}}),
        "every step of two": (2, {**SQUEEZE, "local_steps": 1, "outer": {"optimizer": "nesterov", "momentum": 0.5}}),
        "without": (1, SQUEEZE),
        "one replica": (4, SQUEEZE),
    }
    for name, (stages, gradients) in others.items():
        engine = engine_for(stages, gradients, seed=9)
        engine.load_checkpoint(folder)
        began = digest(engine.stage.parameters())
        stats = None if engine.local is None else engine.local.outer.stats()
        losses = [float(engine.train_batch()) for _ in range(2)]
        out[name] = began, stats, losses, digest(engine.stage.parameters())
        engine.close()
    return out


def test_a_checkpoint_goes_on_in_other_pipelines(tmp_path):
    found = run_ranks(4, recut, str(tmp_path), timeout_s=HANG_S)
    for name in ("four replicas", "every step", "without"):
        assert len({found[rank][name][0] for rank in range(4)}) == 1, "all begin alike"
    for name in ("every step", "without"):
        assert len({found[rank][name][3] for rank in range(4)}) == 1, "and stay so"
    for first, second in ((0, 1), (2, 3)):
        assert found[first]["every step of two"][3] == found[second]["every step of two"][3]
    assert found[0]["four replicas"][1] == {
        "interval": 3,
        "began": 3,
        "outer_steps": 4,
        "averaged_at": 5,
        "in_flight": [],
    }
    assert found[0]["every step"][1]["began"] == 5


def test_what_cannot_take_local_steps_is_refused():
    from pipecomp.engine.validation import check_gradients
    from pipecomp.gradient_config import Gradients
    from pipecomp.stages import plan

    split = plan(gpt2(), num_stages=2)
    for more, replicas, key in (
        ({}, 1, "gradients.local_steps"),
        ({"zero_optimization": {"stage": 1}}, 2, "zero_optimization.stage"),
        ({"bf16": {"enabled": True}}, 2, "bf16.enabled"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_gradients(Gradients(**CASES["none"]), ds_config(**more), split, replicas)
        assert caught.value.key == key
