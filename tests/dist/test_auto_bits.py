"""Bits "auto" over processes: measured once, the same on every rank, and training goes on with them."""

from __future__ import annotations

import pytest

from pipecomp.cluster.local_ranks import run_ranks
from pipecomp.errors import ConfigError
from tests.dist.small import ds_config, gpt2, samples
from tests.limits import HANG_S

pytestmark = pytest.mark.ranks


def trained(rank, world, note, folder, forward, backward, with_data):
    import logging

    import pipecomp

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("pipecomp.plan.auto").addHandler(handler)
    section = {
        "activations": {"method": "aqsgd", "forward_bits": forward, "backward_bits": backward},
        "store": {"path": f"{folder}/messages", "run": "twice"},
    }
    found = []
    for _ in range(2):  # the second one goes on with the first one's messages
        engine = pipecomp.initialize(
            gpt2(), num_stages=2, config=ds_config(section), training_data=samples() if with_data else None
        )
        gradients = [p.grad for p in engine.stage.parameters()]
        loss = float(engine.train_batch()) if with_data else None
        found.append((engine.pipecomp_config.activations.bits(0), loss))
        assert all(g is None for g in gradients)
        engine.close()
    return found, said


@pytest.mark.parametrize(("forward", "backward", "with_data"), [("auto", "auto", True), (3, "auto", False)])
def test_every_rank_takes_the_same_bits(forward, backward, with_data, tmp_path):
    ranks = run_ranks(2, trained, str(tmp_path), forward, backward, with_data, timeout_s=HANG_S)
    (first, said), (second, silent) = ranks[0], ranks[1]
    assert first == second
    for (f, b), _ in first:
        assert f == 3 or forward == "auto"
        assert 2 <= f <= 8
        assert 4 <= b <= 8
    assert len(said) == 2
    assert "bits 'auto': " in said[0]
    assert "uncompressed" in said[0]
    assert silent == []


def refused(rank, world, note):
    import pipecomp

    section = {"activations": {"method": "aqsgd", "forward_bits": "auto"}, "store": {"backend": "memory"}}
    with pytest.raises(ConfigError, match="'none' with one stage"):
        pipecomp.initialize(gpt2(), num_stages=1, config=ds_config(section), training_data=samples())
    return True


def test_auto_with_one_stage_is_refused():
    assert run_ranks(1, refused, timeout_s=HANG_S)[0]
