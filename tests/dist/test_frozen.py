"""Stages with nothing to train: they train as the unsplit model does, and get no gradients."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S
from tests.models import ds_config, gpt2, llama, samples, train_alone

pytestmark = pytest.mark.ranks

STEPS, MICRO_BATCHES, MICRO_BATCH, RATE = 4, 3, 2, 1e-2
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01}}}
ZERO1 = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 10_000}}
BF16 = {"bf16": {"enabled": True}}
BF16_ZERO1 = {**BF16, **ZERO1, "data_types": {"grad_accum_dtype": "fp32"}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}, **ZERO1}
UPPER = ("transformer.h.2.", "transformer.h.3.", "transformer.ln_f", "lm_head")
HEAD, EMBEDDINGS = ("lm_head",), ("transformer.wte", "transformer.wpe")
CHANGES = {"activations": {"method": "aqsgd", "backward_method": "delta"}, "store": {"backend": "memory"}}


def frozen(*trained: str) -> Any:
    """A GPT-2 of four blocks that trains the parameters whose names begin so."""
    model = gpt2(tied=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    return model


def last_adapter() -> Any:
    """A Llama with LoRA on its last block."""
    import peft

    torch.manual_seed(1)
    options = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], layers_to_transform=[3])
    return peft.get_peft_model(llama(), options)


def engine_for(
    model: Any, cuts: tuple[int, ...] = (0, 2, 4), section: dict | None = None, clip: float = 0.0, **more: Any
) -> Any:
    import pipecomp

    config = {**ds_config(section, **{**ADAM, **more}), "gradient_clipping": clip}
    return pipecomp.initialize(model, cuts=list(cuts), config=config, training_data=samples())


def train(engine: Any, steps: int = STEPS) -> list[float]:
    return [float(engine.train_batch()) for _ in range(steps)]


def backward_bytes(engine: Any) -> dict[str, int]:
    """Bytes of gradients sent over each link of all ranks."""
    sent: dict[str, int] = {}
    for stats in engine.gather_comm_stats():
        for link, counters in stats["links"].items():
            sent[link] = sent.get(link, 0) + counters["backward"]["bytes_sent"]
    return sent


def trained_weights(model: Any) -> dict[str, Any]:
    """Arrays of the trained parameters: a rank cannot return tensors."""
    return {n: p.detach().float().numpy().copy() for n, p in model.named_parameters() if p.requires_grad}


def exchanged_bytes(engine: Any) -> int:
    """Bytes of gradients, weights and momenta that this rank sent to other replicas."""
    return sum(group["bytes_sent"] for group in engine.comm_stats()["groups"].values())


def outcome(engine: Any, steps: int = STEPS) -> dict[str, Any]:
    """Train, and return losses, gradient bytes, trained weights, moments and exchanges; closes the engine."""
    out: dict[str, Any] = {"losses": train(engine, steps), "backward": backward_bytes(engine)}
    out |= {
        "trained": trained_weights(engine.stage),
        "norm": float(engine.get_global_grad_norm() or 0.0),
        "exchanged": exchanged_bytes(engine),
    }
    out["in_flight"] = engine.comm_stats()["in_flight"]
    out["moments"] = sum(len(state) for state in getattr(engine.optimizer, "state", {}).values())
    engine.close()
    return out


def evaluated(engine: Any) -> float:
    from pipecomp.data import eval_batches

    return float(engine.eval_batch(iter(eval_batches(samples(4, seed=3), 2)), num_micro_batches=2))


def two_stages(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    from deepspeed.accelerator import get_accelerator

    from pipecomp.errors import PipecompError

    type(get_accelerator()).is_fp16_supported = lambda self: True
    gc.freeze()  # DeepSpeed collects garbage in every step of bf16, in all that was imported
    out: dict[str, Any] = {
        "upper": outcome(engine_for(frozen(*UPPER))),
        "head": outcome(engine_for(frozen(*HEAD))),
        "embeddings": outcome(engine_for(frozen(*EMBEDDINGS))),
        "adapter": outcome(engine_for(last_adapter())),
        "recomputed": outcome(engine_for(frozen(*UPPER), pipeline={"activation_checkpoint_interval": 1})),
        "clipped": outcome(engine_for(frozen(*UPPER), clip=0.5)),
    }
    for name, precision in (("zero", ZERO1), ("bf16", BF16), ("bf16 zero", BF16_ZERO1), ("fp16", FP16)):
        for part, trained in (("upper", UPPER), ("embeddings", EMBEDDINGS)):
            out[f"{name}, {part}"] = outcome(engine_for(frozen(*trained), clip=0.5, **precision))
    out["clipped embeddings"] = outcome(engine_for(frozen(*EMBEDDINGS), clip=0.5))

    engine = engine_for(frozen(*UPPER), section=CHANGES)
    losses = train(engine)
    kinds = sorted({held.sample >> 62 for end in engine.links for held in end.store.inventory()})
    out["changes"] = {"losses": losses, "kinds": kinds}
    engine.close()

    for name, more in (("checkpoint", {}), ("checkpoint-zero", BF16_ZERO1)):
        engine = engine_for(frozen(*UPPER), **more)
        train(engine)
        engine.save_checkpoint(f"{folder}/{name}")
        saved: dict[str, Any] = {"evaluated": evaluated(engine), "after": train(engine)}
        engine.close()
        for cuts in ((0, 2, 4), (0, 3, 4), (0, 1, 4)):
            engine = engine_for(frozen(*UPPER), cuts, **more)
            engine.load_checkpoint(f"{folder}/{name}")
            saved[str(cuts)] = evaluated(engine), train(engine)
            if cuts == (0, 3, 4):
                engine.save_checkpoint(f"{folder}/{name}-recut")
            engine.close()
        engine = engine_for(frozen(*UPPER), **more)
        engine.load_checkpoint(f"{folder}/{name}-recut")
        saved["back"] = train(engine, 1)
        engine.close()
        out[name] = saved

    engine = engine_for(frozen(*UPPER))
    train(engine, 1)
    if rank == 0:
        next(engine.stage.parameters()).requires_grad_(True)
    other = engine_for(frozen(*HEAD))
    errors = {"changed": lambda: train(engine, 1), "other": lambda: other.load_checkpoint(f"{folder}/checkpoint")}
    errors |= {"nothing": lambda: engine_for(frozen("none"))}
    errors["declined"] = lambda: engine_for(
        frozen(*UPPER),
        section={"activations": {"method": "aqsgd"}, "store": {"path": folder, "on_write_error": "continue"}},
    )
    for name, act in errors.items():
        try:
            act()
        except PipecompError as error:
            out[name] = str(error)
        engine.close()
    return out


def three_stages(rank: int, world: int, note: Any) -> dict[str, Any]:
    cuts = (0, 1, 2, 4)
    section = {"in_flight": 3}
    return {
        "last": outcome(engine_for(frozen(*UPPER), cuts)),
        "middle": outcome(engine_for(frozen("transformer.h.1.", "lm_head"), cuts, section)),
        "middle alone": outcome(engine_for(frozen("transformer.h.1."), cuts, clip=0.5)),
    }


def two_replicas(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    gc.freeze()
    local = {"local_steps": 2, "outer": {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9}, "fragments": 2}
    adam = {"method": "quantized_adam", "bits": 4, "group_size": 16, "freeze_step": 2}
    out = {
        "plain": outcome(engine_for(frozen(*UPPER))),
        "other cut": outcome(engine_for(frozen(*UPPER), (0, 3, 4))),
        "zero": outcome(engine_for(frozen(*UPPER), clip=0.5, **BF16_ZERO1)),
        "compressed": outcome(engine_for(frozen(*UPPER), section={"gradients": {"method": "qsgd_mn", "bits": 8}})),
        "momentum": outcome(engine_for(frozen(*UPPER), section={"gradients": adam}, clip=0.5)),
    }
    for name, method in (("local", {}), ("local compressed", {"method": "qsgd_mn", "bits": 8})):
        engine = engine_for(frozen(*UPPER), section={"gradients": {**local, **method}})
        losses = train(engine)
        engine.save_checkpoint(f"{folder}/{name}")
        after = train(engine)
        engine.close()
        engine = engine_for(frozen(*UPPER), section={"gradients": {**local, **method}})
        engine.load_checkpoint(f"{folder}/{name}")
        out[f"{name} resumed"] = {"after": after, "resumed": train(engine)}
        engine.average_replicas()
        out[name] = {
            "losses": losses,
            "trained": trained_weights(engine.stage),
            "exchanged": exchanged_bytes(engine),
        }
        engine.close()
    return out


def alone(model: Any, clip: float | None = None) -> tuple[list[float], dict[str, Any]]:
    """Losses and trained weights of the same training by torch in this process."""
    torch.set_num_threads(1)
    losses = train_alone(model, STEPS, RATE, micro_batch=MICRO_BATCH, micro_batches=MICRO_BATCHES, max_norm=clip)
    return losses, trained_weights(model.get_base_model() if hasattr(model, "peft_config") else model)


def equals(ranks: dict[int, Any], case: str, model: Any) -> None:
    """Losses and weights are those of the unsplit training, bit for bit."""
    losses, weights = alone(model)
    trained: dict[str, Any] = {}
    for out in ranks.values():
        assert out[case]["losses"] == pytest.approx(losses, rel=1e-6), "the mean of micro-batches is rounded otherwise"
        trained |= out[case]["trained"]
    assert trained.keys() == weights.keys()
    for name, weight in weights.items():
        assert np.array_equal(trained[name], weight), name


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    return run_ranks(2, two_stages, str(tmp_path_factory.mktemp("frozen")), timeout_s=HANG_S)


@pytest.fixture(scope="module")
def three() -> dict[int, Any]:
    return run_ranks(3, three_stages, timeout_s=HANG_S)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    return run_ranks(4, two_replicas, str(tmp_path_factory.mktemp("replicas")), timeout_s=HANG_S)


@pytest.mark.parametrize("case", ["upper", "head", "recomputed"])
def test_a_frozen_lower_half_trains_as_unsplit_and_gets_no_gradients(two: Any, case: str) -> None:
    equals(two, case, frozen(*(HEAD if case == "head" else UPPER)))
    for out in two.values():
        assert out[case]["backward"] == {"0->1": 0}
    assert two[0][case]["moments"] == 0, "nothing is updated there"
    assert two[1][case]["moments"] > 0


def test_frozen_blocks_above_trained_ones_pass_gradients_on(two: Any) -> None:
    equals(two, "embeddings", frozen(*EMBEDDINGS))
    assert two[0]["embeddings"]["backward"]["0->1"] > 0
    assert two[1]["embeddings"]["moments"] == 0


def test_an_adapter_on_the_last_block(two: Any) -> None:
    equals(two, "adapter", last_adapter())
    assert two[0]["adapter"]["backward"] == {"0->1": 0}


@pytest.mark.parametrize("part", ["upper", "embeddings"])
def test_every_precision_and_zero(two: Any, part: str) -> None:
    losses, _ = alone(frozen(*(UPPER if part == "upper" else EMBEDDINGS)), clip=0.5)
    case = "clipped" if part == "upper" else "clipped embeddings"
    norm = float(two[0][case]["norm"])
    for out in two.values():
        assert out[case]["losses"] == pytest.approx(losses, rel=1e-5)
        assert out[f"zero, {part}"]["losses"] == pytest.approx(losses, rel=1e-5)
        assert float(out[f"zero, {part}"]["norm"]) == pytest.approx(norm, rel=1e-4)
        for name in ("bf16", "bf16 zero", "fp16"):
            assert out[f"{name}, {part}"]["losses"] == pytest.approx(losses, rel=0.01)
            assert float(out[f"{name}, {part}"]["norm"]) == pytest.approx(norm, rel=0.05)
    assert out[f"bf16, {part}"]["losses"] != losses


def test_no_gradients_are_cached(two: Any) -> None:
    for out in two.values():
        assert out["changes"]["kinds"] == [0], "activations alone"
        assert out["changes"]["losses"] == pytest.approx(alone(frozen(*UPPER))[0], rel=0.02)


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint-zero"])
def test_checkpoints_go_on_in_any_cut(two: Any, name: str) -> None:
    for out in two.values():
        saved = out[name]
        assert saved["(0, 2, 4)"] == (saved["evaluated"], saved["after"])
        for cuts in ("(0, 3, 4)", "(0, 1, 4)"):
            assert saved[cuts][0] == pytest.approx(saved["evaluated"], rel=1e-3)
            assert saved[cuts][1] == pytest.approx(saved["after"], rel=1e-3)
        assert len(saved["back"]) == 1


def test_refused(two: Any) -> None:
    assert "transformer.wte.weight.requires_grad: got True, allowed: False, as at the start" in two[0]["changed"]
    for out in two.values():
        assert "changed" in out, "the other rank's training ends too"
        assert "transformer.h.2.attn.c_attn.bias.requires_grad: got False, allowed: True" in out["other"]
        assert "no parameter to train" in out["nothing"]
        assert "store.on_write_error" in out["declined"]


def test_three_stages(three: Any) -> None:
    equals(three, "last", frozen(*UPPER))
    equals(three, "middle", frozen("transformer.h.1.", "lm_head"))
    losses, _ = alone(frozen("transformer.h.1."), clip=0.5)
    for out in three.values():
        assert out["last"]["backward"] == {"0->1": 0, "1->2": 0}
        assert out["middle"]["backward"]["0->1"] == 0
        assert out["middle"]["backward"]["1->2"] > 0
        assert out["middle alone"]["losses"] == pytest.approx(losses, rel=1e-5)
    assert [three[rank]["middle"]["in_flight"] for rank in range(3)] == [1, 3, 1]


def test_replicas_exchange_nothing_for_a_frozen_stage(replicas: Any) -> None:
    for name in ("plain", "zero", "compressed", "momentum", "local", "local compressed"):
        lower, upper = (0, 1), (2, 3)
        for a, b in (lower, upper):
            for weight, value in replicas[a][name]["trained"].items():
                assert np.array_equal(value, replicas[b][name]["trained"][weight]), (name, weight)
        assert not replicas[0][name]["trained"]
        assert replicas[2][name]["trained"]
        least = 100 if name == "momentum" else 0  # its ranks tell each other in a byte that they have no gradient
        assert [replicas[rank][name]["exchanged"] > least for rank in range(4)] == [False, False, True, True], name
    for rank, out in replicas.items():
        assert out["plain"]["losses"] == out["other cut"]["losses"], rank
        for name in ("zero", "compressed", "momentum"):
            assert out[name]["losses"] == pytest.approx(out["plain"]["losses"], rel=0.02), name
        for name in ("local", "local compressed"):
            assert out[f"{name} resumed"]["resumed"] == out[f"{name} resumed"]["after"]
    for out in (replicas[0], replicas[2]):
        assert out["plain"]["backward"] == {"0->1": 0}
    both = {**replicas[0]["other cut"]["trained"], **replicas[2]["other cut"]["trained"]}
    for name, value in replicas[2]["plain"]["trained"].items():
        assert np.array_equal(value, both[name]), name
