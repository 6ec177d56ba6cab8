"""One direction of a link whose samples are sent as changes of what both its ends hold of them: encoding, decoding.

Activations go this way with "aqsgd", and their gradients with `backward_method: "delta"`. Both are entries of one
message store. A packet says of every sample whether it is a first visit, which version it builds on and which it makes.

Of gradients, a packet begins with a bit for each token: 1 where its change is sent, 0 where its change would need a
larger scale than the gradient itself, which is then sent as it is (its m is taken as zero). So a change is never
quantized more coarsely than "direct" would quantize.

Where bits follow an error, those of a packet's changes and those of its first visits are the fewest that keep it, over
all its samples. A sample that comes again within a packet counts with the change from before the packet, which is
hardly smaller than the one it is sent as.

Shapes: H hidden size, T real tokens of a micro-batch, n of one sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from pipecomp.buffers.base import CachedActivation, PutCheck
from pipecomp.codecs.codecs import Quantized, torch_dtype
from pipecomp.codecs.link_codecs import VisitCodecs
from pipecomp.codecs.wire import Form, Header, Kind, Sample
from pipecomp.errors import BaseMismatchError, LinkError, WireError
from pipecomp.kernels import ops
from pipecomp.stages.link.boundary import Layout
from pipecomp.stages.link.changes import Changes
from pipecomp.stages.link.endpoint import Endpoint, Position
from pipecomp.stages.link.finite import check_finite
from pipecomp.stages.link.packet import Fitted, Packet


class Visits:
    """The samples of one direction, at one end of a link.

    end: whose codecs, store and staging. kind: of its packets.
    """

    def __init__(self, end: Endpoint, kind: Kind) -> None:
        self._end, self._kind = end, kind

    @property
    def _codecs(self) -> VisitCodecs:
        codecs = self._end.codecs
        found = codecs.gradients if self._kind is Kind.GRADIENT else codecs.activations
        assert found is not None
        return found

    def encode(
        self,
        x_TH: Tensor,
        layout: Layout,
        versions: Sequence[int],
        at: Position,
        dtype: torch.dtype,
        *,
        undecided: Iterable[int] = (),
        settled: bool = False,
    ) -> tuple[Packet, list[Tensor]]:
        """Encode a micro-batch and keep what it makes: the packet, and of each sample what the other end computes with.

        versions: that its samples will have. dtype: the stages' own. undecided: samples of which the other end may not
        keep what is under way. settled: NonFiniteError comes from here, not from the thread that sends.
        """
        changes, hidden = self._changes(layout), x_TH.shape[1]
        samples = self._plan(changes, layout, hidden, versions, set(undecided))
        rows = layout.rows()
        x = [self._codecs.before(x_TH[cut], s.form is Form.DELTA) for cut, s in zip(rows, samples, strict=True)]
        fitting = self._fitting(samples)
        codecs, smaller = (self._codecs, {}) if fitting else self._fitted(x, samples, changes)
        head, ends = _places(codecs, samples, hidden, dtype)
        change_T = torch.zeros(x_TH.shape[0] if head else 0, dtype=torch.uint8, device=x_TH.device)
        seen: list[Tensor] = []
        runs = self._runs(changes, samples, hidden, at, lambda s: s.form is not Form.NOT_KEPT, seen)

        def header(codecs: VisitCodecs) -> Header:
            return self._end.header(self._kind, codecs.change, hidden, samples, layout, at, dtype, codecs.first_bits)

        def visits(run: range, m: list[Tensor], payload: Tensor) -> list[ops.EncodeItem]:
            for i, m_nH in zip(run, m, strict=True):
                if head and samples[i].form is Form.DELTA:
                    smaller_n = smaller[i] if i in smaller else codecs.smaller(x[i] - m_nH, x[i])
                    change_T[rows[i]] = smaller_n.to(torch.uint8)
                    m_nH.masked_fill_(~smaller_n[:, None], 0.0)
            if head and run.stop == len(samples):
                payload[:head] = ops.pack_bits(change_T[None], 1)[0]
            return [
                codecs.visit(x[i], m_nH, samples[i].form is Form.DELTA, self._end.draw(self._kind, at, i))
                for i, m_nH in zip(run, m, strict=True)
            ]

        def encode(payload: Tensor, whole: Tensor | None) -> tuple[list[ops.FiniteFlag], Tensor | None]:
            verdicts, bits = [], None
            for run, m in runs:  # one, if `fitting`
                its, part = visits(run, m, payload), payload[ends[run.start] : ends[run.stop]]
                if fitting:
                    bits, verdict = fitting.encode_fewest(its, part)
                else:
                    verdict = ops.encode_batch(its, part, packet=whole if run.stop == len(samples) else None)
                verdicts.append(verdict)
            return verdicts, bits

        def describe(bits: int) -> tuple[Header, int]:
            fitted = codecs.of_fitted(bits, samples[0].form is Form.DELTA)
            return header(fitted), _places(fitted, samples, hidden, dtype)[1][-1]

        known = Fitted(self._kind, samples, describe) if fitting else header(codecs)
        packet = self._end.pack(known, ends[-1], encode, at)
        if settled:
            packet.settle()
        self._keep(changes, packet.settle)
        return packet, seen

    def decode(self, header: Header, payload: Tensor, layout: Layout, at: Position) -> tuple[Tensor, set[int]]:
        """Decode a micro-batch, float32 [T, H], and keep what it makes; also the samples that this end does not keep.

        Raises WireError for what decodes to NaN or Inf; on a GPU later, see `check_finite`.
        """
        samples, hidden, dtype = header.samples, header.hidden, torch_dtype(header.dtype)
        self._end.codec_of(header, self._codecs.change)
        if not self._codecs.may_have_first(header.first_bits):
            what = f"first visits at {header.first_bits or 'full'} bits: the ranks' configurations differ"
            raise LinkError(self._end.where(at, what))
        codecs = self._codecs.of_packet(header.bits, header.first_bits)
        for s in samples:
            if s.form is Form.PLAIN:
                raise LinkError(self._end.where(at, f"sample {s.id} came without a version"))
        head, ends = _places(codecs, samples, hidden, dtype)
        if ends[-1] != payload.numel():
            what = f"payload of {payload.numel()} bytes where its samples need {ends[-1]}"
            raise WireError(self._end.where(at, what))
        rows, changes = layout.rows(), self._changes(layout)
        direct_T = ops.unpack_bits(payload[None, :head], 1, layout.total)[0] == 0 if head else None
        seen: list[Tensor] = []

        def keeps(s: Sample) -> bool:
            return s.form is Form.DELTA or (s.form is Form.FULL and changes.may_keep(s.id))

        for run, m in self._runs(changes, samples, hidden, at, keeps, seen):
            for i, m_nH in zip(run, m, strict=True):
                if direct_T is not None and samples[i].form is Form.DELTA:
                    m_nH.masked_fill_(direct_T[rows[i], None], 0.0)
            arriving = [
                codecs.arriving(m_nH, samples[i].form is Form.DELTA, dtype) for i, m_nH in zip(run, m, strict=True)
            ]
            ops.decode_batch(payload[ends[run.start] : ends[run.stop]], arriving)
        x_TH = torch.cat(seen)
        what = "activations" if self._kind is Kind.ACTIVATION else "gradients"
        self._keep(changes, check_finite(self._end, x_TH, at, f"{what} of samples {[s.id for s in samples]}"))
        return x_TH, changes.dropped()

    def _changes(self, layout: Layout) -> Changes:
        """Begin a micro-batch."""
        assert self._end.store is not None
        return Changes(self._end.store, layout.ids, gradients=self._kind is Kind.GRADIENT)

    def _plan(
        self, changes: Changes, layout: Layout, hidden: int, versions: Sequence[int], undecided: set[int]
    ) -> list[Sample]:
        """What each sample's rows will be, from versions and shapes alone; `undecided` gets those that begin here."""
        samples: list[Sample] = []
        bases: dict[int, tuple[int, tuple[int, ...]] | None] = {}
        rows = zip(layout.ids, layout.starts, layout.counts, versions, strict=True)
        for sample, start, count, version in rows:
            shape = self._shape(count, hidden)
            if sample not in bases:
                cached = changes.held(sample)
                bases[sample] = cached and (cached.version, cached.m_nH.shape)
            held = bases[sample]
            # Of another length than before it is a first visit again.
            base = held if held is not None and held[1] == shape and sample not in undecided else None
            form = Form.FULL if base is None else Form.DELTA
            if held is None and not changes.may_keep(sample):
                form = Form.NOT_KEPT
            if form is Form.FULL and self._end.goes_on:  # where it comes again in this packet
                undecided.add(sample)
            samples.append(Sample(sample, form, start, count, base[0] if base else 0, version))
            bases[sample] = None if form is Form.NOT_KEPT else (version, shape)
        return samples

    def _keep(self, changes: Changes, settled: PutCheck | None) -> None:
        """Change the store; settled: raises, on a GPU, if nothing may be kept. See `MessageStore.put_many`."""
        put = changes.make(None if self._end.staging.immediate else settled)
        if self._end.compares:
            self._end.changed.update(put)

    def _fitting(self, samples: Sequence[Sample]) -> Quantized | None:
        """Find what finds a packet's bits while it encodes it: changes alone, or first visits, of different samples."""
        deltas = {s.form is Form.DELTA for s in samples}
        alike = len(deltas) == 1 and len({s.id for s in samples}) == len(samples)
        return self._codecs.fitting(deltas.pop()) if alike else None

    def _fitted(
        self, x: list[Tensor], samples: Sequence[Sample], changes: Changes
    ) -> tuple[VisitCodecs, dict[int, Tensor]]:
        """Make the codecs of a packet; and which rows of a sample lose less as changes, where that was found for it."""
        smaller: dict[int, Tensor] = {}
        if self._codecs.fixed:
            return self._codecs, smaller
        visits: dict[bool, list[ops.EncodeItem]] = {True: [], False: []}
        for i, (x_nH, s) in enumerate(zip(x, samples, strict=True)):
            delta = s.form is Form.DELTA
            cached = changes.held(s.id) if delta else None
            if cached is None or cached.m_nH.shape != self._shape(*x_nH.shape):
                visits[delta].append(self._codecs.visit(x_nH, None, delta)._replace(delta=False))
                continue
            m_nH = self._shown(cached.m_nH, s)
            if self._codecs.head_bytes(s.count):
                smaller_n = self._codecs.smaller(x_nH - m_nH, x_nH)
                m_nH = m_nH.masked_fill(~smaller_n[:, None], 0.0)
                if s.base == cached.version:  # else it comes again, and m will have moved
                    smaller[i] = smaller_n
            visits[True].append(self._codecs.visit(x_nH, m_nH, True))
        return self._codecs.fitted(visits[True], visits[False]), smaller

    def _runs(
        self,
        changes: Changes,
        samples: Sequence[Sample],
        hidden: int,
        at: Position,
        keeps: Callable[[Sample], bool],
        seen: list[Tensor],
    ) -> Iterator[tuple[range, list[Tensor]]]:
        """Give each run of different samples with their m, float32 [n, H], new where it is a first visit.

        Whoever asks encodes or decodes the samples before asking for the next run, which changes their m. keeps:
        whether this end keeps what is made of a sample. seen: gets what is computed with, of each.
        """
        end, canvas = self._end, self._end.canvas
        deltas = kept = 0
        for run in changes.runs():
            part = samples[run.start : run.stop]
            held = [self._base(s, changes, hidden, at) for s in part]
            m = [
                torch.empty(s.count, hidden, device=end.staging.device, dtype=torch.float32)
                if held_nH is None
                else self._shown(held_nH, s)
                for s, held_nH in zip(part, held, strict=True)
            ]
            yield run, m
            for s, held_nH, m_nH in zip(part, held, m, strict=True):
                deltas += held_nH is not None
                if held_nH is None:
                    m_nH = self._codecs.first_m(m_nH)
                seen.append(m_nH)
                if canvas is not None:
                    m_nH = canvas.spread(m_nH, s.start) if held_nH is None else canvas.put_(held_nH, s.start, m_nH)
                keep = keeps(s)
                kept += keep
                changes.hold(s.id, CachedActivation(s.version, m_nH) if keep else None)
        end.stats.count_visits(len(samples), deltas=deltas, kept=kept, gradients=self._kind is Kind.GRADIENT)

    def _shown(self, m_nH: Tensor, sample: Sample) -> Tensor:
        """What a visit shows of m."""
        return m_nH if self._end.canvas is None else self._end.canvas.take(m_nH, sample.start)

    def _base(self, sample: Sample, changes: Changes, hidden: int, at: Position) -> Tensor | None:
        """What a delta builds on, None of a first visit. BaseMismatchError if this end holds something else."""
        if sample.form is not Form.DELTA:
            return None
        cached = changes.held(sample.id)
        if cached is None or cached.version != sample.base:
            holds = "holds none" if cached is None else f"holds version {cached.version}"
            what = f"on version {sample.base}, this end {holds}"
        elif cached.m_nH.shape != self._shape(sample.count, hidden):
            what = f"of shape {(sample.count, hidden)} on a cached activation of {tuple(cached.m_nH.shape)}"
        else:
            return cached.m_nH
        raise BaseMismatchError(self._end.where(at, f"sample {sample.id}: delta {what}"))

    def _shape(self, count: int, hidden: int) -> tuple[int, int]:
        """Give the shape of m for a sample of [count, hidden]."""
        canvas = self._end.canvas
        if canvas is None:
            return count, hidden
        return canvas.canvas_lines, hidden // canvas.columns * canvas.canvas_columns


def _places(codecs: VisitCodecs, samples: Sequence[Sample], hidden: int, dtype: torch.dtype) -> tuple[int, list[int]]:
    """Where the samples' parts begin, and the end; before them the bits of all tokens, as many bytes as said."""
    head = codecs.head_bytes(sum(s.count for s in samples))
    first = codecs.first_visit(dtype)
    sizes = ((codecs.change if s.form is Form.DELTA else first).payload_bytes(s.count, hidden) for s in samples)
    return head, list(itertools.accumulate(sizes, initial=head))
