"""Cached activations of images that random crops move: m covers more than one visit shows.

A random crop moves an image by a few pixels, and with it the map that crosses a link. So m is a canvas: the map with a
margin on every side, on which the unmoved image has a fixed position. A visit takes its window from the canvas, the
change of the window is quantized, and only the window is updated (arXiv:2206.01299, H.6). Flipped images are samples of
their own: the data gives them their own ids.

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
    """Geometry of the cached activations of one link.

    Attributes:
        lines, columns: Size of the map, h and w.
        input_lines, input_columns: Size of the input image, in pixels.
        margin: Most pixels by which a crop may move the image, in either direction.
    """

    lines: int
    columns: int
    input_lines: int
    input_columns: int
    margin: int

    @property
    def margins(self) -> tuple[int, int]:
        """Lines above and below the map, and columns left and right of it."""
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
    def cells(self) -> int:
        """Cells of the canvas: its lines times its columns."""
        return self.canvas_lines * self.canvas_columns

    def start(self, down: int, right: int, sample: int) -> int:
        """Return the window's first cell for a crop that begins `down`, `right` pixels from the unmoved image.

        Pixels are rounded to whole cells. Raises DataError with the sample's id beyond the margin.
        """
        if max(abs(down), abs(right)) > self.margin:
            raise DataError(f"sample {sample}: a crop moved by {(down, right)} pixels, the margin is {self.margin}")
        line = self.margins[0] + _rounded(down * self.lines, self.input_lines)
        column = self.margins[1] + _rounded(right * self.columns, self.input_columns)
        return line * self.canvas_columns + column

    def shift(self, start: int) -> tuple[int, int]:
        """Return the pixels, down and right, of the window that begins at `start`: within the margin."""
        line, column = divmod(start, self.canvas_columns)
        down, right = line - self.margins[0], column - self.margins[1]
        return self._pixels(down, self.lines, self.input_lines), self._pixels(right, self.columns, self.input_columns)

    def _pixels(self, cells: int, of_map: int, of_input: int) -> int:
        # A margin of 1 pixel where a cell has 2 is a whole cell, that is 2 pixels: more than a crop moves.
        return max(-self.margin, min(self.margin, _rounded(cells * of_input, of_map)))

    def has(self, start: int) -> bool:
        """Return True if a window that begins there lies in the canvas."""
        line, column = divmod(start, self.canvas_columns)
        return line + self.lines <= self.canvas_lines and column + self.columns <= self.canvas_columns

    def take(self, m: Tensor, start: int) -> Tensor:
        """Return a copy of the window, [h, w C], of m [canvas lines, canvas columns × C]."""
        return self._window(m, start).clone(memory_format=torch.contiguous_format).view(self.lines, -1)

    def put_(self, m: Tensor, start: int, window: Tensor) -> Tensor:
        """Update only the window of m; return m."""
        view = self._window(m, start)
        view.copy_(window.view(view.shape))
        return m

    def spread(self, window: Tensor, start: int) -> Tensor:
        """Return m after a first visit: cells around the window take the value of its nearest edge.

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
    """Return the window's nearest line for each line of the canvas, and so for columns; int64, counted in the window.

    Computed on the device: a copy to a GPU would wait for it.
    """
    line, column = divmod(start, canvas.canvas_columns)
    lines = (torch.arange(canvas.canvas_lines, device=device) - line).clamp(0, canvas.lines - 1)
    columns = (torch.arange(canvas.canvas_columns, device=device) - column).clamp(0, canvas.columns - 1)
    return lines, columns


def _rounded(numerator: int, denominator: int) -> int:
    """Round to the nearest integer, halves up; in integers, so that all ranks agree."""
    return (2 * numerator + denominator) // (2 * denominator)
