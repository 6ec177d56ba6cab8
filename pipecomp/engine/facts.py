"""What a run is, for its report: model and stages, batch sizes, settings, and the links if they are known."""

from __future__ import annotations

import math
import os
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from pipecomp.netlab.software import VARIABLE, ThrottleSettings
from pipecomp.plan.simulation import TCP_SHARE, Channel, LinkNetwork
from pipecomp.stages.partition.splitting import Stage
from pipecomp.utils.serialization import replace_nonfinite


def run_facts(engine: Any) -> dict[str, Any]:
    """Return them as JSON values.

    Args:
        engine: Of any rank, its links open.

    Returns:
        "hidden": values of a token, None for plain modules. "network": of a network lab (`plan.simulation.LinkNetwork`)
        with null where there is no limit; None elsewhere. "settings": the section "pipecomp", with bits that were
        found when the run began. The other names say it.
    """
    weight = next(engine.stage.parameters(), None)
    network, settings = imposed_network(engine.grid), engine.pipecomp_config
    return {
        "model": engine.plan.model_class,
        "stages": engine.num_stages,
        "replicas": engine.grid.data_parallel_size,
        "cuts": list(engine.plan.cuts),
        "parameters": list(engine.plan.parameters),
        "micro_batch": engine.micro_batch_size,
        "micro_batches": engine.micro_batches,
        "dtype": None if weight is None else str(weight.dtype).removeprefix("torch."),
        "hidden": int(engine.stage.hidden_size) if isinstance(engine.stage, Stage) else None,
        "settings": replace_nonfinite({**asdict(settings), "activations": settings.activations.as_dict()}),
        "network": None if network is None else replace_nonfinite(asdict(network)),
    }


def imposed_network(grid: Any) -> LinkNetwork | None:
    """The links between the stages of the first replica as a network lab throttles them; None outside a lab."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    lab = ThrottleSettings.read(text)
    ranks = [grid._topo.get_rank(pipe=stage, data=0) for stage in range(grid.pipe_parallel_size)]

    def line(source: int, destination: int) -> Channel:
        source, destination = source // lab.procs_per_node, destination // lab.procs_per_node
        if source == destination:
            return Channel()
        least = min(math.inf if rate is None else rate for rate in (lab.up[source], lab.down[destination]))
        return Channel(bits_per_s=least * TCP_SHARE, latency_s=lab.delay_s)

    neighbours = list(pairwise(ranks))
    return LinkNetwork(
        forward=tuple(line(a, b) for a, b in neighbours),
        backward=tuple(line(b, a) for a, b in neighbours),
        shared=lab.procs_per_node == 1,
    )
