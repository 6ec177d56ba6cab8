"""The end of a link that receives activations and sends their gradients."""

from __future__ import annotations

from torch import Tensor

from pipecomp.codecs.codecs import Cast, torch_dtype
from pipecomp.codecs.wire import Form, Kind
from pipecomp.errors import NonFiniteError
from pipecomp.stages.link.boundary import Layout, gather
from pipecomp.stages.link.endpoint import Position
from pipecomp.stages.link.link_end import LinkEnd


class LinkReceiver(LinkEnd):
    """Stage k + 1's end of the link from stage k."""

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
            x_TH, not_kept = self._activations.decode(header, payload, layout, at)
            if not_kept:
                self._undecided[at] = not_kept
            if self._gradients is not None:
                self._versions[at] = [s.version for s in header.samples]
        else:
            codec = self.codecs.activation(dtype) if training else self.codecs.evaluation(dtype)
            x_TH = self.codec_of(header, codec).decode(payload, layout.total, header.hidden)
        return self._received(header, payload, x_TH, layout), layout

    def send_gradient(self, g_BSH: Tensor, layout: Layout, at: Position, *, unit: float = 1.0) -> None:
        """Send the gradient [B, S, H] of the activations received at `at`; returns once the packet is queued.

        unit: what makes gradients of different steps comparable, by which they are multiplied where they are kept and
        divided at the other end; see `gradient_unit`.
        """
        g_TH = gather(g_BSH.detach(), layout).contiguous()
        codec = self.codecs.gradient(g_TH.dtype)
        not_kept = self._undecided.pop(at, set())
        samples = [s._replace(form=Form.NOT_KEPT) if s.id in not_kept else s for s in layout.samples(Form.PLAIN)]
        try:
            if self._gradients is not None:
                u_TH, versions = g_TH.float() * unit, self._versions.pop(at)
                packet, _ = self._gradients.encode(u_TH, layout, versions, at, g_TH.dtype, settled=self._pass_nonfinite)
            else:
                packet = self._encode(Kind.GRADIENT, codec, g_TH, samples, layout, at)
                if self._pass_nonfinite:  # here, not on the thread that sends
                    packet.settle()
        except NonFiniteError:
            if not self._pass_nonfinite:
                raise
            # Plain values, so that loss scaling sees the overflow and skips the step.
            packet = self._encode(Kind.GRADIENT, Cast(g_TH.dtype), g_TH, samples, layout, at)
        self._send(packet)
