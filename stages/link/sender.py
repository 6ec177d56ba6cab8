"""The end of a link that sends activations and receives their gradients."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pipecomp.buffers.base import CachedActivation
from pipecomp.errors import LinkError, NonFiniteError
from pipecomp.messages.codecs import Cast, torch_dtype
from pipecomp.messages.wire import Form, Header, Kind, Sample
from pipecomp.stages.link.boundary import Layout, gather, scatter
from pipecomp.stages.link.changes import Changes
from pipecomp.stages.link.endpoint import FORWARD, Endpoint, Position, plain_samples


class LinkSender(Endpoint):
    """Stage k's end of the link to stage k + 1."""

    next_version = 1  # of a cached activation; above the highest that either end still holds

    def send_activation(self, x_BSH: Tensor, layout: Layout, at: Position, *, training: bool = True) -> None:
        """Send the real tokens of x [B, S, H]; returns once the packet is queued.

        Raises NonFiniteError for values that cannot be quantized, before anything cached is changed.
        """
        x_TH = gather(x_BSH.detach(), layout)
        try:
            if training and self.store is not None:
                header, parts = self._encode_deltas(x_TH, layout, at)
            else:
                codec = self._codecs.activation(x_TH.dtype) if training else self._codecs.evaluation(x_TH.dtype)
                kind = Kind.ACTIVATION if training else Kind.EVAL_ACTIVATION
                header = self._header(kind, codec, x_TH, plain_samples(layout), layout, at)
                parts = codec.encode(x_TH, self._draw(FORWARD, at))
        except NonFiniteError as error:
            raise NonFiniteError(self._where(at, f"activations: {error}")) from error
        counters = self.stats.forward if training else self.stats.evaluation
        counters.add(x_TH.numel() * x_TH.element_size(), self._send(header, parts))

    def _encode_deltas(self, x_TH: Tensor, layout: Layout, at: Position) -> tuple[Header, list[np.ndarray]]:
        assert self.store is not None
        samples: list[Sample] = []
        parts: list[np.ndarray] = []
        changes = Changes(self.store, layout.ids)
        for i, (sample, rows) in enumerate(zip(layout.ids, layout.rows(), strict=True)):
            x_nH = x_TH[rows]
            cached = changes.held(sample)
            if cached is not None and cached.m_nH.shape != self._cached_shape(*x_nH.shape):
                cached = None  # the sample changed its length: a first visit again
            if any(sample in ids for ids in self._unsettled.values()):
                cached = None  # the other end may not keep the first visit that is under way
            version = self.next_version
            self.next_version += 1
            form, base = (Form.FULL, 0) if cached is None else (Form.DELTA, cached.version)
            if form is Form.FULL and not changes.may_keep(sample):
                form = Form.NOT_KEPT
            samples.append(Sample(sample, form, layout.starts[i], layout.counts[i], base, version))
            m_nH, held_nH, encoded = self._encode_sample(x_nH, cached, layout.starts[i], self._draw(FORWARD, at, i))
            parts += encoded
            if form is Form.NOT_KEPT:
                self.stats.unstored_samples += 1
            else:
                changes.hold(sample, CachedActivation(version, held_nH))
            if form is Form.DELTA:
                self.stats.delta_samples += 1
            else:
                self.stats.full_samples += 1
            if at.micro_batch == 0 and x_nH.numel():
                self._sample_error(x_nH, m_nH)
        changes.make(self._keep)
        if self._goes_on:
            self._unsettled[at] = {s.id for s in samples if s.form is Form.FULL}
        return self._header(Kind.ACTIVATION, self._codecs.forward, x_TH, samples, layout, at), parts

    def _encode_sample(
        self, x_nH: Tensor, cached: CachedActivation | None, start: int, seed: int
    ) -> tuple[Tensor, Tensor, list[np.ndarray]]:
        """Encode a sample: what the other end computes with, what both hold afterwards, the payload that says so."""
        if cached is not None:
            held_nH = cached.m_nH.to(x_nH.device)
            m_nH = held_nH if self.canvas is None else self.canvas.take(held_nH, start)
            parts = self._codecs.forward.encode_delta_(x_nH, m_nH, seed)
            if self.canvas is not None:
                self.canvas.put_(held_nH, start, m_nH)
            return m_nH, held_nH, parts
        if self._codecs.first is None:
            if not bool(torch.isfinite(x_nH).all()):
                raise NonFiniteError("NaN or Inf")
            m_nH, parts = x_nH.to(torch.float32, copy=True), Cast(x_nH.dtype).encode(x_nH)
        else:
            parts = self._codecs.first.encode(x_nH, seed)
            m_nH = self._codecs.first.decode(np.concatenate(parts), x_nH.shape[0], x_nH.shape[1], x_nH.device)
        return m_nH, m_nH if self.canvas is None else self.canvas.spread(m_nH, start), parts

    def _sample_error(self, x_nH: Tensor, m_nH: Tensor) -> None:
        norm = float(x_nH.float().norm())
        if norm > 0:
            self.stats.error_sum += float((x_nH.float() - m_nH).norm()) / norm
            self.stats.error_count += 1

    def recv_gradient(self, layout: Layout, at: Position) -> Tensor:
        """Receive the gradient [B, S, H] of what was sent at `at`, in the training dtype; zeros at padding."""
        header, payload, size = self._recv(Kind.GRADIENT, at)
        if Layout.of_header(header, self.canvas) != layout:
            raise LinkError(self._where(at, f"gradient for samples {[s.id for s in header.samples]}, not {layout.ids}"))
        first_visits = self._unsettled.pop(at, set())
        if self.store is not None:
            not_kept = {s.id for s in header.samples if s.form is Form.NOT_KEPT}
            self.stats.unstored_samples += len(not_kept & first_visits)
            self.store.drop(not_kept)
        dtype = torch_dtype(header.dtype)
        codec = self._codecs.gradient(dtype)
        if self._pass_nonfinite and header.method is Cast.method:
            codec = Cast(dtype)
        self._check_codec(header, codec)
        g_TH = codec.decode(payload, layout.total, header.hidden, self.device).to(dtype)
        self.stats.backward.add(g_TH.numel() * g_TH.element_size(), size)
        return scatter(g_TH, layout)
