"""`pipecomp bench kernels | store | allreduce | pipeline | gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipecomp.cli.common import JsonOption, console, parse_integers, plain_errors, write_json

bench = typer.Typer(no_args_is_help=True, help="Measure on this machine.")


@bench.command("kernels")
@plain_errors()
def bench_kernel(
    operation: Annotated[list[str] | None, typer.Option(help="Measure only this operation; may be repeated.")] = None,
    backends: Annotated[
        str, typer.Option(help="Backends, separated by commas: auto, torch, native, triton.")
    ] = "auto,torch",
    threads: Annotated[int, typer.Option(help="Threads of kernels and torch; memcpy uses one.")] = 1,
    seconds: Annotated[float, typer.Option(help="Seconds per case.")] = 0.5,
    device: Annotated[str, typer.Option(help="Device: cpu or cuda.")] = "cpu",
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
    samples: Annotated[int, typer.Option(help="Samples in the store.")] = 256,
    epochs: Annotated[int, typer.Option(help="Times each sample is rewritten.")] = 3,
    folder: Annotated[
        str | None, typer.Option(help="Folder on the disk to measure; by default a temporary one.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Measure message stores: put, get, prefetched get and background writes, against memcpy and plain files."""
    from pipecomp.bench.store import bench_store, store_table

    rows = bench_store(samples=samples, epochs=epochs, folder=folder)
    write_json(json_file, rows)
    console.print(store_table(rows))


@bench.command("allreduce")
@plain_errors()
def bench_averages(
    methods: Annotated[
        str | None, typer.Option(help="Methods, separated by commas, such as fp16,global_qsgd; by default all.")
    ] = None,
    sizes: Annotated[str, typer.Option(help="Values per bucket, separated by commas.")] = "65536,1048576,6553600",
    ranks: Annotated[str, typer.Option(help="Numbers of processes, separated by commas.")] = "2",
    seconds: Annotated[float, typer.Option(help="Seconds per case.")] = 0.5,
    json_file: JsonOption = None,
) -> None:
    """Measure gradient averaging between local processes: times, bytes and error, against float32 and PowerSGD."""
    from pipecomp.bench.allreduce import VARIANTS, allreduce_tables, bench_allreduce, variants_of

    rows = bench_allreduce(
        sizes=parse_integers("sizes", sizes),
        ranks=parse_integers("ranks", ranks),
        seconds=seconds,
        variants=variants_of(methods) if methods else VARIANTS,
    )
    write_json(json_file, rows)
    for table in allreduce_tables(rows):
        console.print(table)
        console.print()
    console.print(
        "wait: waiting for other ranks, which share this machine; torch's own functions count as wait entirely.\n"
        "ratio: raw over sent bytes. error: of the mean; own: of a rank's packet. speedup: over gloo's float32.",
        highlight=False,
    )


@bench.command("pipeline")
@plain_errors()
def bench_steps(
    rates: Annotated[
        str, typer.Option(help="Slowness of the links (r), separated by commas; 0 is unthrottled.")
    ] = "0,1,5.8",
    lines: Annotated[
        str | None, typer.Option(help="Parts of configurations' names, separated by commas; by default all.")
    ] = None,
    stages: Annotated[int, typer.Option(help="Pipeline stages, one node each.")] = 2,
    steps: Annotated[int, typer.Option(help="Timed steps per configuration.")] = 3,
    rounds: Annotated[int, typer.Option(help="Rounds of alternating between the configurations.")] = 1,
    local_steps: Annotated[
        str | None,
        typer.Option(help="Also measure two replicas that average after so many steps; separated by commas."),
    ] = None,
    delay: Annotated[str | None, typer.Option(help="One-way latency, such as 20ms.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Measure training steps over links of several rates, against stock DeepSpeed. Needs root, for network namespaces.

    r is the time of a micro-batch's float32 packets, both ways, divided by a stage's compute time.
    """
    from pipecomp.bench.configurations import lines_of, rates_of
    from pipecomp.bench.pipeline import bench_pipeline, pipeline_table

    rows = bench_pipeline(
        lines=lines_of(lines, local_steps),
        rates=rates_of(rates),
        stages=stages,
        steps=steps,
        rounds=rounds,
        delay=delay,
        on_row=lambda row: console.print(f"r = {row['r']:g}, {row['line']}: {row['seconds']:.2f} s"),
    )
    write_json(json_file, rows)
    console.print(pipeline_table(rows))


@bench.command("gpu")
@plain_errors()
def bench_one_gpu(
    folder: Annotated[Path, typer.Option(help="Folder for gpu.md and gpu.png.")] = Path("benchmarks/results"),
    json_file: JsonOption = None,
) -> None:
    """Run everything on one GPU in at most eight minutes: tests, kernels, and steps of GPT-2 with two ranks on it.

    Writes a page with tables and a picture of a step. Exit status 1 without a GPU, if a part fails, or if the time is
    up before a step with all options is compared with stock DeepSpeed; the last line names missing lines after that.
    """
    from pipecomp.bench.gpu import bench_gpu, failed
    from pipecomp.bench.gpu_page import PAGE, verdicts

    found = bench_gpu(folder, say=lambda text: console.print(text, highlight=False))
    write_json(json_file, found)
    for wanted, value, met in verdicts(found):
        console.print(f"{'yes' if met else 'NO'}: {wanted}: {value}", highlight=False)
    cut = found["steps"].get("cut")
    missing = f"; some step measurements are missing: {cut}" if cut else ""
    console.print(f"{folder / PAGE}, {found['seconds']:.0f} s{missing}", highlight=False)
    if any(failed(part) for part in found.values()):
        raise typer.Exit(1)
