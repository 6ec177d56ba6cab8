"""Whatever ends a thread that sends or receives, or comes from a rank that sends what it must not: all ranks name it.

Silence would be noticed much later: its limit is set far above what the tests wait for.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

import tests.dist.reliability_work as work
from pipecomp.distributed import heartbeat
from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S, TOLD_S
from tests.tls.meshes import keys_for

pytestmark = [pytest.mark.ranks, pytest.mark.soak]
STEP, VICTIM, WORLD = 3, 1, 3
SILENCE_S = 2 * TOLD_S


def raises(error: Exception) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


def delivering(engine: Any) -> None:
    """Make the receiver of packets run out of memory."""
    engine.links.to_previous.transport.deliver = raises(MemoryError("no more"))


def receiving(engine: Any) -> None:
    """A bug where frames are read."""
    import pipecomp.stages.link.gloo as gloo
    import pipecomp.tls.frames as frames

    gloo.read_prefix = frames.FrameHeader.unpack = raises(AssertionError("a bug"))


def sending(engine: Any) -> None:
    """A bug where frames are made."""
    import pipecomp.stages.link.gloo as gloo
    import pipecomp.tls.frames as frames

    pack, fail = frames.FrameHeader.pack, raises(TypeError("a bug"))
    gloo.write_prefix = fail
    # the frame that gives the reason is made as before
    frames.FrameHeader.pack = lambda header: (pack if header.kind is frames.FrameKind.CLOSE else fail)(header)


def another_frame(engine: Any) -> None:
    """This rank sends the next one what is no frame."""
    import struct

    import pipecomp.stages.link.gloo as gloo
    import pipecomp.tls.frames as frames

    write, pack = gloo.write_prefix, frames.FrameHeader.pack
    gloo.write_prefix = lambda frame, kind, size, total: write(frame, 99, size, total)
    frames.FrameHeader.pack = lambda header: struct.pack("<B", 99) + pack(header)[1:]


def a_long_packet(engine: Any) -> None:
    """This rank sends the next one more than was agreed."""
    import numpy as np

    transport = engine.links.to_next.transport
    send = transport.send
    transport.send = lambda packet: send(np.zeros(1 << 24, dtype=np.uint8))


def a_bad_heartbeat(engine: Any) -> None:
    """This rank's heartbeat says what no heartbeat says."""
    from pipecomp.distributed.heartbeat import process_heartbeat

    process_heartbeat()._state = "stopped by nobody"


FAULTS = {
    delivering: "MemoryError: no more",
    receiving: "AssertionError: a bug",
    sending: "TypeError: a bug",
    another_frame: "unknown kind 99",
    a_long_packet: "16777216 bytes, allowed: ",
    a_bad_heartbeat: "rank 1 wrote an invalid heartbeat: ",
}


def fails(rank: int, world: int, note: Any, keys: str | None, fault: Any) -> Any:
    if keys is not None:
        os.environ["PIPECOMP_KEYS"] = f"{keys}/rank-{rank}"
    heartbeat._GRACE_S = SILENCE_S  # a rank that waits in a collective is to be woken by the others' end, however late
    engine = work.make("", stages=world, store={"backend": "memory"}, section={"transport": {"timeout_s": SILENCE_S}})
    work.losses(engine, STEP)
    if rank == VICTIM:
        fault(engine)
    began, error = time.monotonic(), ""
    while not error and time.monotonic() < began + TOLD_S:
        error = work.error_of(engine.train_batch)
    seconds = time.monotonic() - began
    with contextlib.suppress(Exception):
        engine.close()
    return error, seconds


@pytest.mark.timeout(HANG_S)
@pytest.mark.parametrize("closed", [False, True], ids=["gloo", "tls"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_all_ranks_name_the_rank_and_what_happened(tmp_path: Path, fault: Any, closed: bool) -> None:
    if closed:
        keys_for(tmp_path, WORLD)
    ranks = run_ranks(WORLD, fails, str(tmp_path) if closed else None, fault, timeout_s=HANG_S)
    told = {rank: f"{error} ({seconds:.1f} s)" for rank, (error, seconds) in ranks.items()}
    print("\n".join(told.values()))
    for rank, (error, seconds) in ranks.items():
        assert f"rank {VICTIM}" in error or rank == VICTIM, told
        assert "rank 0 stopped" not in error, told
        assert seconds < TOLD_S, told
        if not (fault is a_bad_heartbeat and rank == VICTIM):
            assert FAULTS[fault] in error, told
