"""Stages of plain torch modules, for models outside Hugging Face: an nn.Sequential, cut between its children.

Packets carry rows, so a tensor that crosses a cut is laid out in rows: an image map [B, C, h, w] as its h lines of
w × C values, the channels of a place together; tokens [B, S, H] as they are; features [B, F] as one row. All samples
have one shape.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipecomp.errors import DataError, SplitError
from pipecomp.stages.link.crop_canvas import CropCanvas
from pipecomp.stages.link.layout import Boundary, Layout
from pipecomp.stages.partition.planning import SplitPlan, balance, complete_cuts
from pipecomp.stages.partition.stage import PipelineStage

INPUT = "pixel_values"
SHIFTS = "shifts"


@dataclass(frozen=True, kw_only=True)
class Modules:
    """A model of plain modules, made by `modules`. shapes: of one sample, before each block and after the last."""

    model: nn.Sequential
    shapes: tuple[tuple[int, ...], ...]
    margin: int


def modules(model: nn.Sequential, input_shape: Sequence[int], *, margin: int = 0) -> Modules:
    """Describe an nn.Sequential as a model to partition between its children, the blocks.

    Args:
        model: on any device.
        input_shape: shape of one sample: of a batch's `pixel_values` without B.
        margin: pixels by which random crops move an image at most, with `shifts` in the batches; cached activations
            then move with the crop (arXiv:2206.01299, H.6). 0: m is the activation sent last, wherever the crop was.

    Returns:
        A model for `pipecomp.initialize`, `plan` and `build_stage`.

    Raises:
        SplitError: the model does not run on that shape, or a block's output cannot be laid out in rows.
    """
    if not isinstance(model, nn.Sequential):
        raise SplitError(f"model: got {type(model).__name__}, allowed: an nn.Sequential, whose children are the blocks")
    if isinstance(margin, bool) or not isinstance(margin, int) or margin < 0:
        raise SplitError(f"margin: got {margin!r}, allowed: a whole number of pixels, 0 or more")
    if margin and len(input_shape) != 3:
        raise SplitError(f"margin: got {margin} for samples of shape {tuple(input_shape)}, allowed: 0 but for images")
    shapes = [tuple(int(n) for n in input_shape)]
    skeleton = copy.deepcopy(model).to("meta").eval()
    with torch.no_grad():
        x = torch.empty(2, *shapes[0], device="meta")
        for name, block in _blocks(skeleton):
            try:
                x = block(x)
            except Exception as error:  # raised by the user's module
                raise SplitError(f"block {name} does not accept samples of shape {shapes[-1]}: {error}") from error
            if not isinstance(x, Tensor) or x.shape[:1] != (2,):
                raise SplitError(f"block {name} must return one tensor with as many samples as its input")
            shapes.append(tuple(x.shape[1:]))
    return Modules(model=model, shapes=tuple(shapes), margin=margin)


def plan_modules(source: Modules, num_stages: int | None, cuts: Sequence[int] | None) -> SplitPlan:
    """Plan the given cuts, or those that minimize the parameters of the largest stage."""
    blocks = list(source.model)
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
    bounds = complete_cuts(len(blocks), num_stages, cuts, lambda stages: balance(sizes, stages))
    for cut in bounds[1:-1]:
        if len(source.shapes[cut]) not in (1, 2, 3):
            raise SplitError(f"cut {cut}: got samples of shape {source.shapes[cut]}, allowed: 1 to 3 dimensions")
        before = {id(tensor) for tensor in (*source.model[:cut].parameters(), *source.model[:cut].buffers())}
        for name, tensor in (*source.model[cut:].named_parameters(), *source.model[cut:].named_buffers()):
            if id(tensor) in before:
                raise SplitError(
                    f"cut {cut}: {name} is also used before it; stages of plain modules cannot share weights"
                )
    per_stage = tuple(sum(sizes[lo:hi]) for lo, hi in pairwise(bounds))
    trained = [sum(p.numel() for p in block.parameters() if p.requires_grad) for block in blocks]
    return SplitPlan(
        architecture="modules",
        model_class=type(source.model).__name__,
        cuts=tuple(bounds),
        blocks=len(blocks),
        parameters=per_stage,
        trained=tuple(sum(trained[lo:hi]) for lo, hi in pairwise(bounds)),
        costs=tuple(float(n) for n in per_stage),
        tied=(),
        first_trained_block=next((block for block, count in enumerate(trained) if count), 0),
    )


class ModuleStage(PipelineStage):
    """One stage of plain modules: the children [lo, hi) of the model, under their names there.

    The interface is `Stage`'s; hidden_size is the width of the rows that it receives, or sends if it is the first.
    """

    def __init__(self, source: Modules, plan: SplitPlan, index: int) -> None:
        super().__init__(plan, index)
        for name, block in _blocks(source.model)[self.lo : self.hi]:
            self.add_module(name, block)
        self._shapes, self._margin = source.shapes, source.margin
        self._recompute: dict[str, Any] = {}
        self.config = self.adapter = None
        self.hidden_size = _row_shape(source.shapes[self.hi if index == 0 else self.lo])[1]

    def forward(self, inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor | None] | Tensor:
        """Run this stage's blocks.

        Args:
            inputs: on the first stage `pixel_values` [B, …], on later stages the output of the stage before.

        Returns:
            `{"hidden_states": rows [B, n, H]}`, on the last stage the last block's output.

        Raises:
            DataError: other inputs.
        """
        main = INPUT if self.is_first else "hidden_states"
        x = inputs.get(main)
        shape = self._shapes[self.lo]
        expected = shape if self.is_first else _row_shape(shape)
        if x is None or tuple(x.shape[1:]) != expected:
            got = "nothing" if x is None else f"shape {tuple(x.shape)}"
            raise DataError(f"stage {self.index}: {main} has the shape [B, {', '.join(map(str, expected))}], got {got}")
        given = x
        x = x.to(self.dtype) if self.is_first else from_rows(x, shape)
        if x.requires_grad and x.untyped_storage().data_ptr() == given.untyped_storage().data_ptr():
            x = x.clone()  # the first block may work in place, which autograd refuses on a received leaf
        for _, block in _blocks(self):
            x = checkpoint(block, x, **self._recompute) if self._recompute and self.training else block(x)
        return x if self.is_last else {"hidden_states": to_rows(x)}

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Recompute each block's activations in the backward pass instead of keeping them; arguments as `Stage`'s."""
        self._recompute = gradient_checkpointing_kwargs or {"use_reentrant": False}

    def count_checkpointed_values(self, samples: int, tokens: int) -> int:
        """Return the number of values that checkpointed blocks keep for the backward: their inputs."""
        shapes = self._shapes[self.lo : self.hi] if self._recompute else ()
        return samples * sum(math.prod(shape) for shape in shapes)

    def layout(
        self, ids: tuple[int, ...], inputs: Mapping[str, Tensor], lengths: Sequence[Sequence[int]] | None = None
    ) -> Layout:
        """Return the position of the output in the link's canvas, by the crops' `shifts` [B, 2]; on the first stage."""
        if lengths is not None:
            raise DataError("plain modules take no packed samples: give a collate_fn without packing")
        if SHIFTS in inputs and not self._margin:
            raise DataError(f"a batch has {SHIFTS!r}: give the model a margin, pipecomp.stages.modules(…, margin=…)")
        return self._layout(ids, inputs.get(SHIFTS))

    def next_layout(self, layout: Layout) -> Layout:
        """Return the layout of the stage's output, from that of its input."""
        if self.is_last:
            return layout
        shifts_B2 = None
        if layout.canvas is not None:
            shifts_B2 = torch.tensor([layout.canvas.shift(start) for start in layout.starts]).reshape(-1, 2)
        return replace(self._layout(layout.ids, shifts_B2), digest=layout.digest)

    def _layout(self, ids: tuple[int, ...], shifts_B2: Tensor | None) -> Layout:
        if self.is_last:  # and the first: nothing crosses a link
            return Layout.of_mask(ids, None, 1)
        canvas = self.crossing(self.index).canvas
        if canvas is not None:
            return Layout.of_shifts(ids, shifts_B2, canvas)
        return Layout.of_mask(ids, None, _row_shape(self._shapes[self.hi])[0])

    def crossing(self, link: int) -> Boundary:
        """Describe the tensor that crosses a link; links are counted from the first stage."""
        cut = self.plan.cuts[link + 1]
        shape, canvas = self._shapes[cut], None
        if self._margin and len(shape) == 3:
            (_, lines, columns), (_, input_lines, input_columns) = shape, self._shapes[0]
            canvas = CropCanvas(lines, columns, input_lines, input_columns, self._margin)
        settings = {"cut": cut, "shape": list(shape), "margin": self._margin}
        rows, width = _row_shape(shape)
        return Boundary(width=width, settings=settings, rows=rows, canvas=canvas)


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List the children with their names, repeated ones (one ReLU) too, which `named_children` leaves out."""
    return [(name, block) for name, block in model._modules.items() if block is not None]


def to_rows(x: Tensor) -> Tensor:
    """Lay out a map [B, C, h, w], tokens [B, S, H] or features [B, F] as rows [B, n, H]."""
    if x.dim() == 4:
        return x.permute(0, 2, 3, 1).flatten(2)
    return x if x.dim() == 3 else x[:, None]


def from_rows(x_BnH: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo `to_rows`; shape: of one sample."""
    if len(shape) == 3:
        channels, lines, columns = shape
        return x_BnH.reshape(-1, lines, columns, channels).permute(0, 3, 1, 2).contiguous()
    return x_BnH if len(shape) == 2 else x_BnH[:, 0]


def _row_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return n and H of a sample's rows."""
    if len(shape) == 3:
        return shape[1], shape[2] * shape[0]
    return (shape[0], shape[1]) if len(shape) == 2 else (1, shape[0])
