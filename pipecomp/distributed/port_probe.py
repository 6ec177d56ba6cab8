"""Finding out within seconds that something else than rank 0 serves the port where the ranks are to meet.

torch's client goes on asking for as long as a rank may take to come, half an hour, whatever it is that answers, and
says nothing where a firewall swallows it or nobody listens: so a rank that waits says for whom.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from pipecomp.distributed.failure import bounded
from pipecomp.distributed.preemption import say_here
from pipecomp.errors import LinkError

_CONNECT_S, _ANSWER_S = 5.0, 10.0
_END_S = 20.0  # torch looks at the clock only between its attempts
_PATIENCE_S = 30.0


@contextlib.contextmanager
def said_if_long(text: str) -> Iterator[None]:
    """Say what this rank waits for, on standard error, where that takes long."""
    timer = threading.Timer(_PATIENCE_S, say_here, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def torch_says_nothing() -> Iterator[None]:
    """Keep what C++ writes to standard error, a stack of 20 lines for each attempt, from before the error itself."""
    before = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def check_meeting_point(host: str, port: int, rank: int) -> None:
    """Ask what listens there whether it is torch's key-value store. LinkError if not; nothing if nothing listens yet.

    Args:
        host: MASTER_ADDR.
        port: MASTER_PORT.
        rank: This one, for the error.
    """
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except OSError:
        return  # rank 0 may come later, and torch waits for it
    limit = timedelta(seconds=_ANSWER_S)

    def ask() -> None:
        store = dist.TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
        store.check(["pipecomp/there"])

    try:
        with torch_says_nothing():
            bounded(ask, _END_S)
    except (RuntimeError, ValueError) as error:
        with contextlib.suppress(OSError):  # rank 0 may have ended meanwhile: then torch waits for the next one
            socket.create_connection((host, port), _CONNECT_S).close()
            raise LinkError(
                f"rank {rank}: what listens at {host} port {port} is not rank 0 of this run: it does not answer as "
                "torch's key-value store does. Something else uses that port, or MASTER_ADDR is another machine's: "
                "give all ranks the same MASTER_ADDR, and a MASTER_PORT that is free on rank 0's machine"
            ) from error
