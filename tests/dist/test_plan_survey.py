"""`pipecomp plan --measure`: on one machine, and by two ranks with the link between them."""

from __future__ import annotations

import io
import json
import os

import pytest
import torch.distributed as dist
from rich.console import Console

from pipecomp.allreduce.group import Group
from pipecomp.distributed import rendezvous
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.distributed.rendezvous import start_processes
from pipecomp.errors import ConfigError, LinkError
from pipecomp.netlab import Lab
from pipecomp.netlab.software import throttle_to
from pipecomp.plan.command import run_plan
from pipecomp.plan.options import PlanOptions
from pipecomp.plan.profile import Profile
from pipecomp.plan.simulation import TCP_SHARE
from tests.limits import HANG_S
from tests.tls.meshes import keys_for

pytestmark = pytest.mark.ranks

OPTIONS = {"batch": 4, "micro_batch": 1, "tokens": 16, "measure": True}


@pytest.fixture
def model(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 100,
        "max_position_embeddings": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def planned(rank, world, note, model, options):
    out = io.StringIO()
    options = {**OPTIONS, "model": str(model), "store": model / "messages", **options}
    try:
        return run_plan(Console(file=out, width=140), PlanOptions(**options), throttle_to), out.getvalue()
    except (ConfigError, LinkError) as error:
        return None, str(error)


def test_two_ranks_measure_what_connects_them(model):
    ranks = run_ranks(2, planned, model, {}, timeout_s=HANG_S)
    found, text = ranks[0]
    assert ranks[1] == (None, "")
    assert "the slowest of 2" in " ".join(text.split())
    assert "measured" in {row["network"] for row in found["methods"]}
    assert found["cuts"][0] == 0
    assert len(found["cuts"]) == 3
    (link,) = found["links"]
    for way in ("forward", "backward"):
        assert link[way]["bits_per_s"] > 1e6
        assert 0 < link[way]["latency_s"] < 1
    for key in ("encode_values_s", "decode_values_s", "disk_bytes_s"):
        assert found["speeds"][key] > 0
    assert set(found["speeds"]["average"]) == {"quantize", "reduce", "decode"}
    assert list(model.iterdir()) == [model / "config.json"]


def planned_apart(rank, world, note, model):
    rendezvous.machine = lambda: f"machine {rank}"
    return planned(rank, world, note, model, {})


def test_machines_that_cannot_reach_each_other_are_told_what_to_set(model):
    """gloo would say, after 20 seconds, connectFullMesh failed."""
    for found, told in run_ranks(2, planned_apart, model, timeout_s=HANG_S).values():
        assert found is None
        assert "gloo would use addresses that other machines cannot reach: rank 0 127.0.0.1" in told
        assert "Set GLOO_SOCKET_IFNAME" in told


def test_ranks_of_machines_measure_the_line_within(model):
    options = {"stages": 2, "layout": "replicas-across"}
    with Lab(nodes=2, bandwidth="5mbit", software=True) as lab:
        found, _ = lab.run(planned, model, options, procs_per_node=2, timeout_s=HANG_S)[0]
    assert found["chosen"]["layout"] == found["config"]["pipecomp"]["layout"] == "replicas-across"
    (link,) = found["links"]
    assert link["forward"]["bits_per_s"] > 2e7, "not that of the line between machines"


def test_layouts_of_ranks_on_one_machine_do_not_differ(model):
    """Each of them over its link to the next, and no machine has a line to another one."""
    options = {"stages": 2, "layout": "replicas-across"}
    ranks = run_ranks(4, planned, model, options, timeout_s=HANG_S)
    assert "layout: got 'replicas-across'" in ranks[0][1]
    assert "All ranks are on one machine" in ranks[0][1]


def planned_then_grouped(rank, world, note, model):
    start_processes()
    planned(rank, world, note, model, {"stages": 1, "batch": world})
    made = Group(list(range(world)), timeout_s=30.0).ranks  # as the engine makes one then
    dist.barrier()
    return made


def test_replicas_in_a_row_make_a_group_after_they_have_measured(model):
    found = run_ranks(3, planned_then_grouped, model, timeout_s=HANG_S)
    assert found == {rank: [0, 1, 2] for rank in range(3)}


def test_replicas_of_one_stage_measure_what_connects_them(model):
    found, _ = run_ranks(2, planned, model, {"stages": 1}, timeout_s=HANG_S)[0]
    assert (found["links"], found["chosen"]["replicas"]) == ([], 2)
    # A gradient of float32 over a line of at most 1 Tbit/s, there and back.
    assert found["chosen"]["average_s"] > 32 * sum(found["parameters"]) / 1e12
    alone, _ = run_ranks(1, planned, model, {"stages": 1}, timeout_s=HANG_S)[0]
    assert alone["chosen"]["average_s"] == 0


def test_options_that_ranks_measure_are_refused(model):
    ranks = run_ranks(2, planned, model, {"bandwidth": "1gbit"}, timeout_s=HANG_S)
    assert "bandwidth: got '1gbit'" in ranks[0][1]
    ranks = run_ranks(1, planned, model, {"speed": "1"}, timeout_s=HANG_S)
    assert "speed: got '1', allowed: no value together with --measure" in ranks[0][1]


def test_one_machine_and_its_profile_again(model, tmp_path):
    options = {"nodes": 2, "stages": 2, "bandwidth": "10mbit"}
    found, _ = planned(0, 1, None, model, options)
    assert found["links"][0]["forward"]["bits_per_s"] == pytest.approx(1e7 * TCP_SHARE)
    assert Profile.from_dict(found["profile"]).measured.startswith("measured")
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(found))
    again, _ = planned(0, 1, None, model, {**options, "measure": False, "profile": file, "tokens": None})
    assert again["stage_s"] == found["stage_s"]
    assert again["cuts"] == found["cuts"]


def planned_with_keys(rank, world, note, model, keys):
    os.environ["PIPECOMP_KEYS"] = f"{keys}/rank-{rank}"
    return planned(rank, world, note, model, {})


def test_with_keys_links_are_measured_over_tls(model, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys")
    keys_for(keys, 2)
    found, _ = run_ranks(2, planned_with_keys, model, str(keys), timeout_s=HANG_S)[0]
    (link,) = found["links"]
    assert link["forward"]["bits_per_s"] > 1e6


def planned_with_a_failure(rank, world, note, model, function):
    from pipecomp.plan import measure

    def fails(*given, **more):
        raise ConfigError("store", "a folder", "one with room")

    if rank == 1:
        setattr(measure, function, fails)
    return planned(rank, world, note, model, {})[1]


@pytest.mark.parametrize("function", ["survey_machine", "measure_links"])
def test_a_rank_that_cannot_measure_ends_all(model, function):
    found = run_ranks(2, planned_with_a_failure, model, function, timeout_s=HANG_S)
    assert "one with room" in found[1]
    assert "rank 1 could not measure: " in found[0]
    assert "one with room" in found[0]
