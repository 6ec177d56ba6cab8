"""A traced run over two processes: every rank's work, messages and waiting in one file and one picture."""

from __future__ import annotations

import itertools
import json

import pytest

from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S
from tests.models import ds_config, gpt2, samples

pytestmark = pytest.mark.ranks

STEPS, MICRO_BATCHES = 3, 3


def traced(rank, world, note, folder):
    import pipecomp

    section = {"activations": {"method": "aqsgd", "forward_bits": 2}, "store": {"path": f"{folder}/messages"}}
    engine = pipecomp.initialize(gpt2(), num_stages=2, config=ds_config(section), training_data=samples())
    engine.train_batch()
    engine.start_trace()
    for _ in range(STEPS):
        engine.train_batch()
    engine.save_trace(f"{folder}/trace.json")
    assert engine.timers("train_batch").event_timers == []  # DeepSpeed would keep each step's until it prints
    stats = engine.comm_stats()
    engine.close()
    return stats["micro_batches"], stats["links"]["0->1"], stats["in_flight"]


def test_everything_is_in_the_trace(tmp_path):
    found = run_ranks(2, traced, str(tmp_path), timeout_s=HANG_S)
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    count = STEPS * MICRO_BATCHES
    for rank in (0, 1):
        names = [e["name"] for e in events if e["pid"] == rank]
        for part in ("forward", "backward", "encode", "decode", "wait"):
            assert names.count(part) == count
        assert names.count("commit") == names.count("update") == STEPS
        assert names.count("load") == count
        assert names.count("keep") == count  # a micro-batch at once
        assert names.count("receive") == count
        assert names.count("send") >= count - MICRO_BATCHES  # the last ones may still be on their way
    assert {e["args"]["step"] for e in events} == {1, 2, 3}
    for rank in (0, 1):  # a rank does one thing at a time
        done = sorted((e["ts"], e["dur"]) for e in events if e["pid"] == rank and e["name"] in ("forward", "backward"))
        assert all(a + d <= b + 1 for (a, d), (b, _) in itertools.pairwise(done))
    for rank in (0, 1):
        assert [row["micro_batch"] for row in found[rank][0]] == [0, 1, 2]
        assert all(row["forward_s"] > 0 and row["backward_s"] > 0 for row in found[rank][0])
