"""Runs that were never run: folders with the counters that a run over links of a given rate would have."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pipecomp.config import Config
from pipecomp.engine.trace import TraceEvent, chrome_events
from pipecomp.plan.packet_sizes import activation_bytes, gradient_bytes
from pipecomp.plan.simulation import LinkNetwork, StageCosts, StepSpec, simulate_step, uniform
from pipecomp.report.recorder import Recorder
from pipecomp.utils.serialization import replace_nonfinite

HIDDEN, TOKENS, SAMPLES, MICRO_BATCHES, STEPS = 256, 64, 4, 8, 20
COSTS = StageCosts(forward_s=0.010, backward_s=0.020, encode_s=0.001, decode_s=0.001)
AQSGD = {"method": "aqsgd", "forward_bits": 3, "backward_bits": 6, "first_visit": 8}


def made_step(config: Config, stages: int = 2) -> StepSpec:
    """Return such a run's step after every sample's first visit."""
    size = ([TOKENS] * SAMPLES, HIDDEN, torch.float32)
    links = range(stages - 1)
    return StepSpec(
        stages=[COSTS] * stages,
        micro_batches=MICRO_BATCHES,
        forward_bytes=[activation_bytes(config, k, *size) for k in links],
        backward_bytes=[gradient_bytes(config, k, *size) for k in links],
        in_flight=[min(MICRO_BATCHES, stages - k) for k in range(stages)],
    )


def counters(step: StepSpec, steps: int, wait_s: float) -> list[dict[str, Any]]:
    """`comm_stats` of all ranks after so many of these steps."""
    K, count = len(step.stages), steps * step.micro_batches
    raw = 4 * HIDDEN * TOKENS * SAMPLES

    def link(k: int) -> dict[str, Any]:
        ways = {"forward": step.forward_bytes[k], "backward": step.backward_bytes[k], "evaluation": 0}
        return {
            **{
                w: {
                    "messages": count, "bytes_raw": raw * count, "bytes_sent": int(n) * count,
                    "values_quantized": raw * count // 4, "code_bits": raw * count,
                }
                for w, n in ways.items()
            },
            "full_samples": 0, "delta_samples": count * SAMPLES, "wait_seconds": wait_s * steps,
        }  # fmt: skip

    def rank(k: int) -> dict[str, Any]:
        links = {f"{i}->{i + 1}": link(i) for i in (k - 1, k) if 0 <= i < K - 1}
        each = count * len(links)
        costs = step.stages[k]
        seconds = {"forward": count * costs.forward_s, "backward": count * costs.backward_s}
        seconds |= {"encode": each * costs.encode_s, "decode": each * costs.decode_s}
        seconds |= {"wait": 1e3 * steps, "reduce": 0.0, "update": 0.0}  # the rest of a step: no part is left over
        return {
            "rank": k, "stage": k, "replica": 0, "steps": steps, "links": links, "groups": {}, "seconds": seconds,
            "in_flight": step.run_ahead(k), "micro_batches": [], "store_bytes": 0,
        }  # fmt: skip

    return [rank(k) for k in range(K)]


def make_run(
    folder: Path,
    activations: dict[str, Any] | None = None,
    *,
    network: LinkNetwork,
    stages: int = 2,
    told: bool = False,
    trace: bool = True,
    **facts: Any,
) -> StepSpec:
    """Record a run over these links. told: whether its folder says what they are, as in a network lab."""
    config = Config.from_dict({"activations": AQSGD if activations is None else activations})
    step = made_step(config, stages)
    played = simulate_step(step, network)
    recorder = Recorder(folder)
    described = {
        "model": "GPT2LMHeadModel", "stages": stages, "replicas": 1, "cuts": list(range(stages + 1)),
        "micro_batch": SAMPLES, "micro_batches": MICRO_BATCHES, "dtype": "float32", "hidden": HIDDEN,
        "settings": replace_nonfinite(config.model_dump()),
        "network": replace_nonfinite(asdict(network)) if told else None,
    }  # fmt: skip
    recorder.start(STEPS, kind="recipe", unit="tokens", **{**described, **facts})
    for number in range(1, STEPS + 1):
        loss = 5 - 0.2 * number
        stats = counters(step, number, max(played.waits))
        recorder.step(number, stats, loss=loss, lr=1e-3, step_s=played.seconds, per_s=1000.0)
    recorder.evaluated(STEPS, {"loss": 1.5})
    events = {
        k: [TraceEvent("forward", k, k + 0.5, STEPS, 0), TraceEvent("encode", k + 0.5, k + 0.6, STEPS, 0)]
        for k in (0, 1)
    }
    recorder.end(counters(step, STEPS, max(played.waits)), chrome_events(events) if trace else ())
    return step


def slow(stages: int = 2, bits_per_s: float = 5e6) -> LinkNetwork:
    """Links that take about as long as computing."""
    return uniform(stages, bits_per_s)
