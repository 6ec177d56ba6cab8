"""Slow networks on one machine: nodes with addresses of their own, links of a stated rate and delay, bytes counted.

The kernel does it (a network namespace for each node, tbf) where there is root and iproute2; otherwise, with
`software=True`, pipecomp's own links slow themselves down.
"""

from pipecomp.netlab.lab import Finished, Lab
from pipecomp.netlab.namespaces import missing
from pipecomp.netlab.network import NetlabError, NodeBytes

__all__ = ["Finished", "Lab", "NetlabError", "NodeBytes", "missing"]
