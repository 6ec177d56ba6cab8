"""Both ends of a link over a loopback transport: Algorithm 1, padding, options, and every refusal."""

import dataclasses
import hashlib
import struct

import numpy as np
import pytest
import torch

from pipecomp.buffers import MemoryStore
from pipecomp.codecs import wire
from pipecomp.codecs.codecs import Quantized, encoded
from pipecomp.config import Config
from pipecomp.errors import BaseMismatchError, ConfigError, LinkError, LinkTimeoutError, NonFiniteError, WireError
from pipecomp.stages.link.endpoint import LinkSender, Position
from pipecomp.stages.link.handshake import reconcile_stores, recv_part, send_part
from pipecomp.stages.link.layout import Layout
from pipecomp.stages.link.packet import EVALUATED, PacketLimits
from pipecomp.stages.link.transport import finish_packet, loopback_pair
from tests.lazy_staging import on_both
from tests.link_fixtures import S, at_both, cached, change_headers, change_packets, layout, link, send_activation

staging = pytest.fixture(autouse=True, params=["host", "double"])(on_both)

B, H = 3, 16


def assert_same_messages(up, down):
    ours, theirs = cached(up), cached(down)
    assert ours.keys() == theirs.keys()
    for sample, message in ours.items():
        assert message.version == theirs[sample].version
        assert torch.equal(message.m_nH, theirs[sample].m_nH)


@pytest.mark.parametrize("bits", [2, 4])
def test_algorithm_1(bits):
    """First visit whole; then m ← m + deq(Q(a − m)) at both ends, and stage k + 1 computes with m."""
    up, down = link({"method": "aqsgd", "forward_bits": bits})
    codec = Quantized(bits)
    m = {}
    for step in range(5):
        x_BSH = torch.randn(B, S, H)
        y_BSH = send_activation(up, down, x_BSH, layout(), step)
        for i, sample in enumerate((1, 2, 3)):
            if sample in m:
                delta = x_BSH[i] - m[sample]
                data = encoded(codec, delta)
                m[sample] = m[sample] + codec.decode(data, S, H)
            else:
                m[sample] = x_BSH[i].clone()
            assert torch.equal(y_BSH[i], m[sample])
        assert_same_messages(up, down)
    assert up.stats.as_dict()["store_hit_rate"] == pytest.approx(12 / 15)


def test_first_visit_is_per_sample():
    up, down = link({"method": "aqsgd"})
    send_activation(up, down, torch.randn(2, S, H), layout((1, 2), (S, S)), 0)
    send_activation(up, down, torch.randn(2, S, H), layout((2, 9), (S, S)), 1)
    assert (up.stats.full_samples, up.stats.delta_samples) == (3, 1)
    assert (down.stats.full_samples, down.stats.delta_samples) == (3, 1)
    assert_same_messages(up, down)


@pytest.mark.parametrize("bits", [32, 8, 2])
@pytest.mark.parametrize("repeated", [(1, 1, 1), (1, 2, 1)])
def test_a_sample_twice_in_a_micro_batch(repeated, bits):
    """As if its visits came in micro-batches of their own: the later one builds on what the store made of the first."""
    store = {"backend": "memory", "bits": bits}
    up, down = link({"method": "aqsgd"}, store=store)
    alone, its_peer = link({"method": "aqsgd"}, store=store)
    for step in range(3):
        x_BSH = torch.randn(B, S, H)
        y_BSH = send_activation(up, down, x_BSH, layout(repeated), step)
        assert_same_messages(up, down)
        for i, sample in enumerate(repeated):
            apart = send_activation(alone, its_peer, x_BSH[i : i + 1], layout((sample,), (S,)), step, i)
            assert torch.equal(y_BSH[i], apart[0])
    assert up.stats.full_samples == len(set(repeated))


@pytest.mark.parametrize("lacks", ["sender", "receiver"])
def test_a_new_sample_twice_in_a_micro_batch_where_one_end_keeps_none(lacks):
    """Its second visit must not build on the first: that the receiver has not kept it only the gradient will tell."""
    up, down = link({"method": "aqsgd"}, store={"on_write_error": "continue"})
    full = {"sender": up, "receiver": down}[lacks]
    full.store.accepts_new = lambda: False
    for step in range(2):
        x_BSH = torch.randn(B, S, H)
        assert torch.equal(send_activation(up, down, x_BSH, layout((1, 2, 1)), step), x_BSH)
        down.send_gradient(x_BSH, layout((1, 2, 1)), Position(step, 0))
        up.recv_gradient(layout((1, 2, 1)), Position(step, 0))
        assert cached(up) == cached(down) == {}
    del full.store.accepts_new
    for step in range(2, 4):
        send_activation(up, down, torch.randn(B, S, H), layout((1, 2, 1)), step)
        assert_same_messages(up, down)
        down.send_gradient(torch.randn(B, S, H), layout((1, 2, 1)), Position(step, 0))
        up.recv_gradient(layout((1, 2, 1)), Position(step, 0))
    assert cached(up).keys() == {1, 2}
    assert (up.stats.full_samples, up.stats.delta_samples) == (9, 3)


@pytest.mark.parametrize(
    "options",
    [
        {"first_visit": 8},
        {"first_visit": 1},
        {"rounding": "stochastic"},
        {"scale": "rms"},
        {"scale": "channels", "first_visit": 4},
        {"scale": {"forward": "cached_channels", "backward": "max"}, "first_visit": 8, "gain": "least_error"},
        {"scale": "channels", "first_visit": 8, "rotation": True, "group_size": 7},
        {"group_size": 5},
        {"backward_top_k": 0.2},
        {"rounding": "stochastic", "group_size": 3, "first_visit": 4},
    ],
)
@pytest.mark.parametrize("bits", [32, 16, 8, 2])
def test_options_keep_both_ends_equal(options, bits):
    up, down = link({"method": "aqsgd", **options}, store={"backend": "memory", "bits": bits})
    errors = []
    base = torch.randn(B, S, H)
    for step in range(4):
        x_BSH = base + 0.01 * torch.randn(B, S, H)
        y_BSH = send_activation(up, down, x_BSH, layout(), step)
        errors.append(float((x_BSH - y_BSH).norm() / x_BSH.norm()))
        assert_same_messages(up, down)
    assert errors[-1] < 0.2


def test_stochastic_rounding_draws_anew_each_step_and_follows_the_seed():
    x_BSH = torch.randn(B, S, H)

    def run(seed):
        up, down = link({"method": "direct", "rounding": "stochastic"}, seed=seed)
        return [send_activation(up, down, x_BSH, layout(), step) for step in range(2)]

    state = torch.get_rng_state()
    one, same, other = run(1), run(1), run(2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one[0], same[0])
    assert torch.equal(one[1], same[1])
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one[0], other[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["none", "bf16", "fp16", "direct", "aqsgd"])
def test_training_dtype_arrives(method, dtype):
    up, down = link({"method": method})
    x_BSH = torch.randn(B, S, H).to(dtype)
    y_BSH = send_activation(up, down, x_BSH, layout(), 0)
    assert y_BSH.dtype == dtype
    if method == "none" or (method == "aqsgd"):
        assert torch.equal(x_BSH, y_BSH)
    g_BSH = torch.randn(B, S, H).to(dtype)
    down.send_gradient(g_BSH, layout(), Position(0, 0))
    back_BSH = up.recv_gradient(layout(), Position(0, 0))
    assert back_BSH.dtype == dtype
    assert float((back_BSH - g_BSH).float().norm() / g_BSH.float().norm()) < 0.03


def test_padding_costs_nothing():
    full_up, full_down = link({"method": "aqsgd"})
    padded_up, padded_down = link({"method": "aqsgd"})
    x_BSH = torch.randn(2, S, H)
    short = Layout((1, 2), (0, S - 3), (5, 3), S)
    for step in range(2):
        send_activation(full_up, full_down, x_BSH[:1], layout((1,), (S,)), step)
        y_BSH = send_activation(padded_up, padded_down, x_BSH, short, step)
    assert y_BSH[0, 5:].abs().max() == 0
    assert y_BSH[1, : S - 3].abs().max() == 0
    full, padded = full_up.stats.forward, padded_up.stats.forward
    assert full.bytes_raw == padded.bytes_raw == 2 * 8 * H * 4
    assert padded.bytes_sent == full.bytes_sent + 2 * 33  # one more sample's header a message
    assert cached(padded_up)[2].m_nH.shape == (3, H)


def test_a_sample_that_changes_its_length_is_a_first_visit_again():
    up, down = link({"method": "aqsgd"})
    for step, count in enumerate((5, 5, 6, 6)):
        send_activation(up, down, torch.randn(1, S, H), Layout((1,), (0,), (count,), S), step)
    assert (up.stats.full_samples, up.stats.delta_samples) == (2, 2)
    assert_same_messages(up, down)


@pytest.mark.parametrize("count", [0, 1])
def test_empty_and_one_token_samples(count):
    up, down = link({"method": "aqsgd"})
    where = Layout((1, 2), (0, 0), (count, S), S)
    for step in range(3):
        send_activation(up, down, torch.randn(2, S, H), where, step)
    assert_same_messages(up, down)


@pytest.mark.parametrize("mode", ["full", "fp16", "bf16", "direct"])
def test_evaluation_does_not_touch_the_store(mode):
    up, down = link({"method": "aqsgd", "eval": mode})
    waited = []
    up.transport.wait_for_room = lambda: waited.append("nothing else slows evaluation down")
    x_BSH = torch.randn(B, S, H)
    up.send_activation(x_BSH, layout(), Position(0, 0), training=False)
    y_BSH, _ = down.recv_activation(Position(0, 0), training=False)
    assert torch.equal(x_BSH, y_BSH) == (mode == "full")
    assert up.store.inventory() == down.store.inventory() == []
    assert up.stats.forward.messages == 0
    assert up.stats.evaluation.messages == 1
    assert down.stats.wait_seconds == 0.0, "reports set it beside the time of training"
    send_activation(up, down, x_BSH, layout(), 0)
    assert down.stats.wait_seconds > 0.0
    assert len(waited) == 1


def test_a_delta_on_a_message_that_the_receiver_lacks_is_refused():
    up, down = link({"method": "aqsgd"})
    send_activation(up, down, torch.randn(B, S, H), layout(), 0)
    down.store.drop([2])
    up.send_activation(torch.randn(B, S, H), layout(), Position(1, 0))
    before = cached(down)
    with pytest.raises(BaseMismatchError, match=r"link 0, step 1.*sample 2: delta on version 2.*holds none"):
        down.recv_activation(Position(1, 0))
    after = cached(down)
    assert all(torch.equal(before[i].m_nH, after[i].m_nH) for i in before), "nothing may have changed"


def test_a_delta_on_another_version_is_refused():
    up, down = link({"method": "aqsgd"})
    send_activation(up, down, torch.randn(B, S, H), layout(), 0)
    down.store.put(3, 77, torch.randn(S, H))
    up.send_activation(torch.randn(B, S, H), layout(), Position(1, 0))
    with pytest.raises(BaseMismatchError, match="sample 3: delta on version 3, this end holds version 77"):
        down.recv_activation(Position(1, 0))


@pytest.mark.parametrize("staging", ["host"], indirect=True)  # on a device errors come later: test_staging.py
def test_nan_is_an_error_before_any_message_changes():
    up, down = link({"method": "aqsgd"})
    send_activation(up, down, torch.randn(B, S, H), layout(), 0)
    x_BSH = torch.randn(B, S, H)
    x_BSH[2, 1, 1] = float("nan")
    before = cached(up)
    with pytest.raises(NonFiniteError, match="link 0, step 1, micro-batch 4, activations"):
        up.send_activation(x_BSH, layout(), Position(1, 4))
    assert all(torch.equal(before[i].m_nH, m.m_nH) for i, m in cached(up).items())


@pytest.mark.parametrize("staging", ["host"], indirect=True)  # on a device errors come later: test_staging.py
@pytest.mark.parametrize("first_visit", ["full", 8])
def test_nan_on_a_first_visit(first_visit):
    up, _ = link({"method": "aqsgd", "first_visit": first_visit})
    with pytest.raises(NonFiniteError):
        up.send_activation(torch.full((B, S, H), float("inf")), layout(), Position(0, 0))
    assert up.store.inventory() == []


@pytest.mark.parametrize("staging", ["host"], indirect=True)  # on a device errors come later: test_staging.py
@pytest.mark.parametrize("ids", [(2**40, 2**63 - 1, 3), (7, 7, 3), (7, 3, 7)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_activations_leave_all_samples_of_the_micro_batch_alone(bad, ids):
    """The last sample is the bad one, others have the largest id or come twice: nothing of them changes either."""
    up, down = link({"method": "aqsgd"})
    where = layout(ids)
    for step in range(2):
        send_activation(up, down, torch.randn(B, S, H), where, step)
    before = cached(up)
    x_BSH = torch.randn(B, S, H)
    x_BSH[2, S - 1, H - 1] = bad
    with pytest.raises(NonFiniteError):
        up.send_activation(x_BSH, where, Position(2, 0))
    after = cached(up)
    assert set(after) == set(ids)
    for sample, message in before.items():
        assert after[sample].version == message.version
        assert torch.equal(after[sample].m_nH, message.m_nH)
    send_activation(up, down, torch.randn(B, S, H), where, 2)
    assert_same_messages(up, down)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_step_skipped_for_an_overflow_leaves_both_ends_alike(dtype):
    """The gradient is Inf, so the optimizer skips the step; m and its versions have moved on at both ends."""
    up, down = link({"method": "aqsgd"}, pass_nonfinite=True)
    for step in range(4):
        send_activation(up, down, torch.randn(B, S, H).to(dtype), layout(), step)
        g_BSH = torch.randn(B, S, H).to(dtype)
        if step == 1:
            g_BSH[1, 2, 3] = float("inf")
        down.send_gradient(g_BSH, layout(), Position(step, 0))
        back_BSH = up.recv_gradient(layout(), Position(step, 0))
        assert bool(torch.isfinite(back_BSH).all()) == (step != 1)
        assert_same_messages(up, down)
    assert (up.stats.full_samples, up.stats.delta_samples) == (B, 3 * B)


def test_overflowed_gradients_pass_where_loss_scaling_must_see_them():
    g_BSH = torch.randn(B, S, H).half()
    g_BSH[0, 0, 0] = float("inf")
    _, down = link({"method": "direct"})
    with pytest.raises(NonFiniteError, match="gradients"):
        down.send_gradient(g_BSH, layout(), Position(0, 0))
    up, down = link({"method": "direct"}, pass_nonfinite=True)
    down.send_gradient(g_BSH, layout(), Position(0, 0))
    assert torch.equal(up.recv_gradient(layout(), Position(0, 0)), g_BSH)


@pytest.mark.parametrize("method", ["none", "fp16", "bf16"])
@pytest.mark.parametrize("value", [1.5, float("inf")])
def test_cast_gradients_pass_under_loss_scaling(method, value):
    """Values in another dtype than the stages' own are no sign of an overflow."""
    up, down = link({"method": method}, pass_nonfinite=True)
    g_BSH = torch.full((B, S, H), value).half()
    down.send_gradient(g_BSH, layout(), Position(0, 0))
    assert torch.equal(up.recv_gradient(layout(), Position(0, 0)), g_BSH)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"step": 5}, "micro-batch 0, step 5.*expected the activation of micro-batch 0, step 0"),
        ({"micro_batch": 3}, "micro-batch 3"),
        ({"link": 1}, "link 1"),
        ({"kind": wire.PacketKind.GRADIENT}, "sent the gradient"),
        ({"bits": 3}, "3 bits.*configurations differ"),
        ({"group_size": 4}, "group_size 4, this rank None"),
        ({"first_bits": 8}, "first visits at 8 bits"),
        ({"method": wire.PayloadMethod.TOP_K}, "sent top_k values.*configurations differ"),
        ({"payload_dtype": wire.DType.FLOAT16}, "float16.*configurations differ"),
        (
            {"samples": tuple(wire.Sample(i, wire.Form.PLAIN, 0, S) for i in (1, 2, 3))},
            "sample 1 came without a version",
        ),
    ],
)
def test_what_was_not_expected_is_named(change, match):
    up, down = link({"method": "aqsgd"})
    change_headers(up, **change)
    up.send_activation(torch.randn(B, S, H), layout(), Position(0, 0))
    with pytest.raises(LinkError, match=match):
        down.recv_activation(Position(0, 0))
    assert down.store.inventory() == []


@pytest.mark.parametrize("change", [{"samples": ()}, {"hidden": 0}])
def test_an_empty_packet_is_refused(change):
    up, down = link({"method": "none"})
    change_headers(up, **change)
    up.send_activation(torch.randn(B, S, H), layout(), Position(0, 0))
    with pytest.raises(WireError, match="micro-batch 0, step 0, link 0: it is empty"):
        down.recv_activation(Position(0, 0))


@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.parametrize("visits", [1, 2])
def test_a_payload_of_another_length_is_refused(more, visits):
    up, down = link({"method": "aqsgd"})
    x_BSH = torch.randn(B, S, H)
    for step in range(visits - 1):
        send_activation(up, down, x_BSH, layout(), step)
    change_packets(up, lambda header, data: (header, np.resize(data, data.size + more)))
    before = down.store.inventory()
    up.send_activation(x_BSH, layout(), Position(visits, 0))
    with pytest.raises(WireError, match="bytes where its samples need"):
        down.recv_activation(Position(visits, 0))
    assert down.store.inventory() == before


@pytest.mark.parametrize("part_of", ["training", "agreement", "prefetching"])
def test_a_table_of_samples_is_not_read_where_it_is_too_long(part_of, monkeypatch):
    up, down = link({"method": "none"})
    down.set_limits(PacketLimits(B, S, H), torch.float32)
    every = tuple(wire.Sample(i, wire.Form.PLAIN, 0, 0) for i in range(EVALUATED + 1))
    header = wire.PacketHeader(
        kind=wire.PacketKind.ACTIVATION, method=wire.PayloadMethod.CAST, link=0, step=0, micro_batch=0
    )
    packet = wire.encode(dataclasses.replace(header, samples=every), np.zeros(0, dtype=np.uint8))
    monkeypatch.setattr(wire, "Sample", lambda *fields: pytest.fail("a sample was read"))
    up.transport.send(packet)
    if part_of == "prefetching":
        down.receive_staging.on_header = lambda header: pytest.fail("it was told of")
    with pytest.raises(WireError, match="packet claims 65 samples, above the limit of 64"):
        recv_part(down, 0, 0) if part_of == "agreement" else down.recv_activation(Position(0, 0))


def with_value(end, at, value):
    """Let this end's packets have a float32 at this byte of its payload, as a rank that was taken over could."""

    def change(header, data):
        data[at : at + 4] = np.frombuffer(np.float32(value).tobytes(), dtype=np.uint8)
        return header, data

    change_packets(end, change)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("what", ["first visit", "change", "gradient's first visit", "gradient's change"])
def test_what_decodes_to_no_number_is_not_kept(what, value):
    up, down = link({"method": "aqsgd", "backward_method": "delta"})
    before = 0 if "first" in what else 1
    for step in range(before):
        down.send_gradient(send_activation(up, down, torch.randn(B, S, H), layout(), step), layout(), Position(step, 0))
        up.recv_gradient(layout(), Position(step, 0))
    at = Position(before, 0)
    if "gradient" in what:
        end, kind = up, "gradients"
        g_BSH = send_activation(up, down, torch.randn(B, S, H), layout(), before)
        with_value(down, B * S // 8, value)  # a scale, behind a bit for each token
        down.send_gradient(g_BSH, layout(), at)
    else:
        end, kind = down, "activations"
        with_value(up, 0, value)
        up.send_activation(torch.randn(B, S, H), layout(), at)

    def received():
        up.recv_gradient(layout(), at) if end is up else down.recv_activation(at)
        end.store.inventory()  # of a device the store knows it first

    held_before = cached(end)
    said = rf"link 0, step {before}, micro-batch 0, {kind} of samples \[1, 2, 3\] that decode to NaN or Inf"
    inventory = end.store.inventory()
    with pytest.raises(WireError, match=said):
        received()
    if end.staging.immediate:
        assert end.store.inventory() == inventory
        assert all(torch.equal(cached(end)[i].m_nH, held_before[i].m_nH) for i in held_before)


def test_damaged_bytes_change_nothing():
    up, down = link({"method": "aqsgd"})
    sent = up.transport.send

    def send(message):
        message = finish_packet(message)
        message[200] ^= 4
        sent(message)

    up.transport.send = send
    up.send_activation(torch.randn(B, S, H), layout(), Position(0, 0))
    with pytest.raises(WireError, match="link 0, from rank 0: packet was changed on the way"):
        down.recv_activation(Position(0, 0))
    assert down.store.inventory() == []


def test_gradient_of_other_samples_is_refused():
    up, down = link({"method": "none"})
    down.send_gradient(torch.randn(B, S, H), layout((1, 2, 4)), Position(0, 0))
    with pytest.raises(LinkError, match=r"gradient for samples \[1, 2, 4\]"):
        up.recv_gradient(layout(), Position(0, 0))


def test_silence_is_an_error():
    _, down = link({"method": "none"}, timeout_s=0.2)
    with pytest.raises(LinkTimeoutError, match=r"nothing from rank 0 for 0\.2 s"):
        down.recv_activation(Position(0, 0))


def test_every_call_raises_what_ended_a_connection_first():
    _, down = link({"method": "none"})
    for said in ("the reason", "what followed from it"):
        down.transport.failed(LinkError(said))
    for call in (down.transport.recv, down.transport.recv, lambda: down.transport.send(np.zeros(3, dtype=np.uint8))):
        with pytest.raises(LinkError, match="the reason"):
            call()


def test_a_store_where_none_is_used():
    config = Config.from_dict({"activations": {"method": "direct"}})
    with pytest.raises(ConfigError, match="aqsgd"):
        LinkSender(0, config, loopback_pair()[0], MemoryStore("link-0", bits=32))


class TestAgreement:
    def both(self, up, down, settings=({}, {})):
        return at_both(up, down, lambda end: reconcile_stores(end, settings[end is down]))

    def trained(self):
        up, down = link({"method": "aqsgd"})
        for step in range(2):
            send_activation(up, down, torch.randn(B, S, H), layout(), step)
        return up, down

    def test_equal_stores_drop_nothing(self):
        up, down = self.trained()
        assert self.both(up, down) == [0, 0]
        send_activation(up, down, torch.randn(B, S, H), layout(), 2)
        assert up.stats.full_samples == B
        assert not up.receive_staging._arrived | down.receive_staging._arrived, (
            "of what has come nothing stays on a device"
        )

    def test_what_differs_is_sent_whole_once(self):
        up, down = self.trained()
        up.store.put(1, 99, torch.randn(S, H))  # newer here
        down.store.drop([2])  # lost there
        down.store.put(3, cached(down)[3].version, torch.randn(S, H))  # same version, other values
        assert self.both(up, down) == [3, 2]
        assert cached(up) == cached(down) == {}
        send_activation(up, down, torch.randn(B, S, H), layout(), 2)
        assert_same_messages(up, down)
        assert min(m.version for m in cached(up).values()) > 99

    def test_one_value_that_differs_is_noticed(self):
        """As many samples, and their versions, are the same."""
        up, down = self.trained()
        down.store.put(3, cached(down)[3].version, torch.randn(S, H))
        assert self.both(up, down) == [1, 1]
        assert cached(up).keys() == cached(down).keys() == {1, 2}

    @pytest.mark.parametrize(
        ("parts", "said"),
        [
            ({0: b"x"}, "a summary of 1 bytes"),
            (
                {0: struct.pack("<QQ32s32s", 3, 1, b"", hashlib.sha256(b"{}").digest()), 4: b"", 1: bytes(20)},
                "20 bytes for 3",
            ),
        ],
    )
    def test_parts_of_another_length_are_refused(self, parts, said):
        up, down = self.trained()
        for part, payload in parts.items():
            send_part(up, 0, part, payload)
        with pytest.raises(WireError, match=f"rank 0 sent {said}"):
            reconcile_stores(down, {})
        assert cached(down).keys() == {1, 2, 3}

    def test_a_version_that_leaves_none_for_packets_is_refused(self):
        up, down = self.trained()
        down.store.put(1, 2**64 - 1, torch.randn(S, H))
        error = self.both(up, down)[0]
        assert isinstance(error, WireError)
        assert "rank 1 holds version 18446744073709551615 of an activation, allowed" in str(error)

    def test_different_settings_are_refused_at_both_ends(self):
        up, down = self.trained()
        for error in self.both(up, down, ({"bits": 3}, {"bits": 4})):
            assert isinstance(error, LinkError)
            assert "same configuration" in str(error)
