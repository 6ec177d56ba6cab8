"""Connections of a rank to the stages before and after it, with the number of streams that each needs."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from pipecomp.stages.link.gloo import GlooTransport, NeighborGroup, neighbour_groups
from pipecomp.stages.link.streams import StreamChoice, settle_streams
from pipecomp.stages.link.tls import TlsTransport
from pipecomp.stages.link.transport import PacerTo, Transport, unpaced
from pipecomp.tls.frames import MAX_SUBFLOWS
from pipecomp.tls.process_group import BACKEND, current_mesh

_log = logging.getLogger("pipecomp")


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
    gather: Callable[[Any], list[Any]],
    pacer_to: PacerTo = unpaced,
) -> Neighbors:
    """Connect this rank to its neighbors over gloo or TLS, as torch's default group does; all ranks must call this.

    Args:
        pipelines: For each replica, the global ranks of its stages in order.
        timeout_s: Silence after which a neighbor counts as lost.
        streams: TCP connections of each link; "auto" measures.
        gather: Returns the JSON values of all ranks.
        pacer_to: Gives the pacer of the link to a rank, which simulates a slow network.

    Raises:
        LinkError: The two ends of a link differ.
    """
    rank = dist.get_rank()
    own = list(next((ranks for ranks in pipelines if rank in ranks), [rank]))
    stage = own.index(rank)
    pairs = {"to_previous": own[stage - 1 : stage + 1] if stage else [], "to_next": own[stage : stage + 2]}
    ends = {name: (pair[0], pair[1]) for name, pair in pairs.items() if len(pair) == 2}
    peers = {name: first if second == rank else second for name, (first, second) in ends.items()}
    mesh = current_mesh() if dist.get_backend() == BACKEND else None
    if mesh is not None:
        over_tls: dict[str, Transport] = {
            name: TlsTransport(mesh, peer, timeout_s=timeout_s, pacer=pacer_to(peer)) for name, peer in peers.items()
        }
        with _closing_on_error(over_tls):
            choices = settle_streams(stage, over_tls, streams)
        _report(ends, choices)
        return Neighbors(over_tls, choices, [])

    def make_groups(numbers: dict[tuple[int, int], int]) -> dict[tuple[int, int], list[NeighborGroup]]:
        return neighbour_groups([list(ranks) for ranks in pipelines], timeout_s, numbers)

    fixed = 1 if streams == "auto" else int(streams)
    groups = make_groups({pair: fixed for ranks in pipelines for pair in itertools.pairwise(ranks)})
    over_gloo = {
        name: GlooTransport(
            first.group, timeout_s=timeout_s, pacer=pacer_to(peer), sockets=first.sockets, further=further
        )
        for name, peer in peers.items()
        for first, *further in [groups[ends[name]]]
    }

    def extend(names: Sequence[str]) -> None:
        """Make further groups for all ranks' long links."""
        wanted = gather([list(ends[name]) for name in names])
        more = make_groups({(first, second): MAX_SUBFLOWS - 1 for some in wanted for first, second in some})
        for name in names:
            over_gloo[name].add_groups(more[ends[name]])

    with _closing_on_error(over_gloo):
        choices = settle_streams(stage, over_gloo, streams, extend)
        if streams == "auto":
            gather(None)  # the other end may still have to receive over groups that this rank releases
    for transport in over_gloo.values():
        for group in transport.release_groups():
            dist.destroy_process_group(group)
    _report(ends, choices)
    return Neighbors(dict(over_gloo), choices, [g for transport in over_gloo.values() for g in transport.groups])


@contextlib.contextmanager
def _closing_on_error(transports: Mapping[str, Transport]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for transport in transports.values():
            with contextlib.suppress(Exception):
                transport.close()
        raise


def _report(ends: dict[str, tuple[int, int]], choices: dict[str, StreamChoice]) -> None:
    """Log the streams of this rank's link to the next, if there are several or they were measured."""
    choice = choices.get("to_next")
    if choice is not None and (choice.streams > 1 or choice.rates):
        _log.warning("streams from rank %d to rank %d: %s", *ends["to_next"], choice)  # Python shows this level
