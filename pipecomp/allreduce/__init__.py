"""Compressed averages of gradients over data-parallel ranks: Global-QSGD and related methods.

The methods are described in docs/algorithms.md, section 2; `methods/__init__.py` lists them by name.

state = State(method="global_qsgd", levels="exponential", bits=8)
ddp.register_comm_hook(state, ddp_hook)
mean = allreduce_mean(state, tensor, key="any")
predict("qsgd_mn", d, n, bandwidth_bit_per_s=1e9).total_s
"""

from pipecomp.allreduce.predict import AveragePrediction as Prediction
from pipecomp.allreduce.predict import compression_pays, predict
from pipecomp.allreduce.state import State, allreduce_mean, ddp_hook

__all__ = ["Prediction", "State", "allreduce_mean", "compression_pays", "ddp_hook", "predict"]
