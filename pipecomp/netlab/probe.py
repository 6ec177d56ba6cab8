"""What this machine's kernel can do for a lab, tried on a namespace of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipecomp.netlab.names import new_name
from pipecomp.netlab.namespaces import command
from pipecomp.netlab.network import NetlabError

WITHOUT = "--software (software=True in Python) needs none of this, but slows down only pipecomp's own links"
_ADD, _DELETE = "ip netns add {0}", "ip netns delete {0}"
_KINDS = {
    "veth pairs": "ip link add probe0 netns {0} type veth peer name probe1 netns {0}",
    "bridges (module bridge)": "ip -n {0} link add probe2 type bridge",
    "the queue that limits rates, tbf (module sch_tbf)": (
        "tc -n {0} qdisc add dev probe0 root tbf rate 1mbit burst 4000 limit 100000"
    ),
}
_NETEM = "tc -n {0} qdisc add dev probe1 root netem delay 1ms"


def missing() -> str | None:
    """Say why the kernel cannot make a network here, None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if lacking := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"no {' and no '.join(lacking)} here: install iproute2"
    with _probe() as fails:
        if problem := fails(_ADD):
            return f"no network namespaces here: {problem}"
        for what, text in _KINDS.items():
            if problem := fails(text):
                return f"this kernel lacks {what}: {problem}"
    return None


def has_netem() -> bool:
    """Say whether the kernel can delay packets."""
    with _probe() as fails:
        return not any(map(fails, (_ADD, _KINDS["veth pairs"], _NETEM)))


@contextmanager
def _probe() -> Iterator[Callable[[str], str | None]]:
    """Yield what tries a command on a namespace ("{0}") and says why it failed; the namespace is deleted in the end."""
    name = f"{new_name()}-probe"

    def fails(text: str) -> str | None:
        try:
            command(text.format(name))
        except NetlabError as error:
            return str(error).partition(": ")[2]
        return None

    try:
        yield fails
    finally:
        fails(_DELETE)
