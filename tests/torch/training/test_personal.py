"""Personal budgets in a training: rates by level, what holds for whom, going on, and refusals."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import farthing as ft
from farthing.accounting import pld
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.queries.events import GaussianEvent, PoissonEvent, RepeatedEvent
from farthing.queries.personal import Personal

LOSS = nn.CrossEntropyLoss(reduction="none")
BUDGETS = np.repeat([1.0, 2.0, 3.0], [340, 430, 230])


def data(records=1000):
    inputs = torch.randn(records, 3, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs[:, 0] > 0).long()


def train(budgets=BUDGETS, ledger=None, **more):
    more = {"delta": None if ledger else 1e-5, "steps": 8, **more}
    return ft.torch.train(nn.Linear(3, 2), LOSS, data(), ledger, budgets=budgets, **more)


def test_every_level_ends_exactly_at_its_budget():
    training = train()
    steps = list(training)
    assert len(steps) == 8
    for level, said in training.ledger.guarantees.items():
        assert level * (1 - 1e-5) <= said.epsilon <= level
    assert training.ledger.share == 1.0
    assert "340 at epsilon 1, 430 at epsilon 2, 230 at epsilon 3" in training.ledger.guarantee.note


def test_what_was_charged_is_what_was_drawn_and_sums_are_divided_by_its_expected_size():
    training = train(sampling_rate=0.1)
    step = next(training)
    events = step.receipts[0].event.events
    rates = [event.rate for event in events]
    assert rates == sorted(rates)
    assert step.expected_batch_size == pytest.approx(np.dot(rates, [340, 430, 230]))
    assert step.expected_batch_size == pytest.approx(100, rel=0.1)
    sampler = training._last[2].sampler
    assert sampler == Personal(tuple(rates))
    for event, epsilon in zip(events, (1, 2, 3), strict=True):
        again = RepeatedEvent(PoissonEvent(event.rate, GaussianEvent(step.noise_multiplier)), 8)
        assert pld.epsilon(again, 1e-5) == pytest.approx(epsilon, rel=1e-5)


def test_batches_hold_the_levels_in_proportion_to_their_rates():
    training = train(sampling_rate=0.2, steps=2)
    records, query = training._asks.door._records, training._query(1, next(iter(training._course)))
    counts = np.zeros(3)
    for turn in range(200):
        drawn = query.draw(records, training.ledger._stream, turn)
        counts += np.bincount(records.levels[drawn], minlength=3)
    expected = 200 * np.array([340, 430, 230]) * query.sampler.sampling_rates
    assert (np.abs(counts - expected) < 7 * np.sqrt(expected)).all()


KILLED = """
import os, sys
sys.path[:0] = {path!r}
from test_personal import *
people = ft.PersonalBudgets(BUDGETS)
ledger = ft.Ledger(people.budget(1e-5), filter=people, journal={journal!r}, block=2)
training = train(ledger=ledger)
next(training), next(training), next(training)
os.kill(os.getpid(), 9)
"""


def test_a_killed_training_goes_on_with_its_rates_and_no_level_passes_its_budget(tmp_path):
    path = tmp_path / "people.ledger"
    code = KILLED.format(path=[str(Path(__file__).parent), *sys.path], journal=str(path))
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    with ft.Ledger.open(path) as ledger:
        training = train(ledger=ledger, steps=None)
        assert len(list(training)) == 8 - 4, "what was reserved is forfeited"
        assert ledger.share == 1.0
        with pytest.raises(BudgetSpent):
            list(train(ledger=ledger, steps=None))


def test_a_persons_budget_is_the_smallest_of_the_records_that_count():
    users = np.arange(1000) % 500  # records i and i + 500 belong to person i
    budgets = np.where(np.arange(1000) < 500, 2.0, 1.0)
    training = train(budgets, users=users, records_per_user=2)
    assert list(training.ledger.guarantees) == [1.0]
    assert training.ledger.budget.unit is ft.Unit.USER
    only_first = train(budgets, users=users, records_per_user=1)
    assert list(only_first.ledger.guarantees) == [2.0]


def test_a_level_too_small_for_any_rate_never_takes_part():
    budgets = np.append([0.05], BUDGETS[1:])
    training = train(budgets, steps=5)
    next(training)
    assert training._last[2].sampler.sampling_rates[0] == 0.0
    assert training.ledger.guarantees[0.05].epsilon == 0.0


def test_stopping_early_is_free():
    training = train()
    next(training)
    training.ledger.refund()
    assert training.ledger.share == pytest.approx(1 / 8)


@pytest.mark.parametrize(
    "budgets",
    [BUDGETS[:-1], np.append(BUDGETS[1:], np.nan), -BUDGETS, BUDGETS * 0, ["a"] * 1000, BUDGETS[None]],
)
def test_wrong_budgets_are_refused_without_quoting_one(budgets):
    with pytest.raises(InvalidValue, match="budgets must be") as refused:
        train(budgets)
    assert "nan" not in str(refused.value)


@pytest.mark.parametrize(
    ("more", "error", "text"),
    [
        ({"epsilon": 1.0}, InvalidValue, "epsilon must be left out"),
        ({"delta": None}, InvalidValue, "delta"),
        ({"records": 999}, InvalidValue, "records must be left out"),
        ({"noise_multiplier": [1.0] * 8}, Unsupported, "one noise_multiplier"),
        ({"noise_multiplier": 1.0, "sampling_rate": 0.1}, InvalidValue, "not both"),
        ({"adapt": lambda step: None}, Unsupported, "adapt="),
    ],
)
def test_terms_that_personal_rates_do_not_have_are_refused(more, error, text):
    with pytest.raises(error, match=text):
        train(**more)


def test_the_ledger_must_have_the_levels():
    with pytest.raises(InvalidValue, match="filter=people"):
        train(ledger=ft.Ledger(ft.Budget(3.0, 1e-5)))
    people = ft.PersonalBudgets([2.0, 3.0])
    with pytest.raises(InvalidValue, match="smallest level, epsilon 2"):
        train(ledger=ft.Ledger(people.budget(1e-5), filter=people))
    with pytest.raises(InvalidValue, match="leave them out"):
        train(ledger=ft.Ledger(people.budget(1e-5), filter=people), delta=1e-5, budgets=BUDGETS + 1)


def test_a_given_noise_decides_the_rates():
    training = train(noise_multiplier=2.0)
    assert training.plan.noise_multipliers == (2.0,)
    assert training.ledger.guarantees[1.0].epsilon == pytest.approx(1.0, rel=1e-5)
