"""The command line: `pipecomp init | train | up | peers | … | netlab | plan | report | store | bench`.

Errors are one line; exit status 1.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pipecomp.cli.bench import bench
from pipecomp.cli.common import (
    JsonOption,
    check_minutes,
    console,
    option,
    parse_integers,
    plain_errors,
    print_error,
    print_line,
    print_status,
    takes_options,
    write_json,
)
from pipecomp.cli.peers import agree_to_copies, peers_app
from pipecomp.cli.train import init, read_train_options, train
from pipecomp.errors import require
from pipecomp.plan.options import PlanOptions
from pipecomp.utils.tables import COMPACT, replace_unprintable, table

_UP_PORT = 29400

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Pipeline-parallel fine-tuning of Hugging Face models over slow links.",
)
keys_app = typer.Typer(no_args_is_help=True, help="Manage a run's keys and certificates: which machines belong to it.")
store_app = typer.Typer(no_args_is_help=True, help="Inspect, check and clean a message store.")
app.add_typer(keys_app, name="keys")
app.add_typer(store_app, name="store")
app.add_typer(peers_app, name="peers")
app.add_typer(bench, name="bench")
app.command()(init)
app.command()(train)


def _print_version(wanted: bool) -> None:
    if wanted:
        from pipecomp import __version__

        typer.echo(f"pipecomp {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    replace_unprintable()


@app.command()
@plain_errors()
def assemble(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Records of the machines that are left.")],
    out: Annotated[Path, option("Folder of the checkpoints.")],
    step: Annotated[int | None, option("Only this step; by default the newest that is complete.")] = None,
) -> None:
    """Make a checkpoint from what the machines that are left hold for a lost one.

    pipecomp assemble run/second-home --out run/checkpoints

    Copy the folders of the other machines to this one first. The checkpoint can
    be loaded with other cuts and another number of replicas.
    """
    from pipecomp.elastic.assembly import assemble as write_checkpoint

    for folder in folders:
        require(folder.is_dir(), "FOLDER", str(folder), "a folder with records: elastic.path of a run")
    print_line(str(write_checkpoint(folders, out, step=step)))


@app.command()
@plain_errors()
def demo(
    stages: Annotated[int, option("Pipeline stages, one process each; 2 to 4.")] = 4,
    methods: Annotated[str, option("Methods, comma-separated: none, fp16, bf16, direct, aqsgd.")] = "none,direct,aqsgd",
    bits: Annotated[str, option("Forward and backward bits of direct and aqsgd.")] = "2,4",
    bandwidth: Annotated[str, option("Rate of the links in each direction, such as 20mbit.")] = "5mbit",
    seed: Annotated[int, option("Seed of weights, data order and rounding.")] = 0,
    out: Annotated[str, option("Folder for demo.json, losses.png, runs, stores and the model.")] = "demo-out",
    quick: Annotated[bool, option("Run a fraction of it: too short to compare methods.")] = False,
) -> None:
    """Fine-tune a small GPT-2 over a slow link with several methods; compare losses, bytes and times.

    Takes three minutes on two cores, half a minute with --quick; fp16 and bf16 take minutes more each. Needs no
    downloads.
    """
    from pipecomp.demo.results import result_table, table_notes
    from pipecomp.demo.run import run_demo
    from pipecomp.demo.settings import Settings
    from pipecomp.report.page import try_write_report

    smaller: dict[str, Any] = {"width": 64, "training": 64, "epochs": 3, "pretraining": 128} if quick else {}
    forward, backward = parse_integers("bits", bits, 2)
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
    columns = (
        TextColumn("{task.description:<30}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=console) as bar:
        tasks: dict[str, Any] = {}

        def show(what: str, step: int, steps: int, loss: float | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=steps, loss="")
                if not console.is_terminal:  # where bars appear at the end only
                    print_status(f"{what} …")
            bar.update(tasks[what], completed=step, loss="" if loss is None else f"loss {loss:.3f}")

        result = run_demo(settings, show)
    console.print(result_table(result))
    for note in table_notes(result):
        console.print(note, highlight=False)
    print_line(f"\nWrote {out}/demo.json and {out}/losses.png")
    runs = [Path(out) / method for method in settings.methods]
    print_line(f"Report: {try_write_report(runs, Path(out) / 'report.html')}")
    if result["sentence"] is not None:
        console.print(f"\n{result['sentence']}", style="bold", highlight=False)
    if quick:
        console.print("--quick is too short to compare methods: run without it.", highlight=False)


@app.command()
@plain_errors()
def doctor(
    json_output: Annotated[bool, option("Print a JSON list and nothing else.", "--json")] = False,
    store_path: Annotated[Path, option("Folder of the message store.", "--store")] = Path("messages"),
    ranks: Annotated[
        bool | None,
        typer.Option(
            "--ranks/--no-ranks",
            "--peers/--no-peers",
            help="Measure between ranks: the launcher's, or two on this machine without one.",
            show_default="with a launcher",
        ),
    ] = None,
    workers: Annotated[int, option("Worker processes of each rank's data loader, to compare with /dev/shm.")] = 0,
    batch_tokens: Annotated[int, option("Tokens of a micro-batch, samples times length, with --workers.")] = 0,
) -> None:
    """Check this machine and, under a launcher, the links between machines; exit status 1 if there is a problem.

    On each of two machines, with R = 0 on the first and 1 on the second:

    torchrun --nnodes 2 --node-rank R --master-addr FIRST -m pipecomp.cli doctor

    With DeepSpeed's launcher:

    deepspeed --hostfile FILE --no_local_rank --module pipecomp.cli doctor
    """
    from pipecomp.doctor.examination import examine
    from pipecomp.doctor.finding import print_report
    from pipecomp.doctor.machine import LoaderSize

    require((workers > 0) == (batch_tokens > 0), "--workers", workers, "together with --batch-tokens, both above 0")
    loader = LoaderSize(workers, batch_tokens) if workers else None

    def report(findings: list[Any]) -> None:
        if json_output:
            typer.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
        else:
            print_report(findings, console)

    if examine(report, store=store_path, ranks=ranks, loader=loader):
        raise typer.Exit(1)


@app.command()
@plain_errors()
def netlab(
    command: Annotated[list[str], typer.Argument(help="Program and arguments that each node runs, after --.")],
    nodes: Annotated[int, option("Number of nodes.")] = 2,
    bandwidth: Annotated[str | None, option("Rate of every link each way, such as 100mbit; default unlimited.")] = None,
    asymmetric: Annotated[
        list[str] | None, option("Instead of --bandwidth: DOWN/UP, such as 100mbit/10mbit, once or per node.")
    ] = None,
    delay: Annotated[str | None, option("One-way latency, such as 20ms.")] = None,
    jitter: Annotated[str | None, option("Variation of the delay, such as 2ms.")] = None,
    cut: Annotated[
        list[str] | None, option("Disconnect a node: NODE@TIME for good, NODE@TIME+TIME for a while, such as 1@30s+5s.")
    ] = None,
    outage: Annotated[list[str] | None, option("Disconnect all nodes: DURATION@TIME, such as 60s@300s.")] = None,
    loss: Annotated[str | None, option("Share of packets that are lost, such as 2%.")] = None,
    nat: Annotated[bool, option("Put every node but 0 behind a NAT router.", "--nat")] = False,
    wireguard: Annotated[bool, option("Connect the nodes through wireguard-go.", "--wireguard")] = False,
    software: Annotated[bool, option("Throttle pipecomp's links only; needs no root.", "--software")] = False,
    procs_per_node: Annotated[int, option("Processes on each node.")] = 1,
    launcher: Annotated[str, option("none, or deepspeed: its launcher runs COMMAND, a script, on each node.")] = "none",
    json_file: JsonOption = None,
) -> None:
    """Run a command on several nodes behind slow links, all on this machine, and count the bytes they send.

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
        nat=nat,
        wireguard=wireguard,
        software=software,
    )
    report = run_in_lab(lab, command, procs_per_node=procs_per_node, launcher=launcher, say=print_status)
    write_json(json_file, report)
    if "form" in report:
        console.print(bytes_table(report))
    raise typer.Exit(report["status"])


@app.command()
@plain_errors()
@takes_options
def plan(options: PlanOptions, json_file: JsonOption = None) -> None:
    """Predict a step's time with each method and bandwidth; recommend cuts and bits, or no compression.

    pipecomp plan --model FOLDER --stages 4 --bandwidth 100mbit --delay 20ms --speed 30

    With --model and --stages alone: cuts, each stage's memory and the bytes on each link.

    On the machines that will train: torchrun ... -m pipecomp.cli plan --model FOLDER --measure
    """
    from pipecomp.netlab.software import throttle_to
    from pipecomp.plan.command import run_plan

    if (result := run_plan(console, options, throttle_to)) is not None:
        write_json(json_file, result)


@app.command()
@plain_errors()
def report(
    runs: Annotated[list[str], typer.Argument(help="Folders of runs, folders of such folders, or files of --metrics.")],
    out: Annotated[
        Path | None, option("File of the page; by default report.html in the run's folder, or here for several runs.")
    ] = None,
) -> None:
    """Write an HTML page about a run, or several side by side: losses, bytes, times, recommended changes."""
    from pipecomp.report.page import write_report

    print_line(f"Wrote {write_report(runs, out)}")


@app.command()
@plain_errors()
def up(
    command: Annotated[list[str], typer.Argument(help="A recipe's train.py, another script, or train; its arguments.")],
    machines: Annotated[int, option("Machines of the run.")] = 2,
    procs: Annotated[int, option("Processes on each machine.")] = 1,
    keys: Annotated[str, option("This machine's folder of keys; created if missing.")] = "keys",
    listen: Annotated[
        str | None,
        option("HOST:PORT where this machine listens; by default port 29400 on the first machine, and none on others."),
    ] = None,
    address: Annotated[
        str | None, option("HOST:PORT where others reach the first machine, if a router forwards a port to it.")
    ] = None,
    at: Annotated[str | None, option("On other machines: value printed by the first one.")] = None,
    join: Annotated[str | None, option("HOST:PORT of a run that goes on: this machine joins it.")] = None,
    fingerprint: Annotated[str | None, option("On other machines: value printed by the first one.")] = None,
    code: Annotated[str | None, option("On other machines: value printed by the first one.")] = None,
    minutes: Annotated[float, option("Time the first machine waits for each other one.")] = 15.0,
    doctor: Annotated[bool, option("Check machines and links first.", "--doctor/--no-doctor")] = True,
    plan: Annotated[bool, option("Predict steps from measurements first.", "--plan/--no-plan")] = True,
    anyway: Annotated[bool, option("Train even if the doctor finds problems.", "--anyway")] = False,
    yes: Annotated[
        bool, option("Take files that are missing here from other machines without asking.", "--yes")
    ] = False,
) -> None:
    """Start a run on several machines over TLS: keys, doctor, plan, comparison of files, and training.

    On the first machine: pipecomp up -- train --model gpt2 --data text.txt --out run
    or, with a script: pipecomp up -- train.py --deepspeed_config ds_config.json …

    It prints a line to paste on the second machine. Only the first one needs an
    open port. To continue a run, give the same two commands again: machines that
    have joined need no new invitation. It also prints a line with which another
    machine joins the run while it goes on; a machine that was lost and comes back
    gives its command again.
    """
    from pipecomp.distributed import up_launcher
    from pipecomp.tls.listener import ALL_INTERFACES, Address

    check_minutes(minutes)
    invitation = (at, fingerprint, code)
    whole = None not in invitation or invitation == (None, None, None)
    if join is not None:
        require(at is None, "join", join, "without --at")
        whole = (fingerprint is None) == (code is None)
    require(whole, "at" if join is None else "join", at or join, "together with --fingerprint and --code")
    if join is not None:
        reached = Address.parse(join if re.search(r":\d+$", join) else f"{join}:{_UP_PORT}", "join")
    elif at is None:
        bind = Address.parse(listen or str(Address(ALL_INTERFACES, _UP_PORT)), "listen")
        shown = up_launcher.own_address(bind.port) if bind.is_wildcard else bind
        reached = shown if address is None else Address.parse(address, "address")
    else:
        at = at if re.search(r":\d+$", at) else f"{at}:{_UP_PORT}"
        reached = Address.parse(address or at, "at" if address is None else "address")
    trains = command[:1] == [up_launcher.TRAIN]
    comes = at is not None or join is not None
    train = read_train_options(command[1:], lacking=comes or yes) if trains else None
    yes = yes or agree_to_copies(train)
    several = machines > 1 or join is not None
    elastic = train is not None and (several if train.elastic is None else train.elastic)
    if train is not None:
        require(elastic or not train.rebalance, "--rebalance", True, "only with several machines, and --elastic")
    run = up_launcher.UpRun(
        address=reached,
        machines=machines,
        procs=procs,
        command=tuple(command),
        train=None if train is None else replace(train, elastic=elastic or None).to_json(),
        elastic=elastic,
    )
    checks = up_launcher.Checks(doctor=doctor, plan=plan, anyway=anyway, take=yes)
    if join is not None:
        require(elastic, "join", join, "with train, and without --no-elastic")
        if fingerprint is not None and code is not None:
            invites = str(Address(reached.host, reached.port + 1))
            up_launcher.join_run(keys, invites, fingerprint, code, say=typer.echo)
    elif at is not None and fingerprint is not None and code is not None:
        up_launcher.join_run(keys, at, fingerprint, code, say=typer.echo)
    else:
        options = ["--machines", str(machines), "--procs", str(procs)]
        options += [f"--no-{name}" for name, enabled in (("doctor", doctor), ("plan", plan)) if not enabled]
        options += ["--anyway"] if anyway else []
        up_launcher.invite_machines(run, keys, bind, options, minutes=minutes, say=typer.echo)
        listen = str(bind)
    joins = join is not None
    if at is None and not joins:
        with up_launcher.OpenInvitation(run, keys, bind, minutes=minutes, say=typer.echo):
            status = up_launcher.start_ranks(run, keys, listen, checks, say=print_status)
    else:
        status = up_launcher.start_ranks(run, keys, listen, checks, joins=joins, say=print_status)
    if status:
        raise typer.Exit(status)


# -- keys

_Ranks = Annotated[str | None, option("Ranks that may run there, such as 0,2-3; by default the next one.")]
_Days = Annotated[int, option("Days until certificates expire.")]


@keys_app.command("new")
@plain_errors()
def keys_new(
    folder: str,
    run: Annotated[str, option("Name of the run.")] = "run",
    machine: Annotated[str, option("Name of this machine.")] = "first",
    ranks: Annotated[str, option("Ranks that may run on this machine, such as 0,2-3.")] = "0",
    days: _Days = 90,
) -> None:
    """Create a run's keys in FOLDER, on the machine that invites the others."""
    from pipecomp.tls.key_folder import create_keys

    identity = create_keys(folder, run=run, machine=machine, ranks=ranks, days=days).identity()
    console.print(f"Run {identity.run}: keys in {folder}. Invite others with", highlight=False)
    console.print(f"  pipecomp keys invite {folder} NAME --listen ADDRESS-OF-THIS-MACHINE:29401", highlight=False)


@keys_app.command("invite")
@plain_errors()
def keys_invite(
    folder: str,
    machine: Annotated[str, typer.Argument(help="Name of the other machine.")],
    ranks: _Ranks = None,
    listen: Annotated[str, option("Address of this machine to wait at.")] = "*:29401",
    minutes: Annotated[float, option("Time to wait.")] = 15.0,
    days: _Days = 90,
) -> None:
    """Wait for another machine and issue it a certificate; prints the line to paste there."""
    from pipecomp.tls.enrollment import Invitation

    check_minutes(minutes)
    with Invitation(folder, machine, ranks=ranks, listen=listen, days=days) as invitation:
        at = invitation.address
        host = "ADDRESS-OF-THIS-MACHINE" if at.is_wildcard else str(at).rpartition(":")[0]
        print_status(f"Run this on {machine} within {minutes:g} minutes:")
        line = f"pipecomp keys join FOLDER --at {host}:{at.port} --fingerprint {invitation.fingerprint}"
        typer.echo(f"{line} --code {invitation.code}")
        if not invitation.wait(minutes):
            print_error(f"{machine} did not join within {minutes:g} minutes; the code is void")
            raise typer.Exit(1)
    print_status(f"{machine} has joined.")


@keys_app.command("join")
@plain_errors()
def keys_join(
    folder: str,
    at: Annotated[str, option("HOST:PORT where the inviting machine waits.")],
    fingerprint: Annotated[str, option("Value printed by `pipecomp keys invite`.")],
    code: Annotated[str, option("Value printed by `pipecomp keys invite`.")],
) -> None:
    """Get this machine's certificate from the one that invites it; the private key is created here and stays here."""
    from pipecomp.tls.certificates import format_ranks
    from pipecomp.tls.enrollment import accept_invitation

    identity = accept_invitation(folder, at, fingerprint, code)
    text = f"machine {identity.machine} of run {identity.run}, rank {format_ranks(identity.ranks)}"
    console.print(f"{folder}: {text}, until {identity.expires:%Y-%m-%d}", highlight=False)


@keys_app.command("revoke")
@plain_errors()
def keys_revoke(folder: str, machine: str) -> None:
    """Revoke a machine's certificate; the others learn of it when they next connect to this machine."""
    from pipecomp.tls.key_folder import revoke_machine

    revoke_machine(folder, machine)
    console.print(f"{machine} is revoked", highlight=False)


@keys_app.command("list")
@plain_errors()
def keys_list(folder: str, json_file: JsonOption = None) -> None:
    """List the machines of a run; machines other than the inviting one list only themselves."""
    from pipecomp.tls.key_folder import list_machines

    lines = list_machines(folder)
    write_json(json_file, lines)
    headings = ("machine", "ranks", "expires", "revoked", "serial")
    rows = (
        (line["machine"], line["ranks"], line["expires"], "yes" if line["revoked"] else "no", line["serial"][:16])
        for line in lines
    )
    console.print(table(headings, rows, left=headings))


# -- store


@store_app.command("info")
@plain_errors()
def store_info(path: str, json_file: JsonOption = None) -> None:
    """Show a message store's contents by rank and link: run, samples, bytes, bits, versions."""
    from pipecomp.buffers.admin import info

    lines = info(path)
    write_json(json_file, [dataclasses.asdict(line) for line in lines])
    headings = ("rank", "link", "samples", "bits", "stored MB", "file MB", "versions", "configuration")
    for run in dict.fromkeys(line.run for line in lines):
        rows = (
            (
                str(line.rank),
                line.link,
                str(line.samples),
                str(line.bits),
                f"{line.stored_bytes / 1e6:.2f}",
                f"{line.file_bytes / 1e6:.2f}",
                "–" if line.versions is None else f"{line.versions[0]} to {line.versions[1]}",
                line.configuration,
            )
            for line in lines
            if line.run == run
        )
        console.print(f"run {run}" if run else "not used by a run", highlight=False)
        console.print(table(headings, rows, left=("link", "versions", "configuration"), **COMPACT))


@store_app.command("verify")
@plain_errors()
def store_verify(path: str, json_file: JsonOption = None) -> None:
    """Check every stored value's checksum; exit status 1 if any is damaged."""
    from pipecomp.buffers.admin import verify
    from pipecomp.buffers.base import entry_name

    report = verify(path)
    damaged = [d._asdict() for d in report.damaged]
    write_json(json_file, {"checked": report.checked, "damaged": damaged})
    for d in report.damaged:
        place = "the file" if d.link is None else d.link
        place += "" if d.sample is None else f", sample {entry_name(d.sample)}"
        console.print(f"rank {d.rank}, {place}: {d.problem}", highlight=False)
    console.print(f"{report.checked} values checked, {len(damaged)} damaged", highlight=False)
    if damaged:
        print_line(
            f"`pipecomp store prune {path}` keeps the intact values and removes the rest, to be sent as first "
            "visits once; a run with --resume auto does so by itself"
        )
        raise typer.Exit(1)


@store_app.command("prune")
@plain_errors()
def store_prune(
    path: str,
    link: Annotated[str | None, option("Remove this link's samples and settings.")] = None,
    ids_below: Annotated[int | None, option("Keep only samples with ids below this.")] = None,
    max_samples: Annotated[int | None, option("Keep at most this many samples per link.")] = None,
    everything: Annotated[bool, option("Remove the stores entirely.", "--everything")] = False,
    json_file: JsonOption = None,
) -> None:
    """Remove damaged values and those that the options select, and shrink the files."""
    from pipecomp.buffers.admin import prune

    report = prune(path, link=link, ids_below=ids_below, max_samples=max_samples, everything=everything)
    write_json(json_file, dataclasses.asdict(report))
    values = f"{report.removed} values removed ({report.damaged} of them damaged), {report.kept} kept"
    console.print(
        f"{'all values removed' if everything else values}; "
        f"{report.bytes_before / 1e6:.2f} MB before, {report.bytes_after / 1e6:.2f} MB now",
        highlight=False,
    )
