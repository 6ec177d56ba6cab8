"""Delta coding against cluster centers (AQ-SGD, appendix G), in place of each sample's own cached activation.

Shapes: C centers, T rows of a packet, H hidden size, U centers that rows of the packet build on.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pipecomp.buffers.base import MessageStore, PutCheck
from pipecomp.codecs.codecs import Clustered
from pipecomp.codecs.selection import LinkCodecs
from pipecomp.codecs.wire import Form, PacketHeader, PacketKind
from pipecomp.errors import BaseMismatchError, LinkError, StoreError, WireError
from pipecomp.kernels.reference.reproducible import random_bits
from pipecomp.stages.link.delta_coding import CodingResult, check_finite
from pipecomp.stages.link.layout import Layout
from pipecomp.stages.link.packet import MAX_TENSOR_BYTES, LinkContext, Packet, Position

# Note: Cluster coding
# Both ends of a link hold the same codebook. For each row the sender looks for the nearest centers, takes the one whose
# change needs the smallest scales, and sends its number and the quantized change. If the row itself needs no larger
# scales, it builds on number 0, the zero vector. Then both ends move the centers to what was decoded. A packet holds
# the version of the codebook that it builds on and the version that it makes, so a change is never applied to other
# centers.
#
# The message store holds blocks of centers. Changed blocks are put at the end of a step; after both ends have compared
# their stores, the codebook is loaded from them again.
#
# The choice of a center is the sender's alone. Everything that follows from packets is computed from the numbers and
# the decoded rows, with operations that give the same bits on every device and with any number of threads: sums are
# sums of whole numbers, whose order does not matter; everything else is one rounded operation on each value.

NEAR = 8  # centers nearest to a row, of which the one with the smallest scales is taken
MEMORY = 64  # rows: a packet with n of a center's rows moves it by at least n / (MEMORY + n) of the way to their mean
IDLE = 16  # times C rows without one of its own after which a center is free: a sixteenth of the mean center's share
OPENED = 2  # of a packet's rows one in so many, rounded up, opens a center at most
BLOCK = 16  # centers of an entry of a message store
_STATE = 3  # values of a center in such an entry beside its vector
_DIGIT = 1 << 20  # whole numbers up to this, and somewhat more, are exact in float32
_UNIT_BITS = 38  # of a packet's largest change, in the units that are summed: those of 2**24 rows fit 63 bits
_SCORES = 1 << 24  # distances that are computed at once


class ClusterCoder:
    """Encoder and decoder of activations at one end of a link. See Note: Cluster coding.

    Args:
        context: The endpoint's context.
        codecs: The link's codecs, with clusters.
        store: The endpoint's message store.

    The endpoint may replace codecs, when bits change, and the store.
    """

    def __init__(self, context: LinkContext, codecs: LinkCodecs, store: MessageStore) -> None:
        self._context, self.codecs, self.store = context, codecs, store
        self._book: Codebook | None = None
        self._unsettled: list[PutCheck] = []  # raise if a packet of this step had values that must not be stored

    @property
    def _codec(self) -> Clustered:
        assert self.codecs.clustered is not None
        return self.codecs.clustered

    def encode(self, x_TH: Tensor, layout: Layout, at: Position, version: int) -> tuple[Packet, Tensor, CodingResult]:
        """Encode a micro-batch and move the centers.

        Args:
            x_TH: Rows of all samples, in the training dtype.
            layout: Layout of the samples in x.
            at: Position in training.
            version: The codebook's new version.

        Returns:
            The packet, the values that the other end computes with, float32 [T, H], and the effect on the store.

        Raises:
            NonFiniteError: A value is NaN or Inf; nothing has changed. On a GPU the error comes later, and nothing of
                the step is stored.
        """
        context, book = self._context, self._codebook(x_TH.shape[1], at)
        number_T = self._nearest_centers(x_TH, book)
        y_TH = book.centers_CH[number_T]
        codec = self._codec.fitted(x_TH, y_TH)
        samples = layout.samples(Form.DELTA, book.version, version)
        header = context.header(
            PacketKind.ACTIVATION, codec.change, samples, at, layout, hidden=x_TH.shape[1], dtype=x_TH.dtype
        )
        packet = Packet(context, replace(header, method=codec.method), codec.payload_bytes(*x_TH.shape))
        seed = context.seed(PacketKind.ACTIVATION, at)
        flag = codec.encode(x_TH, number_T, y_TH, packet.payload, packet.whole, seed)
        packet.close([flag], at)
        if not context.staging.immediate:
            self._unsettled.append(packet.settle)
        book.learn(number_T, y_TH, version)
        return packet, y_TH, CodingResult(len(samples), len(samples))

    def decode(self, header: PacketHeader, payload: Tensor, at: Position) -> tuple[Tensor, CodingResult]:
        """Decode a micro-batch and move the centers.

        Args:
            header: The packet's header.
            payload: uint8 [bytes], on the device.
            at: Position in training.

        Returns:
            The values, float32 [T, H], and the effect on the store.

        Raises:
            LinkError: The peer encodes differently.
            BaseMismatchError: The changes build on another version of the centers.
            WireError: The payload has another length, or decodes to NaN or Inf. On a GPU the error for NaN or Inf comes
                later, and nothing of the step is stored.
        """
        context, codec, samples = self._context, self._matching_codec(header, at), header.samples
        tokens = sum(s.count for s in samples)
        expected = codec.payload_bytes(tokens, header.hidden)
        if payload.numel() != expected:
            raise WireError(context.error(at, f"payload of {payload.numel()} bytes where {expected} were expected"))
        book = self._codebook(header.hidden, at)
        if {(s.form, s.base) for s in samples} != {(Form.DELTA, book.version)}:
            base = samples[0].base
            what = f"changes from version {base} of the cluster centers, this end holds version {book.version}"
            raise BaseMismatchError(context.error(at, what))
        versions = {s.version for s in samples}
        if len(versions) > 1 or min(versions) <= book.version:
            raise WireError(context.error(at, f"versions {sorted(versions)} made of version {book.version}"))
        number_T = codec.numbers(payload, tokens)
        y_TH = book.centers_CH[number_T]
        codec.decode(payload, y_TH)
        settled = check_finite(context, y_TH, at, f"activations of samples {[s.id for s in samples]}")
        if settled is not None:
            self._unsettled.append(settled)
        book.learn(number_T, y_TH, versions.pop())
        return y_TH, CodingResult(len(samples), len(samples))

    def end_step(self) -> list[int]:
        """Put the blocks of centers that a step has changed into the store; return their numbers."""
        if self._book is None:
            return []
        unsettled, self._unsettled = self._unsettled, []

        def settled() -> None:
            for each in unsettled:
                each()

        puts = [(block, self._book.version, state) for block, state in self._book.take_changed()]
        self.store.put_many(puts, settled)
        return [block for block, _, _ in puts]

    def reload(self) -> None:
        """Drop the codebook; the next packet loads it from the store, without changes that were not put."""
        self._book, self._unsettled = None, []

    def _codebook(self, hidden: int, at: Position) -> Codebook:
        """Return the codebook for rows of `hidden` values; the first call loads it from the store."""
        clusters = self._codec.clusters
        if self._book is None:
            if 4 * clusters * hidden > MAX_TENSOR_BYTES:
                what = f"{clusters} cluster centers of {hidden} values: above {MAX_TENSOR_BYTES} bytes"
                raise WireError(self._context.error(at, what))
            book = Codebook(clusters, hidden, self._context.staging.device)
            blocks = [held.sample for held in self.store.inventory()]
            for block, cached in zip(blocks, self.store.get(blocks), strict=True):
                assert cached is not None
                try:
                    book.load(block, cached.version, cached.m_nH)
                except ValueError as error:
                    raise StoreError(f"store of link {self._context.link}: {error}") from error
            self._book = book
        if self._book.centers_CH.shape[1] != hidden:
            what = f"rows of {hidden} values, cluster centers of {self._book.centers_CH.shape[1]}"
            raise LinkError(self._context.error(at, what))
        return self._book

    def _nearest_centers(self, x_TH: Tensor, book: Codebook) -> Tensor:
        """Choose each row's center, int64 [T]: the one with the smallest scales, among the nearest and zero."""
        number_T = torch.zeros(x_TH.shape[0], dtype=torch.int64, device=x_TH.device)
        squared_scales = self.codecs.activations.squared_scales
        least_T = squared_scales(x_TH)
        for near_T in book.nearest(x_TH, NEAR).unbind(1):
            scales_T = squared_scales(x_TH - book.centers_CH[near_T])
            smaller_T = scales_T < least_T
            number_T, least_T = torch.where(smaller_T, near_T, number_T), torch.where(smaller_T, scales_T, least_T)
        return number_T

    def _matching_codec(self, header: PacketHeader, at: Position) -> Clustered:
        codec = self._codec
        if header.method is not codec.method or not codec.change.allows(header.bits) or header.first_bits:
            allowed = codec.change.error or codec.change.bits
            got = f"{header.method.name.lower()} values of {header.bits} bits"
            what = (
                f"{got}, this rank expects changes from cluster centers of {allowed}: the ranks' configurations differ"
            )
            raise LinkError(self._context.error(at, what))
        return codec.with_bits(header.bits)


class Codebook:
    """Cluster centers at one end of a link: MacQueen's online k-means over decoded rows.

    Number 0 is the zero vector, which never moves. Every other center is the mean of the rows that were sent as changes
    from it, of at least the last `MEMORY`, because activations move while the model learns. The rows of a packet count
    together. Free centers are opened at rows of the packet.

    Attributes:
        centers_CH: float32.
        version: Version made by the last packet; 0 before the first.
    """

    def __init__(self, clusters: int, hidden: int, device: torch.device) -> None:
        self.clusters = clusters
        self.centers_CH = torch.zeros(clusters, hidden, device=device, dtype=torch.float32)
        self.version = 0
        self._counts_C = torch.zeros(clusters, dtype=torch.int64, device=device)  # rows, at most MEMORY; 0: not open
        self._used_C = torch.zeros_like(self._counts_C)  # round in which a row last built on it; C rows make a round
        self._rows = 0  # of all packets
        self._changed_C = torch.zeros(clusters, dtype=torch.bool, device=device)

    def nearest(self, x_TH: Tensor, most: int) -> Tensor:
        """Return the numbers of the centers nearest to each row, int64 [T, ≤ most]; devices may differ."""
        x_TH = x_TH.to(torch.float32)
        half_C = self.centers_CH.square().sum(1).mul_(0.5)
        half_C[1:].masked_fill_(self._counts_C[1:] == 0, torch.inf)
        rows, most = max(1, _SCORES // self.clusters), min(most, self.clusters)
        scores = (torch.addmm(half_C, part, self.centers_CH.T, alpha=-1) for part in x_TH.split(rows))
        return torch.cat([part.topk(most, largest=False, sorted=False).indices for part in scores])

    def learn(self, number_T: Tensor, y_TH: Tensor, version: int) -> None:
        """Move the centers to the rows of a packet.

        Args:
            number_T: Numbers of the centers that its rows build on, int64.
            y_TH: Decoded rows, float32, finite.
            version: The codebook's new version.
        """
        if not number_T.numel():
            return
        change_TH = y_TH - self.centers_CH[number_T]
        self._rows += number_T.numel()
        now = self._rows // self.clusters
        opens, places = self._openings(number_T, now)
        moves_T = number_T > 0
        moves_T[opens] = False
        self._move(number_T, change_TH, moves_T, now)
        self.centers_CH[places] = y_TH[opens]
        self._counts_C[places] = 1
        self._used_C[places] = now
        self._changed_C[places] = True
        self._changed_C[0] = True  # holds the number of rows
        self.version = version

    def _openings(self, number_T: Tensor, now: int) -> tuple[Tensor, Tensor]:
        """Choose the rows that open centers, and the numbers of these: int64 [n] each.

        Rows are drawn at random, equally at both ends, so that dense regions get more centers. Centers that were never
        opened come first, then those longest unused.
        """
        used_C = torch.where(self._counts_C > 0, self._used_C, -IDLE)
        used_C[number_T] = now
        used_C[0] = now
        order_C = torch.sort(used_C, stable=True).indices
        free = int((used_C <= now - IDLE).sum())
        rows = number_T.numel()
        n = min(free, -(-rows // OPENED))
        draw_T = random_bits(self._rows, 0, rows, number_T.device)
        return torch.sort(draw_T, stable=True).indices[:n], order_C[:n]

    def _move(self, number_T: Tensor, change_TH: Tensor, moves_T: Tensor, now: int) -> None:
        """Move centers toward the mean of their rows: c ← c + Σ (y − c) / (min(N, MEMORY) + n)."""
        found_U, place_T = torch.unique(number_T, return_inverse=True)
        whole_TH, unit = _whole(change_TH * moves_T[:, None])
        sums_UH = torch.zeros(len(found_U), change_TH.shape[1], dtype=torch.int64, device=change_TH.device)
        sums_UH.index_add_(0, place_T, whole_TH)
        n_U = torch.zeros_like(found_U).index_add_(0, place_T, moves_T.to(torch.int64))
        weight_U = (self._counts_C[found_U] + n_U).clamp(min=1)
        centers_UH = self.centers_CH[found_U].double() + sums_UH.double() * unit / weight_U.double()[:, None]
        self.centers_CH[found_U] = centers_UH.float()
        self._counts_C[found_U] = (self._counts_C[found_U] + n_U).clamp(max=MEMORY)
        self._used_C[found_U] = now
        self._changed_C[found_U] = True

    def take_changed(self) -> list[tuple[int, Tensor]]:
        """Return the blocks that changed since the last call, for `load`.

        Returns:
            Numbers of blocks, each with its centers and their counts, float32 [≤ BLOCK, H + 3].
        """
        blocks = torch.unique(self._changed_C.nonzero()[:, 0] // BLOCK).tolist()
        self._changed_C.zero_()
        counts_C, used_C = self._counts_C.clone(), self._used_C.clone()
        used_C[0], counts_C[0] = divmod(self._rows, self.clusters)
        state_C3 = torch.stack([counts_C, used_C % _DIGIT, used_C // _DIGIT], dim=1).float()
        changed = []
        for block in blocks:
            rows = slice(block * BLOCK, (block + 1) * BLOCK)
            changed.append((block, torch.cat([self.centers_CH[rows], state_C3[rows]], dim=1)))
        return changed

    def load(self, block: int, version: int, state: Tensor) -> None:
        """Restore a block from `take_changed`, at this version. Raises ValueError if it is not a block of this book."""
        rows = slice(block * BLOCK, min((block + 1) * BLOCK, self.clusters))
        expected = (rows.stop - rows.start, self.centers_CH.shape[1] + _STATE)
        if rows.start >= self.clusters or tuple(state.shape) != expected:
            raise ValueError(f"block {block} of cluster centers has shape {tuple(state.shape)}, expected {expected}")
        self.centers_CH[rows] = state[:, :-_STATE]
        counts, low, high = state[:, -_STATE:].to(torch.int64).unbind(1)
        self._counts_C[rows], self._used_C[rows] = counts, low + high * _DIGIT
        self.version = max(self.version, version)
        if block == 0:
            self._rows = max(self._rows, int(self._used_C[0]) * self.clusters + int(counts[0]))
            self._counts_C[0] = self._used_C[0] = 0
        else:  # block 0, with the number of rows, may be lost
            self._rows = max(self._rows, int(self._used_C[rows].max()) * self.clusters)


def _whole(x_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Return x as whole numbers of a unit, int64, and the unit: 2**-38 of the power of two above the largest magnitude.

    The unit is read from the bits of a float32 and made from those of a float64, so that nothing is rounded.
    """
    exponent = (x_TH.abs().amax().view(torch.int32).to(torch.int64) >> 23) - 126  # the largest is below 2**exponent
    scale, unit = (((1023 + sign * (_UNIT_BITS - exponent)) << 52).view(torch.float64) for sign in (1, -1))
    return (x_TH.double() * scale).round_().to(torch.int64), unit
