"""Steps on other machines and with other cuts, predicted from what a run's plan has measured."""

from __future__ import annotations

from typing import Any

import pytest

from pipecomp.plan.new_cut import CutPlanner, NewCut, describe_machines, fit_links
from pipecomp.plan.options import PlanOptions
from pipecomp.plan.profile import PartCost, Profile
from tests.models import gpt2

BLOCKS, MICRO_BATCHES = 8, 4
FORWARD_S, BACKWARD_S = 0.004, 0.006  # of a block on one sample
NO_LIMIT = {"bits_per_s": None, "latency_s": 0.0}


def made(names: list[str], *, slowdowns: list[float] | None = None, link: dict[str, Any] = NO_LIMIT) -> dict[str, Any]:
    """A plan of machines that share out the blocks, with plain activations; ends of the model take no time."""
    block = PartCost(flops=1e6, kept_bytes=1e3, working_bytes=0.0, gradient_bytes=0.0)
    timed = PartCost(**{**vars(block), "forward_s": FORWARD_S, "backward_s": BACKWARD_S})
    nothing = PartCost(**{**vars(block), "flops": 0.0, "forward_s": 0.0, "backward_s": 0.0})
    profile = Profile(hidden=8, tokens=4, blocks=(timed,) * BLOCKS, first=nothing, last=nothing, call_s=(0.0, 0.0))
    stages = len(names)
    plan: dict[str, Any] = {
        "profile": profile.as_dict(),
        "speeds": {},
        "slowdowns": slowdowns or [],
        "links": [{"forward": link, "backward": link}] * (stages - 1),
        "cuts": [BLOCKS * stage // stages for stage in range(stages + 1)],
        "config": {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "pipecomp": {"tie": False},
        },
    }
    return {**plan, "machines": describe_machines(plan, names)}


def planner(plan: dict[str, Any], memory: float | None = None) -> CutPlanner:
    config = gpt2(BLOCKS, 8, tied=False).config
    return CutPlanner(plan, PlanOptions(model=config, measure=True, tie=False), memory)


def pipeline_s(stage_s: float, stages: int) -> float:
    """Seconds of a step over equal stages whose packets take no time: they fill, work and empty."""
    return (MICRO_BATCHES + stages - 1) * stage_s


def test_a_step_over_more_machines():
    found = planner(made(["a", "b"])).choose(["a", "b", "c", "d"])
    assert found.before_s == pytest.approx(pipeline_s(4 * (FORWARD_S + BACKWARD_S), 2))
    assert found.step_s == pytest.approx(pipeline_s(2 * (FORWARD_S + BACKWARD_S), 4))
    assert found.cuts == (0, 2, 4, 6, 8)
    assert found.pays


def test_a_machine_that_was_not_measured_is_as_slow_as_the_slowest():
    plan = made(["a", "b"], slowdowns=[0.5, 1.0])
    known = planner(plan)
    assert known.slowdowns(["a", "b", "new"], {}) == (0.5, 1.0, 1.0)
    lines = {"forward": {"bits_per_s": 2e6, "latency_s": 0.1}, "backward": {"bits_per_s": 1e6, "latency_s": 0.2}}
    slow = planner({**plan, "machines": describe_machines({**plan, "links": [lines]}, ["a", "b"])})
    network = slow.network(["b", "a", "new"])
    assert [channel.bits_per_s for channel in network.forward] == [1e6, 1e6]
    assert [channel.bits_per_s for channel in network.backward] == [2e6, 1e6]
    assert [channel.latency_s for channel in network.forward] == [0.2, 0.2]


def test_a_machine_that_comes_back_is_known_by_its_name():
    """Its seconds are of another survey, whose slowest machine may have been another one."""
    earlier = describe_machines(made(["a", "b", "c"], slowdowns=[0.5, 1.0, 0.25]), ["a", "b", "c"])
    now = made(["a", "b"], slowdowns=[0.5, 1.0])
    known = planner({**now, "machines": describe_machines(now, ["a", "b"], earlier)})
    assert known.slowdowns(["a", "b", "c"], {}) == pytest.approx((0.5, 1.0, 0.25))
    assert set(known.made["machines"]["lines"]) == {"a b", "b a", "b c", "c b"}


def test_a_slow_line_makes_another_machine_useless():
    line = {"bits_per_s": 1e4, "latency_s": 0.0}
    found = planner(made(["a", "b"], link=line)).choose(["a", "b", "c"])
    assert not found.pays
    assert found.step_s > 0.9 * found.before_s


def test_a_slow_machine_gets_fewer_blocks():
    known = planner(made(["a", "b"]))
    found = known.choose(["a", "b"], {"b": 3.0})
    assert found.cuts == (0, 6, 8)
    assert found.before_s > found.step_s
    assert found.pays
    plan = known.plan_of(found, {"b": 3.0})
    assert plan["cuts"] == [0, 6, 8]
    again = planner(plan)
    assert again.slowdowns(["a", "b"], {}) == pytest.approx((1.0, 3.0))
    assert again.stage_seconds() == pytest.approx([MICRO_BATCHES * 6 * 0.01] * 2)
    assert not again.choose(["a", "b"]).pays, "nothing has changed since"


def test_machines_on_the_same_cores_do_not_add_up():
    plan = made(["a", "b"])
    plan["shared_cores"] = [{"members": [0, 1], "at_once": 1.0}]
    shared = planner({**plan, "machines": describe_machines(plan, ["a", "b"])})
    assert shared.predict(["a", "b"]).step_s == pytest.approx(MICRO_BATCHES * BLOCKS * 0.01)


def test_a_cut_that_memory_does_not_allow():
    found = planner(made(["a", "b"]), memory=1.0).choose(["a", "b", "c", "d"])
    assert not found.fits
    assert not found.pays
    assert "more memory than the machines have" in str(found)


@pytest.mark.parametrize(("step_s", "pays"), [(0.9, True), (0.901, False), (1.2, False)])
def test_ten_percent_are_enough(step_s, pays):
    assert NewCut(names=("a",), cuts=(0, 1), step_s=step_s, before_s=1.0).pays is pays


def test_bits_of_links_that_are_no_more():
    bits = {"forward_bits": [4, {"error": 0.1, "max": 3}, 8], "backward_bits": 8}
    config = {"gradient_accumulation_steps": 2, "pipecomp": {"activations": {"method": "aqsgd", **bits}}}
    assert fit_links(config, 4) == config
    assert fit_links(config, 3)["pipecomp"]["activations"]["forward_bits"] == {"error": 0.1, "max": 3}
    assert config["pipecomp"]["activations"]["forward_bits"] == bits["forward_bits"]
