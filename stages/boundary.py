"""What of a padded micro-batch crosses a link: only its real tokens.

Shapes: B samples, S tokens with padding, H hidden size, T real tokens of all samples.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from pipecomp.errors import DataError
from pipecomp.wire import Header


@dataclass(frozen=True, slots=True)
class Layout:
    """Which tokens of [B, S] are real: for sample i those from starts[i], counts[i] of them."""

    ids: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: int  # S

    @property
    def total(self) -> int:
        """T, all real tokens."""
        return sum(self.counts)

    @property
    def full(self) -> bool:
        """True if nothing is padding."""
        return all(count == self.tokens for count in self.counts)

    def rows(self) -> list[slice]:
        """For each sample its rows in [T, H]."""
        ends = [0]
        for count in self.counts:
            ends.append(ends[-1] + count)
        return [slice(a, b) for a, b in itertools.pairwise(ends)]

    def mask_BS(self, device: torch.device) -> Tensor | None:
        """Attention mask [B, S] int64 with ones at real tokens; None if all are."""
        if self.full:
            return None
        mask_BS = torch.zeros(len(self.ids), self.tokens, dtype=torch.int64)
        for i, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
            mask_BS[i, start : start + count] = 1
        return mask_BS.to(device)

    @classmethod
    def of_header(cls, header: Header) -> Layout:
        """The layout that a message describes."""
        s = header.samples
        return cls(tuple(x.id for x in s), tuple(x.start for x in s), tuple(x.count for x in s), header.tokens)

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
        where_S = torch.arange(tokens)
        run_BS = (where_S >= starts_B[:, None]) & (where_S < (starts_B + counts_B)[:, None])
        if not torch.equal(run_BS, real_BS):
            i = int((run_BS != real_BS).any(1).nonzero()[0])
            raise DataError(f"attention_mask of sample {ids[i]} has padding between real tokens: pad left or right")
        return cls(ids, tuple(starts_B.tolist()), tuple(counts_B.tolist()), tokens)


def gather(x_BSH: Tensor, layout: Layout) -> Tensor:
    """Real tokens [T, H] of [B, S, H]; a view if nothing is padding."""
    if layout.full:
        return x_BSH.reshape(-1, x_BSH.shape[-1])
    parts = [
        x_BSH[i, a : a + n] for i, (a, n) in enumerate(zip(layout.starts, layout.counts, strict=True))
    ]
    return torch.cat(parts)


def scatter(x_TH: Tensor, layout: Layout) -> Tensor:
    """[B, S, H] with the real tokens of [T, H] in place and zeros elsewhere; a view if nothing is padding."""
    hidden = x_TH.shape[-1]
    if layout.full:
        return x_TH.reshape(len(layout.ids), layout.tokens, hidden)
    x_BSH = x_TH.new_zeros(len(layout.ids), layout.tokens, hidden)
    for i, rows in enumerate(layout.rows()):
        x_BSH[i, layout.starts[i] : layout.starts[i] + layout.counts[i]] = x_TH[rows]
    return x_BSH
