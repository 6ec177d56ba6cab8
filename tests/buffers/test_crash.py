"""A process that is killed at any instant leaves a store that opens and holds whole steps, none of them lost."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from pipecomp.buffers import LmdbEnvironment
from pipecomp.buffers.lmdb_file import find_damage
from pipecomp.buffers.lmdb_folder import UNSYNCED_FILE
from tests.limits import HANG_S

SAMPLES, LINKS = 24, 2
KILLS = 8
# One process that has torch loaded forks the victims: starting Python eight times would take most of the test.
HOST = """
import os, sys, torch, traceback
from pipecomp.buffers import LmdbEnvironment
torch.set_num_threads(1)

def victim(folder, bits, samples, links):
    environment = LmdbEnvironment(folder, bits=bits, map_bytes=1 << 18, prefetch=1)
    stores = [environment.link(f"link-{i}", {}) for i in range(links)]
    step = 1 + max((line.version for line in stores[0].inventory()), default=0)
    os.write(1, b"ready\\n")
    while True:
        for store in stores:
            store.prefetch(range(0, samples, 2))
            for sample in range(samples):
                # Lengths change from step to step, so that slots, runs of pages and the map all move.
                store.put(sample, step, torch.full((1 + (sample + step) % 40, 48), float(step)))
        environment.commit()
        if step % 3 == 0:
            environment.writer.drain()
            os.write(1, b"%d\\n" % step)  # whole or not at all; committed, not synced: a kill must not undo it
        step += 1

for line in sys.stdin:
    folder, *numbers = line.split()
    child = os.fork()
    if child == 0:
        try:
            victim(folder, *map(int, numbers))
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    # Lines in one piece: where nothing is buffered, print writes a line in several, and two processes write here.
    os.write(1, b"victim %d\\n" % child)
    os.write(1, b"ended %d\\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture
def tmp_path(memory_folder):
    return memory_folder


class Host:
    """Starts victims and kills them."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOST],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def kill_one(self, folder: Path, bits: int, reports: int, seconds: float) -> list[int]:
        """Let a victim work until it has reported so often, and a moment more; returns the steps that it reported."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{folder} {bits} {SAMPLES} {LINKS}\n")
        self.process.stdin.flush()
        committed: list[int] = []
        pid = ready = None
        while pid is None or ready is None or len(committed) < reports:
            word, *rest = self.process.stdout.readline().split()
            assert word != "ended", "the victim failed by itself"
            pid = int(rest[0]) if word == "victim" else pid
            ready = True if word == "ready" else ready
            committed += [int(word)] if word.isdigit() else []
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        while True:
            word, *rest = self.process.stdout.readline().split()
            if word == "ended":
                assert int(rest[0]) == -signal.SIGKILL
                return committed
            committed.append(int(word))


@pytest.fixture(scope="module")
def host():
    host = Host()
    yield host
    host.process.stdin.close()
    host.process.stdout.close()
    host.process.wait(timeout=HANG_S)


@pytest.mark.parametrize("bits", [8, 32])
def test_a_killed_process_leaves_whole_steps(tmp_path, host, bits):
    folder = tmp_path / "rank-0"
    rng = random.Random(bits)
    last = 0
    for _ in range(KILLS):  # each time on what the last victim left
        committed = host.kill_one(folder, bits, rng.randint(0, 3), rng.uniform(0.0, 0.05))
        assert find_damage(folder) is None
        assert (folder / UNSYNCED_FILE).exists(), "the next opening checks everything"
        environment = LmdbEnvironment(folder, bits=bits)
        stores = [environment.link(f"link-{i}", {}) for i in range(LINKS)]
        steps = {line.version for store in stores for line in store.inventory()}
        assert len(steps) <= 1, "all links, all samples from the same step"
        held = steps.pop() if steps else 0
        assert held >= max([last, *committed]), "nothing that was committed is lost"
        last = held
        for store in stores:
            messages = store.get(range(SAMPLES))
            assert all((m is not None) == (held > 0) for m in messages)
            for sample, message in enumerate(messages if held else []):
                assert message is not None
                assert message.version == held
                assert message.m_nH.shape == (1 + (sample + held) % 40, 48)
                # With 8 bits the largest value of a row decodes to the middle of the last interval.
                assert torch.allclose(message.m_nH, torch.tensor(float(held)), rtol=1 / 256 if bits == 8 else 0, atol=0)
        environment.close()
    assert last > 0, "the victims did get to write something"


def test_a_forked_child_leaves_the_store_alone(tmp_path):
    """Data loaders fork: the child's exit must not close what it inherited."""
    environment = LmdbEnvironment(tmp_path / "rank-0")
    store = environment.link("link-0", {})
    store.put(0, 1, torch.ones(2, 3))
    store.commit()
    store.flush()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # the bound of the child, should it wait for a thread that it does not have
        environment.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    store.put(0, 2, torch.ones(2, 3))
    store.commit()
    store.flush()
    environment.close()
    assert Path(tmp_path / "rank-0" / "data.mdb").exists()
    again = LmdbEnvironment(tmp_path / "rank-0")
    assert [line.version for line in again.link("link-0", {}).inventory()] == [2]
    again.close()


def test_an_exit_without_close_still_writes_what_was_committed(tmp_path):
    code = """
    import sys, time, torch
    from pipecomp.buffers import LmdbEnvironment
    environment = LmdbEnvironment(sys.argv[1])
    store = environment.link("link-0", {})
    write = environment.file.write
    environment.file.write = lambda changes: (time.sleep(0.2), write(changes))  # still at it when the program ends
    for step in range(3):
        for sample in range(4):
            store.put(sample, step, torch.full((50, 64), float(step)))
        store.commit()
    store.put(0, 99, torch.zeros(50, 64))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "r")], check=True, timeout=HANG_S)
    environment = LmdbEnvironment(tmp_path / "r")
    held = environment.link("link-0", {}).inventory()
    assert [line.version for line in held] == [2] * 4
    environment.close()
