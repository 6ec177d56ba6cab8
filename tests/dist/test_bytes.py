"""What AQ-SGD puts on the wire after the first epoch, as counted by the engine and by the kernel's network interface.

Two network namespaces on this machine, joined by a veth pair; each runs one stage. Needs root and iproute2.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(240)]

BITS, WIDTH, LENGTH, SAMPLES, MICRO_BATCH, MICRO_BATCHES = 2, 256, 128, 16, 4, 2
NAMES = (f"pipecomp-a{os.getpid()}", f"pipecomp-b{os.getpid()}")

STAGE = textwrap.dedent(
    """
    import json, os, sys
    import torch
    sys.path.insert(0, sys.argv[1])
    import small
    small.LENGTH = int(sys.argv[3])
    torch.set_num_threads(1)
    import pipecomp

    def interface():
        return int(open("/sys/class/net/veth0/statistics/tx_bytes").read())

    section = {"activations": {"method": "aqsgd", "forward_bits": int(sys.argv[2]), "backward_bits": 8}, "tie": False,
               "store": {"backend": "memory"}}
    config = small.ds_config(section, micro_batch=4, micro_batches=2)
    engine = pipecomp.initialize(small.gpt2(2, 256, tied=False), num_stages=2, config=config,
                                 training_data=small.samples(16, small.LENGTH))
    counts = []
    for step in range(12):  # 2 steps an epoch
        if step in (2, 12 - 1):
            pass
        engine.train_batch()
        link = engine.comm_stats()["links"]["0->1"]
        counts.append((link["forward"]["bytes_raw"], link["forward"]["bytes_sent"], interface()))
    json.dump(counts, open(sys.argv[4], "w"))
    engine.close()
    """
)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=10)


@pytest.fixture
def namespaces():
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    try:
        run("ip", "netns", "add", NAMES[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        run("ip", "netns", "add", NAMES[1])
        run("ip", "link", "add", "veth0", "netns", NAMES[0], "type", "veth", "peer", "name", "veth0", "netns", NAMES[1])
        for number, name in enumerate(NAMES):
            run("ip", "-n", name, "addr", "add", f"198.18.0.{number + 1}/15", "dev", "veth0")
            run("ip", "-n", name, "link", "set", "veth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield NAMES
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=10, check=False)


def test_bytes_after_the_first_epoch(namespaces, tmp_path):
    script = tmp_path / "stage.py"
    script.write_text(STAGE)
    here = str(Path(__file__).parent)
    workers = []
    for rank, name in enumerate(namespaces):
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2",
            "MASTER_ADDR": "198.18.0.1", "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "veth0", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = ["ip", "netns", "exec", name, sys.executable, str(script), here, str(BITS), str(LENGTH)]
        out = tmp_path / f"counts-{rank}.json"
        workers.append(subprocess.Popen([*command, str(out)], env=environment, stderr=subprocess.PIPE, text=True))
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=200)
            assert worker.returncode == 0, errors
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    counts = json.loads((tmp_path / "counts-0.json").read_text())
    raw, sent, interface = (last - first for first, last in zip(counts[3], counts[-1], strict=True))
    assert raw == 8 * MICRO_BATCHES * MICRO_BATCH * LENGTH * WIDTH * 4
    assert sent <= 1.08 * BITS / 32 * raw
    assert interface <= 1.16 * BITS / 32 * raw
    assert sent >= BITS / 32 * raw
