"""The end of a link that sends activations and receives their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipecomp.codecs.codecs import Cast, torch_dtype
from pipecomp.codecs.wire import Form, Kind
from pipecomp.errors import LinkError
from pipecomp.stages.link.boundary import Layout, gather
from pipecomp.stages.link.endpoint import Position
from pipecomp.stages.link.link_end import LinkEnd
from pipecomp.stages.link.packet import Packet


class LinkSender(LinkEnd):
    """Stage k's end of the link to stage k + 1."""

    next_version = 1  # of a cached activation; above the highest that either end still holds

    def send_activation(self, x_BSH: Tensor, layout: Layout, at: Position, *, training: bool = True) -> None:
        """Send the real tokens of x [B, S, H]; returns once the packet is queued, and in evaluation others may be.

        Raises NonFiniteError for values that cannot be quantized: nothing is stored or sent. On a GPU the next
        call does.
        """
        x_TH = gather(x_BSH.detach(), layout).contiguous()
        if training and self.store is not None:
            packet, seen = self._encode_known(x_TH, layout, at)
            if at.micro_batch == 0:
                self._sample_errors(x_TH.split(layout.counts), seen)
        else:
            codec = self.codecs.activation(x_TH.dtype) if training else self.codecs.evaluation(x_TH.dtype)
            kind = Kind.ACTIVATION if training else Kind.EVAL_ACTIVATION
            packet = self._encode(kind, codec, x_TH, layout.samples(Form.PLAIN), layout, at)
        self._send(packet)
        if not training:  # whose micro-batches wait for nothing: on a slow link they would fill memory
            self.transport.wait_for_room()

    def _encode_known(self, x_TH: Tensor, layout: Layout, at: Position) -> tuple[Packet, Sequence[Tensor]]:
        """Encode changes of what the other end holds; the packet, and what that end computes with, of each sample."""
        if self._clusters is not None:
            packet, seen_TH = self._clusters.encode(x_TH, layout, at, self.next_version)
            self.next_version += 1
            return packet, seen_TH.split(layout.counts)
        versions = range(self.next_version, self.next_version + len(layout.ids))
        self.next_version = versions.stop
        # The other end may not keep a first visit that is under way.
        undecided = set[int]().union(*self._undecided.values())
        packet, seen = self._activations.encode(x_TH, layout, versions, at, x_TH.dtype, undecided=undecided)
        if self.goes_on:
            self._undecided[at] = {s.id for s in packet.samples if s.form is Form.FULL}
        return packet, seen

    def _sample_errors(self, x: Sequence[Tensor], seen: Sequence[Tensor]) -> None:
        """Count how far off is what the other end computes with; on a GPU the numbers are read a step later."""
        pairs = [(x_nH.float(), m_nH) for x_nH, m_nH in zip(x, seen, strict=True) if x_nH.numel()]
        if pairs:
            norms = torch.stack([torch.stack([x_nH.norm(), (x_nH - m_nH).norm()]) for x_nH, m_nH in pairs])
            self._measured.append(self.staging.to_host(norms))
        while len(self._measured) > (0 if self.staging.immediate else 1):
            for norm, left in self._measured.popleft().wait().tolist():
                if norm > 0:
                    self.stats.error_sum += left / norm
                    self.stats.error_count += 1

    def recv_gradient(self, layout: Layout, at: Position, *, unit: float = 1.0) -> Tensor:
        """Receive the gradient [B, S, H] of what was sent at `at`, in the training dtype; zeros at padding.

        unit: as at the other end, see `LinkReceiver.send_gradient`.
        """
        header, payload = self._recv(Kind.GRADIENT, at)
        if Layout.of_header(header, self.canvas) != layout:
            raise LinkError(self.where(at, f"gradient for samples {[s.id for s in header.samples]}, not {layout.ids}"))
        first_visits = self._undecided.pop(at, set())
        if self.store is not None and self._clusters is None:
            not_kept = {s.id for s in header.samples if s.form is Form.NOT_KEPT}
            self.stats.unstored_samples += len(not_kept & first_visits)
            self.store.drop(not_kept)
        dtype = torch_dtype(header.dtype)
        plain = self._pass_nonfinite and (header.method, header.payload_dtype) == (Cast.method, header.dtype)
        if self._gradients is not None and not plain:
            u_TH, _ = self._gradients.decode(header, payload, layout, at)
            g_TH = u_TH / unit
        else:
            codec = Cast(dtype) if plain else self.codecs.gradient(dtype)
            g_TH = self.codec_of(header, codec).decode(payload, layout.total, header.hidden)
        return self._received(header, payload, g_TH, layout)
