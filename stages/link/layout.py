"""Layout of a micro-batch on a link: the real tokens of padded samples, or the windows of cropped images.

Shapes: B samples, S tokens with padding, H hidden size, T real tokens of all samples. The tokens of an image are the h
lines of its map, and H is their width times channels.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipecomp.buffers.base import GRADIENT
from pipecomp.codecs.wire import Form, PacketHeader, Sample
from pipecomp.errors import DataError, WireError
from pipecomp.stages.link.crop_canvas import CropCanvas


@dataclass(frozen=True, slots=True)
class Layout:
    """Real tokens of [B, S]: sample i has counts[i] of them, from starts[i].

    With a canvas there is no padding: starts are the cells of the canvas where the samples' windows begin, counts their
    lines, and `tokens` the cells of the canvas.
    """

    ids: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: int  # S
    canvas: CropCanvas | None = None

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
        return self.canvas is not None or all(count == self.tokens for count in self.counts)

    def samples(self, form: Form, base: int = 0, version: int = 0) -> list[Sample]:
        """Return the packet's samples, all in one form."""
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
        """Return the attention mask [B, S], int64 with ones at real tokens; None if all tokens are real."""
        if self.full:
            return None
        # From pageable memory the driver copies up to 64 KiB without waiting for the GPU: two short rows, not a mask.
        starts_B, counts_B = torch.tensor([self.starts, self.counts]).to(device, non_blocking=True).unbind()
        return _real(starts_B, counts_B, self.tokens).to(torch.int64)

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
        return cls(ids, starts, counts, header.tokens, canvas)

    @classmethod
    def of_shifts(cls, ids: tuple[int, ...], shifts_B2: Tensor | None, canvas: CropCanvas) -> Layout:
        """Return the layout of images that crops moved.

        Args:
            ids: Of the samples.
            shifts_B2: Pixels down and right, int64 [B, 2]; None if no image was moved.
            canvas: Of the link.

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
        run_BS = _real(starts_B, counts_B, tokens)
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
        rows: Of every sample; None if samples differ.
        canvas: Of images moved by crops.
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
        loss_scale: Of the step.
    """
    return 4096.0 * samples / loss_scale


def _real(starts_B: Tensor, counts_B: Tensor, tokens: int) -> Tensor:
    """Return bool [B, S], true at real tokens."""
    token_S = torch.arange(tokens, device=starts_B.device)
    return (token_S >= starts_B[:, None]) & (token_S < (starts_B + counts_B)[:, None])


def gather(x_BSH: Tensor, layout: Layout) -> Tensor:
    """Return the real tokens, [T, H], of [B, S, H]; a view if there is no padding."""
    if layout.full:
        return x_BSH.reshape(-1, x_BSH.shape[-1])
    return torch.cat([x_BSH[i, a : a + n] for i, (a, n) in enumerate(zip(layout.starts, layout.counts, strict=True))])


def scatter(x_TH: Tensor, layout: Layout) -> Tensor:
    """Return [B, S, H] with the real tokens of [T, H], and zeros as padding; a view if there is no padding."""
    hidden = x_TH.shape[-1]
    if layout.full:
        return x_TH.reshape(len(layout.ids), layout.rows_each, hidden)
    x_BSH = x_TH.new_zeros(len(layout.ids), layout.tokens, hidden)
    for i, rows in enumerate(layout.rows()):
        x_BSH[i, layout.starts[i] : layout.starts[i] + layout.counts[i]] = x_TH[rows]
    return x_BSH
