"""Slow networks on one machine: nodes with their own addresses, links of a given rate and delay, byte counters.

The kernel provides them (a network namespace for each node, tbf) given root and iproute2. With `software=True`,
pipecomp's own links are throttled instead.
"""

from pipecomp.netlab.lab import Finished, Lab
from pipecomp.netlab.namespaces import missing
from pipecomp.netlab.network import NetlabError, NodeBytes

__all__ = ["Finished", "Lab", "NetlabError", "NodeBytes", "missing"]
