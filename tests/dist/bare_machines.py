"""Machines with Python alone: nodes of a network lab with a real ssh server, and a package index on their loopback.

Needs root, iproute2 and Debian's openssh-server. They see neither this checkout nor its environment, and have an empty
home.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path

from pipecomp.netlab import Lab, missing
from tests.limits import HANG_S
from tests.packaging import repacked
from tests.recipes.recipe_runs import ROOT

SYSTEM = "/usr/bin/python3"
INDEX = "http://127.0.0.1:3141/"  # on each machine's own loopback, so that the line has what this one copies alone


def other_python() -> str | None:
    """Return why the system's Python cannot take the packages of this one."""
    if not Path(SYSTEM).exists() or sys.prefix.startswith("/usr"):
        return f"{SYSTEM} is missing, or the one that runs this"
    words = [SYSTEM, "-c", "import sysconfig; print(sysconfig.get_config_var('SOABI'))"]
    found = subprocess.run(words, capture_output=True, text=True, check=False, timeout=HANG_S).stdout.strip()
    own = sysconfig.get_config_var("SOABI")
    return None if found == own else f"{SYSTEM} is {found}, and this is {own}"


def why_not() -> str | None:
    """Return why this machine cannot have such machines."""
    tools = ("/usr/sbin/sshd", "ssh", "ssh-keygen", "unshare")
    lacking = [f"{tool} is not installed" for tool in tools if not shutil.which(tool)]
    return missing() or next(iter(lacking), None) or other_python()


@dataclass(frozen=True)
class Result:
    """Outcome of a command on the first machine.

    Attributes:
        status, text, seconds: Of the command.
        sent: Bytes that ssh has sent.
        homes: What is in the other machines' homes afterwards, by address.
    """

    status: int
    text: str
    seconds: float
    sent: int
    homes: Mapping[str, list[str]]


@contextmanager
def bare_folder() -> Iterator[Path]:
    """Keys, a server's configuration, and node 0's home, where a bare machine hides nothing."""
    path = Path(tempfile.mkdtemp(prefix="pipecomp-bare-", dir="/var/tmp"))
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path / name], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    (path / "sshd_config").write_text(
        f"HostKey {path / 'host'}\nAuthorizedKeysFile {path / 'user.pub'}\nStrictModes no\nUsePAM no\n"
        "PermitRootLogin prohibit-password\nPidFile none\n"
    )
    for name in ("bin", "own"):
        (path / name).mkdir()
    wrapper = path / "bin" / "ssh"
    proxy = f"{SYSTEM} {Path(__file__).with_name('counting_proxy.py')} {path / 'sent'} %h %p"
    wrapper.write_text(
        f"#!/bin/sh\nexec {shutil.which('ssh')} -i {path / 'user'} -o StrictHostKeyChecking=no "
        f'-o UserKnownHostsFile=/dev/null -o LogLevel=ERROR -o ProxyCommand="{proxy}" "$@"\n'
    )
    wrapper.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def run_commands(
    folder: Path, work: Path, commands: Sequence[Sequence[str]], *, nodes: int = 2, index: Path | None = None
) -> list[Result]:
    """Run `pipecomp` with these arguments on the first machine, in a working directory that the others lack.

    Args:
        folder: From `bare_folder`.
        work: The working directory.
        commands: Arguments, command by command.
        nodes: Machines.
        index: Folder of wheels by name, which each machine finds at `INDEX`.
    """
    hidden = [str(work), str(ROOT), sys.prefix, sys.base_prefix]
    settings = {"work": str(work), "hidden": hidden, "index": index and str(index), "commands": commands}
    (folder / "settings.json").write_text(json.dumps(settings))
    said: list[str] = []
    variables = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PIP_INDEX_URL": INDEX}
    with Lab(nodes=nodes) as lab:
        done = lab.run(
            [sys.executable, str(Path(__file__).with_name("bare_node.py")), str(folder)],
            timeout_s=HANG_S, environment=variables, on_line=lambda label, stream, line: said.append(line),
        )  # fmt: skip
    assert done.status == 0, "\n".join(said)
    results = [Result(**json.loads((folder / f"result-{n}.json").read_text())) for n in range(len(commands))]
    for words, result in zip(commands, results, strict=True):
        print(f"{result.seconds:.1f} s, {result.sent} bytes: {' '.join(words)}\n{result.text}")
    return results


def make_index(folder: Path, distributions: Mapping[str, Distribution]) -> Path:
    """Write installed packages as wheels into a folder for each, as an index has them."""
    for name, distribution in distributions.items():
        (folder / name).mkdir(parents=True)
        repacked(distribution, folder / name)
    return folder
