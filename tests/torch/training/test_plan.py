"""Plans: batches, rate and noise from public numbers, and shapes of noise fitted to a budget."""

import numpy as np
import pytest
import torch

import farthing as ft
from farthing.accounting import calibrate
from farthing.errors import InvalidValue
from farthing.queries.events import ComposedEvent, GaussianEvent, PoissonEvent, RepeatedEvent
from farthing.torch.training.plan import Plan, fitted, planned, promised, resumed

BUDGET = ft.Budget(2.0, 1e-5)


def test_what_is_not_given_spends_the_budget_by_public_numbers_only():
    first, second = (planned(BUDGET, 60_000), planned(BUDGET, 60_000, sampling_rate=0.05))
    for plan in (first, second):
        event = PoissonEvent(plan.sampling_rate, GaussianEvent(plan.noise_multipliers[0]))
        assert ft.steps_for(event, BUDGET) == pytest.approx(plan.steps, abs=1)
    assert second.noise_multipliers[0] > first.noise_multipliers[0]
    assert planned(ft.Budget(8.0, 1e-5), 60_000).steps > first.steps
    assert planned(BUDGET, 100).sampling_rate == 1.0
    assert planned(BUDGET, 10**6).expected_batch_size >= 1024


def test_a_shape_of_noise_is_fitted_to_the_budget():
    noises = fitted(lambda t: 1.0 + t / 40, 0.05, 40, BUDGET)
    assert len(set(noises)) <= 32
    assert noises[-1] / noises[0] == pytest.approx(2.0 / 1.025)
    counts = {noise: noises.count(noise) for noise in noises}
    event = ComposedEvent(
        tuple(RepeatedEvent(PoissonEvent(0.05, GaussianEvent(noise)), n) for noise, n in counts.items())
    )
    assert 1.999 < calibrate.epsilon(event, BUDGET) <= 2.0


def test_levels_of_a_plan():
    assert Plan(10, 0.1, (1.0, 2.0, 1.0), 3).levels() == {1.0: 2, 2.0: 1}
    assert Plan(10, 0.1, (1.0,), None).levels() == {1.0: None}


@pytest.mark.parametrize("given", [[3.0, 2.0], (3.0, 2.0), np.array([3.0, 2.0]), lambda t: 4.0 - t])
def test_a_schedule_of_noise_in_any_form(given):
    assert planned(BUDGET, 100, sampling_rate=0.1, noise_multiplier=given, steps=2).noise_multipliers == (
        3.0,
        2.0,
    )


def test_a_plan_in_a_ledger_is_found_again():
    ledger = ft.Ledger(BUDGET)
    assert resumed(promised(ledger.journal), 100, None, None) is None
    ledger.promise(PoissonEvent(0.1, GaussianEvent(3.0)), 7)
    found = promised(ledger.journal)
    assert resumed(found, 100, None, None) == Plan(100, 0.1, (3.0,), 7)
    assert resumed(found, 100, 0.2, None) is None
    assert resumed(found, 100, None, 8) is None


def test_gaussian_noise_needs_a_delta():
    with pytest.raises(InvalidValue, match="delta above 0"):
        planned(ft.Budget(1.0, 0.0), 100)


def test_a_ledger_that_is_promised_away_says_so():
    data = torch.randn(2000, 3), torch.randint(2, (2000,))
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
    ft.torch.train(torch.nn.Linear(3, 2), loss, data, ledger, steps=7)
    with pytest.raises(ft.PromiseBroken, match=r"promised to 7 answers already.*begin a new ledger"):
        ft.torch.train(torch.nn.Linear(3, 2), loss, data, ledger, steps=3)
