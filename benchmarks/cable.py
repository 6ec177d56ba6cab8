"""A long cable for the network lab, where the kernel has no netem: frames wait in a process of their own.

A cable is a pair of TAP interfaces between the lab's bridge and the port of a node. The process reads a frame from one
and writes it to the other one after the delay. TCP hands over segments of up to 64 KiB, whose headers say how the
kernel would cut them, so that 1 Gbit/s is some 2,000 frames a second.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from pipecomp.netlab.lab import Lab
from pipecomp.netlab.namespaces import run_command

_SET_INTERFACE, _SET_OFFLOAD = 0x400454CA, 0x400454D0  # of /dev/net/tun: TUNSETIFF, TUNSETOFFLOAD
_TAP, _NO_INFORMATION, _SEGMENT_HEADER = 0x0002, 0x1000, 0x4000
_OFFLOAD = 1 | 2 | 4  # checksums, and segments over IPv4 and IPv6
_FRAME_BYTES = 1 << 17
ENDS = ("near", "far")


@contextlib.contextmanager
def long_cable(lab: Lab, node: int, delay_s: float) -> Iterator[None]:
    """Delay everything between a node of an open lab in the kernel and the others, in both directions."""
    hub = lab.network._hub  # type: ignore[attr-defined]
    command = ["ip", "netns", "exec", hub, sys.executable, __file__, str(delay_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise OSError("the cable's interfaces could not be made: it needs root and /dev/net/tun")
            for text in (
                "add beyond type bridge mcast_snooping 0",
                "set beyond up",
                f"set {ENDS[0]} master bridge",
                f"set {ENDS[1]} master beyond",
                f"set port{node} nomaster",
                f"set port{node} master beyond",
                *(f"set {end} up txqueuelen 10000" for end in ENDS),
            ):
                run_command(f"ip -n {hub} link {text}")
            yield
        finally:
            process.terminate()


def limit_windows(lab: Lab, settings: dict[str, str]) -> None:
    """Set sysctls of TCP in all nodes of an open lab in the kernel."""
    for name in lab.network._nodes:  # type: ignore[attr-defined]
        for key, value in settings.items():
            done = ["ip", "netns", "exec", name, "sysctl", "-qw", f"{key}={value}"]
            subprocess.run(done, check=True)


def _open(name: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _TAP | _NO_INFORMATION | _SEGMENT_HEADER))
    fcntl.ioctl(tap, _SET_OFFLOAD, _OFFLOAD)
    return tap


def _carry(source: int, target: int, delay_s: float) -> None:
    """Read frames for ever; another thread writes each after the delay."""
    waiting: collections.deque[tuple[float, bytes]] = collections.deque()
    ready = threading.Semaphore(0)

    def write() -> None:
        while True:
            ready.acquire()
            at, frame = waiting.popleft()
            time.sleep(max(0.0, at - time.monotonic()))
            with contextlib.suppress(OSError):  # an interface that is not up yet
                os.write(target, frame)

    threading.Thread(target=write, daemon=True).start()
    while True:
        frame = os.read(source, _FRAME_BYTES)
        waiting.append((time.monotonic() + delay_s, frame))
        ready.release()


if __name__ == "__main__":
    both = [_open(end) for end in ENDS]
    print("open", flush=True)
    threading.Thread(target=_carry, args=(*both, float(sys.argv[1])), daemon=True).start()
    _carry(*both[::-1], float(sys.argv[1]))
