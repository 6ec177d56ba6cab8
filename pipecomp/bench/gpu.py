"""Measurements of `pipecomp bench gpu` on one GPU, in at most eight minutes.

Its parts run one after another: kernels beside the device's memcpy, the waits of a step, and steps of a GPT-2 over two
ranks that share the GPU. A part that fails, or for which no time is left, is noted, and the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipecomp.bench import gpu_steps
from pipecomp.bench.gpu_page import PAGE, gpu_page, of_stock
from pipecomp.bench.kernels import bench_kernels
from pipecomp.errors import KernelError, PipecompError
from pipecomp.netlab.lab import Lab
from pipecomp.utils.files import atomic_write_text

Row = dict[str, Any]
LIMIT_S = 480.0
SHAPE, BITS = (8192, 1600), (2, 4, 8)
_CASE_S = 0.2


def bench_gpu(folder: Path, *, limit_s: float = LIMIT_S, say: Callable[[str], None] = lambda text: None) -> Row:
    """Measure everything, and write a page into `folder`.

    Args:
        folder: Created if missing.
        limit_s: Seconds after which no further part begins.
        say: Called with a line when a part begins, and for each result.

    Returns:
        "machine", "seconds", and the results of the parts "kernels", "waits" and "steps"; {"error": text} for a part
        that failed.

    Raises:
        KernelError: There is no GPU.
    """
    machine = this_gpu()
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    def left() -> float:
        return limit_s - (time.monotonic() - began)

    def run(lab: Lab, function: Callable[..., Any], *args: Any) -> dict[int, Any]:
        return lab.run(function, *args, timeout_s=max(1.0, left()))

    parts: dict[str, Callable[[], Any]] = {
        "kernels": lambda: bench_kernels(shapes=[SHAPE], bits=BITS, backends=["auto"], seconds=_CASE_S, device="cuda"),
        "waits": lambda: gpu_steps.find_waits(gpu_steps.GPT2, run),
        "steps": lambda: steps(run, say),
    }
    result: Row = {"machine": machine}
    for name, part in parts.items():
        say(f"{name} …")
        result[name] = attempt(part) if left() > 0 else {"error": f"no time was left of {limit_s:g} s"}
        if failed(result[name]):
            say(f"{name}: {result[name]['error']}")
    result["seconds"] = time.monotonic() - began
    atomic_write_text(folder / PAGE, gpu_page(result))
    return result


def this_gpu() -> str:
    """Return the names of the GPU and the versions. KernelError if torch finds no GPU."""
    if not torch.cuda.is_available():
        raise KernelError(
            f"bench gpu: torch {torch.__version__} finds no CUDA device here; `pipecomp bench kernels`, `store`, "
            "`allreduce` and `pipeline` measure on a CPU"
        )
    import triton

    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    return (
        f"{torch.cuda.get_device_name(0)} ({memory:.0f} GiB), torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"triton {triton.__version__}"
    )


def attempt(part: Callable[[], Any]) -> Any:
    """Return a part's result, or {"error": why it failed}: the last line of what was raised has the reason.

    Whatever it raises: Triton's and its compilers' errors have no base in common with torch's.
    """
    try:
        return part()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {lines[0]}" + (f" … {lines[-1]}" if len(lines) > 1 else "")}


def failed(result: Any) -> bool:
    """Return whether a part's result is an error."""
    return isinstance(result, dict) and "error" in result


def steps(run: gpu_steps.Run, say: Callable[[str], None]) -> Row:
    """Time steps: "compute_ms" of a micro-batch on a stage, and "rows", see `measure_steps`.

    "cut": why lines are missing, where some are. It is an error too if the one to be compared with stock's is among
    them, or if it was not for want of time.
    """
    compute_s = gpu_steps.stage_seconds(gpu_steps.GPT2, "cuda")
    torch.cuda.empty_cache()  # the ranks share the memory
    rows: list[Row] = []
    result: Row = {"compute_ms": 1e3 * compute_s, "rows": rows}
    try:
        for row in gpu_steps.measure_steps(gpu_steps.GPT2, gpu_steps.RATES, compute_s, run):
            rows.append(row)
            say(f"r = {row['r']:g}, {row['line']}: {row['ms']:.1f} ms")
    except PipecompError as error:
        if not rows:
            raise
        first, *more = str(error).splitlines()  # earlier measurements are kept
        result["cut"] = f"{first} … {more[-1]}" if more else first
        # A rank's own words, and not that there was no time left; or too little to compare what is wanted.
        if more or of_stock(rows, gpu_steps.EVERYTHING, 0.0) is None:
            result["error"] = result["cut"]
    return result
