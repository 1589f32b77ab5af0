"""SGD1: its noise, its steps, and what it guarantees against whom, each by a calculation of its own."""

import math

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import binom, norm

import farthing as ft
from farthing.accounting import pld
from farthing.algorithms.problem import Problem
from farthing.algorithms.sgd1 import sgd1, sgd1_guarantees, sgd1_noise
from farthing.budget import Adjacency, Observer
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.events import DrawnEvent, FixedSizeEvent, GaussianEvent, RepeatedEvent
from farthing.losses import logistic, multinomial, squared
from farthing.mechanisms import Gaussian
from farthing.noise import SeededStream
from farthing.tables import Table


def small(n):
    return 1 / (2 * n**3)


def table(n=12, d=3):
    x = (np.arange(n * d).reshape(n, d) * 0.6180339887) % 1.0
    return Table(x, (x[:, 0] > x[:, 1]).astype(float), unit=True)


def door(n=12, epsilon=0.5, delta=None, seed=None, adjacency="replace-one", observer="anyone"):
    budget = ft.Budget(epsilon, delta or small(n), adjacency, observer=observer)
    return ft.Ledger(budget, stream=None if seed is None else SeededStream(seed)).over(table(n))


def test_noise_is_equation_3():
    n, L, epsilon, delta = 50, 2.0, 0.5, 1e-6
    assert sgd1_noise(n, L, epsilon, delta) ** 2 == pytest.approx(
        16 * L**2 * n**2 * math.log(1.25 * n**2 / delta) ** 2 / epsilon**2
    )


@pytest.mark.parametrize(
    ("n", "coordinator", "anyone"), [(50, 0.320, 0.0374), (100, 0.441, 0.0373), (200, 0.605, 0.0368)]
)
def test_true_epsilons_at_a_claim_of_one_half(n, coordinator, anyone):
    knows, hidden = sgd1_guarantees(n, 1.0, 0.5, small(n))
    assert knows.observer is Observer.COORDINATOR
    assert hidden.observer is Observer.ANYONE
    assert knows.adjacency is hidden.adjacency is Adjacency.REPLACE_ONE
    assert knows.delta == hidden.delta == small(n)
    assert round(knows.epsilon, 3) == coordinator
    assert round(hidden.epsilon, 4) == anyone


def test_the_claim_fails_before_the_coordinator_from_132_on():
    assert sgd1_guarantees(131, 1.0, 0.5, small(131))[0].epsilon <= 0.5
    assert sgd1_guarantees(132, 1.0, 0.5, small(132))[0].epsilon > 0.5
    assert round(sgd1_guarantees(1000, 1.0, 0.5, small(1000))[0].epsilon, 2) == 1.27


def seen_delta(n, noise, epsilon):
    """E over K ~ Bin(n², 1/n) of the Gaussian mechanism's δ at 2nL√K/σ."""
    k = np.arange(1, n * n + 1)
    mu = 2 * np.sqrt(k) / noise
    gauss = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    return float(binom.pmf(k, n * n, 1 / n) @ gauss)


@pytest.mark.parametrize("n", [20, 50, 200])
def test_the_coordinators_epsilon_by_a_plain_sum(n):
    noise = sgd1_noise(n, 3.0, 0.5, small(n)) / (3.0 * n)
    epsilon = sgd1_guarantees(n, 3.0, 0.5, small(n))[0].epsilon
    assert seen_delta(n, noise, epsilon) <= small(n) * (1 + 1e-9)
    assert seen_delta(n, noise, epsilon * (1 - 1e-6)) > small(n)


def hidden_delta(rate, noise, steps, epsilon, cell=1e-6, points=2**20):
    """δ of secret draws of one record, its loss put on a grid (mean preserved) and convolved by FFT.

    Losses above 0 are those of (1-q) N(0) + q N(2/noise) against N(0), those below 0 of the swapped pair, and
    the rest of the mass has none: the pair whose profile is the larger of both directions.
    """
    a = 2 / noise
    edges = np.linspace(a / 2, a / 2 + 12, 200_001)
    x = (edges[1:] + edges[:-1]) / 2
    loss = np.log1p(rate * np.expm1(a * x - a * a / 2))
    base = norm.cdf(-edges[:-1]) - norm.cdf(-edges[1:])
    mixed = (1 - rate) * base + rate * (norm.cdf(a - edges[:-1]) - norm.cdf(a - edges[1:]))
    law = np.zeros(points)
    for losses, mass in ((loss, mixed), (-loss, base)):
        place = losses / cell
        low = np.floor(place).astype(int)
        np.add.at(law, low % points, mass * (1 - (place - low)))
        np.add.at(law, (low + 1) % points, mass * (place - low))
    law[0] += 1 - law.sum()
    total = np.fft.irfft(np.fft.rfft(law) ** steps, points)
    sums = np.arange(points // 2) * cell
    beyond = sums > epsilon
    return float(-np.expm1(epsilon - sums[beyond]) @ total[: points // 2][beyond])


@pytest.mark.parametrize("n", [30, 50])
def test_everybody_elses_epsilon_by_convolution(n):
    noise, delta = sgd1_noise(n, 1.0, 0.5, small(n)) / n, small(n)
    epsilon = sgd1_guarantees(n, 1.0, 0.5, delta)[1].epsilon
    assert hidden_delta(1 / n, noise, n * n, epsilon) == pytest.approx(delta, rel=2e-3)


def test_everybody_elses_epsilon_beside_dp_accounting():
    """Its pair for Poisson draws is one direction of ours, so a lower bound, and a close one."""
    reference = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    n = 50
    noise, delta = sgd1_noise(n, 1.0, 0.5, small(n)) / n, small(n)
    one = reference.from_gaussian_mechanism(
        noise / 2, sampling_prob=1 / n, value_discretization_interval=1e-6
    )
    lower = one.self_compose(n * n).get_epsilon_for_delta(delta)
    found = sgd1_guarantees(n, 1.0, 0.5, delta)[1].epsilon
    assert 0.999 * lower <= found <= 1.01 * lower


def test_a_party_knows_its_own_turns():
    n, delta = 60, small(60)
    seen = [sgd1_guarantees(n, 1.0, 0.5, delta, held)[1] for held in (0, 1, 20, 30, 58)]
    epsilons = [guarantee.epsilon for guarantee in seen]
    assert epsilons == sorted(epsilons)
    # half of the iterations, with draws twice as likely: √2 times the loss, and a tail set aside
    assert math.sqrt(2) < epsilons[3] / epsilons[0] < 1.1 * math.sqrt(2)
    assert "30 of 60" in seen[3].note
    most = sgd1_guarantees(n, 1.0, 0.5, delta, n - 1)
    assert most[1].epsilon <= most[0].epsilon


def test_a_partys_epsilon_by_a_plain_mixture():
    """Whatever number of turns falls to the others: their draws are one in n - held, composed so often."""
    n, held, delta = 30, 15, small(30)
    noise = sgd1_noise(n, 1.0, 0.5, delta) / n
    found = sgd1_guarantees(n, 1.0, 0.5, delta, held)[1].epsilon
    turns = np.arange(350, 560)
    event = FixedSizeEvent(1, n - held, GaussianEvent(noise))
    prices = [pld.delta(RepeatedEvent(event, int(t)), found, Adjacency.REPLACE_ONE) for t in turns]
    assert 0.3 * delta < binom.pmf(turns, n * n, 0.5) @ prices <= delta


def reference(records, n, clip, noise, radius, convexity, features, stream):
    """The write-up's pseudocode, iteration by iteration on explicit rows, with the same draws and noise."""
    z = np.column_stack([records.X / np.linalg.norm(records.X, axis=1)[:, None], np.full(n, 0.3)])
    theta, sigma = np.zeros(4), noise * n * clip
    for t in range(1, n * n + 1):
        (record,) = stream.choose(1, n)
        gradient = (expit(z[record] @ theta) - records.y[record]) * z[record]
        gradient *= min(1.0, clip / np.linalg.norm(gradient))
        G = n * Gaussian(noise).release(gradient, ft.ClipNorm(clip), stream)
        G = G + n * convexity * theta
        eta = 2 * radius / math.sqrt(t * (n**2 * clip**2 + 4 * sigma**2))
        theta = theta - (1 / (convexity * n * t) if convexity else eta) * G
        theta = theta * min(1.0, radius / np.linalg.norm(theta))
    return features.unfold(theta)


@pytest.mark.parametrize(("convexity", "clip", "radius"), [(0.0, 0.4, 1.0), (0.5, 2.0, 3.0)])
def test_it_is_the_pseudocode(convexity, clip, radius):
    n, problem = 12, Problem(logistic, 12, 3)
    steps = list(sgd1(door(seed=5), problem, lipschitz=clip, radius=radius, convexity=convexity))
    noise = sgd1_noise(n, clip, 0.5, small(n)) / (n * clip)
    u, constant = reference(table(), n, clip, noise, radius, convexity, problem.rows(), SeededStream(5))
    assert [step.t for step in steps] == [n * k for k in range(1, n + 1)]
    assert steps[-1].w[0] == pytest.approx(u, rel=1e-9)
    assert steps[-1].w[1] == pytest.approx(constant, rel=1e-9)


@pytest.mark.parametrize("observer", ["anyone", "coordinator"])
def test_every_iteration_is_charged_as_its_observer_sees_it(observer):
    ledger = door(observer=observer)
    run = ft.run(sgd1(ledger, Problem(logistic, 12, 3), lipschitz=1.0))
    (event,) = {receipt.event for receipt in run.receipts}
    noise = GaussianEvent(sgd1_noise(12, 1.0, 0.5, small(12)) / 12)
    expected = DrawnEvent(1 / 12, noise) if observer == "coordinator" else FixedSizeEvent(1, 12, noise)
    assert event == expected
    assert len(run.receipts) == run.steps == 144
    said = sgd1_guarantees(12, 1.0, 0.5, small(12))[0 if observer == "coordinator" else 1]
    assert ledger.spent.epsilon == pytest.approx(said.epsilon, rel=1e-9)


def test_nothing_is_asked_where_the_claim_does_not_hold():
    ledger = ft.Ledger(ft.Budget(0.5, small(132), "replace-one", observer="coordinator"))
    with pytest.raises(BudgetSpent, match="17424 answers"):
        next(sgd1(ledger.over(table(132)), Problem(logistic, 132, 3)))
    assert ledger.spent.epsilon == 0
    with pytest.raises(Unsupported):  # a coordinator who sees the draws sees how many records there are
        next(sgd1(door(adjacency="add-remove", observer="coordinator"), Problem(logistic, 12, 3)))


@pytest.mark.parametrize("observer", ["anyone", "coordinator"])
def test_exact_noise_spends_the_budget_before_its_observer(observer):
    ledger = door(epsilon=2.0, delta=1e-3, observer=observer)
    run = ft.run(sgd1(ledger, Problem(logistic, 12, 3), exact=True))
    assert run.steps == 144
    assert 1.99 < ledger.spent.epsilon <= 2.0


def test_more_privacy_budget_finds_the_direction():
    n = 60
    ledger = door(n, epsilon=200.0, delta=1e-3, seed=3)
    u, constant = ft.run(sgd1(ledger, Problem(logistic, n, 3), exact=True, radius=5.0)).w
    records = table(n)
    right = (records.X / np.linalg.norm(records.X, axis=1)[:, None] @ u + constant > 0) == records.y
    assert right.mean() > 0.85


def test_classes():
    ledger = door(epsilon=0.5)
    u, constant = ft.run(sgd1(ledger, Problem(multinomial, 12, 3, outputs=2))).w
    assert u.shape == (3, 2)
    assert constant.shape == (2,)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"radius": 0.0}, "radius"),
        ({"lipschitz": -1.0}, "lipschitz"),
        ({"convexity": math.nan}, "convexity"),
        ({"start": [1.0]}, "start"),
    ],
)
def test_bad_options(options, named):
    ledger = door()
    with pytest.raises(InvalidValue, match=named):
        next(sgd1(ledger, Problem(logistic, 12, 3), **options))
    assert ledger.share == 0


@pytest.mark.parametrize("observer", ["server", "aggregate"])
def test_a_server_that_knows_the_draws_is_not_taken_for_one_that_does_not(observer):
    with pytest.raises(InvalidValue, match="knows every draw"):
        next(sgd1(door(observer=observer), Problem(logistic, 12, 3)))


def test_claims_that_the_write_up_does_not_make():
    with pytest.raises(InvalidValue, match="epsilon must be below 1"):
        sgd1_noise(10, 1.0, 1.0, 1e-6)
    with pytest.raises(InvalidValue, match="delta must be below 1/n³"):
        sgd1_noise(10, 1.0, 0.5, 1e-3)
    with pytest.raises(InvalidValue, match="held must be below n=10"):
        sgd1_guarantees(10, 1.0, 0.5, 1e-6, held=10)
    with pytest.raises(InvalidValue, match="lipschitz must be given"):
        next(sgd1(door(), Problem(squared, 12, 3)))
