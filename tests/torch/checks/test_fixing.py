"""Layers that cannot be trained privately are replaced, and said."""

import pytest
import torch
from torch import nn

import farthing as ft
from farthing.torch.gradients.bookkeeping import Gradient

LOSS = nn.CrossEntropyLoss(reduction="none")


class Network(nn.Module):
    """Everything that is refused, and a few layers that are not."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 6, max_norm=1.0, scale_grad_by_freq=True)
        self.body = nn.Sequential(nn.Conv1d(6, 48, 3, padding=1), nn.BatchNorm1d(48), nn.SyncBatchNorm(48))
        self.norm = nn.InstanceNorm1d(48, affine=True, track_running_stats=True)
        self.known = nn.BatchNorm1d(48).eval()
        self.last = nn.Sequential(nn.Linear(48, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, ids):
        x = self.known(self.norm(self.body(self.table(ids).transpose(1, 2))))
        return self.last(x.mean(2))


def test_what_is_refused_is_replaced_and_then_accepted(caplog):
    torch.manual_seed(0)
    model, ids, y = Network(), torch.randint(9, (8, 5)), torch.randint(3, (8,))
    model.body[1].weight.data.uniform_(0.5, 2)
    kept, table, known = model.body[1].weight.detach().clone(), model.table.weight, model.known
    with pytest.raises(ft.Unsupported, match=r"ft\.torch\.fix\(model\) does"):
        Gradient(model, LOSS).check(ids, y)
    assert ft.torch.fix(model) is model
    Gradient(model, LOSS, route="fast").check(ids, y)
    assert [type(part).__name__ for part in model.body] == ["Conv1d", "GroupNorm", "GroupNorm"]
    assert torch.equal(model.body[1].weight, kept)
    assert model.table.weight is table
    assert model.known is known
    assert len(caplog.messages) == 1
    for change in ("body.1 (BatchNorm1d) by GroupNorm(6, 48)", "norm (InstanceNorm1d) by InstanceNorm1d(48"):
        assert change in caplog.messages[0]


def test_a_model_that_is_fine_stays_as_it_is(caplog):
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.BatchNorm1d(4).eval())
    parts = list(model)
    assert ft.torch.fix(model) is model
    assert all(one is other for one, other in zip(model, parts, strict=True))
    assert not caplog.messages


@pytest.mark.parametrize("width", [2, 6, 8, 16, 32, 48, 100, 512])
def test_rows_are_normalised_over_several_channels(width):
    model = ft.torch.fix(nn.BatchNorm1d(width))
    assert isinstance(model, nn.GroupNorm)
    assert model(torch.randn(4, width)).abs().amax() > 0.1  # a group of one channel would be all zeros


def test_a_single_channel_is_left_as_it_is_and_lazy_ones_are_refused():
    assert isinstance(ft.torch.fix(nn.BatchNorm1d(1)), nn.Identity)
    with pytest.raises(ft.Unsupported, match="no channels yet"):
        ft.torch.fix(nn.LazyBatchNorm1d())


def test_mode_device_and_frozen_weights_are_kept():
    old = nn.BatchNorm2d(64, affine=True).double().train()
    old.weight.requires_grad_(False)
    new = ft.torch.fix(nn.Sequential(old))[0]
    assert new.weight.dtype is torch.float64
    assert not new.weight.requires_grad
    assert new.bias.requires_grad
    assert (new.num_groups, new.training) == (32, True)


class Activated(nn.BatchNorm2d):
    """A batch norm that does more than one."""

    def forward(self, x):
        return super().forward(x).relu()


def test_a_batch_norm_that_does_more_is_not_replaced_by_one_that_does_less():
    with pytest.raises(ft.Unsupported, match="Activated is a batch norm with a forward of its own"):
        ft.torch.fix(nn.Sequential(nn.Conv2d(3, 8, 3), Activated(8)))
