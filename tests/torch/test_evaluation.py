"""Looking at a run: on public data, and by a bar in the terminal."""

import pytest
import torch
from torch import nn

import farthing as ft
from farthing.noise import SeededStream
from farthing.torch.evaluation import evaluate, progress
from farthing.torch.training import train

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
    assert evaluate(model, (x, y), LOSS, physical=7) == pytest.approx(wanted, rel=1e-5)
    assert model.training


def test_callbacks_and_progress_see_every_step():
    seen = []
    ledger = ft.Ledger(ft.Budget(2.0, 1e-5), stream=SeededStream(1))
    training = train(network(), LOSS, data(), ledger, rate=0.2, noise=2.0, steps=3, callbacks=[seen.append])
    assert [step.t for step in progress(training)] == [1, 2, 3]
    assert [step.t for step in seen] == [1, 2, 3]
