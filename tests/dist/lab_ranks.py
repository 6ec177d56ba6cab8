"""Ranks on the nodes of a network lab, forked from the tests' server: seconds of imports less than `lab.run`."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.netlab import Lab, kernel, missing
from pipecomp.netlab.lab import LabRun
from tests.limits import HANG_S

CLONE_NEWNET = 0x40000000
WHY_NOT = missing() or kernel.missing_filters()
WITH_FILTERS = [  # of modules whose tests need a lab with routers or lost packets
    pytest.mark.soak,
    pytest.mark.ranks,
    pytest.mark.timeout(HANG_S),
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no labs with filters here: {WHY_NOT}"),
]


def run_in_lab(lab: Lab, function: Callable[..., Any], *args: Any, **options: Any) -> dict[int, Any]:
    """Return `lab.run(function, *args)`'s result, for a lab without cuts at stated times. options: of `run_ranks`."""
    nodes = lab.shape.nodes
    run = LabRun(lab.network, lab.name, nodes, 1, {})
    environments = [run.rank(rank, ["true"]).environment for rank in range(nodes)]
    spaces = [None if lab.network.form == "software" else f"{lab.name}-n{node}" for node in range(nodes)]
    return run_ranks(nodes, _on_node, spaces, environments, function, args, **options)


def _on_node(
    rank: int, world: int, note: Any, spaces: list, environments: list, function: Callable[..., Any], args: tuple
) -> Any:
    if spaces[rank] is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", spaces[rank]).open() as space:
            if libc.setns(space.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {spaces[rank]}")
    os.environ.update(environments[rank])
    return function(rank, world, note, *args)
