"""All of a rank's link ends together: opened, watched and closed as one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pipecomp.buffers import StoreEnvironment
from pipecomp.buffers.base import entry_id
from pipecomp.codecs.wire import Header, Kind
from pipecomp.errors import PipecompError
from pipecomp.stages.link.drift import check_drift
from pipecomp.stages.link.handshake import agree
from pipecomp.stages.link.link_end import LinkEnd
from pipecomp.stages.link.receiver import LinkReceiver
from pipecomp.stages.link.sender import LinkSender


@dataclass(frozen=True, kw_only=True)
class Links:
    """A rank's ends of its links (None at the ends of the pipeline) and where their cached activations are kept.

    described: for each link what both ends must have in common. gradients: whether gradients are kept beside them.
    """

    to_next: LinkSender | None = None
    to_previous: LinkReceiver | None = None
    environment: StoreEnvironment | None = None
    described: dict[int, dict[str, Any]] = field(default_factory=dict)
    gradients: bool = False

    def __iter__(self) -> Iterator[LinkEnd]:
        return (end for end in (self.to_previous, self.to_next) if end is not None)

    def counted(self) -> Iterator[LinkEnd]:
        """Give the ends once all that they have sent is counted."""
        for end in self:
            end.count_sent(wait=True)
            yield end

    @property
    def wait_seconds(self) -> float:
        """How long this rank has waited for packets in training."""
        return sum(end.stats.wait_seconds for end in self)

    def coded(self) -> tuple[int, int]:
        """Bits of all codes that crossed this rank's links in training, and the values they are of."""
        ways = [way for end in self for way in (end.stats.forward, end.stats.backward)]
        return sum(way.code_bits for way in ways), sum(way.values_quantized for way in ways)

    def prefetch_arrived(self, header: Header) -> None:
        """Load what is cached of a micro-batch that has arrived before its turn; called on a receiving thread."""
        samples = [sample.id for sample in header.samples]
        gradients = [entry_id(i, gradient=True) for i in samples] if self.gradients else []
        if header.kind is Kind.ACTIVATION:
            for end in self:
                if end.store is not None:
                    end.store.prefetch(samples + (gradients if end is self.to_previous else []))
        elif header.kind is Kind.GRADIENT and self.to_next is not None and self.to_next.store is not None:
            self.to_next.store.prefetch(gradients)

    def forget(self) -> None:
        """Drop all that is held at this rank's ends."""
        for end in self:
            if end.store is not None:
                end.store.drop([held.sample for held in end.store.inventory()])
                end.reload()

    def agree(self) -> int:
        """Make all ends hold the same as their peers; every rank must call it. Samples dropped here."""
        return sum(agree(end, self.described[end.index]) for end in self)

    def end_step(self) -> None:
        """Keep what a step has changed; before `check_drift` and the environment's `commit`."""
        for end in self:
            end.end_step()

    def check_drift(self, step: int) -> None:
        """Compare all ends with their peers after a step; see `drift.check_drift`. Every rank must call it."""
        for end in self:
            check_drift(end, step)

    def failure(self, wait_s: float) -> Exception | None:
        """Find what ended one of the connections, if anything shows within `wait_s` seconds each."""
        return next((failure for end in self if (failure := end.transport.failure(wait_s)) is not None), None)

    def failed(self, error: Exception) -> None:
        """Let whoever waits for a neighbour, or asks for it later, have this error."""
        for end in self:
            end.transport.failed(error)

    def abort(self, lost_rank: int, reason: str) -> None:
        """Tell both neighbours that this rank's training is over, and why."""
        for end in self:
            end.transport.abort(lost_rank, reason)

    def close(self) -> None:
        """End the connections in order and finish the stores; safe to call twice."""
        for end in self:
            with contextlib.suppress(PipecompError):
                end.transport.close()
        if self.environment is not None:
            self.environment.close()
