"""Training over TLS has the losses of training over gloo."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch.distributed as dist

from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.tls.process_group import current_mesh
from tests.limits import HANG_S
from tests.models import ds_config, gpt2, samples
from tests.tls.meshes import Trouble, keys_for

pytestmark = pytest.mark.ranks

AQSGD = {"activations": {"method": "aqsgd"}, "store": {"backend": "memory"}}
STEPS = 3


def losses(rank, world, note, keys, stages, disturbed=False):
    from pipecomp import initialize

    if keys is not None:
        os.environ["PIPECOMP_KEYS"] = f"{keys}/rank-{rank}"
    engine = initialize(gpt2(tied=True), num_stages=stages, config=ds_config(AQSGD), training_data=samples())
    connections = current_mesh().connections.values() if disturbed else []
    with Trouble(*connections, seed=rank) if disturbed else contextlib.nullcontext():
        found = [float(engine.train_batch()) for _ in range(STEPS)]
    stats = engine.gather_comm_stats()
    assert {event["pid"] for event in engine.gather_last_step()} == set(range(world))
    engine.close()
    if keys is not None:
        current_mesh().close()
    reconnects = sum(connection.resumable.reconnects for connection in connections)
    return found, dist.get_backend(), sorted(len(s["links"]) for s in stats), reconnects


@pytest.mark.timeout(HANG_S)
@pytest.mark.parametrize(("world", "stages"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.soak)])
def test_losses_are_those_over_gloo(tmp_path, world, stages):
    keys_for(tmp_path, world)
    plain = run_ranks(world, losses, None, stages, timeout_s=HANG_S)
    closed = run_ranks(world, losses, str(tmp_path), stages, timeout_s=HANG_S)
    assert [closed[r][0] for r in range(world)] == [plain[r][0] for r in range(world)]
    assert {closed[r][1] for r in range(world)} == {"tls"}
    assert closed[0][2] == plain[0][2]


@pytest.mark.timeout(HANG_S)
def test_lost_connections_change_no_loss(tmp_path):
    """Every rank closes one of its connections several times a second."""
    keys_for(tmp_path, 4)
    plain = run_ranks(4, losses, None, 4, timeout_s=HANG_S)
    closed = run_ranks(4, losses, str(tmp_path), 4, True, timeout_s=HANG_S)
    assert [closed[r][0] for r in range(4)] == [plain[r][0] for r in range(4)]
    assert sum(closed[r][3] for r in range(4)) > 0
