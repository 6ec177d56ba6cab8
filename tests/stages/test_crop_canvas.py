"""Messages that follow random crops: the canvas's arithmetic, and both ends of a link against a plain reference."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from pipecomp.codecs.codecs import Quantized, encoded
from pipecomp.codecs.wire import Form, PacketHeader, PacketKind, PayloadMethod, Sample
from pipecomp.errors import BaseMismatchError, DataError, WireError
from pipecomp.stages.link.crop_canvas import CropCanvas
from pipecomp.stages.link.endpoint import LinkReceiver, Position
from pipecomp.stages.link.layout import Layout
from tests import link_fixtures
from tests.lazy_staging import on_both
from tests.link_fixtures import cached

staging = pytest.fixture(autouse=True, params=["host", "double"])(on_both)

C = 3
CANVAS = CropCanvas(4, 6, 8, 12, 3)  # two pixels to a place; 3 pixels are 2 places


@given(
    lines=st.integers(1, 5),
    columns=st.integers(1, 5),
    stride=st.integers(1, 4),
    margin=st.integers(0, 5),
    data=st.data(),
)
def test_windows_lie_where_the_crop_is(lines, columns, stride, margin, data):
    canvas = CropCanvas(lines, columns, lines * stride, columns * stride, margin)
    down, right = (data.draw(st.integers(-margin, margin)) for _ in "xy")
    start = canvas.start(down, right, 0)
    assert canvas.has(start)
    assert start + lines <= canvas.cells
    m = torch.randn(canvas.canvas_lines, canvas.canvas_columns * C)
    above, left = canvas.margins
    top, side = (above + int(np.floor(down / stride + 0.5)), left + int(np.floor(right / stride + 0.5)))
    map_CHW = m.view(canvas.canvas_lines, canvas.canvas_columns, C).permute(2, 0, 1)
    expected = map_CHW[:, top : top + lines, side : side + columns].permute(1, 2, 0).reshape(lines, columns * C)
    window = canvas.take(m, start)
    assert torch.equal(window, expected)
    before = m.clone()
    window += 1
    assert torch.equal(m, before), "a window is a copy"
    canvas.put_(m, start, window)
    assert torch.equal(canvas.take(m, start), window)
    assert int((m != before).sum()) == window.numel(), "nothing but the window changes"
    if stride == 1:
        assert canvas.shift(start) == (down, right)


@given(
    lines=st.integers(1, 6),
    columns=st.integers(1, 6),
    strides=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    margin=st.integers(0, 7),
    data=st.data(),
)
def test_the_crop_of_a_window_lies_within_the_margin(lines, columns, strides, margin, data):
    """A stage finds in the canvas that it sends to the values that it reads from its received window."""
    down, right = (data.draw(st.integers(-margin, margin)) for _ in "xy")
    inputs = lines * int(np.prod(strides)), columns * int(np.prod(strides))
    for stride in strides:
        canvas = CropCanvas(inputs[0] // stride, inputs[1] // stride, *inputs, margin)
        start = canvas.start(down, right, 0)
        down, right = canvas.shift(start)
        assert max(abs(down), abs(right)) <= margin
        assert canvas.has(canvas.start(down, right, 0))


@pytest.mark.parametrize("margin", [1, 3, 5])
@pytest.mark.parametrize("stride", [2, 3, 4])
def test_every_crop_is_found_again_behind_the_next_block(stride, margin):
    canvas = CropCanvas(4, 6, 4 * stride, 6 * stride, margin)
    for moved in range(-margin, margin + 1):
        found = canvas.shift(canvas.start(moved, -moved, 0))
        assert canvas.has(canvas.start(*found, 0))
        assert all(abs(a - b) <= stride / 2 for a, b in zip(found, (moved, -moved), strict=True))


def test_a_first_visit_fills_the_frame_with_its_edges():
    window = torch.randn(4, 6 * C)
    start = CANVAS.start(2, -1, 0)
    line, column = divmod(start, CANVAS.canvas_columns)
    assert (line, column) == (3, 2)  # the margin of 2, and one place down; minus half a place rounds up to none
    around = (column, CANVAS.canvas_columns - 6 - column, line, CANVAS.canvas_lines - 4 - line)
    padded = functional.pad(window.view(1, 4, 6, C).permute(0, 3, 1, 2), around, mode="replicate")
    assert torch.equal(CANVAS.spread(window, start), padded[0].permute(1, 2, 0).reshape(CANVAS.canvas_lines, -1))


def test_a_first_visit_copies_nothing_to_the_device():
    """A copy to a GPU would wait for all that it computes."""

    class Copies(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.found += func is torch.ops.aten._to_copy.default
            return func(*args, **kwargs or {})

    with Copies() as copies:
        spread = CANVAS.spread(torch.empty(4, 6 * C, device="meta"), CANVAS.start(1, 1, 0))
    assert copies.found == 0
    assert (spread.device.type, spread.shape) == ("meta", (CANVAS.canvas_lines, CANVAS.canvas_columns * C))


def test_a_crop_beyond_the_margin_is_refused():
    with pytest.raises(DataError, match=r"sample 7: a crop moved by \(0, -4\) pixels, the margin is 3"):
        Layout.of_shifts((5, 7), torch.tensor([[1, 1], [0, -4]]), CANVAS)
    with pytest.raises(DataError, match=r"shifts have shape \(2,\), expected \(1, 2\)"):
        Layout.of_shifts((5,), torch.tensor([1, 1]), CANVAS)


def link(activations, canvas=CANVAS, *, bits=32):
    return link_fixtures.link(activations, store={"backend": "memory", "bits": bits}, canvas=canvas)


CHANGES_BACK = {"backward_method": "delta", "backward_bits": 2, "backward_first_visit": 2}


@pytest.mark.parametrize(
    ("options", "bits"),
    [({}, 32), ({"first_visit": 8}, 32), ({"rounding": "stochastic"}, 8), (CHANGES_BACK, 32), (CHANGES_BACK, 8)],
)
def test_both_ends_of_a_link_follow_the_crops(options, bits):
    up, down = link({"method": "aqsgd", "forward_bits": 2, **options}, bits=bits)
    draw = torch.Generator().manual_seed(0)
    scene = torch.randn(2, CANVAS.canvas_lines, CANVAS.canvas_columns, C, generator=draw)
    errors, errors_back = [], []
    m = {}
    for step in range(40):
        shifts_B2 = torch.randint(-3, 4, (2, 2), generator=draw)
        layout = Layout.of_shifts((4, 9), shifts_B2, CANVAS)
        places = [divmod(start, CANVAS.canvas_columns) for start in layout.starts]
        x_BnH = torch.stack([scene[i, y : y + 4, x : x + 6].reshape(4, -1) for i, (y, x) in enumerate(places)])
        up.send_activation(x_BnH, layout, Position(step, 0))
        y_BnH, seen = down.recv_activation(Position(step, 0))
        assert seen == layout
        errors.append(float((y_BnH - x_BnH).norm() / x_BnH.norm()))
        ours, theirs = cached(up), cached(down)
        for i, (sample, (y, x)) in enumerate(zip((4, 9), places, strict=True)):
            assert ours[sample].version == theirs[sample].version
            assert torch.equal(ours[sample].m_nH, theirs[sample].m_nH)
            if options or bits != 32:
                continue
            if sample not in m:
                around = (x, CANVAS.canvas_columns - 6 - x, y, CANVAS.canvas_lines - 4 - y)
                first = x_BnH[i].view(1, 4, 6, C).permute(0, 3, 1, 2)
                m[sample] = functional.pad(first, around, mode="replicate")[0].permute(1, 2, 0)
            else:
                window = m[sample][y : y + 4, x : x + 6].reshape(4, -1)
                data = encoded(Quantized(2), x_BnH[i] - window)
                window = window + Quantized(2).decode(data, 4, 6 * C)
                m[sample][y : y + 4, x : x + 6] = window.view(4, 6, C)
            assert torch.equal(y_BnH[i], m[sample][y : y + 4, x : x + 6].reshape(4, -1))
            assert torch.equal(ours[sample].m_nH, m[sample].reshape(CANVAS.canvas_lines, -1))
        gradient = -x_BnH  # which moves with the crop, too
        down.send_gradient(gradient, seen, Position(step, 0))
        g_BnH = up.recv_gradient(layout, Position(step, 0))
        errors_back.append(float((g_BnH - gradient).norm() / gradient.norm()))
        assert up.store.inventory() == down.store.inventory()
    for found in (errors, errors_back) if options == CHANGES_BACK else (errors,):
        assert sum(found[-10:]) < 0.3 * sum(found[1:11]), "what does not change is learnt, wherever the crop is"


def test_evaluation_and_plain_methods_carry_windows_too():
    up, down = link_fixtures.link({"method": "direct", "forward_bits": 8}, canvas=CANVAS)
    layout = Layout.of_shifts((1, 2), torch.tensor([[3, -3], [0, 1]]), CANVAS)
    x_BnH = torch.randn(2, 4, 6 * C)
    for training in (True, False):
        up.send_activation(x_BnH, layout, Position(0, 0), training=training)
        y_BnH, seen = down.recv_activation(Position(0, 0), training=training)
        assert seen == layout
        assert torch.allclose(y_BnH, x_BnH, atol=0.05)


def test_a_window_of_another_frame_is_refused():
    other = CropCanvas(4, 6, 8, 12, 1)
    up, down = link({"method": "aqsgd"}, other)
    down = LinkReceiver(0, down._config, down.transport, down.store, canvas=CANVAS)
    up.send_activation(torch.randn(1, 4, 6 * C), Layout.of_shifts((1,), None, other), Position(0, 0))
    with pytest.raises(WireError, match="sample 1 has 4 lines from cell 9 of 48, not a window of"):
        down.recv_activation(Position(0, 0))


@pytest.mark.parametrize(
    ("tokens", "start", "count"),
    [
        (CANVAS.cells + 1, 0, 4),
        (CANVAS.cells, 0, 5),
        (CANVAS.cells, CANVAS.canvas_columns - 5, 4),  # a column too far to the right
        (CANVAS.cells, (CANVAS.canvas_lines - 3) * CANVAS.canvas_columns, 4),  # a line too far down
    ],
)
def test_a_window_that_leaves_its_frame_is_refused(tokens, start, count):
    what = {
        "kind": PacketKind.ACTIVATION,
        "method": PayloadMethod.CAST,
        "link": 0,
        "step": 0,
        "micro_batch": 0,
        "hidden": 6 * C,
    }
    header = PacketHeader(**what, tokens=tokens, samples=(Sample(1, Form.PLAIN, start, count),))
    with pytest.raises(WireError, match=f"sample 1 has {count} lines from cell {start} of {tokens}, not a window of"):
        Layout.of_header(header, CANVAS)


def test_a_message_of_another_shape_is_no_base():
    up, down = link({"method": "aqsgd"})
    layout = Layout.of_shifts((1,), None, CANVAS)
    up.send_activation(torch.randn(1, 4, 6 * C), layout, Position(0, 0))
    down.recv_activation(Position(0, 0))
    down.store.put(1, cached(down)[1].version, torch.zeros(4, 6 * C))
    up.send_activation(torch.randn(1, 4, 6 * C), layout, Position(1, 0))
    with pytest.raises(BaseMismatchError, match="sample 1: delta of shape"):
        down.recv_activation(Position(1, 0))
