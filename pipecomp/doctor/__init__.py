"""`pipecomp doctor`: check whether this machine and the links between machines are fit for training.

Every check turns facts into a `Finding` and can be called with made-up facts; the functions that gather the facts are
beside it.
"""

from pipecomp.doctor.examination import examine
from pipecomp.doctor.finding import Finding

__all__ = ["Finding", "examine"]
