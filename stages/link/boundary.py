"""What of a micro-batch crosses a link: only the real tokens of padded ones; of images, the window that a crop shows.

Shapes: B samples, S tokens with padding, H hidden size, T real tokens of all samples. Of an image the tokens are the h
lines of a map, and H is their width times channels.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipecomp.buffers.base import GRADIENT
from pipecomp.codecs.wire import Form, Header, Sample
from pipecomp.errors import DataError, WireError
from pipecomp.stages.link.window import CropCanvas


@dataclass(frozen=True, slots=True)
class Layout:
    """Which tokens of [B, S] are real: for sample i those from starts[i], counts[i] of them.

    With a canvas nothing is padding: starts are the places in it where the samples' windows begin, counts their lines,
    and `tokens` the canvas's places.
    """

    ids: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: int  # S
    canvas: CropCanvas | None = None

    @property
    def total(self) -> int:
        """T, all real tokens."""
        return sum(self.counts)

    @property
    def rows_each(self) -> int:
        """Rows of a sample in the tensor that stages compute with: S, or h with a canvas."""
        return self.tokens if self.canvas is None else self.canvas.lines

    @property
    def full(self) -> bool:
        """True if nothing is padding."""
        return self.canvas is not None or all(count == self.tokens for count in self.counts)

    def samples(self, form: Form, base: int = 0, version: int = 0) -> list[Sample]:
        """Describe the samples, all alike."""
        rows = zip(self.ids, self.starts, self.counts, strict=True)
        return [Sample(i, form, start, count, base, version) for i, start, count in rows]

    def rows(self) -> list[slice]:
        """For each sample its rows in [T, H]."""
        return [slice(a, b) for a, b in itertools.pairwise(itertools.accumulate(self.counts, initial=0))]

    def mask_BS(self, device: torch.device) -> Tensor | None:
        """Attention mask [B, S] int64 with ones at real tokens; None if all are."""
        if self.full:
            return None
        # Of pageable memory the driver takes a copy of 64 KiB at most, and waits for the GPU with more.
        starts_B, counts_B = torch.tensor([self.starts, self.counts]).to(device, non_blocking=True).unbind()
        return _real(starts_B, counts_B, self.tokens).to(torch.int64)

    @classmethod
    def of_header(cls, header: Header, canvas: CropCanvas | None = None) -> Layout:
        """Read the layout that a packet describes.

        Raises WireError if a window lies outside the link's canvas, and for an id that no sample has: in a store it
        would be another sample's gradient.
        """
        s = header.samples
        for x in s:
            if x.id & GRADIENT:
                raise WireError(f"{header.describe()}: sample id {x.id} is out of range: 0 to 2**63 - 1")
        if canvas is not None:
            for x in s:
                if header.tokens != canvas.places or x.count != canvas.lines or not canvas.has(x.start):
                    raise WireError(
                        f"{header.describe()}: sample {x.id} has {x.count} lines from place {x.start} of "
                        f"{header.tokens}, not a window of {canvas}"
                    )
        ids, _, starts, counts, *_ = zip(*s, strict=True) if s else ((),) * 4
        return cls(ids, starts, counts, header.tokens, canvas)

    @classmethod
    def of_shifts(cls, ids: tuple[int, ...], shifts_B2: Tensor | None, canvas: CropCanvas) -> Layout:
        """From the pixels, down and right, by which crops moved the images, int64 [B, 2]; None: none was moved.

        Raises DataError for another shape, and for a crop beyond the canvas's margin.
        """
        moved = [[0, 0]] * len(ids) if shifts_B2 is None else shifts_B2.tolist()
        if shifts_B2 is not None and tuple(shifts_B2.shape) != (len(ids), 2):
            raise DataError(f"shifts have shape {tuple(shifts_B2.shape)}, expected {(len(ids), 2)}: down and right")
        starts = tuple(canvas.start(down, right, i) for i, (down, right) in zip(ids, moved, strict=True))
        return cls(ids, starts, (canvas.lines,) * len(ids), canvas.places, canvas)

    @classmethod
    def of_mask(cls, ids: tuple[int, ...], mask_BS: Tensor | None, tokens: int) -> Layout:
        """From an attention mask [B, S] (None: all real), padded left or right.

        Raises DataError if the real tokens of a sample are not one unbroken run, or the number of ids is not B.
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
class Crossing:
    """What crosses a link, the same for both its ends.

    width: H. settings: what both ends compare, JSON values. rows: of every sample; None where samples differ.
    """

    width: int
    settings: dict[str, Any]
    rows: int | None = None
    canvas: CropCanvas | None = None


def gradient_unit(samples: int, loss_scale: float) -> float:
    """By what a gradient is multiplied to be comparable with the same sample's in other steps.

    Each sample has an equal share in the loss, which is multiplied by the loss scale. 4096 brings gradients of language
    models into the range of float16, as a store with 16 bits needs it.

    Args:
        samples: By which the sample's own loss is divided.
        loss_scale: Of the step.
    """
    return 4096.0 * samples / loss_scale


def _real(starts_B: Tensor, counts_B: Tensor, tokens: int) -> Tensor:
    """Which tokens are real, bool [B, S]: of each sample so many from its start."""
    where_S = torch.arange(tokens, device=starts_B.device)
    return (where_S >= starts_B[:, None]) & (where_S < (starts_B + counts_B)[:, None])


def gather(x_BSH: Tensor, layout: Layout) -> Tensor:
    """Real tokens [T, H] of [B, S, H]; a view if nothing is padding."""
    if layout.full:
        return x_BSH.reshape(-1, x_BSH.shape[-1])
    return torch.cat([x_BSH[i, a : a + n] for i, (a, n) in enumerate(zip(layout.starts, layout.counts, strict=True))])


def scatter(x_TH: Tensor, layout: Layout) -> Tensor:
    """[B, S, H] with the real tokens of [T, H] in place and zeros elsewhere; a view if nothing is padding."""
    hidden = x_TH.shape[-1]
    if layout.full:
        return x_TH.reshape(len(layout.ids), layout.rows_each, hidden)
    x_BSH = x_TH.new_zeros(len(layout.ids), layout.tokens, hidden)
    for i, rows in enumerate(layout.rows()):
        x_BSH[i, layout.starts[i] : layout.starts[i] + layout.counts[i]] = x_TH[rows]
    return x_BSH
