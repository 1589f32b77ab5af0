"""Prices of the best of a random number of runs, against laws that are computed outcome by outcome."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtr, ndtri

from farthing.accounting import gaussian, tuning
from farthing.accounting.filters import BasicFilter, GdpFilter, RdpFilter
from farthing.accounting.tuning import Profile, RunCount, Selection
from farthing.budget import Adjacency, Budget
from farthing.errors import InvalidValue, Unsupported
from farthing.noise.streams import Stream
from farthing.queries.events import (
    ApproximateEvent,
    GaussianEvent,
    PoissonEvent,
    PureEvent,
    RepeatedEvent,
    TuningEvent,
    decode,
    encode,
)

SHAPES = (-0.5, 0.0, 1.0, 3.0, None)


def _probabilities(runs: RunCount, most: int = 1200) -> np.ndarray:
    """P(K = 0), P(K = 1), …, from the definitions (Papernot & Steinke 2022, Def. 1 and Sec. 3.2)."""
    if runs.shape is None:
        return stats.poisson.pmf(np.arange(most), runs.mean)
    gamma, eta = runs.gamma, runs.shape
    k = np.arange(1, most)
    if eta == 0:
        pmf = (1 - gamma) ** k / (k * math.log(1 / gamma))
    else:
        factors = np.cumprod((np.arange(most - 1) + eta) / (np.arange(most - 1) + 1))
        pmf = (1 - gamma) ** k / (gamma**-eta - 1) * factors
    return np.concatenate([[0.0], pmf])


def _best(law: np.ndarray, order: tuple[int, ...], pmf: np.ndarray) -> np.ndarray:
    """The law of the best of K draws, outcomes ordered from worst to best; nothing is a last outcome."""
    below = np.concatenate([[0.0], np.cumsum(law[list(order)])])
    f = np.array([np.polynomial.polynomial.polyval(x, pmf) for x in np.minimum(below, 1.0)])
    best = np.zeros(len(law) + 1)
    best[list(order)] = np.diff(f)
    best[-1] = pmf[0]
    return best


def _hockey(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum())


def _profile_of(p: np.ndarray, q: np.ndarray, points: int = 200) -> Profile:
    most = float(np.abs(np.log(p / q)).max())
    losses = np.linspace(0.0, most, points)
    return Profile(losses, np.array([max(_hockey(p, q, e), _hockey(q, p, e)) for e in losses]))


@pytest.mark.parametrize("shape", SHAPES)
def test_no_order_of_outcomes_of_a_small_mechanism_passes_the_bound(shape):
    rng, runs = np.random.default_rng(3), RunCount(4.0, shape)
    pmf = _probabilities(runs)
    for trial in range(6):
        p, q = rng.dirichlet(np.ones(4) * (0.4, 2.0, 10.0)[trial % 3], 2) * 0.999 + 0.00025
        chosen = Selection.of(_profile_of(p, q), runs)
        orders = itertools.permutations(range(4))
        best = [(_best(p, order, pmf), _best(q, order, pmf)) for order in orders]
        for epsilon in (0.0, 0.3, 1.0, 2.0, 4.0):
            truth = max(max(_hockey(a, b, epsilon), _hockey(b, a, epsilon)) for a, b in best)
            assert truth <= chosen.delta(epsilon) * (1 + 1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_order_passes_the_bound_on_renyi_divergences(shape):
    rng, runs = np.random.default_rng(4), RunCount(5.0, shape)
    pmf = _probabilities(runs)
    p, q = rng.dirichlet(np.ones(4), 2) * 0.99 + 0.0025
    chosen = Selection.of(_profile_of(p, q), runs)
    for order, alpha in itertools.product(itertools.permutations(range(4)), (1.5, 2.0, 8.0)):
        best = _best(p, order, pmf), _best(q, order, pmf)
        one, both = (max(_renyi(*pair, alpha), _renyi(*pair[::-1], alpha)) for pair in ((p, q), best))
        assert both <= one + chosen.added(alpha)


def _renyi(p: np.ndarray, q: np.ndarray, alpha: float) -> float:
    kept = p > 0
    return math.log((p[kept] ** alpha * q[kept] ** (1 - alpha)).sum()) / (alpha - 1)


@pytest.mark.parametrize(("shape", "share"), [(0.0, 0.95), (1.0, 0.95), (None, 0.93)])
def test_an_order_of_a_gaussian_mechanism_nearly_reaches_the_bound(shape, share):
    """From worst to best: large losses, then the largest of all, which are told, then the small ones."""
    mu, delta, runs = 0.3, 1e-5, RunCount(10.0, shape)
    bound = tuning.epsilon(TuningEvent(GaussianEvent(1 / mu), 10.0, shape, delta), delta)
    z = np.linspace(3.3, 9.0, 4000)  # a loss is mu z + mu²/2, with z ~ N(0, 1) under P, N(-mu, 1) under Q
    p, q = -np.diff(ndtr(-z)), -np.diff(ndtr(-z - mu))

    def reached(top: float) -> float:
        x, y = (ndtr(z[0] + s) - ndtr(ndtri(top) + s) for s in (0.0, mu))  # below the largest
        a, b = np.exp(runs.log_slope(x + 0 * p)), np.exp(runs.log_slope(y + np.cumsum(q)))
        return float(np.maximum(a * p - math.exp(share * bound) * b * q, 0.0).sum())

    assert max(map(reached, np.linspace(0.01, 0.7, 200))) > delta


@pytest.mark.parametrize("shape", [-0.5, 0.0, 1.0, 3.0])
def test_renyi_prices_are_at_most_those_of_papernot_and_steinke(shape):
    noise, runs = 4.0, RunCount(10.0, shape)
    chosen = tuning.selection(TuningEvent(GaussianEvent(noise), 10.0, shape, 1e-9), Adjacency.ADD_REMOVE)
    for order in (2.0, 8.0, 32.0):
        hats = np.geomspace(1.01, 1e4, 4000)
        terms = (1 - 1 / hats) * hats / (2 * noise**2) - np.log(runs.gamma) / hats
        theirs = (1 + shape) * terms.min() + math.log(runs.mean) / (order - 1)  # Thm. 2, less the run's own
        assert chosen.added(order) <= theirs + 1e-9


def test_renyi_prices_are_at_most_those_of_papernot_and_steinke_for_poisson():
    noise = 4.0
    chosen = tuning.selection(TuningEvent(GaussianEvent(noise), 10.0, None, 1e-9), Adjacency.ADD_REMOVE)
    for order in (2.0, 8.0, 32.0):
        hat = gaussian.delta(1 / noise, math.log1p(1 / (order - 1)))
        theirs = 10.0 * hat + math.log(10.0) / (order - 1)  # Thm. 6
        assert chosen.added(order) <= theirs * 1.01  # x is taken in cells


@pytest.mark.parametrize("shape", [-0.5, 0.0, 1.0, 3.0])
def test_runs_that_are_pure_cost_at_most_their_pure_price(shape):
    """(2 + η) ε of Papernot & Steinke 2022, Cor. 3; 3ε of Liu & Talwar 2019 where η is 1."""
    event = TuningEvent(PureEvent(0.5), 10.0, shape, 1e-12)
    assert tuning.epsilon(event, 1e-12) <= (2 + shape) * 0.5 * (1 + 1e-3)


def test_runs_that_are_only_known_by_one_point_cost_as_much_as_liu_and_talwar_say():
    event = TuningEvent(ApproximateEvent(0.5, 1e-9), 10.0, 1.0, 1e-7)
    assert 1.3 < tuning.epsilon(event, 1e-7) <= 1.5 * (1 + 1e-3)


def test_ten_expected_runs_cost_far_less_than_ten_runs():
    noise = gaussian.noise(1.0, 1e-5)
    prices = [
        tuning.epsilon(TuningEvent(GaussianEvent(noise), 10.0, shape, 1e-5), 1e-5) for shape in (0, 1, None)
    ]
    assert prices == sorted(prices)
    assert 1 < prices[0] < 1.5
    assert prices[-1] < 2
    assert gaussian.epsilon(math.sqrt(10) / noise, 1e-5) > 3.5


def test_a_plan_of_batches_is_priced_by_its_own_profile():
    plan = RepeatedEvent(PoissonEvent(0.01, GaussianEvent(2.0)), 1000)
    assert 0.9 < tuning.epsilon(TuningEvent(plan, 10.0, 1.0, 1e-5), 1e-5) < 1.0  # one run: 0.622


def test_replacing_a_record_costs_as_half_the_noise():
    near, far = (
        tuning.epsilon(TuningEvent(GaussianEvent(noise), 5.0, 1.0, 1e-5), 1e-5, adjacency)
        for noise, adjacency in ((4.0, Adjacency.ADD_REMOVE), (8.0, Adjacency.REPLACE_ONE))
    )
    assert near == pytest.approx(far)


def test_on_a_sample_the_price_shrinks_with_its_rate():
    event = TuningEvent(GaussianEvent(4.0), 10.0, 1.0, 1e-4)
    whole, delta = tuning.price(event, Adjacency.ADD_REMOVE)
    part, less = tuning.price(PoissonEvent(0.1, event), Adjacency.ADD_REMOVE)
    assert part == pytest.approx(math.log1p(0.1 * math.expm1(whole)))
    assert less == pytest.approx(delta / 10)
    assert tuning.price(PoissonEvent(0.1, event), Adjacency.REPLACE_ONE) is None
    assert tuning.price(GaussianEvent(1.0), Adjacency.ADD_REMOVE) is None


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_the_distribution_and_its_mean_is_the_mean(shape):
    runs = RunCount(10.0, shape)
    totals = tuning._totals(runs)
    weights = np.diff([total / totals[-1] for total in totals], prepend=0.0)
    pmf = _probabilities(runs, len(weights))
    np.testing.assert_allclose(weights[: len(pmf)], pmf, rtol=1e-9, atol=1e-14)
    assert weights @ np.arange(len(weights)) == pytest.approx(10.0)
    assert runs.missing(0.1) == pytest.approx(0.9 ** np.arange(len(weights)) @ weights)
    slope = np.polynomial.polynomial.polyval(0.7, weights[1:] * np.arange(1, len(weights)))
    assert float(runs.log_slope(np.array(0.7))) == pytest.approx(math.log(slope))


@pytest.mark.parametrize("shape", [0.0, 1.0, None])
def test_draws_follow_the_distribution(shape):
    """A bound on the largest gap of distribution functions that fails with probability 1e-7."""
    runs, stream = RunCount(3.0, shape), Stream()
    drawn = np.array([runs.draw(stream) for _ in range(4000)])
    cdf = np.cumsum(_probabilities(runs))
    gap = max(abs((drawn <= k).mean() - cdf[k]) for k in range(60))
    assert gap <= math.sqrt(math.log(2 / 1e-7) / 2 / 4000)


def test_filters_charge_a_tuning_or_say_that_they_cannot():
    event = TuningEvent(GaussianEvent(8.0), 10.0, 1.0, 1e-6)
    budget = Budget(2.0, 1e-5)
    basic = BasicFilter(budget)
    assert basic.cost(event) == [tuning.epsilon(event, 1e-6), 1e-6]
    for other in (GdpFilter(budget), RdpFilter(budget)):
        with pytest.raises(Unsupported, match="TuningEvent"):
            other.cost(event)


def test_the_largest_mu_fits_its_budget_and_little_more_does():
    budget, runs = Budget(1.0, 1e-5), RunCount(10.0)
    mu = tuning.largest_mu(budget, runs)
    here, more = (TuningEvent(GaussianEvent(1 / size), 10.0, 1.0, 1e-5) for size in (mu, 1.001 * mu))
    assert tuning.affordable(here, budget)
    assert not tuning.affordable(more, budget)


def test_an_event_comes_back_from_its_row():
    event = TuningEvent(RepeatedEvent(PoissonEvent(0.1, GaussianEvent(2.0)), 7), 10.0, None, 1e-5)
    assert decode(encode(event)) == event


@pytest.mark.parametrize(
    ("mean", "shape", "said"),
    [
        (1.0, 1.0, "above 1"),
        (10.0, -0.9, "shape"),
        (math.nan, 1.0, "mean"),
        (10.0, "geo", "shape"),
        (1e9, 1.0, "mean"),
        (300.0, -0.5, "thousands"),
    ],
)
def test_other_distributions_are_refused(mean, shape, said):
    with pytest.raises(InvalidValue, match=said):
        RunCount(mean, shape)
