"""Trainings one after the other in one process leave no threads, files or stores behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S
from tests.models import ds_config, gpt2, samples
from tests.tls.meshes import keys_for

pytestmark = pytest.mark.ranks

ROUNDS = 6
SLACK = 3  # threads and files; an engine has 18, and 28 files
END_S = 60.0  # for threads that are about to end, on a busy machine


def open_things(earlier: list) -> tuple[int, int, int, int]:
    """The number of threads, open files and shared memories of this process, and its bytes in memory.

    Threads that are about to end are waited for: until there are as few as after the first two rounds.
    """

    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def few() -> bool:
        return all(now <= max(counts) + SLACK for now, *counts in zip(count(), *earlier[:2], strict=False))

    before, (threads, files), deadline = None, count(), time.monotonic() + END_S
    while before != (threads, files) or (len(earlier) > 1 and not few() and time.monotonic() < deadline):
        before = threads, files
        time.sleep(0.2)
        threads, files = count()
    shared = Path("/proc/self/maps").read_text().count(" /dev/shm/")
    return threads, files, shared, psutil.Process().memory_info().rss


def engines(rank, world, note, folder, keys, end, rounds=ROUNDS):
    """Train with one engine after the other; after each, count what is open and note the losses."""
    from pipecomp import initialize

    if keys is not None:
        os.environ["PIPECOMP_KEYS"] = f"{keys}/rank-{rank}"
    counts, losses = [], []
    for _ in range(rounds):
        section = {"activations": {"method": "aqsgd"}, "store": {"path": f"{folder}/store"}}
        engine = initialize(gpt2(), num_stages=world, config=ds_config(section), training_data=samples())
        if end == "with":
            with engine:
                losses.append([float(engine.train_batch()) for _ in range(2)])
        else:
            losses.append([float(engine.train_batch()) for _ in range(2)])
            if end == "close":
                engine.close()
        del engine
        counts.append(open_things(counts))
    return counts, losses


def trainers(rank, world, note, folder, rounds=ROUNDS):
    from transformers import TrainingArguments

    from pipecomp import PipelineTrainer

    counts, losses = [], []
    for number in range(rounds):
        args = TrainingArguments(
            output_dir=f"{folder}/{number}",
            max_steps=2,
            per_device_train_batch_size=4,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = PipelineTrainer(gpt2(), args, train_dataset=samples(), num_stages=world, report=False)
        losses.append(trainer.train().training_loss)
        if number % 2:
            trainer.end()
        counts.append(open_things(counts))
    return counts, losses


def assert_nothing_piles_up(results, world):
    for rank in range(world):
        counts, losses = results[rank]
        assert all(each == losses[0] for each in losses)
        for place in range(2):  # two rounds, since a dropped engine is closed when the next one is made
            most = max(count[place] for count in counts[:2]) + SLACK
            assert max(count[place] for count in counts[2:]) <= most, counts
        assert counts[-1][2] == counts[1][2]


@pytest.mark.timeout(HANG_S)
@pytest.mark.parametrize(("backend", "end"), [("gloo", "close"), ("gloo", "drop"), ("tls", "with"), ("tls", "drop")])
def test_engines_leave_nothing(tmp_path, backend, end):
    keys = None
    if backend == "tls":
        keys = str(tmp_path / "keys")
        keys_for(Path(keys), 2)
    results = run_ranks(2, engines, str(tmp_path), keys, end, timeout_s=HANG_S)
    assert_nothing_piles_up(results, 2)


@pytest.mark.timeout(HANG_S)
def test_trainers_leave_nothing(tmp_path):
    assert_nothing_piles_up(run_ranks(2, trainers, str(tmp_path), timeout_s=HANG_S), 2)


def same_store(rank, world, note, folder):
    from pipecomp import initialize
    from pipecomp.errors import PipecompError

    config = ds_config({"activations": {"method": "aqsgd"}, "store": {"path": f"{folder}/store"}})
    first = initialize(gpt2(), num_stages=world, config=config, training_data=samples())
    first.train_batch()
    try:
        initialize(gpt2(), num_stages=world, config=config, training_data=samples())
    except PipecompError as error:
        return str(error)
    return "no error"


@pytest.mark.timeout(HANG_S)
def test_a_store_in_use_by_an_open_engine_names_close(tmp_path):
    for error in run_ranks(2, same_store, str(tmp_path), timeout_s=HANG_S).values():
        assert "close()" in error


def stores(rank, world, note, folder):
    """A run's store after its end, and the next run's use of it."""
    from pipecomp import initialize
    from pipecomp.errors import StoreError

    path = Path(folder, "store")

    def run(*, steps=2, **store):
        config = ds_config({"activations": {"method": "aqsgd"}, "store": {"path": str(path), **store}})
        engine = initialize(gpt2(), num_stages=world, config=config, training_data=samples())
        return engine, [float(engine.train_batch()) for _ in range(steps)]

    left, losses = {}, []

    def close(name, engine):
        engine.close()
        dist.barrier()
        left[name] = path.exists()
        dist.barrier()

    engine, expected = run()
    close("finished", engine)
    engine, again = run(in_checkpoints=True)
    losses.append(again)
    engine.save_checkpoint(f"{folder}/copied")
    close("copied", engine)
    engine, _ = run(in_checkpoints=True, steps=0)
    engine.load_checkpoint(f"{folder}/copied")
    left["exact"] = engine.resumed.exact
    close("loaded", engine)
    engine, _ = run()
    engine.save_checkpoint(f"{folder}/alone")
    close("not copied", engine)
    engine, _ = run(steps=0)
    engine.load_checkpoint(f"{folder}/alone")
    left["continued"] = engine.resumed.exact
    close("loaded without a copy", engine)
    engine, _ = run(steps=0)
    with pytest.raises(StoreError, match=r"this is a new run.*store\.overwrite"):
        engine.train_batch()
    close("another run's", engine)
    engine, again = run(overwrite=True)
    losses.append(again)
    close("overwritten", engine)
    engine, _ = run(run="mine")
    close("named", engine)
    return left, losses, expected


@pytest.mark.timeout(HANG_S)
def test_a_run_removes_its_store_unless_it_can_continue_from_it(tmp_path):
    for left, losses, expected in run_ranks(2, stores, str(tmp_path), timeout_s=HANG_S).values():
        gone = {"finished": False, "copied": False, "loaded": False, "overwritten": False}
        kept = {"not copied": True, "loaded without a copy": True, "another run's": True, "named": True}
        assert left == {**gone, **kept, "exact": True, "continued": True}
        assert losses == [expected, expected]
