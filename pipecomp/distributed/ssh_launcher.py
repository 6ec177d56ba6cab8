"""A program launched as the ranks of a run, on this machine and on others over ssh.

Hosts get equal numbers of consecutive ranks in the given order. Other machines must let this one log in without a
password, and have the same Python and the same working directory, unless `pipecomp.distributed.bring_up` sets them up.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType

from pipecomp.distributed.launch_env import COMMON_VARIABLES, LAUNCHER, MACHINE_VARIABLES, STDIN, without_brackets
from pipecomp.distributed.placement import address_towards, free_port, is_loopback, list_interfaces
from pipecomp.distributed.preemption import stop_signals
from pipecomp.distributed.supervisor import GO_ON, SSH_FAILED, Ended, ProcessSpec, Supervisor, describe_status
from pipecomp.errors import ConfigError, require

PORT = 29500  # default MASTER_PORT for several machines, as of other launchers
# Routers drop idle connections, and only the first rank prints for hours. ServerAliveCountMax is an hour: how long a
# link may be down is for the run to decide, not for ssh.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=30", "-o", "ServerAliveCountMax=120")
_LOOKUP_S, _WARN_S, _GRACE_S = 10.0, 5.0, 60.0
# Prefixes of variables that other machines get. None of them names a network interface or device of this machine.
_FORWARDED = ("PIPECOMP_", "HF_", "TRACKIO_", "MLFLOW_", "WANDB_", "DS_ACCELERATOR", "PYTHONPATH")
_LOCAL_ONLY = ("PIPECOMP_LISTEN", LAUNCHER)


@dataclass(frozen=True, kw_only=True)
class RankCommand:
    """The command of one rank.

    Attributes:
        host: None for this machine.
        variables: Those that a launcher sets, RANK among them.
        folder: Working directory on the host; None for that of this process.
        needs: Files and folders that must be there.
    """

    rank: int
    host: str | None
    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    folder: str | None = None
    needs: tuple[str, ...] = ()

    def shell_line(self, folder: str, environment: Mapping[str, str], *, from_stdin: bool = False) -> str:
        """Write the shell command that starts the rank on its host.

        Args:
            folder: Working directory there.
            environment: Variables of this process; those for other machines are picked.
            from_stdin: Read them from standard input (`export_commands`) instead of the command line, which every user
                of both machines can see. Signals follow on standard input; its end is the launcher's end.
        """
        # Note: not one byte more, as `head` would read: a signal sent during the login may already follow.
        count = len(os.fsencode(export_commands(environment)))
        read = ["sh", "-c", f'eval "$(dd bs=1 count={count} 2>/dev/null)" && exec "$@"', "sh"] if from_stdin else []
        shown = {**({LAUNCHER: STDIN} if from_stdin else forwarded_variables(environment)), **self.variables}
        words = [*read, "env", *(f"{name}={value}" for name, value in shown.items()), *self.command]
        return f"cd {shlex.quote(folder)} && {shlex.join(words)}"

    def process(self) -> ProcessSpec:
        """Return the local process that runs the rank: itself, or ssh."""
        label = f"rank {self.rank}"
        if self.host is None:
            return ProcessSpec(label=label, command=self.command, environment={**os.environ, **self.variables})
        line = self.shell_line(self.folder or working_directory(), os.environ, from_stdin=True)
        exports = os.fsencode(export_commands(os.environ))
        return ProcessSpec(label=label, command=[*SSH, self.host, line], environment=os.environ, input=exports)


def forwarded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks on other machines get."""
    return {
        name: value
        for name, value in environment.items()
        if (name.startswith(_FORWARDED) or name in COMMON_VARIABLES) and name not in _LOCAL_ONLY
    }


def export_commands(environment: Mapping[str, str]) -> str:
    """Write these variables as commands for a shell."""
    forwarded = forwarded_variables(environment)
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in forwarded.items())


def assign_ranks(
    command: Sequence[str], world: int, hosts: Sequence[str] = (), more: Mapping[str, str] = MappingProxyType({})
) -> list[RankCommand]:
    """Divide the ranks of a run among hosts.

    Args:
        command: Program and arguments, the same for every rank.
        world: Number of ranks.
        hosts: As for ssh, also USER@HOST; empty for this machine alone.
        more: Further variables for every rank.

    Returns:
        The ranks, with the variables that a launcher sets.

    Raises:
        ConfigError: The hosts cannot share that many ranks, or the first one has no address.

    Example:
        >>> [rank.host for rank in assign_ranks(["python", "train.py"], 2)]
        [None, None]
    """
    places = [host_name(host) for host in hosts] or [""]
    valid = all(places) and not any(place.startswith("-") for place in places)  # "-" starts an option of ssh
    require(valid or not hosts, "--peers", ",".join(hosts), "host names with commas between them")
    require(len(set(places)) == len(places), "--peers", ",".join(hosts), "each host once; --stages sets the ranks")
    allowed = f"a multiple of {len(places)}, the number of hosts in --peers"
    require(world >= 1 and world % len(places) == 0, "--stages", world, allowed)
    each = world // len(places)
    master, port = ("127.0.0.1", free_port()) if not hosts else (rendezvous_address(places), _master_port(os.environ))
    ranks = []
    for rank in range(world):
        host = places[rank // each]
        variables = {
            "RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_RANK": rank % each,
            "LOCAL_WORLD_SIZE": each,
            "MASTER_ADDR": master,
            "MASTER_PORT": port,
        }
        ranks.append(
            RankCommand(
                rank=rank,
                host=None if not host or is_this_machine(host) else host,
                command=tuple(command),
                variables={name: str(value) for name, value in variables.items()} | dict(more),
            )
        )
    return ranks


def _master_port(environment: Mapping[str, str]) -> int:
    text = environment.get("MASTER_PORT", str(PORT))
    require(text.isdecimal() and 0 < int(text) < 65536, "MASTER_PORT", text, "a number from 1 to 65535")
    return int(text)


def working_directory() -> str:
    """Return the working directory by the path that the user took, symbolic links included.

    The target of a link need not exist on other machines.
    """
    logical = os.environ.get("PWD", "")
    try:
        return logical if os.path.isabs(logical) and os.path.samefile(logical, os.curdir) else os.getcwd()
    except OSError:
        return os.getcwd()


def rendezvous_address(hosts: Sequence[str]) -> str:
    """Find the address of the first host that all hosts can reach. Raises ConfigError.

    A machine's own name often resolves to 127.0.1.1 on itself; then its address towards the second host is used.
    """
    address = next(iter(_resolve(_hostname(hosts[0]))), None)
    if address is None:
        allowed = "addresses, or host names that this machine can resolve or that ssh's configuration has"
        raise ConfigError("--peers", hosts[0], allowed)
    if not is_loopback(address) or len(hosts) == 1:
        return address
    own = address_towards(_hostname(hosts[1]))
    hint = f"The name resolves to {address} on this machine"
    require(own is not None, "--peers", hosts[0], f"an address of this machine that {hosts[1]} can reach", hint)
    return str(own)


def is_this_machine(host: str) -> bool:
    """Return whether a host is this machine."""
    own = {address for interface in list_interfaces().values() for address in interface.addresses}
    return any(address in own or is_loopback(address) for address in _resolve(_hostname(host)))


def host_name(host: str) -> str:
    """Return a host without the brackets of an IPv6 address, which ssh does not take."""
    user, at, name = host.rpartition("@")
    return f"{user}{at}{without_brackets(name)}"


def _hostname(host: str) -> str:
    """The name to resolve; for a host of ssh's configuration its HostName there."""
    name = host.rpartition("@")[2]
    return name if _resolve(name) else _ssh_hostname(host) or name


def _ssh_hostname(host: str) -> str | None:
    try:
        done = subprocess.run([*SSH, "-G", host], capture_output=True, text=True, timeout=_LOOKUP_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    settings = (line.split() for line in done.stdout.splitlines())
    return next((words[1] for words in settings if len(words) == 2 and words[0] == "hostname"), None)


def _resolve(name: str) -> list[str]:
    try:
        addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []
    return [address for address in addresses if "%" not in address]  # fe80::1%eth0 is valid on this machine only


# Words of ssh's last line, and what to try. HOST is the host.
_SSH_REMEDIES = {
    "resolve": "Look at the name, or give the address instead",
    "Permission denied": "This machine must log in without a password: ssh-copy-id HOST",
    "verification failed": "This machine does not know the other's key: log in once by hand, ssh HOST",
    "refused": "Start its ssh server, or name its port in ~/.ssh/config",
    "No such file": "Every machine needs the same folder and the same Python",
    "can't cd": "Every machine needs the same folder and the same Python",
    "CONNECT": "Its connection to this machine fails: open the port here for HOST, or set MASTER_PORT to an open one",
}
_CHECK_S = 12.0  # for the login to another machine
_LACKS = """import importlib.util, os, sys
lacks = [] if importlib.util.find_spec("pipecomp") else ["pipecomp"]
lacks += [path for path in sys.argv[3:] if not os.path.exists(path)]
if lacks:
    sys.exit(f"No such file or package: {', '.join(lacks)}")
"""
_CONNECT = """import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 6).close()
except OSError as error:
    sys.exit(f"CONNECT {sys.argv[1]} port {sys.argv[2]}: {error.strerror or error}")
"""


class LackingError(ConfigError):
    """A machine lacks Python, pipecomp or files, and can be logged in to."""


def check_hosts(ranks: Sequence[RankCommand]) -> None:
    """Log in to every other machine and look for what its ranks need; if rank 0 runs here, try the way to its port.

    Raises:
        LackingError: Something is missing there.
        ConfigError: After 15 s at most, with the host, ssh's reason and what to try.
    """
    hosts = list(dict.fromkeys(rank.host for rank in ranks if rank.host))
    if not hosts:
        return
    hint = "pipecomp train --dry-run prints the commands to run on each host"
    require(shutil.which("ssh"), "ssh", None, "an installed ssh client", hint)
    first = ranks[0]
    master, port = first.variables.get("MASTER_ADDR", ""), int(first.variables.get("MASTER_PORT", 0))
    with contextlib.ExitStack() as opened:
        check = _LACKS
        if first.host is None:
            try:
                opened.enter_context(socket.create_server(("", port), backlog=128))
            except OSError as error:
                allowed = f"a port that is free here ({error.strerror})"
                raise ConfigError("MASTER_PORT", port, allowed, "An earlier run may still use it") from error
            check = _LACKS + _CONNECT
        found = _check_there({rank.host: rank for rank in ranks if rank.host}, check, master, str(port))
        for host, (status, problem) in sorted(found.items(), key=lambda answer: answer[1][0] != SSH_FAILED):
            lacks = status != SSH_FAILED and "CONNECT" not in problem
            raise login_error(host, problem, LackingError if lacks else ConfigError)


def lacking_hosts(ranks: Sequence[RankCommand]) -> dict[str, str]:
    """Return the other machines that cannot run these ranks, and why: no login, folder, Python, package or file."""
    others = {rank.host: rank for rank in ranks if rank.host and not is_this_machine(rank.host)}
    found = _check_there(others, _LACKS, "", "0")
    return {host: problem for host, (_, problem) in found.items()}


def _check_there(ranks: Mapping[str, RankCommand], check: str, *arguments: str) -> dict[str, tuple[int, str]]:
    """Run a program with each host's Python in its folder; return status and last line where it fails."""
    lines = []
    for rank in ranks.values():
        flags = ["-P"] if "-P" in rank.command else []
        path = rank.variables.get("PYTHONPATH", os.environ.get("PYTHONPATH"))  # as the ranks get it
        given = ["env", f"PYTHONPATH={path}"] if path else []
        words = shlex.join([*given, rank.command[0], *flags, "-c", check, *arguments, *rank.needs])
        lines.append(f"cd {shlex.quote(rank.folder or working_directory())} && {words}")
    with ThreadPoolExecutor(max(1, len(ranks))) as pool:
        answers = list(pool.map(_run_there, ranks, lines))
    return {host: answer for host, answer in zip(ranks, answers, strict=True) if answer[0]}


def login_error(host: str, problem: str, kind: type[ConfigError] = ConfigError) -> ConfigError:
    """Return the error for a host that this machine cannot log in to, or that lacks something, with what to try."""
    tries = [text for words, text in _SSH_REMEDIES.items() if words in problem]
    remedy = (tries or ["Look whether the machine is up and reachable, and try ssh HOST true"])[0]
    allowed = f"a machine that this one can log in to ({problem.replace('CONNECT ', '')})"
    return kind("--peers", host, allowed, remedy.replace("HOST", host))


def try_login(host: str, line: str) -> str | None:
    """Run a line on a host, for 12 s at most; return the last line of its error, None if it succeeds."""
    status, problem = _run_there(host, line)
    return problem if status else None


def read_remote(host: str, line: str) -> str | None:
    """Run a line on a host, for 12 s at most; return its output, None if it fails."""
    try:
        done = _login(host, line)
    except subprocess.TimeoutExpired:
        return None
    return None if done.returncode else done.stdout


def _login(host: str, line: str) -> subprocess.CompletedProcess[str]:
    command = [*SSH, host, line]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_CHECK_S, check=False
    )


def _run_there(host: str, line: str) -> tuple[int, str]:
    """Run a line on a host, for 12 s at most; return its status and the last line of its error."""
    try:
        done = _login(host, line)
    except subprocess.TimeoutExpired:
        return SSH_FAILED, f"no answer within {_CHECK_S:g} s"
    said = [text for text in done.stderr.splitlines() if text.strip()]
    return done.returncode, (said or [f"exit status {done.returncode}"])[-1].strip()


def launch_ranks(ranks: Sequence[RankCommand]) -> int:
    """Start the ranks and wait for all of them, as for a single program.

    Signals that end a run reach every rank; a second one of the same kind also closes the connections to other
    machines, which ends their ranks. After the first failure the remaining ranks have a minute to end.

    Returns:
        0, or the status of the rank that failed first.

    Raises:
        ConfigError: A program cannot be started.
    """
    return watch_ranks(ranks).status


def watch_ranks(
    ranks: Sequence[RankCommand],
    *,
    grace_s: float = _GRACE_S,
    go_on: str = GO_ON,
    meanwhile: Callable[[], object] = lambda: None,
) -> Ended:
    """Start the ranks and wait for all of them; see `launch_ranks`.

    Args:
        ranks: The ranks.
        grace_s: Seconds that the remaining ranks have to end after the first failure.
        go_on: The advice after a lost rank.
        meanwhile: Called every 20 ms.
    """
    hint = "pipecomp train --dry-run prints the commands to run on each host"
    require(all(r.host is None for r in ranks) or shutil.which("ssh"), "ssh", None, "an installed ssh client", hint)
    staying = [name for name in MACHINE_VARIABLES if os.environ.get(name)]
    if staying and any(r.host is not None for r in ranks):
        text = f"pipecomp: these variables apply to this machine only: {', '.join(staying)}. Set them on the others"
        print(f"{text} if ranks need them there", file=sys.stderr, flush=True)
    from pipecomp.utils.cgroups import count_oom_kills  # here: it imports torch, which takes seconds

    before, warned = count_oom_kills(), False
    with Supervisor() as supervisor, supervisor.forward_signals():
        for rank in ranks:
            supervisor.start(rank.process())
        for failed_s in supervisor.watch(grace_s=grace_s):
            if failed_s > _WARN_S and not warned and supervisor.failed is not None:
                warned = True
                left = f"The remaining ranks are killed after {grace_s - _WARN_S:g} s"
                _warn(ranks[supervisor.failed], supervisor.status, count_oom_kills() - before, left)
            meanwhile()
        failed = None if supervisor.failed is None else ranks[supervisor.failed]
        wanted = {128 + number for number in stop_signals()}
        if failed is not None and supervisor.status > 128 and supervisor.status not in wanted:
            _warn(failed, supervisor.status, count_oom_kills() - before, go_on)
        return supervisor.ended({n for n, rank in enumerate(ranks) if rank.host is not None})


def _warn(rank: RankCommand, status: int, oom_kills: int, left: str) -> None:
    """Name the failed rank, mostly while the others wait for it; they may not have connected yet."""
    where = f" on {rank.host or socket.gethostname()}"
    how = describe_status(status, None if rank.host else oom_kills)
    why = f" of ssh itself: try `ssh {rank.host} true`" if rank.host and status == SSH_FAILED else ""
    print(f"pipecomp: rank {rank.rank}{where} {how}{why}. {left}", file=sys.stderr, flush=True)
