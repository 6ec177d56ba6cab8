"""Compressed gradients in the pipeline engine: replicas and tied weights stay equal bit for bit, bytes are counted."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import pytest
import torch

from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import ConfigError
from tests.limits import HANG_S
from tests.models import VOCABULARY, ds_config, gpt2, samples

STEPS = 5
LINEAR = {"method": "global_qsgd", "levels": "linear", "bits": 8}
SQUEEZE = {"method": "double_squeeze", "bits": 4, "group_size": 64}
ZERO1 = {"zero_optimization": {"stage": 1}}
BF16 = {"bf16": {"enabled": True}}
BF16_ZERO1 = {**BF16, **ZERO1, "data_types": {"grad_accum_dtype": "fp32"}}
AUTOCAST_ZERO1 = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, **ZERO1}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({"method": "none"}, {}),
    "none bf16 zero1": ({"method": "none"}, BF16_ZERO1),
    "none autocast zero1": ({"method": "none"}, AUTOCAST_ZERO1),
    "linear autocast zero1": (LINEAR, AUTOCAST_ZERO1),
    "linear": (LINEAR, {}),
    "linear zero1": (LINEAR, ZERO1),
    "exponential": ({"method": "global_qsgd"}, {}),
    "squeeze": (SQUEEZE, {}),
    "squeeze zero1": (SQUEEZE, ZERO1),
    "squeeze bf16": (SQUEEZE, BF16),
    "squeeze bf16 zero1": (SQUEEZE, BF16_ZERO1),
    "half": ({"method": "fp16"}, {}),
    "low rank": ({"method": "powersgd", "rank": 8}, {}),
    "sparse": ({"method": "global_qsgd", "sparse": True}, {}),
    "momentum": ({"method": "quantized_adam", "freeze_step": 2, "bits": 8, "group_size": 64}, {}),
    "clusters": ({"method": "casq", "interval": 2}, {}),
    "adaptive": ({**SQUEEZE, "adaptive": {"every": 2, "error": 0.5}}, {}),
    "adaptive rank": ({"method": "powersgd", "rank": 8, "adaptive": {"every": 2, "error": 0.5}}, {}),
}


NOT_TIED = "none autocast zero1, not tied"


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def train(stages: int, gradients: dict[str, Any], more: dict[str, Any], *, tied: bool = True) -> tuple:
    import pipecomp

    config = ds_config({"gradients": gradients}, **more)
    engine = pipecomp.initialize(gpt2(tied=tied), num_stages=stages, config=config, training_data=samples())
    if gradients["method"] != "none":
        engine.allreduce_bucket = None  # DeepSpeed's own reduction, which would send all of it once more
    losses = [float(engine.train_batch()) for _ in range(STEPS)]
    weights = {n: digest(p) for n, p in engine.stage.named_parameters()}
    found = losses, float(engine.get_global_grad_norm()), weights, engine.comm_stats()["groups"]
    states = [state for _, state in engine.gradients.states()]
    if gradients["method"] == "quantized_adam":
        states.append(engine.optimizer._gradients)
    assert {state.group.timeout_s for state in states} <= {1800.0}, "one that is late is not lost"
    assert len({id(state.staging) for state in states}) <= 1, "all pin memory together"
    engine.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("pipecomp-allreduce")]
    return found


def all_cases(rank, world, note, stages):
    found = {name: train(stages, *case) for name, case in CASES.items()}
    return {**found, NOT_TIED: train(stages, *CASES["none autocast zero1"], tied=False)}


@pytest.fixture(scope="module")
def four() -> dict[int, dict]:
    """Two stages with two replicas: ranks 0, 1 are the first stage, 2, 3 the last."""
    return run_ranks(4, all_cases, 2, timeout_s=HANG_S)


pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("case", CASES)
def test_replicas_and_tied_weights_stay_equal(four, case):
    for a, b in ((0, 1), (2, 3)):
        assert four[a][case][2] == four[b][case][2]
    for first, last in ((0, 2), (1, 3)):
        assert four[first][case][2]["transformer.wte.weight"] == four[last][case][2]["lm_head.weight"]


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_as_without_compression(four, case):
    """Losses near each other; that gradients are the exact means and sums, tests/dist/test_gradient_sums.py checks."""
    losses, norm, _, _ = four[0][case]
    plain = four[0]["none"][0]
    assert losses[0] == pytest.approx(plain[0], rel=1e-3)  # before anything was exchanged
    assert losses[-1] == pytest.approx(plain[-1], rel=0.02)
    for rank in range(4):
        assert four[rank][case][0] == losses
        if case != "momentum":  # each replica clips its own gradients then
            assert four[rank][case][1] == norm


@pytest.mark.parametrize("method", ["linear", "squeeze"])
def test_zero_1_trains_as_zero_0(four, method):
    assert four[0][f"{method} zero1"][0] == pytest.approx(four[0][method][0], rel=1e-6)


@pytest.mark.parametrize(
    ("case", "least"),
    [("linear", 3.3), ("squeeze", 6.5), ("squeeze zero1", 6.5), ("squeeze bf16 zero1", 3.2), ("half", 1.99)],
)
def test_bytes_are_counted(four, case, least):
    for rank in range(4):
        groups = dict(four[rank][case][3])
        gathered = groups.pop("weights", None)
        assert (gathered is not None) == ("zero1" in case)
        assert set(groups) == {"data parallel", "tied transformer.wte.weight"}
        for group in groups.values():
            assert group["bytes_raw"] > least * group["bytes_sent"] > 0


def test_bytes_of_half_precision_are_those_that_travel(four):
    """DeepSpeed averages float32 sums of gradients in bf16, and half of the weights come from the other replica."""
    for rank in range(4):
        groups = four[rank]["none bf16 zero1"][3]
        reduced, gathered = groups["data parallel"], groups["weights"]
        assert reduced["bytes_raw"] == 2 * reduced["bytes_sent"] == 4 * gathered["bytes_sent"]
        assert gathered["calls"] == STEPS


def test_bytes_of_autocast_are_those_that_travel(four):
    """DeepSpeed averages gradients of torch's own linear layers in bf16, of which GPT-2 has one, the output's."""
    for rank in range(4):
        (reduced,) = (group for name, group in four[rank][NOT_TIED][3].items() if name != "weights")
        assert reduced["bytes_raw"] - reduced["bytes_sent"] == (2 * VOCABULARY * 32 * STEPS if rank >= 2 else 0)


def test_tied_weights_are_compressed_without_replicas():
    found = run_ranks(2, tied_only, timeout_s=HANG_S)
    losses, _, weights, groups = found[0]
    assert weights["transformer.wte.weight"] == found[1][2]["lm_head.weight"]
    assert set(groups) == {"tied transformer.wte.weight"}
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("method", ["squeeze", "momentum", "adaptive", "adaptive rank"])
def test_resumed_training_is_the_same(method, tmp_path):
    """Error-feedback residuals and momentum go on where they were, on every replica."""
    for rank, (straight, resumed) in run_ranks(2, stop_and_go, method, str(tmp_path), timeout_s=HANG_S).items():
        assert resumed == straight, f"rank {rank}"


def stop_and_go(rank, world, note, method, folder):
    import pipecomp

    def start():
        config = ds_config({"gradients": CASES[method][0]})
        return pipecomp.initialize(gpt2(), num_stages=1, config=config, training_data=samples())

    engine = start()
    for _ in range(3):
        engine.train_batch()
    engine.save_checkpoint(folder)
    straight = [float(engine.train_batch()) for _ in range(3)]
    engine.close()
    engine = start()
    engine.load_checkpoint(folder)
    resumed = [float(engine.train_batch()) for _ in range(3)]
    engine.close()
    return straight, resumed


def tied_only(rank, world, note):
    return train(2, SQUEEZE, {})


REFUSED = {
    "alone": ({"num_stages": 1}, {"method": "double_squeeze"}, {}, "gradients.method"),
    "overlap": (
        {},
        LINEAR,
        {"zero_optimization": {"stage": 1, "overlap_comm": True}},
        "zero_optimization.overlap_comm",
    ),
    "dtype": ({}, LINEAR, {"communication_data_type": "fp16"}, "communication_data_type"),
    "adam": ({}, {"method": "quantized_adam", "freeze_step": 2}, ZERO1, "gradients.method"),
}


def test_what_cannot_be_compressed_is_refused():
    from pipecomp.engine.validation import check_gradients
    from pipecomp.gradient_config import Gradients
    from pipecomp.stages import plan

    for name, (kept, gradients, more, key) in REFUSED.items():
        split = plan(gpt2(), num_stages=kept.get("num_stages", 2))
        with pytest.raises(ConfigError) as caught:
            check_gradients(Gradients(**gradients), ds_config(**more), split, 1 if name == "alone" else 2)
        assert caught.value.key == key
