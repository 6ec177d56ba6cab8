"""A rank that dies in the middle of training: the others say which, soon, and nothing is left running."""

from __future__ import annotations

import os
import signal
import time

import pytest

from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S, TOLD_S
from tests.models import ds_config, gpt2, samples
from tests.tls.meshes import keys_for

pytestmark = pytest.mark.ranks


def dies_at_step_3(rank, world, note, victim, folder, stages):
    import pipecomp
    from pipecomp.errors import PeerLostError

    section = {"activations": {"method": "aqsgd"}, "store": {"path": folder}}
    engine = pipecomp.initialize(gpt2(), num_stages=stages, config=ds_config(section), training_data=samples())
    for step in range(100):
        if rank == victim and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            engine.train_batch()
        except PeerLostError as error:
            return error.rank, str(error), time.monotonic() - began, step
    return None


@pytest.mark.parametrize(("world", "stages", "victim"), [(3, 3, 0), (4, 2, 1)], ids=["first", "of two replicas"])
def test_the_lost_rank_is_named_by_all_others(world, stages, victim, tmp_path):
    ranks = run_ranks(world, dies_at_step_3, victim, str(tmp_path), stages, timeout_s=HANG_S, may_die=(victim,))
    assert set(ranks) == set(range(world)) - {victim}
    for lost, message, seconds, step in ranks.values():
        assert lost == victim
        assert f"rank {victim}" in message
        assert seconds < TOLD_S
        assert step in (2, 3)


def stops_at_step_3(rank, world, note, victim, folder):
    """The victim's weights become NaN: it stops with an error, the other replica waits for it in a collective."""
    import torch

    import pipecomp
    from pipecomp.errors import PipecompError

    section = {"activations": {"method": "aqsgd"}, "store": {"path": folder}}
    engine = pipecomp.initialize(gpt2(), num_stages=2, config=ds_config(section), training_data=samples())
    for step in range(100):
        if rank == victim and step == 3:
            with torch.no_grad():
                next(engine.stage.parameters()).fill_(float("nan"))
        try:
            engine.train_batch()
        except PipecompError as error:
            return getattr(error, "rank", None), str(error)
    return None


def leaves_at_step_3(rank, world, note, keys):
    """Rank 1's own program raises between two steps."""
    import pipecomp
    from pipecomp.errors import PeerLostError

    if keys is not None:
        os.environ["PIPECOMP_KEYS"] = f"{keys}/rank-{rank}"
    engine = pipecomp.initialize(gpt2(), num_stages=2, config=ds_config(), training_data=samples())

    def program():
        with engine:
            for step in range(100):
                if rank == 1 and step == 3:
                    raise KeyError("a column")
                engine.train_batch()

    with pytest.raises(KeyError if rank == 1 else PeerLostError) as caught:
        program()
    return str(caught.value)


@pytest.mark.parametrize("over_tls", [False, True], ids=["gloo", "tls"])
def test_an_exception_of_the_program_is_named_by_the_other_rank(tmp_path, over_tls):
    if over_tls:
        keys_for(tmp_path, 2)
    ranks = run_ranks(2, leaves_at_step_3, str(tmp_path) if over_tls else None, timeout_s=HANG_S)
    assert "rank 1 stopped: KeyError: 'a column'" in ranks[0]
    assert ", stage 1: step 3" in ranks[0]


def test_why_a_replica_stopped_is_said_by_all_others(tmp_path):
    victim = 1
    ranks = run_ranks(4, stops_at_step_3, victim, str(tmp_path), timeout_s=HANG_S)
    lost, reason = ranks.pop(victim)
    assert lost is None
    assert "NaN" in reason
    for rank, message in ranks.values():
        assert rank == victim
        assert f"rank {victim} stopped: NonFiniteError: " in message
