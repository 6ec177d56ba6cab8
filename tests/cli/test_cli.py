"""The command line as a user runs it: the demo, the store commands, and errors of one line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from pipecomp.cli import app
from pipecomp.report.read import read_runs
from tests.limits import HANG_S

pytestmark = pytest.mark.ranks

DEMO_KEYS = {
    "method",
    "forward_bits",
    "backward_bits",
    "train_loss",
    "eval_loss",
    "forward_bytes_raw",
    "forward_bytes_sent",
    "forward_bytes_sent_after_first_epoch",
    "backward_bytes_raw",
    "backward_bytes_sent",
    "store_bytes",
    "seconds",
    "step_seconds_at",
}


def told(*arguments: str) -> str:
    """What a command prints, in this process: imports take longer than what most commands do."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    return out, told("demo", "--quick", "--methods", "none,aqsgd", "--bits", "3,6", "--out", str(out))


def test_demo_writes_what_it_shows(demo):
    out, text = demo
    results = json.loads((out / "demo.json").read_text())
    assert [r["method"] for r in results] == ["none", "aqsgd"]
    none, aqsgd = results
    for result in results:
        assert set(result) >= DEMO_KEYS
        assert set(result["step_seconds_at"]) == {"1 Gbit/s", "100 Mbit/s", "10 Mbit/s"}
        assert f"{result['train_loss']:.3f}" in text
        assert f"{result['eval_loss']:.3f}" in text
    assert (aqsgd["forward_bits"], aqsgd["backward_bits"]) == (3, 6)
    assert aqsgd["forward_bytes_raw"] == none["forward_bytes_raw"] > 0
    later = aqsgd["forward_bytes_raw"] / 2  # one of two epochs
    assert 3 / 32 * later < aqsgd["forward_bytes_sent_after_first_epoch"] < 1.4 * 3 / 32 * later
    assert none["store_bytes"] == 0
    assert aqsgd["store_bytes"] > aqsgd["forward_bytes_raw"] / 2
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert "AQ-SGD fw3 bw6" in text
    assert (out / "report.html").stat().st_size > 1e6
    assert [run.name for run in read_runs([out])] == ["FP32", "AQ-SGD"]


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
        (("demo", "--stages", "9"), "stages: got 9, allowed: 1 to 4"),
    ],
)
def test_errors_name_what_was_wrong(arguments, message):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert message in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_help_needs_no_large_package():
    code = (
        "import sys; from typer.testing import CliRunner; from pipecomp.cli import app\n"
        "assert 'netlab' in CliRunner().invoke(app, ['--help']).output\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=HANG_S, check=False).returncode == 0
