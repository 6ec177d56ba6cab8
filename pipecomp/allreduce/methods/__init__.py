"""Gradient methods by name.

To add one: its options in `pipecomp/config/gradients.py`, a file here with a `GradientMethod`, and a line in `METHODS`.
"""

from __future__ import annotations

from pipecomp.allreduce.method import GradientMethod
from pipecomp.allreduce.methods.baselines import HalfPrecision, Uncompressed
from pipecomp.allreduce.methods.casq import Casq
from pipecomp.allreduce.methods.double_squeeze import DoubleSqueeze
from pipecomp.allreduce.methods.grandk import GrandK
from pipecomp.allreduce.methods.powersgd import PowerSgd
from pipecomp.allreduce.methods.qsgd import GlobalQsgd, NuQsgd, Qsgd, QsgdMn, QsgdMnTs, TernGrad
from pipecomp.config.gradients import Gradients

METHODS: dict[str, type[GradientMethod]] = {
    "none": Uncompressed,
    "global_qsgd": GlobalQsgd,
    "qsgd_mn": QsgdMn,
    "qsgd_mn_ts": QsgdMnTs,
    "grandk_mn": GrandK,
    "grandk_mn_ts": GrandK,
    "qsgd": Qsgd,
    "terngrad": TernGrad,
    "nuqsgd": NuQsgd,
    "casq": Casq,
    "double_squeeze": DoubleSqueeze,
    "quantized_adam": DoubleSqueeze,
    "powersgd": PowerSgd,
    "fp16": HalfPrecision,
}


def create_method(gradients: Gradients) -> GradientMethod:
    """Return the method of a "gradients" section."""
    return METHODS[gradients.method](gradients.method_options)
