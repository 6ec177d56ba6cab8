"""AQ-SGD's bytes on the wire after the first epoch, as counted by the engine and by the kernel's network interface.

Two nodes of a network lab, unshaped; each runs one stage. Needs root and iproute2.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pipecomp.netlab import Lab, missing
from tests import models
from tests.dist.lab_ranks import run_in_lab
from tests.limits import HANG_S

WHY_NOT = missing()
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no network namespaces here: {WHY_NOT}"),
]

BITS, WIDTH, LENGTH, SAMPLES, MICRO_BATCH, MICRO_BATCHES = 2, 256, 128, 16, 4, 2
STEPS = 8  # 2 an epoch


def train(rank, world, note):
    """After each step: the link's bytes raw and sent, and what the node's interface has sent."""
    import torch

    import pipecomp

    torch.set_num_threads(1)
    models.LENGTH = LENGTH
    section = {
        "activations": {"method": "aqsgd", "forward_bits": BITS, "backward_bits": 8},
        "tie": False,
        "store": {"backend": "memory"},
    }
    engine = pipecomp.initialize(
        models.gpt2(2, WIDTH, tied=False),
        num_stages=2,
        training_data=models.samples(SAMPLES, LENGTH),
        config=models.ds_config(section, micro_batch=MICRO_BATCH, micro_batches=MICRO_BATCHES),
    )
    counts = []
    for _ in range(STEPS):
        engine.train_batch()
        forward = engine.comm_stats()["links"]["0->1"]["forward"]
        (line,) = (line for line in Path("/proc/self/net/dev").read_text().splitlines() if "eth0:" in line)
        interface = int(line.split()[9])  # the ninth number: bytes sent
        counts.append((forward["bytes_raw"], forward["bytes_sent"], interface))
    engine.close()
    return counts


def test_bytes_after_the_first_epoch():
    with Lab(nodes=2) as lab:
        counts = run_in_lab(lab, train, timeout_s=HANG_S)[0]
    raw, sent, interface = (last - first for first, last in zip(counts[3], counts[-1], strict=True))
    assert raw == 4 * MICRO_BATCHES * MICRO_BATCH * LENGTH * WIDTH * 4
    assert sent <= 1.08 * BITS / 32 * raw
    assert interface <= 1.16 * BITS / 32 * raw
    assert sent >= BITS / 32 * raw
    assert interface > sent
