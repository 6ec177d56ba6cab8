"""Each node of `bare_machines.run_commands`: all but the first have Python alone and serve ssh; the first has commands.

    python bare_node.py FOLDER

FOLDER has keys, sshd's configuration, a wrapper of ssh, and settings.json. The bare machines see empty folders in place
of those that are hidden and of their home.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def serve(folder: Path, settings: Mapping[str, Any]) -> int:
    shown = subprocess.check_output(["ip", "-4", "-o", "addr", "show", "dev", "eth0"], text=True)
    address = shown.split()[3].split("/")[0]
    home = os.path.expanduser("~")
    others = [path for path in settings["hidden"] if not f"{path}/".startswith(f"{home}/")]
    mounts = [f"mount -t tmpfs none {path}" for path in [home, *others]]
    server = ["/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd_config"), "-o", f"ListenAddress={address}"]
    clean = ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
    line = " && ".join([*mounts, f"exec {shlex.join([*clean, *server])}"])
    log = (folder / f"sshd-{address}.log").open("w")
    processes = [subprocess.Popen(["unshare", "-m", "sh", "-c", line], stderr=log)]
    if settings["index"]:
        words = ["-m", "http.server", "--bind", "127.0.0.1", "--directory", settings["index"], "3141"]
        processes.append(subprocess.Popen([sys.executable, *words], stdout=log, stderr=log))
    try:
        while not (folder / "done").exists():
            time.sleep(0.1)
        return 0
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def command(folder: Path, settings: Mapping[str, Any], nodes: int) -> int:
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("RANK", "WORLD", "LOCAL_"))}
    variables |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder / "own")}
    variables["PWD"] = settings["work"]
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        variables.pop(name, None)
    for number, words in enumerate(settings["commands"]):
        (folder / "sent").unlink(missing_ok=True)
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pipecomp.cli", *words], cwd=settings["work"], env=variables,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        seconds = time.monotonic() - began
        time.sleep(1)  # the last connection's count is written as ssh ends
        counts = (folder / "sent").read_text().split() if (folder / "sent").exists() else []
        sent = sum(map(int, counts[::2]))
        homes = {}
        for address in (f"198.18.0.{node + 1}" for node in range(1, nodes)):
            homes[address] = subprocess.check_output([folder / "bin" / "ssh", address, "ls -A"], text=True).split()
        result = {"status": done.returncode, "text": done.stdout, "seconds": seconds, "sent": sent, "homes": homes}
        (folder / f"result-{number}.json").write_text(json.dumps(result))
    return 0


def main() -> int:
    folder = Path(sys.argv[1])
    settings = json.loads((folder / "settings.json").read_text())
    if os.environ["NODE_RANK"] != "0":
        return serve(folder, settings)
    try:
        return command(folder, settings, int(os.environ["WORLD_SIZE"]))
    finally:
        (folder / "done").touch()


if __name__ == "__main__":
    raise SystemExit(main())
