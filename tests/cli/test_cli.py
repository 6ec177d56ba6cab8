"""The command line as a user runs it: the demo, the store commands, and errors of one line."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import pipecomp
from pipecomp.cli import app
from pipecomp.cli.common import console, plain_errors, print_status, write_json
from pipecomp.errors import ConfigError, PipecompError
from pipecomp.report.reader import read_runs
from pipecomp.utils.tables import COMPACT, table
from tests.limits import HANG_S

pytestmark = pytest.mark.ranks


def told(*arguments: str) -> str:
    """Return a command's output, in this process: imports take longer than most commands."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    options = ("--quick", "--stages", "2", "--methods", "none,aqsgd", "--bits", "3,6", "--bandwidth", "4mbit")
    return out, told("demo", *options, "--out", str(out))


def test_version():
    assert told("--version") == f"pipecomp {pipecomp.__version__}\n"


def test_a_log_of_the_demo_says_at_once_what_runs(monkeypatch, tmp_path):
    """Without a terminal, bars are shown at the end alone, minutes later."""

    def starts(settings, show):
        show("FP32, no limit on the link", 0, 9, None)
        show("FP32, no limit on the link", 1, 9, 3.0)
        raise ConfigError("out", settings.out, "nothing: it was stopped")

    monkeypatch.setattr("pipecomp.demo.run.run_demo", starts)
    done = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert done.stderr.splitlines()[0] == "FP32, no limit on the link …"
    assert done.stderr.count("…") == 1


@pytest.mark.soak
def test_demo_writes_what_it_shows(demo):
    out, text = demo
    found = json.loads((out / "demo.json").read_text())
    assert [r["method"] for r in found["results"]] == ["none", "aqsgd"]
    none, aqsgd = found["results"]
    for result in found["results"]:
        assert f"{result['train_loss']:.3f}" in text
        assert f"{result['eval_loss']:.3f}" in text
        assert len(result["losses"]) == len(result["seconds"]) == 12
        assert result["seconds"] == sorted(result["seconds"])
    assert (aqsgd["forward_bits"], aqsgd["backward_bits"]) == (3, 6)
    assert aqsgd["forward_bytes_raw"] == none["forward_bytes_raw"] > 0
    # One of three epochs with 8 bits for each value, two with 3.
    content = (8 + 2 * 3) / 3 / 32 * aqsgd["forward_bytes_raw"]
    assert content < aqsgd["forward_bytes_sent"] < 1.4 * content
    assert aqsgd["store_bytes"] > aqsgd["forward_bytes_raw"] / 3
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert text.endswith("--quick is too short to compare methods: run without it.\n")
    assert "AQ-SGD fw3 bw6" in text
    # However it is broken into lines.
    assert "".join(found["sentence"].split()) in "".join(text.split())
    assert "Over this link of 4 Mbit/s, " in found["sentence"]


@pytest.mark.soak
def test_the_demos_link_is_slow_where_it_says_so(demo):
    out, text = demo
    none, aqsgd = json.loads((out / "demo.json").read_text())["results"]
    assert (none["measured_steps"], aqsgd["measured_steps"]) == (8, 12)
    assert "8 steps were run over this link" in " ".join(text.split())
    assert none["step_s"] > 8 * none["forward_bytes_sent"] / 12 / 4e6
    unlimited, derived, measured = read_runs([out])
    assert [run.name for run in (unlimited, derived, measured)] == ["FP32, no limit on the link", "FP32", "AQ-SGD"]
    assert unlimited.facts["network"] is None
    for run in (derived, measured):
        (line,) = run.facts["network"]["forward"]
        assert 0.9 * 4e6 < line["bits_per_s"] < 4e6
    assert [len(run.steps) for run in (unlimited, derived, measured)] == [12, 12, 12]
    assert [line["loss"] for line in derived.steps] == [line["loss"] for line in unlimited.steps] == none["losses"]
    assert derived.steps[-1]["links"] == unlimited.steps[-1]["links"]
    assert derived.steps[-1]["seconds"] == pytest.approx(none["seconds"][-1], abs=1e-3)
    assert "only the first 8 steps" in derived.facts["remark"]
    page = (out / "report.html").read_text()
    assert "only the first 8 steps" in page
    assert "no limit on the link" not in page


@pytest.mark.soak
def test_store_commands_on_the_demos_store(demo, tmp_path):
    folder = str(demo[0] / "messages" / "aqsgd")
    assert "link-0" in told("store", "info", folder, "--json", str(tmp_path / "info.json"))
    lines = json.loads((tmp_path / "info.json").read_text())
    assert [(line["rank"], line["samples"], line["bits"]) for line in lines] == [(0, 64, 32), (1, 64, 32)]
    assert "128 values checked, 0 damaged" in told("store", "verify", folder)
    assert "108 values removed (0 of them damaged), 20 kept" in told("store", "prune", folder, "--ids-below", "10")
    everything = told("store", "prune", folder, "--everything")
    assert everything.startswith("all values removed; ")
    assert everything.endswith(" 0.00 MB now\n")


def test_an_error_ends_the_command_with_one_line():
    """As a user sees it: a process of its own."""
    command = [sys.executable, "-m", "pipecomp.cli", "store", "info", "/no/such/folder"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("pipecomp: ")
    assert "/no/such/folder" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "--bits", "9,4"), "activations.forward_bits: got 9, allowed: a whole number from 1 to 8"),
        (("demo", "--bits", "4"), "bits: got '4', allowed: 2 whole numbers"),
        (("demo", "--methods", "none,zip"), "methods: got 'zip', allowed: none, fp16, bf16, direct, aqsgd"),
        (("demo", "--methods", "none,none"), "methods: got 'none,none', allowed: each method once"),
        (("demo", "--bandwidth", "5"), "bandwidth: got '5', allowed: a number and bit, kbit, mbit or gbit"),
        (("demo", "--stages", "9"), "stages: got 9, allowed: 2 to 4"),
    ],
)
def test_errors_name_what_was_wrong(arguments, message):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert message in " ".join(done.output.split())
    assert "Traceback" not in done.output


VERBATIM = "a[rank] [/x.cc:5] b :warning: [red]c[/red]\\"


def test_what_is_told_is_no_markup(capsys):
    """Errors of gloo name source files in brackets."""

    @plain_errors()
    def command() -> None:
        raise PipecompError(VERBATIM)

    with pytest.raises(typer.Exit) as ended:
        command()
    assert ended.value.exit_code == 1
    print_status(VERBATIM)
    console.print(VERBATIM)
    console.print(table(["a"], [[VERBATIM]], title=VERBATIM))
    told = capsys.readouterr()
    assert told.err == f"pipecomp: {VERBATIM}\n{VERBATIM}\n"
    assert told.out.startswith(f"{VERBATIM}\n")
    assert told.out.count(VERBATIM) == 3


@pytest.mark.parametrize("style", [{}, COMPACT], ids=["lines", "compact"])
def test_a_table_in_a_narrow_terminal_leaves_out_no_digit(style):
    narrow = Console(file=io.StringIO(), width=20)
    narrow.print(
        table(["link", "there", "KB"], [["0→1", "97.2 Mbit/s", f"{number}.5"] for number in (123456,) * 2], **style)
    )
    shown = narrow.file.getvalue()
    assert "…" not in shown
    assert sum(map(str.isdigit, shown)) == 2 * (2 + 3 + 7)


@pytest.mark.parametrize("place", ["missing/plan.json", "."])
def test_a_json_file_that_has_no_place_is_refused_before_the_work(tmp_path, place):
    file = tmp_path / place
    done = CliRunner().invoke(app, ["plan", "--model", str(tmp_path / "nowhere"), "--json", str(file)])
    assert done.exit_code == 1
    assert "pipecomp: --json: got" in done.output, "the model, which is not there either, comes later"
    assert "allowed: a file that can be written, in a folder that exists" in " ".join(done.output.split())


def test_a_json_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--json: got .*, allowed: a file that can be written"):
        write_json(tmp_path / "gone" / "plan.json", {})


def test_help_needs_no_large_package():
    code = (
        "import sys; from typer.testing import CliRunner; from pipecomp.cli import app\n"
        "assert 'netlab' in CliRunner().invoke(app, ['--help']).output\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=HANG_S, check=False).returncode == 0


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_a_terminal_has_no_bytes_for_ends_no_command(tmp_path, encoding):
    command = [sys.executable, "-m", "pipecomp.cli", "init", "gpt2_wikitext2", "мой запуск"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert b"start them in ??? ??????." in done.stdout


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf"])
def test_times_to_wait_that_are_none(tmp_path, minutes):
    wait = f"--minutes={minutes}"
    for words in (["keys", "invite", str(tmp_path), "other", wait], ["up", wait, "--", "train.py"]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 1, done.output
        assert "minutes: got" in done.output
