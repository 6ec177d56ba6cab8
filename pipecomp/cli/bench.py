"""`pipecomp bench kernels | store`."""

from __future__ import annotations

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
