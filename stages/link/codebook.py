"""Cluster centers of token rows, which both ends of a link move alike: online k-means over what was decoded.

Number 0 is the zero vector, which never moves: a row that builds on it is sent as it is. Every other center is the mean
of the rows that were sent as changes from it (MacQueen's online k-means), of at least the last `MEMORY` of them,
because activations move while the model learns. A packet's rows count together. Centers that are free are opened at
rows of the packet.

Which center a row builds on only its sender decides. All that follows from packets is computed from the numbers and the
decoded rows alone, with operations that give the same bits on every device and with any number of threads: sums are
sums of whole numbers, whose order does not matter, everything else is one rounded operation on each value.

Shapes: C centers, T rows of a packet, H hidden size, U centers that rows of the packet build on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipecomp.kernels.reference.reproducible import random_bits

MEMORY = 64  # rows: a packet with n of a center's rows moves it by at least n / (MEMORY + n) of the way to their mean
IDLE = 16  # times C rows without one of its own after which a center is free: a sixteenth of the mean center's share
OPENED = 2  # of a packet's rows one in so many, rounded up, opens a center at most
BLOCK = 16  # centers of an entry of a message store
_STATE = 3  # values of a center in such an entry beside its vector
_DIGIT = 1 << 20  # whole numbers up to this, and somewhat more, are exact in float32
_UNIT_BITS = 38  # of a packet's largest change, in the units that are summed: those of 2**24 rows fit 63 bits
_SCORES = 1 << 24  # distances that are computed at once


class Codebook:
    """The centers of one direction of a link, at one of its ends.

    centers_CH: float32. version: of the last packet; 0 for none.
    """

    def __init__(self, clusters: int, hidden: int, device: torch.device) -> None:
        self.clusters = clusters
        self.centers_CH = torch.zeros(clusters, hidden, device=device, dtype=torch.float32)
        self.version = 0
        self._counts_C = torch.zeros(clusters, dtype=torch.int64, device=device)  # rows, at most MEMORY; 0: not open
        self._used_C = torch.zeros_like(
            self._counts_C
        )  # the round in which a row last built on it; C rows make a round
        self._rows = 0  # of all packets
        self._changed_C = torch.zeros(clusters, dtype=torch.bool, device=device)

    def nearest(self, x_TH: Tensor, most: int) -> Tensor:
        """Find the numbers of the centers nearest to each row, int64 [T, ≤ most]; not the same on every device."""
        x_TH = x_TH.to(torch.float32)
        half_C = self.centers_CH.square().sum(1).mul_(0.5)
        half_C[1:].masked_fill_(self._counts_C[1:] == 0, torch.inf)
        rows, most = max(1, _SCORES // self.clusters), min(most, self.clusters)
        scores = (torch.addmm(half_C, part, self.centers_CH.T, alpha=-1) for part in x_TH.split(rows))
        return torch.cat([part.topk(most, largest=False, sorted=False).indices for part in scores])

    def learn(self, number_T: Tensor, y_TH: Tensor, version: int) -> None:
        """Let the centers follow a packet.

        Args:
            number_T: Of the centers that its rows build on, int64.
            y_TH: What the rows were decoded to, float32, finite.
            version: Of the packet.
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
        self._changed_C[0] = True  # where the number of rows is kept
        self.version = version

    def _openings(self, number_T: Tensor, now: int) -> tuple[Tensor, Tensor]:
        """Choose the rows that open centers, and their numbers: int64 [n] each.

        Rows drawn at random, alike at both ends, so that dense regions get more centers; never opened centers first,
        then those longest unused.
        """
        used_C = torch.where(self._counts_C > 0, self._used_C, -IDLE)
        used_C[number_T] = now  # also in this packet
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
        """Give the blocks that have changed since the last call, as `load` takes them.

        Returns:
            Numbers of blocks, each with its centers and their counts, float32 [≤ BLOCK, H + 3].
        """
        blocks = torch.unique(self._changed_C.nonzero()[:, 0] // BLOCK).tolist()
        self._changed_C.zero_()
        counts_C, used_C = self._counts_C.clone(), self._used_C.clone()
        used_C[0], counts_C[0] = divmod(self._rows, self.clusters)
        state_C3 = torch.stack([counts_C, used_C % _DIGIT, used_C // _DIGIT], dim=1).float()
        found = []
        for block in blocks:
            rows = slice(block * BLOCK, (block + 1) * BLOCK)
            found.append((block, torch.cat([self.centers_CH[rows], state_C3[rows]], dim=1)))
        return found

    def load(self, block: int, version: int, state: Tensor) -> None:
        """Hold again what `take_changed` gave, at this version. ValueError for what is none of the blocks."""
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
        else:  # block 0, which has the number of rows, may be lost
            self._rows = max(self._rows, int(self._used_C[rows].max()) * self.clusters)


def _whole(x_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Give x in whole numbers of a unit, int64, and the unit: 2**-38 of the power of two above the largest magnitude.

    The unit is found in the bits of float32, and made from those of float64, so that nothing is rounded.
    """
    exponent = (x_TH.abs().amax().view(torch.int32).to(torch.int64) >> 23) - 126  # the largest is below 2**exponent
    scale, unit = (((1023 + sign * (_UNIT_BITS - exponent)) << 52).view(torch.float64) for sign in (1, -1))
    return (x_TH.double() * scale).round_().to(torch.int64), unit
