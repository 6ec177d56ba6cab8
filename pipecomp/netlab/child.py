"""What runs in a process of a lab when a function was asked for: run as a file, with a descriptor's number.

It imports nothing of pipecomp itself: the search path comes from the process that made the lab.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any


def main(descriptor: int) -> None:
    """Receive the search path and the work, run it, send notes and the result."""
    os.set_inheritable(descriptor, False)
    line = Connection(descriptor)
    sys.path[:] = line.recv()
    work = line.recv_bytes()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def note(value: Any) -> None:
        line.send(("note", value))

    try:
        function, args = pickle.loads(work)
        line.send(("done", function(rank, world, note, *args)))
    except Exception:
        line.send(("failed", traceback.format_exc()))
        line.close()
        sys.stderr.flush()
        os._exit(1)  # threads that wait for the network must not hold up the end
    line.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
