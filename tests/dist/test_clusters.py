"""Training with cluster centers over two processes: both ends alike, resumed bit for bit, and after a damage."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipecomp.buffers.lmdb_folder import DATA_FILE, UNSYNCED_FILE
from pipecomp.distributed.local_launcher import run_ranks
from tests.dist.reliability_work import close_and_leave_store, losses, make, messages
from tests.limits import HANG_S
from tests.models import samples

pytestmark = pytest.mark.ranks

CLUSTERS = 64
SECTION = {"activations": {"method": "aqsgd", "forward_bits": 3, "rounding": "stochastic"}}


def engine_in(folder: str) -> Any:
    store = {"path": folder, "clusters": CLUSTERS, "in_checkpoints": True, "drift_check": 2}
    return make(folder, section=SECTION | {"store": store})


def trained(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    """Stopped and resumed, beside a training that went on; then with a block of centers damaged at one end."""
    engine = engine_in(f"{folder}/m")
    out: dict[str, Any] = {"first": losses(engine, 4), "at checkpoint": messages(engine)}
    engine.save_checkpoint(f"{folder}/c")
    out["on"], out["then"] = losses(engine, 4), messages(engine)
    engine.eval_batch(iter(_evaluation()))
    out["after evaluation"] = messages(engine)
    engine.close()

    engine = engine_in(f"{folder}/m")
    engine.load_checkpoint(f"{folder}/c")
    out["resumed"], out["held"] = tuple(engine.resumed), messages(engine)
    out["again"], out["then again"] = losses(engine, 4), messages(engine)
    drifts = [end.stats.drifts for end in engine.links], [end.stats.drift_checks for end in engine.links]
    out["drifts"] = drifts
    close_and_leave_store(engine)

    dist.barrier()
    if rank == 1:
        _damage(Path(folder, "m", "rank-1", DATA_FILE))
    dist.barrier()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        engine = engine_in(f"{folder}/m")
    out["warnings"] = [str(warning.message) for warning in given if folder in str(warning.message)]
    out["kept"] = messages(engine)
    engine.run.load(engine.run.id)
    out["on anyhow"] = losses(engine, 2)
    batch = [{key: torch.stack([row[key]] * 2) for key in row} for row in samples(3)]  # without ids
    out["without ids"] = float(engine.train_batch(iter(batch)))
    out["in the end"] = messages(engine)
    engine.close()
    return out


def _evaluation() -> list[Any]:
    from pipecomp.data import eval_batches

    return list(eval_batches(samples(6), 2))


def _damage(file: Path) -> None:
    """Flip a bit of a stored center; the next opening checks all values, as after a killed process."""
    file.with_name(UNSYNCED_FILE).touch()
    data = bytearray(file.read_bytes())
    at = data.find(b"PCMV")
    data[at + 60] ^= 1
    file.write_bytes(data)


def test_both_ends_hold_the_same_centers_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    found = run_ranks(2, trained, str(tmp_path), timeout_s=HANG_S)
    one, other = found[0], found[1]
    for key in ("at checkpoint", "then", "held", "then again", "kept", "in the end"):
        assert one[key] == other[key], key
        assert len(one[key][0]) > 0
    assert one["at checkpoint"] != one["then"] == one["after evaluation"]
    assert one["resumed"] == other["resumed"] == (True, 0)
    assert one["held"] == one["at checkpoint"]
    assert one["again"] == one["on"]
    assert one["then again"] == one["then"]
    assert one["drifts"] == ([0], [2])
    assert one["warnings"] == []
    assert len(other["warnings"]) == 1
    assert 0 < len(one["kept"][0]) < len(one["then"][0])
    assert len(one["on anyhow"]) == 2
    assert one["without ids"] == other["without ids"] > 0
