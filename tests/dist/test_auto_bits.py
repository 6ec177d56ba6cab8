"""Bits that are found when a run begins, over processes: the same on every rank, and a run goes on with them."""

from __future__ import annotations

import pytest
import torch

from pipecomp.config.activations import ConstantError
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import ConfigError
from pipecomp.plan.search import constant_error_bits
from tests.dist.trainer_work import unequal
from tests.limits import HANG_S
from tests.models import LENGTH, ds_config, gpt2, samples

pytestmark = pytest.mark.ranks
RATED = {"error": 0.001, "mbit_per_s": 1}


def sentences():
    """Collect rank 0's lines about bits, from here on."""
    import logging

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    for name in ("pipecomp.plan.auto_bits", "pipecomp.engine.checkpointing"):
        logging.getLogger(name).addHandler(handler)
    return said


def trained(rank, world, note, folder, forward, backward, with_data):
    import pipecomp

    said, found = sentences(), []
    section = {
        "activations": {"method": "aqsgd", "forward_bits": forward, "backward_bits": backward},
        "store": {"path": f"{folder}/messages", "run": "twice"},
    }
    for _ in range(2):  # the second one goes on with the first one's messages
        engine = pipecomp.initialize(
            gpt2(), num_stages=2, config=ds_config(section), training_data=samples() if with_data else None
        )
        gradients = [p.grad for p in engine.stage.parameters()]
        loss = float(engine.train_batch()) if with_data else None
        found.append((engine.pipecomp_config.activations.bits(0), loss))
        network = engine.describe()["network"]  # as measured, for the report
        assert network["measured"]
        assert network["forward"][0]["bits_per_s"] > 1e6
        assert all(g is None for g in gradients)
        engine.close()
    return found, said


@pytest.mark.parametrize(("forward", "backward", "with_data"), [("auto", "auto", True), (3, "auto", False)])
def test_every_rank_takes_the_same_bits(forward, backward, with_data, tmp_path):
    ranks = run_ranks(2, trained, str(tmp_path), forward, backward, with_data, timeout_s=HANG_S)
    (first, said), (second, silent) = ranks[0], ranks[1]
    assert first == second
    for (f, b), _ in first:
        assert f in ((3,) if forward == 3 else (2, *(constant_error_bits("forward_bits", n) for n in range(3, 9))))
        assert b in [constant_error_bits("backward_bits", n) for n in range(4, 9)]
    assert len(said) == 2
    assert "bits 'auto': " in said[0]
    assert "uncompressed" in said[0]
    assert silent == []


def resumed(rank, world, note, folder):
    """Computing seems long when the run begins, and no time at all when it goes on."""
    import pipecomp
    from pipecomp.plan import auto_bits
    from pipecomp.plan.measure import StageTime

    said, found = sentences(), {}
    auto_bits.measure_links = None  # rates are given
    section = {
        "activations": {"method": "aqsgd", "forward_bits": RATED, "backward_bits": RATED},
        "store": {"path": f"{folder}/messages", "in_checkpoints": True, "drift_check": 1},
    }
    for name, compute_s in (("begun", 10.0), ("goes on", 1e-9)):
        auto_bits.time_stage = lambda *_, s=compute_s, **more: StageTime(forward_s=s, backward_s=s)
        engine = pipecomp.initialize(gpt2(), num_stages=2, config=ds_config(section), training_data=samples())
        bits = [engine.pipecomp_config.activations.bits(0)]
        if name == "begun":
            [engine.train_batch() for _ in range(5)]
            engine.save_checkpoint(f"{folder}/checkpoint")
        else:
            engine.load_checkpoint(f"{folder}/checkpoint")
            assert engine.resumed.exact
        bits.append(engine.pipecomp_config.activations.bits(0))
        losses = [float(engine.train_batch()) for _ in range(3)]
        link = engine.comm_stats()["links"]["0->1"]
        found[name] = bits, losses, (link["forward"]["mean_bits"], link["backward"]["mean_bits"])
        assert engine.describe()["network"] is None, "rates are no measurement"
        facts = engine.describe()["settings"]["activations"]
        assert facts["forward_bits"] == {k: v for k, v in bits[1][0].model_dump().items() if v is not None}
        engine.close()
    return found, said


def test_a_run_that_goes_on_takes_the_bits_of_its_checkpoint(tmp_path):
    ranks = run_ranks(2, resumed, str(tmp_path), timeout_s=HANG_S)
    (first, said), (second, silent) = ranks[0], ranks[1]
    assert first == second
    most = (ConstantError(error=0.001), ConstantError(error=0.001))
    assert first["begun"][0] == [most, most]
    measured, taken = first["goes on"][0]
    assert measured == (2, ConstantError(error=0.001, max=4))
    assert taken == most
    assert first["goes on"][1] == first["begun"][1], "bit for bit"
    assert min(first["goes on"][2]) > 6
    assert [sentence.split(":")[0] for sentence in said] == ["bits within the links' rates"] * 2 + ["bits"]
    assert "instead of this start" in said[2]
    assert silent == []


def limited(rank, world, note, error):
    """Three stages; the second link is so slow that nothing hides its packets."""
    import pipecomp

    rated = {**error, "mbit_per_s": [1e6, 0.001]}
    section = {"activations": {"method": "direct", "forward_bits": rated, "backward_bits": rated}}
    engine = pipecomp.initialize(gpt2(), num_stages=3, config=ds_config(section), training_data=samples())
    engine.train_batch()
    links = engine.comm_stats()["links"]
    engine.close()
    return {name: [link[way]["mean_bits"] for way in ("forward", "backward")] for name, link in links.items()}


def test_no_packet_has_more_bits_than_its_link_hides():
    ranks = run_ranks(3, limited, {"error": 0.001}, timeout_s=HANG_S)
    assert ranks[0] == {"0->1": [8, 8]}
    assert ranks[1] == {"0->1": [8, 8], "1->2": [2, 4]}
    assert ranks[2] == {"1->2": [2, 4]}


def measured_for_a_trainer(rank, world, note, folder):
    """With how many tokens bits are measured: of data as the collator makes them, and of none."""
    import tests.dist.trainer_work as work
    from pipecomp import PipelineTrainer
    from pipecomp.plan import auto_bits

    def wide(chosen):
        return {k: torch.nn.functional.pad(x, (0, 20 - x.shape[1])) for k, x in work.padded(chosen).items()}

    seen, timed = {}, auto_bits.time_stage

    def time_stage(stage, count, tokens, **more):
        seen[name] = count, tokens
        return timed(stage, count, tokens, **more)

    auto_bits.time_stage = time_stage
    for name, data, collate in (
        ("padded", work.unequal(40), work.padded),
        ("wide", work.unequal(40), wide),
        ("none", None, work.padded),
    ):
        section = {"activations": {"method": "direct", "forward_bits": RATED, "backward_bits": RATED}}
        trainer = PipelineTrainer(gpt2(2, 16), work.arguments(folder), collate, data, pipecomp=section)
        state = torch.get_rng_state()
        tokens = trainer._sample_tokens()
        assert torch.equal(torch.get_rng_state(), state)
        assert trainer.engine is not None
        assert seen[name] == (work.MICRO_BATCH, tokens or LENGTH)
        trainer.end()
    return {name: tokens for name, (_, tokens) in seen.items()}


def test_a_trainer_measures_with_samples_as_long_as_its_own(tmp_path):
    longest = max(len(s["input_ids"]) for s in unequal(32))
    expected = {"padded": longest, "wide": 20, "none": LENGTH}
    assert longest < 20 < LENGTH
    assert run_ranks(2, measured_for_a_trainer, str(tmp_path), timeout_s=HANG_S) == {0: expected, 1: expected}


def refused(rank, world, note):
    import pipecomp

    section = {"activations": {"method": "aqsgd", "forward_bits": "auto"}, "store": {"backend": "memory"}}
    with pytest.raises(ConfigError, match="'none' with one stage"):
        pipecomp.initialize(gpt2(), num_stages=1, config=ds_config(section), training_data=samples())
    return True


def test_auto_with_one_stage_is_refused():
    assert run_ranks(1, refused, timeout_s=HANG_S)[0]


def scaled(rank, world, note, folder, micro_batch, dropout):
    """Five steps and a checkpoint, then three more twice: at once, and after a resume. Ends compare their stores."""
    import pipecomp

    bits = {"forward_bits": 2, "backward_bits": 2, "backward_method": "delta", "first_visit": 4}
    section = {
        "activations": {"method": "aqsgd", "scale": "auto", **bits},
        "store": {"path": f"{folder}/messages", "in_checkpoints": True, "drift_check": 1},
    }
    found = {}
    for name in ("begun", "goes on"):
        config = ds_config(section, micro_batch=micro_batch, micro_batches=1)
        model = gpt2(resid_pdrop=dropout)
        engine = pipecomp.initialize(model, num_stages=2, config=config, training_data=samples())
        if name == "begun":
            [engine.train_batch() for _ in range(9)]
            engine.save_checkpoint(f"{folder}/checkpoint")
        else:
            engine.load_checkpoint(f"{folder}/checkpoint")
            assert engine.resumed.exact
        losses = [float(engine.train_batch()) for _ in range(3)]
        facts = engine.describe()["settings"]["activations"]
        found[name] = losses, facts["scale"], facts["gain"]
        engine.close()
    return found


@pytest.mark.parametrize(
    ("micro_batch", "dropout", "scale", "gain"),
    [(3, 0.1, "channels", "least_error"), (3, 0.0, "channels", "unbiased"), (2, 0.0, "cached_channels", "unbiased")],
)
def test_automatic_scales_train_and_resume_alike_on_every_rank(micro_batch, dropout, scale, gain, tmp_path):
    """And both ends hold the same, which they compare after every step."""
    ranks = run_ranks(2, scaled, str(tmp_path), micro_batch, dropout, timeout_s=HANG_S)
    assert ranks[0] == ranks[1]
    losses, *settled = ranks[0]["begun"]
    assert settled == [{"forward": scale, "backward": scale}, {"forward": gain, "backward": "auto"}]
    assert ranks[0]["goes on"] == (losses, *settled)
