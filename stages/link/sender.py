"""The end of a link that sends activations and receives their gradients."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from pipecomp.errors import LinkError
from pipecomp.kernels import ops
from pipecomp.messages.codecs import Cast, torch_dtype
from pipecomp.messages.wire import Form, Kind, Sample
from pipecomp.stages.link.boundary import Layout, gather, scatter
from pipecomp.stages.link.changes import Changes
from pipecomp.stages.link.endpoint import FORWARD, Endpoint, Packet, Position, plain_samples


class LinkSender(Endpoint):
    """Stage k's end of the link to stage k + 1."""

    next_version = 1  # of a cached activation; above the highest that either end still holds

    def send_activation(self, x_BSH: Tensor, layout: Layout, at: Position, *, training: bool = True) -> None:
        """Send the real tokens of x [B, S, H]; returns once the packet is queued.

        Raises NonFiniteError for values that cannot be quantized: nothing is stored or sent. On a GPU the next
        call does.
        """
        x_TH = gather(x_BSH.detach(), layout).contiguous()
        if training and self.store is not None:
            packet = self._encode_visits(x_TH, layout, at)
        else:
            codec = self._codecs.activation(x_TH.dtype) if training else self._codecs.evaluation(x_TH.dtype)
            kind = Kind.ACTIVATION if training else Kind.EVAL_ACTIVATION
            packet = self._encode(kind, codec, x_TH, plain_samples(layout), layout, at, self._draw(FORWARD, at))
        counters = self.stats.forward if training else self.stats.evaluation
        counters.add(x_TH.numel() * x_TH.element_size(), self._send(packet))

    def _encode_visits(self, x_TH: Tensor, layout: Layout, at: Position) -> Packet:
        assert self.store is not None
        changes = Changes(self.store, layout.ids)
        samples = self._plan(changes, layout, x_TH.shape[1])
        x = [x_TH[rows] for rows in layout.rows()]
        header = self._header(Kind.ACTIVATION, self._codecs.forward, x_TH, samples, layout, at)
        deltas = [s.form is Form.DELTA for s in samples]
        sizes = [
            self._codecs.visit_bytes(x_nH.shape[0], x_nH.shape[1], d, x_TH.dtype)
            for x_nH, d in zip(x, deltas, strict=True)
        ]
        ends = list(itertools.accumulate(sizes, initial=0))
        seen: list[Tensor] = []

        def encode(payload: Tensor, whole: Tensor | None) -> list[ops.Verdict]:
            verdicts: list[ops.Verdict] = []

            def code(run: range, m: list[Tensor]) -> None:
                visits = [
                    self._codecs.visit(x[i], m_nH, deltas[i], self._draw(FORWARD, at, i))
                    for i, m_nH in zip(run, m, strict=True)
                ]
                packet = whole if run.stop == len(samples) else None
                verdicts.append(ops.encode_batch(visits, payload[ends[run.start] : ends[run.stop]], packet=packet))

            seen.extend(self._visit(changes, samples, x_TH.shape[1], at, code))
            return verdicts

        packet = self._pack(header, ends[-1], encode, at)
        if at.micro_batch == 0:
            self._sample_errors(x, seen)
        self._keep(changes, packet)
        if self._goes_on:
            self._unsettled[at] = {s.id for s in samples if s.form is Form.FULL}
        return packet

    def _plan(self, changes: Changes, layout: Layout, hidden: int) -> list[Sample]:
        """What each sample's rows will be, from versions and shapes alone."""
        samples: list[Sample] = []
        bases: dict[int, tuple[int, tuple[int, ...]] | None] = {}
        for sample, start, count in zip(layout.ids, layout.starts, layout.counts, strict=True):
            shape = self._cached_shape(count, hidden)
            if sample not in bases:
                cached = changes.held(sample)
                bases[sample] = cached and (cached.version, tuple(cached.m_nH.shape))
            base = bases[sample]
            if base is not None and base[1] != shape:
                base = None  # the sample changed its length: a first visit again
            if any(sample in ids for ids in self._unsettled.values()):
                base = None  # the other end may not keep the first visit that is under way
            form = Form.DELTA if base is not None else Form.FULL
            if base is None and bases[sample] is None and not changes.may_keep(sample):
                form = Form.NOT_KEPT
            samples.append(Sample(sample, form, start, count, base[0] if base else 0, self.next_version))
            bases[sample] = None if form is Form.NOT_KEPT else (self.next_version, shape)
            self.next_version += 1
        return samples

    def _sample_errors(self, x: list[Tensor], seen: list[Tensor]) -> None:
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

    def _keeps(self, changes: Changes, sample: Sample) -> bool:
        return sample.form is not Form.NOT_KEPT

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
        g_TH = codec.decode(payload, layout.total, header.hidden).to(dtype)
        self.stats.backward.add(g_TH.numel() * g_TH.element_size(), size)
        return scatter(g_TH, layout)
