"""`pipecomp bench gpu` but for its GPU: what it makes of what torch, pytest and the ranks tell it."""

from __future__ import annotations

import subprocess
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from pipecomp.bench import gpu, gpu_steps
from pipecomp.bench.gpu_page import gpu_page, verdicts
from pipecomp.bench.gpu_steps import synchronizing_calls
from pipecomp.cli.bench import bench
from pipecomp.netlab.network import NetlabError
from pipecomp.schedule import InFlight

WAITED = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:132.)"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_one_clear_line(tmp_path):
    result = CliRunner().invoke(bench, ["gpu", "--folder", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "finds no CUDA device here" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_who_waited_is_noted_with_its_thread():
    ours = compile("def place():\n    warn()", str(gpu_steps._ROOT / "pipecomp" / "kernels" / "staging.py"), "exec")
    names = {"warn": lambda: warnings.warn(WAITED, stacklevel=2)}
    exec(ours, names)

    def theirs() -> None:
        code = compile("def step():\n    warn()", "/x/site-packages/deepspeed/runtime/engine.py", "exec")
        exec(code, names)
        names["step"]()

    def step() -> dict:
        with synchronizing_calls() as found:
            names["place"]()
            names["place"]()
            thread = threading.Thread(target=theirs, name="writer")
            thread.start()
            thread.join()
            warnings.warn("something else", stacklevel=1)
        return found

    with pytest.warns(UserWarning, match="something else"):
        found = step()
    assert {tuple(place): count for place, count in found.items()} == {
        ("MainThread", "pipecomp", "pipecomp/kernels/staging.py:2 place"): 2,
        ("writer", "deepspeed", "deepspeed/runtime/engine.py:2 step"): 1,
    }


@pytest.mark.parametrize("line", gpu_steps.LINES[1:], ids=lambda line: line.name)
def test_steps_count_when_nothing_is_tried_any_more(line):
    """However far the stages run ahead in the end: observing them waits for the GPU."""
    in_flight = InFlight("auto", 0, gpu_steps.STAGES, line.micro_batches)
    step = 0
    while not line.counts(step, SimpleNamespace(in_flight=in_flight), gpu_steps.TRIALS):
        in_flight.observe(0.5**step, 1e-9)
        step += 1
    assert in_flight.slack > 5
    assert not in_flight.observing


class CompilerError(Exception):
    """As Triton's: of no kind that torch's errors are of."""


@pytest.mark.parametrize("error", [CompilerError("no ptxas"), subprocess.CalledProcessError(1, "gcc"), ValueError()])
def test_whatever_a_part_raises_is_noted(error):
    def part() -> None:
        raise error

    assert gpu.attempt(part)["error"].startswith(type(error).__name__)


def row(line: str, ms: float, r: float = 0.0) -> gpu.Row:
    times = {"ms": ms, "least": ms, "most": ms, "links": "kernel"}
    return {"line": line, "against": "DeepSpeed BF16", "r": r, "bits_per_s": 1e9 if r else None, **times}


def kernel(operation: str, ratio: float) -> gpu.Row:
    speeds = {"ms": 0.05, "gb_per_s": 2000.0, "memcpy_gb_per_s": 2500.0, "ratio": ratio}
    return {"operation": operation, "bits": 4, "shape": "8192x1600", **speeds}


WHOLE = {
    "machine": "NVIDIA X",
    "seconds": 400.0,
    "kernels": [kernel("encode_batch", 0.9), kernel("quantize", 0.1)],
    "steps": {"compute_ms": 8.0, "rows": [row("DeepSpeed BF16", 100.0), row(gpu_steps.EVERYTHING, 104.0)]},
    "waits": {0: [], 1: []},
}


def test_what_is_wanted_is_compared_with_what_was_found():
    assert [met for *_, met in verdicts(WHOLE)] == [True, True, True]
    waits = [["MainThread", "deepspeed", "a.py:1 f", 3], ["sender", "pipecomp", "b.py:2 g", 1]]
    found = WHOLE | {"kernels": [kernel("encode_batch", 0.7)], "waits": {0: waits}}
    assert [met for *_, met in verdicts(found)] == [True, False, True]
    page = gpu_page(found)
    assert all("torch does not notice" in whole for whole in (page, gpu_page(WHOLE))), "a step may wait in other ways"
    assert "| deepspeed | a.py:1 f | 3 |" in page
    assert "b.py:2" not in page
    found["waits"] = {0: [["MainThread", "pipecomp", "b.py:2 g", 1]]}
    assert [met for *_, met in verdicts(found)] == [True, False, False]


def test_a_part_that_fails_is_noted_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "this_gpu", lambda: "NVIDIA X")
    monkeypatch.setattr(gpu, "bench_kernels", lambda **options: WHOLE["kernels"])
    monkeypatch.setattr(gpu_steps, "find_waits", lambda model, run: WHOLE["waits"])
    monkeypatch.setattr(gpu_steps, "stage_seconds", lambda model, device: 0.008)

    def rows(*given, **options):
        yield from WHOLE["steps"]["rows"]
        raise NetlabError("the run took more than 3 s")

    monkeypatch.setattr(gpu_steps, "measure_steps", rows)
    result = CliRunner().invoke(bench, ["gpu", "--folder", str(tmp_path)])
    assert result.exit_code == 0
    assert "some step measurements are missing: the run took more than 3 s" in " ".join(result.output.split())
    page = (tmp_path / "gpu.md").read_text()
    assert "Not measured: the run took more than 3 s" in page

    def fails(*given, **options):
        yield row("DeepSpeed BF16", 100.0)
        raise NetlabError("rank 0 failed:\nTraceback:\nValueError: x")

    monkeypatch.setattr(gpu_steps, "measure_steps", fails)
    found = gpu.bench_gpu(tmp_path)
    assert gpu.failed(found["steps"]), "the command ends with 1"
    page = (tmp_path / "gpu.md").read_text()
    assert "Not measured: rank 0 failed: … ValueError: x" in page
    assert "| DeepSpeed BF16 | 100.0 |" in page

    def little(*given, **options):
        yield row("DeepSpeed BF16", 100.0)
        raise NetlabError("the run took more than 3 s")

    monkeypatch.setattr(gpu_steps, "measure_steps", little)
    result = CliRunner().invoke(bench, ["gpu", "--folder", str(tmp_path)])
    assert result.exit_code == 1, "a step with everything on is not compared with stock's"
    monkeypatch.setattr(gpu_steps, "measure_steps", rows)

    def broken(**options):
        raise torch.OutOfMemoryError("CUDA out of memory\nmore")

    monkeypatch.setattr(gpu, "bench_kernels", broken)
    found = gpu.bench_gpu(tmp_path)
    assert [name for name, part in found.items() if gpu.failed(part)] == ["kernels"]
    assert "CUDA out of memory" in (tmp_path / "gpu.md").read_text()
    late = gpu.bench_gpu(tmp_path, limit_s=-1.0)
    assert all("no time was left" in late[part]["error"] for part in ("kernels", "waits", "steps"))
