"""The command `pipecomp netlab`: a lab, a command on its nodes, and a report; signals end both."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.table import Table

from pipecomp.netlab.lab import Finished, Lab
from pipecomp.netlab.shape import LabShape
from pipecomp.utils.processes import handle_signals
from pipecomp.utils.tables import COMPACT, table
from pipecomp.utils.units import format_nominal_rate

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal(BaseException):
    """A signal to end this process. Not an Exception, so that no handler on the way out takes it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def _ignore_signals() -> None:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Raise StopSignal at the first SIGINT, SIGTERM or SIGHUP, and ignore later ones during the cleanup."""

    def stop(number: int, frame: object) -> None:
        _ignore_signals()
        raise StopSignal(number)

    with handle_signals(stop, *_SIGNALS):
        yield


def run_in_lab(
    lab: Lab, command: Sequence[str], *, procs_per_node: int, launcher: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run a command on all nodes.

    Args:
        lab: A lab that has not been entered.
        command: Program and arguments.
        procs_per_node: Processes on each node.
        launcher: "none" or "deepspeed".
        say: Prints a line.

    Returns:
        The report, of JSON values. Its `status` is 0, that of the node that failed first, or 128 + n if signal n ended
        this process.

    Raises:
        NetlabError: The lab cannot be provided here.
        ConfigError: The command or an option is invalid.
    """
    with stop_on_signals():
        try:
            with lab:
                try:
                    return _run(lab, command, procs_per_node, launcher, say)
                finally:
                    _ignore_signals()  # during the cleanup
        except StopSignal as stopped:  # before anything ran
            say(f"Stopped by {stopped}.")
            return _report(lab.shape, Finished(status=128 + stopped.number, failed=None, statuses={}, seconds=0.0))


def _run(
    lab: Lab, command: Sequence[str], procs_per_node: int, launcher: str, say: Callable[[str], None]
) -> dict[str, Any]:
    say(describe(lab.shape, lab.network.form))
    for note in lab.notes:
        say(note)
    began = time.monotonic()
    try:
        finished = lab.run(command, procs_per_node=procs_per_node, launcher=launcher)
    except StopSignal as stopped:
        say(f"Stopped by {stopped}.")
        seconds = time.monotonic() - began
        finished = Finished(status=128 + stopped.number, failed=None, statuses={}, seconds=seconds)
    if finished.failed:
        say(f"{finished.failed} failed with exit status {finished.status}.")
    report = _report(lab.shape, finished)
    report |= {"form": lab.network.form, "delay_by": lab.network.delay_by, "command": list(command)}
    for node, sent, received in lab.bytes():
        report["nodes"][node] |= {"address": lab.network.address(node), "bytes_sent": sent, "bytes_received": received}
    return report


def _report(shape: LabShape, finished: Finished) -> dict[str, Any]:
    nodes: list[dict[str, Any]] = [
        {"node": node, "up_bits_per_s": shape.up[node], "down_bits_per_s": shape.down[node]}
        for node in range(shape.nodes)
    ]
    return {
        **asdict(finished),
        "delay_s": shape.delay_s,
        "jitter_s": shape.jitter_s,
        "cuts": [asdict(cut) for cut in shape.cuts],
        "loss": shape.loss,
        "nat": shape.nat,
        "wireguard": shape.wireguard,
        "nodes": nodes,
    }


def describe(shape: LabShape, form: str) -> str:
    """Describe the links in one line."""
    pairs = set(zip(shape.up, shape.down, strict=True))
    if len(pairs) > 1:
        rates = "links of different rates"
    elif shape.up[0] == shape.down[0]:
        rates = f"{format_nominal_rate(shape.up[0])} each way"
    else:
        rates = f"{format_nominal_rate(shape.down[0])} down, {format_nominal_rate(shape.up[0])} up"
    delay = f", {1000 * shape.delay_s:g} ms one way" if shape.delay_s else ""
    jitter = f" (± {1000 * shape.jitter_s:g} ms)" if shape.jitter_s else ""
    loss = f", {100 * shape.loss:g} % lost" if shape.loss else ""
    nat = ", all but node 0 behind routers" if shape.nat else ""
    through = ", through WireGuard" if shape.wireguard else ""
    by = "shaped by the kernel" if form == "kernel" else "in software"
    return f"{shape.nodes} nodes, {rates}{delay}{jitter}{loss}{nat}{through}, {by}"


def bytes_table(report: dict[str, Any]) -> Table:
    """Make a table of the bytes and rates of each node."""
    title = "On the wire" if report["form"] == "kernel" else "Links between stages"
    rows = (
        (
            f"node{node['node']}",
            node["address"],
            format_nominal_rate(node["up_bits_per_s"]),
            format_nominal_rate(node["down_bits_per_s"]),
            f"{node['bytes_sent'] / 1e6:.3f} MB",
            f"{node['bytes_received'] / 1e6:.3f} MB",
        )
        for node in report["nodes"]
    )
    return table(
        ("node", "address", "up", "down", "sent", "received"),
        rows,
        left=("node", "address"),
        title=f"{title}, {report['seconds']:.1f} s",
        **COMPACT,
    )
