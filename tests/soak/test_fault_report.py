"""The bookkeeping of tests/soak/kill_rounds.py and fault_run.py: what they must call wrong."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipecomp.buffers import LmdbEnvironment
from pipecomp.config import Config
from tests.soak import fault_run, kill_report, kill_rounds
from tests.soak.fault_report import MIB, Event, Life, growth, page, problems
from tests.soak.leaks import Held, Machine, slope
from tests.soak.restarts import OnDisk, stores_on_disk


def samples(mib_an_hour=0.0, fds=20, more_fds=0):
    return [
        Held(3.0 * i, int(200 * MIB + mib_an_hour * MIB * 3.0 * i / 3600), fds + more_fds * (i > 150), 9)
        for i in range(200)
    ]


def sampler(**held):
    return SimpleNamespace(held={"supervisor": samples(), **held}, machine=[Machine(0.0, 6, 1, 10, 10)])


def life(compared=(50, 0), drifts=0, **disk):
    return Life(100, list(compared), drifts, 0, OnDisk(**{"unopened": {}, "alike": 50, **disk}))


def test_slope():
    assert slope([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]) == pytest.approx(2.0)
    assert slope([(0.0, 1.0), (1.0, 3.0)]) is None
    assert slope([(1.0, 1.0)] * 3) is None


def test_growth_is_of_warm_processes():
    assert growth(samples(mib_an_hour=90.0))[0] == pytest.approx(90.0, rel=1e-3)
    assert growth(samples()[:10]) == (None, 0, 0)
    assert growth(samples(more_fds=12))[1:] == (12, 0)


GOOD = [
    Event(3, "pause", 1, True, 4.0, "", []),
    Event(9, "kill", 1, False, 4.0, "…", []),
    Event(20, "pause", 1, False, 4.0, "StoreError: damaged", []),
]


def test_what_is_right():
    lives = [life(), life(drifts=2)]
    events = [*GOOD, Event(30, "value", 0, True, 1.0, "", [])]
    assert problems(events, lives, sampler()) == []
    assert "Nothing is wrong." in page(events, lives, sampler(), minutes=1, command="…")


@pytest.mark.parametrize(
    ("events", "lives", "held"),
    [
        ([Event(3, "pause", 1, False, 4.0, "an error", [])], [life()], {}),
        ([Event(3, "nothing", 1, False, 4.0, "an error", [])], [life()], {}),
        ([Event(3, "nan", 1, True, 4.0, "", [])], [life()], {}),
        ([Event(3, "disk", 1, True, 4.0, "", [])], [life()], {}),
        ([Event(3, "kill", 1, False, 4.0, "", [2])], [life()], {}),
        (GOOD, [life(silent=1, differ=1), life()], {}),
        (GOOD, [life(), life(differ=1)], {}),
        (GOOD, [life(unopened={"rank-1": "…"}), life()], {}),
        (GOOD, [life(compared=(50, 1)), life()], {}),
        (GOOD, [life(drifts=1)], {}),
        (GOOD, [life()], {"start 0 rank 1": samples(mib_an_hour=90.0)}),
        (GOOD, [life()], {"start 0 rank 1": samples(more_fds=12)}),
    ],
)
def test_what_is_wrong(events, lives, held):
    assert len(problems(events, lives, sampler(**held))) == 1


def test_a_run_can_start_with_its_configuration(tmp_path, monkeypatch):
    monkeypatch.setattr(fault_run.FaultRun, "_new_start", lambda self: None)
    monkeypatch.setattr(fault_run, "Sampler", lambda *args, **more: None)
    folder = Path(fault_run.FaultRun(tmp_path, 0).job["folder"])
    config = Config.from_dict(json.loads((folder / "ds_config.json").read_text())["pipecomp"])
    assert config.activations.backward_method == "delta"


def test_stores_are_compared_byte_for_byte(tmp_path):
    import torch

    for rank, last in ((0, 3.0), (1, 4.0)):
        environment = LmdbEnvironment(tmp_path / f"rank-{rank}")
        store = environment.link("link-0", {"replica": "0 of 1"})
        store.put(1, 1, torch.full((2, 3), 1.0))
        store.put(2, 1 + rank, torch.full((2, 3), 2.0))
        store.put(3, 2, torch.full((2, 3), last))
        store.commit()
        environment.close()
    assert stores_on_disk(tmp_path) == OnDisk({}, alike=1, differ=2, silent=1)
    file = tmp_path / "rank-1" / "data.mdb"
    data = bytearray(file.read_bytes())
    data[data.index(b"PCMV") + 44] ^= 1
    file.write_bytes(data)
    assert list(stores_on_disk(tmp_path).unopened) == ["rank-1"]


def test_verdict_on_kill_rounds():
    row = {
        "victim": 1,
        "phase": "saving",
        "unopened": {},
        "silent": 0,
        "differ": 2,
        "alike": 5,
        "compared": [9, 0],
        "dropped": 4,
        "late": [],
        "resumed": [4, True],
        "steps": 6,
        "seconds": 1.0,
    }
    rounds = [row, {**row, "victim": None, "differ": 0}]
    run = {"seed": 0, "copies": True, "same": True, "losses": [1.0], "rounds": rounds}
    undisturbed = [{"seed": s, "losses": [1.0 + 0.1 * s]} for s in range(3)]

    def verdict(end=None, **changes):
        changed = {**run, **{k: v for k, v in changes.items() if k in run}}
        last = {**run["rounds"][1], **(end or {})}
        changed["rounds"] = [{**row, **{k: v for k, v in changes.items() if k in row}}, last]
        return kill_report.verdict(kill_report.summary(undisturbed, [changed], **kill_rounds.PLAIN._asdict(), epochs=3))

    assert verdict() == []
    assert verdict(end={"differ": 1, "steps": 0}) == [], "what ends dropped leaves the disk with the next step"
    for change in (
        {"end": {"differ": 1}},
        {"unopened": {"rank-0": "…"}},
        {"silent": 1},
        {"compared": [9, 1]},
        {"late": [0]},
        {"same": False},
        {"copies": False, "losses": [2.0]},
    ):
        assert len(verdict(**change)) == 1, change
