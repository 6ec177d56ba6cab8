"""Resuming where one rank's store is of the checkpoint and the other's is newer: both go on with what they share."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pipecomp.distributed.local_launcher import run_ranks
from tests.dist.reliability_work import close_and_leave_store, losses, make, messages
from tests.limits import HANG_S

pytestmark = pytest.mark.ranks


def resumed(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    """After the checkpoint every sample is visited again; then rank 1 lacks the copy of its store."""
    engine = make(f"{folder}/m", store={"in_checkpoints": True})
    losses(engine, 4)
    engine.save_checkpoint(f"{folder}/c")
    losses(engine, 4)
    close_and_leave_store(engine)
    if rank == 1:
        for copy in Path(folder, "c").glob("*/pipecomp-messages-rank-1"):
            shutil.rmtree(copy)
    dist.barrier()
    engine = make(f"{folder}/m", store={"in_checkpoints": True})
    engine.load_checkpoint(f"{folder}/c")
    found = {"resumed": tuple(engine.resumed), "held": messages(engine)}
    found["losses"] = losses(engine, 6)
    found["then"] = messages(engine)
    engine.close()
    return found


def test_ranks_go_on_with_what_both_ends_of_a_link_hold(tmp_path: Path) -> None:
    ranks = run_ranks(2, resumed, str(tmp_path), timeout_s=HANG_S)
    for out in ranks.values():
        exact, dropped = out["resumed"]
        assert not exact
        assert dropped > 0
        assert out["held"] == ranks[0]["held"]
        assert out["then"] == ranks[0]["then"]
        assert len(out["losses"]) == 6
