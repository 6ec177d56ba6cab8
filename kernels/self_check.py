"""Whether a backend's kernels run on a device, and give the reference's bytes there."""

from __future__ import annotations

import torch

from pipecomp.errors import KernelError
from pipecomp.kernels import layout, reference
from pipecomp.kernels.backend import Backend
from pipecomp.kernels.layout import Options


def self_check(backend: Backend, name: str = "kernels", device: str = "cpu") -> None:
    """Run the kernels on a small sample.

    Catches what no build flag can rule out: a compiler that contracts multiply and add, a machine without the compiler
    that Triton calls at its first launch.

    Args:
        backend: whose kernels.
        name: of the kernels, for the error.
        device: where the sample is.

    Raises:
        KernelError: unless they give the reference's bytes; and whatever the kernels themselves raise.
    """
    values = torch.linspace(-3, 3, 210, dtype=torch.float32).sin().reshape(3, 70) ** 3
    for rounding in layout.ROUNDINGS:
        options = Options(bits=3, group_size=None, rounding=rounding, seed=7)
        m, m_again = (values * 0.3).to(device), values * 0.3
        mine = backend.delta_quantize_(values.to(device), m, options)
        theirs = reference.delta_quantize_(values, m_again, options)
        if not all(torch.equal(a.cpu(), b) for a, b in zip((*mine, m), (*theirs, m_again), strict=True)):
            raise KernelError(f"{name} give other bytes than the reference")
