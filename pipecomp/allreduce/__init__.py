"""Averages of gradients over data-parallel ranks, compressed: Global-QSGD and its relatives (ALGORITHMS section 2).

state = State(method="global_qsgd", levels="exponential", bits=8)
ddp.register_comm_hook(state, ddp_hook)
mean = allreduce_mean(state, tensor, key="any")
"""

from pipecomp.allreduce.state import State, allreduce_mean, ddp_hook

__all__ = ["State", "allreduce_mean", "ddp_hook"]
