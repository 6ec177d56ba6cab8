"""Layout of a micro-batch on a link: real tokens of padded samples, packed documents, or windows of cropped images.

Shapes: B rows of the batch, each a sample or several packed ones, S tokens with padding, H hidden size, T real tokens
of all samples. The tokens of an image are the h lines of its map, and H is their width times channels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipecomp.buffers.base import GRADIENT
from pipecomp.codecs.wire import NO_DIGEST, BatchDigest, Form, PacketHeader, Sample
from pipecomp.errors import DataError, WireError
from pipecomp.stages.link.crop_canvas import CropCanvas


@dataclass(frozen=True, slots=True)
class Layout:
    """Real tokens of [B, S]: sample i has counts[i] of them, from starts[i].

    With a canvas there is no padding: starts are the cells of the canvas where the samples' windows begin, counts their
    lines, and `tokens` the cells of the canvas.

    Packed samples share rows. One that starts at 0 begins a row, the others begin where the one before ends; padding is
    at the end of rows only.
    """

    ids: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: int  # S
    canvas: CropCanvas | None = None
    packed: bool = False
    digest: BatchDigest = NO_DIGEST  # travels with the micro-batch to the last stage

    @property
    def batch_size(self) -> int:
        """B, the rows of the batch."""
        return sum(start == 0 for start in self.starts) if self.packed else len(self.ids)

    @property
    def total(self) -> int:
        """T, the number of real tokens."""
        return sum(self.counts)

    @property
    def rows_each(self) -> int:
        """Rows of a sample in the stages' tensor: S, or h with a canvas."""
        return self.tokens if self.canvas is None else self.canvas.lines

    @property
    def full(self) -> bool:
        """True if there is no padding."""
        if self.packed:
            return self.total == self.batch_size * self.tokens
        return self.canvas is not None or all(count == self.tokens for count in self.counts)

    def spans(self) -> list[tuple[int, int]]:
        """Return where the real tokens of each of the B rows begin and end."""
        if not self.packed:
            return [(start, start + count) for start, count in zip(self.starts, self.counts, strict=True)]
        ends: list[tuple[int, int]] = []
        for start, count in zip(self.starts, self.counts, strict=True):
            ends[len(ends) - (start > 0) :] = [(0, start + count)]
        return ends

    def samples(self, form: Form, base: int = 0, version: int = 0) -> list[Sample]:
        """Return the packet's sample records, all with this form, base and version."""
        rows = zip(self.ids, self.starts, self.counts, strict=True)
        return [Sample(i, form, start, count, base, version) for i, start, count in rows]

    def rows(self) -> list[slice]:
        """Return each sample's rows in [T, H]."""
        return [slice(a, b) for a, b in itertools.pairwise(itertools.accumulate(self.counts, initial=0))]

    def runs(self) -> list[range]:
        """Cut the samples where one repeats, so that no run has a sample twice; mostly one run."""
        runs, start, seen = list[range](), 0, set[int]()
        for i, sample in enumerate(self.ids):
            if sample in seen:
                runs.append(range(start, i))
                start, seen = i, set()
            seen.add(sample)
        return [*runs, range(start, len(self.ids))]

    def mask_BS(self, device: torch.device) -> Tensor | None:
        """Return the attention mask [B, S], int64 with ones at real tokens; None if all tokens are real.

        Packed samples have no mask either: `position_ids` separate them, and each padding token counts as a sample.
        """
        return None if self.packed else self.real_BS(device)

    def real_BS(self, device: torch.device) -> Tensor | None:
        """Return int64 [B, S] with ones at real tokens; None if all tokens are real."""
        if self.full:
            return None
        starts_B, ends_B = _to_device(zip(*self.spans(), strict=True), device)
        return _real(starts_B, ends_B, self.tokens).to(torch.int64)

    def position_ids(self, device: torch.device) -> Tensor | None:
        """Return the places of tokens in their packed samples, int64 [B, S], 0 for padding; None if nothing is packed.

        Example:
            >>> Layout((7, 8, 9), (0, 2, 0), (2, 1, 2), 3, packed=True).position_ids(torch.device("cpu"))
            tensor([[0, 1, 0], [0, 1, 0]])
        """
        if not self.packed:
            return None
        row, cells = -1, []
        for start in self.starts:
            row += start == 0
            cells.append(row * self.tokens + start)
        first_N, count_N = _to_device([cells, self.counts], device)
        cell_C = torch.arange(self.batch_size * self.tokens, device=device)
        number_C = torch.searchsorted(first_N, cell_C, right=True) - 1
        place_C = cell_C - first_N[number_C]
        return (place_C * (place_C < count_N[number_C])).view(self.batch_size, self.tokens)

    def cu_seq_lens(self) -> Tensor | None:
        """Return where packed samples begin in [B · S], int32 on the host, and last B · S; None if nothing is packed.

        Each token of padding counts as a sample. Variable-length attention needs it.
        """
        if not self.packed:
            return None
        place_C = self.position_ids(torch.device("cpu"))
        assert place_C is not None
        starts = (place_C.view(-1) == 0).nonzero()[:, 0]
        return torch.cat([starts, torch.tensor([place_C.numel()])]).to(torch.int32)

    def unpack(self, x: Tensor, fill: float) -> Tensor:
        """Convert values of packed rows, [B, S, …], to values of samples, [N, n, …]; n: tokens of the longest sample.

        Args:
            x: Values by row and token.
            fill: Value of padding.
        """
        rows_T = gather(x.flatten(2) if x.dim() > 2 else x[..., None], self)
        parts = [part.reshape(-1, *x.shape[2:]) for part in rows_T.split(list(self.counts))]
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=fill)

    @classmethod
    def of_header(cls, header: PacketHeader, canvas: CropCanvas | None = None) -> Layout:
        """Return the layout of a packet.

        Raises WireError if a window lies outside the link's canvas, and for an id out of range: in a store it would be
        another sample's gradient.
        """
        s = header.samples
        for x in s:
            if x.id & GRADIENT:
                raise WireError(f"{header.describe()}: sample id {x.id} is out of range: 0 to 2**63 - 1")
        if canvas is not None:
            for x in s:
                if header.tokens != canvas.cells or x.count != canvas.lines or not canvas.has(x.start):
                    raise WireError(
                        f"{header.describe()}: sample {x.id} has {x.count} lines from cell {x.start} of "
                        f"{header.tokens}, not a window of {canvas}"
                    )
        ids, _, starts, counts, *_ = zip(*s, strict=True) if s else ((),) * 4
        if header.packed:
            end = 0
            for x in s:
                if canvas is not None or not x.count or x.start not in (0, end):
                    raise WireError(
                        f"{header.describe()}: packed sample {x.id} has {x.count} tokens from {x.start}; expected at "
                        f"least 1, from 0 or {end}"
                    )
                end = x.start + x.count
        digest = BatchDigest(header.tokens_crc, header.labels_crc)
        return cls(ids, starts, counts, header.tokens, canvas, header.packed, digest)

    @classmethod
    def of_lengths(cls, ids: tuple[int, ...], lengths: Sequence[Sequence[int]], tokens: int) -> Layout:
        """Return the layout of packed samples.

        Args:
            ids: Sample ids, row by row.
            lengths: For each row the tokens of its samples: at least one sample, of at least one token.
            tokens: S.

        Raises:
            DataError: The samples do not fit their rows, or the number of ids differs from the number of samples.
        """
        starts: list[int] = []
        for row in lengths:
            if not row or min(row) < 1 or sum(row) > tokens:
                raise DataError(f"a packed row of {tokens} tokens has samples of {list(row)} tokens")
            starts += itertools.accumulate(row[:-1], initial=0)
        if len(starts) != len(ids):
            raise DataError(f"a batch of {len(starts)} packed samples has {len(ids)} ids")
        return cls(ids, tuple(starts), tuple(itertools.chain(*lengths)), tokens, packed=True)

    @classmethod
    def of_shifts(cls, ids: tuple[int, ...], shifts_B2: Tensor | None, canvas: CropCanvas) -> Layout:
        """Return the layout of images that crops moved.

        Args:
            ids: Sample ids.
            shifts_B2: Pixels down and right, int64 [B, 2]; None if no image was moved.
            canvas: The link's canvas.

        Raises:
            DataError: Shifts of another shape, or beyond the canvas's margin.
        """
        moved = [[0, 0]] * len(ids) if shifts_B2 is None else shifts_B2.tolist()
        if shifts_B2 is not None and tuple(shifts_B2.shape) != (len(ids), 2):
            raise DataError(f"shifts have shape {tuple(shifts_B2.shape)}, expected {(len(ids), 2)}: down and right")
        starts = tuple(canvas.start(down, right, i) for i, (down, right) in zip(ids, moved, strict=True))
        return cls(ids, starts, (canvas.lines,) * len(ids), canvas.cells, canvas)

    @classmethod
    def of_mask(cls, ids: tuple[int, ...], mask_BS: Tensor | None, tokens: int) -> Layout:
        """Return the layout of an attention mask [B, S], padded left or right; None if all tokens are real.

        Raises DataError if the real tokens of a sample are not contiguous, or the number of ids is not B.
        """
        n = len(ids)
        if mask_BS is None:
            return cls(ids, (0,) * n, (tokens,) * n, tokens)
        if tuple(mask_BS.shape) != (n, tokens):
            raise DataError(f"attention_mask has shape {tuple(mask_BS.shape)}, expected {(n, tokens)} for {n} samples")
        real_BS = mask_BS.detach().cpu().bool()
        counts_B = real_BS.sum(1)
        starts_B = real_BS.int().argmax(1)
        run_BS = _real(starts_B, starts_B + counts_B, tokens)
        if not torch.equal(run_BS, real_BS):
            i = int((run_BS != real_BS).any(1).nonzero()[0])
            raise DataError(f"attention_mask of sample {ids[i]} has padding between real tokens: pad left or right")
        return cls(ids, tuple(starts_B.tolist()), tuple(counts_B.tolist()), tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Shape of the values between two stages, common to both ends of their link.

    Attributes:
        width: H.
        settings: JSON values that both ends compare.
        rows: Rows of each sample; None if samples differ.
        canvas: Canvas of images moved by crops.
    """

    width: int
    settings: dict[str, Any]
    rows: int | None = None
    canvas: CropCanvas | None = None


def gradient_unit(samples: int, loss_scale: float) -> float:
    """Return the factor that makes a sample's gradients of different steps comparable.

    Each sample has an equal share in the loss, which is multiplied by the loss scale. 4096 brings gradients of language
    models into the range of float16, for stores with 16 bits.

    Args:
        samples: Samples that share the loss.
        loss_scale: The step's loss scale.
    """
    return 4096.0 * samples / loss_scale


def _to_device(rows: Iterable[Sequence[int]], device: torch.device) -> tuple[Tensor, ...]:
    """Copy short rows to the device, int64."""
    # From pageable memory the driver copies up to 64 KiB without waiting for the GPU: two short rows, not a mask.
    return torch.tensor(list(rows)).to(device, non_blocking=True).unbind()


def _real(starts_B: Tensor, ends_B: Tensor, tokens: int) -> Tensor:
    """Return bool [B, S], true at real tokens."""
    token_S = torch.arange(tokens, device=starts_B.device)
    return (token_S >= starts_B[:, None]) & (token_S < ends_B[:, None])


def gather(x_BSH: Tensor, layout: Layout) -> Tensor:
    """Return the real tokens, [T, H], of [B, S, H]; a view if there is no padding."""
    if layout.full:
        return x_BSH.reshape(-1, x_BSH.shape[-1])
    return torch.cat([x_BSH[i, start:end] for i, (start, end) in enumerate(layout.spans())])


def scatter(x_TH: Tensor, layout: Layout) -> Tensor:
    """Return [B, S, H] with the real tokens of [T, H], and zeros as padding; a view if there is no padding."""
    hidden = x_TH.shape[-1]
    if layout.full:
        return x_TH.reshape(layout.batch_size, layout.rows_each, hidden)
    x_BSH, begin = x_TH.new_zeros(layout.batch_size, layout.tokens, hidden), 0
    for i, (start, end) in enumerate(layout.spans()):
        x_BSH[i, start:end] = x_TH[begin : begin + end - start]
        begin += end - start
    return x_BSH
