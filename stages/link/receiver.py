"""The end of a link that receives activations and sends their gradients."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from pipecomp.errors import LinkError, NonFiniteError, WireError
from pipecomp.kernels import ops
from pipecomp.messages.codecs import Cast, torch_dtype
from pipecomp.messages.wire import Form, Header, Kind, Sample
from pipecomp.stages.link.boundary import Layout, gather, scatter
from pipecomp.stages.link.changes import Changes
from pipecomp.stages.link.endpoint import BACKWARD, Endpoint, Position, plain_samples


class LinkReceiver(Endpoint):
    """Stage k + 1's end of the link from stage k."""

    def recv_activation(self, at: Position, *, training: bool = True) -> tuple[Tensor, Layout]:
        """Receive the activations [B, S, H] at `at` in the training dtype, zeros at padding, and their layout.

        Raises BaseMismatchError if a delta builds on what this end does not hold.
        """
        header, payload, size = self._recv(Kind.ACTIVATION if training else Kind.EVAL_ACTIVATION, at)
        layout = Layout.of_header(header, self.canvas)
        dtype = torch_dtype(header.dtype)
        if training and self.store is not None:
            self._check_codec(header, self._codecs.forward)
            x_TH = self._decode_visits(header, payload, layout, at).to(dtype)
        else:
            codec = self._codecs.activation(dtype) if training else self._codecs.evaluation(dtype)
            self._check_codec(header, codec)
            x_TH = codec.decode(payload, layout.total, header.hidden).to(dtype)
        (self.stats.forward if training else self.stats.evaluation).add(x_TH.numel() * x_TH.element_size(), size)
        return scatter(x_TH, layout), layout

    def _decode_visits(self, header: Header, payload: Tensor, layout: Layout, at: Position) -> Tensor:
        assert self.store is not None
        samples, hidden, dtype = header.samples, header.hidden, torch_dtype(header.dtype)
        if header.first_bits != self._codecs.first_bits:
            got = header.first_bits or "full"
            raise LinkError(self._where(at, f"first visits at {got} bits: the ranks' configurations differ"))
        for s in samples:
            if s.form is Form.PLAIN:
                raise LinkError(self._where(at, f"sample {s.id} came without a version"))
        sizes = [self._codecs.visit_bytes(s.count, hidden, s.form is Form.DELTA, dtype) for s in samples]
        if sum(sizes) != payload.numel():
            raise WireError(self._where(at, f"payload of {payload.numel()} bytes where its samples need {sum(sizes)}"))
        ends = list(itertools.accumulate(sizes, initial=0))
        changes = Changes(self.store, layout.ids)

        def code(run: range, m: list[Tensor]) -> None:
            arriving = [
                self._codecs.arriving(m_nH, samples[i].form is Form.DELTA, dtype)
                for i, m_nH in zip(run, m, strict=True)
            ]
            ops.decode_batch(payload[ends[run.start] : ends[run.stop]], arriving)

        x_TH = torch.cat(self._visit(changes, samples, hidden, at, code))
        not_kept = changes.dropped()
        if not_kept:
            self._unsettled.setdefault(at, set()).update(not_kept)
        self._keep(changes)
        return x_TH

    def _keeps(self, changes: Changes, sample: Sample) -> bool:
        return sample.form is Form.DELTA or (sample.form is Form.FULL and changes.may_keep(sample.id))

    def send_gradient(self, g_BSH: Tensor, layout: Layout, at: Position) -> None:
        """Send the gradient [B, S, H] of the activations received at `at`; returns once the packet is queued."""
        g_TH = gather(g_BSH.detach(), layout).contiguous()
        codec = self._codecs.gradient(g_TH.dtype)
        not_kept = self._unsettled.pop(at, set())
        samples = [replace(s, form=Form.NOT_KEPT) if s.id in not_kept else s for s in plain_samples(layout)]
        seed = self._draw(BACKWARD, at)
        try:
            packet = self._encode(Kind.GRADIENT, codec, g_TH, samples, layout, at, seed, settled=self._pass_nonfinite)
        except NonFiniteError:
            if not self._pass_nonfinite:
                raise
            # Plain values, so that loss scaling sees the overflow and skips the step.
            packet = self._encode(Kind.GRADIENT, Cast(g_TH.dtype), g_TH, samples, layout, at, seed)
        self.stats.backward.add(g_TH.numel() * g_TH.element_size(), self._send(packet))
