"""Checks between the ranks of a run: they rendezvous in a key-value store, measure in turn, and hand in findings.

The store comes first, and the rest depends on nothing else: if gloo cannot connect, or a rank is gone, the others can
still report it. With keys (PIPECOMP_KEYS) everything goes over TLS, as in training. Rank 0 assigns the turns and
remembers lost ranks, so that nothing waits for a lost rank twice.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pipecomp.distributed import rendezvous
from pipecomp.distributed.consistency import differences
from pipecomp.distributed.heartbeat import call_store
from pipecomp.distributed.launch_env import Launch
from pipecomp.distributed.placement import address_towards, gloo_address, loopback, machine, own_gpu
from pipecomp.distributed.rendezvous import find_store, first_line, join_mesh, wanted_keys
from pipecomp.doctor.finding import OK, PROBLEM, WARNING, Finding, has_problem, judge
from pipecomp.doctor.machine import check_shared_gpus
from pipecomp.doctor.measure import (
    GlooPeer,
    LinkMeasurement,
    PacketPath,
    check_path,
    follow,
    follow_path,
    lead,
    lead_path,
)
from pipecomp.errors import LinkTimeoutError, PipecompError
from pipecomp.stages.link.streams import MIN_ROUND_TRIP_S
from pipecomp.tls.mesh import Mesh
from pipecomp.tls.process_group import BACKEND, current_mesh
from pipecomp.utils.sockets import BLACK_HOLE
from pipecomp.utils.units import format_rate, format_time

_PREFIX = "pipecomp/doctor"
_GLOO_S = 6.0  # gloo waits five times as long for a connection
_SILENCE_S = 10.0  # timeout of a rank that is being measured
_PAIR_S = 30.0  # timeout of one measurement
_POLL_S = 1.0
_STORE_S = 10.0  # for one answer of the store
_PIECE = 200  # bytes of a value at a time
_MEASURE_S = 120.0  # no measurement starts after that
MTU_REMEDY = (
    "Set the MTU of the interfaces that lead to each other to what comes through whole, on both machines: ip link set "
    "dev NAME mtu 1280. The MTU line below has the size."
)
_NO_ANSWER = "it did not answer"


class RendezvousError(RuntimeError):
    """The ranks could not rendezvous; the message is that of the cause, of torch's errors the first line."""


class RankIdentity(NamedTuple):
    """A rank as the others see it.

    Attributes:
        rank: Its number.
        host: Its host name.
        machine: Equal for ranks that share their network.
        gpu: Unique name of its GPU, if any.
        versions: Versions of packages.
    """

    rank: int
    host: str
    machine: str
    gpu: str | None
    versions: Mapping[str, Any]


class RankSession:
    """This rank's part in a joint examination; every rank calls the methods in their order.

    An existing process group is used and kept.

    Args:
        launch: The launcher's ranks.
        versions: Versions of this rank's packages.
        limit_s: Timeout of the rendezvous.

    Raises:
        RendezvousError: The ranks could not rendezvous in time.
    """

    def __init__(self, launch: Launch, versions: Mapping[str, Any], *, limit_s: float) -> None:
        self.rank, self.world = launch.place
        self._lost: set[int] = set()
        try:
            self._mesh, store = self._join(limit_s)
            self._store = dist.PrefixStore(_PREFIX, store)
            gpu = own_gpu(launch.local_rank)
            gpu_name = None if gpu is None else gpu.name
            self._publish("identity", RankIdentity(self.rank, socket.gethostname(), machine(), gpu_name, versions))
            self.identities = [
                RankIdentity(*self._read(rank, f"identity/{rank}", limit_s)) for rank in range(self.world)
            ]
        except (RuntimeError, ValueError) as error:
            raise RendezvousError(str(error) if isinstance(error, PipecompError) else first_line(error)) from error

    def _join(self, limit_s: float) -> tuple[Mesh | None, Any]:
        self._joined = dist.is_initialized()
        if self._joined:
            mesh = current_mesh() if dist.get_backend() == BACKEND else None
            return mesh, distributed_c10d._get_default_store()
        keys = wanted_keys()
        if keys is not None:
            mesh = join_mesh(keys, self.rank, self.world, wait_s=limit_s)
            return mesh, mesh.store
        return None, find_store(self.rank, self.world, wait_s=limit_s)

    @property
    def rank_0_lost(self) -> bool:
        """True if rank 0, which collects and reports, is lost."""
        return 0 in self._lost

    @property
    def _transport(self) -> str:
        return "gloo" if self._mesh is None else "TLS"

    def route_findings(self) -> list[Finding]:
        """Describe the routes of this rank's TLS connections; nothing over gloo."""
        if self._mesh is None:
            return []
        routes = "; ".join(f"rank {rank} {route}" for rank, route in sorted(self._mesh.routes.items()))
        return [Finding("routes", OK, f"under TLS with this run's keys, to {routes}")]

    def measure(self) -> list[Finding]:
        """Connect all ranks and measure them pair by pair; findings on rank 0, nothing on the others."""
        error, limit = None, timedelta(seconds=_GLOO_S)
        try:
            if not self._joined:
                backend = "gloo" if self._mesh is None else BACKEND
                place: dict[str, Any] = {"rank": self.rank, "world_size": self.world}
                dist.init_process_group(backend, store=self._store, timeout=limit, **place)
        except (RuntimeError, ValueError) as caught:
            error = first_line(caught)
        self._publish("joined", error)
        if self.rank == 0:
            return self._coordinate()
        for number, pair in enumerate(self._ask(0, "pairs/0", 12 * _GLOO_S, ())):
            if self.rank in pair and self._ask(0, f"turn/{number}", _MEASURE_S + _PAIR_S, False):
                self._measure_pair(number, pair)
        if not self.rank_0_lost:
            self._publish("measured", True)
        return []

    def _coordinate(self) -> list[Finding]:
        """On rank 0, give each pair its turn, so that no two share a cable."""
        joined = {rank: self._ask(rank, f"joined/{rank}", 6 * _GLOO_S, _NO_ANSWER) for rank in range(self.world)}
        errors = {rank: error for rank, error in joined.items() if error is not None}
        findings = [check_joined(errors, self.identities, self._transport), check_same_versions(self.identities)]
        findings += check_shared_gpus((i.rank, i.gpu) for i in self.identities if i.gpu is not None)
        chosen = [] if errors else choose_pairs([i.machine for i in self.identities])
        self._publish("pairs", chosen)
        until = time.monotonic() + _MEASURE_S
        for number, pair in enumerate(chosen):
            result: Any = None
            in_time = time.monotonic() < until
            self._put(f"turn/{number}", in_time)
            if in_time:
                if self.rank in pair:
                    self._measure_pair(number, pair)
                result = self._ask(pair[0], f"pair/{number}", _PAIR_S, f"rank {pair[0]}: {_NO_ANSWER}")
            findings += self._check_turn(pair, result)
        for rank in range(1, self.world):
            self._ask(rank, f"measured/{rank}", _SILENCE_S, None)
        return findings

    def _check_turn(self, pair: Sequence[int], result: Any) -> list[Finding]:
        """Check the result of a turn: [of `lead` or its error, of `lead_path`], an error, or None."""
        a, b = self.identities[pair[0]], self.identities[pair[1]]
        link, path = result if isinstance(result, list) else (result, None)
        measured = LinkMeasurement(*link) if isinstance(link, list) else link
        findings = [check_pair(a, b, measured, self._transport)]
        if a.machine != b.machine and isinstance(result, list):
            findings += check_path((a.rank, b.rank), None if path is None else PacketPath(*path))
        return findings

    def _measure_pair(self, number: int, pair: Sequence[int]) -> None:
        """Lead as the lower rank and publish the result, or follow.

        The path comes first: if large packets vanish, no rate can be measured afterwards.
        """
        apart = len({self.identities[rank].machine for rank in pair}) > 1
        if self.rank == pair[0]:
            peer, path = GlooPeer(pair[1], _SILENCE_S), None
            try:
                path = lead_path(peer, self._own_address()) if apart else None
                measured: object = lead(peer)
            except RuntimeError as error:
                measured = first_line(error)
            self._put(f"pair/{number}", [measured, path])
        else:
            with contextlib.suppress(RuntimeError):  # the leading rank reports it
                peer = GlooPeer(pair[0], _SILENCE_S)
                if apart:
                    follow_path(peer, self._own_address())
                follow(peer)

    def _own_address(self) -> str:
        """Return this machine's address towards the others: gloo's, or the one that leads to rank 0."""
        if self._mesh is None:
            return gloo_address()
        return address_towards(rendezvous.meeting(self.rank, self.world).address.host) or "127.0.0.1"

    def collect(self, own: Sequence[Finding], wait_s: float) -> list[Finding]:
        """Hand in the findings on each rank's machine; all of them on rank 0, nothing on the others.

        Other machines' findings that are ok are only counted. wait_s: timeout per rank.
        """
        if self.rank != 0:
            self._publish("found", own)
            return []
        collected = list(own)
        for identity in self.identities[1:]:
            where = f"rank {identity.rank} on {identity.host}"
            findings = [Finding(*values) for values in self._ask(identity.rank, f"found/{identity.rank}", wait_s, [])]
            collected += [f._replace(found=f"{where}: {f.found}") for f in findings if f.verdict != OK]
            if identity.rank in self._lost:
                advice = "Look at the output of that rank, and whether its machine is still up."
                collected.append(Finding(where, PROBLEM, "it no longer answers", advice))
            elif findings:
                count = sum(f.verdict == OK for f in findings)
                collected.append(Finding(where, OK, f"{count} of {len(findings)} checks of its machine are ok"))
        return collected

    def finish(self, findings: Sequence[Finding], wait_s: float) -> bool:
        """End together after rank 0's report. Returns True on every rank if any finding is a problem."""
        problem = has_problem(findings)
        if self.rank == 0:
            self._publish("problem", problem)
            for rank in range(1, self.world):
                self._ask(rank, f"left/{rank}", _SILENCE_S, None)  # this process may serve the store: it ends last
        else:
            problem = self._ask(0, "problem/0", wait_s, True)
            self._publish("left", True)
        if self._joined:
            return problem
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._mesh is not None:
            self._mesh.close()
        return problem

    # -- the key-value store

    # Note: values travel in pieces, each after an answer of the store. On a path that large packets do not pass, the
    # store would otherwise carry no finding, and torch waits for its answer without a limit.

    def _publish(self, key: str, value: object) -> None:
        self._put(f"{key}/{self.rank}", value)

    def _put(self, key: str, value: object) -> None:
        text = json.dumps(value)
        pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
        try:
            for number, piece in enumerate(pieces):
                call_store(partial(self._store.set, f"{key} {number}", piece), _STORE_S)
                call_store(partial(self._store.check, [key]), _STORE_S)
            call_store(partial(self._store.set, key, str(len(pieces))), _STORE_S)
        except RuntimeError:
            self._lost.add(0)  # its process serves the store

    def _get(self, key: str) -> Any:
        count = int(call_store(partial(self._store.get, key), _STORE_S))
        pieces = [call_store(partial(self._store.get, f"{key} {number}"), _STORE_S) for number in range(count)]
        return json.loads(b"".join(pieces))

    def _read(self, rank: int, key: str, wait_s: float) -> Any:
        """Wait for a rank's value. RuntimeError on a timeout.

        Over TLS, rank 0, which serves the store, also watches the connection to the other rank.
        """
        link = None if self._mesh is None or self.rank else self._mesh.connections.get(rank)
        until = time.monotonic() + wait_s
        while True:
            try:
                limit_s = wait_s if link is None else min(wait_s, _POLL_S)
                call_store(partial(self._store.wait, [key], timedelta(seconds=limit_s)), limit_s + _STORE_S)
                return self._get(key)
            except RuntimeError:
                if link is None or link.failure is not None or time.monotonic() > until:
                    raise

    def _ask(self, rank: int, key: str, wait_s: float, default: Any) -> Any:
        """Wait for a rank's value; the default on a timeout, and from then on at once."""
        try:
            return self._read(rank, key, 0.1 if rank in self._lost else wait_s)
        except RuntimeError:
            self._lost.add(rank)
            return default


# -- which ranks measure, and checks of the results

_MAX_PAIRS = 28  # four seconds each
_ALL_PAIRS_RANKS = 4
_ONE_STREAM = ", over one TCP connection: training measures whether more fill the line (transport.streams)"
_SLOW_BIT_S, _SLOW_TRIP_S, _LOPSIDED = 1e6, 0.5, 5.0


def choose_pairs(machines: Sequence[str]) -> list[tuple[int, int]]:
    """Choose the pairs of ranks that are measured, lower rank first. machines: that of each rank.

    Up to four ranks: all pairs. More: the first two ranks of each machine, and the first ranks of every two machines,
    or only of neighbouring ones if all would take too long.
    """
    if len(machines) <= _ALL_PAIRS_RANKS:
        return list(itertools.combinations(range(len(machines)), 2))
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(machines):
        ranks.setdefault(name, []).append(rank)
    inside = [(members[0], members[1]) for members in ranks.values() if len(members) > 1]
    firsts = [members[0] for members in ranks.values()]
    between = list(itertools.combinations(firsts, 2))
    if len(inside) + len(between) > _MAX_PAIRS:
        between = list(itertools.pairwise(firsts))
    return sorted(inside + between)[:_MAX_PAIRS]


def check_pair(
    first: RankIdentity, second: RankIdentity, measured: LinkMeasurement | str | None, transport: str = "gloo"
) -> Finding:
    """Check the connection of two ranks.

    Args:
        first: The lower rank.
        second: The other rank.
        measured: The measurement; an error if it failed, None if there was no time for it.
        transport: "gloo" or "TLS".
    """
    check = f"ranks {first.rank} and {second.rank}"
    where = f"{first.host} and {second.host}" if first.machine != second.machine else f"both on {first.host}"
    if measured is None:
        fact = f"{where}: not measured, as earlier pairs took too long"
        return Finding(check, WARNING, fact, "Look at the slow ranks, then measure again with fewer ranks.")
    if isinstance(measured, str):
        if measured.startswith(BLACK_HOLE):
            return Finding(check, PROBLEM, f"{where}: {measured}", MTU_REMEDY)
        advice = _firewall_advice(first, second, transport)
        return Finding(check, PROBLEM, f"{where}: no data came through: {measured}", advice)
    out, back = measured.out_bit_s, measured.back_bit_s
    least, most = sorted((out, back))
    slow, fast = (first, second) if out < back else (second, first)
    few_bits = "Use few bits and large micro-batches, or a faster connection."
    lopsided = f"Look at the upload of {slow.host} and the download of {fast.host}; fewer bits in that direction help."
    latency = "a stage waits that long for each micro-batch that was not sent ahead"
    more = "Use more micro-batches (gradient_accumulation_steps) per step."
    return judge(
        check,
        f"{where}: {format_rate(out)} from {first.rank} to {second.rank}, {format_rate(back)} back, "
        f"{format_time(measured.round_trip_s)} there and back"
        + (_ONE_STREAM if measured.round_trip_s > MIN_ROUND_TRIP_S else ""),
        (least < _SLOW_BIT_S, WARNING, f"1 MB takes {8e6 / least:.0f} s", few_bits),
        (most > _LOPSIDED * least, WARNING, "one direction is much slower", lopsided),
        (measured.round_trip_s > _SLOW_TRIP_S, WARNING, latency, more),
    )


def check_same_versions(identities: Sequence[RankIdentity]) -> Finding:
    """Check whether all ranks run the same versions, since versions may differ in packets and checkpoints."""
    if differ := differences([identity.versions for identity in identities]):
        fact = f"{'. '.join(differ)}. Their checkpoints and packets may be incompatible"
        return Finding("same versions", WARNING, fact, "Install the same versions on all machines.")
    return Finding("same versions", OK, f"the same on all {len(identities)} ranks")


def check_joined(errors: Mapping[int, str], identities: Sequence[RankIdentity], transport: str = "gloo") -> Finding:
    """Check whether the ranks could connect to each other. errors: of each rank that could not."""
    check = f"{transport} connections"
    if not errors:
        return Finding(check, OK, f"all {len(identities)} ranks are connected")
    who = ("rank " if len(errors) == 1 else "ranks ") + ", ".join(map(str, sorted(errors)))
    error = max(errors.values(), key=lambda text: "remote=" in text)  # the connecting side names the address
    fact = f"ranks share a store, but {who} cannot connect to the others: {error}"
    return Finding(check, PROBLEM, fact, _firewall_advice(identities[0], identities[1], transport))


def _firewall_advice(first: RankIdentity, second: RankIdentity, transport: str) -> str:
    if transport == "TLS":
        return "Every rank must reach rank 0 by TCP at PIPECOMP_ADDRESS, or MASTER_ADDR and MASTER_PORT; no other port."
    if first.machine == second.machine:
        return f"See the line gloo interface; GLOO_SOCKET_IFNAME={loopback()} is enough for ranks on one machine."
    return (
        "GLOO_SOCKET_IFNAME must name, on each machine, the interface that leads to the others (see the line gloo "
        "interface), and all TCP ports must be open between the machines: gloo uses random ones."
    )


def check_rank_0(launch: Launch) -> Finding:
    """Make the finding for a rank 0 that was lost after the rendezvous."""
    fact = f"rank 0 at {launch.master} no longer answers, so this is only about rank {launch.rank}'s machine"
    return Finding("rendezvous", PROBLEM, fact, "Look at the output of rank 0, and whether its machine is still up.")


def check_rendezvous(launch: Launch, error: Exception, limit_s: float) -> Finding:
    """Make the finding for ranks that did not rendezvous. error: from `RankSession`."""
    if isinstance(error.__cause__, PipecompError) and not isinstance(error.__cause__, LinkTimeoutError):
        fact = f"rank {launch.rank} cannot join the others: {error}"
        return Finding("rendezvous", PROBLEM, fact, "Fix that first, then start all ranks again.")
    fact = f"the {launch.world} ranks did not join in {limit_s:.0f} s: {error}"
    return Finding("rendezvous", PROBLEM, fact, f"Start all ranks within {limit_s:.0f} s of each other.")
