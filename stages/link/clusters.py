"""Activations of a link that are sent as changes from cluster centers (AQ-SGD, appendix G): coding and keeping.

Both ends of a link hold the same codebook. The sender looks for the centers nearest to each row, takes the one whose
change needs the smallest scales, and sends its number and the quantized change. A row whose own scales are no larger
builds on number 0, the zero vector, which is to send it as it is. Then both ends let the centers follow what was
decoded. Every packet says on which version of the codebook it builds and which it makes, so a change can never be
applied to other centers.

In the link's message store an entry is a block of centers. The blocks that a step has changed are put at its end; from
what is stored the codebook is made again after both ends have compared what they hold.

Shapes: T real tokens of a micro-batch, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipecomp.buffers.base import PutCheck
from pipecomp.codecs.clustered import Clustered
from pipecomp.codecs.wire import Form, Header, Kind, Sample
from pipecomp.errors import BaseMismatchError, LinkError, StoreError, WireError
from pipecomp.kernels import ops
from pipecomp.stages.link.boundary import Layout
from pipecomp.stages.link.codebook import Codebook
from pipecomp.stages.link.endpoint import MAX_TENSOR_BYTES, Endpoint, Position
from pipecomp.stages.link.finite import check_finite
from pipecomp.stages.link.packet import Packet

NEAR = 8  # centers nearest to a row, of which the one with the smallest scales is taken


class Clusters:
    """The activations of one end of a link. end: whose codecs, store and staging."""

    def __init__(self, end: Endpoint) -> None:
        self._end = end
        self._book: Codebook | None = None
        self._unsettled: list[PutCheck] = []  # raise if a packet of this step had what must not be kept

    @property
    def _codec(self) -> Clustered:
        assert self._end.codecs.clustered is not None
        return self._end.codecs.clustered

    def encode(self, x_TH: Tensor, layout: Layout, at: Position, version: int) -> tuple[Packet, Tensor]:
        """Encode a micro-batch and let the centers follow it; the packet, and what the other end computes with.

        version: that it makes. NonFiniteError on the host leaves everything as it was; on a GPU `end_step` then keeps
        nothing of the step.
        """
        book = self._codebook(x_TH.shape[1], at)
        number_T = self._chosen(x_TH, book)
        y_TH = book.centers_CH[number_T]
        codec = self._codec.fitted(x_TH, y_TH)
        samples = layout.samples(Form.DELTA, book.version, version)
        header = self._end.header(Kind.ACTIVATION, codec.change, x_TH.shape[1], samples, layout, at, x_TH.dtype)
        seed = self._end.draw(Kind.ACTIVATION, at)

        def encode(payload: Tensor, whole: Tensor | None) -> tuple[list[ops.FiniteFlag], None]:
            return [codec.encode(x_TH, number_T, y_TH, payload, whole, seed)], None

        packet = self._end.pack(replace(header, method=codec.method), codec.payload_bytes(*x_TH.shape), encode, at)
        if not self._end.staging.immediate:
            self._unsettled.append(packet.settle)
        self._learn(book, number_T, y_TH, samples)
        return packet, y_TH

    def decode(self, header: Header, payload: Tensor, at: Position) -> Tensor:
        """Decode a micro-batch, float32 [T, H], and let the centers follow it.

        Raises WireError for what decodes to NaN or Inf; on a GPU later, and then `end_step` keeps nothing of the step.
        """
        codec = self._codec_of(header, at)
        tokens = sum(s.count for s in header.samples)
        expected = codec.payload_bytes(tokens, header.hidden)
        if payload.numel() != expected:
            raise WireError(self._end.where(at, f"payload of {payload.numel()} bytes where {expected} were expected"))
        book = self._codebook(header.hidden, at)
        self._check_versions(header, book, at)
        number_T = codec.numbers(payload, tokens)
        y_TH = book.centers_CH[number_T]
        codec.decode(payload, y_TH)
        settled = check_finite(self._end, y_TH, at, f"activations of samples {[s.id for s in header.samples]}")
        if settled is not None:
            self._unsettled.append(settled)
        self._learn(book, number_T, y_TH, header.samples)
        return y_TH

    def end_step(self) -> None:
        """Put the centers that a step has changed into the store."""
        if self._book is None or self._end.store is None:
            return
        unsettled, self._unsettled = self._unsettled, []

        def settled() -> None:
            for each in unsettled:
                each()

        puts = [(block, self._book.version, state) for block, state in self._book.take_changed()]
        self._end.store.put_many(puts, settled)
        if self._end.compares:
            self._end.changed.update(block for block, _, _ in puts)

    def reload(self) -> None:
        """Go on with what the store holds: of the next packet on, and without what was not put."""
        self._book, self._unsettled = None, []

    def _codebook(self, hidden: int, at: Position) -> Codebook:
        """Give the codebook of rows of so many values, loaded from the store if it is not here."""
        if self._book is None:
            if 4 * self._codec.clusters * hidden > MAX_TENSOR_BYTES:
                what = f"{self._codec.clusters} cluster centers of {hidden} values: above {MAX_TENSOR_BYTES} bytes"
                raise WireError(self._end.where(at, what))
            self._book = self._loaded(hidden)
        if self._book.centers_CH.shape[1] != hidden:
            what = f"rows of {hidden} values, cluster centers of {self._book.centers_CH.shape[1]}"
            raise LinkError(self._end.where(at, what))
        return self._book

    def _loaded(self, hidden: int) -> Codebook:
        book, store = Codebook(self._codec.clusters, hidden, self._end.staging.device), self._end.store
        assert store is not None
        blocks = [held.sample for held in store.inventory()]
        for block, cached in zip(blocks, store.get(blocks), strict=True):
            assert cached is not None
            try:
                book.load(block, cached.version, cached.m_nH)
            except ValueError as error:
                raise StoreError(f"store of link {self._end.index}: {error}") from error
        return book

    def _chosen(self, x_TH: Tensor, book: Codebook) -> Tensor:
        """Choose each row's center, int64 [T]: of the nearest few, and zero, that which leaves the smallest scales."""
        number_T = torch.zeros(x_TH.shape[0], dtype=torch.int64, device=x_TH.device)
        squared_scales = self._end.codecs.activations.squared_scales
        least_T = squared_scales(x_TH)
        for near_T in book.nearest(x_TH, NEAR).unbind(1):
            scales_T = squared_scales(x_TH - book.centers_CH[near_T])
            smaller_T = scales_T < least_T
            number_T, least_T = torch.where(smaller_T, near_T, number_T), torch.where(smaller_T, scales_T, least_T)
        return number_T

    def _codec_of(self, header: Header, at: Position) -> Clustered:
        codec = self._codec
        if header.method is not codec.method or not codec.may_have(header.bits) or header.first_bits:
            allowed = codec.change.error or codec.change.bits
            got = f"{header.method.name.lower()} values of {header.bits} bits"
            what = (
                f"{got}, this rank expects changes from cluster centers of {allowed}: the ranks' configurations differ"
            )
            raise LinkError(self._end.where(at, what))
        return codec.of_packet(header.bits)

    def _check_versions(self, header: Header, book: Codebook, at: Position) -> None:
        if {(s.form, s.base) for s in header.samples} != {(Form.DELTA, book.version)}:
            base = header.samples[0].base
            what = f"changes from version {base} of the cluster centers, this end holds version {book.version}"
            raise BaseMismatchError(self._end.where(at, what))
        versions = {s.version for s in header.samples}
        if len(versions) > 1 or min(versions) <= book.version:
            raise WireError(self._end.where(at, f"versions {sorted(versions)} made of version {book.version}"))

    def _learn(self, book: Codebook, number_T: Tensor, y_TH: Tensor, samples: Sequence[Sample]) -> None:
        book.learn(number_T, y_TH, samples[0].version)
        count = len(samples)
        self._end.stats.count_visits(count, deltas=count, kept=count, gradients=False)
