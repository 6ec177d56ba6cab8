"""Runs whose states have a second home: a rank's folder is lost, and training continues as if it had not been."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from pipecomp.checkpoint import manifest
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.elastic.assembly import assemble, newest_complete
from pipecomp.elastic.index import RecordFolder
from pipecomp.elastic.record import StateRecord
from pipecomp.errors import CheckpointError
from tests.elastic.test_records import contents, info
from tests.limits import HANG_S
from tests.models import ds_config, gpt2, samples
from tests.tls.meshes import keys_for

pytestmark = pytest.mark.ranks

SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 1e-3}}}
ZERO1 = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 100_000}}
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, **ZERO1}
LOCAL = {"gradients": {"method": "double_squeeze", "bits": 8, "local_steps": 3}}
# Runs of two ranks: settings of DeepSpeed and of pipecomp, and the number of stages.
TWO: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "stages": ({}, {}, 2),
    "cached": ({}, {"activations": {"method": "aqsgd", "forward_bits": 8}, "store": {"backend": "memory"}}, 2),
    "adapters": ({}, {"lora": True}, 2),
    "shards": (BF16, {}, 1),  # each replica's part of ZeRO's optimizer is in its own record alone
    "replicas": ({}, {"gradients": {"method": "double_squeeze", "bits": 8}}, 1),  # residuals, too
    "local steps": ({}, LOCAL, 1),
}
SAVED, LAST, END = 4, 6, 9  # steps of the checkpoint, of the newest record, and of the whole run


def engine_of(stages: int, path: str | None, more: dict[str, Any], section: dict[str, Any], *, seed: int = 0) -> Any:
    import pipecomp

    elastic = {} if path is None else {"elastic": {"second_home": "next", "path": path, "every_steps": 2}}
    section = dict(section)
    model = gpt2(seed=seed)
    if section.pop("lora", False):  # frozen weights are not in records
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(gpt2(), LoraConfig(r=4, target_modules=["c_attn"]))
    config = ds_config({**elastic, **section}, **SCHEDULE, **more)
    return pipecomp.initialize(model, num_stages=stages, config=config, training_data=samples())


def trained(engine: Any, steps: int) -> list[float]:
    return [float(engine.train_batch()) for _ in range(steps)]


def weights(engine: Any) -> dict[str, str]:
    """Digests of this stage's weights and their optimizer states by name."""
    out = {}
    for name, p in engine.stage.named_parameters():
        if not p.requires_grad:
            continue
        state = engine.optimizer.state[p]
        values = torch.cat([p.detach().flatten(), *(state[key].flatten() for key in ("exp_avg", "exp_avg_sq"))])
        name = name.replace("lm_head", "transformer.wte")
        out[name] = hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()
    return out


def recorded(folder: str, stages: int, more: dict[str, Any], section: dict[str, Any]) -> dict[str, Any]:
    """Train with records after steps 1 (the first), 2, 4, 6, 8, and a checkpoint after step 4."""
    engine = engine_of(stages, f"{folder}/records", more, section)
    for _ in range(LAST):
        engine.train_batch()
        assert engine.second_home.wait(HANG_S)
        if engine.global_steps == SAVED:
            engine.save_checkpoint(f"{folder}/saved-{engine.global_rank}", client_state={"mine": 7})
    out: dict[str, Any] = {"weights": weights(engine) if not more else {}}
    out["losses"] = trained(engine, END - LAST)
    assert engine.second_home.wait(HANG_S)  # its end would cancel a record that is being sent
    out["stats"] = engine.comm_stats()["second_home"]
    engine.close()
    return out


def resumed(folder: str, stages: int, more: dict[str, Any], section: dict[str, Any]) -> dict[str, Any]:
    engine = engine_of(stages, None, more, section, seed=9)
    _, state = engine.load_checkpoint(folder)
    out: dict[str, Any] = {"step": engine.global_steps, "state": state.get("mine")}
    out["weights"] = weights(engine) if not more else {}
    out["losses"] = trained(engine, END - engine.global_steps)
    engine.close()
    return out


def three(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    return recorded(folder, 3, {}, {})


def three_again(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    return resumed(folder, 3, {}, {})


def two(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    return {name: recorded(f"{folder}/{name}", stages, *more) for name, (*more, stages) in TWO.items()}


def two_again(rank: int, world: int, note: Any, folder: str, other: str) -> dict[str, Any]:
    out = {name: resumed(f"{folder}/{name}/out", stages, *more) for name, (*more, stages) in TWO.items()}
    out["recut"] = resumed(other, 2, {}, {})
    return out


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    root = tmp_path_factory.mktemp("three")
    for name in ("received", "rank-7"):  # of an earlier start
        folder = RecordFolder(root / "records" / name)
        record = StateRecord.take(info(3, 2, session="ab"), contents(2))
        record.write(folder.path)
        folder.add(record)
    return root, run_ranks(3, three, str(root), timeout_s=HANG_S)


def left_without(root: Path, lost: int) -> list[Path]:
    """The records on the machines that are left; each rank is on a machine of its own."""
    return [folder for folder in sorted((root / "records").glob("rank-*")) if folder.name != f"rank-{lost}"]


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=False, map_location="cpu")


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_records_of_an_earlier_start_go_once_two_newer_steps_are_complete(three_ranks: Any) -> None:
    root, _ = three_ranks
    assert sorted(path.name for path in (root / "records").iterdir()) == ["rank-0", "rank-1", "rank-2"]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_checkpoint_survives_any_one_machine(lost: int, three_ranks: Any, tmp_path: Path) -> None:
    """What is assembled is what the engine saved itself, file by file."""
    root, _ = three_ranks
    folder = assemble(left_without(root, lost), tmp_path, step=SAVED)
    assert folder.name == "global_step4"
    names = {path.name for path in folder.iterdir()}
    for rank in range(3):
        for path in (root / f"saved-{rank}" / folder.name).glob("*.pt"):
            assert same(loaded(path), loaded(folder / path.name)), path.name
            names.discard(path.name)
    assert names == {"pipecomp-seal-0.json"}
    assert manifest.problem(folder) is None


def test_training_continues_from_the_newest_record(three_ranks: Any, tmp_path: Path) -> None:
    root, out = three_ranks
    left = left_without(root, 1)
    assert newest_complete(left).step == 8
    assemble(left, tmp_path, step=LAST)
    again = run_ranks(3, three_again, str(tmp_path), timeout_s=HANG_S)
    for rank in range(3):
        assert again[rank]["step"] == LAST
        assert again[rank]["weights"] == out[rank]["weights"]
        assert again[rank]["losses"] == out[rank]["losses"]


def test_two_neighbors_lost_are_named(three_ranks: Any) -> None:
    root, _ = three_ranks
    with pytest.raises(CheckpointError, match="step 8: the record of rank 0 is missing"):
        newest_complete([root / "records" / "rank-2"])


def test_old_records_are_deleted_but_not_those_of_checkpoints(three_ranks: Any) -> None:
    root, out = three_ranks
    steps = sorted({int(path.name.split("-")[1]) for path in (root / "records").rglob("step-*")})
    assert steps == [4, 6, 8]  # the checkpoint's, and the two newest
    for rank in range(3):
        stats = out[rank]["stats"]
        assert (stats["home"], stats["holds"]) == ((rank + 1) % 3, [(rank - 1) % 3])
        assert stats["records"] == 6  # two of step 4
        assert stats["bytes"] < stats["raw_bytes"]
        assert stats["complete"] == 6  # as was known when that of step 8 was taken
        assert (stats["every_steps"], stats["lost_steps"]) >= (2, 3)


def test_every_kind_of_state_continues_exactly(three_ranks: Any, tmp_path: Path) -> None:
    """Shards of an optimizer, residuals and local steps; and a state of three stages with two."""
    out = run_ranks(2, two, str(tmp_path), timeout_s=HANG_S)
    for name in TWO:
        assemble(left_without(tmp_path / name, 0), tmp_path / name / "out", step=LAST)
    root, before = three_ranks
    assemble(left_without(root, 2), tmp_path / "recut", step=LAST)
    again = run_ranks(2, two_again, str(tmp_path), str(tmp_path / "recut"), timeout_s=HANG_S)
    for rank in range(2):
        for name in TWO:
            assert again[rank][name]["step"] == LAST
            assert again[rank][name]["weights"] == out[rank][name]["weights"], name
            if name != "cached":  # whose samples are sent whole once more
                assert again[rank][name]["losses"] == out[rank][name]["losses"], name
    held = {name: digest for rank in range(3) for name, digest in before[rank]["weights"].items()}
    recut = {name: digest for rank in range(2) for name, digest in again[rank]["recut"]["weights"].items()}
    assert recut == held
    assert again[0]["recut"]["losses"] == pytest.approx(before[0]["losses"], rel=1e-6)


def over_tls(rank: int, world: int, note: Any, folder: str, keys: str) -> dict[str, Any]:
    from pipecomp.tls.process_group import current_mesh

    os.environ["PIPECOMP_KEYS"] = f"{keys}/rank-{rank}"
    out = recorded(f"{folder}/run", 2, {}, {})
    mesh = current_mesh()
    assert mesh is not None
    mesh.close()
    return out


def test_over_tls(tmp_path: Path) -> None:
    keys_for(tmp_path / "keys", 2)
    run_ranks(2, over_tls, str(tmp_path), str(tmp_path / "keys"), timeout_s=HANG_S)
    for lost in (0, 1):
        folder = assemble(left_without(tmp_path / "run", lost), tmp_path / f"out-{lost}", step=SAVED)
        for rank in range(2):
            for path in (tmp_path / "run" / f"saved-{rank}" / folder.name).glob("*.pt"):
                assert same(loaded(path), loaded(folder / path.name)), path.name


class RecordWait(TrainerCallback):
    """Waits after each step until its record has arrived: steps of a few ms are faster than records."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, *args: Any, **more: Any) -> None:
        home = self._trainer.engine.second_home
        assert home is None or home.wait(HANG_S)


def trainer_run(rank: int, world: int, note: Any, folder: str, resume: bool) -> list[float]:
    import pipecomp
    from tests.dist.trainer_work import arguments

    elastic = {} if resume else {"elastic": {"second_home": "next", "every_steps": 3}}
    args = arguments(folder, num_train_epochs=1, lr_scheduler_type="cosine", per_device_train_batch_size=1)
    trainer = pipecomp.PipelineTrainer(gpt2(2, 16), args, None, samples(16), num_stages=2, pipecomp=elastic)
    trainer.add_callback(RecordWait(trainer))
    trainer.train(resume_from_checkpoint=resume)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    trainer.end()
    return losses


def test_a_trainer_continues(tmp_path: Path) -> None:
    """Records have the trainer's own files, too: state, schedule, place in the data."""
    out = run_ranks(2, trainer_run, str(tmp_path / "first"), False, timeout_s=HANG_S)
    assert len(out[0]) == 8
    records = tmp_path / "first" / "second-home"
    shutil.rmtree(records / "rank-0")
    folder = assemble([records], tmp_path / "second")
    assert folder.name == "checkpoint-6"
    again = run_ranks(2, trainer_run, str(tmp_path / "second"), True, timeout_s=HANG_S)
    assert again[0] == out[0]
