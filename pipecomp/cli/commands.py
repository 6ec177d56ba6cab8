"""The command line: `pipecomp init | train | up | demo | doctor | keys | netlab | plan | report | store | bench`.

Errors are one line; exit status 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pipecomp.cli.bench import bench
from pipecomp.cli.common import (
    GradientsOption,
    JsonOption,
    TieOption,
    console,
    plain_errors,
    say,
    whole_numbers,
    write_json,
)
from pipecomp.cli.keys import keys
from pipecomp.cli.start import init, train
from pipecomp.cli.store import store
from pipecomp.cli.up import up
from pipecomp.utils.tables import replace_unprintable

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Pipeline-parallel fine-tuning of Hugging Face models over slow links.",
)
app.add_typer(keys, name="keys")
app.add_typer(store, name="store")
app.add_typer(bench, name="bench")
app.command()(init)
app.command()(train)
app.command("up")(up)


def _say_version(wanted: bool) -> None:
    if wanted:
        from pipecomp import __version__

        typer.echo(f"pipecomp {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Say which version this is, and stop."),
    ] = False,
) -> None:
    replace_unprintable()


@app.command()
@plain_errors()
def demo(
    stages: Annotated[int, typer.Option(help="Pipeline stages, a process each; 2 to 4.")] = 4,
    methods: Annotated[
        str, typer.Option(help="With commas: none, fp16, bf16, direct, aqsgd. fp16 and bf16 take minutes each.")
    ] = "none,direct,aqsgd",
    bits: Annotated[str, typer.Option(help="Forward and backward bits of direct and aqsgd.")] = "2,4",
    bandwidth: Annotated[str, typer.Option(help="Rate of the links, each way, as in 20mbit.")] = "5mbit",
    seed: Annotated[int, typer.Option(help="Of weights, data order and rounding.")] = 0,
    out: Annotated[
        str, typer.Option(help="Folder for demo.json, losses.png, runs, stores and the model.")
    ] = "demo-out",
    quick: Annotated[bool, typer.Option(help="A fraction of it, to try: too short to compare methods.")] = False,
) -> None:
    """Fine-tune a small GPT-2 over a slow link with several methods: what each reached, sent, and how long it took.

    Three minutes on two cores, half a minute with --quick. Needs no downloads.
    """
    from pipecomp.demo.plot import notes, result_table
    from pipecomp.demo.run import run_demo
    from pipecomp.demo.settings import Settings
    from pipecomp.report.command import try_report

    smaller: dict[str, Any] = {"width": 64, "training": 64, "epochs": 3, "pretraining": 128} if quick else {}
    forward, backward = whole_numbers("bits", bits, 2)
    settings = Settings(
        stages=stages,
        methods=tuple(m.strip() for m in methods.split(",")),
        forward_bits=forward,
        backward_bits=backward,
        bandwidth=bandwidth,
        seed=seed,
        out=out,
        **smaller,
    )
    with _progress() as bar:
        tasks: dict[str, Any] = {}

        def show(what: str, step: int, steps: int, loss: float | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=steps, loss="")
                if not console.is_terminal:  # where the bars come at the end
                    say(f"{what} …")
            bar.update(tasks[what], completed=step, loss="" if loss is None else f"loss {loss:.3f}")

        found = run_demo(settings, show)
    console.print(result_table(found))
    for note in notes(found):
        console.print(note, highlight=False)
    console.print(f"\nWrote {out}/demo.json and {out}/losses.png", highlight=False, soft_wrap=True)
    shown = [Path(out) / method for method in settings.methods]
    console.print(f"Report: {try_report(shown, Path(out) / 'report.html')}", highlight=False, soft_wrap=True)
    if found["sentence"] is not None:
        console.print(f"\n{found['sentence']}", style="bold", highlight=False)
    if quick:
        console.print("With --quick it is too short to compare methods: run it without.", highlight=False)


@app.command()
@plain_errors()
def doctor(
    json_output: Annotated[bool, typer.Option("--json", help="Print a JSON list and nothing else.")] = False,
    store_path: Annotated[Path, typer.Option("--store", help="Folder of the message store.")] = Path("messages"),
    ranks: Annotated[
        bool | None,
        typer.Option(
            "--ranks/--no-ranks",
            "--peers/--no-peers",
            help="Measure between ranks: the launcher's, or two on this machine without one.",
            show_default="with a launcher",
        ),
    ] = None,
) -> None:
    """Check this machine and, started by a launcher, the links between machines; exit status 1 if there is a problem.

    On each of two machines, with R = 0 on the first and 1 on the second:

    torchrun --nnodes 2 --node-rank R --master-addr FIRST -m pipecomp.cli doctor

    With DeepSpeed's launcher:

    deepspeed --hostfile FILE --no_local_rank --module pipecomp.cli doctor
    """
    from pipecomp.doctor.examination import examine
    from pipecomp.doctor.finding import print_report

    def report(findings: list[Any]) -> None:
        if json_output:
            typer.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
        else:
            print_report(findings, console)

    problem = examine(report, store=store_path, ranks=ranks)
    if problem:
        raise typer.Exit(1)


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
@plain_errors()
def netlab(
    command: Annotated[list[str], typer.Argument(help="What each node runs: program and arguments, after --.")],
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 2,
    bandwidth: Annotated[
        str | None, typer.Option(help="Of every link, each way, as in 100mbit; by default unlimited.")
    ] = None,
    asymmetric: Annotated[
        list[str] | None, typer.Option(help="Instead of --bandwidth: DOWN/UP, as in 100mbit/10mbit, once or per node.")
    ] = None,
    delay: Annotated[str | None, typer.Option(help="One way, as in 20ms.")] = None,
    jitter: Annotated[str | None, typer.Option(help="How far the delay varies, as in 2ms.")] = None,
    cut: Annotated[
        list[str] | None,
        typer.Option(help="Lose a node's connection: NODE@TIME for good, NODE@TIME+TIME for a while, as in 1@30s+5s."),
    ] = None,
    outage: Annotated[
        list[str] | None, typer.Option(help="Lose all connections: TIME@TIME, as in 60s@300s: for how long, and when.")
    ] = None,
    loss: Annotated[str | None, typer.Option(help="Share of the packets that are lost, as in 2%.")] = None,
    sites: Annotated[
        str | None, typer.Option(help="Nodes of each site, and the rate between sites, as in 0,2/1,3@10mbit.")
    ] = None,
    nat: Annotated[
        bool, typer.Option("--nat", help="Put every node but 0 behind a router of its own, which lets nobody in.")
    ] = False,
    wireguard: Annotated[
        bool, typer.Option("--wireguard", help="Let the nodes talk through WireGuard (wireguard-go in user space).")
    ] = False,
    software: Annotated[
        bool, typer.Option("--software", help="Needs no root, but slows down only pipecomp's own links between stages.")
    ] = False,
    procs_per_node: Annotated[int, typer.Option(help="Processes on each node.")] = 1,
    launcher: Annotated[
        str, typer.Option(help="none, or deepspeed: its launcher runs COMMAND, a script, on each node.")
    ] = "none",
    json_file: JsonOption = None,
) -> None:
    """Run a command on several nodes behind slow links, all on this machine, and count what they send.

    pipecomp netlab --bandwidth 100mbit --delay 20ms -- python train.py

    RANK, WORLD_SIZE, MASTER_ADDR and the like are set for each process. The exit
    status is that of the process that failed first. Needs Linux, root and
    iproute2; --software needs neither root nor iproute2.
    """
    from pipecomp.netlab import Lab
    from pipecomp.netlab.command import bytes_table, run_in_lab

    lab = Lab(
        nodes=nodes,
        bandwidth=bandwidth,
        asymmetric=asymmetric or (),
        delay=delay,
        jitter=jitter,
        cuts=cut or (),
        outages=outage or (),
        loss=loss,
        sites=sites,
        nat=nat,
        wireguard=wireguard,
        software=software,
    )
    report = run_in_lab(lab, command, procs_per_node=procs_per_node, launcher=launcher, say=say)
    write_json(json_file, report)
    if "form" in report:
        console.print(bytes_table(report))
    raise typer.Exit(report["status"])


@app.command("plan")
@plain_errors()
def plan_run(
    model: Annotated[str, typer.Option(help="A folder with config.json, or a hub name. Weights are not read.")],
    nodes: Annotated[int | None, typer.Option(help="Stages × replicas; by default the number of stages, or 2.")] = None,
    stages: Annotated[int | None, typer.Option(help="Pipeline stages; by default the fastest number.")] = None,
    batch: Annotated[int, typer.Option(help="Samples in a step, over all replicas.")] = 32,
    micro_batch: Annotated[
        int | None, typer.Option(help="Samples in a micro-batch; by default the fastest number.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens in a sample; by default 1024, or what the model takes.")
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="100mbit or, link by link, 1gbit/100mbit; with commas the first is planned for.")
    ] = None,
    delay: Annotated[str | None, typer.Option(help="One way, as in 20ms.")] = None,
    speed: Annotated[
        str | None, typer.Option(help="TFLOP/s that each node reaches in training: 30 or, node by node, 30/10.")
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="Instead of --speed: a file from --measure --json.")] = None,
    memory: Annotated[float | None, typer.Option(help="GB of each node for the model; by default unlimited.")] = None,
    dtype: Annotated[str, typer.Option(help="Training precision: fp32, bf16 or fp16.")] = "fp32",
    tie: TieOption = True,
    gradients: GradientsOption = None,
    recompute: Annotated[bool, typer.Option("--recompute", help="With --speed: use activation checkpointing.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time blocks, kernels and the disk; under a launcher the links too.")
    ] = False,
    store_path: Annotated[Path, typer.Option("--store", help="With --measure: the store's folder.")] = Path("messages"),
    dropout: Annotated[float | None, typer.Option(help="Of the training (default: the model's own).")] = None,
    one_pass: Annotated[bool, typer.Option("--one-pass", help="For a training that sees every sample once.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Predict a step's time with each method and bandwidth; recommend cuts and bits, or no compression.

    pipecomp plan --model FOLDER --stages 4 --bandwidth 100mbit --delay 20ms --speed 30

    With --model and --stages alone: cuts, each stage's memory and the bytes on each link.

    On the machines that will train: torchrun ... -m pipecomp.cli plan --model FOLDER --measure
    """
    from pipecomp.netlab.throttle import throttle_to
    from pipecomp.plan.command import run_plan
    from pipecomp.plan.options import PlanOptions

    options = PlanOptions(
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
        gradients=gradients,
        recompute=recompute,
        measure=measure,
        store=store_path,
        dropout=dropout,
        one_pass=one_pass,
    )
    if (found := run_plan(console, options, throttle_to)) is not None:
        write_json(json_file, found)


@app.command()
@plain_errors()
def report(
    runs: Annotated[list[str], typer.Argument(help="Folders of runs, folders that hold such, or files of --metrics.")],
    out: Annotated[
        Path | None, typer.Option(help="The page; by default report.html in the folder, for several runs here.")
    ] = None,
) -> None:
    """Show a run, or several side by side, on one HTML page: losses, bytes, where the time went, what to change."""
    from pipecomp.report.command import write_report

    console.print(f"Wrote {write_report(runs, out)}", highlight=False, soft_wrap=True)
