"""A run's folder: what is written, and what is read of it when parts are missing, cut off or of another version."""

from __future__ import annotations

import errno
import json
import logging
import math
import re
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipecomp.config import Config
from pipecomp.errors import ConfigError, DataError
from pipecomp.report import charts
from pipecomp.report import charts as timeline_module
from pipecomp.report.metrics import (
    common_loss,
    hit_rates,
    link_use,
    rank_times,
    seconds_to,
    step_seconds,
    training_curve,
)
from pipecomp.report.page import render_page, try_write_report, write_report
from pipecomp.report.reader import RunRecord, read_runs
from pipecomp.report.recorder import METRICS, PAGE, PLAN, RANKS, RUN, SAMPLE, TRACE, Recorder, hits, waits
from pipecomp.report.summary import comparison, summarize
from pipecomp.stats import GroupStats, counted_since
from pipecomp.utils import units
from pipecomp.utils.files import atomic_write_text
from tests.report.runs import AQSGD, COSTS, MICRO_BATCHES, STEPS, counters, made_step, make_run, slow


def with_line(folder, line):
    """Write another line in the place of the one of this step."""
    lines = (folder / METRICS).read_text().splitlines()
    lines[line["step"] - 1] = json.dumps(line)
    (folder / METRICS).write_text("\n".join(lines) + "\n")


@pytest.fixture
def folder(tmp_path):
    make_run(tmp_path / "run", network=slow())
    return tmp_path / "run"


def test_a_run_is_read_as_it_was_recorded(folder):
    (run,) = read_runs([folder])
    assert run.name == "run"
    assert [line["step"] for line in run.steps] == list(range(1, STEPS + 1))
    assert run.facts["status"] == "finished"
    assert run.notes == []
    (link,) = link_use(run)
    count = STEPS * MICRO_BATCHES
    assert link.forward == (4 * 256 * 64 * 4 * count, run.ranks["end"][0]["links"]["0->1"]["forward"]["bytes_sent"])
    assert link.hit_rate == 1.0
    assert 0 < link.waited < 1
    first, second = rank_times(run)
    assert (first.rank, second.rank, second.stage) == (0, 1, 1)
    assert first.parts["compute"] == pytest.approx(count * (COSTS.forward_s + COSTS.backward_s))
    assert set(hit_rates(run)[1]) == {1.0}


def test_a_resumed_run_goes_on_after_the_lines_of_the_first_part(folder):
    before = json.loads((folder / METRICS).read_text().splitlines()[9])
    group = {"data parallel": {"bytes_raw": 8, "bytes_sent": 2}}
    before |= {"seconds": 500.0, "groups": group}
    with_line(folder, before)
    begun = json.loads((folder / RUN).read_text()) | {"started": "2026-01-02T03:04:05+00:00"}
    (folder / RUN).write_text(json.dumps(begun))
    (folder / PAGE).write_text("of the first part")
    recorder = Recorder(folder, after=10)
    recorder.start(14)
    assert not any((folder / name).exists() for name in (RANKS, TRACE, PAGE))
    stats = [
        {**rank, "steps": 11, "groups": group}
        for rank in counters(made_step(Config.from_dict({"activations": AQSGD})), 1, 0.5)
    ]
    recorder.step(11, stats, loss=1.0, step_s=0.1)
    assert not read_runs([folder])[0].ranks
    recorder.step(12, [{**rank, "steps": 12} for rank in stats], loss=1.0, step_s=0.1)
    recorder.end([{**rank, "steps": 12, "seconds": dict.fromkeys(rank["seconds"], 0.0)} for rank in stats])
    (run,) = read_runs([folder])
    assert [line["step"] for line in run.steps] == list(range(1, 13))
    assert [[rank["steps"] for rank in run.ranks[when]] for when in ("halfway", "end")] == [[12, 12]] * 2
    assert not any("micro_batches" in rank for rank in run.ranks["end"])
    assert [rank.total for rank in rank_times(run)] == [pytest.approx(0.2)] * 2
    assert run.steps[-1]["groups"] == {"data parallel": {"bytes_raw": 24, "bytes_sent": 6}}
    link = stats[0]["links"]["0->1"]["forward"]["bytes_sent"]
    assert run.steps[-1]["links"]["0->1"]["forward_bytes_sent"] == before["links"]["0->1"]["forward_bytes_sent"] + link
    assert run.steps[-1]["waits"]["0->1"] == pytest.approx(before["waits"]["0->1"] + 0.5)
    assert run.steps[-1]["seconds"] >= 500.0
    assert run.facts["started"] == begun["started"]
    Recorder(folder).start(14)
    assert json.loads((folder / RUN).read_text())["started"] != begun["started"], "it has begun anew"


def test_a_resumed_run_holds_the_counters_of_the_last_line_alone(folder):
    whole = (folder / METRICS).read_text().splitlines(keepends=True)
    recorder = Recorder(folder, after=10)
    assert [line["step"] for line in recorder.kept if "links" in line or "bits" in line] == [10]
    assert recorder.kept[-1] == json.loads(whole[9])
    assert (folder / METRICS).read_text() == "".join(whole[:10])


def test_an_evaluations_bytes_stay_in_a_run_that_goes_on_after_it(folder):
    """The checkpoint at an epoch's end is of after its evaluation, and the step's line of before."""
    stats = counters(made_step(Config.from_dict({"activations": AQSGD})), 1, 0.5)
    recorder = Recorder(folder)
    recorder.start(4)
    recorder.step(1, stats, loss=1.0)
    for rank in stats:
        rank["links"]["0->1"]["evaluation"]["bytes_sent"] += 70
    recorder.evaluated(1, {"loss": 1.0}, stats)
    recorder = Recorder(folder, after=1)
    recorder.start(4)
    recorder.step(2, stats, loss=1.0)
    (run,) = read_runs([folder])
    sent = [line["links"]["0->1"]["evaluation_bytes_sent"] for line in (*run.steps, *run.evaluations)]
    assert sent == [0, 140, 70]


def test_a_run_that_is_started_again_after_its_last_step_stays_as_it_is(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    recorder = Recorder(folder, after=STEPS)
    recorder.start(STEPS)
    recorder.end([])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (folder / RUN).write_text('{"status": "interrupted"}')  # after its last step, before its evaluation
    recorder = Recorder(folder, after=STEPS)
    recorder.start(STEPS)
    recorder.evaluated(STEPS, {"loss": 1.0})
    recorder.end([])
    (run,) = read_runs([folder])
    assert run.evaluations[-1]["eval"] == {"loss": 1.0}


def test_counts_of_replicas_add_up_and_their_waits_do_not():
    def rank(replica, wait_s, changed, new):
        link = {"wait_seconds": wait_s, "delta_samples": changed, "full_samples": new}
        return {"replica": replica, "links": {"0->1": link}}

    ranks = [rank(0, 1.0, 6, 2), rank(0, 3.0, 6, 2), rank(1, 5.0, 1, 3), rank(1, 4.0, 1, 3)]
    assert waits(ranks) == {"0->1": 4.0}
    assert hits(ranks) == {"0->1": [7, 12]}


def test_what_ranks_count_between_two_times():
    """A mean over all of the time is no mean over a part of it."""
    fixed = {"rank": 1, "stage": 1, "replica": 0, "in_flight": 3, "store_bytes": 70, "local_steps": {"outer": 2}}
    then = {**fixed, "steps": 4, "store_bytes": 50, "micro_batches": [1], "links": {"0->1": {"relative_error": 0.5}}}
    link = {"relative_error": 0.4, "store_hit_rate": 0.9, "forward": {"messages": 7, "mean_bits": 3.0}}
    then["links"]["0->1"] |= {"store_hit_rate": None, "forward": {"messages": 3, "mean_bits": 2.0}}
    now = {**fixed, "steps": 10, "micro_batches": [2], "links": {"0->1": link, "1->2": link}}
    since = {"relative_error": None, "store_hit_rate": 0.9, "forward": {"messages": 4, "mean_bits": None}}
    assert counted_since(then, now) == {**now, "steps": 6, "links": {"0->1": since, "1->2": link}}


def test_a_reduction_counts_what_a_ring_sends():
    group = GroupStats()
    for ranks in (2, 4):
        group.add(100, 50, ranks, 0.5)
    assert group == GroupStats(calls=2, bytes_raw=100 + 150, bytes_sent=50 + 75, wait_seconds=1.0)


def test_while_a_run_goes_on_its_ranks_times_are_written_now_and_then(tmp_path, monkeypatch):
    clock, seen = [0.0], []
    monkeypatch.setattr("pipecomp.report.recorder.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    recorder = Recorder(tmp_path)
    recorder.start(100)
    for step, clock[0] in enumerate((1.0, 31.0, 40.0, 61.0), 1):
        recorder.step(step, counters(made_step(Config.from_dict({"activations": AQSGD})), step, 0.5))
        seen.append(read_runs([tmp_path])[0].ranks)
    assert [ranks["end"][0]["steps"] if ranks else None for ranks in seen] == [None, 2, 2, 4]
    recorder.interrupted()
    (run,) = read_runs([tmp_path])
    assert "the run is marked as interrupted: it is still running, or it ended after step 4" in run.notes
    assert run.facts["seconds"] == 61.0


@pytest.fixture
def numbers(tmp_path):
    """Two links and one rank, resumed after step 2; the last step says nothing of links."""
    ways = {"forward_bytes_raw": 100, "forward_bytes_sent": 10, "backward_bytes_raw": 50, "backward_bytes_sent": 20}
    lines = [
        {"step": step, "seconds": 10.0 * step, "step_s": step_s, "loss": 2.0, "per_s": 10.0 * step}
        for step, step_s in enumerate((1.0, 1.0, 3.0, 5.0), 1)
    ]
    lines[1] |= {"hits": {"0->1": [0, 8]}}
    waited = {"waits": {"0->1": 2.0, "1->2": 9.0}, "hits": {"0->1": [4, 16], "1->2": [0, 0]}}
    groups = {
        "data parallel": {"bytes_raw": 4000, "bytes_sent": 1000},
        "weights": {"bytes_raw": 500, "bytes_sent": 500},
    }
    lines[2] |= {"links": dict.fromkeys(waited["waits"], ways), "groups": groups, **waited}
    parts = {"forward": 1, "backward": 2, "encode": 0.25, "decode": 0.5, "wait": 0.5, "reduce": 0.75, "update": 1}
    rank = {"rank": 3, "stage": 1, "replica": 1, "steps": 4, "seconds": parts, "links": {}}
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / RUN).write_text(json.dumps({"name": "numbers", "seconds": 61.0, "unit": "samples", "remark": "Odd."}))
    (tmp_path / RANKS).write_text(json.dumps({"first_step": 2, "end": [rank]}))
    (run,) = read_runs([tmp_path])
    return summarize(run)


def test_numbers_of_a_run(numbers):
    one, two = numbers.links
    assert (one.raw, one.sent, one.waited, one.hit_rate) == (150, 30, 2.0 / 5.0, 0.25)
    assert (two.waited, two.hit_rate) == (1.0, None)
    assert hit_rates(numbers.run) == ([2, 3], [0.0, 0.5])
    (rank,) = numbers.ranks
    assert list(rank.parts.values()) == [3, 0.75, 0.5, 0.75, 1, 2.0]
    assert rank.total == 8.0
    assert step_seconds(numbers.run) == 4.0
    assert numbers.sentences() == [
        "4 steps in 1 min 01 s; training loss 2.000 → 2.000; 30 samples/s.",
        "The links carried 60 B instead of 300 B: 5.0× less.",
        "Ranks also exchanged 1.5 kB of gradients and weights instead of 4.5 kB.",
        "At link 1->2 a stage waited for packets 100 % of the time.",
        "No advice: the run did not finish, or did not record its ranks.",
        "Odd.",
    ]
    numbers.run.steps[1]["seconds"] = None
    assert training_curve(numbers.run).seconds is None
    del numbers.run.facts["seconds"]
    assert "4 steps in 40 s" in numbers.sentences()[0]
    numbers.run.ranks["end"][0]["seconds"]["wait"] = 1e3
    assert rank_times(numbers.run)[0].parts["other"] == 0.0


def test_tables_and_charts_have_the_same_numbers(numbers):
    cells = re.findall(r"data-label='(.*?)'>(.*?)<", render_page([numbers.run]))
    row = {"forward": "10 B", "back": "20 B", "uncompressed": "150 B", "less": "5.0×"}
    first = {"link": "0-&gt;1", **row, "waited": "40 %", "store hits": "25 %"}
    second = {"link": "1-&gt;2", **row, "waited": "100 %", "store hits": "–"}
    assert cells[3:17] == [*first.items(), *second.items()]
    rank = {"rank": "3 (stage 1, replica 1)", "compute": "3.00 s", "quantize + store": "0.75 s"}
    rank |= {"wait for packets": "0.50 s", "reduce": "0.75 s", "update": "1.00 s", "other": "2.00 s"}
    assert cells[17:24] == list(rank.items())
    no_simulation = "the run did not finish, or did not record its ranks"
    assert cells[:3] == [("measured", "4 s"), ("simulated", no_simulation), cells[2]]
    pale, full = charts.link_bytes([numbers]).figure["data"]
    assert (pale["name"], pale["x"]) == ("uncompressed", [100, 50] * 2)
    assert (full["name"], full["x"]) == ("sent", [10, 20] * 2)
    assert full["hovertext"][0] == "0-&gt;1 forward<br>10 B sent, 100 B uncompressed<br>10.0× less"
    shares = [trace["x"] for trace in charts.rank_times([numbers]).figure["data"]]
    assert shares == [[37.5], [9.375], [6.25], [9.375], [12.5], [25.0]]
    (curve,) = charts.losses([numbers], over="seconds").figure["data"]
    assert curve["x"] == [10.0, 20.0, 30.0, 40.0]
    (rates,) = charts.hit_rates([numbers]).figure["data"]
    assert (rates["x"], rates["y"]) == ([2, 3], [0.0, 50.0])


def test_numbers_for_people():
    assert [units.format_size(n) for n in (0, 999, 1_500, 12_345_678, 5e12)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "12.3 MB",
        "5000.0 GB",
    ]
    spent = [units.format_duration(s) for s in (0.8431, 42.4, 200, 7500)]
    assert spent == ["0.843 s", "42 s", "3 min 20 s", "2 h 05 min"]
    assert [units.format_share(share) for share in (0, 0.0012, 0.414, 1)] == ["0 %", "0.1 %", "41 %", "100 %"]
    assert [units.format_ratio(ratio) for ratio in (0.976, 7.94, 24.6)] == ["0.98×", "7.9×", "25×"]


def test_a_disk_that_is_full_when_a_run_is_resumed_keeps_the_lines_of_the_first_part(folder, caplog):
    before = (folder / METRICS).read_text()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.WARNING):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, unlimited[1]))
        try:
            Recorder(folder, after=STEPS).step(STEPS + 1, loss=1.0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert "continues without it" in caplog.text
    assert (folder / METRICS).read_text() == before


def test_a_loss_that_is_no_number_is_null_and_left_out(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.start(2)
    recorder.step(1, loss=math.nan)
    recorder.step(2, loss=2.5)
    (run,) = read_runs([tmp_path])
    assert training_curve(run).losses == [2.5]
    assert any("running" in note for note in run.notes)


def test_what_is_missing_or_broken_is_noted_and_the_rest_is_shown(folder):
    with (folder / METRICS).open("a") as file:
        file.write('{"step": 21, "loss"')
    (folder / TRACE).write_text('{"traceEvents": [{"ph": "X"}]}')
    (folder / RANKS).write_text("[1, 2")
    (run,) = read_runs([folder])
    assert len(run.steps) == STEPS
    noted = " ".join(run.notes)
    assert "metrics.jsonl: 1 line(s)" in noted
    assert "trace.json does not have the form that this version" in noted
    assert "ranks.json cannot be read" in noted
    assert write_report([folder]).stat().st_size > 1e6


@pytest.mark.parametrize("changed", ['{"end": [{"rank": 0}]}', '{"end": 5}', '{"end": [{"links": []}]}'])
def test_ranks_of_another_form_are_left_out(folder, changed):
    (folder / RANKS).write_text(changed)
    (run,) = read_runs([folder])
    assert run.ranks == {}
    assert "ranks.json does not have the form that this version" in " ".join(run.notes)


def changed(value, path, new):
    """A JSON value with another one in some place of it."""
    return new if not path else {**value, path[0]: changed(value[path[0]], path[1:], new)}


def test_the_first_sample_is_shown_as_text(folder):
    write_report([folder])
    assert "First sample" not in (folder / PAGE).read_text()
    (folder / SAMPLE).write_text('[["<b>one", false], ["two & three", true]]')
    write_report([folder])
    assert "<pre class='sample'>&lt;b&gt;one<mark>two &amp; three</mark></pre>" in (folder / PAGE).read_text()
    (folder / SAMPLE).write_text("[[1]]")
    write_report([folder])
    assert "First sample" not in (folder / PAGE).read_text()


@pytest.mark.parametrize(
    ("name", "path", "new"),
    [
        (METRICS, ["links", "0->1"], {}),
        (METRICS, ["links", "0->1", "forward_bytes_sent"], None),
        (METRICS, ["waits"], [1]),
        (METRICS, ["hits"], "none"),
        (METRICS, ["hits", "0->1"], [1]),
        (METRICS, ["bits", "0->1"], ["x", 1, 1, 1]),
        (RUN, ["settings"], None),
        (RUN, ["settings", "activations"], 5),
        (RANKS, ["end"], [{"rank": 0, "stage": 0, "replica": 0, "steps": 1, "seconds": {}, "links": {}}]),
        (RANKS, ["end"], [{"rank": "0"}]),
        (PLAN, ["methods"], 5),
        (TRACE, ["traceEvents"], 1.5),
        (TRACE, ["traceEvents"], None),
        (TRACE, ["traceEvents"], [{"ph": "X", "name": "wait", "args": {}, "ts": 0, "dur": "1", "pid": 0}]),
        (TRACE, ["traceEvents"], [{"ph": "X", "name": [], "args": {}, "ts": 0, "dur": 1, "pid": 0}]),
    ],
)
def test_what_is_of_another_form_is_left_out_and_the_rest_is_shown(folder, name, path, new):
    (folder / PLAN).write_text('{"methods": []}')
    lines = (folder / name).read_text().splitlines()
    at = STEPS - 1 if name == METRICS else 0
    lines[at] = json.dumps(changed(json.loads(lines[at]), path, new))
    (folder / name).write_text("\n".join(lines))
    write_report([folder])
    (run,) = read_runs([folder])
    assert len(run.steps) == STEPS - (name == METRICS)
    assert any(note.startswith(name) for note in run.notes)


@pytest.mark.parametrize("foreign", [b"5\n", b'{"loss": 1}\n', b'{"step": "one"}\n', b"\xff\xfe\n"])
def test_a_run_is_resumed_over_lines_of_another_form(folder, foreign):
    lines = (folder / METRICS).read_bytes().splitlines(keepends=True)
    (folder / METRICS).write_bytes(b"".join([*lines[:2], foreign]))
    recorder = Recorder(folder, after=5)
    recorder.start(6)
    recorder.step(6, loss=1.0)
    assert [line["step"] for line in read_runs([folder])[0].steps] == [1, 2, 6]


def test_a_file_of_metrics_alone_is_a_run(tmp_path):
    path = tmp_path / "old.jsonl"
    path.write_text('{"step": 1, "epoch": 1, "loss": 3.0}\n{"step": 2, "epoch": 1, "loss": 2.0}\n')
    (run,) = read_runs([path])
    assert run.name == "old"
    assert training_curve(run).losses == [3.0, 2.0]
    assert write_report([path], tmp_path / "out.html").is_file()


def test_what_is_no_run_is_an_error_that_says_what_would_be(tmp_path):
    with pytest.raises(ConfigError, match="a run's folder"):
        read_runs([tmp_path / "nothing"])
    (tmp_path / METRICS).write_text("")
    with pytest.raises(DataError, match="no step"):
        read_runs([tmp_path])


def test_a_newer_version_is_an_error(folder):
    facts = json.loads((folder / RUN).read_text())
    (folder / RUN).write_text(json.dumps({**facts, "format": 99}))
    with pytest.raises(DataError, match="99"):
        read_runs([folder])
    assert "99" in try_write_report([folder])  # at the end of a run it is only said
    assert not (folder / PAGE).exists()


def test_a_folder_of_runs_means_all_of_them_with_names_of_their_own(tmp_path):
    for name in ("a", "b"):
        make_run(tmp_path / name, network=slow(), name="same")
    assert [run.name for run in read_runs([tmp_path])] == ["same", "same (2)"]


def test_a_folder_that_cannot_be_written_ends_only_a_run_that_asked_for_it(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--out"):
        Recorder(tmp_path / "file" / "run", required=True)
    with caplog.at_level(logging.WARNING):
        recorder = Recorder(tmp_path / "file" / "run")
    assert "continues without it" in caplog.text
    recorder.start(1)
    recorder.step(1, loss=1.0)
    caplog.clear()
    recorder.end([])
    assert caplog.text.count("has nothing of the steps after 0") == 1


def test_what_is_missing_is_named_at_the_end_of_the_run(tmp_path, caplog):
    recorder = Recorder(tmp_path)
    recorder.start(4)
    recorder.step(1, loss=1.0)
    assert recorder._metrics is not None
    recorder._metrics.close()
    recorder._metrics = open("/dev/full", "w")  # noqa: SIM115 (the recorder closes it)
    with caplog.at_level(logging.WARNING):
        for step in (2, 3, 4):
            recorder.step(step, loss=1.0)
        assert caplog.text.count("No space left on device") == 1
        recorder.end([])
    assert caplog.text.count("has nothing of the steps after 1") == 1


@pytest.mark.parametrize("full", [RANKS, TRACE, RUN])
def test_a_disk_that_is_full_at_the_end_of_a_run_does_not_end_it_with_an_error(tmp_path, monkeypatch, caplog, full):
    def write(path, units):
        if path.name == full:
            raise OSError(errno.ENOSPC, "No space left on device")
        atomic_write_text(path, units)

    recorder = Recorder(tmp_path)
    recorder.start(1)
    recorder.step(1, loss=1.0)
    monkeypatch.setattr("pipecomp.report.recorder.atomic_write_text", write)
    with caplog.at_level(logging.WARNING):
        recorder.end([], [{"name": "step"}])
    assert caplog.text.count("cannot be written (No space left on device)") == 1
    recorder.end([])
    assert [run.name for run in read_runs([tmp_path])] == [tmp_path.name], "what was written before can be read"


def test_runs_with_long_and_similar_names_have_bars_of_their_own(tmp_path):
    """Both ends of the names are alike, which is all that a chart shows of them; one has no characters left out."""
    names = [f"gpt2-wikitext2-lr-{rate}-batch-32-seed-1" for rate in ("1e-3", "3e-3")]
    for name in (*names, "short"):
        make_run(tmp_path / name, network=slow(), told=True)
    summaries = [summarize(run) for run in read_runs([tmp_path / name for name in (*names, "short")])]
    for chart, rows in ((charts.link_bytes, 6), (charts.rank_times, 6)):
        for trace in chart(summaries).figure["data"]:
            assert len(set(trace["y"])) == len(trace["y"]) == rows
    curves = charts.losses(summaries, over="steps").figure["data"]
    assert [curve["name"][:6] for curve in curves[::2]] == ["1. gpt", "2. gpt", "3. sho"]
    assert charts.losses(summaries[1:], over="steps").figure["data"][-1]["name"] == "short, held out"


def test_runs_that_are_named_by_numbers_have_bars_of_their_own(tmp_path):
    """On an axis of numbers bars of the runs 7 and 20260301 are too thin to be seen."""
    for name in ("7", "20260301"):
        make_run(tmp_path / name, network=slow(), told=True)
    chart = charts.rank_times(list(map(summarize, read_runs([tmp_path]))))
    assert chart.figure["layout"]["yaxis"]["type"] == "category"


def test_a_folder_that_has_only_the_later_part_of_a_run_says_so(folder):
    """A recipe that goes on makes a folder of its own, unless --out names the one of before."""
    lines = (folder / METRICS).read_text().splitlines()
    (folder / METRICS).write_text("\n".join(lines[6:]) + "\n")
    assert read_runs([folder])[0].notes == ["nothing before step 7: seconds and bytes count from there"]


def test_of_a_folder_of_runs_those_without_a_step_are_left_out(tmp_path):
    """One that ran out of memory in its first step does not stand in the way of all others."""
    make_run(tmp_path / "runs" / "whole", network=slow())
    Recorder(tmp_path / "runs" / "ended").start(5, kind="recipe")
    assert [run.name for run in read_runs([tmp_path / "runs"])] == ["whole"]
    with pytest.raises(DataError, match="it has no step"):
        read_runs([tmp_path / "runs" / "ended"])


def test_a_long_curve_has_its_ends_and_what_stands_out_in_few_points(tmp_path):
    steps, peaks = 20_000, {7_001: 9.0, 7_500: 9.5, 12_345: 0.5}
    lines = [{"step": i, "seconds": i / 2, "loss": peaks.get(i, 2 + i % 2)} for i in range(1, steps + 1)]
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (one,) = map(summarize, read_runs([tmp_path]))
    smooth = dict(zip(one.curve.steps, one.curve.smooth(), strict=True))
    for over, per_step in (("steps", 1), ("seconds", 0.5)):
        (curve,) = charts.losses([one], over=over).figure["data"]
        drawn = dict(zip([x / per_step for x in curve["x"]], curve["y"], strict=True))
        assert len(curve["x"]) == len(drawn) < 4_100
        assert curve["x"] == sorted(curve["x"])
        assert drawn == {step: pytest.approx(smooth[step], abs=1e-6) for step in drawn}
        assert {1, steps} <= drawn.keys()
        for begin in range(1, steps, 100):  # about ten stretches
            part = range(begin, begin + 100)
            told_here = [drawn[step] for step in part if step in drawn]
            assert max(told_here) == pytest.approx(max(smooth[step] for step in part), abs=1e-6)
            assert min(told_here) == pytest.approx(min(smooth[step] for step in part), abs=1e-6)


def test_of_a_long_run_few_steps_keep_their_counters(tmp_path, monkeypatch):
    """Evenly spaced ones, the first and the last; losses and evaluations stay."""
    monkeypatch.setattr("pipecomp.report.reader._MAX_COUNTED", 4)
    lines = []
    for step in range(1, 13):
        lines.append({"step": step, "loss": 2.0, **({"links": {}, "hits": {"0->1": [step, step]}} if step > 1 else {})})
    lines.insert(7, {"step": 7, "eval": {"loss": 3.0}, "links": {}, "groups": {}})
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = read_runs([tmp_path / "long.jsonl"])
    assert [line["loss"] for line in run.steps] == [2.0] * 12
    assert [line["step"] for line in run.steps if "links" in line] == [2, 6, 10, 12]
    assert [line["step"] for line in run.steps if "hits" in line] == [2, 6, 10, 12]
    assert run.evaluations == [lines[7]]
    assert hit_rates(run)[0] == [2, 6, 10, 12]


def test_of_a_long_step_every_rank_has_its_end(monkeypatch):
    """Events come rank by rank."""
    monkeypatch.setattr(timeline_module, "MAX_EVENTS", 6)
    events = [
        {"ph": "X", "name": "forward", "pid": rank, "ts": 1e3 * i, "dur": 500, "args": {"step": 7}}
        for rank in (0, 1)
        for i in range(5)
    ]
    whole = timeline_module.timeline(RunRecord(name="", folder=Path(), events=events[2:5] + events[7:]), "time-0")
    assert whole.note.startswith("The last step.")
    chart = timeline_module.timeline(RunRecord(name="", folder=Path(), events=events), "time-0")
    assert chart.note.startswith("The end of the last step.")
    (trace,) = chart.figure["data"]
    for row in ("rank 0 compute", "rank 1 compute"):
        assert [x for x, y in zip(trace["base"], trace["y"], strict=True) if y == row] == [0, 1, 2]


def test_seconds_to_the_lowest_loss_that_two_runs_reach(tmp_path):
    make_run(tmp_path / "fast", network=slow(bits_per_s=1e9))
    make_run(tmp_path / "slow", network=slow())
    curves = [training_curve(run) for run in read_runs([tmp_path])]
    loss = common_loss(curves)
    assert loss == pytest.approx(min(curves[0].smooth()))
    assert all(seconds_to(curve, loss) is not None for curve in curves)
    assert seconds_to(curves[0], loss - 1) is None
    assert common_loss(curves[:1]) is None


def test_of_a_run_without_seconds_it_is_not_said_that_it_missed_a_loss(tmp_path):
    """Lines of --metrics have none. Its loss is as low as that of the others."""
    for name in ("a", "b"):
        make_run(tmp_path / name, network=slow())
    lines = [json.loads(line) for line in (tmp_path / "a" / METRICS).read_text().splitlines()]
    with open(tmp_path / "c.jsonl", "w") as file:
        file.writelines(json.dumps({k: v for k, v in line.items() if k != "seconds"}) + "\n" for line in lines)
    runs = read_runs([tmp_path / "a", tmp_path / "b", tmp_path / "c.jsonl"])
    said = comparison([summarize(run) for run in runs])
    assert " was reached by a in " in said or " was reached by b in " in said
    assert "did not reach" not in said
    assert [run.notes for run in runs[:2]] == [[], []]
    assert runs[2].notes == ["steps without seconds: no loss over seconds, and no time to a common loss"]


def test_a_loss_is_reached_by_whole_means_only(tmp_path):
    """The first steps' means are of fewer steps: a single batch's loss is lower by chance."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        lines = [{"step": i, "seconds": 10.0 * i, "loss": 1.0 if i == 1 else 2.0} for i in range(1, 21)]
        (tmp_path / name / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve, other = (training_curve(run) for run in read_runs([tmp_path]))
    assert common_loss([curve, other]) == (1.0 + 7 * 2.0) / 8
    assert seconds_to(curve, 1.9) == 80.0


def with_losses(folder, losses, key="step"):
    """Change the losses of some steps of a recorded run; an evaluation's with another key."""
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    for line in lines:
        if line["step"] in losses and ("eval" in line) == (key == "eval"):
            (line["eval"] if key == "eval" else line)["loss"] = losses[line["step"]]
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")], ids=["null", "NaN", "Infinity"])
def test_a_loss_that_is_no_number_is_said(tmp_path, value):
    """NaN is written as null, and what came before it is no result."""
    for name in ("fine", "lost"):
        make_run(tmp_path / name, network=slow(), name=name)
    with_losses(tmp_path / "lost", dict.fromkeys(range(6, 21), value))
    with_losses(tmp_path / "lost", {20: value}, "eval")
    fine, lost = map(summarize, read_runs([tmp_path]))
    assert (lost.curve.not_finite, lost.curve.steps) == (list(range(6, 21)), list(range(1, 6)))
    assert fine.curve.not_finite == fine.held_out.not_finite == []
    assert "training loss 4.800 → " in fine.sentences()[0]
    said = lost.sentences()[0]
    assert "; the training loss was not finite in 15 of 20 steps, first in step 6" in said
    assert ", the held-out loss in 1 of 1 evaluations, first in step 20" in said
    assert "→" not in said
    with_losses(tmp_path / "lost", {step: 0.1 for step in range(6, 19)})
    compared = comparison(list(map(summarize, read_runs([tmp_path]))))
    assert compared.endswith(" But lost's loss was not finite in 2 of 20 steps, first in step 19.")
    assert "no number" not in comparison([fine, fine])
    with_losses(tmp_path / "lost", dict.fromkeys(range(1, 21), 2.0))
    (lost,) = map(summarize, read_runs([tmp_path / "lost"]))
    assert "loss 2.000 → 2.000, the held-out loss was not finite in 1 of 1 evaluations, first" in lost.sentences()[0]
