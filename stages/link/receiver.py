"""The end of a link that receives activations and sends their gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pipecomp.errors import NonFiniteError
from pipecomp.messages.codecs import Cast, torch_dtype
from pipecomp.messages.wire import Form, Header, Kind
from pipecomp.stages.link.boundary import Layout, gather
from pipecomp.stages.link.endpoint import Packet, Position, plain_samples
from pipecomp.stages.link.link_end import LinkEnd
from pipecomp.stages.link.visits import Visits


class LinkReceiver(LinkEnd):
    """Stage k + 1's end of the link from stage k."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._versions: dict[
            Position, list[int]
        ] = {}  # of micro-batches whose gradients are to come, where these count

    def recv_activation(self, at: Position, *, training: bool = True) -> tuple[Tensor, Layout]:
        """Receive the activations [B, S, H] at `at` in the training dtype, zeros at padding, and their layout.

        Raises BaseMismatchError if a delta builds on what this end does not hold.
        """
        header, payload = self._recv(Kind.ACTIVATION if training else Kind.EVAL_ACTIVATION, at)
        layout = Layout.of_header(header, self.canvas)
        dtype = torch_dtype(header.dtype)
        if training and self._clusters is not None:
            x_TH = self._clusters.decode(header, payload, at)
        elif training and self.store is not None:
            self._codec_of(header, self.codecs.forward)
            x_TH = self._decode_visits(header, payload, layout, at)
        else:
            codec = self.codecs.activation(dtype) if training else self.codecs.evaluation(dtype)
            x_TH = self._codec_of(header, codec).decode(payload, layout.total, header.hidden)
        return self._received(header, payload, x_TH, layout), layout

    def _decode_visits(self, header: Header, payload: Tensor, layout: Layout, at: Position) -> Tensor:
        changes = self._activations.changes(layout)
        x_TH, settled = self._activations.decode(header, payload, changes, at, torch_dtype(header.dtype))
        not_kept = changes.dropped()
        if not_kept:
            self._unsettled.setdefault(at, set()).update(not_kept)
        self._activations.keep(changes, settled)
        if self._gradients is not None:
            self._versions[at] = [s.version for s in header.samples]
        return x_TH

    def send_gradient(self, g_BSH: Tensor, layout: Layout, at: Position, *, unit: float = 1.0) -> None:
        """Send the gradient [B, S, H] of the activations received at `at`; returns once the packet is queued.

        unit: what makes gradients of different steps comparable, by which they are multiplied where they are kept and
        divided at the other end; see `gradient_unit`.
        """
        g_TH = gather(g_BSH.detach(), layout).contiguous()
        codec = self.codecs.gradient(g_TH.dtype)
        not_kept = self._unsettled.pop(at, set())
        samples = [s._replace(form=Form.NOT_KEPT) if s.id in not_kept else s for s in plain_samples(layout)]
        try:
            if self._gradients is not None:
                packet = self._encode_change(self._gradients, g_TH, layout, at, unit)
            else:
                settled = self._pass_nonfinite
                packet = self._encode(Kind.GRADIENT, codec, g_TH, samples, layout, at, settled=settled)
        except NonFiniteError:
            if not self._pass_nonfinite:
                raise
            # Plain values, so that loss scaling sees the overflow and skips the step.
            packet = self._encode(Kind.GRADIENT, Cast(g_TH.dtype), g_TH, samples, layout, at)
        self._send(packet)

    def _encode_change(self, gradients: Visits, g_TH: Tensor, layout: Layout, at: Position, unit: float) -> Packet:
        """Encode the change since the last visit; NonFiniteError leaves everything as it was."""
        changes = gradients.changes(layout)
        u_TH = g_TH.float() * unit
        samples = gradients.plan(changes, layout, g_TH.shape[1], self._versions.pop(at))
        packet, _ = gradients.encode(u_TH, samples, changes, layout, at, g_TH.dtype)
        if self._pass_nonfinite:
            packet.settle()
        gradients.keep(changes, packet.settle)
        return packet
