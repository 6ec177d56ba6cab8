"""`pipecomp up` on machines behind routers that let no connection in: a command on each, and no other preparation."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipecomp.netlab import Lab
from tests.dist.lab_ranks import WITH_FILTERS
from tests.up.test_up import Machine, up

pytestmark = WITH_FILTERS
PORT = 29400


@contextlib.contextmanager
def behind_routers(folder: Path, count: int) -> Iterator[tuple[list[Machine], str]]:
    """Machines of a lab, all but the first behind routers of their own, and the first one's address."""
    with Lab(nodes=count, nat=True) as lab:
        spaces = [("ip", "netns", "exec", f"{lab.name}-n{node}") for node in range(count)]
        machines = [Machine(folder / f"machine-{node}", *space) for node, space in enumerate(spaces)]
        try:
            yield machines, lab.network.address(0)
        finally:
            for machine in machines:
                if machine.process is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(machine.process.pid, signal.SIGKILL)
                    machine.process.wait()


@pytest.mark.parametrize("count", [2, 3], ids=["one behind a router", "two behind routers, relayed"])
def test_machines_behind_routers_come_to_a_trained_model(tmp_path: Path, count: int) -> None:
    with behind_routers(tmp_path, count) as (machines, address):
        for machine in machines:
            model = machine.folder / "model.json"
            model.write_text(json.dumps(json.loads(model.read_text()) | {"n_layer": count}))
        options = ("--machines", str(count), "--no-plan") if count > 2 else ()
        up(machines, *options, port=PORT, at=address)
        statuses = [machine.end() for machine in machines]
        said = "\n".join(machine.said() for machine in machines)
        assert statuses == [0] * count, said
    first = machines[0]
    assert f"up: {count} ranks are connected over tls" in first.said(), said
    assert "step 3/3" in first.said(), said
    assert ("relayed by rank 0: 1 and 2" in first.said()) == (count > 2), said
    assert json.loads((first.folder / "trained" / "config.json").read_text())
    for machine in machines:
        assert "Traceback" not in machine.said(), said
