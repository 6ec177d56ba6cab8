"""Time a constant error beside as many fixed bits: a call of the sender's end of a link, and its kernels.

    python -m benchmarks error_cost [--rounds 60] [--threads 1]

One process, no model: sending is encoding, the packet goes nowhere. Calls with an error and with the bits that come out
take turns, so that a busy machine slows both down alike; printed are the least milliseconds of each and their ratio.
"kernels" is `ops.encode_fewest` beside `ops.encode_batch`; for changes, both after a copy of m.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipecomp.buffers import MemoryStore
from pipecomp.codecs import wire
from pipecomp.config import Config
from pipecomp.kernels import ops
from pipecomp.stages.link.endpoint import LinkSender, Position
from pipecomp.stages.link.layout import Layout
from pipecomp.stages.link.transport import finish_packet, loopback_pair

SHAPES = ((144, 384), (2048, 512), (512, 1600))  # tokens of a micro-batch, hidden size
ERRORS = (0.07, 0.1)
LOW, HIGH = 2, 8
SAMPLES, CHANGE = 4, 0.3

Call = Callable[[], object]


def least_ms(calls: Sequence[Call], rounds: int) -> list[float]:
    """Milliseconds of each call, the least of all rounds; they take turns."""
    least = [float("inf")] * len(calls)
    for _ in range(rounds):
        for i, call in enumerate(calls):
            began = time.perf_counter()
            call()
            least[i] = min(least[i], time.perf_counter() - began)
    return [1e3 * seconds for seconds in least]


def kernels(x_TH: Tensor, m_TH: Tensor | None, error: float) -> tuple[int, list[Call]]:
    """Bits that come out, and calls of the kernels: with the error, with these bits."""
    rows, hidden = x_TH.shape
    delta = m_TH is not None
    payload = torch.empty(rows * (4 + ops.row_bytes(hidden, HIGH)), dtype=torch.uint8)
    visit = ops.EncodeItem(x_TH, m_TH, ops.QuantizerOptions(HIGH, None), delta)
    bits = ops.fewest_bits([visit], error, LOW, HIGH)
    part = payload[: rows * (4 + ops.row_bytes(hidden, bits))]
    initial = None if m_TH is None else m_TH.clone()  # moves with every call, and is set back before the next

    def moving() -> ops.EncodeItem:
        if initial is not None and m_TH is not None:
            initial.copy_(m_TH)
        return visit._replace(m=initial)

    def fixed() -> object:
        return ops.encode_batch([moving()._replace(options=ops.QuantizerOptions(bits, None))], part)

    def fitted() -> object:
        return ops.encode_fewest([moving()], payload, error, LOW, HIGH)

    return bits, [fitted, fixed]


def sends(x: Sequence[Tensor], method: str, error: float) -> tuple[int, list[Call]]:
    """Bits that come out, and calls of `send_activation`: with the error, with these bits."""
    samples, tokens, _ = x[0].shape
    layout = Layout(tuple(range(samples)), (0,) * samples, (tokens,) * samples, tokens)
    calls: list[Call] = []
    bits: object = {"error": error, "min": LOW, "max": HIGH}
    for _ in range(2):
        first = {"first_visit": 8} if method == "aqsgd" else {}
        given = {"method": method, "forward_bits": bits, "backward_bits": 8, **first}
        config = Config.from_dict({"activations": given})
        store = MemoryStore("link-0", bits=32, group_size=None) if method == "aqsgd" else None
        end = LinkSender(0, config, loopback_pair(timeout_s=5.0)[0], store)
        sent: list[object] = []
        end.transport.send = sent.append  # type: ignore[method-assign]

        def send(end: LinkSender = end, sent: list[object] = sent, count: list[int] = [0]) -> None:  # noqa: B006
            sent.clear()
            count[0] += 1
            end.send_activation(x[count[0] % 2], layout, Position(count[0], 1))

        calls.append(send)
        send()
        send()
        bits = wire.decode(finish_packet(sent[0]))[0].bits  # type: ignore[arg-type]
    assert isinstance(bits, int)
    return bits, calls


def main(argv: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 60), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    for tokens, hidden in SHAPES:
        draw = torch.Generator().manual_seed(0)
        first_TH, change_TH = (torch.randn(tokens, hidden, generator=draw) for _ in range(2))
        x = [y_TH.view(SAMPLES, -1, hidden) for y_TH in (first_TH, first_TH + CHANGE * change_TH)]
        for error in ERRORS:
            for method in ("direct", "aqsgd"):
                m_TH = x[1].view(tokens, hidden) if method == "aqsgd" else None
                for what, (bits, calls) in (
                    ("kernels", kernels(first_TH, m_TH, error)),
                    ("call", sends(x, method, error)),
                ):
                    fitted, fixed = least_ms(calls, given.rounds)
                    print(
                        f"{tokens:>5} x {hidden:<5} {error:<5} {method:<7} {what:<8} {bits} bits  "
                        f"{fitted:6.3f} / {fixed:6.3f} ms = {fitted / fixed:.2f}"
                    )
