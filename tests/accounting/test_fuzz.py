"""Random and absurd parameters through every accountant.

Nothing may come out as NaN or negative, nothing but a `FarthingError` may be raised, nothing may take
long, no tight figure may fall below a simple lower bound, and no classical one below the tight figure.
"""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr
from scipy.stats import binom

from farthing.accounting import calibrate, composition, gaussian, moments, pld, rdp, sampling, zcdp
from farthing.accounting.filters import BasicFilter, GdpFilter, Individual, RdpFilter, ZcdpFilter
from farthing.accounting.online import OnlineAccountant
from farthing.budget import Adjacency, Budget
from farthing.errors import FarthingError
from farthing.events import (
    BoundedRangeEvent,
    ComposedEvent,
    DrawnEvent,
    FixedSizeEvent,
    GaussianEvent,
    LaplaceEvent,
    PoissonEvent,
    PureEvent,
    RepeatedEvent,
    ZcdpEvent,
)

LONGEST = 60.0  # CPU seconds after which a figure counts as hanging
ADJACENCIES = list(Adjacency)


def checked(value):
    """Every number in an answer: not NaN, not negative."""
    for number in np.ravel(np.asarray(value, float)):
        assert number >= 0, value
    return value


def timed(function, *arguments):
    start = time.process_time()
    value = function(*arguments)
    assert time.process_time() - start < LONGEST, (function, arguments)
    return checked(value)


def lower_delta(rate, noise, steps, epsilon):
    """δ of the test "is the sum of all answers large", with and without the record: below the truth."""
    spread = noise * math.sqrt(steps)
    centre, width = steps * rate, math.sqrt(steps * rate * (1 - rate))
    draws = np.unique(
        np.clip(np.round(np.linspace(centre - 9 * width - 9, centre + 9 * width + 9, 400)), 0, steps)
    )
    if draws.size < 400:  # every count near the middle, so that the sum is the expectation
        mass = binom.pmf(draws, steps, rate)
    else:
        mass = np.diff(np.append(binom.cdf(draws[:-1], steps, rate), 1.0), prepend=0.0)
        draws = np.append(0.0, draws[:-1])  # counts moved down: still below
    threshold = np.linspace(-2, 12, 57)[:, None] * spread
    with_record = ndtr((draws - threshold) / spread) @ mass
    without = ndtr(-threshold[:, 0] / spread)
    return float(np.max(with_record - np.exp(np.minimum(epsilon, 700)) * without))


def draw(rng):
    return {
        "rate": float(min(1.0, 10 ** rng.uniform(-5, 0.1))),
        "noise": float(10 ** rng.uniform(-0.7, 2.5)),
        "steps": int(10 ** rng.uniform(0, 5.5)),
        "delta": float(10 ** rng.uniform(-14, -0.4)),
        "epsilon": float(10 ** rng.uniform(-2.5, 1.3)),
    }


def tight(rng):
    """One parameter set through the tight accountants and the classical bounds on the same plan."""
    p = draw(rng)
    rate, noise, steps, delta, epsilon = p.values()
    event = PoissonEvent(rate, GaussianEvent(noise))
    plan = RepeatedEvent(event, steps)
    found = timed(pld.epsilon, plan, delta)
    at = timed(pld.delta, plan, epsilon)
    assert lower_delta(rate, noise, steps, epsilon) <= at * (1 + 1e-9) + 1e-13, p
    if found < 1e4:
        assert lower_delta(rate, noise, steps, found) <= delta * (1 + 1e-9) + 1e-13, p
    once = timed(pld.epsilon, event, delta)
    assert once <= found * (1 + 1e-9) + 1e-9, p
    # the same bound by other roads
    online = OnlineAccountant()
    online.add(event, steps)
    assert lower_delta(rate, noise, steps, epsilon) <= timed(online.delta, epsilon) * (1 + 1e-9) + 1e-13, p
    streamed = timed(online.epsilon, delta)
    if streamed < 1e4:
        assert lower_delta(rate, noise, steps, streamed) <= delta * (1 + 1e-9) + 1e-13, p
    if rate * steps > 20 and 1e-12 < delta < 0.1 and found < 100:
        assert streamed == pytest.approx(found, rel=1e-3, abs=1e-4), p
    bounds = [gaussian.epsilon(math.sqrt(steps) / noise, delta), sampling.epsilon(noise, rate, steps, delta)]
    bounds.append(rdp.epsilon(steps * rdp.poisson_gaussian(noise, rate, ORDERS), ORDERS, delta)[0])
    bounds.append(composition.advanced_sampled(noise, rate, steps, delta))
    for bound in bounds:
        checked(bound)
    # with hardly a draw in all the line cannot tell such small losses apart; 0.03 is nothing to lose
    slack = 1e-6 if rate * steps > 20 else 0.03
    assert min(found, 1e4) <= min(bounds) * (1 + 1e-6) + slack, (p, found, bounds)


ORDERS = np.array([1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128])


def adjacent(rng):
    """Other events and adjacencies: ordered as they must be."""
    p = draw(rng)
    rate, noise, _, delta, epsilon = p.values()
    steps = int(10 ** rng.uniform(0, 4))
    of = 10_000
    adjacency = ADJACENCIES[int(rng.integers(3))]
    size = max(1, round(rate * of))
    events = [
        PoissonEvent(size / of, GaussianEvent(noise)),
        FixedSizeEvent(size, of, GaussianEvent(noise)),
        GaussianEvent(noise),
    ]
    costs = [timed(pld.delta, RepeatedEvent(event, steps), epsilon, adjacency) for event in events]
    if adjacency is not Adjacency.ADD_REMOVE:
        timed(pld.delta, RepeatedEvent(DrawnEvent(rate, GaussianEvent(noise)), steps), epsilon, adjacency)
    slack = 1 + 1e-2 if max(costs) > 0.01 else 1 + 1e-3
    if size / of * steps >= 1:  # with fewer draws in all both bounds are loose, and not in this order
        assert costs[0] <= costs[1] * slack + 1e-6, (p, steps, adjacency, costs)
    pure = RepeatedEvent(PureEvent(min(epsilon, 3.0)), steps)
    laplace = RepeatedEvent(LaplaceEvent(1 / min(epsilon, 3.0)), steps)
    if steps * min(epsilon, 3.0) < 1e4:
        assert timed(pld.epsilon, pure, delta) <= steps * min(epsilon, 3.0) * (1 + 1e-9)
    timed(pld.epsilon, ComposedEvent((pure, laplace, events[0])), delta, Adjacency.ADD_REMOVE)


def calibrated(rng):
    p = draw(rng)
    rate, noise, _, delta, epsilon = p.values()
    steps = int(10 ** rng.uniform(0, 4))
    budget = Budget(epsilon, delta, ADJACENCIES[int(rng.integers(3))])
    sigma = timed(
        calibrate.noise, lambda s: RepeatedEvent(PoissonEvent(rate, GaussianEvent(s)), steps), budget
    )
    spent = pld.delta(
        RepeatedEvent(PoissonEvent(rate, GaussianEvent(sigma)), steps), epsilon, budget.adjacency
    )
    if steps * rate > 20:  # for few draws, the two are upper bounds of different tightness
        assert spent <= delta * 1.001, p
    if budget.adjacency is not Adjacency.REPLACE_ONE:
        assert lower_delta(rate, sigma, steps, epsilon) <= delta * (1 + 1e-9) + 1e-13, p
    count = timed(calibrate.steps, PoissonEvent(rate, GaussianEvent(noise)), budget)
    if count and budget.adjacency is not Adjacency.REPLACE_ONE:
        assert lower_delta(rate, noise, count, epsilon) <= delta * (1 + 1e-9) + 1e-13, p


def classical(rng):
    """The cheap accountants and the filters."""
    p = draw(rng)
    rate, noise, steps, delta, epsilon = p.values()
    mu = math.sqrt(steps) / noise
    exact = timed(gaussian.epsilon, mu, delta)
    assert gaussian.delta(mu, exact) <= delta * (1 + 1e-9)
    assert timed(gaussian.mu, epsilon, delta) * timed(gaussian.noise, epsilon, delta) == pytest.approx(1)
    rho = steps * zcdp.rho_of_gaussian(noise)
    assert timed(zcdp.epsilon, rho, delta) >= exact * (1 - 1e-9)
    assert timed(zcdp.delta, rho, epsilon) >= gaussian.delta(mu, epsilon) * (1 - 1e-9)
    assert checked(zcdp.rho(epsilon, delta)) <= timed(zcdp.rho_tight, epsilon, delta) * (1 + 1e-9)
    assert rdp.epsilon(steps * rdp.gaussian(noise, ORDERS), ORDERS, delta)[0] >= exact * (1 - 1e-9)
    small = min(epsilon, 1.0)
    for each in (
        composition.basic,
        lambda *a: composition.advanced(*a, delta / 2),
        lambda *a: composition.strong(*a, delta / 2),
    ):
        checked(each(small, 0.0, steps))
    checked(composition.amplify_poisson(epsilon, delta, rate))
    checked(composition.strong_as_published(noise, rate, steps, delta)[0])
    assert (
        timed(sampling.delta, noise, rate, steps, epsilon)
        <= gaussian.delta(mu, epsilon) * (1 + 1e-9) + 1e-300
    )
    budget = Budget(epsilon, delta)
    for rule in (BasicFilter(budget), ZcdpFilter(budget), GdpFilter(budget), RdpFilter(budget, (2.0, 8.0))):
        for event in (
            GaussianEvent(noise),
            PureEvent(small),
            LaplaceEvent(noise),
            BoundedRangeEvent(small),
            ZcdpEvent(small),
        ):
            try:
                total = rule.add(rule.start(), event, steps)
            except FarthingError:
                continue
            checked(total)
            checked(rule.epsilon(total))
            assert rule.share(rule.start()) <= 0 or rule.share(rule.start()) == math.inf
            if rule.fits(total) and isinstance(event, GaussianEvent):
                assert exact <= epsilon * (1 + 1e-9), (p, rule)
    Individual([epsilon]).charge(small)


def arrays(rng):
    """A thousand sets at once through what takes arrays."""
    mu, epsilon = 10 ** rng.uniform(-6, 3, 1000), 10 ** rng.uniform(-6, 5, 1000)
    logs = gaussian.log_delta(mu, epsilon)
    assert (logs <= 0).all()
    checked(gaussian.delta(mu, epsilon))
    assert (gaussian.log_delta(mu * 1.01, epsilon) >= logs).all()
    assert (gaussian.log_delta(mu, epsilon * 1.01) <= logs).all()
    gap = epsilon / mu - mu / 2
    assert (logs <= 1e-9 - np.where(gap > 0, gap**2 / 2, 0) * (1 - 1e-9)).all()
    group, costs = Individual(epsilon), epsilon * rng.uniform(0, 0.4, 1000)
    for _ in range(4):
        group.charge(costs)
    assert (group.spent <= group.limits).all()
    single = rng.uniform(0.01, 5, 1000)
    orders = np.array([2.0, 8.0])
    checked([rdp.pure(float(x), orders) for x in single[:50]])


def moment(rng):
    p = draw(rng)
    rate, noise, steps, delta, _ = p.values()
    found, _ = timed(moments.epsilon, noise, rate, steps, delta)
    tight = pld.epsilon(RepeatedEvent(PoissonEvent(rate, GaussianEvent(noise)), steps), delta)
    assert found >= min(tight, 1e4) * (1 - 1e-6), p


@given(st.integers(0, 2**63))
@settings(max_examples=120, deadline=None)
def test_classical(seed):
    classical(np.random.default_rng(seed))


@given(st.integers(0, 2**63))
@settings(max_examples=60, deadline=None)
def test_tight(seed):
    tight(np.random.default_rng(seed))


@given(st.integers(0, 2**63))
@settings(max_examples=40, deadline=None)
def test_adjacent(seed):
    adjacent(np.random.default_rng(seed))


@given(st.integers(0, 2**63))
@settings(max_examples=12, deadline=None)
def test_calibrated(seed):
    calibrated(np.random.default_rng(seed))


@given(st.integers(0, 2**63))
@settings(max_examples=20, deadline=None)
def test_moments(seed):
    moment(np.random.default_rng(seed))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
@pytest.mark.parametrize(
    ("kind", "sets"),
    [(arrays, 10), (classical, 600), (tight, 60), (adjacent, 50), (calibrated, 10), (moment, 30)],
)
def test_many_more_sets(kind, sets, part):
    rng = np.random.default_rng([part, sets])
    for _ in range(sets):
        kind(rng)


ABSURD = [
    math.nan,
    math.inf,
    -math.inf,
    0.0,
    -1.0,
    5e-324,
    1e-300,
    1e-17,
    1e17,
    1e300,
    1.7e308,
    "1",
    None,
    True,
    2**70,
]
ONE = Adjacency.REPLACE_ONE


def sampled(rate, noise, steps=20):
    return RepeatedEvent(PoissonEvent(rate, GaussianEvent(noise)), steps)


FIGURES = [
    lambda x, y: pld.epsilon(GaussianEvent(x), y),
    lambda x, y: pld.epsilon(PoissonEvent(0.1, GaussianEvent(x)), y),
    lambda x, y: pld.epsilon(sampled(x, 1.0), y),
    lambda x, y: pld.epsilon(sampled(0.1, x), y),
    lambda x, y: pld.epsilon(sampled(y, x), 1e-5),
    lambda x, y: pld.epsilon(sampled(y, x), 1e-5, ONE),
    lambda x, y: pld.epsilon(RepeatedEvent(FixedSizeEvent(1, 9, GaussianEvent(x)), 20), y, ONE),
    lambda x, y: pld.epsilon(RepeatedEvent(DrawnEvent(0.1, GaussianEvent(x)), 20), y, Adjacency.ZERO_OUT),
    lambda x, y: pld.epsilon(RepeatedEvent(LaplaceEvent(x), 20), y),
    lambda x, y: pld.epsilon(RepeatedEvent(PureEvent(x), 20), y),
    lambda x, y: pld.delta(RepeatedEvent(PureEvent(x), 20), y),
    lambda x, y: pld.delta(RepeatedEvent(LaplaceEvent(x), 20), y),
    lambda x, y: pld.delta(sampled(0.1, x), y),
    lambda x, y: pld.delta(sampled(0.1, x, 1), y, ONE),
    lambda x, y: pld.delta(RepeatedEvent(PoissonEvent(0.1, PureEvent(x)), 20), y),
    lambda x, y: pld.delta(ComposedEvent((GaussianEvent(x), sampled(0.1, x), PureEvent(x))), y),
    lambda x, y: pld.epsilon(RepeatedEvent(GaussianEvent(3.0), x), y),
    lambda x, y: _online(PoissonEvent(0.1, GaussianEvent(x)), 20).epsilon(y),
    lambda x, y: _online(PoissonEvent(0.1, GaussianEvent(x)), 20).delta(y),
    lambda x, y: _online(PoissonEvent(x, GaussianEvent(y)), 20).delta(1.0),
    lambda x, y: _online(GaussianEvent(5.0), x).delta(y),
    lambda x, y: _online(LaplaceEvent(x), 3).epsilon(y),
    lambda x, y: calibrate.noise(lambda s: sampled(0.1, s), Budget(x, y)),
    lambda x, y: calibrate.steps(PoissonEvent(0.1, GaussianEvent(3.0)), Budget(x, y)),
    lambda x, y: calibrate.steps(PoissonEvent(x, GaussianEvent(y)), Budget(1.0, 1e-5)),
    lambda x, y: calibrate.steps(GaussianEvent(x), Budget(y, 1e-5)),
    lambda x, y: calibrate.steps(PureEvent(x), Budget(y, 1e-5), before=GaussianEvent(3.0)),
    lambda x, y: gaussian.epsilon(x, y),
    lambda x, y: gaussian.delta(x, y),
    lambda x, y: gaussian.noise(x, y),
    lambda x, y: zcdp.epsilon(x, y),
    lambda x, y: zcdp.delta(x, y),
    lambda x, y: zcdp.rho_tight(x, y),
    lambda x, y: composition.advanced(x, 0.0, 10, y),
    lambda x, y: composition.amplify_poisson(x, 0.0, y),
    lambda x, y: composition.advanced_sampled(x, 0.1, 10, y),
    lambda x, y: rdp.epsilon(rdp.poisson_gaussian(x, 0.1, ORDERS), ORDERS, y)[0],
    lambda x, y: rdp.poisson_gaussian(x, y, ORDERS),
    lambda x, y: rdp.pure(x, np.array([y])),
    lambda x, y: moments.epsilon(x, y, 10, 1e-5)[0],
    lambda x, y: moments.delta(x, 0.1, 10, y),
    lambda x, y: sampling.delta(x, y, 10, 1.0),
    lambda x, y: sampling.epsilon(x, 0.1, 10, y),
    lambda x, y: GdpFilter(Budget(x, y)).mu,
    lambda x, y: ZcdpFilter(Budget(x, y)).rho,
    lambda x, y: GdpFilter(Budget(1.0, 1e-5)).add([0.0], PureEvent(x), y),
    lambda x, y: RdpFilter(Budget(1.0, 1e-5), (2.0,)).add([0.0], PoissonEvent(x, GaussianEvent(y))),
    lambda x, y: RdpFilter(Budget(1.0, 1e-5), (x, y)).cost(GaussianEvent(2.0)),
    lambda x, y: Individual([x]).charge(y),
]


def _online(event, count):
    accountant = OnlineAccountant()
    accountant.add(event, count)
    return accountant


@pytest.mark.parametrize("number", range(len(FIGURES)))
def test_absurd(number):
    """A typed error or a number that can be a bound; never NaN, never another exception, never a hang."""
    for x in (*ABSURD, 0.5, 3):
        for y in (*ABSURD, 0.5, 3):
            start = time.process_time()
            try:
                value = FIGURES[number](x, y)
            except FarthingError:
                value = 0.0
            checked(value)
            assert time.process_time() - start < LONGEST, (x, y)
