"""Work of the ranks of closed runs on the nodes of a lab with disturbances: train a small GPT-2 and report."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.limits import until

AQSGD = {"activations": {"method": "aqsgd"}, "store": {"backend": "memory"}}


def trains_closed(
    rank: int,
    world: int,
    note: Any,
    keys: str | None,
    steps: int,
    timeout_s: float,
    disturbed: str | None = None,
    at_the_end: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """Losses, ways to the other ranks, and what was lost on the way; a note before every step.

    keys: folder of a folder for each rank; None for gloo. disturbed: a file that is there once the network is not as it
    was, which the second step waits for. at_the_end: called while all ranks are still connected.
    """
    import torch.distributed as dist

    from pipecomp import initialize
    from pipecomp.tls.process_group import current_mesh
    from tests.models import ds_config, gpt2, samples

    if keys is not None:
        os.environ["PIPECOMP_KEYS"] = f"{keys}/rank-{rank}"
    section = {**AQSGD, "transport": {"timeout_s": timeout_s}}
    engine = initialize(gpt2(), num_stages=world, config=ds_config(section), training_data=samples())
    losses = []
    for step in range(steps):
        note(step)
        if disturbed is not None and step == 1:
            until(Path(disturbed).exists)
        losses.append(float(engine.train_batch()))
    at_the_end()
    engine.close()
    mesh = current_mesh() if keys is not None else None
    found = {"losses": losses, "backend": dist.get_backend(), "routes": {}, "healed": 0, "lost_s": 0.0}
    if mesh is not None:
        mesh.close()
        connections = [connection.resumable for connection in mesh.connections.values()]
        found |= {
            "routes": dict(mesh.routes),
            "healed": sum(connection.reconnects for connection in connections),
            "lost_s": max(connection.downtime_s for connection in connections),
        }
    return found


TEXT = "a sample's text, which nobody else must read. " * 20


def says_things(rank: int, world: int, note: Any, keys: str | None, steps: int, timeout_s: float) -> list[bytes]:
    """Train, tell the other ranks a text, and return what this rank's packets begin with and hold."""
    import torch.distributed as dist

    from pipecomp.stages.link.gloo import GlooTransport
    from pipecomp.stages.link.tls import TlsTransport

    seen: list[bytes] = []
    for transport in (GlooTransport, TlsTransport):

        def send(self: Any, packet: Any, real: Any = transport.send) -> None:
            if packet.size > 400 and len(seen) < 8:
                seen.extend((packet[:6].tobytes(), packet[300:332].tobytes()))
            real(self, packet)

        transport.send = send
    tell = partial(dist.all_gather_object, [None] * world, TEXT)
    trains_closed(rank, world, note, keys, steps, timeout_s, at_the_end=tell)
    return seen
