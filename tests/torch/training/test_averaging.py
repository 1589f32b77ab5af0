"""The moving average of released weights, by its own formula."""

import pytest
import torch
from torch import nn

import farthing as ft
from farthing.errors import InvalidValue
from farthing.noise.lattice import SeededStream
from farthing.torch.training.loop import train

LOSS = nn.CrossEntropyLoss(reduction="none")


def begun(model, **options):
    x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    ledger = ft.Ledger(ft.Budget(2.0, 1e-5), stream=SeededStream(1))
    return train(
        model,
        LOSS,
        (x, (x[:, 0] > 0).long()),
        ledger,
        sampling_rate=0.2,
        noise_multiplier=2.0,
        steps=5,
        **options,
    )


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_weights_are_averaged_aside():
    model = nn.Linear(4, 2)
    training = begun(model, average=0.99)
    seen = [flat(model)]
    for _ in training:
        seen.append(flat(model))
    wanted = seen[0]
    for t, weights in enumerate(seen[1:], start=1):
        decay = min(0.99, (1 + t) / (10 + t))
        wanted = decay * wanted + (1 - decay) * weights
    assert torch.allclose(flat(training.averaged), wanted, atol=1e-6)


def test_frozen_weights_stay_and_an_average_must_be_asked_for():
    model = nn.Linear(4, 2)
    model.bias.requires_grad_(False)
    training = begun(model, average=0.5)
    list(training)
    assert torch.equal(training.averaged.bias, model.bias)
    with pytest.raises(InvalidValue, match="average="):
        _ = begun(nn.Linear(4, 2)).averaged
