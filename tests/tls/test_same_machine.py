"""Ranks of one machine that does not listen connect within it, not through rank 0."""

from __future__ import annotations

import pytest

from pipecomp.tls.handshake import Credentials
from pipecomp.tls.mesh import JoinConfig, Mesh, connect_mesh
from pipecomp.tls.routes import DIRECT, RELAYED
from tests.tls.meshes import WAIT_S, free_address, keys_for, together

MACHINES = ("first", "second", "second", "third", "")


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> list[Mesh]:
    folders, address = keys_for(tmp_path_factory.mktemp("keys"), len(MACHINES)), free_address()

    def one(rank: int) -> Mesh:
        meeting = JoinConfig(rank, len(MACHINES), address, quiet=rank > 0, machine=MACHINES[rank])
        return connect_mesh(meeting, Credentials(folders[rank]), wait_s=WAIT_S)

    meshes: list[Mesh] = together([lambda rank=rank: one(rank) for rank in range(len(MACHINES))])
    return meshes


def test_routes_of_ranks_that_do_not_listen(met: list[Mesh]) -> None:
    routes = {(mesh.rank, other): route for mesh in met for other, route in mesh.routes.items() if mesh.rank and other}
    assert {pair for pair, route in routes.items() if route == DIRECT} == {(1, 2), (2, 1)}
    assert {route for pair, route in routes.items() if pair not in ((1, 2), (2, 1))} == {RELAYED}
    together([mesh.close for mesh in met])
