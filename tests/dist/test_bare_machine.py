"""A run that begins on a machine with Python alone: one command over a real ssh server, without a package index.

Needs root, iproute2 and Debian's openssh-server. The machine is a node of a network lab that sees neither this
checkout nor its environment, and has an empty home.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipecomp.netlab import Lab, missing
from tests.limits import HANG_S
from tests.models import metrics, save_model, write_text
from tests.recipes.recipe_runs import ROOT

SYSTEM = "/usr/bin/python3"


def other_python() -> str | None:
    """Return why the system's Python cannot take the packages of this one."""
    if not Path(SYSTEM).exists() or sys.prefix.startswith("/usr"):
        return f"{SYSTEM} is missing, or the one that runs this"
    words = [SYSTEM, "-c", "import sysconfig; print(sysconfig.get_config_var('SOABI'))"]
    found = subprocess.run(words, capture_output=True, text=True, check=False, timeout=HANG_S).stdout.strip()
    own = sysconfig.get_config_var("SOABI")
    return None if found == own else f"{SYSTEM} is {found}, and this is {own}"


WHY_NOT = missing() or next(
    (
        f"{tool} is not installed"
        for tool in ("/usr/sbin/sshd", "ssh", "ssh-keygen", "unshare")
        if not shutil.which(tool)
    ),
    None,
)
WHY_NOT = WHY_NOT or other_python()
pytestmark = [
    pytest.mark.soak,
    pytest.mark.ranks,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no bare machine here: {WHY_NOT}"),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Keys, a server's configuration, and node 0's home, where the bare machine hides nothing."""
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
    wrapper.write_text(
        f"#!/bin/sh\nexec {shutil.which('ssh')} -i {path / 'user'} -o StrictHostKeyChecking=no "
        '-o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "$@"\n'
    )
    wrapper.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_from_python_alone_to_training(folder, tmp_path):
    save_model(tmp_path / "model", write_text(tmp_path / "text.txt"))
    given = ["train", "--model", "model", "--data", "text.txt", "--peers", "198.18.0.1,198.18.0.2", "--batch", "8"]
    given += ["--max-steps", "4", "--lr", "1e-2"]
    commands = [
        [*given, "--out", "none"],
        [*given, "--out", "first", "--yes"],
        [*given, "--out", "second"],
        ["peers", "list"],
        ["peers", "remove", "198.18.0.2", "--yes", "--results"],
    ]
    (folder / "commands.json").write_text(json.dumps(commands))
    hidden = [str(tmp_path), str(ROOT), sys.prefix, sys.base_prefix]
    node = [sys.executable, str(Path(__file__).with_name("bare_node.py")), str(folder), str(tmp_path), *hidden]
    said: list[str] = []
    variables = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with Lab(nodes=2) as lab:
        done = lab.run(
            node, timeout_s=HANG_S, environment=variables, on_line=lambda label, stream, line: said.append(line)
        )
        counted = lab.bytes()
    assert done.status == 0, "\n".join(said)
    results = [json.loads((folder / f"result-{number}.json").read_text()) for number in range(len(commands))]
    for number, result in enumerate(results):
        print(f"{result['seconds']:.1f} s: {' '.join(commands[number])}\n{result['text']}")
    print(counted)
    asked, first, second, listed, removed = results
    assert asked["status"] == 1
    assert "--yes: got False, allowed: given, where no terminal can ask" in asked["text"]
    assert asked["home"] == [], "nothing is made without consent"
    assert first["status"] == 0, first["text"]
    assert re.search(r"198\.18\.0\.2: Python 3\.\d+ with \d+ packages copied from here", first["text"])
    assert [line["step"] for line in metrics(tmp_path / "first") if "loss" in line] == [1, 2, 3, 4]
    assert first["home"] == [".pipecomp"], "all of it is below one folder"
    assert second["status"] == 0, second["text"]
    assert "packages" not in second["text"]
    assert " sent" not in second["text"]
    assert [line["step"] for line in metrics(tmp_path / "second") if "loss" in line] == [1, 2, 3, 4]
    assert "198.18.0.2" in listed["text"]
    assert "GB" in listed["text"]
    assert removed["status"] == 0, removed["text"]
    assert removed["home"] == []
