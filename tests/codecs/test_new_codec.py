"""A new codec takes the files that docs/architecture.md names and no more: added in a copy, used over a link."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.package_copy import PackageCopy, named_files

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

CODEC = '''

@dataclass(frozen=True)
class Float8:
    """Values as float8 (e4m3), relative to their row's largest: scales (float32), then a byte for each value."""

    method: PayloadMethod = PayloadMethod.FLOAT8
    bits: int = 8
    payload_dtype: DType = DType.FLOAT32

    def payload_bytes(self, tokens: int, hidden: int) -> int:
        return tokens * (4 + hidden)

    def encode(
        self, x_TH: Tensor, payload: Tensor, seed: int = 0, packet: Tensor | None = None
    ) -> list[FiniteFlag]:
        x_TH = x_TH.detach().float()
        scale_T1 = (x_TH.abs().amax(dim=1, keepdim=True) / 448).clamp(min=2**-100)
        payload.copy_(torch.cat([as_bytes(scale_T1), as_bytes((x_TH / scale_T1).to(torch.float8_e4m3fn))]))
        flag = torch.where(x_TH.isfinite().all(), ops.ALL_FINITE, 0).reshape(1)
        return [FiniteFlag(flag, lambda _: NonFiniteError("values are not finite"))]

    def decode(self, payload: Tensor, tokens: int, hidden: int) -> Tensor:
        _check_length(payload, self.payload_bytes(tokens, hidden))
        scale_T1 = of_bytes(payload[: 4 * tokens], torch.float32, (tokens, 1))
        return of_bytes(payload[4 * tokens :], torch.float8_e4m3fn, (tokens, hidden)).float() * scale_T1
'''

USE = """
import json, sys
import torch
import pipecomp.codecs.codecs
from pipecomp.config import Config
from pipecomp.demo.results import method_label
from pipecomp.errors import ConfigError, LinkError, NonFiniteError
from pipecomp.codecs.wire import PayloadMethod, parse
from pipecomp.plan.packet_sizes import activation_bytes, gradient_bytes
from pipecomp.stages.link.layout import Layout
from pipecomp.stages.link.endpoint import Position
from pipecomp.stages.link.transport import loopback_pair
from pipecomp.stages.link.endpoint import LinkReceiver
from pipecomp.stages.link.endpoint import LinkSender

assert pipecomp.codecs.codecs.__file__.startswith(sys.argv[1])
B, S, H = 3, 8, 16
COUNTS = (8, 5, 1)
layout = Layout((1, 2, 3), (0, 0, 0), COUNTS, S)
real = torch.arange(S) < torch.tensor(COUNTS)[:, None]

def link(ours, theirs=None):
    a, b = loopback_pair(timeout_s=0.2)
    return LinkSender(0, ours, a, None), LinkReceiver(0, theirs or ours, b, None)

def config(**activations):
    return Config.from_dict({"activations": activations})

def close(got, wanted):
    assert not bool(got[~real].any())
    assert 0 < float((got - wanted)[real].abs().max()) < float(wanted.abs().max()) / 16

float8 = config(method="fp8")
up, down = link(float8)
for step in range(3):
    at = Position(step, 0)
    x = torch.randn(B, S, H) * 10.0 ** (step - 1)
    up.send_activation(x, layout, at)
    y, seen = down.recv_activation(at)
    assert seen == layout
    close(y, x)
    g = torch.randn(B, S, H)
    down.send_gradient(g, layout, at)
    close(up.recv_gradient(layout, at), g)
sent = [up.stats.forward.bytes_sent, down.stats.backward.bytes_sent]
assert sent == [3 * f(float8, 0, COUNTS, H, torch.float32) for f in (activation_bytes, gradient_bytes)]
assert sent[0] < 3 * (sum(COUNTS) * (H + 4) + 256)

up, down = link(config(method="bf16", eval="fp8"))
packets, send = [], up.transport.send
up.transport.send = lambda packet: (packets.append(packet), send(packet))
x = torch.randn(B, S, H)
up.send_activation(x, layout, Position(0, 0), training=False)
close(down.recv_activation(Position(0, 0), training=False)[0], x)
assert parse(packets[-1])[0].method is PayloadMethod.FLOAT8

said = {"label": method_label({"method": "fp8"})}
for name, section in (("bits", {"method": "fp8", "forward_bits": 4}), ("names", {"method": "fp9"})):
    try:
        config(**section)
    except ConfigError as error:
        said[name] = str(error)
up, down = link(float8, config(method="none"))
up.send_activation(x, layout, Position(0, 0))
try:
    down.recv_activation(Position(0, 0))
except LinkError as error:
    said["other"] = str(error)
try:
    up.send_activation(x.fill_(torch.nan), layout, Position(1, 0))
except NonFiniteError as error:
    said["nan"] = str(error)
print(json.dumps(said))
"""


def test_the_files_that_the_page_names_make_a_codec(tmp_path: Path) -> None:
    copy = PackageCopy(tmp_path)
    copy.edit(
        "pipecomp/codecs/wire.py",
        ("from them as QUANTIZED\n", "from them as QUANTIZED\n    FLOAT8 = 9\n"),
    )
    copy.edit("pipecomp/codecs/codecs.py", ("\n\ndef _check_length(", f"{CODEC}\n\ndef _check_length("))
    copy.edit(
        "pipecomp/config/activations.py",
        ('("none", "fp16", "bf16", "direct"', '("none", "fp16", "bf16", "fp8", "direct"'),
    )
    copy.edit(
        "pipecomp/codecs/selection.py",
        ("codecs import Cast,", "codecs import Cast, Float8,"),
        ('    "bf16": Cast(torch.bfloat16),\n', '    "bf16": Cast(torch.bfloat16),\n    "fp8": Float8(),\n'),
    )
    assert copy.edited == [name for name in named_files("a codec") if not name.endswith(".md")]
    said = json.loads(copy.run(USE).splitlines()[-1])
    assert said["label"] == "fp8"
    assert said["bits"] == "activations.forward_bits: got 4, allowed: only with method 'direct' or 'aqsgd', not 'fp8'"
    assert said["names"].endswith("allowed: 'none', 'fp16', 'bf16', 'fp8', 'direct', 'aqsgd'")
    assert "sent float8 values of 8 bits" in said["other"]
    assert "link 0, step 1" in said["nan"]
