"""Runs over TLS on a network that is disturbed at a random instant, each compared with one that nobody disturbs.

    python -m tests.soak.disturbed_runs [--rounds 20] [--only outage address loss jitter] [--outage 60] [--timeout 120]
                                        [--out FOLDER]

A small GPT-2 is trained over two ranks and over four, in turn, on the nodes of a network lab (root, iproute2 and
nftables needed).

- outage: one rank, or all of them, lose all connections for --outage seconds
- address: a rank that is not the first gets another address
- loss: from then on 2 % of the packets are lost
- jitter: packets take 0 to 400 ms (200 ms, with 200 ms of jitter), from the start

No rank may end or start again, and every loss must be that of the undisturbed run, bit for bit. Runs are kept in
--out/disturbed_runs.jsonl, a line each: a stopped series goes on, and a kept run is not made again.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.runner import Kept, digest
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.netlab import Lab
from pipecomp.netlab.kernel import lose_packets
from pipecomp.netlab.namespaces import run_command
from tests.dist.closed_work import trains_closed
from tests.dist.lab_ranks import run_in_lab
from tests.tls.meshes import keys_for

ROUNDS, STEPS = 20, 30
WORLDS = (2, 4)
KINDS = ("outage", "address", "loss", "jitter")
LOSS, DELAY = "2%", "200ms"
HANG_S = 1800.0
NAME = "disturbed_runs"

Found = dict[str, Any]


def undisturbed(world: int, timeout_s: float) -> Found:
    """The losses of a run on this machine's own interface, over gloo."""
    ranks = run_ranks(world, trains_closed, None, STEPS, timeout_s, timeout_s=HANG_S)
    return {"kind": "undisturbed", "round": 0, "world": world, "losses": ranks[world - 1]["losses"]}


class AtAnInstant:
    """Calls `disturb` once, a drawn time after a drawn step of rank 0 has begun."""

    def __init__(self, draw: random.Random, disturb: Callable[[], None]) -> None:
        self._step, self._later_s, self._disturb = draw.randrange(1, STEPS - 2), draw.random() * 0.05, disturb
        self._thread: threading.Thread | None = None
        self.failed: BaseException | None = None

    def __call__(self, rank: int, step: int) -> None:
        if (rank, step) == (0, self._step):
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            time.sleep(self._later_s)
            self._disturb()
        except BaseException as error:
            self.failed = error

    def done(self) -> None:
        """Wait for it; raise what it has raised. RuntimeError if it never began."""
        if self._thread is None:
            raise RuntimeError("the run ended before it was disturbed")
        self._thread.join()
        if self.failed is not None:
            raise self.failed


def disturbance(kind: str, lab: Lab, draw: random.Random, outage_s: float) -> Callable[[], None]:
    """A disturbance of a lab."""
    nodes = range(lab.shape.nodes)
    spaces = [f"{lab.name}-n{node}" for node in nodes]

    def outage() -> None:
        cut = draw.choice([*([node] for node in nodes), list(nodes)])
        for node in cut:
            lab.cut(node)
        time.sleep(outage_s)
        for node in cut:
            lab.join(node)

    def address() -> None:
        node = draw.choice(nodes[1:])
        run_command(f"ip -n {spaces[node]} addr del {lab.network.address(node)}/16 dev eth0")
        run_command(f"ip -n {spaces[node]} addr add 198.18.1.{node + 1}/16 dev eth0")

    def loss() -> None:
        for space in spaces:
            lose_packets(space, "eth0", float(LOSS.rstrip("%")) / 100, run_command)

    return {"outage": outage, "address": address, "loss": loss, "jitter": lambda: None}[kind]


def disturbed(kind: str, number: int, world: int, keys: str, expected: list[float], given: argparse.Namespace) -> Found:
    """One run, compared with the undisturbed one."""
    draw = random.Random(f"{kind} {number}")
    began = time.monotonic()
    slow = {"delay": DELAY, "jitter": DELAY} if kind == "jitter" else {}
    with Lab(nodes=world, **slow) as lab:  # type: ignore[arg-type]
        at = AtAnInstant(draw, disturbance(kind, lab, draw, given.outage))
        try:
            ranks = run_in_lab(lab, trains_closed, keys, STEPS, given.timeout, timeout_s=HANG_S, on_note=at)
            at.done()
        except Exception as error:
            return {"kind": kind, "round": number, "world": world, "same": False, "said": str(error)[-2000:]}
    return {
        "kind": kind,
        "round": number,
        "world": world,
        "same": ranks[world - 1]["losses"] == expected,
        "healed": sum(rank["healed"] for rank in ranks.values()) // 2,  # both ends count
        "lost_s": round(max(rank["lost_s"] for rank in ranks.values()), 1),
        "seconds": round(time.monotonic() - began, 1),
    }


def summary(rows: list[Found]) -> list[str]:
    """A line for each kind, and one for all."""
    lines = []
    kept = [row for row in rows if row["kind"] != "undisturbed"]
    for kind in KINDS:
        if runs := [row for row in kept if row["kind"] == kind]:
            same, healed = sum(row["same"] for row in runs), sum(row.get("healed", 0) for row in runs)
            lost = [row["lost_s"] for row in runs if "lost_s" in row]
            middle = statistics.median(lost) if lost else 0.0
            lines.append(
                f"{kind}: {same} of {len(runs)} runs as the undisturbed one; {healed} connections made anew, lost for "
                f"{middle:g} s in the middle and {max(lost, default=0.0):g} s at most"
            )
    return [*lines, f"all: {sum(row['same'] for row in kept)} of {len(kept)}"]


def main(argv: Sequence[str] | None = None) -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of each kind ({ROUNDS})")
    parser.add_argument("--first", type=int, default=0, help="round, to share them out among processes (0)")
    parser.add_argument("--only", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--outage", type=float, default=60.0, help="seconds (60)")
    parser.add_argument("--timeout", type=float, default=120.0, help="transport.timeout_s (120)")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where runs are kept (runs)")
    given = parser.parse_args(argv)
    kept = Kept(given.out / f"{NAME}.jsonl", digest([STEPS, LOSS, DELAY, given.outage, given.timeout]))
    with tempfile.TemporaryDirectory() as keys:
        keys_for(Path(keys), max(WORLDS))
        for number in range(given.first, given.rounds):
            for kind in given.only:
                world = WORLDS[number % len(WORLDS)]
                if any((row["kind"], row["round"]) == (kind, number) for row in kept.rows):
                    continue
                plain = [row for row in kept.rows if (row["kind"], row["world"]) == ("undisturbed", world)]
                if not plain:
                    kept.add(undisturbed(world, given.timeout))
                    plain = kept.rows[-1:]
                kept.add(disturbed(kind, number, world, keys, plain[0]["losses"], given))
                print(kept.rows[-1], flush=True)
    print("\n".join(summary(kept.rows)))
    if not all(row.get("same", True) for row in kept.rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
