"""Cached activations of images that random crops move: m covers more than one visit shows.

A random crop shows an image moved by a few pixels, and what crosses a link is moved with it. So m lies in a canvas: the
map that crosses the link with a margin on every side, in which the unmoved image has its fixed place. A visit takes
its window out of the canvas, the change since then is quantized, and only the window is updated (arXiv:2206.01299,
H.6). Flipped images are samples of their own: the data gives them their own ids.

Shapes: lines h and columns w of the map that crosses the link, C channels; a row of the link is a line of w × C values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from pipecomp.errors import DataError


@dataclass(frozen=True, slots=True)
class CropCanvas:
    """Where the cached activations of one link lie.

    lines, columns: h and w. input_lines, input_columns: pixels of the input image. margin: how far in pixels a crop may
    move the image, in either direction.
    """

    lines: int
    columns: int
    input_lines: int
    input_columns: int
    margin: int

    @property
    def margins(self) -> tuple[int, int]:
        """Lines above and below the map, columns on its left and right."""
        down = -(-self.margin * self.lines // self.input_lines)
        return down, -(-self.margin * self.columns // self.input_columns)

    @property
    def canvas_lines(self) -> int:
        """Lines of the map and its margins."""
        return self.lines + 2 * self.margins[0]

    @property
    def canvas_columns(self) -> int:
        """Columns of the map and its margins."""
        return self.columns + 2 * self.margins[1]

    @property
    def places(self) -> int:
        """Places of the canvas: its lines times its columns."""
        return self.canvas_lines * self.canvas_columns

    def start(self, down: int, right: int, sample: int) -> int:
        """Find the window's first place for a crop that begins `down`, `right` pixels from the unmoved image.

        Pixels are rounded to whole places. Raises DataError naming `sample` beyond the margin.
        """
        if max(abs(down), abs(right)) > self.margin:
            raise DataError(f"sample {sample}: a crop moved by {(down, right)} pixels, the margin is {self.margin}")
        line = self.margins[0] + _rounded(down * self.lines, self.input_lines)
        column = self.margins[1] + _rounded(right * self.columns, self.input_columns)
        return line * self.canvas_columns + column

    def shift(self, start: int) -> tuple[int, int]:
        """Give the pixels, down and right, that `start` stands for: within the margin."""
        line, column = divmod(start, self.canvas_columns)
        down, right = line - self.margins[0], column - self.margins[1]
        return self._pixels(down, self.lines, self.input_lines), self._pixels(right, self.columns, self.input_columns)

    def _pixels(self, places: int, of_map: int, of_input: int) -> int:
        # A margin of 1 pixel where a place has 2 is a whole place, which stands for 2 pixels: more than a crop moves.
        return max(-self.margin, min(self.margin, _rounded(places * of_input, of_map)))

    def has(self, start: int) -> bool:
        """Whether a window that begins there lies in the canvas."""
        line, column = divmod(start, self.canvas_columns)
        return line + self.lines <= self.canvas_lines and column + self.columns <= self.canvas_columns

    def take(self, m: Tensor, start: int) -> Tensor:
        """Copy the window [h, w C] of m [canvas lines, canvas columns × C]."""
        return self._window(m, start).clone(memory_format=torch.contiguous_format).view(self.lines, -1)

    def put_(self, m: Tensor, start: int, window: Tensor) -> Tensor:
        """Change the window of m, and nothing else of it; returns m."""
        view = self._window(m, start)
        view.copy_(window.view(view.shape))
        return m

    def spread(self, window: Tensor, start: int) -> Tensor:
        """m after a first visit: around the window everything is as at its nearest edge.

        A later visit that shows more than the first sends the difference to that.
        """
        lines, columns = _nearest(self, start, window.device)
        map_hwC = window.reshape(self.lines, self.columns, -1)
        return map_hwC[lines[:, None], columns].view(self.canvas_lines, -1)

    def _window(self, m: Tensor, start: int) -> Tensor:
        line, column = divmod(start, self.canvas_columns)
        whole = m.view(self.canvas_lines, self.canvas_columns, -1)
        return whole[line : line + self.lines, column : column + self.columns]


@functools.lru_cache(maxsize=1024)
def _nearest(canvas: CropCanvas, start: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each line and each column of the canvas the nearest one of the window, counted in the window; int64 each.

    Made on the device, because a copy to a GPU would wait for what it computes.
    """
    line, column = divmod(start, canvas.canvas_columns)
    lines = (torch.arange(canvas.canvas_lines, device=device) - line).clamp(0, canvas.lines - 1)
    columns = (torch.arange(canvas.canvas_columns, device=device) - column).clamp(0, canvas.columns - 1)
    return lines, columns


def _rounded(numerator: int, denominator: int) -> int:
    """Round to the nearest whole number, halves up; whole-number arithmetic, so that all ranks agree."""
    return (2 * numerator + denominator) // (2 * denominator)
