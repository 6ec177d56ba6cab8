"""Exchange of values between ranks: plain values come back as they were, others are refused."""

from __future__ import annotations

import io
import json
import pickle
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
from torch.distributed import distributed_c10d

from pipecomp.distributed.collectives import exchange_objects_as_json
from pipecomp.doctor.measure import LinkMeasurement
from pipecomp.engine.trace import TraceEvent
from pipecomp.errors import WireError
from pipecomp.plan.auto_bits import RankMeasurement
from pipecomp.plan.simulation import StageCosts
from pipecomp.utils.serialization import decode, encode, serializable


@serializable
class Pair(NamedTuple):
    """Marked."""

    a: object
    b: object


@serializable
@dataclass(frozen=True, kw_only=True)
class Record:
    """Marked."""

    name: str
    pairs: tuple[Pair, ...] = ()


class Unmarked(NamedTuple):
    """A tuple like any other."""

    a: int


VALUES = [
    None, True, 3, 2.5, "ü", b"\x00\xff", [], (), {}, [1, (2, [3])], {"a": {1: (2,)}, (1, 2): None}, {3, 1},
    float("inf"),
    Pair(1, Pair("x", [2])), Record(name="r", pairs=(Pair(1, 2),)), [Record(name="")],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back(value):
    found = decode(encode(value))
    assert found == value
    assert type(found) is type(value)


def test_what_ranks_measure_comes_back():
    link = LinkMeasurement(1e9, 2e9, 0.001)
    for value in (
        RankMeasurement(1, StageCosts(forward_s=0.5, backward_s=1.0), link),
        TraceEvent("forward", 1.0, 2.0, 3, 0),
    ):
        found = decode(encode(value))
        assert found == value
        assert type(found) is type(value)


def test_numbers_of_numpy_and_unmarked_tuples_become_plain():
    assert decode(encode({"a": np.float32(0.5), "b": np.int64(3)})) == {"a": 0.5, "b": 3}
    assert type(decode(encode(Unmarked(1)))) is tuple


@pytest.mark.parametrize("value", [object(), len, Unmarked, np.zeros(3), 1j])
def test_what_is_not_plain(value):
    with pytest.raises(TypeError, match="ranks exchange plain values only"):
        encode([value])


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps([1]),
        b"",
        b"[",
        b'{"x": 1, "y": 2}',
        b'{"call": ["os.system", ["id"]]}',
        b'{"record": ["os.system", ["id"]]}',
        b'{"record": ["pathlib.Path", ["x"]]}',
        b'{"list": 3}',
        b'{"bytes": "?"}',
        b"[" * 100_000,
        json.dumps({"record": [f"{__name__}.Pair", [1]]}).encode(),
        json.dumps({"record": [f"{__name__}.Record", [1]]}).encode(),
    ],
)
def test_foreign_bytes(data):
    with pytest.raises(WireError, match="cannot decode"):
        decode(data)


def test_torchs_object_collectives_read_no_pickles(monkeypatch):
    for name in ("_pickler", "_unpickler"):
        monkeypatch.setattr(distributed_c10d, name, getattr(pickle, name[1:].title()))
    exchange_objects_as_json()
    file = io.BytesIO()
    distributed_c10d._pickler(file).dump({"a": (1,)})
    assert distributed_c10d._unpickler(io.BytesIO(file.getvalue())).load() == {"a": (1,)}
    with pytest.raises(WireError):
        distributed_c10d._unpickler(io.BytesIO(pickle.dumps({"a": 1}))).load()
