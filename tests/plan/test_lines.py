"""Lines between machines and within them, and the order of ranks that a plan chooses over these."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipecomp.errors import ConfigError
from pipecomp.plan.command import run_plan
from pipecomp.plan.lines import MachineLines, layouts_of
from pipecomp.plan.measure import find_machines
from pipecomp.plan.options import PlanOptions
from pipecomp.plan.simulation import TCP_SHARE, Channel
from pipecomp.rank_layout import LAYOUTS, REPLICAS_ACROSS, STAGES_ACROSS, RankLayout

SLOW, INNER = Channel(bits_per_s=1e8, latency_s=0.02), Channel(bits_per_s=5e9)
HALF = Channel(bits_per_s=5e7, latency_s=0.02)  # of a line that two links share


def test_two_machines_with_two_ranks_each():
    lines = MachineLines.alike(4, 2, SLOW, INNER)
    across, within = (lines.network(RankLayout(2, 2, name)) for name in LAYOUTS)
    assert (across.forward, across.backward, across.between) == ((HALF,), (HALF,), INNER)
    assert (within.forward, within.backward, within.between) == ((INNER,), (INNER,), HALF)
    assert lines.crossing(RankLayout(2, 2, STAGES_ACROSS)) == (True, False)
    assert lines.crossing(RankLayout(2, 2, REPLICAS_ACROSS)) == (False, True)


def test_four_stages_on_two_machines():
    """Only the middle link leaves a machine, for both replicas; or the averages of all four stages do."""
    lines = MachineLines.alike(8, 4, SLOW, INNER)
    across, within = (lines.network(RankLayout(4, 2, name)) for name in LAYOUTS)
    assert across.forward == (INNER, HALF, INNER)
    assert across.between == INNER
    assert within.forward == (INNER,) * 3
    assert within.between == Channel(bits_per_s=SLOW.bits_per_s / 4, latency_s=SLOW.latency_s)


def test_each_line_has_its_own_rate():
    fast = Channel(bits_per_s=1e9)
    lines = MachineLines(machines=(0, 0, 1, 1, 2, 2), inner=INNER, out=(SLOW, fast), back=(fast, SLOW))
    across = lines.network(RankLayout(3, 2, STAGES_ACROSS))
    fast_half = Channel(bits_per_s=5e8)
    assert across.forward == (HALF, fast_half)
    assert across.backward == (fast_half, HALF)
    within = lines.network(RankLayout(2, 3, REPLICAS_ACROSS))
    assert within.forward == (INNER,)
    assert within.between == HALF, "replicas wait for the slowest line"


def test_machines_are_found_by_name_and_by_lines_that_are_slowed_down():
    together, lab = [False] * 4, [[False, False, True, True]] * 2 + [[True, True, False, False]] * 2
    assert find_machines([["a", together], ["a", together], ["b", together], ["b", together]]) == [0, 0, 1, 1]
    assert find_machines([["a", together], ["b", together], ["a", together], ["b", together]]) == [0, 1, 0, 1]
    assert find_machines([["a", slowed] for slowed in lab]) == [0, 0, 1, 1]


def test_layouts_that_are_compared():
    lines = MachineLines.alike(4, 2, SLOW, INNER)
    both = [RankLayout(2, 2, name) for name in LAYOUTS]
    assert layouts_of("auto", [(1, 4), (2, 2), (4, 1)], lines) == [RankLayout(1, 4), *both, RankLayout(4, 1)]
    assert layouts_of("auto", [(2, 2)], None) == [RankLayout(2, 2)], "every rank has a line of its own"
    assert layouts_of("auto", [(2, 2)], MachineLines.alike(4, 4, SLOW, INNER)) == [RankLayout(2, 2)], "one machine"
    assert layouts_of(STAGES_ACROSS, [(2, 2)], lines) == both[:1]
    assert layouts_of(REPLICAS_ACROSS, [(1, 4), (2, 2)], lines) == both[1:]
    for pairs, found, machines, reason in (
        ([(4, 1)], lines, [], "4 stage.* 1 replica"),
        ([(1, 4)], lines, [], "1 stage.* 4 replica"),
        ([(2, 2)], None, [0, 0, 0, 0], "All ranks are on one machine"),
        ([(2, 2)], MachineLines.alike(4, 4, SLOW, INNER), [], "All ranks are on one machine"),
        ([(2, 2)], None, [0, 1, 2, 3], "Every machine has one process"),
    ):
        with pytest.raises(ConfigError, match=f"layout: got 'replicas-across'.*{reason}"):
            layouts_of(REPLICAS_ACROSS, pairs, found, machines)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4}
    config |= {"num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def planned(model: Path, **more: Any) -> tuple[dict[str, Any], str]:
    out = io.StringIO()
    given = {"nodes": 4, "stages": 2, "bandwidth": "20mbit", "speed": "1", "tokens": 64, "batch": 16, **more}
    options = PlanOptions(model=str(model), **given)
    return run_plan(Console(file=out, width=400), options), out.getvalue()


def test_the_plan_takes_what_crosses_less(model: Path):
    """Many samples' activations exceed adapters' gradients; those of few are less than all weights' gradients."""
    many, text = planned(model, per_machine=2, lora=1, batch=64)
    assert (many["chosen"]["layout"], many["config"]["pipecomp"]["layout"]) == (REPLICAS_ACROSS, REPLICAS_ACROSS)
    assert "Layout replicas-across: " in text
    assert "a step if gradients cross the line between machines (19.1 Mbit/s; unlimited within one)" in text
    few, text = planned(model, per_machine=2, batch=4, tokens=4)
    assert few["chosen"]["layout"] == STAGES_ACROSS
    assert "layout" not in few["config"]["pipecomp"]
    assert "Layout stages-across: " in text
    for made in (many, few):
        both = {}
        for layout in LAYOUTS:
            size = {"lora": 1, "batch": 64} if made is many else {"batch": 4, "tokens": 4}
            alone, text = planned(model, per_machine=2, layout=layout, **size)
            assert alone["chosen"]["layout"] == layout
            assert "Layout" not in text
            both[layout] = alone["chosen"]["step_s"]
        assert min(both, key=lambda layout: both[layout]) == made["chosen"]["layout"]


def test_without_several_nodes_on_a_machine_there_is_one_layout(model: Path):
    plain, text = planned(model, lora=1, batch=64)
    assert plain == planned(model, lora=1, batch=64, per_machine=1)[0]
    assert plain["chosen"]["layout"] == STAGES_ACROSS
    assert "Layout" not in text
    with pytest.raises(ConfigError, match=r"layout: got 'replicas-across'.*one process"):
        planned(model, layout=REPLICAS_ACROSS)


def test_the_line_within_a_machine(model: Path):
    found, _ = planned(model, per_machine=2, lora=1, batch=64, inner_bandwidth="1gbit", layout=REPLICAS_ACROSS)
    assert found["links"][0]["forward"]["bits_per_s"] == pytest.approx(1e9 * TCP_SHARE)
    slower, _ = planned(model, per_machine=2, lora=1, batch=64, inner_bandwidth="1mbit")
    assert slower["chosen"]["layout"] == STAGES_ACROSS, "the inner line is the slow one"


def test_wrong_options(model: Path):
    for more, problem in (
        ({"per_machine": 3}, "per-machine: got 3, allowed: a divisor of 4 nodes"),
        ({"per_machine": 0}, "per-machine: got 0"),
        ({"inner_bandwidth": "1gbit"}, "inner-bandwidth: got '1gbit', allowed: no value without --per-machine"),
        ({"layout": "across"}, "layout: got 'across', allowed: stages-across, replicas-across, auto"),
        (
            {"per_machine": 2, "stages": 3, "nodes": 6, "bandwidth": "1gbit/1mbit"},
            "one rate with --per-machine",
        ),
    ):
        with pytest.raises(ConfigError, match=problem):
            planned(model, **more)


def test_unlimited_lines_are_alike():
    lines = MachineLines.alike(4, 2, Channel(), Channel())
    for name in LAYOUTS:
        assert lines.network(RankLayout(2, 2, name)).slowest == math.inf
