"""Every gradient method by the name that `gradients.method` has for it.

To add one, write a file in `methods/` with a `Method` (see `method.py`) and give it a line here.
"""

from __future__ import annotations

from pipecomp.allreduce.method import Method
from pipecomp.allreduce.methods.casq import Casq
from pipecomp.allreduce.methods.double_squeeze import DoubleSqueeze, MomentumSqueeze
from pipecomp.allreduce.methods.global_qsgd import GlobalQsgd
from pipecomp.allreduce.methods.grandk import GrandKMn, GrandKMnTs
from pipecomp.allreduce.methods.local_norm import NuQsgd, Qsgd, TernGrad
from pipecomp.allreduce.methods.powersgd import PowerSgd
from pipecomp.allreduce.methods.qsgd_mn import QsgdMn, QsgdMnTs
from pipecomp.allreduce.methods.torch_hooks import Half
from pipecomp.allreduce.methods.uncompressed import Uncompressed

METHODS: dict[str, type[Method]] = {
    "none": Uncompressed,
    "global_qsgd": GlobalQsgd,
    "qsgd_mn": QsgdMn,
    "qsgd_mn_ts": QsgdMnTs,
    "grandk_mn": GrandKMn,
    "grandk_mn_ts": GrandKMnTs,
    "qsgd": Qsgd,
    "terngrad": TernGrad,
    "nuqsgd": NuQsgd,
    "casq": Casq,
    "double_squeeze": DoubleSqueeze,
    "quantized_adam": MomentumSqueeze,
    "powersgd": PowerSgd,
    "fp16": Half,
}
