"""What a backend is: the operations that `torch_backend`, `native` and `triton_backend` have, all with the same bytes.

Arguments are checked, and flat buckets made contiguous, before a backend is called; what each operation computes is
told by the function of the same name in `reference`, `bitpack`, `topk`, `distortion`, `feedback`, `dithering`
and `sketch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from pipecomp.kernels.layout import Options
from pipecomp.kernels.ragged import Arriving, Visit
from pipecomp.kernels.sketch import Sketch


class Backend(Protocol):
    """All operations, of one backend."""

    # Q_b of rows, and what packs and selects their values.

    def quantize(self, x: Tensor, options: Options, name: str = "x") -> tuple[Tensor, Tensor]:
        """As `reference.quantize`."""

    def delta_quantize_(self, a: Tensor, m: Tensor, options: Options, name: str = "a - m") -> tuple[Tensor, Tensor]:
        """As `reference.delta_quantize_`."""

    def dequantize(
        self,
        codes: Tensor,
        scale: Tensor,
        bits: int,
        shape: tuple[int, ...],
        group_size: int | None,
        rounding: str,
        out: Tensor | None,
        add: bool,
    ) -> Tensor:
        """As `reference.dequantize`."""

    def pack_bits(self, values: Tensor, bits: int) -> Tensor:
        """As `bitpack.pack_bits`."""

    def unpack_bits(self, codes: Tensor, bits: int, count: int) -> Tensor:
        """As `bitpack.unpack_bits`."""

    def select(self, x: Tensor, fraction: float, group_size: int | None) -> tuple[Tensor, Tensor]:
        """As `topk.select`."""

    # Samples of different lengths.

    def encode_batch(self, visits: Sequence[Visit], payload: Tensor, packet: Tensor | None) -> Tensor:
        """As `ragged.encode_batch`."""

    def decode_batch(self, payload: Tensor, samples: Sequence[Arriving]) -> None:
        """As `ragged.decode_batch`."""

    def distortion(self, visits: Sequence[Visit], bits: Sequence[int]) -> Tensor:
        """As `distortion.distortion`."""

    def fit(self, visits: Sequence[Visit], error: float, low: int, high: int, payload: Tensor | None) -> int:
        """As `distortion.fit`, for whichever samples."""

    def encode_fewest(
        self, visits: Sequence[Visit], error: float, low: int, high: int, payload: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """As `distortion.encode_fewest`, for whichever samples."""

    # Quantizing with an error-feedback residual.

    def feedback_quantize_(
        self, x_d: Tensor, e_d: Tensor, bits: int, group_size: int, mean: bool
    ) -> tuple[Tensor, Tensor]:
        """As `feedback.feedback_quantize_`."""

    def feedback_reduce_(
        self, codes: list[Tensor], scales: list[Tensor], bits: int, e_d: Tensor, group_size: int, mean: bool
    ) -> tuple[Tensor, Tensor]:
        """As `feedback.feedback_reduce_`."""

    # Linear and exponential dithering of flat buckets.

    def linear_encode(
        self,
        g_d: Tensor,
        norm: float,
        levels: tuple[int, ...],
        index_d: Tensor | None,
        bits: int,
        seed: int,
        start: int,
    ) -> Tensor:
        """As `dithering.linear_encode`."""

    def linear_reduce(self, parts: list[Tensor], d: int, bits: int, sum_bits: int) -> Tensor:
        """As `dithering.linear_reduce`."""

    def linear_decode(
        self,
        codes: Tensor,
        norm: float,
        levels: tuple[int, ...],
        index_d: Tensor | None,
        bits: int,
        workers: int,
        out_d: Tensor,
        add: bool,
    ) -> Tensor:
        """As `dithering.linear_decode`."""

    def scale_index(self, g_d: Tensor, norm: float, levels: tuple[int, ...]) -> Tensor:
        """As `dithering.scale_index`."""

    def exponential_encode(self, g_d: Tensor, norm: float, bits: int, depth: int, seed: int, start: int) -> Tensor:
        """As `dithering.exponential_encode`."""

    def exponential_decode(
        self, codes: Tensor, norm: float, bits: int, depth: int, divisor: int, out_d: Tensor, add: bool
    ) -> Tensor:
        """As `dithering.exponential_decode`."""

    def exponential_reduce_(self, a: Tensor, b: Tensor, d: int, bits: int, seed: int) -> Tensor:
        """As `dithering.exponential_reduce_`."""

    def kmeans_assign(self, x_d: Tensor, bounds: Tensor) -> Tensor:
        """As `dithering.kmeans_assign`."""

    # Sketches of flat buckets.

    def sketch_encode(
        self, x_d: Tensor, e_d: Tensor, centers: Tensor, bounds: Tensor, how: Sketch
    ) -> tuple[Tensor, Tensor]:
        """As `sketch.sketch_encode`."""

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
