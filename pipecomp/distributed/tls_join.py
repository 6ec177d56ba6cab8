"""Joining over TLS: which keys, where the ranks meet, and what is refused where a network is open to everybody."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

from pipecomp.config import read_json_object
from pipecomp.distributed.network_interfaces import gloo_address
from pipecomp.errors import ConfigError
from pipecomp.tls.handshake import Trust
from pipecomp.tls.key_folder import KeyFolder
from pipecomp.tls.listener import Address
from pipecomp.tls.mesh import Meeting, Mesh, meet
from pipecomp.tls.process_group import use_mesh

KEYS, ADDRESS, LISTEN = "PIPECOMP_KEYS", "PIPECOMP_ADDRESS", "PIPECOMP_LISTEN"
_NOWHERE = "none"
_SWITCH_S = 5e-4
_HOST_PORT = "HOST:PORT, as in 192.0.2.1:29400 or [2001:db8::1]:29400"


def wanted_keys(config: Any = None) -> str | None:
    """The folder of keys that this process should join with; None for gloo.

    config: DeepSpeed's, a dict or a JSON file, whose "transport" asks for a backend; else the environment decides.
    """
    named = os.environ.get(KEYS) or None
    if config is None:
        return named
    try:
        whole = config if isinstance(config, Mapping) else read_json_object("config", config)
    except ConfigError:
        return named  # the other ranks have to be told, which they are when all have joined
    section = whole.get("pipecomp")
    transport = section.get("transport") if isinstance(section, Mapping) else None
    if not isinstance(transport, Mapping):
        return named
    backend, folder = transport.get("backend", "auto"), transport.get("keys")
    if backend != "tls":
        return None if backend == "gloo" else named
    found = folder if isinstance(folder, str) and folder else named
    if found is None:
        raise ConfigError("transport.keys", folder, f"a folder of keys with backend 'tls', here or in {KEYS}")
    return found


def meeting(rank: int, world: int) -> Meeting:
    """Where the ranks meet: PIPECOMP_ADDRESS, or MASTER_ADDR and MASTER_PORT. Raises ConfigError."""
    text = os.environ.get(ADDRESS)
    if not text:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            raise ConfigError(ADDRESS, text, f"{_HOST_PORT}, of rank 0's machine: MASTER_PORT is torchrun's own")
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
        if not host or not port.isdecimal():
            raise ConfigError(ADDRESS, text, f"{_HOST_PORT}, of rank 0's machine, or MASTER_ADDR and MASTER_PORT")
        text = str(Address(host, int(port)))
    listen = os.environ.get(LISTEN) or None
    return Meeting(
        rank,
        world,
        _address(ADDRESS, text),
        listen=None if listen in (None, _NOWHERE) else _address(LISTEN, str(listen)),
        quiet=listen == _NOWHERE,
    )


def join_mesh(keys: str, rank: int, world: int, *, wait_s: float) -> Mesh:
    """Connect to all other ranks, and let torch's process groups go over these connections.

    Threads of the interpreter take turns more often from now on: each record of TLS, 16 KiB, needs a turn, and beside a
    busy main thread the usual 5 ms let 256 KiB take 11 ms where these take 4.5.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
    made = meet(meeting(rank, world), Trust(KeyFolder(keys)), wait_s=wait_s)
    use_mesh(made)
    return made


def check_network(trusted: bool) -> None:
    """ConfigError if gloo, which anybody can read and join, uses an address that the whole internet may reach."""
    if trusted:
        return
    places = [gloo_address()]
    try:
        found = socket.getaddrinfo(os.environ.get("MASTER_ADDR", "127.0.0.1"), None, type=socket.SOCK_STREAM)
        places += [str(where[4][0]) for where in found]
    except OSError:
        pass  # the ranks have met: whatever it was, it is no address of now
    public = [place for place in places if ipaddress.ip_address(place.split("%")[0]).is_global]
    if public:
        raise ConfigError(
            "transport.backend",
            "gloo",
            f"'tls' at {public[0]}, an address that the whole internet may reach: over gloo anybody there can read "
            'along and join. With "transport": {"trusted_network": true} gloo is used anyway',
        )


def _address(key: str, text: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError:
        raise ConfigError(key, text, _HOST_PORT) from None
