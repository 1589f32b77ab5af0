"""Training with correlated noise: what is planned, promised and told, what goes on, and what is refused."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import farthing as ft
from farthing.accounting import correlated as choosing
from farthing.accounting import gaussian, pld
from farthing.errors import InvalidValue, PromiseBroken, Unsupported
from farthing.noise.lattice import SeededStream
from farthing.queries.events import GaussianEvent, PoissonEvent, RepeatedEvent
from farthing.torch.training.correlated import deviation, walking
from farthing.torch.training.plan import Plan

LOSS = nn.CrossEntropyLoss(reduction="none")
BUDGET = ft.Budget(8.0, 1e-5)


def data(records=1000):
    inputs = torch.randn(records, 3, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs[:, 0] > 0).long()


def train(ledger=None, **more):
    more = {"sampling_rate": 0.05, "steps": 40, "bands": 4, **more}
    return ft.torch.train(nn.Linear(3, 2), LOSS, data(), ledger or ft.Ledger(BUDGET), **more)


def test_a_run_spends_its_budget_as_one_chance_a_cycle():
    training = train()
    assert len(list(training)) == 40
    noise = training.plan.noise_multiplier(0)
    event = RepeatedEvent(PoissonEvent(0.2, GaussianEvent(noise)), 10)
    assert pld.epsilon(event, 1e-5) == pytest.approx(8.0, rel=1e-6)
    assert training.ledger.guarantee.epsilon == pytest.approx(8.0, rel=1e-6)


def test_with_a_noise_multiplier_as_many_batches_as_fit_are_made():
    training = train(noise_multiplier=2.0, steps=None)
    assert training.steps % 4 == 0  # whole cycles
    longer = RepeatedEvent(PoissonEvent(0.2, GaussianEvent(2.0)), training.steps // 4 + 1)
    assert pld.epsilon(longer, 1e-5) > 8.0


def test_noise_cancels_over_the_steps_of_a_training():
    inputs, targets = torch.zeros(4, 1), torch.zeros(4, dtype=torch.long)  # next to nothing but noise
    model = nn.Linear(1, 20_000, bias=False)
    noises = []

    def remember(step):
        noises.append(model.weight.grad.flatten().clone())

    training = ft.torch.train(
        model,
        LOSS,
        (inputs, targets),
        ft.Ledger(BUDGET),
        sampling_rate=0.25,
        steps=4,
        bands=4,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        callbacks=[remember],
    )
    for step in training:
        assert float(step.noise_norm) == pytest.approx(float(step.gradient_norm), rel=0.25)
    correlation = float(torch.corrcoef(torch.stack(noises[:2]))[0, 1])
    assert correlation == pytest.approx(-0.5, abs=0.2)  # -c₁ / √(1 + c₁²), at the exponent that was chosen


def test_a_killed_training_goes_on_at_the_same_price(tmp_path):
    journal = tmp_path / "a.ledger"
    code = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}\n"
        "from test_correlated import *\n"
        f"training = train(ft.Ledger(BUDGET, journal={str(journal)!r}, block=3))\n"
        "[next(training) for _ in range(7)]\n"
        "import os; os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    with ft.Ledger.open(journal) as ledger:
        training = train(ledger)
        assert len(list(training)) == 40 - 9  # three blocks were reserved
        assert ledger.spent.epsilon <= 8.0
    with ft.Ledger.open(journal) as ledger, pytest.raises(PromiseBroken):
        train(ledger, bands=2)


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"bands": 0}, InvalidValue, "bands"),
        ({"bands": "some"}, InvalidValue, "auto"),
        ({"bands": 2.5}, InvalidValue, "auto"),
        ({"bands": 40}, InvalidValue, "at most 20 groups"),
        ({"bands": "auto", "noise_multiplier": 1.0}, InvalidValue, "leave it out"),
        ({"noise_multiplier": [1.0, 2.0]}, Unsupported, "one noise_multiplier"),
        ({"adapt": lambda step: None}, Unsupported, "adapt"),
        ({"budgets": np.ones(1000)}, Unsupported, "budgets"),
        ({"mechanism": ft.torch.FloatGaussian}, Unsupported, "mechanism"),
    ],
)
def test_what_has_no_theorem_is_refused_before_anything_is_charged(more, error, message):
    ledger = ft.Ledger(BUDGET)
    with pytest.raises(error, match=message):
        train(ledger, **more)
    assert ledger.share == 0.0
    assert len(list(ledger.journal.rows())) == 1


def test_a_learning_rate_goes_by_the_noise_of_running_sums():
    plan = Plan(1000, 0.05, (2.0,), 40, True, 4, 0.7)
    gain = choosing.banded_prefix_noise(4, 0.7, 40) / choosing.banded_prefix_noise(1, 0.5, 40)
    assert walking(plan).noise_multiplier(0) == pytest.approx(2.0 * gain)
    assert walking(Plan(1000, 0.05, (2.0,), 40)).noise_multiplier(0) == 2.0
    assert deviation(plan) > math.sqrt(1 + 0.7**2)


def test_passes_spend_the_budget_as_one_gaussian_answer_each():
    training = train(bands="pass")
    assert (training.plan.bands, training.plan.buffers, training.plan.sampling_rate) == (20, 2, 0.05)
    assert len(list(training)) == 40
    mu = math.sqrt(2) / training.plan.noise_multiplier(0)
    assert gaussian.delta(mu, 8.0) == pytest.approx(1e-5, rel=1e-6)
    assert training.ledger.guarantee.epsilon == pytest.approx(8.0, rel=1e-6)


@pytest.mark.parametrize(("rate", "steps"), [(0.05, 40), (0.05, 20), (0.01, 800)])
def test_the_least_noise_in_running_sums_is_chosen(rate, steps):
    plan = train(bands="auto", sampling_rate=rate, steps=steps).plan
    banded = choosing.choose_bands(BUDGET, rate, steps)
    by_bands = banded.noise_multiplier * choosing.banded_prefix_noise(banded.bands, banded.exponent, steps)
    by_passes = choosing.choose_buffers(BUDGET, round(1 / rate), steps).running_noise
    assert bool(plan.buffers) == (by_passes < by_bands)
    noise = walking(plan).noise_multiplier(0) * choosing.banded_prefix_noise(1, 0.5, steps)
    assert noise == pytest.approx(min(by_bands, by_passes), rel=1e-3)


def test_a_batch_by_buffers_has_the_noise_that_the_optimiser_is_told():
    plan = train(bands="pass", sampling_rate=0.25, steps=8).plan
    pairs = choosing.best_pairs(plan.buffers, 8, 4)
    mechanism = ft.BufferedGaussian(1.0, *pairs, 8, 4).begin()
    stream, bound = SeededStream(0), ft.ClipNorm(1.0)
    last = [mechanism.release(np.zeros(50_000), bound, stream, turn) for turn in range(8)][-1]
    assert float(last.std()) == pytest.approx(deviation(plan), rel=0.03)  # ten standard deviations


def test_buffers_find_their_own_noise():
    with pytest.raises(InvalidValue, match="leave it out"):
        train(bands="pass", noise_multiplier=2.0)
