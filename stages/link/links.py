"""The ends of all links of a rank, as one object."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pipecomp.buffers import StoreEnvironment
from pipecomp.buffers.base import entry_id
from pipecomp.codecs.wire import PacketHeader, PacketKind
from pipecomp.errors import PipecompError
from pipecomp.stages.link.endpoint import Endpoint, LinkReceiver, LinkSender
from pipecomp.stages.link.handshake import check_drift, reconcile_stores


@dataclass(frozen=True, kw_only=True)
class Links:
    """A rank's ends of its links, and the environment of their stores.

    Attributes:
        to_next: None on the last stage.
        to_previous: None on the first stage.
        environment: Environment of the stores; None without stores.
        described: By link, JSON values that both ends must have in common.
        gradients: Whether the stores hold gradients as well.
    """

    to_next: LinkSender | None = None
    to_previous: LinkReceiver | None = None
    environment: StoreEnvironment | None = None
    described: dict[int, dict[str, Any]] = field(default_factory=dict)
    gradients: bool = False

    def __iter__(self) -> Iterator[Endpoint]:
        return (end for end in (self.to_previous, self.to_next) if end is not None)

    def counted(self) -> Iterator[Endpoint]:
        """Yield the ends after all their sent packets are counted."""
        for end in self:
            end.count_sent(wait=True)
            yield end

    @property
    def wait_seconds(self) -> float:
        """Seconds that this rank has waited for packets in training."""
        return sum(end.stats.wait_seconds for end in self)

    def coded(self) -> tuple[int, int]:
        """Return the bits of all codes that crossed this rank's links in training, and the number of their values."""
        directions = [direction for end in self for direction in (end.stats.forward, end.stats.backward)]
        return sum(d.code_bits for d in directions), sum(d.values_quantized for d in directions)

    def prefetch_arrived(self, header: PacketHeader) -> None:
        """Prefetch the cached entries of a micro-batch that has arrived before its turn, on the receiving thread."""
        samples = [sample.id for sample in header.samples]
        gradients = [entry_id(i, gradient=True) for i in samples] if self.gradients else []
        if header.kind is PacketKind.ACTIVATION:
            for end in self:
                if end.store is not None:
                    end.store.prefetch(samples + (gradients if end is self.to_previous else []))
        elif header.kind is PacketKind.GRADIENT and self.to_next is not None and self.to_next.store is not None:
            self.to_next.store.prefetch(gradients)

    def forget(self) -> None:
        """Drop all entries of this rank's stores."""
        for end in self:
            if end.store is not None:
                end.store.drop([held.sample for held in end.store.inventory()])
                end.reload()

    def reconcile_stores(self) -> int:
        """Make all ends hold the same samples as their peers; every rank must call it.

        Returns the number of samples that were dropped here.
        """
        return sum(reconcile_stores(end, self.described[end.index]) for end in self)

    def end_step(self) -> None:
        """Put what a step has changed; call it before `check_drift` and the environment's `commit`."""
        for end in self:
            end.end_step()

    def check_drift(self, step: int) -> None:
        """Compare all ends with their peers after a step, see `check_drift`; every rank must call it."""
        for end in self:
            check_drift(end, step)

    def failure(self, wait_s: float) -> Exception | None:
        """Return the error that ended one of the connections, if any, waiting up to `wait_s` seconds for each."""
        return next((failure for end in self if (failure := end.transport.failure(wait_s)) is not None), None)

    def failed(self, error: Exception) -> None:
        """Make everything that waits for a neighbor, now or later, raise this error."""
        for end in self:
            end.transport.failed(error)

    def abort(self, lost_rank: int, reason: str) -> None:
        """Notify both neighbors that `lost_rank` is gone. The stores stay."""
        if self.environment is not None:
            self.environment.temporary = False
        for end in self:
            end.transport.abort(lost_rank, reason)

    def close(self) -> None:
        """Close the connections in order, then the stores; safe to call twice."""
        for end in self:
            with contextlib.suppress(PipecompError):
                end.transport.close()
        if self.environment is not None:
            self.environment.close()
