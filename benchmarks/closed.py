"""Cost of TLS: training steps, gloo's all-reduce and a link's rate both ways, beside gloo and WireGuard.

    python -m benchmarks closed [--pairs 30] [--only NAME ...] [--out FOLDER] [--redraw]

The processes of all sides live on the same two nodes of a network lab; one side makes a step, then the next, and what
counts is the ratio of those of one turn. Needs root, and wireguard-go for that side.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import page
from benchmarks.page import Row, prose
from benchmarks.paired import BY_NAME, MODEL, STAGES, compute_seconds
from benchmarks.runner import Runs, arguments, chosen, digest
from benchmarks.steps import EIGHT
from pipecomp.bench.training import rate_for, start_engine
from pipecomp.tls.key_folder import create_keys

GLOO, TLS, WIREGUARD = "gloo", "tls", "gloo through WireGuard"
VALUES = 8_000_000
LINK_BYTES = 1 << 20
LINK_PACKETS = 12
WARM_UP = {"step": 4, "all-reduce": 2, "both ways": 1}
# All sides hold as many micro-batches: what each would settle for by itself depends on its first steps.
LINE = replace(BY_NAME[EIGHT], section={**BY_NAME[EIGHT].section, "in_flight": 4})
SLOW = "r = 5.8"


class Case(NamedTuple):
    """One turn and its rate. aim: tls over gloo, or with "both ways" the share of the nominal rate."""

    what: str
    rate: str | None
    aim: float

    @property
    def name(self) -> str:
        """For --only."""
        return f"{self.what}, {self.rate or 'no limit'}"


CASES = (
    Case("step", SLOW, 1.02),
    Case("step", "100mbit", 1.02),
    Case("step", "1gbit", 1.05),
    Case("step", None, 1.03),
    Case("all-reduce", "100mbit", 1.1),
    Case("both ways", "100mbit", 0.9),
    Case("both ways", "1gbit", 0.9),
)
BY_CASE = {case.name: case for case in CASES}


def run(name: str, compute_s: float, pairs: int) -> Row:
    """One case: seconds of each side's turns. compute_s: of a micro-batch on a stage, which r counts in."""
    from pipecomp.netlab import Lab, kernel

    case = BY_CASE[name]
    rate = f"{rate_for(MODEL, 5.8, compute_s)}bit" if case.rate == SLOW else case.rate
    sides = [GLOO, TLS] if case.what != "both ways" else [TLS]
    through = case.what != "both ways" and kernel.missing_wireguard() is None
    with Lab(nodes=STAGES, bandwidth=rate, wireguard=through) as lab, tempfile.TemporaryDirectory() as folder:
        create_keys(f"{folder}/keys", ranks=f"0-{STAGES - 1}")
        every = [*sides, *([WIREGUARD] if through else [])]
        plain = "198.18.0.1"  # node 0 outside of WireGuard
        ranks = lab.run(one_rank, case.what, every, pairs, folder, plain, procs_per_node=len(every), timeout_s=3600)
    seconds = {
        side: [max(turn) for turn in zip(*(ranks[node * len(every) + i] for node in range(STAGES)), strict=True)]
        for i, side in enumerate(every)
    }
    return {"name": name, "seconds": seconds, "compute_s": compute_s, "rate": rate}


def one_rank(
    rank: int, world: int, note: Any, what: str, sides: list[str], pairs: int, folder: str, plain: str
) -> list[float]:
    """Seconds of the turns of this process's side. plain: node 0's address outside of WireGuard."""
    import torch
    import torch.distributed as dist

    from pipecomp.netlab.software import VARIABLE

    torch.set_num_threads(1)
    node, index = divmod(rank, len(sides))
    side = sides[index]
    os.environ.pop(VARIABLE, None)
    own = {"RANK": node, "LOCAL_RANK": 0, "WORLD_SIZE": STAGES, "LOCAL_WORLD_SIZE": 1}
    own["MASTER_PORT"] = int(os.environ["MASTER_PORT"]) + index
    os.environ.update({key: str(value) for key, value in own.items()})
    if side != WIREGUARD:
        os.environ.update(MASTER_ADDR=plain, GLOO_SOCKET_IFNAME="eth0")
    if side == TLS:
        os.environ["PIPECOMP_KEYS"] = f"{folder}/keys"
    turn = _turns(what, node, f"{folder}/{index}")
    seconds = []
    for number in range(WARM_UP[what] + pairs):
        place = number * len(sides) + _position(number, index, len(sides))
        _wait_for(folder, place)
        dist.barrier()
        began = time.perf_counter()
        turn()
        dist.barrier()
        if number >= WARM_UP[what]:
            seconds.append(time.perf_counter() - began)
        if node == 0:
            Path(folder, f"turn-{place + 1}").touch()
    return seconds


def _position(number: int, index: int, sides: int) -> int:
    """Return a side's place in a turn: each is first equally often, and none follows itself with its data in caches."""
    return index if sides == 2 else (index - number) % sides


def _wait_for(folder: str, place: int) -> None:
    while place and not Path(folder, f"turn-{place}").exists():
        time.sleep(0.01)


def _turns(what: str, node: int, folder: str) -> Callable[[], Any]:
    """Join the other rank, and make what a turn calls."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from pipecomp.distributed.rendezvous import join_processes
    from pipecomp.stages.link.tls import TlsTransport
    from pipecomp.tls.process_group import current_mesh

    if what == "step":
        return start_engine(LINE, MODEL, STAGES, folder).train_batch
    join_processes()
    if what == "all-reduce":
        values = torch.randn(VALUES)
        return lambda: dist.all_reduce(values)
    mesh = current_mesh()
    assert mesh is not None, "the side is TLS"
    transport = TlsTransport(mesh, 1 - node, timeout_s=600.0)
    packet = np.zeros(LINK_BYTES, dtype=np.uint8)

    def both_ways() -> None:
        for _ in range(LINK_PACKETS):
            transport.send(packet)
        for _ in range(LINK_PACKETS):
            transport.recv()

    return both_ways


def _ratios(row: Row, side: str) -> list[float]:
    return [one / other for one, other in zip(row["seconds"][side], row["seconds"][GLOO], strict=True)]


def _share(row: Row) -> float:
    """Return the share of the nominal rate, which counts all headers, that a link's packets have."""
    from pipecomp.utils.units import parse_rate

    return 8 * LINK_BYTES * LINK_PACKETS / statistics.median(row["seconds"][TLS]) / parse_rate("rate", row["rate"])


def results(rows: list[Row]) -> list[str]:
    """The page."""
    text = f"""
        # What TLS costs

        `python -m benchmarks closed`, two ranks on {page.machine(rows)}, one thread each, between two network
        namespaces. The processes of all sides take turns; the ratio is the median over turns, with the quarters below
        and above. A step is that of [throughput.md](throughput.md), {EIGHT}, with
        {LINE.section["in_flight"]} micro-batches in flight; a stage computes
        {1000 * rows[0]["compute_s"]:.0f} ms on a micro-batch, which r counts in. The all-reduce is
        torch.distributed's, of {VALUES:,} float32 values. "Both ways" is the rate of a link's packets, sent both ways
        at once, over the nominal one, which counts the headers of TLS, TCP, IP and Ethernet too.
    """
    by_name = {row["name"]: row for row in rows}
    lines = [(case, side) for case in CASES if case.name in by_name for side in by_name[case.name]["seconds"]]
    lines = [(case, side) for case, side in lines if side != GLOO]

    def quarter(line: tuple[Case, str], number: int) -> str:
        case, side = line
        if case.what == "both ways":
            return f"{_share(by_name[case.name]):.3f}" if number == 1 else ""
        return f"{statistics.quantiles(_ratios(by_name[case.name], side), n=4)[number]:.3f}"

    cells = {
        "what": lambda line: line[0].name,
        "side": lambda line: line[1],
        "over gloo, or of the nominal rate": lambda line: f"**{quarter(line, 1)}**",
        "a quarter below": lambda line: quarter(line, 0),
        "a quarter above": lambda line: quarter(line, 2),
        "aim": lambda line: f"{'≥' if line[0].what == 'both ways' else '≤'} {line[0].aim:g}" if line[1] == TLS else "",
        "s a turn": lambda line: f"{statistics.median(by_name[line[0].name]['seconds'][line[1]]):.3f}",
    }
    return [*prose(text), *page.columns(cells, lines)]


def _line(row: Row) -> str:
    if GLOO not in row["seconds"]:
        return f"{_share(row):.3f} of the nominal rate"
    sides = [side for side in row["seconds"] if side != GLOO]
    return "  ".join(f"{side} {statistics.median(_ratios(row, side)):.3f}" for side in sides)


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    given = arguments(argv, __doc__, "only", pairs=(30, "of turns"))
    setup = digest([asdict(MODEL), asdict(LINE), CASES, WARM_UP, VALUES, LINK_BYTES, LINK_PACKETS])
    runs = Runs(given, "closed", setup, ("name",))
    cases = [(name,) for name in chosen(BY_CASE, given.only)]
    compute_s = compute_seconds(runs, cases)
    runs.complete(run, cases, compute_s, given.pairs, line=_line, page=results)
