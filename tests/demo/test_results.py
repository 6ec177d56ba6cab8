"""The demo's results from measured steps: times of steps that were not run, the time to a loss, the last sentence."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import pytest
from rich.console import Console

from pipecomp.demo.results import (
    check_same_start,
    compare,
    epoch_means,
    extend_run,
    extrapolate,
    megabytes,
    plot,
    result_table,
    seconds_per_step,
    steps_to,
    summarize,
    table_notes,
)
from pipecomp.demo.settings import Settings
from pipecomp.errors import ConfigError, DataError

SETTINGS = Settings(training=32, epochs=4)  # 2 steps an epoch
LOSSES = {
    "none": [5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 2.0, 2.0],
    "direct": [5.0, 5.0, 4.5, 4.5, 4.0, 4.0, 3.5, 3.5],
    "aqsgd": [5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 2.5, 2.5],
}


def result(method: str, step_s: float, losses: list[float] | None = None, measured: int = 8) -> dict[str, Any]:
    losses = losses or LOSSES[method]
    return {
        "method": method, "forward_bits": 2, "backward_bits": 4, "losses": losses, "eval_loss": 5.0, "step_s": step_s,
        "train_loss": epoch_means(losses, 2)[-1], "seconds": [step_s * (i + 1) for i in range(8)],
        "measured_steps": measured, "forward_bytes_sent": 10**6, "backward_bytes_sent": 10**6,
    }  # fmt: skip


def test_later_steps_last_as_long_as_those_that_were_timed():
    measured = [2.0, 4.0, 5.0, 6.0, 7.0]
    assert seconds_per_step(measured, warm_up=2) == 1.0
    assert extrapolate(measured, 8, 2) == [2.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    assert extrapolate(measured, 5, 2) == measured
    assert seconds_per_step([3.0], warm_up=2) == 3.0


@pytest.mark.parametrize(("method", "bits"), [("none", (32, 32)), ("bf16", (16, 16)), ("aqsgd", (2, 4))])
@pytest.mark.parametrize(("measured", "step_s"), [(8, 2.0), (4, 1.0)])
def test_a_methods_numbers_from_those_of_its_ranks(method, bits, measured, step_s):
    """Three stages; of a run that was stopped, steps after the third count."""
    way = {"bytes_raw": 100, "bytes_sent": 10}
    link = {"forward": way, "backward": {"bytes_raw": 300, "bytes_sent": 30}}
    seconds = [4.0, 6.0, 8.0, 9.0, 11.0, 13.0, 15.0, 16.0][:measured]
    rank = {"method": method, "losses": LOSSES["none"], "seconds": seconds, "eval_loss": 6.0, "store_bytes": 7}
    ranks = [
        {**rank, "stats": {"links": dict.fromkeys(names, link)}} for names in (["0->1"], ["0->1", "1->2"], ["1->2"])
    ]
    found = summarize(SETTINGS, ranks)
    assert (found["forward_bits"], found["backward_bits"]) == bits
    assert (found["train_loss"], found["eval_loss"], found["store_bytes"]) == (2.0, 6.0, 21)
    sizes = [found[f"{direction}_bytes_{kind}"] for direction in ("forward", "backward") for kind in ("raw", "sent")]
    assert sizes == [200, 20, 600, 60]
    assert (found["step_s"], found["measured_steps"], len(found["seconds"])) == (step_s, measured, 8)


def test_the_table_has_each_methods_own_numbers():
    direct = result("direct", 4.0) | {"eval_loss": 6.5, "forward_bytes_sent": 1_230_000, "backward_bytes_sent": 456_000}
    found = compare(SETTINGS, [result("none", 60.0, measured=3), direct, result("aqsgd", 5.0)])
    rows = list(zip(*(column.cells for column in result_table(found).columns), strict=True))
    assert rows[0] == ("FP32", "2.000", "5.000", "1 + 1", "60.00", "7 min 00 s*")
    assert rows[1] == ("DirectQ fw2 bw4", "3.500", "6.500", "1.23 + 0.456", "4.00", "not reached")
    assert rows[2] == ("AQ-SGD fw2 bw4", "2.500", "5.000", "1 + 1", "5.00", "40 s")
    alone = result_table(compare(SETTINGS, [direct]))
    assert list(alone.columns[-1].cells) == ["–"]


def test_means_are_of_whole_epochs():
    assert epoch_means([4.0, 2.0, 1.0, 3.0], 2) == [3.0, 1.5, 2.0]
    assert steps_to([4.0, 2.0, 1.0, 3.0], 2, 1.5) == 3
    assert steps_to([4.0, 2.0, 1.0, 3.0], 2, 1.4) is None


def test_what_is_compared():
    found = compare(SETTINGS, [result("none", 60.0, measured=3), result("direct", 4.0), result("aqsgd", 5.0)])
    none, direct, aqsgd = found["results"]
    assert found["loss"] == 2.5
    assert found["gap_closed"] == pytest.approx((3.5 - 2.5) / (3.5 - 2.0))
    assert (none["reached"], direct["reached"], aqsgd["reached"]) == (7, None, 8)
    assert found["faster"] == pytest.approx(7 * 60 / 40)
    assert found["sentence"] == (
        "Over this link of 5 Mbit/s, FP32 needs 7 min 00 s to reach the training loss that AQ-SGD reached in 40 s: "
        "10.5× as long; DirectQ did not reach it."
    )
    said = " ".join(table_notes(found))
    assert "Derived: 3 steps were run over this link" in said
    assert "closes 67 % of the gap" in said


def test_the_sentence_without_some_of_the_methods():
    def sentence(*results: dict[str, Any]) -> str | None:
        return compare(SETTINGS, list(results))["sentence"]

    assert sentence(result("none", 60.0)) is None
    assert sentence(result("aqsgd", 5.0)) is None
    assert sentence(result("direct", 5.0), result("aqsgd", 5.0)) == (
        "Over this link of 5 Mbit/s, AQ-SGD reached a training loss of 2.500 in 40 s; DirectQ did not reach it."
    )
    better = result("direct", 5.0, losses=LOSSES["none"])
    assert sentence(result("none", 60.0), better, result("aqsgd", 5.0)) == (
        "Over this link of 5 Mbit/s, FP32 needed 7 min 00 s to reach the training loss that AQ-SGD reached in 40 s: "
        "10.5× as long; DirectQ reached it in 35 s."
    )
    assert compare(SETTINGS, [result("none", 1.0), better, result("aqsgd", 5.0)])["gap_closed"] is None


@pytest.mark.parametrize("method", ["none", "direct", "aqsgd"])
@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_a_run_that_lost_its_loss_leaves_the_others_results(tmp_path, method, lost):
    losses = {**LOSSES, method: [*LOSSES[method][:5], lost, lost, lost]}
    found = compare(SETTINGS, [result(name, 5.0, losses=losses[name]) for name in losses])
    assert (found["loss"] is None) == (method == "aqsgd")
    assert found["gap_closed"] is None
    assert all(math.isfinite(found[key]) for key in ("loss", "faster") if found[key] is not None)
    assert ("AQ-SGD ended with a training loss that is not finite" in found["sentence"]) == (method == "aqsgd")
    assert table_notes(found)
    Console(file=io.StringIO()).print(result_table(found))
    plot(found, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").is_file()


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0"), (123_456, "0.123"), (99_940_000, "99.9"), (999_600_000, "1000"), (12.3e9, "12300")]
)
def test_megabytes(size, text):
    assert megabytes(size) == text


def test_losses_that_depend_on_the_link_are_an_error():
    check_same_start([3.0, 2.0], [3.0, 2.0, 1.0])
    check_same_start([3.0, math.nan], [3.0, math.nan, math.nan])
    with pytest.raises(DataError, match=r"in step 2 nan over the slow one, else 2\.0"):
        check_same_start([3.0, math.nan], [3.0, 2.0, 1.0])
    with pytest.raises(DataError, match=r"in step 2 2\.0000000000000004 over the slow one, else 2\.0"):
        check_same_start([3.0, 2.0000000000000004], [3.0, 2.0, 1.0])


def test_a_lengthened_run_says_what_it_is(tmp_path):
    def line(step: int, loss: float, wait: float) -> dict[str, Any]:
        return {
            "step": step,
            "seconds": step,
            "step_s": 1.0,
            "loss": loss,
            "links": {"0->1": [step]},
            "waits": {"0->1": wait},
        }

    few, whole = tmp_path / "few", tmp_path / "whole"
    for folder, lines in (
        (few, [line(1, 3.0, 2.0), line(2, 2.5, 4.0)]),
        (whole, [line(s, 3.0, 0.1) for s in (1, 2, 3)]),
    ):
        folder.mkdir()
        text = "".join(json.dumps(each) + "\n" for each in lines)
        (folder / "metrics.jsonl").write_text(text)
        (folder / "run.json").write_text(json.dumps({"format": 1, "status": "finished", "steps": len(lines)}))
    with (whole / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "seconds": 3.5, "eval": {"loss": 9.0}}) + "\n")
    extend_run(few, whole, [10.0, 30.0], warm_up=1)
    lines = [json.loads(text) for text in (few / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in lines] == [1, 2, 3, 3]
    assert [each["seconds"] for each in lines] == [1, 2, 50.0, 50.0]
    assert lines[2] == line(3, 3.0, 0.1) | {"seconds": 50.0, "step_s": 20.0, "waits": {"0->1": 6.0}}
    assert lines[3]["eval"] == {"loss": 9.0}
    facts = json.loads((few / "run.json").read_text())
    assert (facts["steps"], facts["seconds"]) == (3, 50.0)
    assert "only the first 2 steps were run over this link" in facts["remark"]


def test_settings_that_cannot_be():
    with pytest.raises(ConfigError, match="stages: got 1, allowed: 2 to 4"):
        Settings(stages=1)
    with pytest.raises(ConfigError, match="bandwidth: got 'slow'"):
        Settings(bandwidth="slow")
    with pytest.raises(ConfigError, match="seed: got -1, allowed: a whole number from 0 to 4294967295"):
        Settings(seed=-1)
