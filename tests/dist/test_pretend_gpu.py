"""Whole engines on a GPU's double, tests/pretend_gpu.py: there every tensor is where it must be, or the run ends.

What they compute is the host's, bit for bit, where a GPU has the same operations.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S
from tests.models import VOCABULARY, ds_config, gpt2, metrics, samples, save_model, write_text
from tests.pretend_gpu import DEVICE, pretend_gpu

pytestmark = pytest.mark.ranks

SAME = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "gradient_clipping": 0.0}
ADAM = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 1},
}
AQSGD = {"method": "aqsgd", "forward_bits": 3, "backward_bits": 6}
FITTED = {
    **{"method": "aqsgd", "rounding": "stochastic", "forward_bits": {"error": 0.05, "min": 2, "max": 6}},
    **{"backward_bits": 6, "backward_method": "delta", "backward_first_visit": 8},
}
SQUEEZE = {"method": "double_squeeze"}
LOCAL = {**SQUEEZE, "local_steps": 2, "outer": {"optimizer": "nesterov", "lr": 0.7}}
OVERLAPPED = {**SQUEEZE, "local_steps": 3, "fragments": 2, "overlap": 1}


def engine_of(stages: int, section: dict[str, Any], *, seed: int = 0, **more: Any) -> Any:
    """Model of operations that are the same on a GPU: no fused attention, no norm, no fused optimizer."""
    import pipecomp

    model = gpt2(2, 16, seed=seed)
    model.set_attn_implementation("eager")
    return pipecomp.initialize(model, stages, ds_config(section, micro_batches=2, **{**SAME, **more}), samples(8))


def losses(engine: Any, steps: int) -> list[str]:
    return [float(engine.train_batch()).hex() for _ in range(steps)]


def evaluated(engine: Any) -> str:
    from pipecomp.data import eval_batches

    return float(engine.eval_batch(iter(eval_batches(samples(4, seed=3), 2)), num_micro_batches=2)).hex()


def trained(folder: str, section: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A pipeline of two stages, and another one that goes on from its checkpoint."""
    engine = engine_of(2, section, **more)
    out: dict[str, Any] = {"losses": losses(engine, 3)}
    engine.save_checkpoint(f"{folder}/saved")
    engine.close()
    engine = engine_of(2, section, seed=1, **more)
    engine.load_checkpoint(f"{folder}/saved")
    out |= {"resumed": str(engine.resumed), "after": losses(engine, 1), "evaluated": evaluated(engine)}
    engine.save_pretrained(f"{folder}/model")
    out["staged"] = [type(link.staging).__name__ for link in engine.links]
    engine.close()
    return out


def pipeline(folder: str) -> dict[str, Any]:
    """Cached activations on disk, compared as it trains; of the tied weight gradients are compressed."""
    store = {"path": f"{folder}/messages", "bits": 8, "drift_check": 2}
    return trained(
        folder,
        {"activations": {**AQSGD, "first_visit": 8}, "store": store, "gradients": {"method": "double_squeeze"}},
    )


def fitted(folder: str) -> dict[str, Any]:
    """Changes both ways, of a constant error, in memory."""
    engine = engine_of(2, {"activations": FITTED, "store": {"backend": "memory"}})
    found = losses(engine, 3)
    engine.close()
    return {"losses": found}


def clusters(folder: str) -> dict[str, Any]:
    engine = engine_of(2, {"activations": {"method": "aqsgd"}, "store": {"path": folder, "clusters": 8}})
    found = losses(engine, 3)
    engine.close()
    return {"losses": found}


def bf16(folder: str) -> dict[str, Any]:
    precision = {**ADAM, "bf16": {"enabled": True}}
    section = {"activations": AQSGD, "store": {"path": f"{folder}/messages"}}
    return trained(folder, section, **precision, data_types={"grad_accum_dtype": "fp32"})


def fp16(folder: str) -> dict[str, Any]:
    """Train with gradients that overflow, until the scale fits."""
    activations = {"method": "direct", "forward_bits": 8, "backward_bits": 8}
    precision = {**ADAM, "fp16": {"enabled": True, "initial_scale_power": 40}}
    engine = engine_of(2, {"activations": activations}, **precision)
    found = {"losses": losses(engine, 3), "skipped": engine.skipped_steps}
    engine.close()
    return found


def replicas(folder: str) -> dict[str, Any]:
    """Train replicas of one stage; those that step alone resume from a checkpoint with their own weights."""
    out = {}
    for name, gradients in {"none": {}, "quantized": {"method": "global_qsgd"}, "overlapped": OVERLAPPED}.items():
        engine = engine_of(1, {"gradients": gradients})
        out[name] = losses(engine, 3)
        if name == "overlapped":
            engine.save_checkpoint(f"{folder}/{name}")
            engine.load_checkpoint(f"{folder}/{name}")
            out[name] += losses(engine, 1)
        engine.close()
    return out


def trainer(folder: str) -> dict[str, Any]:
    """Padded batches, evaluations, checkpoints, the best model's, and going on from one."""
    from pipecomp import PipelineTrainer
    from tests.dist import trainer_work as work

    changed = {"use_cpu": "DS_ACCELERATOR" in os.environ}
    made, *_ = work.like_trainer(PipelineTrainer, folder, changed, num_stages=2, pipecomp={"activations": AQSGD})
    device, predicted = made.args.device.type, made.predict(work.unequal(5, seed=6)).predictions
    made.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
    logged = [line[key] for line in made.state.log_history for key in ("loss", "eval_loss") if key in line]
    made.end()
    return {"logged": logged, "predicted": predicted.flatten().tolist(), "device": device}


def callback(folder: str) -> dict[str, Any]:
    from pipecomp import CompressionCallback
    from tests.dist.test_callback import small_trainer

    changed = {"use_cpu": "DS_ACCELERATOR" in os.environ, "max_steps": 3, "logging_steps": 1}
    made = small_trainer(folder, CompressionCallback(method="double_squeeze"), **changed)
    made.train()
    logged = [line["loss"] for line in made.state.log_history if "loss" in line]
    return {"logged": logged, "device": next(made.model.parameters()).device.type}


def measured(folder: str) -> dict[str, Any]:
    """Bits that are found when the run begins."""
    from pipecomp.kernels import staging as staging_module

    stock, made = staging_module.CudaStaging, []

    class Counted(stock):  # type: ignore[valid-type, misc]
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    staging_module.CudaStaging = Counted  # type: ignore[misc]
    store = {"backend": "memory", "pinned_bytes": 1 << 16}
    activations = {"method": "aqsgd", "forward_bits": "auto", "backward_bits": "auto"}
    engine = engine_of(2, {"activations": activations, "store": store, "gradients": SQUEEZE})
    losses(engine, 2)
    engine.close()
    staging_module.CudaStaging = stock  # type: ignore[misc]
    return {"made": len(made)}


def planned(folder: str) -> dict[str, Any]:
    """Run a rank of `pipecomp train`, after measurements that are shorter."""
    from pipecomp.plan import measure
    from pipecomp.plan.options import TrainOptions
    from pipecomp.recipes import planned as recipe
    from pipecomp.report.recorder import PLAN

    measure.time_average = partial(measure.time_average, values=1 << 10)  # type: ignore[assignment]
    model, text, run = f"{folder}/../../model", Path(f"{folder}/../../text.txt"), Path(folder, "run")
    recipe.main(TrainOptions(model=model, data=[text], out=run, lr=1e-2, batch=8, epochs=1, max_steps=2, stages=2))
    return {"losses": [line["loss"] for line in metrics(run) if "loss" in line], "plan": (run / PLAN).exists()}


ALIKE: list[Callable[[str], dict[str, Any]]] = [pipeline, fitted, clusters, replicas]
ON_GPU = [fp16, measured, planned]


def everything(rank: int, world: int, note: Any, folder: str, double: bool) -> dict[str, Any]:
    os.environ["LOCAL_RANK"] = "0"  # as where each sees one GPU alone: transformers takes that of its number
    if double:
        from tests.pretend_gpu_rank import be_on_a_gpu

        be_on_a_gpu()
    out = {}
    for case in [*ALIKE, bf16, trainer, callback, *(ON_GPU if double else [])]:
        Path(folder, case.__name__).mkdir(parents=True, exist_ok=True)
        out[case.__name__] = case(f"{folder}/{case.__name__}")
    return out


def replicas_of_two_stages(rank: int, world: int, note: Any, folder: str, double: bool) -> dict[str, Any]:
    if double:
        from tests.pretend_gpu_rank import be_on_a_gpu

        be_on_a_gpu()
    out = {}
    for name, gradients in {"squeezed": SQUEEZE, "local": LOCAL}.items():
        section = {"activations": AQSGD, "store": {"path": f"{folder}/{name}"}, "gradients": gradients}
        engine = engine_of(2, section)
        out[name] = losses(engine, 2)
        engine.close()
    return out


def on_both(world: int, work: Callable[..., Any], folders: list[Path]) -> list[dict[int, Any]]:
    """Return the ranks' results on the host and on the double."""
    return [run_ranks(world, work, str(folder), i == 1, timeout_s=HANG_S) for i, folder in enumerate(folders)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    where = tmp_path_factory.mktemp("gpu")
    save_model(where / "model", write_text(where / "text.txt", lines=60))
    return [where / "host", where / "double"]


@pytest.fixture(scope="module")
def found(folders: list[Path]) -> list[dict[int, Any]]:
    return on_both(2, everything, folders)


def test_the_double_refuses_what_a_gpu_does():
    with pretend_gpu():
        x = torch.ones(3, device=DEVICE)
        assert (x + torch.tensor(1.0)).cpu().numpy().tolist() == [2, 2, 2]
        for refused in (
            lambda: x + torch.ones(3),
            lambda: torch.ones(3)[torch.zeros(1, dtype=torch.long, device=DEVICE)],
            lambda: torch.randn(3, generator=torch.Generator(), device=DEVICE),
        ):
            with pytest.raises(RuntimeError, match="cuda:0"):
                refused()
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()


@pytest.mark.parametrize("case", [case.__name__ for case in ALIKE])
def test_a_gpu_computes_what_the_host_does(case, found):
    host, double = ({rank: dict(ran[rank][case]) for rank in ran} for ran in found)
    if case == "pipeline":
        assert [found.pop("staged") for found in host.values()] == [["HostStaging"]] * 2
        assert [found.pop("staged") for found in double.values()] == [["CudaStaging"]] * 2
        assert double[0]["resumed"] == "ResumeState(exact=True, dropped=0)"
    assert double == host


@pytest.mark.parametrize("case", [trainer.__name__, callback.__name__])
def test_trainers_log_what_they_do_on_the_host(case, found):
    """But for roundings: with Adam and norms a GPU computes in another order."""
    for rank in (0, 1):
        host, double = (ran[rank][case] for ran in found)
        assert (host["device"], double["device"]) == ("cpu", "cuda")
        assert double["logged"] == pytest.approx(host["logged"], rel=1e-4)
        assert double.get("predicted", []) == pytest.approx(host.get("predicted", []), abs=1e-3)


def test_its_weights_are_saved_for_transformers(found, folders):
    from transformers import AutoModelForCausalLM

    host, double = (AutoModelForCausalLM.from_pretrained(folder / "pipeline/model").state_dict() for folder in folders)
    assert double.keys() == host.keys()
    for name in host:
        assert torch.equal(double[name], host[name]), name


def test_half_precision_is_near_the_hosts(found):
    """In bfloat16 other kernels of torch round in between."""
    host, double = ([float.fromhex(x) for x in ran[0]["bf16"]["losses"]] for ran in found)
    assert double == pytest.approx(host, rel=1e-3)
    assert found[1][0]["bf16"]["resumed"] == "ResumeState(exact=True, dropped=0)"


def test_gradients_that_overflow_in_fp16_skip_the_step(found):
    half = found[1][0]["fp16"]
    assert half["skipped"] == 3
    assert [float.fromhex(x) for x in half["losses"]] == pytest.approx([math.log(VOCABULARY)] * 3, rel=0.05)


def test_measurements_take_no_pinned_memory_beside_the_runs(found):
    """A rank has one staging of store.pinned_bytes, which measures, sends, stores and averages."""
    assert [found[1][rank]["measured"]["made"] for rank in (0, 1)] == [1, 1]


def test_a_run_of_train_measures_plans_and_trains(found):
    for rank in (0, 1):
        ran = found[1][rank]["planned"]
        assert ran["plan"]
        assert len(ran["losses"]) == 2
        assert all(math.isfinite(loss) for loss in ran["losses"])


def test_replicas_of_pipelines_do_what_the_hosts_do(tmp_path):
    host, double = on_both(4, replicas_of_two_stages, [tmp_path / "host", tmp_path / "double"])
    assert double == host
