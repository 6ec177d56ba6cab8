"""The order of ranks, and where another one makes no difference."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from pipecomp.config import Config
from pipecomp.errors import ConfigError
from pipecomp.rank_layout import LAYOUTS, REPLICAS_ACROSS, STAGES_ACROSS, RankLayout

ROOT = Path(__file__).parents[1]


def test_who_is_together_on_a_machine():
    across, within = (RankLayout(2, 3, name) for name in LAYOUTS)
    assert across.pipelines() == [[0, 3], [1, 4], [2, 5]]
    assert across.averages() == [[0, 1, 2], [3, 4, 5]]
    assert within.pipelines() == [[0, 1], [2, 3], [4, 5]]
    assert within.averages() == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("stages", "replicas"), [(1, 1), (3, 1), (1, 4), (2, 2), (3, 2), (2, 5)])
def test_every_rank_has_one_place(name: str, stages: int, replicas: int):
    ranks = RankLayout(stages, replicas, name)
    places = [(k, r) for k in range(stages) for r in range(replicas)]
    assert sorted(ranks.rank(*place) for place in places) == list(range(ranks.world))
    assert all(ranks.place(ranks.rank(*place)) == place for place in places)
    numbers = [ranks.state_number(ranks.rank(*place)) for place in places]
    assert numbers == list(range(ranks.world)), "a state's number does not depend on the layout"


def test_a_layout_without_effect_is_refused():
    apart, together = ["a", "b", "c", "d"], ["a", "a", "b", "b"]
    for stages, replicas, machines in ((4, 1, together), (1, 4, together), (2, 2, apart)):
        RankLayout(stages, replicas, STAGES_ACROSS).check("layout", machines)
        with pytest.raises(ConfigError, match="layout: got 'replicas-across'"):
            RankLayout(stages, replicas, REPLICAS_ACROSS).check("layout", machines)
    RankLayout(2, 2, REPLICAS_ACROSS).check("layout", together)


def test_in_the_configuration():
    assert Config.from_dict({}).layout == STAGES_ACROSS
    plain, other = Config.from_dict({}), Config.from_dict({"layout": REPLICAS_ACROSS})
    assert "layout" not in plain.shared(), "checkpoints of earlier versions compare these values"
    assert other.shared()["layout"] == REPLICAS_ACROSS
    for wrong in ("auto", "across", 1, None):
        with pytest.raises(ConfigError, match="layout"):
            Config.from_dict({"layout": wrong})


def test_nothing_else_computes_a_rank_of_stages_and_replicas():
    """Ranks are divided by a number of processes in a few places, and by replicas or stages in one."""
    named = {"replicas", "R", "stages", "num_stages", "K", "data_parallel_size", "pipe_parallel_size"}
    found = []
    for room in ("pipecomp", "stages", "recipes", "benchmarks"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.FloorDiv, ast.Mod)):
                    left, right = ({_last_name(side)} for side in (node.left, node.right))
                    if left & {"rank", "global_rank"} and right & named:
                        found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert [place for place in found if not place.startswith("pipecomp/rank_layout")] == []


def _last_name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
