"""The end of a link that receives activations and sends their gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pipecomp.buffers.base import CachedActivation
from pipecomp.errors import BaseMismatchError, LinkError, NonFiniteError, WireError
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
            x_TH = self._decode_deltas(header, payload, layout, at).to(dtype)
        else:
            codec = self._codecs.activation(dtype) if training else self._codecs.evaluation(dtype)
            self._check_codec(header, codec)
            x_TH = codec.decode(payload, layout.total, header.hidden, self.device).to(dtype)
        (self.stats.forward if training else self.stats.evaluation).add(x_TH.numel() * x_TH.element_size(), size)
        return scatter(x_TH, layout), layout

    def _decode_deltas(self, header: Header, payload: np.ndarray, layout: Layout, at: Position) -> Tensor:
        assert self.store is not None
        if header.first_bits != self._codecs.first_bits:
            got = header.first_bits or "full"
            raise LinkError(self._where(at, f"first visits at {got} bits: the ranks' configurations differ"))
        first_visit = self._codecs.first_visit(torch_dtype(header.dtype))
        codecs = (self._codecs.forward if s.form is Form.DELTA else first_visit for s in header.samples)
        sizes = [c.payload_bytes(s.count, header.hidden) for c, s in zip(codecs, header.samples, strict=True)]
        if sum(sizes) != payload.size:
            raise WireError(self._where(at, f"payload of {payload.size} bytes where its samples need {sum(sizes)}"))
        x_TH = torch.empty(layout.total, header.hidden, device=self.device)
        changes = Changes(self.store, layout.ids)
        start = 0
        for i, (sample, rows) in enumerate(zip(header.samples, layout.rows(), strict=True)):
            data = payload[start : start + sizes[i]]
            start += sizes[i]
            if sample.form is Form.DELTA:
                held_nH = self._checked_base(sample, changes.held(sample.id), header.hidden, at)
                m_nH = held_nH if self.canvas is None else self.canvas.take(held_nH, sample.start)
                self._codecs.forward.decode_delta_(data, m_nH)
                if self.canvas is not None:
                    self.canvas.put_(held_nH, sample.start, m_nH)
                self.stats.delta_samples += 1
            elif sample.form in (Form.FULL, Form.NOT_KEPT):
                m_nH = first_visit.decode(data, sample.count, header.hidden, self.device).to(torch.float32)
                held_nH = m_nH if self.canvas is None else self.canvas.spread(m_nH, sample.start)
                self.stats.full_samples += 1
            else:
                raise LinkError(self._where(at, f"sample {sample.id} came without a version"))
            x_TH[rows] = m_nH
            if sample.form is Form.NOT_KEPT or (sample.form is Form.FULL and not changes.may_keep(sample.id)):
                self.stats.unstored_samples += 1
                changes.hold(sample.id, None)
                self._unsettled.setdefault(at, set()).add(sample.id)
            else:
                changes.hold(sample.id, CachedActivation(sample.version, held_nH))
        changes.make(self._keep)
        return x_TH

    def _checked_base(self, sample: Sample, cached: CachedActivation | None, hidden: int, at: Position) -> Tensor:
        if cached is None or cached.version != sample.base:
            holds = "holds none" if cached is None else f"holds version {cached.version}"
            raise BaseMismatchError(
                self._where(at, f"sample {sample.id}: delta on version {sample.base}, this end {holds}")
            )
        if tuple(cached.m_nH.shape) != self._cached_shape(sample.count, hidden):
            raise BaseMismatchError(
                self._where(
                    at,
                    f"sample {sample.id}: delta of shape {(sample.count, hidden)} on a cached activation of "
                    f"{tuple(cached.m_nH.shape)}",
                )
            )
        return cached.m_nH.to(self.device)

    def send_gradient(self, g_BSH: Tensor, layout: Layout, at: Position) -> None:
        """Send the gradient [B, S, H] of the activations received at `at`; returns once the packet is queued."""
        g_TH = gather(g_BSH.detach(), layout)
        codec = self._codecs.gradient(g_TH.dtype)
        try:
            parts = codec.encode(g_TH, self._draw(BACKWARD, at))
        except NonFiniteError as error:
            if not self._pass_nonfinite:
                raise NonFiniteError(self._where(at, f"gradients: {error}")) from error
            codec = Cast(g_TH.dtype)  # so that loss scaling sees the overflow and skips the step
            parts = codec.encode(g_TH)
        not_kept = self._unsettled.pop(at, set())
        samples = [replace(s, form=Form.NOT_KEPT) if s.id in not_kept else s for s in plain_samples(layout)]
        header = self._header(Kind.GRADIENT, codec, g_TH, samples, layout, at)
        self.stats.backward.add(g_TH.numel() * g_TH.element_size(), self._send(header, parts))
