"""Whole engines over a GPU's double train, send and store, bit for bit, what they do on the host."""

from __future__ import annotations

from typing import Any

import pytest

from pipecomp.distributed.local_launcher import run_ranks
from tests.golden.work import digest, messages
from tests.lazy_staging import LazyStaging
from tests.limits import HANG_S
from tests.models import ds_config, gpt2, samples

pytestmark = pytest.mark.ranks


def train(rank: int, world: int, note: Any, folder: str, double: bool) -> dict[str, Any]:
    import pipecomp
    from pipecomp import initialization

    if double:
        initialization.staging_for = lambda device, pinned_bytes: LazyStaging()  # type: ignore[assignment]
    activations = {"method": "aqsgd", "forward_bits": 3, "backward_bits": 6, "first_visit": 8}
    section = {
        "activations": activations,
        "store": {"path": folder, "bits": 8, "drift_check": 2},
        "gradients": {"method": "double_squeeze"},  # of the tied weight, which both stages hold
    }
    engine = pipecomp.initialize(gpt2(), num_stages=2, config=ds_config(section), training_data=samples(8))
    losses = [float(engine.train_batch()).hex() for _ in range(4)]
    links = engine.comm_stats()["links"]
    found = {
        "losses": losses,
        "weights": digest(*engine.stage.parameters()),
        "messages": messages(engine),
        "sent": {name: [link["forward"]["bytes_sent"], link["backward"]["bytes_sent"]] for name, link in links.items()},
        "staged": [type(end.staging).__name__ for end in (*engine.links, *(s for _, s in engine.gradients.states()))],
    }
    engine.close()
    return found


def test_an_engine_over_the_double_does_the_same(tmp_path):
    host, double = (run_ranks(2, train, str(tmp_path / str(how)), how, timeout_s=HANG_S) for how in (False, True))
    assert all(found.pop("staged") == ["HostStaging"] * 2 for found in host.values())
    assert all(found.pop("staged") == ["LazyStaging"] * 2 for found in double.values())
    assert double == host
