"""`pipecomp up`."""

from __future__ import annotations

from typing import Annotated

import typer

from pipecomp.cli.common import check_minutes, plain_errors, say
from pipecomp.errors import require

PORT = 29400


@plain_errors()
def up(
    command: Annotated[list[str], typer.Argument(help="A recipe's train.py, or another script, and its arguments.")],
    machines: Annotated[int, typer.Option(help="Machines of the run.")] = 2,
    procs: Annotated[int, typer.Option(help="Processes on each machine.")] = 1,
    keys: Annotated[str, typer.Option(help="This machine's folder of keys; made if it is not there.")] = "keys",
    listen: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT where this machine listens (the first: port 29400 by default); none: it only connects."
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="HOST:PORT where others reach the first machine, if a router forwards a port to it."),
    ] = None,
    at: Annotated[str | None, typer.Option(help="On other machines: as the first one has printed it.")] = None,
    fingerprint: Annotated[str | None, typer.Option(help="On other machines: as the first one has printed it.")] = None,
    code: Annotated[str | None, typer.Option(help="On other machines: as the first one has printed it.")] = None,
    minutes: Annotated[float, typer.Option(help="How long the first machine waits for each other one.")] = 15.0,
    doctor: Annotated[bool, typer.Option("--doctor/--no-doctor", help="Examine machines and links first.")] = True,
    plan: Annotated[bool, typer.Option("--plan/--no-plan", help="Predict steps from what is measured first.")] = True,
    anyway: Annotated[bool, typer.Option("--anyway", help="Train in spite of the doctor's problems.")] = False,
) -> None:
    """Start a run on several machines, over TLS: keys, doctor, plan, comparison of files, and training.

    On the first machine: pipecomp up -- train.py --deepspeed_config ds_config.json …

    It prints a line to paste on the second machine. Only the first one needs an
    open port. To continue a run, give the same two commands again: machines that
    have joined need no new invitation.
    """
    from pipecomp.tls.listener import EVERYWHERE, Address
    from pipecomp.up import host

    check_minutes(minutes)
    given = (at, fingerprint, code)
    require(None not in given or given == (None, None, None), "at", at, "together with --fingerprint and --code")
    if at is None:
        bind = host.parse_address("listen", listen or str(Address(EVERYWHERE, PORT)))
        shown = host.own_address(bind.port) if bind.everywhere else bind
        reached = shown if address is None else host.parse_address("address", address)
    else:
        reached = host.parse_address("at" if address is None else "address", address or at)
    run = host.Run(address=reached, machines=machines, procs=procs, command=tuple(command))
    checks = host.Checks(doctor=doctor, plan=plan, anyway=anyway)
    if at is not None and fingerprint is not None and code is not None:
        host.join_run(run, keys, at, fingerprint, code, say=_line)
    else:
        options = ["--machines", str(machines), "--procs", str(procs)]
        options += [f"--no-{name}" for name, wanted in (("doctor", doctor), ("plan", plan)) if not wanted]
        options += ["--anyway"] if anyway else []
        host.invite_all(run, keys, bind, options, minutes=minutes, say=_line)
        listen = str(bind)
    status = host.start_ranks(run, keys, listen, checks, say=say)
    if status:
        raise typer.Exit(status)


def _line(text: str) -> None:
    typer.echo(text)
