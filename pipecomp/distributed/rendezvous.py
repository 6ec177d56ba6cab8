"""Joining the other processes of a run, and finding out before gloo does what would keep them apart."""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import os
import re
import secrets
import socket
import sys
import threading
import time
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
from pipecomp.distributed.consistency import COMING_S, AllRanks, check_byte_order, versions
from pipecomp.distributed.heartbeat import call_store, process_heartbeat
from pipecomp.distributed.launch_env import read_launch, watch_launcher
from pipecomp.distributed.placement import (
    GLOO_VARIABLE,
    free_port,
    gloo_address,
    interface_towards,
    is_loopback,
    machine,
    own_gpu,
    ranks_on_cores,
    some_share,
    usable_cores,
)
from pipecomp.distributed.preemption import say_here
from pipecomp.errors import ConfigError, LinkError, LinkTimeoutError, require
from pipecomp.tls.handshake import Credentials
from pipecomp.tls.key_folder import KeyFolder
from pipecomp.tls.listener import ADDRESS_FORMAT, Address
from pipecomp.tls.mesh import JoinConfig, Mesh, connect_mesh
from pipecomp.tls.process_group import BACKEND, current_mesh, use_mesh

_NAME = "pipecomp/name"
_TAKEN = "EADDRINUSE"  # in torch's words
_POLL_S, _ASK_AGAIN_S = 0.02, 10.0
_CONNECT_S = 60.0  # for connections among ranks that have met already
_HOW_LONG = f"for up to {COMING_S / 60:g} minutes"
_set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # the latter before torch 2.15


def ranks_here() -> int | None:
    """How many ranks share this machine, as the launcher says; torchrun and deepspeed name it differently.

    Deepspeed's LOCAL_SIZE comes first: accelerate does not know it, and then writes LOCAL_WORLD_SIZE=1 into the
    environment of a process whose TrainingArguments have use_cpu.
    """
    found = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE")
    return int(found) if found else None


def check_processes(key: str, stages: int) -> None:
    """Raise ConfigError unless this run's processes can be so many stages. key: what says how many."""
    world = dist.get_world_size()
    allowed = f"a divisor of the {world} processes of this run"
    if world == 1:
        allowed = f"1 in a single process; start one for each stage, as with torchrun --nproc-per-node {stages}"
    require(world % stages == 0, key, stages, allowed)


def join_processes(config: Any = None) -> None:
    """Initialize torch.distributed as the launcher says, or for this process alone; again is harmless.

    config: DeepSpeed's, a dict or a JSON file, for what its "transport" says of TLS; without it PIPECOMP_KEYS decides.
    Raises ConfigError for RANK or WORLD_SIZE, LinkError on every rank where the ranks have different versions, or
    cannot reach each other, and KeysError where this machine does not belong to the run.
    """
    exchange_objects_as_json()
    watch_launcher()
    if dist.is_initialized():
        return
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
        raise LinkError(f"{why}. {_remedy(backend)}") from error


def _remedy(backend: str) -> str:
    if backend == "nccl":
        return (
            "NCCL_DEBUG=WARN says more. Where each rank of a machine sees its own GPU alone, as with srun "
            "--gpus-per-task, NCCL may find no way between them: set NCCL_P2P_DISABLE=1, or let all see all "
            "(srun --gpu-bind=none)"
        )
    return (
        f"gloo takes {gloo_address()} here: {GLOO_VARIABLE} must name the interface that leads to the others, on each "
        "machine, and all TCP ports between them must be open; `pipecomp doctor` tells more"
    )


def _join_closed(keys: str, rank: int, world: int) -> None:
    """Join over TLS: the key-value store and all collectives go over the mesh."""
    earlier = current_mesh()
    if earlier is not None:
        earlier.close()
    where = meeting(rank, world).address
    whom = f"the {world - 1} others at {where}" if rank == 0 else f"rank 0 at {where}, and for all others"
    with said_if_long(f"waits for {whom}, {_HOW_LONG}; rank 0's machine must let that port in"):
        mesh = join_mesh(keys, rank, world, wait_s=COMING_S)
    atexit.register(mesh.close)
    process_heartbeat(mesh.store, rank, world, resumable=True)
    together = AllRanks(rank, world, mesh.store, wait_s=_CONNECT_S)
    with together.collective_errors():
        check_byte_order()
    together.assert_same_on_all_ranks(versions())
    _take_places(together)
    dist.init_process_group(BACKEND, store=mesh.store, rank=rank, world_size=world, timeout=default_pg_timeout)


def find_store(rank: int, world: int, *, wait_s: float) -> Any:
    """Give the key-value store at MASTER_ADDR and MASTER_PORT, to which all ranks have come.

    Raises ConfigError for an address or port that is none, LinkTimeoutError if they do not within `wait_s` seconds, and
    LinkError if something else uses that port.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    require(host, "MASTER_ADDR", host, "the name or address of rank 0's machine, the same on all ranks")
    known = port.isdecimal() and 0 < int(port) < 65536
    require(known, "MASTER_PORT", port, "a port of rank 0's machine, from 1 to 65535, the same on all ranks")
    where = f"{host} port {port}"
    if rank != 0:
        check_meeting_point(host, int(port), rank)
    try:
        return next(iter(rendezvous("env://", rank, world, timeout=timedelta(seconds=wait_s))))[0]
    except (RuntimeError, ValueError) as error:
        if _TAKEN in str(error):
            raise LinkError(
                f"rank {rank} cannot listen at port {port}, which something else uses: another run, perhaps, or what "
                "is left of one. Give all ranks another MASTER_PORT, or end that"
            ) from error
        what = f"rank {rank} did not find rank 0" if rank else f"rank 0 waited in vain for {world - 1} others"
        raise LinkTimeoutError(
            f"{what} at {where}: {first_line(error).rstrip('.')}. Give all ranks the same MASTER_ADDR "
            "and MASTER_PORT; rank 0's machine must let that port in"
        ) from error


def _meet(rank: int, world: int) -> tuple[Any, str]:
    """Compare what must fit before the ranks connect; the key-value store that they met in, and the backend of all."""
    where = f"{os.environ.get('MASTER_ADDR')} port {os.environ.get('MASTER_PORT')}"
    whom = f"the {world - 1} others at {where}" if rank == 0 else f"rank 0 at {where}"
    same = "All need the same MASTER_ADDR and MASTER_PORT, and rank 0's machine must let that port in"
    with said_if_long(f"waits for {whom}, {_HOW_LONG}. {same}"):
        store = find_store(rank, world, wait_s=COMING_S)
    with said_if_long(f"has found where the ranks meet, and waits for those that have not come, {_HOW_LONG}"):
        store = _fresh(store, rank, world)
    process_heartbeat(store, rank, world)
    together = AllRanks(rank, world, store, wait_s=_CONNECT_S)
    machines = _take_places(together)
    address, backend, gpu = "127.0.0.1", "gloo", None
    with together.collective_errors():
        check_byte_order()
        address, backend = gloo_address(), collective_backend()
        gpu = own_gpu(int(os.environ["LOCAL_RANK"])) if backend == "nccl" else None
    together.assert_same_on_all_ranks(versions())
    places = together.all_gather_object([address, backend, None if gpu is None else gpu.whole])
    lonely = [r for r, (used, *_) in enumerate(places) if is_loopback(used)]
    if lonely and len(set(machines)) > 1:
        together.leave()
        used = "; ".join(f"rank {r} {places[r][0]}" for r in lonely)
        raise LinkError(
            f"gloo would take addresses that other machines cannot reach: {used}. Set {GLOO_VARIABLE} there to the "
            "interface that leads to the others"
        )
    return store, common_backend([chosen for _, chosen, _ in places], [taken for *_, taken in places])


def _take_places(together: AllRanks) -> list[str]:
    """Name the machine of each rank, and number this machine's ranks where the launcher has not.

    Kubernetes' operator and people set RANK and WORLD_SIZE alone. On each machine one rank must be the first, which
    looks after its checkpoints and says what is wrong.
    """
    machines: list[str] = together.all_gather_object(machine())
    here = [rank for rank, name in enumerate(machines) if name == machines[together.rank]]
    os.environ.setdefault("LOCAL_RANK", str(here.index(together.rank)))
    if ranks_here() is None:
        os.environ["LOCAL_WORLD_SIZE"] = str(len(here))
    return machines


def _fresh(store: Any, rank: int, world: int) -> Any:
    """Agree on a part of the store that nothing was written to before.

    torchrun's store outlives the ranks: after a restart it has what they wrote before, addresses of processes that
    are gone among it. So rank 0 thinks of a name and answers each other rank's question for it, which is new too, and
    asked again if it was a rank 0 of before that answered. LinkTimeoutError if a rank does not come, ConfigError if
    rank 0 counts other ranks.
    """
    name = secrets.token_hex(8) if rank == 0 else ""
    question, asked = "", -_ASK_AGAIN_S
    waiting = set(range(1, world)) if rank == 0 else set()
    began = time.monotonic()
    while (passed_s := time.monotonic() - began) < COMING_S:
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
        if name and store.check([f"{_NAME}/{name}/go"]):
            counted = store.get(f"{_NAME}/{name}/go").decode()
            # Older versions say nothing there; versions are compared next.
            require(counted in ("", str(world)), "WORLD_SIZE", world, f"{counted}, as on rank 0")
            return dist.PrefixStore(f"pipecomp/{name}", store)
        time.sleep(_POLL_S if passed_s < _ASK_AGAIN_S else 10 * _POLL_S)
    raise LinkTimeoutError(f"rank {min(waiting, default=0)} did not come to the start of the run within {COMING_S:g} s")


def collective_backend() -> str:
    """Tell what torch's collectives go through, or choose for this rank where the processes have not joined yet.

    Chosen are gloo on CPUs, else the device's own. Whether ranks share a GPU they find out together.
    """
    if dist.is_initialized():
        return str(dist.get_backend())
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None or os.environ.get("DS_ACCELERATOR") == "cpu":
        return "gloo"
    local = ranks_here() or int(os.environ["WORLD_SIZE"])
    if device.type != "cuda" and local > torch.accelerator.device_count():  # others have no names to compare
        return "gloo"
    return dist.get_default_backend_for_device(device)


def common_backend(chosen: Sequence[str], gpus: Sequence[str | None]) -> str:
    """Choose for all ranks: gloo, which works anywhere, unless all have chosen the same and none share a GPU.

    chosen, gpus: by rank. gpus: names as NCCL tells GPUs apart, which refuses two ranks on one.
    """
    return chosen[0] if len(set(chosen)) == 1 and not some_share(gpus) else "gloo"


def _initialize(store: Any, backend: str, rank: int, world: int) -> None:
    """Let torch join several ranks, which have met in `store`."""
    connecting = timedelta(seconds=_CONNECT_S)
    if backend == "nccl":
        # As the current device, not as init_process_group's device_id: with that, a rank outside of a new group splits
        # NCCL's communicator and waits for those inside, who never do so for a group of gloo's.
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=connecting)
    if backend == "nccl":
        dist.all_reduce(torch.zeros(1, device="cuda"))  # connects, so that what keeps ranks apart is seen here
    # A collective may wait longer than a connection: for a rank that saves, or evaluates.
    _set_timeout(default_pg_timeout, dist.group.WORLD)


def first_line(error: Exception) -> str:
    """What an error of torch's says, in a line, without gloo's source files."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"\[/\S+:\d+\] ", "", text)[:300]


_PROBE_S, _ANSWER_S = 5.0, 10.0
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
        socket.create_connection((host, port), _PROBE_S).close()
    except OSError:
        return  # rank 0 may come later, and torch waits for it
    limit = timedelta(seconds=_ANSWER_S)

    def ask() -> None:
        store = dist.TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
        store.check(["pipecomp/there"])

    try:
        with torch_says_nothing():
            call_store(ask, _END_S)
    except (RuntimeError, ValueError) as error:
        with contextlib.suppress(OSError):  # rank 0 may have ended meanwhile: then torch waits for the next one
            socket.create_connection((host, port), _PROBE_S).close()
            raise LinkError(
                f"rank {rank}: what listens at {host} port {port} is not rank 0 of this run: it does not answer as "
                "torch's key-value store does. Something else uses that port, or MASTER_ADDR is another machine's: "
                "give all ranks the same MASTER_ADDR, and a MASTER_PORT that is free on rank 0's machine"
            ) from error


KEYS, ADDRESS, LISTEN = "PIPECOMP_KEYS", "PIPECOMP_ADDRESS", "PIPECOMP_LISTEN"
_NOWHERE = "none"
_SWITCH_S = 5e-4


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


def meeting(rank: int, world: int) -> JoinConfig:
    """Where the ranks meet: PIPECOMP_ADDRESS, or MASTER_ADDR and MASTER_PORT. Raises ConfigError."""
    text = os.environ.get(ADDRESS)
    if not text:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            raise ConfigError(ADDRESS, text, f"{ADDRESS_FORMAT}, of rank 0's machine: MASTER_PORT is torchrun's own")
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
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
    )


def join_mesh(keys: str, rank: int, world: int, *, wait_s: float) -> Mesh:
    """Connect to all other ranks, and let torch's process groups go over these connections.

    Threads of the interpreter take turns more often from now on: each record of TLS, 16 KiB, needs a turn, and beside a
    busy main thread the usual 5 ms let 256 KiB take 11 ms where these take 4.5.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
    made = connect_mesh(meeting(rank, world), Credentials(KeyFolder(keys)), wait_s=wait_s)
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


def start_processes(seed: int | None = None, config: Any = None) -> None:
    """Join the other processes of this run; call it before anything else, on every process.

    Processes that compute on a machine's CPU share its cores, or what their container may use of them, evenly, unless
    OMP_NUM_THREADS is set or each has cores of its own, as Slurm and mpirun give them. Processes that meet at a
    loopback address let gloo use the loopback interface, unless GLOO_SOCKET_IFNAME is set.

    Args:
        seed: Of torch's generator, which is seeded differently on every rank. None means 0.
        config: DeepSpeed's, a dict or a JSON file, for what its "pipecomp" section says of TLS; without it
            PIPECOMP_KEYS decides.

    Raises:
        LinkError: On every rank, if the ranks have different versions or cannot reach each other.
        KeysError: This machine's keys do not allow it to join.
    """
    if os.environ.get("MASTER_ADDR", "").startswith("127."):
        # Without it gloo takes the address that the host name resolves to, which need not be reachable.
        own = interface_towards("127.0.0.1")
        if own is not None:
            os.environ.setdefault(GLOO_VARIABLE, own)
    join_processes(config)
    sharing = ranks_on_cores(all_ranks())
    if computes_on_cpu() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // sharing))
    torch.manual_seed((seed or 0) * 65536 + dist.get_rank())


def all_ranks() -> AllRanks:
    """Begin a round of questions to all ranks of a run that has started; every rank must call this.

    Returns:
        The round. If a rank ends before it has answered, those that wait for it raise an error.
    """
    return AllRanks(missed=process_heartbeat().missed)


def computes_on_cpu() -> bool:
    """Say whether stages compute on the CPU: there is no NVIDIA GPU, or DeepSpeed was told to leave it alone."""
    return os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available()
