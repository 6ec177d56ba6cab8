"""Bits that change over a run: what lines keep of them, the chart, and what is said of a setting that is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipecomp.report import charts
from pipecomp.report.advice import RunSimulation, simulate, try_changes
from pipecomp.report.metrics import bits
from pipecomp.report.page import write_report
from pipecomp.report.reader import read_runs
from pipecomp.report.recorder import METRICS, RANKS, RUN
from pipecomp.report.summary import summarize
from pipecomp.stats import code_bits
from tests.report.runs import AQSGD, make_run, slow

ERROR = {"error": 0.07, "min": 2, "max": 8}


def rank(forward: tuple[int, int], backward: tuple[int, int], replica: int = 0) -> dict[str, Any]:
    ways = (("forward", forward), ("backward", backward))
    link = {way: {"code_bits": spent, "values_quantized": values} for way, (spent, values) in ways}
    return {"replica": replica, "links": {"0->1": link}}


def test_both_ends_of_a_link_count_once_and_replicas_add_up() -> None:
    ranks = [rank((30, 10), (8, 2)), rank((30, 10), (8, 2)), rank((50, 10), (0, 0), replica=1)]
    assert code_bits(ranks) == {"0->1": [80, 20, 8, 2]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run whose packets have 5 bits forward in its first half, then 3; nothing is quantized on the way back."""
    make_run(tmp_path / "run", {**AQSGD, "forward_bits": ERROR}, network=slow(), told=True)
    path = tmp_path / "run" / METRICS
    lines, spent = [json.loads(line) for line in path.read_text().splitlines()], 0
    for line in lines:
        if "bits" in line:
            spent += 500 if 2 * line["step"] <= len(lines) else 300
            line["bits"] = {"0->1": [spent, 100 * line["step"], 0, 0]}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "run"


def test_bits_over_time(folder: Path) -> None:
    (run,) = read_runs([folder])
    steps, (forward, back) = bits(run)
    assert steps[0] == 1
    assert (forward[0], forward[-1], set(back)) == (5.0, 3.0, {None})
    chart = charts.bits([summarize(run)])
    assert chart is not None
    assert [trace["name"] for trace in chart.figure["data"]] == ["run, forward"]
    assert "5.0" in str(chart.figure["data"][0]["y"])


def test_bits_that_never_change_have_no_chart(tmp_path: Path) -> None:
    make_run(tmp_path, network=slow())
    (run,) = read_runs([tmp_path])
    assert set(bits(run)[1][0]) == {4.0}
    assert charts.bits([summarize(run)]) is None


@pytest.mark.parametrize("new", [0.0, 0.5, 1.0])
def test_advice_counts_the_bits_that_packets_had(tmp_path: Path, new: float) -> None:
    """Changes had 3 bits, gradients 6: what "method none" takes does not depend on whether an error made them so.

    First visits have their 8 bits, which are in the mean of all.
    """
    seconds = {}
    for name, settings in (("numbers", AQSGD), ("errors", {**AQSGD, "forward_bits": ERROR, "backward_bits": ERROR})):
        folder = tmp_path / name
        make_run(folder, AQSGD, network=slow(), told=True)
        facts = json.loads((folder / RUN).read_text())
        facts["settings"]["activations"] |= settings
        (folder / RUN).write_text(json.dumps(facts))
        ranks = json.loads((folder / RANKS).read_text())
        for rank in (*ranks["halfway"], *ranks["end"]):
            for link in rank["links"].values():
                samples = link["delta_samples"]
                link |= {"full_samples": new * samples, "delta_samples": (1 - new) * samples}
                link["forward"]["code_bits"] = (3 + new * (8 - 3)) * link["forward"]["values_quantized"]
                link["backward"]["code_bits"] = 6 * link["backward"]["values_quantized"]
        (folder / RANKS).write_text(json.dumps(ranks))
        (run,) = read_runs([folder])
        now = simulate(run)
        assert isinstance(now, RunSimulation)
        assert now.mean_bits == [(3.0 + 5.0 * new, 6.0)]
        assert now.new_share == [new]
        seconds[name] = {change.what: change.step_s for change in try_changes(run, now)}
    assert seconds["errors"]["method none"] == pytest.approx(seconds["numbers"]["method none"])


def test_a_page_says_the_error_and_advises_no_number_instead(folder: Path) -> None:
    (run,) = read_runs([folder])
    now = simulate(run)
    assert isinstance(now, RunSimulation)
    tried = [change.what for change in try_changes(run, now)]
    assert tried
    assert not any(what.startswith("forward_bits") or "bits forward" in what for what in tried)
    page = Path(write_report([folder], folder / "page.html")).read_text(encoding="utf-8")
    assert "2 to 8 (error 0.07) bits forward" in page
    assert "Bits over time" in page
