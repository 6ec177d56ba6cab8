"""Averages of a pipeline's replicas, against plain arithmetic: missing gradients, clipping, groups, loss scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map

from pipecomp.buffers.base import GRADIENT
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import ConfigError
from tests.limits import HANG_S
from tests.models import ds_config, gpt2, samples

pytestmark = pytest.mark.ranks

ZERO1 = {"zero_optimization": {"stage": 1}}
SQUEEZE = {"method": "double_squeeze", "bits": 8, "group_size": 16}
ADAM = {"method": "quantized_adam", "freeze_step": 3, "bits": 8, "group_size": 16}
LACKS = ("transformer.h.0.ln_1.weight", "transformer.h.0.ln_1.bias")  # of replica 0 and 1: as many values in each
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({"method": "none"}, {}),
    "squeeze": (SQUEEZE, {}),
    "none, BF16": ({"method": "none"}, {"bf16": {"enabled": True}}),
    "squeeze, BF16": (SQUEEZE, {"bf16": {"enabled": True}}),
    "none, ZeRO 1": ({"method": "none"}, ZERO1),
    "squeeze, ZeRO 1": (SQUEEZE, ZERO1),
}


def as_arrays(found: Any) -> Any:
    """Copy values for another process: a tensor's memory ends with its own."""
    return tree_map(lambda x: x.float().numpy() if isinstance(x, torch.Tensor) else x, found)


def as_tensors(found: Any) -> Any:
    return tree_map(lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x, found)


def start(gradients: dict[str, Any], stages: int = 1, *, groups: Any = None, tied: bool = True, **more: Any) -> Any:
    import pipecomp

    config = ds_config({"gradients": gradients}, **more)
    return pipecomp.initialize(
        gpt2(2, tied=tied), num_stages=stages, config=config, training_data=samples(), parameter_groups=groups
    )


def without_a_gradient(gradients: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """A step in which each replica lacks another parameter's gradient: each one's own before and after averaging."""
    engine = start(gradients, gradient_clipping=0.0, **more)
    parameters, out = dict(engine.stage.named_parameters()), {}
    lacks = LACKS[engine.grid.data_parallel_id]
    stock = engine.gradients.average_replicas

    def in_bf16(p: Any) -> tuple[list[Any], list[bool], int]:
        optimizer = engine.optimizer
        (place,) = ((i, j) for i, group in enumerate(optimizer.bf16_groups) for j, q in enumerate(group) if q is p)
        return optimizer.fp32_groups_gradients[place[0]], optimizer.fp32_groups_has_gradients[place[0]], place[1]

    def average(reduce: Any) -> None:
        parameters[lacks].grad = None
        if engine.using_bf16_optimizer:
            gradients, there, place = in_bf16(parameters[lacks])
            gradients[place].zero_()
            there[place] = False
        out["before"] = [found(parameters[name]) for name in LACKS]
        stock(reduce)
        out["after"] = [found(parameters[name]) for name in LACKS]

    def found(p: Any) -> Any:
        if engine.using_bf16_optimizer:
            gradients, _, place = in_bf16(p)
            return gradients[place].clone()
        return torch.zeros(p.shape) if p.grad is None else p.grad.detach().clone()

    engine.gradients.average_replicas = average
    engine.train_batch()
    out["weights"] = [parameters[name].detach().float().clone() for name in LACKS]
    engine.close()
    return out


def two_replicas(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    from deepspeed.accelerator import get_accelerator

    out: dict[str, Any] = {name: without_a_gradient(*case) for name, case in CASES.items()}

    def norms(engine: Any) -> dict[str, float]:
        return {name: state.memory.norm() for name, state in engine.gradients.states()}

    engine = start(SQUEEZE)
    engine.save_checkpoint(folder, tag="without")
    engine.train_batch()
    engine.save_checkpoint(folder, client_state={"mine": 7})
    next(Path(folder).glob(f"without/pipecomp-gradients-*-rank-{rank}.*")).unlink()
    out["trained on"] = [norms(engine)]
    engine.load_checkpoint(folder, tag="without")
    out["trained on"].append(norms(engine))
    engine.close()
    engine = start(SQUEEZE, 2)
    engine.train_batch()
    out["trained on, cut otherwise"] = [norms(engine)]
    _, state = engine.load_checkpoint(folder)
    out["client's, cut otherwise"] = state["mine"]
    out["trained on, cut otherwise"].append(norms(engine))
    engine.close()
    for name, options in (("all", {}), ("module", {"load_module_only": True})):
        engine = start(SQUEEZE)
        engine.load_checkpoint(folder, **options)
        out[f"loaded {name}"] = norms(engine)
        engine.close()

    if rank == 1:
        next(Path(folder).glob("*/pipecomp-gradients-*-rank-1.*")).unlink()
    engine = start(SQUEEZE)
    with pytest.raises(ConfigError) as caught:
        engine.load_checkpoint(folder)
    out["incomplete"] = str(caught.value)
    engine.close()

    type(get_accelerator()).is_fp16_supported = lambda self: True
    fp16 = {"enabled": True, "initial_scale_power": 19, "hysteresis": 1, "loss_scale_window": 2}
    engine = start(SQUEEZE | {"bits": 2}, fp16=fp16, **ZERO1)
    out["fp16"] = []
    for _ in range(6):
        scale = float(engine.optimizer.cur_scale)
        engine.train_batch()
        (state,) = [state for _, state in engine.gradients.states()]
        out["fp16"].append((scale, state.loss_scale, state.memory.norm()))
    engine.close()
    return as_arrays(out)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    found = run_ranks(2, two_replicas, str(tmp_path_factory.mktemp("replicas")), timeout_s=HANG_S)
    return as_tensors(found)


@pytest.mark.parametrize("case", [name for name in CASES if "ZeRO" not in name])
def test_a_gradient_that_one_replica_lacks_counts_as_zeros(two: dict[int, Any], case: str) -> None:
    for place in range(2):
        wanted = (two[0][case]["before"][place] + two[1][case]["before"][place]) / 2
        assert float(wanted.norm()) > 0
        assert not bool(two[place][case]["before"][place].any())
        for rank in (0, 1):
            torch.testing.assert_close(
                two[rank][case]["after"][place], wanted, rtol=0.02, atol=0.01 * float(wanted.abs().max())
            )


@pytest.mark.parametrize("case", ["none", "squeeze"])
def test_with_zero_1_too(two: dict[int, Any], case: str) -> None:
    for rank in (0, 1):
        for got, wanted in zip(two[rank][f"{case}, ZeRO 1"]["weights"], two[rank][case]["weights"], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_residuals_are_loaded_with_the_rest_of_a_run_only(two: dict[int, Any]) -> None:
    for rank in (0, 1):
        assert all(norm > 0 for norm in two[rank]["loaded all"].values())
        assert not any(two[rank]["loaded module"].values())


@pytest.mark.parametrize("case", ["trained on", "trained on, cut otherwise"])
def test_what_an_engine_had_is_forgotten_where_a_checkpoint_has_no_residuals(two: dict[int, Any], case: str) -> None:
    for rank in (0, 1):
        trained, loaded = two[rank][case]
        assert all(norm > 0 for norm in trained.values())
        assert trained.keys() == loaded.keys()
        assert not any(loaded.values())
        assert two[rank]["client's, cut otherwise"] == 7


def test_residuals_of_some_ranks_alone_are_refused(two: dict[int, Any]) -> None:
    """Random draws are counted in the same files: with other counts replicas would part without a word."""
    for rank in (0, 1):
        assert "load_dir: got" in two[rank]["incomplete"]
        assert "rank-1.safetensors" in two[rank]["incomplete"]
        assert "rank-0.safetensors" not in two[rank]["incomplete"]


def test_residuals_in_fp16_are_without_the_loss_scale(two: dict[int, Any]) -> None:
    for rank in (0, 1):
        assert len({scale for scale, *_ in two[rank]["fp16"]}) > 1, "the scale has changed"
        for scale, told, left in two[rank]["fp16"]:
            assert told == scale
            assert left < 100 < scale
        assert left > 0, "the last step did not overflow"


# -- the optimizer that exchanges momentum


def groups(stage: Any) -> list[dict[str, Any]]:
    named = [(n, p) for n, p in stage.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if "ln" not in n], "weight_decay": 0.5},
        {"params": [p for n, p in named if "ln" in n], "weight_decay": 0.0, "lr": 5e-3},
    ]


def momentum(rank: int, world: int, note: Any) -> dict[str, Any]:
    def train(gradients: dict[str, Any], steps: int, **more: Any) -> tuple[list[torch.Tensor], list[float]]:
        engine = start(gradients, 2, gradient_clipping=0.05, tied=False, **more)
        norms = []
        for _ in range(steps):
            engine.train_batch()
            norms.append(float(engine.get_global_grad_norm()))
        weights = [p.detach().clone() for p in engine.stage.parameters()]
        engine.close()
        return weights, norms

    out: dict[str, Any] = {}
    for name, more in (("one group", {}), ("groups", {"groups": groups})):
        out[name] = train({"method": "none"}, 3, **more), train(ADAM, 3, **more)
    out["frozen"] = train(ADAM, 6)
    engine = start({"method": "global_qsgd"}, 2)
    out["seeds"] = {name: state.seed for name, state in engine.gradients.states()}
    engine.close()
    out["kept gradients"] = kept_gradients()
    return as_arrays(out)


def kept_gradients() -> dict[int, float]:
    """The length of each sample's gradient as this rank's link keeps it; the weights stay what they are."""
    import pipecomp

    section = {"activations": {"method": "aqsgd", "backward_method": "delta"}, "store": {"backend": "memory"}}
    config = ds_config(section, optimizer={"type": "SGD", "params": {"lr": 0.0}})
    engine = pipecomp.initialize(gpt2(2), num_stages=2, config=config, training_data=samples())
    for _ in range(2):  # an epoch
        engine.train_batch()
    (end,) = engine.links
    ids = [held.sample for held in end.store.inventory() if held.sample & GRADIENT]
    out = {i & ~GRADIENT: float(kept.m_nH.norm()) for i, kept in zip(ids, end.store.get(ids), strict=True)}
    engine.close()
    return out


@pytest.fixture(scope="module")
def four() -> dict[int, Any]:
    """Ranks 0 and 1 are the first stage's replicas, 2 and 3 the last one's."""
    return as_tensors(run_ranks(4, momentum, timeout_s=HANG_S))


@pytest.mark.parametrize("case", ["one group", "groups"])
def test_warm_up_is_adam_on_the_clipped_mean_gradient(four: dict[int, Any], case: str) -> None:
    for rank in range(4):
        (wanted, wanted_norms), (got, norms) = four[rank][case]
        assert all(norm > 0.05 for norm in wanted_norms), "the limit is reached"
        assert norms == pytest.approx(wanted_norms, rel=1e-5)
        for p, q in zip(got, wanted, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_later_each_replica_clips_its_own_and_all_stay_alike(four: dict[int, Any]) -> None:
    for a, b in ((0, 1), (2, 3)):
        (ours, norms), (theirs, their_norms) = four[a]["frozen"], four[b]["frozen"]
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
        assert norms[:3] == their_norms[:3]
        assert all(mine != other for mine, other in zip(norms[3:], their_norms[3:], strict=True))


def test_stages_draw_apart_and_holders_of_a_tied_weight_alike(four: dict[int, Any]) -> None:
    seeds = [four[rank]["seeds"] for rank in range(4)]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert len({own["data parallel"] for own in seeds}) == 2
    assert len({own["tied transformer.wte.weight"] for own in seeds}) == 1


def test_gradients_are_kept_in_the_unit_of_a_samples_own_loss(four: dict[int, Any]) -> None:
    """Whatever the step's other micro-batches and replicas are."""
    model, lengths = gpt2(2), []
    for sample in samples():
        x_1S = sample["input_ids"][None]
        out = model(input_ids=x_1S, labels=x_1S, output_hidden_states=True)
        lengths.append(4096 * float(torch.autograd.grad(out.loss, out.hidden_states[1])[0].norm()))
    for rank in range(4):
        wanted = {i: lengths[i] for i in range(rank % 2, len(lengths), 2)}
        assert four[rank]["kept gradients"] == pytest.approx(wanted, rel=0.01)
