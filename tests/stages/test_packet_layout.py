"""Tokens that cross a link."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipecomp.codecs.wire import Form, PacketHeader, PacketKind, PayloadMethod, Sample
from pipecomp.errors import DataError, WireError
from pipecomp.stages.link.layout import Layout, gather, scatter
from tests.device_copies import DeviceCopies


@given(st.data())
def test_gather_and_scatter_keep_real_tokens_and_zero_the_rest(data):
    S = data.draw(st.integers(1, 9))
    spans = data.draw(
        st.lists(
            st.integers(0, S).flatmap(lambda n: st.tuples(st.integers(0, S - n), st.just(n))), min_size=1, max_size=4
        )
    )
    mask_BS = torch.zeros(len(spans), S, dtype=torch.int64)
    for row, (start, n) in zip(mask_BS, spans, strict=True):
        row[start : start + n] = 1
    x_BSH = torch.randn(len(spans), S, 3)
    layout = Layout.of_mask(tuple(range(len(spans))), mask_BS, S)
    rows_TH = gather(x_BSH, layout)
    assert rows_TH.shape == (int(mask_BS.sum()), 3)
    assert torch.equal(rows_TH, x_BSH[mask_BS.bool()])
    assert torch.equal(scatter(rows_TH, layout), x_BSH * mask_BS[:, :, None])
    if layout.full:
        assert layout.mask_BS(torch.device("cpu")) is None
    else:
        assert torch.equal(layout.mask_BS(torch.device("cpu")), mask_BS)


def test_a_mask_is_made_on_its_device():
    """A copy of more than 64 KiB would wait for a GPU."""
    layout = Layout((1, 2, 3), (0, 1, 0), (7, 8, 9), 9)
    with DeviceCopies() as copied:
        mask_BS = layout.mask_BS(torch.device("meta"))
    assert (mask_BS.shape, mask_BS.dtype, mask_BS.device.type) == ((3, 9), torch.int64, "meta")
    assert copied.values == [6]  # each sample's start and count


def test_no_mask_means_all_real_and_no_copy():
    x_BSH = torch.randn(2, 4, 3)
    layout = Layout.of_mask((3, 9), None, 4)
    assert layout.full
    assert layout.total == 8
    assert gather(x_BSH, layout).data_ptr() == x_BSH.data_ptr()


def test_padding_between_real_tokens_is_refused_by_sample():
    mask_BS = torch.tensor([[1, 1, 0], [1, 0, 1]])
    with pytest.raises(DataError, match="sample 9 has padding between"):
        Layout.of_mask((3, 9), mask_BS, 3)


def test_mask_of_another_shape_is_refused():
    with pytest.raises(DataError, match=r"shape \(1, 3\), expected \(2, 3\)"):
        Layout.of_mask((3, 9), torch.ones(1, 3), 3)


def test_a_packet_with_an_id_that_no_sample_has_is_refused():
    """In the store of a link it would be the gradient of sample 7."""

    def header(*ids: int) -> PacketHeader:
        samples = tuple(Sample(i, Form.FULL, 0, 4, 0, 1) for i in ids)
        kind, method = PacketKind.ACTIVATION, PayloadMethod.QUANTIZED
        return PacketHeader(
            kind=kind, method=method, link=0, step=0, micro_batch=0, tokens=4, hidden=3, samples=samples
        )

    assert Layout.of_header(header(3, 2**63 - 1)).ids == (3, 2**63 - 1)
    with pytest.raises(WireError, match=rf"sample id {2**63 + 7} is out of range"):
        Layout.of_header(header(3, 2**63 + 7))
