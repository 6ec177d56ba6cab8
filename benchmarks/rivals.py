"""Other methods for what crosses two stages, as coders (`boundaries.Coder`) of the rows of `rival_rows.py`.

A coder says which rows are sent, and of what: of the values themselves (`Whole`), of their changes since the sample's
last visit (`Changes`), or only where they have changed (`Unchanged`). Both ends of a link have the same coders; an end
that encodes decodes its own payload too, so that both remember the same, bit for bit.

Shapes: T real tokens of all samples, n of one, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.rival_rows import Product, Reader, Rows, packed
from pipecomp.stages.link.layout import Layout


class Whole:
    """The values themselves; nothing is remembered."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.held: dict[int, Tensor] = {}

    def encode(self, x_TH: Tensor, layout: Layout) -> Tensor:
        """See Coder."""
        return self._rows.encode(x_TH.float())

    def decode(self, payload: Tensor, layout: Layout, hidden: int) -> Tensor:
        """See Coder."""
        return self._rows.decode(payload, layout.total, hidden)


class _Remembering:
    """Cached activations m, which both ends keep until the sample's next visit."""

    def __init__(self) -> None:
        self.held: dict[int, Tensor] = {}

    def _base(self, layout: Layout, hidden: int) -> tuple[Tensor, Tensor]:
        """m of all tokens, float32 [T, H], zeros at first visits; which tokens have one, bool [T].

        A sample that changed its length is a first visit again.
        """
        m_TH = torch.zeros(layout.total, hidden)
        known_T = torch.zeros(layout.total, dtype=torch.bool)
        for sample, count, rows in zip(layout.ids, layout.counts, layout.rows(), strict=True):
            m_nH = self.held.get(sample)
            if m_nH is not None and len(m_nH) == count:
                m_TH[rows], known_T[rows] = m_nH, True
        return m_TH, known_T

    def _hold(self, layout: Layout, m_TH: Tensor) -> Tensor:
        for sample, rows in zip(layout.ids, layout.rows(), strict=True):
            self.held[sample] = m_TH[rows].clone()
        return m_TH


class Changes(_Remembering):
    """Changes since the sample's last visit through `rows`, first visits through `first`: AQ-SGD with another coding.

    share: part of a change that m moves by; the other end computes with all of it. Below 1, m is a mean of several
    visits, which dropout changes by chance.

    Payload: the rows of first visits, then the changes.
    """

    def __init__(self, rows: Rows, first: Product, share: float = 1.0) -> None:
        super().__init__()
        self._rows, self._first, self._share = rows, first, share

    def encode(self, x_TH: Tensor, layout: Layout) -> Tensor:
        """See Coder."""
        x_TH, hidden = x_TH.float(), x_TH.shape[1]
        m_TH, known_T = self._base(layout, hidden)
        payload = torch.cat(
            [self._first.encode(x_TH[~known_T]), self._rows.encode(x_TH[known_T] - m_TH[known_T])],
        )
        self.decode(payload, layout, hidden)
        return payload

    def decode(self, payload: Tensor, layout: Layout, hidden: int) -> Tensor:
        """See Coder."""
        m_TH, known_T = self._base(layout, hidden)
        changed = int(known_T.sum())
        new = layout.total - changed
        cut = self._first.size(new, hidden)
        m_TH[~known_T] = self._first.decode(payload[:cut], new, hidden)
        change_TH = torch.zeros_like(m_TH)
        change_TH[known_T] = self._rows.decode(payload[cut:], changed, hidden)
        self._hold(layout, m_TH + self._share * change_TH)
        return m_TH + change_TH


class Unchanged(_Remembering):
    """Tokens that hardly changed are not sent, after SplitCom (arXiv:2602.10564): the other end takes m again.

    threshold: the cosine of a token's values and its m from which on it is not sent; the paper moves it in training,
    here it is fixed, so that it says how much is sent. What is sent goes through `rows`, not as a change.

    Payload: a bit for each token, whether it is sent; the tokens that are.
    """

    def __init__(self, threshold: float, rows: Product) -> None:
        super().__init__()
        self._threshold, self._rows = threshold, rows

    def encode(self, x_TH: Tensor, layout: Layout) -> Tensor:
        """See Coder."""
        x_TH = x_TH.float()
        m_TH, known_T = self._base(layout, x_TH.shape[1])
        sent_T = ~known_T | (torch.cosine_similarity(x_TH, m_TH, dim=1) < self._threshold)
        payload = torch.cat([packed(sent_T.to(torch.int32), 1), self._rows.encode(x_TH[sent_T])])
        self.decode(payload, layout, x_TH.shape[1])
        return payload

    def decode(self, payload: Tensor, layout: Layout, hidden: int) -> Tensor:
        """See Coder."""
        m_TH, _ = self._base(layout, hidden)
        reader = Reader(payload)
        sent_T = reader.integers(layout.total, 1).bool()
        count = int(sent_T.sum())
        m_TH[sent_T] = self._rows.decode(reader.take(self._rows.size(count, hidden)), count, hidden)
        reader.end()
        return self._hold(layout, m_TH)
