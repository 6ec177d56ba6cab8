"""Common parts of all benchmarks: cases that are kept and gone on with, options, tables and means over seeds."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import page
from benchmarks.runner import Runs, arguments, beside, chosen, digest, read_rows, weights_digest
from pipecomp.errors import DataError

CASES = [(name, seed) for seed in range(2) for name in ("FP32", "AQ-SGD")]


def run(method: str, seed: int, counter: str) -> page.Row:
    """A case that notes that it ran, and fails where its counter says so."""
    with Path(counter).open("a") as file:
        file.write(f"{method} {seed} {os.environ.get('OMP_NUM_THREADS')} {os.getpid()}\n")
    if f"not {method} {seed}\n" in Path(counter).read_text():
        raise ValueError(f"no luck with {method} {seed}")
    return {"method": method, "seed": seed, "loss": seed + len(method)}


class Benchmark:
    """A benchmark of four cases in a folder; `ran` has those that ran since it was asked last."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.counter = folder, folder / "ran"
        self.kept, self.page = folder / "some.jsonl", folder / "some.md"
        self.counter.touch()

    def __call__(self, *options: str, setup: str = "one", workers: int = 0, cases=CASES) -> Runs:
        given = arguments(["--out", str(self.folder), *options], "doc")
        runs = Runs(given, "some", digest(setup), ("method", "seed"))
        line, text = (lambda row: f"loss {row['loss']}"), (lambda rows: [f"{len(rows)} rows", ""])
        runs.complete(run, cases, str(self.counter), line=line, page=text, workers=workers)
        return runs

    def ran(self) -> list[str]:
        lines = [line for line in self.counter.read_text().splitlines() if not line.startswith("not ")]
        self.counter.write_text("")
        return [" ".join(line.split()[:2]) for line in lines]


@pytest.fixture
def some(memory_folder) -> Benchmark:
    return Benchmark(memory_folder)


def test_every_case_runs_once_and_its_row_is_kept(some, capsys):
    runs = some()
    assert some.ran() == ["FP32 0", "AQ-SGD 0", "FP32 1", "AQ-SGD 1"]
    assert capsys.readouterr().out.splitlines()[0] == "1/4  FP32  0  loss 4"
    assert some.page.read_text() == "4 rows\n"
    assert [(row["method"], row["seed"]) for row in runs.rows] == CASES
    assert all(row["machine"] == page.this_machine() for row in runs.rows)
    assert some().rows == runs.rows
    assert some.ran() == [], "kept runs are not made again"


def test_after_an_error_of_the_page_no_case_starts(some):
    def broken(rows):
        raise KeyError("accuracy")

    given = arguments(["--out", str(some.folder)], "doc")
    cases = [("FP32", seed) for seed in range(40)]
    runs = Runs(given, "some", digest("one"), ("method", "seed"))
    with pytest.raises(KeyError) as error:
        runs.complete(run, cases, str(some.counter), line=lambda row: "", page=broken, workers=1)
    assert error.tb is not None, "a traceback keeps its frames"
    assert len(runs.rows) == 1, "and what has run is kept"
    time.sleep(0.5)  # for those that would go on
    assert len(some.ran()) < 40


@pytest.mark.parametrize("cut", [1, 20, 1000])
def test_a_stopped_benchmark_goes_on_with_what_was_not_written_to_its_end(some, cut):
    some()
    whole = some.kept.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    some.kept.write_bytes(whole[: max(last + 1, len(whole) - cut)])  # a cut of one byte takes the line's end alone
    some.ran()
    assert len(some().rows) == 4
    assert some.ran() == ["AQ-SGD 1"]
    assert some.kept.read_bytes() == whole


def test_a_damaged_line_is_named(some):
    some()
    lines = some.kept.read_text().splitlines()
    some.kept.write_text("\n".join([lines[0], lines[1][:-5], *lines[2:]]) + "\n")
    with pytest.raises(DataError, match=r"some\.jsonl, line 2: got no JSON"):
        some()


def test_redrawing_runs_nothing(some):
    some(cases=CASES[:3])
    some.ran()
    some.page.unlink()
    half = some.kept.read_bytes() + b'{"method": "AQ'  # as of a benchmark that is running meanwhile
    some.kept.write_bytes(half)
    assert len(some("--redraw").rows) == 3
    assert some.ran() == []
    assert some.page.read_text() == "3 rows\n"
    assert some.kept.read_bytes() == half


def test_rows_of_other_settings_are_kept_apart(some):
    some()
    assert len(some(setup="another", cases=CASES[:1]).rows) == 1
    assert some.page.read_text() == "1 rows\n"
    assert len(list(read_rows(some.kept))) == 5
    given = arguments(["--out", str(some.folder)], "doc")
    kept = Runs(given, "some", digest("one"), ("method", "seed"), current=lambda row: row["method"] == "FP32")
    assert kept.missing(CASES) == [("AQ-SGD", 0), ("AQ-SGD", 1)]


class PreTrained:
    """A benchmark of runs from pre-trained weights; `weights` names those at hand, by seed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.weights, self.ran = folder, {0: "a", 1: "b"}, []

    def run(self, method: str, seed: int) -> page.Row:
        self.ran.append((method, seed))
        return {"method": method, "seed": seed, "weights": self.weights[seed], "loss": seed + len(method)}

    def __call__(self, cases=CASES, *options: str) -> Runs:
        given = arguments(["--out", str(self.folder), *options], "doc")
        self.runs = Runs(given, "some", "one", ("method", "seed"), exact=beside("FP32", "seed"))
        self.ran.clear()
        self.runs.complete(self.run, cases, line=str, page=page_of_all, workers=0)
        return self.runs

    def shown(self) -> list[str]:
        return (self.folder / "some.md").read_text().splitlines()


def page_of_all(rows: list[page.Row]) -> list[str]:
    return [f"{row['method']} {row['seed']} {row['weights']}" for row in sorted(rows, key=str)]


@pytest.fixture
def pretrained(memory_folder) -> PreTrained:
    return PreTrained(memory_folder)


def test_a_page_has_only_runs_that_start_from_the_weights_of_their_exact_run(pretrained):
    pretrained(CASES[:3])
    pretrained.runs.add({"method": "AQ-SGD", "seed": 1, "weights": "another", "loss": 9})
    pretrained([], "--redraw")
    assert pretrained.shown()[:3] == ["AQ-SGD 0 a", "FP32 0 a", "FP32 1 b"]
    assert "1 runs that start from other weights" in pretrained.shown()[-1]
    pretrained()
    assert pretrained.ran == [("AQ-SGD", 1)], "counts as missing"
    assert pretrained.shown()[:4] == ["AQ-SGD 0 a", "AQ-SGD 1 b", "FP32 0 a", "FP32 1 b"]


def test_a_run_from_other_weights_is_refused_until_the_exact_run_is_measured_again(pretrained):
    pretrained(CASES[:3])
    pretrained.weights[1] = "c"
    with pytest.raises(DataError, match=r"AQ-SGD  1: starts from the weights c, .*'FP32', 'seed': 1.*delete its line"):
        pretrained()
    kept = pretrained.folder / "some.jsonl"
    assert '"c"' not in kept.read_text()
    pretrained.weights = {0: "d", 1: "c"}
    kept.write_text("".join(line for line in kept.read_text().splitlines(True) if '"FP32"' not in line))
    pretrained()
    assert pretrained.ran == [("FP32", 0), ("FP32", 1), ("AQ-SGD", 1), ("AQ-SGD", 0)]
    assert pretrained.shown()[:4] == ["AQ-SGD 0 d", "AQ-SGD 1 c", "FP32 0 d", "FP32 1 c"]


def test_a_row_without_a_digest_is_an_error(pretrained):
    pretrained(CASES[:1])
    pretrained.runs.add({"method": "AQ-SGD", "seed": 0, "loss": 9})
    with pytest.raises(DataError, match=r"some\.jsonl: the row of .*'AQ-SGD'.* has no digest"):
        pretrained()


def test_a_digest_is_that_of_names_shapes_and_bits():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    first = weights_digest(model)
    assert weights_digest(model) == first
    assert weights_digest(torch.nn.Sequential(model)) != first
    with torch.no_grad():
        model.bias[0] = torch.nextafter(model.bias[0], torch.tensor(9.0))
    assert weights_digest(model) != first
    assert weights_digest(model.to(torch.bfloat16)) != first


@pytest.mark.parametrize("workers", [0, 1])  # in this process and in one that has to import torch first
def test_a_case_that_fails_is_reported_and_the_others_go_on(some, capsys, workers):
    some.counter.write_text("not AQ-SGD 0\n")
    with pytest.raises(SystemExit, match=r"1 of 4 cases failed: \[\('AQ-SGD', 0\)\]"):
        some(workers=workers)
    said = capsys.readouterr().out
    assert "AQ-SGD  0  failed:" in said
    assert "ValueError: no luck with AQ-SGD 0" in said
    assert some.page.read_text() == "3 rows\n"
    lines = some.counter.read_text().splitlines()[1:]
    if workers:
        assert {line.split()[2] for line in lines} == {"1"}, "a worker has one thread"
        assert str(os.getpid()) not in {line.split()[3] for line in lines}
    some.ran()
    assert len(some(workers=workers).rows) == 4
    assert some.ran() == ["AQ-SGD 0"], "what failed is tried again, nothing else"


def test_options_take_their_types_from_their_defaults(capsys):
    own = {"rounds": (2, "how often"), "cache_mb": (0.5, "of memory"), "tasks": (["a", "b"], "some", ("a", "b"))}
    given = arguments(["--tasks", "a", "--only", "x", "y", "--cache-mb", "3"], "doc", "only", "seeds", **own)
    assert (given.tasks, given.only, given.cache_mb, given.seeds, given.rounds) == (["a"], ["x", "y"], 3.0, 3, 2)
    assert given.redraw is False
    with pytest.raises(SystemExit):
        arguments(["--tasks", "c"], "doc", **own)
    assert "invalid choice: 'c'" in capsys.readouterr().err
    assert chosen(["FP32", "AQ-SGD", "fp16"], ["fp"]) == ["FP32", "fp16"]
    assert chosen(["FP32"], []) == ["FP32"]
    assert chosen(["FP32", "FP32, BF16", "BF16"], ["fp32", "bf"]) == ["FP32", "FP32, BF16", "BF16"]
    assert chosen(["FP32", "FP32, tied", "BF16"], ["fp32"]) == ["FP32"]


def test_means_are_those_of_statistics():
    losses = [3.25, 3.5, 4.125]
    mean, deviation = statistics.mean(losses), statistics.stdev(losses)
    assert page.spread(losses) == f"{mean:.4f} ± {deviation:.4f}" == "3.6250 ± 0.4507"
    assert page.spread(losses[:1], 2, "+") == "+3.25"
    assert page.spread([]) == "–"
    rows = [{"seed": seed, "loss": loss} for seed, loss in enumerate(losses)]
    base = [{"seed": 2, "loss": 4.0}, {"seed": 0, "loss": 3.0}, {"seed": 7, "loss": 1.0}]
    assert page.above(rows, base, "loss") == [0.25, 0.125], "pairs of the same seed, where there are both"
    rows, base[0]["weights"] = [{**row, "weights": "a"} for row in rows], "b"
    base[1]["weights"] = "a"
    assert page.above(rows, base, "loss") == [0.25], "and of the same weights"
    assert page.share(1, 8) == "12.5 %"


def test_rows_are_put_together_in_the_order_in_which_they_come():
    rows = [{"method": method, "seed": seed} for seed in (0, 1) for method in ("b", "a")]
    groups = page.grouped(rows, "method")
    assert [[(row["method"], row["seed"]) for row in group] for group in groups] == [
        [("b", 0), ("b", 1)],
        [("a", 0), ("a", 1)],
    ]


def test_tables_and_prose():
    lines = page.columns({"method": lambda row: row["name"], "K": lambda row: row["k"]}, [{"name": "FP32", "k": 2}])
    assert lines == ["| method | K |", "|---|---|", "| FP32 | 2 |", ""]
    with pytest.raises(ValueError, match="got 1 cells, allowed: 2"):
        page.table(["method", "K"], [["FP32"]])
    text = """
        # Title

        One sentence
        over two lines.
    """
    assert page.prose(text) == ["# Title", "", "One sentence over two lines.", ""]


def test_pages_name_the_machines_of_their_rows():
    assert page.machine([{}, {"machine": "one"}, {"machine": "one"}]) == f"{page.FIRST_MACHINE}; one"


def test_the_list_has_every_benchmark_and_readme_names_it(capsys):
    command.run([])
    said = capsys.readouterr().out
    readme = (Path(command.__file__).parent / "README.md").read_text()
    for name, question in command.questions().items():
        assert f"{name} " in said
        assert question in said
        assert f"| `{name}` |" in readme, name
    with pytest.raises(SystemExit, match=f"got nothing_of_this, allowed: {min(command.questions())}, "):
        command.run(["nothing_of_this"])


KEPT = {file.stem for file in (Path(command.__file__).parent / "results").glob("*.jsonl")}


@pytest.mark.parametrize("name", sorted(KEPT & command.questions().keys()))
def test_kept_runs_give_the_page_that_is_kept(name, tmp_path):
    if name in ("shootout", "throughput", "time_to_loss"):
        pytest.importorskip("matplotlib", reason="these pages have pictures")
    results = Path(command.__file__).parent / "results"
    (tmp_path / f"{name}.jsonl").write_bytes((results / f"{name}.jsonl").read_bytes())
    command.run([name, "--redraw", "--out", str(tmp_path)])
    made, kept = (folder / f"{name}.md" for folder in (tmp_path, results))
    assert made.read_text() == kept.read_text()
