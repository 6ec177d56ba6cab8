"""`pipecomp doctor`: are this machine and the links between machines fit for training?

Every check turns facts into a `Finding` and can be called with made-up facts; what gathers the facts stands beside it.
"""

from pipecomp.doctor.examination import examine
from pipecomp.doctor.finding import Finding

__all__ = ["Finding", "examine"]
