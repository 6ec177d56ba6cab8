"""Several ranks of a mesh in one process, each with keys of its own."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipecomp.distributed.placement import free_port
from pipecomp.errors import PeerLostError
from pipecomp.tls import certificates
from pipecomp.tls.handshake import Credentials
from pipecomp.tls.key_folder import KeyFolder, create_keys, issue_certificate
from pipecomp.tls.listener import Address
from pipecomp.tls.mesh import JoinConfig, Mesh, connect_mesh
from pipecomp.tls.stream import close_socket

WAIT_S = 120.0


def add_machine(authority: KeyFolder, path: Path, name: str, ranks: tuple[int, ...]) -> KeyFolder:
    """Another machine's keys, as `pipecomp keys join` makes them."""
    folder, key = KeyFolder(path), certificates.generate_key()
    folder.create()
    folder.write("machine.key", certificates.key_to_pem(key))
    folder.write("machine.pem", issue_certificate(authority, key.public_key(), name, ranks))
    for file in ("authority.pem", "revoked.pem"):
        folder.write(file, authority.read(file))
    return folder


def keys_for(path: Path, world: int) -> list[KeyFolder]:
    """A folder for each rank of a run."""
    first = create_keys(path / "rank-0", machine="machine-0")
    return [first, *(add_machine(first, path / f"rank-{r}", f"machine-{r}", (r,)) for r in range(1, world))]


def free_address() -> Address:
    """Return an address at which nothing listens."""
    return Address("127.0.0.1", free_port())


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return the results of all, run at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(WAIT_S) for future in [pool.submit(call) for call in calls]]


def meet_all(folders: Sequence[KeyFolder], quiet: Sequence[int] = ()) -> list[Mesh]:
    """A mesh's ranks; quiet: those that do not listen."""
    address, world = free_address(), len(folders)

    def one(rank: int) -> Mesh:
        meeting = JoinConfig(rank, world, address, quiet=rank in quiet)
        return connect_mesh(meeting, Credentials(folders[rank]), wait_s=WAIT_S)

    return together([lambda rank=rank: one(rank) for rank in range(world)])


def kill(mesh: Mesh) -> None:
    """Close everything that ends with a rank's killed process."""
    for part in (mesh._listener, mesh._routes):
        if part is not None:
            part.close()
    for connection in mesh.connections.values():
        connection.fail(PeerLostError("killed", mesh.rank))


def close_all(meshes: Sequence[Mesh]) -> None:
    """End them together."""
    together([mesh.close for mesh in meshes])


class Trouble:
    """Closes connections in turn at random instants, until it is told to stop."""

    def __init__(self, *connections, seed: int) -> None:
        self._draw, self._connections = random.Random(seed), itertools.cycle(connections)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._over.wait(self._draw.uniform(0.05, 0.25)):
            close_socket(next(self._connections).resumable._stream.sock)

    def __enter__(self) -> Trouble:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
