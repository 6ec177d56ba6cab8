"""The native kernels of CASQ's sketches, as `sketch` defines them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from pipecomp.kernels import sketch
from pipecomp.kernels.native_library import Library, SketchArgs
from pipecomp.kernels.rng import MASK64
from pipecomp.kernels.sketch import Sketch


class SketchKernels(Library):
    """What `sketch_ops` calls."""

    def sketch_encode(
        self, x_d: Tensor, e_d: Tensor, centers: Tensor, bounds: Tensor, how: Sketch
    ) -> tuple[Tensor, Tensor]:
        """As `sketch.sketch_encode`."""
        codes = torch.empty((x_d.numel() * how.bits + 7) // 8, dtype=torch.uint8)
        means = torch.zeros(how.counts.numel() + int(how.counts.sum()), dtype=torch.float32)
        means[: centers.numel()] = centers
        sums, numbers = torch.zeros_like(means, dtype=torch.float64), torch.zeros_like(means, dtype=torch.int64)
        more = {"x": x_d, "bounds": bounds.contiguous(), "sums": sums, "numbers": numbers}
        self._run("encode", how, {"codes": codes, "means": means, "out": e_d, **more})
        return codes, means

    def sketch_decode(
        self,
        codes: Tensor,
        means: Tensor,
        how: Sketch,
        out_d: Tensor,
        add: bool,
        divisor: int,
    ) -> Tensor:
        """As `sketch.sketch_decode`."""
        tensors = {"codes": codes.contiguous(), "means": means.contiguous(), "out": out_d}
        self._run("decode", how, tensors, add=add, divisor=divisor)
        return out_d

    def _run(
        self,
        what: str,
        how: Sketch,
        tensors: dict[str, Tensor],
        *,
        add: bool = False,
        divisor: int = 1,
    ) -> None:
        counts = how.counts
        tables = {
            "size": counts.to(torch.float32),
            "first": sketch.first_slots(counts).int(),
            "last": (counts - 1).clamp(min=0).int(),
        }
        args = SketchArgs(
            **{name: tensor.data_ptr() for name, tensor in {**tensors, **tables}.items()},
            d=tensors["out"].numel(),
            slots=tensors["means"].numel(),
            seed=how.seed & MASK64,
            divisor=divisor,
            bits=how.bits,
            clusters=counts.numel(),
            add=add,
            rounds=int(counts.max()) >= 1 << 24,
        )
        getattr(self.library, f"pipecomp_sketch_{what}")(ctypes.byref(args), self.isa_index, self.threads)
