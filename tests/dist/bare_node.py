"""Each node of `test_bare_machine.py`: node 1 is a machine with Python alone that serves ssh, node 0 gives commands.

    python bare_node.py FOLDER WORK HIDDEN…

FOLDER has keys, sshd's configuration and a wrapper of ssh; WORK is the working directory of node 0. Node 1 sees empty
folders in place of HIDDEN and of its home.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path


def serve(folder: Path, hidden: list[str], address: str) -> int:
    home = os.path.expanduser("~")
    mounts = [f"mount -t tmpfs none {home}"]
    others = [path for path in hidden if not f"{path}/".startswith(f"{home}/")]
    mounts += [f"mount -t tmpfs none {path}" for path in others]
    server = ["/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd_config"), "-o", f"ListenAddress={address}"]
    clean = ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
    line = " && ".join([*mounts, f"exec {shlex.join([*clean, *server])}"])
    process = subprocess.Popen(["unshare", "-m", "sh", "-c", line], stderr=(folder / "sshd.log").open("w"))
    try:
        while not (folder / "done").exists():
            time.sleep(0.1)
        return 0
    finally:
        process.terminate()
        process.wait()


def command(folder: Path, work: Path) -> int:
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("RANK", "WORLD", "LOCAL_"))}
    variables |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder / "own"), "PWD": str(work)}
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        variables.pop(name, None)
    for number, words in enumerate(json.loads((folder / "commands.json").read_text())):
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pipecomp.cli", *words], cwd=work, env=variables, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        seconds = time.monotonic() - began
        listed = subprocess.check_output([folder / "bin" / "ssh", "198.18.0.2", "ls -A"], text=True)
        result = {"status": done.returncode, "text": done.stdout, "seconds": seconds, "home": listed.split()}
        (folder / f"result-{number}.json").write_text(json.dumps(result))
    return 0


def main() -> int:
    folder, work, hidden = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    shown = subprocess.check_output(["ip", "-4", "-o", "addr", "show", "dev", "eth0"], text=True)
    if os.environ["NODE_RANK"] != "0":
        return serve(folder, hidden, shown.split()[3].split("/")[0])
    try:
        return command(folder, work)
    finally:
        (folder / "done").touch()


if __name__ == "__main__":
    raise SystemExit(main())
