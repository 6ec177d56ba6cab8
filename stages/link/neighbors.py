"""Connections of a rank to the stages before and after it, with the number of streams that each needs."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch.distributed as dist

from pipecomp.distributed.consistency import AllRanks
from pipecomp.errors import LinkError
from pipecomp.stages.link.gloo import GlooTransport, NeighborGroup, neighbour_groups
from pipecomp.stages.link.streams import StreamChoice, choose_streams, is_long, measure_round_trips
from pipecomp.stages.link.tls import TlsTransport
from pipecomp.stages.link.transport import PacerTo, Transport, unpaced
from pipecomp.tls.frames import MAX_SUBFLOWS
from pipecomp.tls.process_group import BACKEND, current_mesh

_log = logging.getLogger("pipecomp")
_CONNECT = "connect to its neighbors"


@dataclass(frozen=True)
class Neighbors:
    """The connections of one rank.

    Attributes:
        transports: By "to_previous" and "to_next"; at the ends of the pipeline one of them is missing.
        streams: Their streams, by the same names.
        groups: Gloo's process groups behind them.
    """

    transports: dict[str, Transport]
    streams: dict[str, StreamChoice]
    groups: list[dist.ProcessGroup]


def open_neighbors(
    pipelines: Sequence[Sequence[int]],
    *,
    timeout_s: float,
    streams: int | str,
    all_ranks: AllRanks,
    pacer_to: PacerTo = unpaced,
) -> Neighbors:
    """Connect this rank to its neighbors over gloo or TLS, as torch's default group does; all ranks must call this.

    Args:
        pipelines: For each replica, the global ranks of its stages in order.
        timeout_s: Silence after which a neighbor counts as lost.
        streams: TCP connections of each link; "auto" measures.
        all_ranks: Ends all ranks if one fails.
        pacer_to: Gives the pacer of the link to a rank, which simulates a slow network.

    Raises:
        LinkError: On all ranks, if the two ends of a link differ, or one fails.
    """
    rank = dist.get_rank()
    own = list(next((ranks for ranks in pipelines if rank in ranks), [rank]))
    stage = own.index(rank)
    pairs = {"to_previous": own[stage - 1 : stage + 1] if stage else [], "to_next": own[stage : stage + 2]}
    ends = {name: (pair[0], pair[1]) for name, pair in pairs.items() if len(pair) == 2}
    peers = {name: first if second == rank else second for name, (first, second) in ends.items()}
    mesh = current_mesh() if dist.get_backend() == BACKEND else None
    over_gloo: dict[str, GlooTransport] = {}
    transports: dict[str, Transport] = {}

    def make_groups(numbers: dict[tuple[int, int], int]) -> dict[tuple[int, int], list[NeighborGroup]]:
        return neighbour_groups([list(ranks) for ranks in pipelines], timeout_s, numbers) if mesh is None else {}

    with contextlib.ExitStack() as opened:
        with all_ranks.collective_errors(_CONNECT):
            fixed = 1 if streams == "auto" else int(streams)
            groups = make_groups({pair: fixed for ranks in pipelines for pair in itertools.pairwise(ranks)})
            for name, peer in peers.items():
                if mesh is not None:
                    transport: Transport = TlsTransport(mesh, peer, timeout_s=timeout_s, pacer=pacer_to(peer))
                else:
                    (group, sockets), *further = groups[ends[name]]
                    transport = over_gloo[name] = GlooTransport(
                        group, timeout_s=timeout_s, pacer=pacer_to(peer), sockets=sockets, further=further
                    )
                transports[name] = transport
                opened.callback(transport.close)
        with ending_links(transports, all_ranks, _CONNECT):
            if streams == "auto":
                round_trips = measure_round_trips(stage, transports)
            else:
                for transport in transports.values():
                    transport.use_streams(fixed)
        choices = {name: StreamChoice(fixed) for name in transports}
        if streams == "auto":
            long = [ends[name] for name, seconds in round_trips.items() if is_long(seconds)]
            wanted = {(first, second) for some in all_ranks.all_gather_object(long) for first, second in some}
            with all_ranks.collective_errors(_CONNECT):
                more = make_groups(dict.fromkeys(wanted, MAX_SUBFLOWS - 1))
                for name, gloo in over_gloo.items():
                    gloo.add_groups(more.get(ends[name], []))
            with ending_links(transports, all_ranks, _CONNECT):
                choices = choose_streams(stage, transports, round_trips)
        opened.pop_all()
    for gloo in over_gloo.values():
        for released in gloo.release_groups():
            dist.destroy_process_group(released)
    _report(ends, choices)
    return Neighbors(transports, choices, [group for gloo in over_gloo.values() for group in gloo.groups])


def ending_links(transports: Mapping[str, Transport], all_ranks: AllRanks, doing: str) -> AbstractContextManager[None]:
    """Wrap what all ranks do over their links: an error of the body ends the links, and so the body on all ranks.

    Args:
        transports: Transports of this rank.
        all_ranks: Every rank raises the error.
        doing: A verb for the body.
    """

    def end_links(error: Exception) -> None:
        lost = getattr(error, "rank", None) if isinstance(error, LinkError) else None
        reason = str(error)
        if lost is None:
            lost = dist.get_rank()
            reason = f"rank {lost} could not {doing}: {type(error).__name__}: {error}"
        for transport in transports.values():  # the other ends may wait for this one
            with contextlib.suppress(Exception):
                transport.abort(lost, reason)

    return all_ranks.collective_errors(doing, end_links)


def _report(ends: dict[str, tuple[int, int]], choices: dict[str, StreamChoice]) -> None:
    """Log the streams of this rank's link to the next, if there are several or they were measured."""
    choice = choices.get("to_next")
    if choice is not None and (choice.streams > 1 or choice.rates):
        _log.warning("streams from rank %d to rank %d: %s", *ends["to_next"], choice)  # Python shows this level
