"""Time training steps over TLS with thousands of strangers at the port, beside those without.

    python -m benchmarks attacked [--pairs 30] [--only NAME ...] [--out FOLDER] [--redraw]

Two ranks train on two nodes of a network lab; a third node has strangers, who come to rank 0's port before every other
step and go after it: some say nothing, some send garbage. What counts is the ratio of two steps that follow each other.
Needs root, and as many open files as there are strangers.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import page
from benchmarks.page import Row, prose
from benchmarks.paired import BY_NAME, MODEL, STAGES
from benchmarks.runner import Runs, arguments, chosen, digest
from benchmarks.steps import EIGHT
from pipecomp.bench.training import start_engine
from pipecomp.tls.key_folder import create_keys

AIM = 1.05
WARM_UP = 3
SETTLE_S = 1.0  # for connections to come and to go
STRANGER = STAGES  # the node after those that train
_GARBAGE_BYTES = 300
_DONE = "done"


class Case(NamedTuple):
    """Numbers of strangers: those that send nothing, and those that send garbage."""

    idle: int
    garbage: int

    @property
    def name(self) -> str:
        """For --only."""
        return f"{self.idle:,} idle, {self.garbage:,} garbage"


CASES = (Case(1000, 0), Case(0, 1000), Case(1000, 1000))
BY_CASE = {case.name: case for case in CASES}


def run(name: str, pairs: int) -> Row:
    """One case: seconds of steps alone and under attack, and the strangers that were connected."""
    from pipecomp.netlab import Lab

    case = BY_CASE[name]
    with Lab(nodes=STAGES + 1) as lab, tempfile.TemporaryDirectory() as folder:
        create_keys(f"{folder}/keys", ranks=f"0-{STAGES - 1}")
        ranks = lab.run(one_node, case.idle, case.garbage, pairs, folder, timeout_s=3600)
    alone, attacked = (list(map(max, *(ranks[rank][i] for rank in range(STAGES)))) for i in (0, 1))
    return {"name": name, "alone": alone, "attacked": attacked, "strangers": ranks[STRANGER]}


def one_node(rank: int, world: int, note: Any, idle: int, garbage: int, pairs: int, folder: str) -> Any:
    """A rank's steps, alone and attacked; of the strangers' node how many were connected, at least."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == STRANGER:
        return _strangers(address, idle, garbage, WARM_UP + pairs, folder)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(WORLD_SIZE=str(STAGES), LOCAL_WORLD_SIZE="1", LOCAL_RANK="0", PIPECOMP_KEYS=f"{folder}/keys")
    engine = start_engine(BY_NAME[EIGHT], MODEL, STAGES, f"{folder}/messages")
    seconds: tuple[list[float], list[float]] = ([], [])
    for pair in range(WARM_UP + pairs):
        for attacked in (pair % 2, 1 - pair % 2):
            if rank == 0:
                Path(folder, f"{pair}-{'come' if attacked else 'stay away'}").touch()
            _wait_for(folder, f"{pair}-{'came' if attacked else 'left'}")
            dist.barrier()
            began = time.perf_counter()
            engine.train_batch()
            dist.barrier()
            if pair >= WARM_UP:
                seconds[attacked].append(time.perf_counter() - began)
    if rank == 0:
        Path(folder, _DONE).touch()
    engine.close()
    return seconds


def _wait_for(folder: str, name: str) -> None:
    while not Path(folder, name).exists():
        time.sleep(0.01)


def _strangers(address: tuple[str, int], idle: int, garbage: int, pairs: int, folder: str) -> int:
    """Come and go as the ranks ask for it; returns how many had a connection, in the turn with the fewest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * (idle + garbage) + 200)), hard))
    fewest = idle + garbage
    for pair in range(pairs):
        for attacked in (pair % 2, 1 - pair % 2):
            _wait_for(folder, f"{pair}-{'come' if attacked else 'stay away'}")
            if not attacked:
                Path(folder, f"{pair}-left").touch()
                continue
            over = threading.Event()
            crowd = [_come(address) for _ in range(idle + garbage)]
            shouting = threading.Thread(target=_shout, args=(crowd[idle:], over))
            shouting.start()
            time.sleep(SETTLE_S)
            fewest = min(fewest, sum(map(_is_there, crowd)))
            Path(folder, f"{pair}-came").touch()
            following = f"{pair}-stay away" if pair % 2 else f"{pair + 1}-come"
            while not any(Path(folder, name).exists() for name in (following, f"{pair + 1}-stay away", _DONE)):
                time.sleep(0.01)
            over.set()
            shouting.join()
            for sock in crowd:
                sock.close()
            time.sleep(SETTLE_S)
    return fewest


def _come(address: tuple[str, int]) -> socket.socket:
    """Begin to connect, without waiting for it."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex(address)
    return sock


def _is_there(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def _shout(crowd: Sequence[socket.socket], over: threading.Event) -> None:
    """Send garbage on every connection, a second after a second."""
    draw = random.Random(0)
    while not over.is_set():
        for sock in crowd:
            with contextlib.suppress(OSError):
                sock.send(draw.randbytes(_GARBAGE_BYTES))
        over.wait(1.0)


def _ratio(row: Row) -> list[float]:
    return statistics.quantiles([one / other for one, other in zip(row["attacked"], row["alone"], strict=True)], n=4)


def results(rows: list[Row]) -> list[str]:
    """The page."""
    text = f"""
        # Steps under attack

        `python -m benchmarks attacked`, two ranks over TLS on {page.machine(rows)}, one thread each, and strangers on
        a third network namespace, who connect to rank 0's port. Steps alone and under attack take turns; the ratio is
        the median over pairs of steps that follow each other, with the quarters below and above. The strangers' own
        work takes a share of the same processor.
    """
    by_name = {row["name"]: row for row in rows}
    lines = [by_name[case.name] for case in CASES if case.name in by_name]
    cells = {
        "strangers": lambda row: row["name"],
        "connected at once": lambda row: f"{row['strangers']:,}",
        "under attack over alone": lambda row: f"**{_ratio(row)[1]:.3f}**",
        "a quarter below": lambda row: f"{_ratio(row)[0]:.3f}",
        "a quarter above": lambda row: f"{_ratio(row)[2]:.3f}",
        "aim": lambda row: f"≤ {AIM:g}",
        "s a step alone": lambda row: f"{statistics.median(row['alone']):.3f}",
    }
    return [*prose(text), *page.columns(cells, lines)]


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    given = arguments(argv, __doc__, "only", pairs=(30, "of steps"))
    setup = digest([asdict(MODEL), asdict(BY_NAME[EIGHT]), CASES, WARM_UP, _GARBAGE_BYTES])
    runs = Runs(given, "attacked", setup, ("name",))
    cases = [(name,) for name in chosen(BY_CASE, given.only)]
    runs.complete(run, cases, given.pairs, line=lambda row: f"{_ratio(row)[1]:.3f}", page=results)
