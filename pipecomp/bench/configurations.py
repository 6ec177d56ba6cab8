"""What `pipecomp bench pipeline` compares: the model, the links' rates, and the lines of its table.

r says how slow a link is: the time that the packets of one micro-batch take in float32, both directions added, over
the time that one stage computes on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipecomp.errors import require

UNTHROTTLED = 0.0
RATES = (UNTHROTTLED, 0.3, 1.0, 3.0, 5.8, 12.0)
STOCK_BF16 = "DeepSpeed BF16"
STOCK, TWICE = "DeepSpeed FP32", "DeepSpeed FP32, 2 replicas"
EIGHT, SIXTEEN = "AQ-SGD fw3 bw6", "AQ-SGD fw3 bw6, 16 micro-batches"
COARSE = "AQ-SGD fw2 bw4, 16 micro-batches"
MEMORY = f"{SIXTEEN}, memory store"
REPLICAS = {bits: f"{EIGHT}, 2 replicas, {bits}-bit gradients" for bits in (4, 1)}


@dataclass(frozen=True, kw_only=True)
class Model:
    """The GPT-2 that is trained: blocks, width, tokens a sample; samples of one step.

    The vocabulary is small, so that the last stage, which has the output layer, computes about as long as the others.
    """

    blocks: int = 4
    width: int = 512
    heads: int = 8
    tokens: int = 256
    vocabulary: int = 512
    samples: int = 16


@dataclass(frozen=True, kw_only=True)
class Line:
    """One configuration. engine: "deepspeed" (stock) or "pipecomp". section: pipecomp's. dtype: "fp32" or "bf16".

    against: the line that it is compared with.
    """

    name: str
    engine: str = "pipecomp"
    dtype: str = "fp32"
    micro_batches: int = 8
    replicas: int = 1
    section: dict[str, Any] = field(default_factory=dict)
    against: str = STOCK

    @property
    def period(self) -> int:
        """Steps from one averaging of replicas to the next, which are timed together."""
        return int(self.section.get("gradients", {}).get("local_steps") or 1)

    def counts(self, step: int, engine: Any, most_uncounted: int = 8) -> bool:
        """Say whether a step is timed. Stock DeepSpeed's are all alike; AQ-SGD's first one sends first visits.

        most_uncounted: steps before a timed one, at most, while pipecomp still tries how many micro-batches to have in
        flight.
        """
        if self.engine == "deepspeed":
            return step >= 1
        return step >= 2 and (step >= most_uncounted or not engine.in_flight.observing)


def aqsgd(forward: int, backward: int, backend: str = "lmdb") -> dict[str, Any]:
    """Make the settings of AQ-SGD with so many bits for activations and gradients."""
    activations = {"method": "aqsgd", "forward_bits": forward, "backward_bits": backward}
    return {"activations": activations, "store": {"backend": backend}}


LINES = (
    Line(name=STOCK, engine="deepspeed"),
    Line(name=STOCK_BF16, engine="deepspeed", dtype="bf16"),
    Line(name="FP32"),
    Line(name="FP32, 1F1B's number in flight", section={"in_flight": 1}),
    Line(name="BF16", dtype="bf16"),
    Line(name="DirectQ fw3 bw6", section={"activations": {"method": "direct", "forward_bits": 3, "backward_bits": 6}}),
    Line(name=EIGHT, section=aqsgd(3, 6)),
    Line(name=SIXTEEN, section=aqsgd(3, 6), micro_batches=16),
    Line(name=COARSE, section=aqsgd(2, 4), micro_batches=16),
    Line(name=MEMORY, section=aqsgd(3, 6, "memory"), micro_batches=16),
    Line(name=TWICE, engine="deepspeed", replicas=2, against=TWICE),
    *(
        Line(
            name=name,
            replicas=2,
            against=TWICE,
            section={**aqsgd(3, 6), "gradients": {"method": "double_squeeze", "bits": bits}},
        )
        for bits, name in REPLICAS.items()
    ),
)


def local_lines(local_steps: int) -> tuple[Line, ...]:
    """Two replicas that average after so many steps, with few bits; fragments travel while the next steps are taken."""
    every = f"every {local_steps} steps"
    overlap = {"fragments": min(2, local_steps), "overlap": max(1, local_steps // 4)}
    kinds = (
        (f"{EIGHT}, 2 replicas, 4 bits {every}", aqsgd(3, 6), 8, {"bits": 4}),
        (f"{SIXTEEN}, 2 replicas, 4 bits {every}", aqsgd(3, 6), 16, {"bits": 4}),
        (f"{SIXTEEN}, 2 replicas, 4 bits {every}, overlapped", aqsgd(3, 6), 16, {"bits": 4, **overlap}),
        (f"{COARSE}, 2 replicas, 2 bits {every}, overlapped", aqsgd(2, 4), 16, {"bits": 2, **overlap}),
        (f"{COARSE}, 2 replicas, 1 bit {every}, overlapped", aqsgd(2, 4), 16, {"bits": 1, **overlap}),
    )
    return tuple(
        Line(
            name=name,
            replicas=2,
            against=TWICE,
            micro_batches=micro_batches,
            section={**section, "gradients": {"method": "double_squeeze", "local_steps": local_steps, **gradients}},
        )
        for name, section, micro_batches, gradients in kinds
    )


def lines_of(text: str | None, local_steps: str | None = None) -> tuple[Line, ...]:
    """Choose the lines whose names contain one of the parts in `text`; all for None. ConfigError if there are none.

    local_steps: numbers of steps between averages of replicas, with commas, for which there are lines too.
    """
    lines = LINES
    for number in (local_steps or "").split(",") if local_steps is not None else ():
        ok = number.strip().isdecimal() and int(number) >= 2
        require(ok, "local_steps", local_steps, "whole numbers of at least 2, separated by commas")
        lines += local_lines(int(number))
    parts = [part.strip().lower() for part in (text or "").split(",")]
    chosen = tuple(line for line in lines if any(part in line.name.lower() for part in parts))
    require(chosen, "lines", text, ", ".join(line.name for line in lines))
    return chosen


def rates_of(text: str) -> tuple[float, ...]:
    """Read values of r from "0,1,5.8"."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = (-1.0,)
    require(
        all(0 <= r <= 1000 for r in rates), "rates", text, "numbers from 0 (unthrottled) to 1000, separated by commas"
    )
    return rates


def message_bytes(model: Model, micro_batches: int = 8) -> int:
    """Count the float32 bytes of one micro-batch's activations and gradients together."""
    return 2 * 4 * model.samples // micro_batches * model.tokens * model.width


def rate_for(model: Model, r: float, compute_s: float) -> int:
    """Find the bit/s at which a micro-batch's float32 packets take r times what a stage computes on it."""
    return int(8 * message_bytes(model) / (r * compute_s))
