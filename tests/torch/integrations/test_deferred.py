"""Steps that somebody else takes are the steps of the run."""

import pytest
import torch
from torch import nn

import farthing as ft
from farthing.errors import InvalidValue
from farthing.noise.lattice import SeededStream
from farthing.torch.integrations.deferred import defer

LOSS = nn.CrossEntropyLoss(reduction="none")
X = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
MAKERS = {
    "chosen": lambda model: None,
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
    "adam": lambda model: ft.torch.DPAdam(model.parameters(), 1e-2),
}


def training_of(make, **options):
    torch.manual_seed(0)
    model, ledger = nn.Linear(3, 2), ft.Ledger(ft.Budget(5.0, 1e-5), stream=SeededStream(1))
    return ft.torch.train(model, LOSS, (X, Y), ledger, steps=6, optimizer=make(model), **options)


@pytest.mark.parametrize("name", MAKERS)
def test_the_same_weights(name):
    plain, deferred = training_of(MAKERS[name]), training_of(MAKERS[name])
    ft.run(plain)
    optimizer = defer(deferred)
    for _ in deferred:
        optimizer.step()
    torch.testing.assert_close(deferred.model.weight, plain.model.weight, rtol=1e-6, atol=1e-7)
    assert not torch.equal(plain.model.weight, training_of(MAKERS[name]).model.weight)


def test_without_a_step_nothing_moves():
    training = training_of(MAKERS["sgd"])
    before = training.model.weight.detach().clone()
    defer(training)
    assert len(list(training)) == 6
    assert torch.equal(training.model.weight, before)


def test_a_restored_optimizer_is_still_the_one():
    training = training_of(MAKERS["sgd"])
    optimizer = defer(training)
    state = training.state_dict()
    state["optimizer"]["param_groups"][0]["lr"] = 0.03
    training.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.03
    assert training.optimizer.param_groups is optimizer.param_groups


def test_what_follows_the_steps_belongs_to_whoever_takes_them():
    with pytest.raises(InvalidValue, match="average"):
        defer(training_of(MAKERS["sgd"], average=0.9))
    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 2)
    options = {"epsilon": 1.0, "delta": 1e-5, "steps": 3}
    with pytest.raises(InvalidValue, match="scheduler"):
        defer(ft.torch.train(model, LOSS, (X, Y), optimizer=sgd, scheduler=scheduler, **options))
