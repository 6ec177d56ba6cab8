"""Each node of `test_ssh.py` serves ssh until node 0, which also starts DeepSpeed's launcher, is done.

    python ssh_node.py FOLDER SCRIPT ARGUMENTS…

FOLDER has what `test_ssh.py` has put there: keys, sshd's configuration, a wrapper of ssh, the hostfile.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    folder, node = Path(sys.argv[1]), int(os.environ["NODE_RANK"])
    own = subprocess.check_output(["ip", "-4", "-o", "addr", "show", "dev", "eth0"], text=True).split()[3].split("/")[0]
    server = subprocess.Popen(
        ["/usr/sbin/sshd", "-D", "-e", "-f", folder / "sshd_config", "-o", f"ListenAddress={own}"],
        stderr=(folder / f"sshd-{node}.log").open("w"),
    )
    done = folder / "done"
    try:
        if node:
            while not done.exists():
                time.sleep(0.1)
            return 0
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"
        launcher = str(Path(sys.executable).with_name("deepspeed"))
        command = [launcher, "--hostfile", str(folder / "hosts"), "--master_addr", own, *sys.argv[2:]]
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode
    finally:
        done.touch()
        server.terminate()
        server.wait()


if __name__ == "__main__":
    raise SystemExit(main())
