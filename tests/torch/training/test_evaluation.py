"""Looking at a run: on public data, and by a bar in the terminal."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

import farthing as ft
from farthing.errors import NotPrivate
from farthing.torch.training.loop import train
from farthing.torch.training.records import Examples
from farthing.torch.training.watching import evaluate

LOSS = nn.CrossEntropyLoss(reduction="none")


def data(records=400):
    x = torch.randn(records, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def network():
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2))


def test_evaluation_leaves_the_mode_alone_and_takes_a_loss():
    model = network().train()
    x, y = data(50)
    with torch.no_grad():
        wanted = LOSS(model.eval()(x), y).mean().item()
    model.train()
    assert evaluate(model, (x, y), LOSS, physical_batch_size=7) == pytest.approx(wanted, rel=1e-5)
    assert model.training


def frozen():
    """A model in training mode of which one part is in evaluation mode."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 2)).train()
    model[1].eval()
    return model


def test_evaluation_leaves_every_part_in_its_own_mode():
    model = frozen()
    evaluate(model, data(50))
    assert [part.training for part in model] == [True, False, True]
    network = ft.torch.Network(model, LOSS)
    network.outputs(data(5)[0], network.start())
    assert [part.training for part in model] == [True, False, True]


def test_a_training_goes_on_after_an_evaluation_with_a_frozen_batch_norm():
    model = frozen()
    training = ft.torch.train(model, LOSS, data(400), epsilon=2.0, delta=1e-5, steps=3, sampling_rate=0.5)
    public = torch.ones(50, 4), torch.ones(50, dtype=torch.int64)
    for _ in training:
        evaluate(model, public)
    assert training.t == 3


class Moody(nn.Module):
    """A part that centres its batch in training mode."""

    def forward(self, x):
        return x - x.mean(0) if self.training else x


def test_what_was_changed_since_its_check_judges_examples_one_by_one():
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Linear(4, 6), Moody(), nn.Linear(6, 2)).train(), data(12)
    model[1].eval()
    network = ft.torch.Network(model, LOSS)
    examples = network.check(ft.torch.Examples((x, y)))
    model.train()  # thaws what is frozen
    kept = network.gradient.judged(examples.take(np.arange(6)), network.start())
    x[7:] *= 100
    other = network.gradient.judged(ft.torch.Examples((x, y)).take(np.arange(12)), network.start())
    losses = [np.concatenate([part[0] for part in parts]) for parts in (kept, other)]
    assert np.allclose(losses[0], losses[1][:6])


class Numbered(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, place):
        return torch.full((4,), float(place)), place % 2


def trained_on(records, **options):
    model = nn.Linear(4, 2)
    train(
        model,
        LOSS,
        records,
        epsilon=2.0,
        delta=1e-5,
        sampling_rate=0.2,
        noise_multiplier=2.0,
        steps=3,
        **options,
    )
    return model


def quietly(model, records):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate(model, records)


def test_a_value_of_training_records_comes_with_a_warning_and_one_of_others_does_not():
    x, y = data()
    model = trained_on((x[:300], y[:300]))
    for private in ((x[:300], y[:300]), (x[10:20], y[10:20]), TensorDataset(x, y), (x.clone(), y)):
        with pytest.warns(NotPrivate, match="not private"):
            evaluate(model, private)
    order = torch.randperm(300)
    with pytest.warns(NotPrivate):
        evaluate(model, (x[order].numpy(), y[order].numpy()))
    quietly(model, (x[300:], y[300:]))
    quietly(model, (x + 1, y))


def test_parts_of_a_dataset_are_told_apart_by_their_indices():
    whole = Numbered()
    model = trained_on(Subset(whole, range(0, 40, 2)))
    quietly(model, Subset(whole, range(1, 40, 2)))
    quietly(model, Numbered())
    for private in (whole, Subset(whole, [3, 4]), Examples(whole), Subset(Subset(whole, [7, 8, 9]), [1])):
        with pytest.warns(NotPrivate):
            evaluate(model, private)
