"""What the ranks know of each other: who shares a machine, which pairs are measured, and what that says."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipecomp.distributed.consistency import differences
from pipecomp.distributed.network_interfaces import loopback
from pipecomp.doctor.finding import OK, PROBLEM, WARNING, Finding, judge
from pipecomp.doctor.measure import Measured
from pipecomp.utils.units import bits_per_second, milliseconds

_MOST_PAIRS = 28  # four seconds each
_ALL_PAIRS_RANKS = 4
_SKEW_S = 1.0
_SLOW_BIT_S, _SLOW_TRIP_S, _LOPSIDED = 1e6, 0.5, 5.0


class Identity(NamedTuple):
    """A rank, for the others. machine: the same for ranks that share their network. gpu: its unique name, if any."""

    rank: int
    host: str
    machine: str
    gpu: str | None
    versions: Mapping[str, Any]


def pairs(machines: Sequence[str]) -> list[tuple[int, int]]:
    """Choose the ranks that are measured with each other, lower one first; machines: that of each rank.

    All, of up to four ranks. Otherwise the first two ranks of each machine, and the first rank of each machine with
    that of each other one, or of the next one only where that would take too long.
    """
    if len(machines) <= _ALL_PAIRS_RANKS:
        return list(itertools.combinations(range(len(machines)), 2))
    ranks: dict[str, list[int]] = {}
    for rank, machine in enumerate(machines):
        ranks.setdefault(machine, []).append(rank)
    inside = [(members[0], members[1]) for members in ranks.values() if len(members) > 1]
    firsts = [members[0] for members in ranks.values()]
    between = list(itertools.combinations(firsts, 2))
    if len(inside) + len(between) > _MOST_PAIRS:
        between = list(itertools.pairwise(firsts))
    return sorted(inside + between)[:_MOST_PAIRS]


def check_pair(first: Identity, second: Identity, measured: Measured | str | None, over: str = "gloo") -> Finding:
    """Check the connection of two ranks. measured: None if there was no time for it, a sentence if it went wrong.

    over: what it goes over, "gloo" or "TLS".
    """
    check = f"ranks {first.rank} and {second.rank}"
    where = f"{first.host} and {second.host}" if first.machine != second.machine else f"both on {first.host}"
    if measured is None:
        found = f"{where}: not measured, as earlier pairs took too long"
        return Finding(check, WARNING, found, "Look at the slow ranks, then measure again with fewer ranks.")
    if isinstance(measured, str):
        found = f"{where}: no data came through: {measured}"
        return Finding(check, PROBLEM, found, _firewall(first, second, over))
    out, back = measured.out_bit_s, measured.back_bit_s
    least, most = sorted((out, back))
    slow, fast = (first, second) if out < back else (second, first)
    return judge(
        check,
        f"{where}: {bits_per_second(out)} from {first.rank} to {second.rank}, {bits_per_second(back)} back, "
        f"{milliseconds(measured.round_trip_s)} there and back",
        (
            least < _SLOW_BIT_S,
            WARNING,
            f"1 MB takes {8e6 / least:.0f} s",
            "Use few bits and large micro-batches, or look for a faster connection.",
        ),
        (
            most > _LOPSIDED * least,
            WARNING,
            "one direction is much slower",
            f"Look at what {slow.host} may send, or what {fast.host} receives; fewer bits for that direction help.",
        ),
        (
            measured.round_trip_s > _SLOW_TRIP_S,
            WARNING,
            "a stage waits that long for each micro-batch that it has not been sent ahead",
            "Use more micro-batches (gradient_accumulation_steps) for each step.",
        ),
    )


def check_clocks(first: Identity, second: Identity, measured: Measured) -> Finding:
    """Check whether the clocks of two machines agree."""
    ahead, error = measured.clock_ahead_s, measured.clock_error_s
    fast, slow = (second, first) if ahead > 0 else (first, second)
    found = f"rank {fast.rank}'s is {milliseconds(abs(ahead))} ahead of rank {slow.rank}'s (± {milliseconds(error)})"
    meaning = (
        "training itself does not need clocks, but times in logs and traces cannot be compared, and keys are refused "
        "on a machine whose clock is far behind"
    )
    advice = "timedatectl set-ntp true, on both machines"
    return judge("clocks", found, (abs(ahead) > _SKEW_S + error, WARNING, meaning, advice))


def check_same_versions(identities: Sequence[Identity]) -> Finding:
    """Check whether all ranks run the same versions; stages exchange bytes whose meaning a version may change."""
    if differ := differences([identity.versions for identity in identities]):
        found = f"{'. '.join(differ)}. Their checkpoints and packets may be incompatible"
        return Finding("same versions", WARNING, found, "Install the same versions on all machines.")
    return Finding("same versions", OK, f"the same on all {len(identities)} ranks")


def check_joined(errors: Mapping[int, str], identities: Sequence[Identity], over: str = "gloo") -> Finding:
    """Check whether the ranks could connect to each other. errors: of each rank that could not, in its words."""
    if not errors:
        return Finding(f"{over} connections", OK, f"all {len(identities)} ranks are connected")
    who = ", ".join(map(str, sorted(errors)))
    error = max(errors.values(), key=lambda text: "remote=" in text)  # the side that called says where it called
    found = f"ranks meet, but {'rank' if len(errors) == 1 else 'ranks'} {who} cannot connect to the others: {error}"
    return Finding(f"{over} connections", PROBLEM, found, _firewall(identities[0], identities[1], over))


def _firewall(first: Identity, second: Identity, over: str) -> str:
    if over == "TLS":
        return "Every rank must reach rank 0 by TCP at PIPECOMP_ADDRESS, or MASTER_ADDR and MASTER_PORT; no other port."
    if first.machine == second.machine:
        return f"Look at the line gloo interface; GLOO_SOCKET_IFNAME={loopback()} serves ranks on one machine."
    return (
        "GLOO_SOCKET_IFNAME must name, on each machine, the interface that leads to the others (see the line gloo "
        "interface), and all TCP ports must be open between the machines: gloo uses random ones."
    )
