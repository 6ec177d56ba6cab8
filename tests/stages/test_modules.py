"""Stages of plain modules against the model they are cut from."""

import pytest
import torch
from torch import nn

from pipecomp.errors import DataError, SplitError
from pipecomp.recipes.resnet import client_cuts, resnet
from pipecomp.stages import build_stage, modules, plan
from pipecomp.stages.partition.modules import from_rows, to_rows


def model():
    torch.manual_seed(0)
    return resnet("tiny", 10, norm="batch")


def stages(net, cuts=None, num_stages=None, **options):
    source = modules(net, (3, 16, 16), **options)
    split_plan = plan(source, num_stages, cuts)
    return [build_stage(source, split_plan, i) for i in range(split_plan.num_stages)]


@pytest.mark.parametrize("cuts", [[0, 2, 3], [0, 1], [0, 1, 2, 3, 4], [0, 4]])
def test_stages_compute_what_the_model_does_and_train_its_weights(cuts):
    net = model()
    x = torch.randn(2, 3, 16, 16)
    expected = net(x)
    expected.sum().backward()
    wanted = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    given = {"pixel_values": x}
    parts = stages(net, cuts)
    for stage in parts:
        if stage.index:
            width = stage.crossing(stage.index - 1).width
            assert given["hidden_states"].shape[0::2] == (2, width) == (2, stage.hidden_size)
        given = stage(given)
    assert torch.equal(given, expected)
    given.sum().backward()
    names = [name for stage in parts for name, _ in stage.named_parameters()]
    assert names == list(wanted), "names are the whole model's"
    for stage in parts:
        for name, p in stage.named_parameters():
            assert torch.equal(p.grad, wanted[name])


@pytest.mark.parametrize("cuts", [[0, 5], [0, 1, 5], [0, 2, 5], [0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_one_activation_at_two_places(shape, inplace, cuts):
    """An nn.Sequential lists a module that comes again once; autograd refuses to change what is received."""
    torch.manual_seed(0)
    act = nn.ReLU(inplace=inplace)
    net = nn.Sequential(nn.Linear(4, 6), act, nn.Linear(6, 5), act, nn.Linear(5, 2))
    x = torch.randn(2, *shape)
    expected = net(x)
    expected.sum().backward()
    wanted = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    source = modules(net, shape)
    split_plan = plan(source, cuts=cuts)
    parts = [build_stage(source, split_plan, i) for i in range(split_plan.num_stages)]
    given, received = {"pixel_values": x}, []
    for stage in parts:
        if stage.index:  # as a link gives it
            received.append((given["hidden_states"], given["hidden_states"].detach().clone().requires_grad_()))
            given = {"hidden_states": received[-1][1]}
        given = stage(given)
    assert torch.equal(given, expected)
    given.sum().backward()
    for sent, came in reversed(received):
        sent.backward(came.grad)
    assert all(torch.equal(p.grad, wanted[name]) for name, p in net.named_parameters())


def test_recomputing_gives_the_same_gradients():
    found = []
    for recompute in (False, True):
        net = resnet("tiny", 4, norm="group")
        net.load_state_dict(found[0][1] if found else net.state_dict())
        (stage,) = stages(net, [0])
        if recompute:
            stage.gradient_checkpointing_enable()
        stage({"pixel_values": torch.ones(1, 3, 16, 16)}).sum().backward()
        found.append(([p.grad for p in net.parameters()], net.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 4, 5), (2, 7)])
def test_rows_and_back(shape):
    x = torch.randn(shape)
    rows = to_rows(x)
    assert rows.dim() == 3
    assert torch.equal(from_rows(rows, shape[1:]), x)
    if len(shape) == 4:
        assert torch.equal(rows[1, 2], x[1, :, 2].T.reshape(-1)), "a line, its places one after another"


def test_layouts_move_with_the_crop():
    net = model()
    one, two, three = stages(net, client_cuts(net), margin=4)
    shifts = torch.tensor([[4, -2], [0, 3]])
    first = one.layout((5, 6), {"pixel_values": torch.zeros(2, 3, 16, 16), "shifts": shifts})
    # 16 pixels are 8 places, and 4 behind the next block.
    assert (first.canvas.lines, first.canvas.margins, first.rows_each) == (8, (2, 2), 8)
    assert first.starts == ((2 + 2) * 12 + 2 - 1, 2 * 12 + 2 + 2)
    second = two.next_layout(first)
    assert (second.canvas.lines, second.canvas.margins) == (4, (1, 1))
    assert second.starts == ((1 + 1) * 6 + 1 + 0, 1 * 6 + 1 + 1)  # half a place left is rounded up to none
    assert three.next_layout(second) == second
    still = one.layout((5, 6), {"pixel_values": torch.zeros(2, 3, 16, 16)})
    assert still.starts == (2 * 12 + 2,) * 2


def test_without_a_margin_shifts_are_refused():
    (one, *_) = stages(model(), [0, 2])
    with pytest.raises(DataError, match="'shifts': give the model a margin"):
        one.layout((1,), {"pixel_values": torch.zeros(1, 3, 16, 16), "shifts": torch.zeros(1, 2).long()})


def test_cuts_are_balanced_by_parameters():
    net = nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 100), nn.Linear(100, 2), nn.Linear(2, 2))
    net[1].requires_grad_(False)
    found = plan(modules(net, (4,)), num_stages=2)
    assert found.cuts == (0, 1, 4)
    assert found.parameters == (500, 10100 + 202 + 6)
    assert found.trained == (500, 202 + 6)


def test_what_cannot_be_cut_is_refused():
    shared = nn.Linear(4, 4)
    norm = nn.BatchNorm1d(4, affine=False)
    with pytest.raises(SplitError, match=r"1\.running_mean is also used before it"):
        plan(modules(nn.Sequential(norm, norm), (4,)), num_stages=2)
    with pytest.raises(SplitError, match=r"2\.weight is also used before it"):
        plan(modules(nn.Sequential(shared, nn.ReLU(), shared), (4,)), cuts=[0, 2])
    with pytest.raises(SplitError, match=r"block 1 does not accept samples of shape \(5,\)"):
        modules(nn.Sequential(nn.Linear(4, 5), nn.Linear(4, 5)), (4,))
    with pytest.raises(SplitError, match="block 0 must return one tensor"):
        modules(nn.Sequential(nn.LSTM(4, 5)), (4,))
    with pytest.raises(SplitError, match="model: got Linear"):
        modules(nn.Linear(4, 4), (4,))
    with pytest.raises(SplitError, match="margin: got 4 for samples of shape"):
        modules(nn.Sequential(nn.Linear(4, 4)), (4,), margin=4)
    with pytest.raises(SplitError, match="block_seconds: only for Hugging Face"):
        plan(modules(nn.Sequential(nn.Linear(4, 4)), (4,)), cuts=[0], block_seconds=[1.0])


def test_a_batch_of_another_shape_is_refused():
    one, two, _ = stages(model(), [0, 2, 3])
    with pytest.raises(DataError, match=r"stage 0: pixel_values has the shape \[B, 3, 16, 16\], got shape"):
        one({"pixel_values": torch.zeros(1, 3, 8, 8)})
    with pytest.raises(DataError, match=r"stage 1: hidden_states has the shape \[B, 8, 128\], got nothing"):
        two({"pixel_values": torch.zeros(1, 3, 16, 16)})
