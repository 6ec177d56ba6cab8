"""An unattended run continues with full disks and a message store with flipped bits."""

from __future__ import annotations

import contextlib
import json
import os
import random
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipecomp.checkpoint import manifest
from pipecomp.trainer.checkpoints import DEEPSPEED, list_checkpoints
from tests.dist.test_supervised import finish, lines, start
from tests.limits import HANG_S
from tests.recipes.recipe_runs import launch
from tests.soak.signal_rounds import arguments, make_work

pytestmark = [pytest.mark.soak, pytest.mark.ranks]
STEPS, FLIPS = 14, 200


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own, if this process may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m,mode=755", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a small tmpfs: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path, *, leave: int = 0) -> Path:
    """Write a file until the disk is full, but for `leave` bytes."""
    free = os.statvfs(disk)
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("ab") as file:  # a run may write there at the same time
        file.write(bytes(max(0, free.f_bavail * free.f_bsize - leave)))
    return filler


@contextlib.contextmanager
def kept_full(disk: Path) -> Iterator[None]:
    """Fill the disk again when a run has deleted an old checkpoint there."""
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(0.01):
            fill(disk)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def flip(file: Path, count: int, seed: int) -> None:
    """Flip bits at random places, all over a file that others may use."""
    draw, size = random.Random(seed), file.stat().st_size
    with file.open("rb+", buffering=0) as handle:
        for _ in range(count):
            place = draw.randrange(size)
            handle.seek(place)
            byte = handle.read(1)[0] ^ (1 << draw.randrange(8))
            handle.seek(place)
            handle.write(bytes([byte]))


def test_full_disks_are_told_on_all_ranks_and_the_run_goes_on(tmp_path: Path, disk: Path) -> None:
    """The second checkpoint does not fit; lines of metrics do not, either, and a trace has no folder."""
    work = make_work(tmp_path)
    (tmp_path / "run").mkdir()
    words = arguments(work, epochs=2)
    words[words.index("--checkpoint") + 1] = str(disk / "checkpoints")
    words[words.index("--metrics") + 1] = "/dev/full"
    words += ["--save-every", "3", "--max-steps", str(STEPS), "--save", "trained"]
    words += ["--trace", str(tmp_path / "missing" / "trace.json")]
    fill(disk, leave=1400 << 10)  # a checkpoint has some 900 KiB
    found = launch(tmp_path / "run", "gpt2_wikitext2", *words)
    assert found.status == 0, found.output
    for rank in (0, 1):
        told = [line for line in found.output.splitlines() if line.startswith(f"pipecomp: rank {rank}: ")]
        refused = f"the checkpoint {disk}/checkpoints/checkpoint-6/deepspeed cannot be written: rank "
        assert any(refused in line for line in told), found.output
        assert any("No space left on device. No part of it remains" in line for line in told), told
        assert any("missing/trace.json cannot be written on rank 0: No such file or directory" in line for line in told)
        assert any("/dev/full cannot be written: No space left on device" in line for line in told)
    for word in ("Traceback", "Exception ignored", "frame #0", "enforce fail", "terminate called"):
        assert word not in found.output
    kept = dict(list_checkpoints(str(disk / "checkpoints")))
    assert kept, "the first one fits"
    assert all(manifest.problem(path / DEEPSPEED) is None for path in kept.values()), "no half checkpoint is left"
    assert (tmp_path / "run" / "trained" / "config.json").is_file()
    assert not list(disk.rglob("*.part"))


def test_what_is_written_is_for_its_owner_alone(tmp_path: Path) -> None:
    work = make_work(tmp_path)
    config = json.loads((work / "ds_config.json").read_text())
    config["pipecomp"]["store"]["run"] = "kept"
    (work / "ds_config.json").write_text(json.dumps(config))
    (tmp_path / "run").mkdir()
    before = os.umask(0)
    try:
        found = launch(tmp_path / "run", "gpt2_wikitext2", *arguments(work, epochs=1), "--max-steps", "3")
    finally:
        os.umask(before)
    assert found.status == 0, found.output
    for folder in ("messages", "checkpoints"):
        for path in (tmp_path / "run" / folder, *(tmp_path / "run" / folder).rglob("*")):
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode in ((0o700,) if path.is_dir() else (0o600,)), f"{path}: {mode:o}"


@pytest.mark.timeout(HANG_S)
def test_a_damaged_store_and_a_full_checkpoint_disk_end_no_supervised_run(tmp_path: Path, disk: Path) -> None:
    work = make_work(tmp_path)
    config = json.loads((work / "ds_config.json").read_text())
    config["pipecomp"]["store"]["bits"] = 8
    (work / "ds_config.json").write_text(json.dumps(config))
    run = work / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(disk / "checkpoints")
    (disk / "checkpoints").mkdir()
    steps = 60  # so many that a fast machine has not ended when the disk is full
    process = start(work, "run", "--max-steps", str(steps), "--epochs", "20")
    with contextlib.ExitStack() as until_it_ends:
        try:
            deadline = time.monotonic() + HANG_S
            while not any(line["step"] >= 7 for line in lines(work, "run")):
                assert time.monotonic() < deadline, "no step in time"
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.02)
            flip(run / "messages" / "rank-1" / "data.mdb", FLIPS, seed=1)
            until_it_ends.enter_context(kept_full(disk))
        finally:
            output = finish(process)
    assert "No space left on device" in output
    assert [line["step"] for line in lines(work, "run")] == list(range(1, steps + 1)), output
    assert "messages/rank-1/data.mdb.damaged, and a new store begins" in output, output
    assert "continues after step" in output, output
    assert not (run / "messages").exists(), "the last checkpoint has a copy"
