"""Rendezvous of a run's processes, over gloo, NCCL or TLS, with checks of what would keep them apart.

Note:
    torch's client of the key-value store retries for as long as a rank may take to start, whatever answers at the port,
    and prints nothing where a firewall drops its packets. So the port is checked first, and a waiting rank prints for
    which rank it waits.
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import math
import os
import re
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from pipecomp.config import read_json_object
from pipecomp.distributed.collectives import exchange_objects_as_json
from pipecomp.distributed.consistency import AllRanks, check_byte_order, differences, versions
from pipecomp.distributed.heartbeat import (
    DEFAULT_TIMEOUT_S,
    StoreSilentError,
    call_store,
    lost_store,
    process_heartbeat,
    uncaught_error,
)
from pipecomp.distributed.launch_env import (
    JOIN_TIMEOUT_S,
    compared_variables,
    master_address,
    read_launch,
    restarts,
    retry_after_restart,
    watch_launcher,
)
from pipecomp.distributed.placement import (
    GLOO_VARIABLE,
    check_resolves,
    free_port,
    gloo_address,
    is_loopback,
    machine,
    own_gpu,
    prepare_network,
    ranks_on_cores,
    some_share,
    usable_cores,
)
from pipecomp.distributed.preemption import say_here
from pipecomp.errors import ConfigError, LinkError, LinkTimeoutError, require
from pipecomp.tls.handshake import Credentials
from pipecomp.tls.key_folder import KeyFolder
from pipecomp.tls.listener import ADDRESS_FORMAT, Address, AddressInUseError
from pipecomp.tls.mesh import JoinConfig, Mesh, connect_mesh
from pipecomp.tls.process_group import BACKEND, current_mesh, use_mesh
from pipecomp.utils.processes import return_large_blocks
from pipecomp.utils.sockets import describe_black_hole

KEYS, ADDRESS, LISTEN = "PIPECOMP_KEYS", "PIPECOMP_ADDRESS", "PIPECOMP_LISTEN"
CERTIFIED = "PIPECOMP_CERTIFIED_RANKS"  # see `certified_ranks`; set by `pipecomp up` after a lost machine
_NOWHERE = "none"
_NAME = "pipecomp/name"
_PORT_IN_USE = "EADDRINUSE"  # in torch's message
_POLL_S, _ASK_AGAIN_S = 0.02, 10.0
_CONNECT_S = 60.0  # for connections between ranks that have reached the store
_LARGE_BYTES, _LARGE_S = 10_000, 20.0  # more than a packet of 9000 bytes
_PROBE_S, _ANSWER_S = 5.0, 10.0
_END_S = 20.0  # torch checks its timeout only between attempts
_PATIENCE_S = 30.0
_SWITCH_S = 5e-4
_HOW_LONG = f"for up to {JOIN_TIMEOUT_S / 60:g} minutes"
_set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # the latter before torch 2.15


def ranks_here() -> int | None:
    """Return the number of ranks on this machine, None if the launcher has not set it.

    Note:
        LOCAL_SIZE, set by deepspeed, comes before torchrun's LOCAL_WORLD_SIZE: with `use_cpu` in TrainingArguments,
        accelerate ignores LOCAL_SIZE and sets LOCAL_WORLD_SIZE=1.
    """
    found = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE")
    return int(found) if found else None


def check_processes(key: str, stages: int) -> None:
    """Raise ConfigError unless the number of processes is a multiple of the stages. key: The setting for them."""
    world = dist.get_world_size()
    allowed = f"a divisor of the {world} processes of this run"
    if world == 1:
        allowed = f"1 in a single process; start one process for each stage, as with torchrun --nproc-per-node {stages}"
    require(world % stages == 0, key, stages, allowed)


def join_processes(config: Any = None) -> None:
    """Initialize torch.distributed from the launcher's variables, or for this process alone; may be called again.

    Processes that compute on the CPU share the cores of a machine or container evenly, unless OMP_NUM_THREADS is set,
    each has cores of its own, as under Slurm and mpirun, or torch.set_num_threads has set fewer. Rank 0 prints which
    environment variables differ between ranks. Freed blocks of memory go back to the system from 8 MiB on.

    Args:
        config: DeepSpeed's configuration, a dict or a JSON file; its "transport" decides on TLS, without it
            PIPECOMP_KEYS.

    Raises:
        ConfigError: RANK, WORLD_SIZE or a related variable is invalid.
        LinkError: On every rank, if the ranks have different versions or cannot reach each other.
        KeysError: This machine does not belong to the run.
    """
    exchange_objects_as_json()
    return_large_blocks()
    watch_launcher()
    if not dist.is_initialized():
        _join(config)
    _share_cores()


def _join(config: Any) -> None:
    if "RANK" not in os.environ:
        read_launch(os.environ)
        own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(own, MASTER_PORT=str(free_port()))
    rank, world = read_launch(os.environ).place
    if world == 1:
        check_byte_order()
        os.environ.setdefault("LOCAL_RANK", "0")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(free_port()))
        prepare_network()
        dist.init_process_group(collective_backend(), rank=0, world_size=1)
        return
    keys = wanted_keys(config)
    if keys is not None:
        _join_closed(keys, rank, world)
        return
    store, backend = _meet(rank, world)
    try:
        _initialize(store, backend, rank, world)
    except (RuntimeError, ValueError) as error:
        why = f"rank {rank} cannot connect to the other ranks: {first_line(error).rstrip('.')}"
        # After a restart the way is known to be good: a rank was lost meanwhile.
        kind = LinkTimeoutError if restarts() else LinkError
        raise kind(f"{why}. {_remedy(backend)}") from error


_neighbours: tuple[weakref.ref[Any], int] | None = None  # the process group, and the ranks on this rank's cores


def _share_cores() -> None:
    """Limit torch's threads to this rank's share of the cores; in a new process group, compare the environments."""
    global _neighbours
    group = distributed_c10d._get_default_group()
    if _neighbours is None or _neighbours[0]() is not group:
        sharing = 1
        if dist.get_world_size() > 1:
            ranks = all_ranks()
            sharing = ranks_on_cores(ranks)
            _report_differences(ranks.all_gather_object(compared_variables(os.environ)))
        _neighbours = weakref.ref(group), sharing
    if computes_on_cpu() and "OMP_NUM_THREADS" not in os.environ:
        share = max(1, usable_cores() // _neighbours[1])
        if share < torch.get_num_threads():
            torch.set_num_threads(share)


def _report_differences(variables: Sequence[Mapping[str, str]]) -> None:
    """Print on rank 0 the variables that are not the same on all ranks. variables: by rank."""
    found = differences(variables)
    if found and dist.get_rank() == 0:
        why = "results or speed may depend on the machine; export the same everywhere, or unset them"
        say_here(f"environment variables differ: {'; '.join(found)}: {why}")


def _remedy(backend: str) -> str:
    if backend == "nccl":
        return (
            "NCCL_DEBUG=WARN logs more. If each rank of a machine sees only its own GPU, as with srun "
            "--gpus-per-task, NCCL may be unable to connect them: set NCCL_P2P_DISABLE=1, or make all GPUs visible "
            "(srun --gpu-bind=none)"
        )
    return (
        f"gloo uses {gloo_address()} here: on each machine, {GLOO_VARIABLE} must name the interface towards the "
        "others, and all TCP ports between them must be open; `pipecomp doctor` finds out more"
    )


def _join_closed(keys: str, rank: int, world: int) -> None:
    """Join over TLS: the mesh carries the key-value store and all collectives."""
    earlier = current_mesh()
    if earlier is not None:
        earlier.close()
    where = meeting(rank, world).address
    if rank != 0:
        check_resolves(ADDRESS if os.environ.get(ADDRESS) else "MASTER_ADDR", where.host)
    whom = f"the {world - 1} others at {where}" if rank == 0 else f"rank 0 at {where}, and for all others"
    with warn_if_slow(f"waits for {whom}, {_HOW_LONG}; rank 0's machine must let that port in"):
        mesh = join_mesh(keys, rank, world, wait_s=JOIN_TIMEOUT_S)
    atexit.register(_close_mesh, mesh)
    process_heartbeat(mesh.store, rank, world, resumable=True)
    together = AllRanks(rank, world, mesh.store, wait_s=_CONNECT_S)
    with together.collective_errors():
        check_byte_order()
    together.assert_same_on_all_ranks(versions())
    _take_places(together)
    dist.init_process_group(BACKEND, store=mesh.store, rank=rank, world_size=world, timeout=default_pg_timeout)


def _close_mesh(mesh: Mesh) -> None:
    """Close at exit, with the exception that ends the process as the reason."""
    error = uncaught_error()
    mesh.close("" if error is None else f"{type(error).__name__}: {error}")


def find_store(rank: int, world: int, *, wait_s: float) -> Any:
    """Return the key-value store at MASTER_ADDR and MASTER_PORT once all ranks have connected to it.

    Raises:
        ConfigError: The address or port is invalid, or the address does not resolve.
        LinkTimeoutError: Not all ranks connect within `wait_s` seconds.
        LinkError: Another program uses the port.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    require(host, "MASTER_ADDR", host, "the name or address of rank 0's machine, the same on all ranks")
    known = port.isdecimal() and 0 < int(port) < 65536
    require(known, "MASTER_PORT", port, "a port of rank 0's machine, from 1 to 65535, the same on all ranks")
    prepare_network()
    host = os.environ["MASTER_ADDR"]
    where = f"{host} port {port}"
    if rank != 0:
        check_master_port(host, int(port), rank)
    try:
        return retry_after_restart(
            lambda: next(iter(rendezvous("env://", rank, world, timeout=timedelta(seconds=wait_s))))[0],
            lambda error: _PORT_IN_USE in str(error),
        )
    except (RuntimeError, ValueError) as error:
        if _PORT_IN_USE in str(error):
            raise LinkError(
                f"rank {rank} cannot listen at port {port}: another program uses it, perhaps a process of an earlier "
                "run. Give all ranks another MASTER_PORT, or end that program"
            ) from error
        what = f"rank {rank} did not find rank 0" if rank else f"rank 0 waited in vain for {world - 1} others"
        raise LinkTimeoutError(
            f"{what} at {where}: {first_line(error).rstrip('.')}. Give all ranks the same MASTER_ADDR "
            "and MASTER_PORT; rank 0's machine must let that port in"
        ) from error


def _meet(rank: int, world: int) -> tuple[Any, str]:
    """Find the store and check the ranks' consistency before they connect; returns the store and the backend."""
    where = f"{os.environ.get('MASTER_ADDR')} port {os.environ.get('MASTER_PORT')}"
    whom = f"the {world - 1} others at {where}" if rank == 0 else f"rank 0 at {where}"
    same = "All need the same MASTER_ADDR and MASTER_PORT, and rank 0's machine must let that port in"
    with warn_if_slow(f"waits for {whom}, {_HOW_LONG}. {same}"):
        store = find_store(rank, world, wait_s=JOIN_TIMEOUT_S)
    with warn_if_slow(f"has found the store, and waits for the ranks that have not connected, {_HOW_LONG}"):
        store = _fresh(store, rank, world)
    process_heartbeat(store, rank, world)
    together = AllRanks(rank, world, store, wait_s=_CONNECT_S)
    machines = _take_places(together)
    address, backend, gpu = "127.0.0.1", "gloo", None
    with together.collective_errors():
        check_byte_order()
        if machines[rank] != machines[0]:
            check_large_packets(store, rank)
        address, backend = gloo_address(), collective_backend()
        gpu = own_gpu(int(os.environ["LOCAL_RANK"])) if backend == "nccl" else None
    together.assert_same_on_all_ranks(versions())
    places = together.all_gather_object([address, backend, None if gpu is None else gpu.whole])
    lonely = [r for r, (used, *_) in enumerate(places) if is_loopback(used)]
    if lonely and len(set(machines)) > 1:
        together.leave()
        used = "; ".join(f"rank {r} {places[r][0]}" for r in lonely)
        raise LinkError(
            f"gloo would use addresses that other machines cannot reach: {used}. Set {GLOO_VARIABLE} there to the "
            "interface towards the others"
        )
    return store, common_backend([chosen for _, chosen, _ in places], [taken for *_, taken in places])


def check_large_packets(store: Any, rank: int) -> None:
    """Raise LinkError if a value larger than a packet does not pass between this rank and rank 0, which has the store.

    The message itself must fit into a small packet: it goes to the other ranks through the same store.
    """
    own = store.clone()  # the connection that stands still is of no use afterwards

    def send_and_read() -> None:
        own.set(f"{_NAME}/large/{rank}", "." * _LARGE_BYTES)
        own.get(f"{_NAME}/large/{rank}")

    try:
        call_store(send_and_read, _LARGE_S)
    except StoreSilentError as error:
        raise LinkError(describe_black_hole(rank, 0, os.environ["MASTER_ADDR"])) from error


def _take_places(together: AllRanks) -> list[str]:
    """Return the machine of each rank; set LOCAL_RANK and LOCAL_WORLD_SIZE if the launcher has not.

    Note:
        Kubernetes' operator sets only RANK and WORLD_SIZE. Each machine needs a first rank for its checkpoints and
        messages.
    """
    machines: list[str] = together.all_gather_object(machine())
    here = [rank for rank, name in enumerate(machines) if name == machines[together.rank]]
    os.environ.setdefault("LOCAL_RANK", str(here.index(together.rank)))
    if ranks_here() is None:
        os.environ["LOCAL_WORLD_SIZE"] = str(len(here))
    return machines


def _fresh(store: Any, rank: int, world: int) -> Any:
    """Agree on an unused prefix of the store.

    Raises LinkTimeoutError if a rank does not connect, ConfigError if rank 0 has another WORLD_SIZE, PeerLostError if
    the store is gone.

    Note:
        torchrun's store outlives the ranks: after a restart it holds their old entries, such as addresses of ended
        processes. So rank 0 draws a name, and sends it in answer to a request with a random key from each other rank. A
        rank repeats its request, in case an earlier rank 0 has answered.
    """
    name = secrets.token_hex(8) if rank == 0 else ""
    question, asked = "", -_ASK_AGAIN_S
    waiting = set(range(1, world)) if rank == 0 else set()
    passed_s, began = 0.0, time.monotonic()

    def look() -> str | None:
        """Ask or answer once; returns the number of ranks that rank 0 has counted, None as long as it waits."""
        nonlocal name, question, asked, waiting
        if rank == 0:
            for other in range(1, world):
                if store.check([f"{_NAME}/{other}"]):
                    store.set(f"{_NAME}/{store.get(f'{_NAME}/{other}').decode()}", name)
            waiting = {other for other in waiting if not store.check([f"{_NAME}/{name}/{other}"])}
            if not waiting:
                store.set(f"{_NAME}/{name}/go", str(world))
        elif passed_s - asked >= _ASK_AGAIN_S:
            question, asked = secrets.token_hex(8), passed_s
            store.set(f"{_NAME}/{rank}", question)
        elif store.check([f"{_NAME}/{question}"]):
            name = store.get(f"{_NAME}/{question}").decode()
            store.set(f"{_NAME}/{name}/{rank}", "")
        found = bool(name) and store.check([f"{_NAME}/{name}/go"])
        return store.get(f"{_NAME}/{name}/go").decode() if found else None

    while (passed_s := time.monotonic() - began) < JOIN_TIMEOUT_S:
        with lost_store():
            counted = call_store(look, DEFAULT_TIMEOUT_S)
        if counted is not None:
            # Older versions write nothing there; versions are compared next.
            require(counted in ("", str(world)), "WORLD_SIZE", world, f"{counted}, as on rank 0")
            return dist.PrefixStore(f"pipecomp/{name}", store)
        time.sleep(_POLL_S if passed_s < _ASK_AGAIN_S else 10 * _POLL_S)
    raise LinkTimeoutError(
        f"rank {min(waiting, default=0)} did not reach the start of the run within {JOIN_TIMEOUT_S:g} s"
    )


def collective_backend() -> str:
    """Return the backend of torch's collectives; before the processes have joined, this rank's choice.

    It is gloo on CPUs, otherwise the device's own. The ranks check together whether they share a GPU.
    """
    if dist.is_initialized():
        return str(dist.get_backend())
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None or os.environ.get("DS_ACCELERATOR") == "cpu":
        return "gloo"
    local = ranks_here() or int(os.environ["WORLD_SIZE"])
    if device.type != "cuda" and local > torch.accelerator.device_count():  # other devices have no names to compare
        return "gloo"
    return dist.get_default_backend_for_device(device)


def common_backend(chosen: Sequence[str], gpus: Sequence[str | None]) -> str:
    """Return the backend for all ranks: gloo unless all have chosen the same and none share a GPU.

    Args:
        chosen: Choices by rank.
        gpus: Names of the physical GPUs by rank. NCCL rejects two ranks on one.
    """
    return chosen[0] if len(set(chosen)) == 1 and not some_share(gpus) else "gloo"


def _initialize(store: Any, backend: str, rank: int, world: int) -> None:
    """Initialize the process group of several ranks."""
    connecting = timedelta(seconds=_CONNECT_S)
    if backend == "nccl":
        # Note: not init_process_group's device_id. With it, ranks outside of a new group split NCCL's communicator and
        # wait for those inside, which never do so for a gloo group.
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=connecting)
    if backend == "nccl":
        dist.all_reduce(torch.zeros(1, device="cuda"))  # connects now, so that connection errors are raised here
    # A collective may wait longer than a connection: a rank may save or evaluate.
    _set_timeout(default_pg_timeout, dist.group.WORLD)


def first_line(error: Exception) -> str:
    """Return the first line of an error of torch without the paths of gloo's source files, and its advice."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0].partition(". This is typically caused")[0]
    return re.sub(r"\[/\S+:\d+\] ", "", text)[:300]


@contextlib.contextmanager
def warn_if_slow(text: str) -> Iterator[None]:
    """Print to standard error what this rank waits for if the body takes long."""
    timer = threading.Timer(_PATIENCE_S, say_here, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def silence_stderr() -> Iterator[None]:
    """Discard standard error during the body: torch's C++ code prints 20 lines of stack for each attempt."""
    before = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def check_master_port(host: str, port: int, rank: int) -> None:
    """Raise LinkError if something other than torch's key-value store listens at a port.

    Args:
        host: MASTER_ADDR.
        port: MASTER_PORT.
        rank: This rank, for the error.
    """
    try:
        socket.create_connection((host, port), _PROBE_S).close()
    except OSError:
        return  # rank 0 may start later; torch waits for it
    limit = timedelta(seconds=_ANSWER_S)

    def ask() -> None:
        store = dist.TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
        store.check(["pipecomp/there"])

    try:
        with silence_stderr():
            call_store(ask, _END_S)
    except (RuntimeError, ValueError) as error:
        with contextlib.suppress(OSError):  # if rank 0 has ended meanwhile, torch waits for the next one
            socket.create_connection((host, port), _PROBE_S).close()
            raise LinkError(
                f"rank {rank}: the program at {host} port {port} is not rank 0 of this run: it does not answer like "
                "torch's key-value store. Another program uses that port, or MASTER_ADDR is another machine's: "
                "give all ranks the same MASTER_ADDR, and a MASTER_PORT that is free on rank 0's machine"
            ) from error


def wanted_keys(config: Any = None) -> str | None:
    """Return the folder of keys for joining over TLS, None without TLS.

    Args:
        config: DeepSpeed's configuration, a dict or a JSON file. Its "transport" decides, without it the environment.

    Raises:
        ConfigError: The backend is "tls", and no folder is given.
    """
    named = os.environ.get(KEYS) or None
    if config is None:
        return named
    try:
        whole = config if isinstance(config, Mapping) else read_json_object("config", config)
    except ConfigError:
        return named  # the error is raised once all ranks have joined and can learn of it
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


def meeting(rank: int, world: int) -> JoinConfig:
    """Read the addresses for joining over TLS: PIPECOMP_ADDRESS, or MASTER_ADDR and MASTER_PORT. Raises ConfigError."""
    text = os.environ.get(ADDRESS)
    if not text:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            raise ConfigError(ADDRESS, text, f"{ADDRESS_FORMAT}, of rank 0's machine: MASTER_PORT is torchrun's own")
        host, port = master_address(os.environ), os.environ.get("MASTER_PORT", "")
        if not host or not port.isdecimal():
            raise ConfigError(ADDRESS, text, f"{ADDRESS_FORMAT}, of rank 0's machine, or MASTER_ADDR and MASTER_PORT")
        text = str(Address(host, int(port)))
    listen = os.environ.get(LISTEN) or None
    return JoinConfig(
        rank,
        world,
        Address.parse(text, ADDRESS),
        listen=None if listen in (None, _NOWHERE) else Address.parse(str(listen), LISTEN),
        quiet=listen == _NOWHERE,
        machine=machine(),
    )


def join_mesh(keys: str, rank: int, world: int, *, wait_s: float) -> Mesh:
    """Connect to all other ranks over TLS, and use the connections for torch's process groups.

    Note:
        It shortens the interpreter's switch interval. Each TLS record of 16 KiB needs the GIL; next to a busy main
        thread, 256 KiB take 11 ms with the default interval of 5 ms and 4.5 ms with this one.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
    config, credentials = meeting(rank, world), Credentials(KeyFolder(keys), certified_ranks(world))
    mesh = retry_after_restart(
        lambda: connect_mesh(config, credentials, wait_s=wait_s),
        lambda error: rank == 0 and isinstance(error, AddressInUseError),
    )
    use_mesh(mesh)
    return mesh


def certified_ranks(world: int) -> list[int]:
    """Read the certificates' numbers of all ranks, where they are others; [] if not. Raises ConfigError."""
    text = os.environ.get(CERTIFIED, "")
    numbers = text.split(",") if text else []
    valid = not numbers or (len(numbers) == world and all(number.isdecimal() for number in numbers))
    require(valid, CERTIFIED, text, f"{world} numbers with commas between them")
    return [int(number) for number in numbers]


def check_network(trusted: bool) -> None:
    """Raise ConfigError if gloo, without encryption or authentication, uses a public address."""
    if trusted:
        return
    places = [gloo_address()]
    try:
        found = socket.getaddrinfo(os.environ.get("MASTER_ADDR", "127.0.0.1"), None, type=socket.SOCK_STREAM)
        places += [str(where[4][0]) for where in found]
    except OSError:
        pass  # the ranks have connected already
    public = [place for place in places if ipaddress.ip_address(place.split("%")[0]).is_global]
    if public:
        raise ConfigError(
            "transport.backend",
            "gloo",
            f"'tls' at {public[0]}, a public address: over gloo anybody on the internet may read and join the run. "
            'With "transport": {"trusted_network": true} gloo is used anyway',
        )


def start_processes(seed: int | None = None, config: Any = None) -> None:
    """Join the other processes of this run as `join_processes` does, and seed torch; call it first, on every process.

    Args:
        seed: Seed of torch's generator, combined with the rank. None means 0.
        config: DeepSpeed's configuration, a dict or a JSON file; its "transport" decides on TLS, without it
            PIPECOMP_KEYS.

    Raises:
        LinkError: On every rank, if the ranks have different versions or cannot reach each other.
        KeysError: This machine's keys do not allow it to join.
    """
    join_processes(config)
    torch.manual_seed((seed or 0) * 65536 + dist.get_rank())


def all_ranks() -> AllRanks:
    """Start a sequence of exchanges between all ranks of a started run; every rank must call this.

    Returns:
        The sequence. A rank may take any time to answer while its heartbeats arrive: it may load data, or send a state.
        If it ends before it has answered, the ranks that wait for it raise an error.
    """
    return AllRanks(missed=process_heartbeat().missed, wait_s=math.inf)


def computes_on_cpu() -> bool:
    """Return whether stages compute on the CPU: without an NVIDIA GPU, or with DS_ACCELERATOR=cpu."""
    return os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available()
