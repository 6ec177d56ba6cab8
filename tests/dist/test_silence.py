"""Ranks that are stopped, cut off or not there: every other rank ends with an error that names them, in time."""

from __future__ import annotations

import contextlib
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import tests.dist.reliability_work as work
from pipecomp.buffers import LmdbEnvironment
from pipecomp.distributed.local_launcher import RankFailedError, run_ranks
from pipecomp.distributed.preemption import LOST_STATUS
from tests.limits import HANG_S, TOLD_S
from tests.tls.meshes import keys_for

pytestmark = [pytest.mark.ranks, pytest.mark.soak]

TIMEOUT_S = 6.0


class Victim:
    """Ends the victim, which may be stopped, once all others have said something."""

    def __init__(self, others: int) -> None:
        self.pid, self._others = 0, others

    def noted(self, rank: int, value: Any) -> None:
        if isinstance(value, int):
            self.pid = value
        else:
            self._others -= 1
        if self._others == 0:
            self.end()

    def end(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def said(folder: Path, rank: int) -> str:
    file = folder / f"said-{rank}"
    return file.read_text() if file.is_file() else ""


@pytest.mark.parametrize(
    ("world", "stages", "victim"),
    [(3, 3, 1), (3, 3, 0), (4, 2, 3)],
    ids=["middle", "first, which serves the store", "of two replicas"],
)
def test_a_stopped_rank_is_named_by_all_others(world, stages, victim, tmp_path):
    """By an exception, or where a rank waits for it in a collective of replicas, by its last words."""
    end = Victim(world - 1)
    others = set(range(world)) - {victim}
    collective = {victim - 1} if stages < world else set()  # the other replica of the victim's stage
    ended = set()

    def noted(rank: int, value: Any) -> None:
        end.noted(rank, value)
        # A rank that ends itself says nothing here; the rest is then all there is to wait for.
        ended.add(rank)
        if ended >= others - collective and collective:
            end.end()

    try:
        ranks = run_ranks(
            world,
            work.is_lost,
            "stopped",
            victim,
            str(tmp_path),
            stages,
            TIMEOUT_S,
            timeout_s=HANG_S,
            may_die=(victim, *collective),
            on_note=noted,
        )
    finally:
        end.end()
    assert set(ranks) >= others - collective
    for rank in others:
        error, seconds = ranks.get(rank, (said(tmp_path, rank).partition(f"pipecomp: rank {rank}: ")[2], 0.0))
        assert error.startswith(("LinkTimeoutError", "PeerLostError")), (rank, error)
        assert f"rank {victim}" in error, rank
        assert seconds < TOLD_S
    for rank in range(world):  # no lock is left
        LmdbEnvironment(tmp_path / f"rank-{rank}").close()


def test_a_rank_whose_connections_are_reset(tmp_path):
    ranks = run_ranks(
        3, work.is_lost, "reset", 1, str(tmp_path), 3, 2 * HANG_S, timeout_s=HANG_S, on_note=lambda r, v: None
    )
    for rank, (error, seconds) in ranks.items():
        assert "PeerLostError" in error, error
        assert seconds < TOLD_S, rank  # far below the timeout of silence


def test_waiting_in_a_collective_for_a_stopped_rank(tmp_path):
    """gloo cannot be interrupted there: the rank says what it waits for, closes its store and ends itself."""
    end = Victim(10**9)
    with pytest.raises(RankFailedError, match=f"rank 0 failed with exit status {LOST_STATUS}"):
        run_ranks(2, work.waits_in_a_collective, str(tmp_path), TIMEOUT_S, timeout_s=HANG_S, on_note=end.noted)
    end.end()
    assert "pipecomp: rank 0: LinkTimeoutError: no heartbeat from rank 1 for 4.5 s" in said(tmp_path, 0)
    environment = LmdbEnvironment(tmp_path / "m" / "rank-0")
    environment.close()


@pytest.mark.parametrize("asked", [False, True], ids=["at the engine", "at a question before it"])
def test_a_rank_that_is_gone_before_the_engine_is_made(asked):
    ranks = run_ranks(4, work.gone_before_the_engine, asked, TIMEOUT_S, timeout_s=HANG_S, may_die=(1,))
    assert set(ranks) == {0, 2, 3}
    for error in ranks.values():
        assert error.startswith(("LinkTimeoutError", "PeerLostError")), error
        assert "LinkTimeoutError: no heartbeat from rank 1" in error, error


def test_a_rank_whose_connection_is_closed_before_the_engine_is_made(tmp_path: Path):
    """Over TLS the end of a connection is known long before heartbeats are missed."""
    keys_for(tmp_path, 3)
    ranks = run_ranks(3, work.gone_with_its_connections, str(tmp_path), timeout_s=HANG_S, may_die=(1,))
    assert set(ranks) == {0, 2}
    for error in ranks.values():
        assert error.startswith("PeerLostError: "), error
        assert "rank 1" in error


def test_nothing_listens_where_the_ranks_meet():
    found = run_ranks(2, work.nobody_there, timeout_s=HANG_S)
    assert found[1].startswith("LinkTimeoutError: rank 1 did not find rank 0 at 127.0.0.1 port ")


def test_a_start_does_not_see_what_the_one_before_it_wrote():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
    ranks = run_ranks(3, work.twice_in_one_store, "127.0.0.1", store.port, timeout_s=HANG_S)
    assert list(ranks.values()) == 3 * [[6.0, 2.0, 9.0, 2.0, 0.0]], "one watch at a time, and none at the end"


def waits_for_a_stopped_rank(rank: int, world: int, note: Any) -> None:
    from pipecomp.distributed import heartbeat
    from pipecomp.distributed.collectives import gathered
    from pipecomp.distributed.rendezvous import join_processes

    heartbeat.DEFAULT_TIMEOUT_S, heartbeat._GRACE_S = TIMEOUT_S, 1.0
    join_processes()
    gathered(rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    gathered(rank)


def test_a_rank_that_is_stopped_before_an_engine_is_made_ends_the_others():
    """As while records are exchanged after a restart; gloo alone would wait for half an hour."""
    with pytest.raises(RankFailedError, match=f"rank 0 failed with exit status {LOST_STATUS}"):
        run_ranks(2, waits_for_a_stopped_rank, timeout_s=HANG_S)
