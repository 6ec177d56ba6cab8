"""Averages over real processes: bytes as predicted, errors as worked out here."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch

from benchmarks.averages import (
    FP32,
    LEAST_ROUNDS,
    VARIANTS,
    WARM_UP,
    Bucket,
    Variant,
    bench_allreduce,
    gradient,
    shapes_of,
    values_in,
    variants_of,
)
from pipecomp.allreduce import predict
from pipecomp.errors import ConfigError

pytestmark = pytest.mark.ranks

SHAPES = ((40, 30, 3), (40,), (9, 40))
SIZES = (4096, SHAPES)
KEYS = {
    "label",
    "method",
    "options",
    "torchs_own",
    "d",
    "n",
    "rounds",
    "total_ms",
    "quantize_ms",
    "wait_ms",
    "reduce_ms",
    "decode_ms",
    "bytes_raw",
    "bytes_sent",
    "error",
    "state_error",
    "speedup",
}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    found = bench_allreduce(sizes=SIZES, variants=VARIANTS, seconds=1e-3)
    few = variants_of("fp16,powersgd,qsgd")
    return found + bench_allreduce(sizes=(SHAPES,), ranks=(3,), variants=few, seconds=1e-3)


def test_every_method_on_every_bucket(rows: list[dict[str, Any]]) -> None:
    labels = ["fp32", *(v.label for v in VARIANTS)]
    assert len(set(labels)) == len(labels)
    cases = [(row["d"], row["label"]) for row in rows if row["n"] == 2]
    assert cases == [(values_in(shapes_of(size)), label) for size in SIZES for label in labels]
    for row in rows:
        assert set(row) == KEYS
        assert row["rounds"] == LEAST_ROUNDS
        parts = [row[f"{part}_ms"] for part in ("quantize", "wait", "reduce", "decode")]
        assert row["total_ms"] > 0
        assert row["speedup"] > 0
        assert min(parts) >= 0
        assert 0 < sum(parts) <= 1.001 * row["total_ms"]


def test_bytes_are_those_predicted(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        shapes = shapes_of(row["d"]) if row["d"] == SIZES[0] else SHAPES
        more = {"shapes": shapes} if row["method"] == "powersgd" else {}
        wanted = predict(row["method"], row["d"], row["n"], bandwidth_bit_per_s=1e9, **more, **row["options"])
        assert row["bytes_raw"] == wanted.bytes_raw
        if row["label"] == "fp32":
            assert row["bytes_sent"] == wanted.bytes_raw
        elif wanted.exact:
            assert row["bytes_sent"] == wanted.bytes_sent
        else:  # the values decide
            assert 0.3 * wanted.bytes_sent < row["bytes_sent"] < 1.6 * wanted.bytes_sent


def test_torchs_own_functions_and_states_agree(rows: list[dict[str, Any]]) -> None:
    found = {(row["n"], row["d"], row["label"]): row for row in rows}
    torchs_own = [key for key in found if key[2].endswith("(torch)")]
    assert len(torchs_own) == 3 * 3
    for n, d, label in torchs_own:
        theirs, ours = found[n, d, label], found[n, d, label.removesuffix(" (torch)")]
        assert theirs["error"] == pytest.approx(ours["error"], rel=1e-3)
        assert theirs["bytes_sent"] == ours["bytes_sent"]
        assert theirs["state_error"] is None


def test_errors_are_those_of_the_mean(rows: list[dict[str, Any]]) -> None:
    """Half precision, worked out here: torch's hook divides by n, rounds, and adds in half precision."""
    for row in rows:
        if row["label"] in ("fp32", "none"):
            assert row["error"] < 1e-6
        if row["label"] == "fp16" and row["n"] == 2:
            shapes = shapes_of(row["d"]) if row["d"] == SIZES[0] else SHAPES
            errors = []
            for turn in range(WARM_UP, WARM_UP + LEAST_ROUNDS):
                a, b = (gradient(shapes, rank, turn) for rank in range(2))
                exact = (a.double() + b.double()) / 2
                mean = (a.half() / 2 + b.half() / 2).double()
                errors.append(float((mean - exact).norm() / exact.norm()))
            assert row["error"] == pytest.approx(statistics.median(errors), rel=0.01)
    by_label = {row["label"]: row for row in rows if row["n"] == 2}
    assert by_label["global_qsgd linear 8"]["error"] < by_label["global_qsgd linear 4"]["error"]
    for row in rows:
        states = not row["torchs_own"] and row["method"] not in ("powersgd", "fp16", "none")
        assert (row["state_error"] is not None) == states


def test_gradients_differ_between_ranks_and_rounds_and_come_again() -> None:
    first = gradient(SHAPES, 0, 0)
    assert torch.equal(first, gradient(SHAPES, 0, 0))
    assert first.numel() == values_in(SHAPES) == sum(map(math.prod, SHAPES))
    matrix = slice(0, 3600)
    for other in (gradient(SHAPES, 1, 0), gradient(SHAPES, 0, 1)):
        alike = torch.nn.functional.cosine_similarity(first[matrix], other[matrix], dim=0)
        assert 0.02 < float(alike) < 0.98


def test_buckets_look_like_ddps() -> None:
    bucket = Bucket(SHAPES)
    bucket.set_buffer(torch.arange(4000.0))
    assert [tuple(g.shape) for g in bucket.gradients()] == list(SHAPES)
    bucket.gradients()[1].zero_()
    assert bucket.buffer()[3600:3640].sum() == 0
    assert float(bucket.buffer()[3640]) == 3640
    assert shapes_of(4096) == ((64, 64),)
    assert shapes_of(13) == ((1, 13),)


def test_methods_are_chosen_by_name() -> None:
    assert [v.label for v in variants_of("fp16, qsgd_mn")] == ["fp16", "fp16 (torch)", "qsgd_mn 8"]
    assert FP32.label == "fp32"
    assert Variant("global_qsgd", {"levels": "linear", "sparse": True}).label == "global_qsgd linear sparse"


@pytest.mark.parametrize(
    ("settings", "key"), [({"ranks": (0,)}, "ranks"), ({"sizes": (0,)}, "sizes"), ({"seconds": 0}, "seconds")]
)
def test_wrong_settings_are_named(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bench_allreduce(**settings)
    assert caught.value.key == key
