"""Processes that join over TLS: which keys, which address, and torch's functions on top."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from pipecomp.distributed import rendezvous
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import ConfigError
from tests.limits import HANG_S
from tests.tls.meshes import keys_for


def section(**transport: object) -> dict:
    return {"pipecomp": {"transport": transport}}


@pytest.mark.parametrize(
    ("config", "environment", "keys"),
    [
        (None, None, None),
        (None, "E", "E"),
        ({}, "E", "E"),
        (section(), None, None),
        (section(backend="auto"), "E", "E"),
        (section(backend="gloo"), "E", None),
        (section(backend="tls"), "E", "E"),
        (section(backend="tls", keys="F"), "E", "F"),
        (section(backend="tls", keys="F"), None, "F"),
    ],
)
def test_which_keys(monkeypatch, config, environment, keys):
    monkeypatch.delenv(rendezvous.KEYS, raising=False)
    if environment:
        monkeypatch.setenv(rendezvous.KEYS, environment)
    assert rendezvous.wanted_keys(config) == keys


def test_tls_without_keys_is_named(monkeypatch):
    monkeypatch.delenv(rendezvous.KEYS, raising=False)
    with pytest.raises(ConfigError, match=r"transport\.keys: got None, allowed: a folder of keys .* in PIPECOMP_KEYS"):
        rendezvous.wanted_keys(section(backend="tls"))


def test_where_the_ranks_meet(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "2001:db8::1")
    monkeypatch.setenv("MASTER_PORT", "29400")
    for name in (rendezvous.ADDRESS, rendezvous.LISTEN, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    found = rendezvous.meeting(1, 4)
    assert (str(found.address), found.listen, found.quiet) == ("[2001:db8::1]:29400", None, False)
    monkeypatch.setenv(rendezvous.LISTEN, "none")
    assert rendezvous.meeting(1, 4).quiet
    monkeypatch.setenv(rendezvous.LISTEN, "10.0.0.7:5")
    assert str(rendezvous.meeting(1, 4).listen) == "10.0.0.7:5"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(ConfigError, match=r"PIPECOMP_ADDRESS: .* MASTER_PORT is torchrun's own"):
        rendezvous.meeting(1, 4)
    monkeypatch.setenv(rendezvous.ADDRESS, "first:29401")
    assert str(rendezvous.meeting(1, 4).address) == "first:29401"
    monkeypatch.setenv(rendezvous.ADDRESS, "first")
    with pytest.raises(ConfigError, match="HOST:PORT"):
        rendezvous.meeting(1, 4)
    monkeypatch.delenv(rendezvous.ADDRESS)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    for port in ("", "first"):
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(ConfigError, match=r"PIPECOMP_ADDRESS: got None.* or MASTER_ADDR and MASTER_PORT"):
            rendezvous.meeting(1, 4)


@pytest.mark.parametrize(
    ("address", "public"),
    [("127.0.0.1", False), ("10.1.2.3", False), ("192.168.1.1", False), ("100.64.0.1", False), ("fd00::1", False),
     ("8.8.8.8", True), ("2606:4700::1", True)],
)  # fmt: skip
def test_gloo_at_a_public_address(monkeypatch, address, public):
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setattr(rendezvous, "gloo_address", lambda: "127.0.0.1")
    rendezvous.check_network(True)
    if public:
        with pytest.raises(ConfigError, match=r"'tls' at .*a public address.*trusted_network"):
            rendezvous.check_network(False)
    else:
        rendezvous.check_network(False)


def test_gloos_own_address_counts_too(monkeypatch):
    """The ranks may meet at another one."""
    monkeypatch.setenv("MASTER_ADDR", "10.1.2.3")
    monkeypatch.setattr(rendezvous, "gloo_address", lambda: "8.8.8.8")
    with pytest.raises(ConfigError, match=r"'tls' at 8\.8\.8\.8, a public address"):
        rendezvous.check_network(False)


def work(rank, world, note, keys):
    os.environ[rendezvous.KEYS] = f"{keys}/rank-{rank}"
    from pipecomp.distributed.rendezvous import all_ranks, collective_backend, start_processes
    from pipecomp.tls.process_group import current_mesh

    start_processes(3)
    total = torch.full((40_000,), rank + 1.0)
    dist.all_reduce(total)
    objects: list = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "pair": (rank, None)})
    box = [rank]
    dist.broadcast_object_list(box, src=1)
    pair = dist.new_group([0, 1], backend="tls")
    if rank < 2:
        dist.barrier(group=pair)
        dist.destroy_process_group(pair)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    model(torch.full((1, 3), rank + 1.0)).sum().backward()
    out = torch.empty(2 * world)
    dist.all_gather_into_tensor(out, torch.tensor([rank, -rank], dtype=torch.float32))
    ports = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=False).stdout
    listening = sum(f"pid={os.getpid()}," in line for line in ports.splitlines())
    found = (
        total[0].item(), objects, box, model.module.weight.grad[0, 0].item(), out.tolist(), dist.get_backend(),
        collective_backend(), all_ranks().all_gather_object(rank), listening, sys.getswitchinterval(),
    )  # fmt: skip
    dist.destroy_process_group()
    current_mesh().close()
    return found


@pytest.mark.ranks
def test_torchs_functions_go_over_the_mesh(tmp_path):
    keys_for(tmp_path, 3)
    found = run_ranks(3, work, str(tmp_path), timeout_s=HANG_S)
    for total, objects, box, grad, out, backend, collectives, ranks, listening, turn_s in found.values():
        assert total == 6.0
        assert objects == [{"rank": r, "pair": (r, None)} for r in range(3)]
        assert box == [1]
        assert grad == 2.0
        assert out == [0, 0, 1, -1, 2, -2]
        assert backend == collectives == "tls"
        assert ranks == [0, 1, 2]
        assert listening <= 1
        assert turn_s <= 1e-3
