"""Checkpoints that go on where they were, and Hugging Face folders written without a common disk."""

from __future__ import annotations

import contextlib
import logging
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.distributed.rendezvous import _set_timeout
from pipecomp.engine import export
from pipecomp.errors import ConfigError
from tests.limits import HANG_S
from tests.models import ds_config, gpt2, samples

pytestmark = pytest.mark.ranks


BF16 = {"bf16": {"enabled": True}}
BF16_ZERO1 = {**BF16, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}


def trained(folder, section, more, steps, *, resume=False):
    import pipecomp

    engine = pipecomp.initialize(
        gpt2(seed=9 if resume else 0), num_stages=2, config=ds_config(section, **more), training_data=samples()
    )
    if resume:
        path, state = engine.load_checkpoint(f"{folder}/checkpoint")
        assert path is not None
        assert state["mine"] == 7
        assert "pipecomp" not in state
    return engine, [float(engine.train_batch()) for _ in range(steps)]


def saving(rank, world, note, folder):
    out = {}
    for name, section, more in (
        ("fp32", {}, {}),
        ("bf16", {}, BF16_ZERO1),
        ("zero1", {}, {"zero_optimization": {"stage": 1}}),
        ("aqsgd", {"activations": {"method": "aqsgd"}, "store": {"path": f"{folder}/aqsgd/m"}}, {}),
    ):
        where = f"{folder}/{name}"
        engine, _ = trained(where, section, more, 3)
        engine.save_checkpoint(f"{where}/checkpoint", client_state={"mine": 7})
        expected = [float(engine.train_batch()) for _ in range(4)]
        engine.close()
        engine, got = trained(where, section, more, 4, resume=True)
        out[name] = (expected, got)
        engine.close()
    said: list[str] = []
    log = logging.getLogger("pipecomp.engine.checkpointing")
    log.addFilter(lambda record: said.append(record.getMessage()) or True)
    for more in (BF16_ZERO1, BF16):
        trained(folder, {}, more, 0)[0].close()
    # At the start: who hears of it after hours of training has none of them saved.
    expected = "this run cannot save checkpoints (save_pretrained works)"
    assert [line.partition(":")[0] for line in said] == ([] if rank else [expected])
    engine, _ = trained(folder, {}, BF16, 1)
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage"):
        engine.save_checkpoint(f"{folder}/refused")
    engine.close()
    engine, _ = trained(folder, {}, {}, 2)
    own = f"{folder}/machine-{rank}/model"
    engine.save_pretrained(own)
    evaluated = float(engine.eval_batch(iter(eval_data()), num_micro_batches=2))
    engine.save_pretrained(own)  # over what is there
    with impatient_collectives():
        engine.save_pretrained(f"{folder}/machine-{rank}/slow")
    engine.close()
    return out, evaluated


@contextlib.contextmanager
def impatient_collectives():
    """All of torch's collectives but those of groups with a timeout of their own have a second while shards travel."""
    with pytest.MonkeyPatch.context() as patch:
        check, receive = export._checked_shards, export._receive

        def checked(*args):
            _set_timeout(timedelta(seconds=1), dist.group.WORLD)
            return check(*args)

        def slowly(*args):
            time.sleep(2)
            receive(*args)

        patch.setattr(distributed_c10d, "default_pg_timeout", timedelta(seconds=1))
        patch.setattr(export, "_checked_shards", checked)
        patch.setattr(export, "_receive", slowly)
        yield
    _set_timeout(default_pg_timeout, dist.group.WORLD)


def eval_data():
    from pipecomp.data import eval_batches

    return eval_batches(samples(4, seed=3), 2)


def test_checkpoints_and_folders(tmp_path):
    from transformers import AutoModelForCausalLM

    ranks = run_ranks(2, saving, str(tmp_path), timeout_s=HANG_S)
    for name, (expected, got) in ranks[0][0].items():
        if name == "aqsgd":  # the messages are newer than the checkpoint, so the errors differ
            assert got == pytest.approx(expected, rel=1e-2)
        else:
            assert got == expected, name
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "machine-0" / "model").eval()
    losses = [model(**b.inputs, labels=b.labels).loss.detach() for b in eval_data()]
    assert float(torch.stack(losses).mean()) == pytest.approx(ranks[0][1], rel=1e-6)
    for name in ("model", "slow"):
        assert (tmp_path / "machine-0" / name / "model.safetensors.index.json").is_file()
        assert list((tmp_path / "machine-1" / name).glob("*.safetensors*")) == []
