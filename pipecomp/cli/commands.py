"""The command line: `pipecomp demo | doctor | netlab | plan | store | bench`. Errors are one line and exit status 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pipecomp.cli.bench import bench
from pipecomp.cli.common import JsonOption, console, plain_errors, write_json
from pipecomp.cli.store import store

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Pipeline-parallel fine-tuning of Hugging Face models over slow links.",
)
app.add_typer(store, name="store")
app.add_typer(bench, name="bench")


@app.command()
def demo(
    stages: Annotated[int, typer.Option(help="Processes and pipeline stages, 1 to 4.")] = 2,
    methods: Annotated[str, typer.Option(help="Of none, fp16, bf16, direct, aqsgd.")] = "none,direct,aqsgd",
    bits: Annotated[str, typer.Option(help="Forward and backward bits of direct and aqsgd.")] = "2,4",
    seed: Annotated[int, typer.Option(help="For weights, data order and rounding.")] = 0,
    out: Annotated[str, typer.Option(help="Folder for demo.json, losses.png, stores and the model.")] = "demo-out",
    quick: Annotated[bool, typer.Option(help="A minute instead of four: a smaller model, fewer steps.")] = False,
) -> None:
    """Fine-tune a small GPT-2 over pipeline stages with several methods; show what each reached and what it sent."""
    with plain_errors():
        from pipecomp.demo.plot import tables
        from pipecomp.demo.run import Settings, run_demo

        smaller: dict[str, Any] = {"width": 64, "training": 64, "epochs": 2, "pretraining": 256} if quick else {}
        forward, backward = _bits(bits)
        settings = Settings(
            stages=stages,
            methods=tuple(m.strip() for m in methods.split(",")),
            forward_bits=forward,
            backward_bits=backward,
            seed=seed,
            out=out,
            **smaller,
        )
        with _progress() as bar:
            tasks: dict[str, Any] = {}

            def show(what: str, step: int, steps: int, loss: float | None) -> None:
                if what not in tasks:
                    tasks[what] = bar.add_task(what, total=steps, loss="")
                bar.update(tasks[what], completed=step, loss="" if loss is None else f"loss {loss:.3f}")

            results = run_demo(settings, show)
        for found in tables(results):
            console.print(found)
        console.print(
            "Raw is float32. Seconds a step are predicted from the bytes and the compute that were measured here.\n"
            "Input and output embeddings are not tied, so that only activations and their gradients are sent."
        )
        console.print(f"Written: {out}/demo.json, {out}/losses.png", highlight=False)


@app.command()
def doctor(
    json_output: Annotated[bool, typer.Option("--json", help="Print a JSON list and nothing else.")] = False,
    store_path: Annotated[Path, typer.Option("--store", help="Folder of the message store.")] = Path("messages"),
    ranks: Annotated[
        bool | None,
        typer.Option(
            "--ranks/--no-ranks",
            "--peers/--no-peers",
            help="Measure between ranks: those of the launcher, otherwise two on this machine.",
            show_default="with a launcher",
        ),
    ] = None,
) -> None:
    """Check this machine, and the links between machines if a launcher starts this on each; exit status 1 for problems.

    On each of two machines: torchrun --nnodes 2 --node-rank 0 (on the second: 1) --master-addr ADDRESS-OF-THE-FIRST
    -m pipecomp.cli doctor

    With DeepSpeed's launcher: deepspeed --hostfile FILE --no_local_rank --module pipecomp.cli doctor
    """
    from pipecomp.doctor.examination import examine
    from pipecomp.doctor.report import print_report

    def report(findings: list[Any]) -> None:
        if json_output:
            typer.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
        else:
            print_report(findings, console)

    with plain_errors():
        problem = examine(report, store=store_path, ranks=ranks)
    if problem:
        raise typer.Exit(1)


def _bits(text: str) -> tuple[int, int]:
    from pipecomp.errors import ConfigError

    parts = text.split(",")
    if len(parts) != 2 or not all(p.strip().isdigit() for p in parts):
        raise ConfigError("bits", text, "two numbers, forward and backward, as in 2,4")
    return int(parts[0]), int(parts[1])


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description:<30}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    return Progress(*columns, console=console)


@app.command()
def netlab(
    command: Annotated[list[str], typer.Argument(help="What each node runs: program and arguments, after --.")],
    nodes: Annotated[int, typer.Option(help="How many.")] = 2,
    bandwidth: Annotated[str | None, typer.Option(help="Each way, as in 100mbit; by default unlimited.")] = None,
    asymmetric: Annotated[
        list[str] | None, typer.Option(help="Instead: DOWN/UP, as in 100mbit/10mbit, once or for each node.")
    ] = None,
    delay: Annotated[str | None, typer.Option(help="One way, as in 20ms.")] = None,
    jitter: Annotated[str | None, typer.Option(help="The delay varies by up to this.")] = None,
    cut: Annotated[
        list[str] | None,
        typer.Option(help="Lose a node's connection: NODE@TIME for good, NODE@TIME+TIME for a while, as in 1@30s+5s."),
    ] = None,
    software: Annotated[
        bool, typer.Option("--software", help="Without root: slow down pipecomp's own links between stages only.")
    ] = False,
    procs_per_node: Annotated[int, typer.Option(help="Processes on each node.")] = 1,
    launcher: Annotated[
        str, typer.Option(help="none; or deepspeed: its launcher on each node, COMMAND is a script with arguments.")
    ] = "none",
    json_file: JsonOption = None,
) -> None:
    """Run a command on several nodes behind slow links, all on this machine; count what they send.

    pipecomp netlab --bandwidth 100mbit --delay 20ms -- python train.py

    Each process finds RANK, WORLD_SIZE, MASTER_ADDR and the like in its environment. The exit status is that of the
    process that failed first. Needs root and iproute2 on Linux; --software needs neither.
    """
    with plain_errors():
        from pipecomp.netlab import Lab
        from pipecomp.netlab.command import bytes_table, run_in_lab

        lab = Lab(
            nodes=nodes,
            bandwidth=bandwidth,
            asymmetric=asymmetric or (),
            delay=delay,
            jitter=jitter,
            cuts=cut or (),
            software=software,
        )
        messages = Console(stderr=True)
        report = run_in_lab(
            lab,
            command,
            procs_per_node=procs_per_node,
            launcher=launcher,
            say=lambda text: messages.print(text, highlight=False, soft_wrap=True),
        )
        write_json(json_file, report)
        if "form" in report:
            console.print(bytes_table(report))
    raise typer.Exit(report["status"])


@app.command("plan")
def plan_run(
    model: Annotated[str, typer.Option(help="A folder with config.json, or a hub name. Weights are not read.")],
    nodes: Annotated[int | None, typer.Option(help="Stages × replicas; by default the stages, or 2.")] = None,
    stages: Annotated[int | None, typer.Option(help="Pipeline stages; by default what is fastest.")] = None,
    batch: Annotated[int, typer.Option(help="Samples of a step, over all replicas.")] = 32,
    micro_batch: Annotated[int | None, typer.Option(help="Its samples; by default what is fastest.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Of a sample; by default 1024.")] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(help="Each way: 100mbit or, link by link, 1gbit/100mbit; with commas, the plan is for the first."),
    ] = None,
    delay: Annotated[str | None, typer.Option(help="One way, as in 20ms.")] = None,
    speed: Annotated[
        str | None, typer.Option(help="TFLOP/s that nodes reach in training, as in 30 or, node by node, 30/10.")
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="Instead: what --measure --json wrote before.")] = None,
    memory: Annotated[float | None, typer.Option(help="GB of a node for the model; by default unlimited.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16 training.")] = "fp32",
    tie: Annotated[bool, typer.Option("--tie/--no-tie", help="Weights that the model ties stay tied.")] = True,
    recompute: Annotated[bool, typer.Option("--recompute", help="With --speed: activation checkpointing.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time blocks, kernels and the disk here; under a launcher the links too.")
    ] = False,
    store_path: Annotated[Path, typer.Option("--store", help="With --measure: the store's folder.")] = Path("messages"),
    json_file: JsonOption = None,
) -> None:
    """Predict a step's time for each method and bandwidth; say how to cut, how many bits, or that they do not pay.

    pipecomp plan --model FOLDER --stages 4 --bandwidth 100mbit --delay 20ms --speed 30

    With --model and --stages alone: where to cut, each stage's memory and the bytes on each link.

    On the machines that will train: torchrun ... -m pipecomp.cli plan --model FOLDER --measure
    """
    with plain_errors():
        from pipecomp.plan.command import run_plan

        found = run_plan(
            console,
            model=model,
            nodes=nodes,
            stages=stages,
            batch=batch,
            micro_batch=micro_batch,
            tokens=tokens,
            bandwidth=bandwidth,
            delay=delay,
            speed=speed,
            profile=profile,
            memory=memory,
            dtype=dtype,
            tie=tie,
            recompute=recompute,
            measure=measure,
            store=store_path,
        )
        if found is not None:
            write_json(json_file, found)
