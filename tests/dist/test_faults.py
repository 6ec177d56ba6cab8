"""One rank fails in the middle of a run: every other says which and why, and nothing is left; or the run goes on."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tests.dist.reliability_work as work
from pipecomp.buffers import LmdbEnvironment
from pipecomp.checkpoint import manifest
from pipecomp.distributed.heartbeat import is_collective_error
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.distributed.placement import free_port
from tests import models
from tests.dist.leftovers import Sessions
from tests.limits import HANG_S, TOLD_S

pytestmark = [pytest.mark.ranks, pytest.mark.soak]

STEP = 3


def out_of_memory(engine: Any) -> None:
    """The next forward finds no memory. What it has got by then is kept as long as the error."""

    def eat(*_: Any) -> None:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + (64 << 20), resource.RLIM_INFINITY))
        kept = []
        while True:
            kept.append(torch.empty(1 << 20))

    engine.stage.register_forward_pre_hook(eat)


def wrong_code(engine: Any) -> None:
    engine.stage.register_forward_pre_hook(lambda *_: torch.ones(2, 3) @ torch.ones(2, 3))


def not_a_number(engine: Any) -> None:
    with torch.no_grad():
        next(engine.stage.parameters()).fill_(float("nan"))


def limit_files(size: int | None) -> None:
    """Files cannot grow above `size` bytes; None: as they like."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY if size is None else size, resource.RLIM_INFINITY)
    )


def full_disk(engine: Any) -> None:
    """As a disk that is full: the message store's file cannot grow."""
    limit_files(engine.links.environment.size_bytes())


def killed(engine: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminated(engine: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


ENDED = (killed, terminated)


def fails(rank: int, world: int, note: Any, victim: int, fault: Any, folder: str, samples: int) -> Any:
    Sessions.begin(note)
    engine = work.make(f"{folder}/m", stages=world, data=models.samples(samples))
    engine.train_batch()
    engine.save_checkpoint(f"{folder}/checkpoints")
    for _ in range(STEP - 1):
        engine.train_batch()
    began, error = time.monotonic(), ""
    if rank == victim:
        fault(engine)
    for _ in range(60):
        error = work.error_of(engine.train_batch)
        if error:
            break
    seconds = time.monotonic() - began
    with contextlib.suppress(Exception):
        engine.close()
    return error, seconds


@pytest.mark.parametrize(
    ("world", "fault", "words"),
    [
        (2, killed, ""),
        (3, terminated, "rank 1 stopped: it got SIGTERM"),
        (3, out_of_memory, "allocate memory"),
        (2, wrong_code, "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        (3, not_a_number, "NonFiniteError: link 1, step 3, micro-batch 0, activations: NaN or Inf"),
        (2, full_disk, "StoreError: an earlier write in the background failed: "),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_one_rank_fails(world, fault, words, tmp_path):
    sessions, victim = Sessions(), 1
    ranks = run_ranks(
        world,
        fails,
        victim,
        fault,
        str(tmp_path),
        200,
        timeout_s=HANG_S,
        on_note=sessions.noted,
        may_die=(victim,) if fault in ENDED else (),
    )
    assert set(ranks) | ({victim} if fault in ENDED else set()) == set(range(world))
    for rank, (error, seconds) in ranks.items():
        assert words in error, (rank, error)
        if rank != victim:
            assert error.startswith("PeerLostError: "), (rank, error)
            assert f"Last report of rank {victim} on " in error, rank
        assert seconds < TOLD_S
    assert sessions.left() == []
    for rank in range(world):  # no lock is left, and all that was stored can be read
        environment = LmdbEnvironment(tmp_path / "m" / f"rank-{rank}")
        for link in {0: ["link-0"], world - 1: [f"link-{world - 2}"]}.get(rank, ["link-0", "link-1"]):
            table = environment.file.table(link)
            assert all(environment.file.read_at(table, row.slot, row.sample) for row in environment.file.scan(table))
        environment.close()
    assert manifest.problem(tmp_path / "checkpoints" / "global_step1") is None


def cannot_save(rank: int, world: int, note: Any, folder: str) -> tuple[str, float]:
    Sessions.begin(note)
    engine = work.make(f"{folder}/m", stages=world)
    for number in (1, 2):
        engine.train_batch()
        if number == 2 and rank == 1:
            limit_files(20_000)
        began = time.monotonic()
        error = work.error_of(lambda: engine.save_checkpoint(f"{folder}/checkpoints"))
        seconds = time.monotonic() - began
    limit_files(None)
    with contextlib.suppress(Exception):
        engine.close()
    return error, seconds


def test_a_checkpoint_that_cannot_be_written(tmp_path):
    sessions = Sessions()
    ranks = run_ranks(2, cannot_save, str(tmp_path), timeout_s=HANG_S, on_note=sessions.noted)
    for error, _ in ranks.values():
        assert error.startswith("CheckpointError: the checkpoint "), ranks
        assert "(ulimit -f)" in error
        assert error.endswith("No part of it remains; the previous checkpoint is unchanged")
    assert max(seconds for _, seconds in ranks.values()) < TOLD_S
    assert sessions.left() == []
    checkpoints = tmp_path / "checkpoints"
    assert (checkpoints / "latest").read_text() == "global_step1"
    assert manifest.problem(checkpoints / "global_step1") is None
    assert not (checkpoints / "global_step2").exists()


class Far:
    """Samples with large ids."""

    def __init__(self, samples: list) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]

    def sample_id(self, index: int) -> int:
        return 2**40 + index


def goes_on(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    """Rank 1's disk is slow once, for longer than the others wait for a heartbeat; later it is full for a while."""
    Sessions.begin(note)
    out: dict[str, Any] = {}
    section = {"transport": {"timeout_s": 6}}
    engine = work.make(f"{folder}/slow", section=section)
    if rank == 1:
        write = engine.links.environment.file.write

        def once(changes: Any) -> None:
            engine.links.environment.file.write = write
            time.sleep(8)
            write(changes)

        engine.links.environment.file.write = once
    out["slow"] = work.losses(engine, 8)
    engine.close()

    store = {"on_write_error": "continue", "in_checkpoints": True}
    data = Far(models.samples(48))
    out["undisturbed"] = work.losses(engine := work.make(f"{folder}/wide", data=data, store=store), 16)
    engine.close()
    engine = work.make(f"{folder}/full", data=data, store=store)
    (end,) = engine.links
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        out["losses"] = work.losses(engine, 3)
        if rank == 1:
            limit_files(engine.links.environment.size_bytes())
        out["losses"] += work.losses(engine, 13)
        out["unstored"] = end.stats.unstored_samples
        out["held"] = work.messages(engine)
        limit_files(None)
        engine.save_checkpoint(f"{folder}/checkpoints")
        out["expected"] = work.losses(engine, 4)
        engine.close()
    out["said"] = [str(w.message) for w in said if issubclass(w.category, UserWarning) and folder in str(w.message)]
    engine = work.make(f"{folder}/full", data=data, store=store, seed=9)
    engine.load_checkpoint(f"{folder}/checkpoints")
    out["resumed"], out["got"] = engine.resumed, work.losses(engine, 4)
    engine.close()
    return out


def test_a_slow_disk_and_a_full_one_where_the_run_goes_on(tmp_path):
    sessions = Sessions()
    ranks = run_ranks(2, goes_on, str(tmp_path), timeout_s=HANG_S, on_note=sessions.noted)
    for rank, out in ranks.items():
        assert len(out["slow"]) == 8
        assert all(loss == pytest.approx(4.6, abs=0.5) for loss in out["slow"])
        assert out["losses"] == pytest.approx(out["undisturbed"], rel=1e-2)
        assert out["losses"][:3] == out["undisturbed"][:3]
        assert out["unstored"] == ranks[0]["unstored"] > 20
        assert out["held"] == ranks[0]["held"]
        (samples,) = out["held"].values()
        assert 10 < len(samples) < 48
        assert all(2**40 <= sample < 2**40 + 48 for sample, *_ in samples)
        assert len(out["said"]) == (rank == 1), out["said"]
        assert out["resumed"] == (True, 0)
        assert out["got"] == out["expected"]
    assert "As store.on_write_error is 'continue'" in ranks[1]["said"][0]
    assert sessions.left() == []


def starts_alone(rank: int, world: int, note: Any) -> str:
    from pipecomp.distributed import rendezvous

    rendezvous.JOIN_TIMEOUT_S = 3.0
    return work.error_of(rendezvous.join_processes) if rank == 0 else ""


def test_a_rank_that_never_comes():
    error = run_ranks(2, starts_alone, timeout_s=HANG_S)[0]
    assert error.startswith("LinkTimeoutError: rank 0 waited in vain for 1 others at 127.0.0.1 port "), error
    assert "1/2 clients joined" in error


def test_whose_error_it_is():
    """Only torch.distributed's own can be another rank's fault; gloo's are plain RuntimeErrors."""

    def raised(call: Any) -> Exception:
        with pytest.raises(Exception) as caught:  # noqa: PT011 (any)
            call()
        return caught.value

    port = free_port()
    gone = raised(lambda: dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(milliseconds=300)))
    gloo = RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:7"
    )
    assert is_collective_error(gone)
    assert is_collective_error(gloo)
    for own in (
        raised(lambda: torch.ones(2, 3) @ torch.ones(2, 3)),
        raised(lambda: torch.empty(1 << 60)),
        MemoryError(),
        ValueError("gloo"),
        raised(lambda: torch.zeros(3, requires_grad=True).backward()),
    ):
        assert not is_collective_error(own), own
