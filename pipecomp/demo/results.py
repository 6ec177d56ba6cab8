"""What the demo's runs reached, and when: from what each rank measured to the sentence at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pipecomp.demo.lengthen import lengthened, seconds_per_step
from pipecomp.demo.settings import NAMES, WARM_UP, Settings
from pipecomp.stats import total_bytes
from pipecomp.utils.units import format_duration, format_nominal_rate, format_ratio, parse_rate


def summary(settings: Settings, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One method's results, from what its ranks measured."""
    first, steps = ranks[0], settings.steps
    plain = {"none": 32, "fp16": 16, "bf16": 16}
    # Both ends count a link alike; take link k from rank k, which sends its activations.
    links = [r["stats"]["links"][f"{k}->{k + 1}"] for k, r in enumerate(ranks[:-1])]
    forward_raw, forward_sent = total_bytes(links, "forward")
    backward_raw, backward_sent = total_bytes(links, "backward")
    measured = first["seconds"]
    seconds = lengthened(measured, steps, WARM_UP)
    derived = len(measured) < steps
    return {
        "method": first["method"],
        "forward_bits": plain.get(first["method"], settings.forward_bits),
        "backward_bits": plain.get(first["method"], settings.backward_bits),
        "train_loss": epoch_means(first["losses"], settings.per_epoch)[-1],
        "eval_loss": first["eval_loss"],
        "forward_bytes_raw": forward_raw,
        "forward_bytes_sent": forward_sent,
        "backward_bytes_raw": backward_raw,
        "backward_bytes_sent": backward_sent,
        "store_bytes": sum(r["store_bytes"] for r in ranks),
        "step_s": seconds_per_step(measured, WARM_UP) if derived else seconds[-1] / steps,
        "measured_steps": len(measured),
        "losses": first["losses"],
        "seconds": seconds,
    }


def epoch_means(losses: Sequence[float], per_epoch: int) -> list[float]:
    """Return for every step, from the end of the first epoch on, the mean loss of as many steps as an epoch has."""
    return [sum(losses[end - per_epoch : end]) / per_epoch for end in range(per_epoch, len(losses) + 1)]


def steps_to(losses: Sequence[float], per_epoch: int, loss: float) -> int | None:
    """Return after how many steps `epoch_means` is first at most `loss`; None if it never is."""
    means = epoch_means(losses, per_epoch)
    return next((i for i, mean in enumerate(means, per_epoch) if mean <= loss), None)


def compare(settings: Settings, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the methods side by side.

    Returns:
        "settings": what was run. "link": its rate, for people. "bandwidth": the same in bits per second. "per_epoch":
        steps. "results": a `summary` of each method, with "reached": the steps after which it had the loss that AQ-SGD
        ended with, None if it never had. "loss": that loss. "gap_closed": how much of the loss that DirectQ loses
        against FP32 AQ-SGD does not lose. "faster": how many times as long FP32 needs for that loss. "sentence": all of
        it in words. None where a method that it needs was not run, or where a loss that it needs is no number.
    """
    by_name = {r["method"]: r for r in results}
    fp32, direct, aqsgd = (by_name.get(name) for name in ("none", "direct", "aqsgd"))
    loss = aqsgd["train_loss"] if aqsgd and math.isfinite(aqsgd["train_loss"]) else None
    for r in results:
        r["reached"] = None if loss is None else steps_to(r["losses"], settings.per_epoch, loss)
    closed = None
    if fp32 and direct and loss is not None and fp32["train_loss"] < direct["train_loss"] < math.inf:
        closed = (direct["train_loss"] - loss) / (direct["train_loss"] - fp32["train_loss"])
    faster = None
    if fp32 and aqsgd and fp32["reached"]:
        faster = seconds_until(fp32) / seconds_until(aqsgd)
    rate = parse_rate("bandwidth", settings.bandwidth)
    found = {
        "settings": asdict(settings),
        "link": format_nominal_rate(rate),
        "bandwidth": rate,
        "per_epoch": settings.per_epoch,
        "loss": loss,
        "gap_closed": closed,
        "faster": faster,
        "results": results,
    }
    return {**found, "sentence": _sentence(found)}


def seconds_until(result: dict[str, Any]) -> float:
    """Return after how many seconds a result had the loss that it has "reached"."""
    return result["seconds"][result["reached"] - 1]


def _sentence(found: dict[str, Any]) -> str | None:
    """All of it in words; None where there is nothing to compare AQ-SGD with."""
    by_name = {r["method"]: r for r in found["results"]}
    aqsgd, others = by_name.pop("aqsgd", None), list(by_name.values())
    if aqsgd is None or not others:
        return None
    link = f"Over this link of {found['link']}"
    if found["loss"] is None:
        return f"{link}, AQ-SGD ended with a training loss that is no number."
    mine = seconds_until(aqsgd)
    arrived = [r for r in others if r["reached"] is not None]
    if arrived:
        first, *arrived = arrived
        needs = "needs" if first["measured_steps"] < len(first["losses"]) else "needed"
        theirs = seconds_until(first)
        parts = [
            f"{link}, {NAMES[first['method']]} {needs} {format_duration(theirs)} to reach the training loss that "
            f"AQ-SGD reached in {format_duration(mine)}: {format_ratio(theirs / mine)} as long"
        ]
    else:
        parts = [f"{link}, AQ-SGD reached a training loss of {found['loss']:.3f} in {format_duration(mine)}"]
    parts += [f"{NAMES[r['method']]} reached it in {format_duration(seconds_until(r))}" for r in arrived]
    parts += [f"{NAMES[r['method']]} did not reach it" for r in others if r["reached"] is None]
    return "; ".join(parts) + "."
