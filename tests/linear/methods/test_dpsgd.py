"""DP-SGD without a T, and SGD-Adv: what they charge, what they divide by, what they learn."""

import math

import numpy as np
import pytest
from scipy.special import expit

import farthing as ft
from farthing.accounting import calibrate, composition, gaussian
from farthing.data.tables import Table
from farthing.errors import InvalidValue
from farthing.linear.losses import huber_hinge, logistic, multinomial, squared
from farthing.linear.methods.dpsgd import advanced_noise, dpsgd, sgd_adv
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream
from farthing.queries.events import GaussianEvent, PoissonEvent, RepeatedEvent

ADJACENCIES = list(ft.Adjacency)


def table(n=3000, d=3, classes=2):
    x = (np.arange(n * d).reshape(n, d) * 0.6180339887) % 1.0
    return Table(x, np.argmax(x[:, :classes], axis=1).astype(float), unit=True)


def door(epsilon=1.0, adjacency="add-remove", seed=None, **options):
    stream = None if seed is None else SeededStream(seed)
    return ft.Ledger(ft.Budget(epsilon, 1e-6, adjacency), stream=stream).over(table(**options))


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("method", [dpsgd, sgd_adv])
def test_every_lot_is_charged_as_the_poisson_gaussian_that_ran(method, adjacency):
    ledger = door(adjacency=adjacency)
    run = ft.run(method(ledger, Problem(logistic, 3000, 3)))
    (event,) = {receipt.event for receipt in run.receipts}
    assert isinstance(event, PoissonEvent)
    assert isinstance(event.event, GaussianEvent)
    assert run.steps == len(run.receipts)
    assert ledger.spent.epsilon <= 1.0
    assert calibrate.epsilon(RepeatedEvent(event, run.steps), ledger.budget) <= 1.0


def test_dpsgd_uses_all_of_the_budget_and_sgd_adv_wastes_some():
    spent = {}
    for method in (dpsgd, sgd_adv):
        ledger = door()
        ft.run(method(ledger, Problem(logistic, 3000, 3)))
        spent[method] = ledger.spent.epsilon
    assert spent[dpsgd] > 0.99
    assert spent[sgd_adv] < 0.5


def test_noise_given_by_hand_decides_how_many_lots_there_are():
    ledger = door()
    steps = list(dpsgd(ledger, Problem(logistic, 3000, 3), sampling_rate=0.05, noise_multiplier=2.0))
    assert len(steps) == calibrate.steps(PoissonEvent(0.05, GaussianEvent(2.0)), ledger.budget)


def test_a_step_is_the_clipped_sum_over_the_public_size():
    """With hardly any noise and every record in the lot, the first step is the clipped gradient's."""
    records = table()
    ledger = ft.Ledger(ft.Budget(1e9, 0.5)).over(records)
    clip, n = 0.2, 1000  # the public number is wrong on purpose: it is what divides
    steps = dpsgd(
        ledger,
        Problem(logistic, n, 3),
        sampling_rate=1.0,
        noise_multiplier=1e-2,
        clip_norm=clip,
        step=0.7,
        momentum=0.0,
    )
    u, constant = next(iter(steps)).w
    x = records.X / np.linalg.norm(records.X, axis=1, keepdims=True)
    z = np.column_stack([x, np.full(len(x), 0.3)])
    gradients = (expit(0.0) - records.y)[:, None] * z
    gradients *= np.minimum(1, clip / np.linalg.norm(gradients, axis=1))[:, None]
    expected = -2 * 0.7 * gradients.sum(axis=0) / n
    assert u == pytest.approx(expected[:3], abs=1e-4)
    assert constant == pytest.approx(0.3 * expected[3], abs=1e-4)


@pytest.mark.parametrize("method", [dpsgd, sgd_adv])
@pytest.mark.parametrize(
    ("loss", "classes"), [(logistic, 2), (huber_hinge, 2), (squared, 2), (multinomial, 3)]
)
def test_it_learns_under_every_loss(method, loss, classes):
    outputs = classes if loss is multinomial else 0
    ledger = door(epsilon=20.0, seed=1, classes=classes)
    u, constant = ft.run(method(ledger, Problem(loss, 3000, 3, outputs=outputs))).w
    assert u.shape == ((3, outputs) if outputs else (3,))
    assert np.shape(constant) == ((outputs,) if outputs else ())
    records = table(classes=classes)
    x = records.X / np.linalg.norm(records.X, axis=1, keepdims=True)
    margins = x @ u + constant
    middle = 0.5 if loss is squared else 0.0
    guess = np.argmax(margins, axis=1) if outputs else margins > middle
    assert np.mean(guess == records.y) > 0.85


def test_a_seed_repeats_the_run():
    one, two = (ft.run(dpsgd(door(seed=5), Problem(logistic, 3000, 3))).w[0] for _ in range(2))
    assert (one == two).all()


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("epsilon", [0.05, 1.0, 8.0])
@pytest.mark.parametrize(("rate", "steps"), [(0.01, 1000), (0.3, 50), (1.0, 1), (1e-4, 10**6)])
def test_advanced_noise_is_never_too_little(adjacency, epsilon, rate, steps):
    budget = ft.Budget(epsilon, 1e-7, adjacency)
    noise = advanced_noise(rate, steps, budget)
    assert calibrate.affordable(RepeatedEvent(PoissonEvent(rate, GaussianEvent(noise)), steps), budget)


def test_advanced_noise_is_that_of_the_textbook_where_a_step_is_small():
    noise = advanced_noise(0.01, 1000, ft.Budget(0.5, 1e-6))
    assert composition.advanced_sampled(noise, 0.01, 1000, 1e-6) == pytest.approx(0.5, rel=1e-9)


def test_a_step_beyond_1_is_not_amplified():
    """One lot of half the records at a large ε: the noise is that of advanced composition alone."""
    noise = advanced_noise(0.5, 1, ft.Budget(50.0, 1e-6))
    single = gaussian.epsilon(1 / noise, 5e-7)
    assert composition.advanced(single, 0.0, 1, 5e-7)[0] == pytest.approx(50.0, rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0])
def test_sgd_adv_makes_as_many_steps_as_it_was_told(epsilon):
    run = ft.run(sgd_adv(door(epsilon), Problem(logistic, 3000, 3), steps=17, sampling_rate=0.1))
    assert run.steps == 17
    assert math.isfinite(run.w[0].sum())


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (dpsgd, {"sampling_rate": 1.5}),
        (dpsgd, {"noise_multiplier": 0.0}),
        (dpsgd, {"clip_norm": -1.0}),
        (dpsgd, {"step": math.nan}),
        (dpsgd, {"momentum": 1.0}),
        (sgd_adv, {"steps": 0}),
        (sgd_adv, {"sampling_rate": 0.0}),
    ],
)
def test_bad_options_are_named(method, options):
    with pytest.raises(InvalidValue, match=next(iter(options))):
        list(method(door(), Problem(logistic, 3000, 3), **options))


def test_advanced_composition_has_twice_the_noise_where_a_record_is_replaced():
    alone, other = (
        advanced_noise(0.1, 20, ft.Budget(0.7, 1e-6, kind)) for kind in ("add-remove", "replace-one")
    )
    assert other == pytest.approx(2 * alone, rel=2e-3)
