"""`pipecomp keys new | invite | join | revoke | list`."""

from __future__ import annotations

from typing import Annotated

import typer

from pipecomp.cli.common import JsonOption, check_minutes, console, plain_errors, say, say_error, write_json
from pipecomp.utils.tables import table

keys = typer.Typer(no_args_is_help=True, help="Say which machines belong to a run: its keys and certificates.")
_Ranks = Annotated[str | None, typer.Option(help="That may run there, as in 0,2-3; by default the next one.")]
_Days = Annotated[int, typer.Option(help="Until certificates expire.")]


@keys.command("new")
@plain_errors()
def keys_new(
    folder: str,
    run: Annotated[str, typer.Option(help="A name for the run.")] = "run",
    machine: Annotated[str, typer.Option(help="A name for this machine.")] = "first",
    ranks: Annotated[str, typer.Option(help="That may run on this machine, as in 0,2-3.")] = "0",
    days: _Days = 90,
) -> None:
    """Make a run's keys in FOLDER, on the machine that invites the others."""
    from pipecomp.tls.key_folder import new

    made = new(folder, run=run, machine=machine, ranks=ranks, days=days).identity()
    console.print(f"Run {made.run}: keys in {folder}. Invite others with", highlight=False)
    console.print(f"  pipecomp keys invite {folder} NAME --listen ADDRESS-OF-THIS-MACHINE:29401", highlight=False)


@keys.command("invite")
@plain_errors()
def keys_invite(
    folder: str,
    machine: Annotated[str, typer.Argument(help="A name for the machine.")],
    ranks: _Ranks = None,
    listen: Annotated[str, typer.Option(help="Where to wait for it: an address of this machine.")] = "*:29401",
    minutes: Annotated[float, typer.Option(help="How long to wait.")] = 15.0,
    days: _Days = 90,
) -> None:
    """Wait for another machine, and give it a certificate; prints the line to paste there."""
    from pipecomp.tls.enrollment import Invitation

    check_minutes(minutes)
    with Invitation(folder, machine, ranks=ranks, listen=listen, days=days) as invitation:
        at = invitation.address
        host = "ADDRESS-OF-THIS-MACHINE" if at.everywhere else str(at).rpartition(":")[0]
        say(f"Run this on {machine} within {minutes:g} minutes:")
        line = f"pipecomp keys join FOLDER --at {host}:{at.port} --fingerprint {invitation.fingerprint}"
        typer.echo(f"{line} --code {invitation.code}")
        if not invitation.wait(minutes):
            say_error(f"{machine} did not join within {minutes:g} minutes; the code is void")
            raise typer.Exit(1)
    say(f"{machine} has joined.")


@keys.command("join")
@plain_errors()
def keys_join(
    folder: str,
    at: Annotated[str, typer.Option(help="Where the inviting machine waits, HOST:PORT.")],
    fingerprint: Annotated[str, typer.Option(help="As `pipecomp keys invite` printed it.")],
    code: Annotated[str, typer.Option(help="As `pipecomp keys invite` printed it.")],
) -> None:
    """Get this machine's certificate from the one that invites it; its private key is made here, and stays."""
    from pipecomp.tls.certificates import ranks_text
    from pipecomp.tls.enrollment import join

    got = join(folder, at, fingerprint, code)
    text = f"machine {got.machine} of run {got.run}, rank {ranks_text(got.ranks)}, until {got.expires:%Y-%m-%d}"
    console.print(f"{folder}: {text}", highlight=False)


@keys.command("revoke")
@plain_errors()
def keys_revoke(folder: str, machine: str) -> None:
    """Take a machine's certificate back; the others learn of it when they next meet this machine."""
    from pipecomp.tls.key_folder import revoke

    revoke(folder, machine)
    console.print(f"{machine} is revoked", highlight=False)


@keys.command("list")
@plain_errors()
def keys_list(folder: str, json_file: JsonOption = None) -> None:
    """Show the machines that belong to a run; on other machines than the inviting one, this one alone."""
    from pipecomp.tls.key_folder import listed

    lines = listed(folder)
    write_json(json_file, lines)
    headings = ("machine", "ranks", "expires", "revoked", "serial")
    rows = (
        (line["machine"], line["ranks"], line["expires"], "yes" if line["revoked"] else "no", line["serial"][:16])
        for line in lines
    )
    console.print(table(headings, rows, left=headings))
