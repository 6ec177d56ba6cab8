"""Defects in stages/link/: the links between stages."""

from __future__ import annotations

from scripts.mutant_lists.mutant import Mutant

LINK = ("tests/stages/test_link_exact.py",)
STAGING = ("tests/stages/test_staging.py",)
LENGTHS = ("tests/stages/test_link.py::test_a_payload_of_another_length_is_refused",)
GLOO = ("tests/stages/test_gloo.py",)
_DRAW = "ops.mix_seed(self._config.seed, self._replica, self.index, direction, at.step, at.micro_batch, part)"
_ENDPOINT = "stages/link/endpoint.py"
_PACKET = "stages/link/packet.py"
_GLOO = "stages/link/gloo.py"


def _draws_without(what: str, argument: str, replacement: str = "0") -> Mutant:
    """A link's rounding seed that leaves one thing out."""
    new = _DRAW.replace(argument, replacement)
    assert new != _DRAW
    why = f"the same rounding noise for every {what}: errors that should average out add up"
    return Mutant(f"a link's rounding without the {what}", _ENDPOINT, _DRAW, new, LINK, why)


MUTANTS = (
    # -- draws
    _draws_without("seed", "self._config.seed"),
    _draws_without("replica", "self._replica"),
    _draws_without("link", "self.index"),
    _draws_without("direction", "direction"),
    _draws_without("step", "at.step"),
    _draws_without("micro-batch", "at.micro_batch"),
    _draws_without("sample", "part"),
    # -- deltas and packets
    Mutant(
        "a delta on any version",
        "stages/link/visits.py",
        "if cached is None or cached.version != sample.base:",
        "if cached is None:",
        ("tests/stages/test_link.py::test_a_delta_on_another_version_is_refused",),
        "training on wrong numbers, without an error",
    ),
    Mutant(
        "versions that were there before",
        "stages/link/handshake.py",
        "end.next_version = max(mine[1], theirs[1]) + 1",
        "end.next_version = 1",
        ("tests/stages/test_link.py::TestAgreement::test_what_differs_is_sent_whole_once",),
        "after a resume two different activations have one version",
    ),
    Mutant(
        "ends compare how much they hold, not what",
        "stages/link/handshake.py",
        "if theirs[:3] == mine[:3]:",
        "if theirs[:2] == mine[:2]:",
        ("tests/stages/test_link.py::TestAgreement::test_one_value_that_differs_is_noticed",),
        "a run goes on with two different activations under one version",
    ),
    Mutant(
        "drift that was repaired counts at every later check",
        "stages/link/drift.py",
        "        end.drifted = False\n",
        "",
        LINK,
        "the second flipped bit ends the run, days after the first",
    ),
    Mutant(
        "evaluation waits for no room",
        "stages/link/sender.py",
        "self.transport.wait_for_room()",
        "pass",
        ("tests/stages/test_link.py::test_evaluation_does_not_touch_the_store",),
        "the packets of all held-out samples fill the first stage's memory",
    ),
    Mutant(
        "drift is not looked at",
        "stages/link/drift.py",
        "if theirs == mine:",
        "if True:",
        LINK,
        "ends that hold different activations are noticed by the loss alone",
    ),
    Mutant(
        "no limit for a packet's tensor",
        _ENDPOINT,
        "> MAX_TENSOR_BYTES:",
        "> MAX_TENSOR_BYTES << 40:",
        LINK,
        "a hostile or damaged packet makes a rank allocate terabytes",
    ),
    Mutant(
        "a packet is not held to the agreed model and batch",
        _ENDPOINT,
        "self.bounds.check(header, rows)",
        "pass",
        ("tests/mesh/test_tls_transport.py::TestBounds",),
        "a few bytes that announce padding make a rank fill gigabytes",
    ),
    Mutant(
        "no limit for a packet over gloo",
        _GLOO,
        "if total > self.most_bytes:",
        "if False:",
        GLOO,
        "a rank takes memory for whatever another one announces",
    ),
    Mutant(
        "a packet over gloo that becomes shorter on the way",
        _GLOO,
        "if total != packet.size or",
        "if total > packet.size or",
        GLOO,
        "a packet ends before all of its bytes are there, or never",
    ),
    Mutant(
        "a payload shorter than its samples need",
        "stages/link/visits.py",
        "if ends[-1] != payload.numel():",
        "if ends[-1] < payload.numel():",
        LENGTHS,
        "a packet that was not made by this code is taken for one",
    ),
    # -- staging: the double of tests/lazy_staging.py has the poisoned buffer of a copy as `target`
    Mutant(
        "no wait for a payload before it is sent",
        _PACKET,
        "        self._payload.wait()\n",
        "",
        STAGING,
        "the other stage computes with whatever was in a buffer",
    ),
    Mutant(
        "no wait for the flag of finite values",
        _PACKET,
        "verdict.check(flag.wait())",
        "verdict.check(flag.target)",
        STAGING,
        "steps end with errors that there are not, or with none where there is one",
    ),
    Mutant(
        "no wait for what was received",
        "stages/link/arrivals.py",
        "copy.wait()[start",
        "copy.target[start",
        STAGING,
        "a stage computes with a buffer's old bytes",
    ),
    Mutant(
        "no wait for the norms of sampled activations",
        "stages/link/sender.py",
        "popleft().wait().tolist()",
        "popleft().target.tolist()",
        STAGING,
        "reports tell a wrong error of compression",
    ),
    Mutant(
        "no wait for the bits that the device chose",
        _PACKET,
        "int(self._bits.wait())",
        "int(self._bits.target) % 8 + 1",
        STAGING,
        "the other stage decodes other bits than were sent",
    ),
    Mutant(
        "a packet on its way from a device is sent as it is",
        "stages/link/transport.py",
        "else packet.finish()",
        "else packet.buffer",
        STAGING,
        "the other stage gets an unsealed packet",
    ),
)
