"""Work of the ranks of the reliability tests: small trainings that are stopped, resumed, disturbed."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import socket
import struct
import sys
import threading
import time
from typing import Any

from tests.models import ds_config, gpt2, samples

AQSGD = {"method": "aqsgd", "forward_bits": 4}


def make(
    folder: str, *, stages: int = 2, seed: int = 0, store: dict | None = None, data: Any = None, **more: Any
) -> Any:
    """An engine that keeps its messages in `folder`."""
    import pipecomp

    place = {} if (store or {}).get("backend") == "memory" else {"path": folder}
    section = {"activations": AQSGD, "store": {**place, **(store or {})}} | more.pop("section", {})
    config = ds_config(section, **more)
    return pipecomp.initialize(gpt2(seed=seed), num_stages=stages, config=config, training_data=data or samples())


def close_and_leave_store(engine: Any) -> None:
    """Close an engine whose store stays, as that of a process that was killed does."""
    engine.links.environment.temporary = False
    engine.close()


def losses(engine: Any, steps: int) -> list[float]:
    return [float(engine.train_batch()) for _ in range(steps)]


def error_of(call: Any) -> str:
    """The kind and the text of the error that a call raises, '' if it raises none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def messages(engine: Any) -> dict[int, list[tuple[int, int, str]]]:
    """For each link: sample, version and SHA-256 of m, of all samples held."""
    out = {}
    for end in engine.links:
        ids = [h.sample for h in end.store.inventory()]
        out[end.index] = [
            (i, m.version, hashlib.sha256(m.m_nH.numpy().tobytes()).hexdigest())
            for i, m in zip(ids, end.store.get(ids), strict=True)
        ]
    return out


# -- stores and their runs


def runs(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    """A run, and everything that is not that run with its stores."""
    out: dict[str, Any] = {}
    path, checkpoints = f"{folder}/m", f"{folder}/checkpoints"
    engine = make(path)
    losses(engine, 4)
    engine.save_checkpoint(checkpoints)
    out["id"] = engine.run.id
    out["held"] = messages(engine)
    engine.close()

    engine = make(path)
    out["another run"] = error_of(engine.train_batch)
    engine.close()
    for name, more in {
        "other bits": {"section": {"activations": AQSGD | {"forward_bits": 2}}},
        "other store bits": {"store": {"bits": 8}},
        "other name": {"store": {"run": "mine"}},
    }.items():
        out[name] = error_of(lambda more=more: make(path, **more))
    import pipecomp

    for name, model, cuts in (("another model", gpt2(layers=6), [0, 2, 6]), ("another cut", gpt2(), [0, 1, 4])):
        config = ds_config({"activations": AQSGD, "store": {"path": path}})
        out[name] = error_of(
            lambda model=model, cuts=cuts, config=config: pipecomp.initialize(
                model, cuts=cuts, config=config, training_data=samples()
            )
        )

    engine = make(f"{folder}/empty")  # takes the run's id from the checkpoint
    engine.load_checkpoint(checkpoints)
    out["moved"] = engine.run.id, engine.resumed
    losses(engine, 1)
    engine.close()

    engine = make(path)
    engine.load_checkpoint(checkpoints)
    out["resumed"] = engine.run.id, engine.resumed, messages(engine)
    losses(engine, 1)
    engine.close()
    engine = make(path, store={"run": out["id"]})  # says itself which run it is
    losses(engine, 1)
    engine.close()

    engine = make(f"{folder}/other")
    losses(engine, 2)
    engine.save_checkpoint(f"{folder}/others")
    engine.close()
    engine = make(path)
    out["another run's checkpoint"] = error_of(lambda: engine.load_checkpoint(f"{folder}/others"))
    engine.close()
    return out


def follows_a_killed_run(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    """New runs over stores that killed ones left: before a checkpoint, with other settings, after one with a copy."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pipecomp").addHandler(handler)
    fresh = make(f"{folder}/fresh")
    out: dict[str, Any] = {"fresh": losses(fresh, 3), "other": {}}
    fresh.close()
    for name, (left, new) in {
        "no checkpoint": ({}, {}),
        "other bits": ({"section": {"activations": AQSGD | {"forward_bits": 2}}}, {}),
        "copied": ({"store": {"in_checkpoints": True}}, {"store": {"in_checkpoints": True}}),
        "another checkpoint": ({}, {}),
    }.items():
        path = f"{folder}/{name}"
        engine = make(path, **left)
        losses(engine, 2)
        if name == "copied":
            engine.save_checkpoint(f"{folder}/checkpoints")
        close_and_leave_store(engine)
        said.clear()
        engine = make(path, **new)
        if name == "another checkpoint":
            engine.load_checkpoint(f"{folder}/checkpoints")
            out["taken over"] = engine.run.id, messages(engine)
        else:
            out["other"][name] = losses(engine, 3), [line for line in said if "is emptied" in line]
        close_and_leave_store(engine)
    return out


def exact(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    """Losses of an undisturbed run, and of one that goes on from its checkpoint, with and without the store's copy."""
    out: dict[str, Any] = {}
    changes = {"section": {"activations": AQSGD | {"backward_bits": 3, "backward_method": "delta"}}}
    for name, store in {"copied": {"in_checkpoints": True, "bits": 8}, "not copied": {}}.items():
        section = changes if name == "copied" else {}  # gradients are kept in the same store
        engine = make(f"{folder}/{name}/m", store=store, **section)
        losses(engine, 5)
        engine.save_checkpoint(f"{folder}/{name}/c")
        at_checkpoint = messages(engine)
        expected = losses(engine, 6)
        engine.close()
        engine = make(f"{folder}/{name}/m", seed=9, store=store, **section)
        engine.load_checkpoint(f"{folder}/{name}/c")
        same = messages(engine) == at_checkpoint
        out[name] = expected, engine.resumed, same, losses(engine, 6), messages(engine)
        engine.close()
    engine = make(f"{folder}/stopped/m")  # nothing was trained after the checkpoint: no copy is needed
    losses(engine, 5)
    engine.save_checkpoint(f"{folder}/stopped/c")
    engine.close()
    engine = make(f"{folder}/stopped/m", seed=9)
    engine.load_checkpoint(f"{folder}/stopped/c")
    out["stopped"] = out["not copied"][0], engine.resumed, True, losses(engine, 6), messages(engine)
    engine.close()
    return out


# -- both ends hold the same


def drifts(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    """Rank 1's message of a sample changes behind its back, once, and later twice in a row."""
    import logging

    from pipecomp.buffers.lmdb_store import LmdbStore

    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("pipecomp").addHandler(Listener())
    engine = make(folder, store={"drift_check": 2})
    losses(engine, 4)
    quiet = list(said)
    put_many = LmdbStore.put_many
    changed: list[int] = []

    def faulty(self: Any, puts: Any, settled: Any = None) -> None:
        if not changed:
            (sample, version, m_nH), *others = puts
            changed.append(sample)
            m_nH = m_nH.clone()
            m_nH[0, 0] += 1e-3
            puts = [(sample, version, m_nH), *others]
        put_many(self, puts, settled)

    if rank == 1:
        LmdbStore.put_many = faulty  # type: ignore[method-assign]
    losses(engine, 2)
    stats = engine.comm_stats()["links"]["0->1"]
    repaired = messages(engine)
    losses(engine, 6)  # the sample comes again, whole
    same = messages(engine)
    error = ""
    steps = 0
    for _ in range(2):
        changed.clear()
        for _ in range(2):
            error = error or error_of(engine.train_batch)
            steps += not error
    engine.close()
    return {
        "quiet": quiet,
        "said": said,
        "stats": stats,
        "repaired": repaired,
        "same": same,
        "error": error,
        "steps": steps,
    }


# -- at the start


def unlike(rank: int, world: int, note: Any, folder: str) -> dict[str, str]:
    """Rank 1 differs from the others, each time in something else."""
    import pipecomp

    def start(section: dict | None = None, *, given: dict | None = None, **more: Any) -> None:
        config = ds_config({"activations": AQSGD, "store": {"backend": "memory"}} | (section or {}), **more)
        usual = {"model": gpt2(layers=4), "num_stages": world, "config": config, "training_data": samples()}
        pipecomp.initialize(**usual | (given or {}))

    def start_replicas(groups: Any) -> None:
        start(given={"num_stages": 1, "config": ds_config(), "parameter_groups": groups})

    mine = rank == 1
    frozen = gpt2()
    frozen.transformer.h[0].ln_1.bias.requires_grad_(not mine)
    out = {
        "bits": error_of(lambda: start({"activations": AQSGD | {"forward_bits": 2}} if mine else None)),
        "batch": error_of(lambda: start(micro_batches=4 if mine else 3)),
        "rate": error_of(lambda: start(optimizer={"type": "AdamW", "params": {"lr": 0.5 if mine else 0.1}})),
        "cut": error_of(lambda: start(given={"num_stages": None, "cuts": [0, 1 if mine else 2, 3, 4]})),
        "model": error_of(lambda: start(given={"model": gpt2(layers=5 if mine else 4)})),
        "frozen": error_of(lambda: start(given={"model": frozen})),
        "length": error_of(lambda: start(given={"training_data": samples(20 if mine else 24)})),
        "content": error_of(lambda: start(given={"training_data": samples(seed=7 if mine else 1)})),
        "order": error_of(
            lambda: start_replicas(lambda stage: [{"params": list(stage.parameters())[:: -1 if mine else 1]}])
        ),
        "options": error_of(
            lambda: start_replicas(lambda stage: [{"params": stage.parameters(), "lr": 0.5 if mine else 0.1}])
        ),
        "dtype": error_of(lambda: start(**({"bf16": {"enabled": True}} if mine else {}))),
        "schedule": error_of(lambda: start(given={"lr_scheduler": (lambda optimizer: None) if mine else None})),
        "key": error_of(lambda: start({"no such": 1} if mine else None)),
    }
    from pipecomp.distributed import consistency

    facts = consistency.versions()
    if mine:
        facts |= {"torch version": "1.0.0", "order of bytes": "big"}
    out["versions"] = error_of(lambda: consistency.AllRanks().assert_same_on_all_ranks(facts))
    out["alike"] = error_of(lambda: start({"store": {"path": f"{folder}/{rank}"}}))  # a place of its own is no matter
    ends = consistency.AllRanks()
    ends.all_gather_object("started")  # a rank that ends at once is lost for those that still connect to it
    ends.leave()
    return out


def wrong_interface(rank: int, world: int, note: Any) -> str:
    from pipecomp.distributed.rendezvous import join_processes

    if rank == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
    return error_of(join_processes)


def lonely_interface(rank: int, world: int, note: Any) -> str:
    from pipecomp.distributed import rendezvous

    rendezvous.machine = lambda: f"machine {rank}"
    rendezvous.gloo_address = lambda: "127.0.1.1" if rank == 1 else "10.0.0.1"
    return error_of(rendezvous.join_processes)


# -- lost ranks


def is_lost(rank: int, world: int, note: Any, how: str, victim: int, folder: str, stages: int, timeout_s: float) -> Any:
    """The victim goes in step 3, and notes its process before; what the others raise, and how long after, is noted."""
    redirect(f"{folder}/said-{rank}")
    if rank == victim:
        note(os.getpid())
    engine = make(folder, stages=stages, section={"transport": {"timeout_s": timeout_s}})
    began, error = 0.0, ""
    for step in range(100):
        if step == 3:
            began = time.monotonic()
            if rank == victim and how == "reset":
                reset_connections()
            elif rank == victim:
                os.kill(os.getpid(), signal.SIGSTOP)
        error = error_of(engine.train_batch)
        if error:
            break
    seconds = time.monotonic() - began
    with contextlib.suppress(Exception):
        engine.close()
    note(error)
    return error, seconds


def redirect(path: str) -> None:
    """Standard error into a file."""
    said = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 2)
    sys.stderr = os.fdopen(said, "w")


def reset_connections() -> None:
    """End this process's TCP connections as a machine does that was started again: with a reset."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            if "socket:" in os.readlink(f"/proc/self/fd/{name}"):
                found = socket.socket(fileno=os.dup(int(name)))
                if found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6):
                    found.getpeername()
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    found.shutdown(socket.SHUT_RDWR)
                found.detach()


def waits_in_a_collective(rank: int, world: int, note: Any, folder: str, timeout_s: float) -> None:
    """Rank 1 is stopped while the others wait for it where no link looks: in an all-reduce."""
    import torch
    import torch.distributed as dist

    redirect(f"{folder}/said-{rank}")
    if rank == 1:
        note(os.getpid())
    engine = make(f"{folder}/m", section={"transport": {"timeout_s": timeout_s}})
    losses(engine, 2)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with engine.propagate_failure():
        dist.all_reduce(torch.ones(1))


def nobody_there(rank: int, world: int, note: Any) -> str:
    """Only rank 1 starts: nothing listens where rank 0 should be."""
    from pipecomp.distributed import rendezvous

    rendezvous.JOIN_TIMEOUT_S = 3.0
    return error_of(rendezvous.join_processes) if rank == 1 else ""


def gone_with_its_connections(rank: int, world: int, note: Any, keys: str) -> str:
    """Rank 1 joins over TLS and dies; the others wait for its answer to a question, as while ranks are measured."""
    from pipecomp.distributed import rendezvous

    os.environ["PIPECOMP_KEYS"] = f"{keys}/rank-{rank}"
    rendezvous.join_processes()
    ranks = rendezvous.all_ranks()
    ranks.all_gather_object(rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: ranks.all_gather_object(rank))


def gone_before_the_engine(rank: int, world: int, note: Any, asked: bool, timeout_s: float) -> str:
    """Rank 1 joins and dies; the others wait for it where engines are made, or asked before, as recipes do."""
    from torch.distributed import distributed_c10d

    from pipecomp.distributed import heartbeat, rendezvous
    from pipecomp.distributed.rendezvous import join_processes

    heartbeat.DEFAULT_TIMEOUT_S = timeout_s
    join_processes()
    joined = distributed_c10d._get_default_store()  # rank 0 may still wait for connections of others
    joined.set(f"joined {rank}", "")
    if rank == 1:
        joined.wait([f"joined {other}" for other in range(world)])
        os.kill(os.getpid(), signal.SIGKILL)
    if asked:
        return error_of(lambda: rendezvous.all_ranks().all_gather_object(rank))
    return error_of(lambda: make("nowhere", store={"backend": "memory"}))


def twice_in_one_store(rank: int, world: int, note: Any, address: str, port: int) -> list[float]:
    """Two starts that share a key-value store, as torchrun's restarts do; the second one as another process would."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from pipecomp.distributed import heartbeat, rendezvous

    found: list[float] = []
    for attempt in (1, 2):
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
        rendezvous.rendezvous = lambda *args, store=store, **more: iter([(store, rank, world)])  # type: ignore[assignment]
        rendezvous.join_processes()
        mean = torch.full((1,), float(attempt + rank))
        dist.all_reduce(mean)
        found.append(float(mean))
        dist.destroy_process_group()
        found.append(_threads_of_watches())
    heartbeat.process_heartbeat(store, rank, world).end()
    found.append(_threads_of_watches())
    return found


def _threads_of_watches() -> float:
    return float(sum(thread.name in ("pipecomp-beat", "pipecomp-watch") for thread in threading.enumerate()))
