"""`pipecomp bench kernels | store | gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipecomp.cli.common import JsonOption, console, option, plain_errors, write_json

bench = typer.Typer(no_args_is_help=True, help="Measure on this machine.")


@bench.command("kernels")
@plain_errors()
def bench_kernel(
    operation: Annotated[list[str] | None, option("Measure only this operation; may be repeated.")] = None,
    backends: Annotated[str, option("Backends, separated by commas: auto, torch, native, triton.")] = "auto,torch",
    threads: Annotated[int, option("Threads of kernels and torch; memcpy uses one.")] = 1,
    seconds: Annotated[float, option("Seconds per case.")] = 0.5,
    device: Annotated[str, option("Device: cpu or cuda.")] = "cpu",
    json_file: JsonOption = None,
) -> None:
    """Measure kernels: GB/s, and the ratio to memcpy of the same bytes, alternating in one run."""
    from pipecomp.bench.kernels import bench_kernels, kernels_table

    chosen = [name.strip() for name in backends.split(",")]
    rows = bench_kernels(backends=chosen, operations=operation, threads=threads, seconds=seconds, device=device)
    write_json(json_file, rows)
    console.print(kernels_table(rows))


@bench.command("store")
@plain_errors()
def bench_stores(
    samples: Annotated[int, option("Samples in the store.")] = 256,
    epochs: Annotated[int, option("Times each sample is rewritten.")] = 3,
    folder: Annotated[str | None, option("Folder on the disk to measure; by default a temporary one.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Measure message stores: put, get, prefetched get and background writes, against memcpy and plain files."""
    from pipecomp.bench.store import bench_store, store_table

    rows = bench_store(samples=samples, epochs=epochs, folder=folder)
    write_json(json_file, rows)
    console.print(store_table(rows))


@bench.command("gpu")
@plain_errors()
def bench_one_gpu(
    folder: Annotated[Path, option("Folder for gpu.md.")] = Path("benchmarks/results"),
    json_file: JsonOption = None,
) -> None:
    """Measure kernels, waits, and steps of GPT-2 with two ranks on one GPU, in at most eight minutes.

    Writes a page with tables. Exit status 1 without a GPU, if a part fails, or if the time is up before a step with all
    options is compared with stock DeepSpeed; the last line names missing lines after that.
    """
    from pipecomp.bench.gpu import bench_gpu, failed
    from pipecomp.bench.gpu_page import PAGE, verdicts

    results = bench_gpu(folder, say=lambda text: console.print(text, highlight=False))
    write_json(json_file, results)
    for goal, value, met in verdicts(results):
        console.print(f"{'yes' if met else 'NO'}: {goal}: {value}", highlight=False)
    cut = results["steps"].get("cut")
    missing = f"; some step measurements are missing: {cut}" if cut else ""
    console.print(f"{folder / PAGE}, {results['seconds']:.0f} s{missing}", highlight=False)
    if any(failed(part) for part in results.values()):
        raise typer.Exit(1)
