"""Choice of the checkpoint: by `latest` on machines without a common disk, over another one, cut off, or gone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pipecomp.distributed.local_launcher import run_ranks
from tests.dist.reliability_work import error_of, losses
from tests.limits import HANG_S
from tests.models import ds_config, gpt2, samples

pytestmark = pytest.mark.ranks


def engine_of(stages: int, *, seed: int = 0, **more: Any) -> Any:
    import pipecomp

    config = ds_config(**more)
    return pipecomp.initialize(gpt2(seed=seed), num_stages=stages, config=config, training_data=samples())


def kept(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    os.environ["LOCAL_RANK"] = "0"  # each rank is the first one of its machine
    own, common = f"{folder}/machine-{rank}", f"{folder}/common"
    out: dict[str, Any] = {}
    engine = engine_of(2)
    losses(engine, 2)
    for key in ("optimizer", "pipecomp"):
        out[key] = error_of(lambda key=key: engine.save_checkpoint(own, client_state={key: "mine"}))
    engine.save_checkpoint(own)
    engine.save_checkpoint(common, tag=0)
    expected = losses(engine, 2)
    engine.close()
    engine = engine_of(2, seed=9)
    engine.load_checkpoint(own)
    out["own disks"] = expected, losses(engine, 2)
    engine.close()
    engine = engine_of(2)
    out["swapped"] = error_of(lambda: engine.load_checkpoint(f"{folder}/machine-{1 - rank}", tag="global_step2"))
    engine.close()
    engine = engine_of(2, zero_optimization={"stage": 1, "reduce_bucket_size": 100_000})
    out["zero"] = error_of(lambda: engine.load_checkpoint(own))
    out["weights alone"] = engine.load_checkpoint(own, load_module_only=True)[0] is not None
    engine.close()

    engine = engine_of(2, micro_batch=5)
    losses(engine, 2)  # an epoch of four micro-batches, and two more
    engine.save_checkpoint(f"{folder}/sizes")
    engine.close()
    out["places"] = {}
    for size, replicas in ((2, 1), (5, 2), (2, 2), (5, 1)):
        engine = engine_of(2 // replicas, micro_batch=size)
        engine.load_checkpoint(f"{folder}/sizes")
        out["places"][size, replicas] = divmod(engine.progress.batches_taken, engine.micro_batches_per_epoch)
        engine.close()

    if rank == 0:
        Path(common, "0", "notes.txt").write_text("mine")
    engine = engine_of(1)
    losses(engine, 1)
    engine.save_checkpoint(common, tag=0)
    expected = losses(engine, 2)
    engine.load_checkpoint(common)
    out["written over"] = expected, losses(engine, 2)
    out["tags"], out["notes"] = sorted(os.listdir(common)), Path(common, "0", "notes.txt").read_text()

    dist.barrier()
    if rank == 0:
        for manifest in Path(common, "0").glob("pipecomp-seal-*"):
            manifest.unlink()
    dist.barrier()
    out["cut off"] = error_of(lambda: engine.load_checkpoint(common))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(Path(common, "0"))
    dist.barrier()
    out["gone"] = error_of(lambda: engine.load_checkpoint(common))
    engine.close()
    return out


def test_what_is_loaded_is_one_whole_checkpoint(tmp_path: Path) -> None:
    place = f"load_dir: got '{tmp_path}/common/0', allowed: a "
    for rank, out in run_ranks(2, kept, str(tmp_path), timeout_s=HANG_S).items():
        assert f"with mp_rank_0{rank}_model_states.pt on the machine of rank {rank}." in out["swapped"]
        for name in ("own disks", "written over"):
            expected, got = out[name]
            assert got == expected, name
        assert "zero_optimization.stage: got 1, allowed: 0, as in the checkpoint" in out["zero"]
        assert out["weights alone"]
        for key in ("optimizer", "pipecomp"):
            assert out[key].startswith(f"ConfigError: client_state: got '{key}', allowed: keys that the checkpoint")
        # The second epoch, before as many micro-batches as its other 14 samples fill: not the first one's four.
        assert out["places"] == {(2, 1): (1, 5), (5, 2): (1, 1), (2, 2): (1, 3), (5, 1): (1, 2)}
        assert out["tags"] == ["0", "latest"]
        assert out["notes"] == "mine"
        assert out["cut off"].startswith(f"ConfigError: {place}finished checkpoint")
        assert out["gone"].startswith(f"ConfigError: {place}checkpoint's folder")
