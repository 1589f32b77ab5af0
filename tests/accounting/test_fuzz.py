"""Random and absurd parameters through every accountant.

Nothing may come out as NaN or negative, nothing but a `FarthingError` may be raised, nothing may take
long, and no figure may fall below its oracle: an exact formula where there is one, and otherwise what a
test that anybody can run achieves between the two worlds. Every accountant has a function below that
draws one set of parameters and checks all it says of them; the slow tests run some thousands of sets
through each, and

    FARTHING_FUZZ=100000 pytest -m slow tests/accounting/test_fuzz.py

runs a hundred thousand through each.
"""

import math
import os
import time

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import betaincc, gammaln, log_ndtr, logsumexp, ndtr

from farthing.accounting import calibrate, composition, gaussian, moments, pld, rdp, sampling, zcdp
from farthing.accounting.filters import BasicFilter, GdpFilter, RdpFilter, ZcdpFilter
from farthing.budget import Adjacency, Budget
from farthing.errors import FarthingError
from farthing.queries.events import (
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

LONGEST = 60.0  # seconds after which a figure counts as hanging
ADJACENCIES = list(Adjacency)
ORDERS = np.array([1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128])


def checked(value):
    """Every number in an answer: not NaN, not negative."""
    for number in np.ravel(np.asarray(value, float)).tolist():
        assert number >= 0, value
    return value


def timed(function, *arguments):
    start = time.process_time()
    value = function(*arguments)
    assert time.process_time() - start < LONGEST, (function, arguments)
    return checked(value)


def gaussian_log_delta(mu, epsilon):
    """(log δ, its error) of the Gaussian mechanism by the plain formula, which cancels for small μ."""
    high, low = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    gap = np.minimum(low - high, 0.0)
    rest = -np.expm1(gap)
    with np.errstate(divide="ignore"):
        error = 4e-16 * (8 + np.abs(high) + np.abs(low) + epsilon + np.square(epsilon / mu)) / rest
        return high + np.log(rest), error


def exact_gaussian_log_delta(mu, epsilon):
    """The same to fifty digits, slowly."""
    with mpmath.workdps(50 + int(epsilon + math.log10(1 + 1 / mu))):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        high, low = mpmath.ncdf(mu / 2 - epsilon / mu), mpmath.ncdf(-mu / 2 - epsilon / mu)
        return float(mpmath.log(high - mpmath.exp(epsilon) * low))


_SPOTS = np.linspace(-3, 12, 61)[:, None]  # thresholds, in standard deviations of the noise


def lower_delta(rate, noise, steps, epsilon, adjacency=Adjacency.ADD_REMOVE):
    """δ of tests that anybody can run on all the answers: below the truth.

    "Is their sum large", "is their sum small", and "is one of them large", with the record and without
    it (or with its opposite).
    """
    if epsilon > 600:  # beyond floating point
        return 0.0
    factor, replaced = math.exp(epsilon), adjacency is Adjacency.REPLACE_ONE
    centre, width, spread = steps * rate, math.sqrt(steps * rate * (1 - rate)), noise * math.sqrt(steps)
    low, high = max(0.0, centre - 7 * width - 3), min(steps, centre + 7 * width + 6)
    ends = np.unique(np.linspace(low, high, 48).round())
    # how often the record was drawn, in cells moved down to the least of each: harder to tell
    below = np.where(ends < steps, betaincc(ends + 1, np.maximum(steps - ends, 1.0), rate), 1.0)
    mass, draws = np.diff(below, prepend=0.0, append=1.0), np.append(0.0, ends + 1)
    spots = _SPOTS + centre / spread * (np.linspace(-1, 1, 61)[:, None] if replaced else 0.5)
    large = ndtr(draws / spread - spots) @ mass
    rest = ndtr(spots - draws / spread) @ mass + 1e-14
    without = ndtr(-draws / spread - spots) @ mass + 1e-14 if replaced else ndtr(-spots[:, 0]) + 1e-300
    found = float(np.max(large - factor * without))
    if not replaced:
        found = max(found, float(np.max(ndtr(spots[:, 0]) - factor * rest)))
    spots, shift = _SPOTS[:, 0] + 0.5 / noise, 1 / noise
    tails, moved, other = ndtr(-spots), ndtr(shift - spots), ndtr(-shift * replaced - spots)
    with np.errstate(divide="ignore"):
        one = -np.expm1(steps * np.log1p(-np.minimum((1 - rate) * tails + rate * moved, 1.0)))
        none = -np.expm1(steps * np.log1p(-(1 - rate) * tails - rate * other)) * (1 + 1e-12) + 1e-300
    return max(found, float(np.max(one - factor * none)))


def holds(lower, delta):
    """Whether a δ is not below a lower bound, of which 1e-13 may be rounding."""
    return lower <= delta * (1 + 1e-9) + 1e-13


def draw(rng):
    return {
        "rate": float(min(1.0, 10 ** rng.uniform(-5, 0.1))),
        "noise": float(10 ** rng.uniform(-0.7, 2.5)),
        "steps": int(10 ** rng.uniform(0, 5.5)),
        "delta": float(10 ** rng.uniform(-14, -0.4)),
        "epsilon": float(10 ** rng.uniform(-2.5, 1.3)),
    }


def gaussians(rng):
    """The exact Gaussian against the plain formula, and now and then against fifty digits."""
    mu, epsilon = float(10 ** rng.uniform(-5, 2.3)), float(10 ** rng.uniform(-5, 3))
    goal = float(10 ** rng.uniform(-300, -0.3) if rng.random() < 0.5 else 10 ** rng.uniform(-15, -0.3))
    p = mu, epsilon, goal
    log, error = gaussian_log_delta(mu, epsilon)
    found = gaussian.log_delta(mu, epsilon)
    assert checked(-found) >= 0, p
    assert checked(gaussian.delta(mu, epsilon)) <= 1, p
    if error < 0.1 and log > -1e300:
        assert log - 2 * error - 1e-12 <= found <= log + 2 * error + 1e-12 + 1e-14 * abs(log), p
    if rng.random() < 0.01 and epsilon < 100:
        exact = exact_gaussian_log_delta(mu, epsilon)
        assert exact <= found <= exact + 1e-12 + 1e-14 * abs(exact), (p, exact, found)
    if rng.random() < 0.5:
        at = timed(gaussian.epsilon, mu, goal)
        log, error = gaussian_log_delta(mu, at) if at else (-math.inf, 0.0)
        assert log - 2 * error - 1e-12 <= math.log(goal), (p, at)
        return
    most = timed(gaussian.mu, epsilon, goal)
    log, error = gaussian_log_delta(most, epsilon)
    assert not log - 2 * error - 1e-12 > math.log(goal), (p, most)
    if rng.random() < 0.1:
        assert checked(gaussian.noise(epsilon, goal)) * most >= 1, p


def concentrated(rng):
    """zCDP of Gaussians, for which δ is known exactly; of pure mechanisms, against randomised response."""
    _, noise, steps, delta, epsilon = draw(rng).values()
    p = noise, steps, delta, epsilon
    mu, rho = math.sqrt(steps) / noise, steps * zcdp.rho_of_gaussian(noise)
    found = timed(zcdp.epsilon, rho, delta)
    log, error = gaussian_log_delta(mu, found)
    assert log - 2 * error <= math.log(delta), (p, found)
    log, error = gaussian_log_delta(mu, epsilon)
    assert math.log(timed(zcdp.delta, rho, epsilon)) >= max(log - 2 * error, -745), p
    plain, best = checked(zcdp.rho(epsilon, delta)), timed(zcdp.rho_tight, epsilon, delta)
    assert plain <= best * (1 + 1e-9), p
    log, error = gaussian_log_delta(math.sqrt(2 * best), epsilon)
    assert log - 2 * error <= math.log(delta), (p, best)
    few = int(min(steps, 2000))
    pure = zcdp.epsilon(few * zcdp.rho_of_pure(min(epsilon, 3.0)), delta)
    assert holds(responses_delta(min(epsilon, 3.0), few, pure), delta), (p, pure)


def responses_delta(epsilon, steps, total):
    """δ of ``steps`` randomised responses at ``total``: the worst ε-DP mechanisms, exactly."""
    told = np.arange(steps + 1.0)
    log_mass = gammaln(steps + 1) - gammaln(told + 1) - gammaln(steps - told + 1)
    log_mass += told * -np.logaddexp(0, epsilon) + (steps - told) * -np.logaddexp(0, -epsilon)
    gain = (steps - 2 * told) * epsilon - total
    return float(np.exp(log_mass) @ -np.expm1(-np.maximum(gain, 0.0))) * (1 - 1e-9)


def renyi(mixture, against, orders, noise, reach):
    """ln ∫ P^α Q^(1-α) of two mixtures of (weight, mean), by plain quadrature."""
    x = np.linspace(-reach, reach, 4001) * noise
    logs = [
        logsumexp([math.log(w) - 0.5 * ((x - m) / noise) ** 2 for w, m in side if w > 0], axis=0)
        for side in (mixture, against)
    ]
    terms = np.outer(orders, logs[0]) + np.outer(1 - orders, logs[1])
    return logsumexp(terms, axis=1) + math.log((x[1] - x[0]) / noise / math.sqrt(2 * math.pi))


def renyis(rng):
    """Rényi curves against plain quadrature of the mechanism itself, and ε against a test."""
    rate, noise, steps, delta, epsilon = (p := draw(rng)).values()
    curve = checked(rdp.poisson_gaussian(noise, rate, ORDERS))
    found = timed(rdp.epsilon, steps * curve, ORDERS, delta)[0]
    assert holds(lower_delta(rate, noise, steps, found), delta), (p, found)
    at = checked(rdp.delta(steps * curve, ORDERS, epsilon))
    assert holds(lower_delta(rate, noise, steps, epsilon), at), (p, at)
    if rng.random() < 0.2:
        few = ORDERS[(ORDERS + 40) / noise < 150]
        if few.size:
            reach = float(few.max() / noise + 40)
            sides = [(1 - rate, 0.0), (rate, 1.0)], [(1.0, 0.0)]
            exact = renyi(*sides, few, noise, reach)
            assert (curve[: few.size] * (few - 1) >= exact * (1 - 1e-9) - 1e-12).all(), p
    whole = np.array([2.0, 3.0, 5.0, 16.0])
    sampled = checked(rdp.without_replacement_gaussian(noise, min(rate, 0.99), whole))
    if noise > 0.5 and rng.random() < 0.2:  # a record against its opposite, all others nothing
        sides = [[(1 - min(rate, 0.99), 0.0), (min(rate, 0.99), sign / 2)] for sign in (1, -1)]
        exact = renyi(*sides, whole, noise, 80.0)
        assert (sampled * (whole - 1) >= exact * (1 - 1e-9) - 1e-12).all(), p
    single = min(epsilon, 5.0)
    pure, laplace = checked(rdp.pure(single, ORDERS)), checked(rdp.laplace(1 / single, ORDERS))
    assert (laplace <= pure * (1 + 1e-9)).all(), p
    exact = np.logaddexp(ORDERS * single, (1 - ORDERS) * single) - np.logaddexp(0, single)
    assert (pure * (ORDERS - 1) >= exact * (1 - 1e-9) - 1e-12).all(), p


def compositions(rng):
    """Textbook composition against randomised responses, exactly; of sampled Gaussians against a test."""
    rate, noise, steps, delta, epsilon = (p := draw(rng)).values()
    small, few = min(epsilon, 3.0), int(10 ** rng.uniform(0, 3.3))
    for rule in (composition.advanced, composition.strong):
        total, left = checked(rule(small, 0.0, few, delta))
        assert left == delta, p
        assert holds(responses_delta(small, few, min(total, 1e300)), delta), (p, few, rule, total)
    total, _ = checked(composition.basic(small, 0.0, few))
    assert total >= few * small, p
    each, part = composition.advanced_epsilon_iter(epsilon, delta, few, delta / 2)
    assert checked(composition.advanced(each, part, few, delta / 2))[0] <= epsilon * (1 + 1e-12), p
    amplified, less = checked(composition.amplify_poisson(epsilon, delta, rate))
    assert amplified >= math.log1p(rate * math.expm1(epsilon)) * (1 - 1e-15), p
    assert rate * delta <= less <= delta * (1 + 1e-15), p
    found = timed(composition.advanced_sampled, noise, rate, steps, delta)
    assert holds(lower_delta(rate, noise, steps, found), delta), (p, found)
    published, proven = composition.strong_as_published(noise, rate, steps, delta)
    assert not proven or holds(lower_delta(rate, noise, steps, checked(published)), delta), (p, published)


def seen_delta(noise, rate, steps, epsilon):
    """Σ Binomial(i) δ_Gauss(√i/σ, ε) over all that matter: the sampling theorem as it stands, below."""
    width = math.sqrt(steps * rate * (1 - rate))
    low, high = max(1, int(steps * rate - 12 * width - 40)), min(steps, int(steps * rate + 12 * width + 60))
    stride = max(1, (high - low) // 4000)
    i = np.arange(low, high + 1, stride, dtype=float)
    log_mass = gammaln(steps + 1) - gammaln(i + 1) - gammaln(steps - i + 1) + i * math.log(rate)
    log_mass += (steps - i) * math.log1p(-rate) if rate < 1 else np.where(i < steps, -np.inf, 0.0)
    logs, errors = gaussian_log_delta(np.sqrt(i) / noise, epsilon)
    value = stride * float(np.exp(log_mass + logs) @ (1 - np.minimum(2 * errors, 1.0)))
    return value * (1 - 1e-8 - 2e-16 * gammaln(steps + 2)) if stride == 1 else 0.0


def samplings(rng):
    """The sampling theorem against its sum written out, and against a test that does not see the draws."""
    rate, noise, steps, delta, epsilon = (p := draw(rng)).values()
    if rng.random() < 0.5:
        rate = min(rate, 1e4 / steps)
    at = timed(sampling.delta, noise, rate, steps, epsilon)
    assert seen_delta(noise, rate, steps, epsilon) <= at, (p, at)
    assert holds(lower_delta(rate, noise, steps, epsilon), at), (p, at)
    log, error = gaussian_log_delta(math.sqrt(steps) / noise, epsilon)
    assert math.log(at) <= log + 2 * error + 1e-9 or at < 1e-300, (p, at)
    if rng.random() < 0.05:
        found = timed(sampling.epsilon, noise, rate, steps, delta)
        assert seen_delta(noise, rate, steps, found) <= delta * (1 + 1e-9), (p, found)
        assert holds(lower_delta(rate, noise, steps, found), delta), (p, found)
    if rng.random() < 0.01:
        count = sampling.rounds(noise, rate, epsilon, delta)
        assert not count or holds(lower_delta(rate, noise, count, epsilon), delta), (p, count)


def momented(rng):
    """The moments accountant against a test, and its conversions against each other."""
    rate, noise, steps, delta, epsilon = (p := draw(rng)).values()
    if rng.random() < 0.5:
        found, _ = timed(moments.epsilon, noise, rate, steps, delta)
        assert holds(lower_delta(rate, noise, steps, found), delta), (p, found)
        if rng.random() < 0.1:
            again = checked(moments.delta(noise, rate, steps, min(found, 1e300)))
            assert again <= delta * math.exp(1e-9 + 1e-12 * found), (p, again)
        return
    at = timed(moments.delta, noise, rate, steps, epsilon)
    assert holds(lower_delta(rate, noise, steps, epsilon), at), (p, at)


def usual(rng):
    """As `draw`, where a record is drawn often enough for lines to be tight: most plans, and cheap."""
    rate = float(10 ** rng.uniform(-3, -0.05))
    return {
        "rate": rate,
        "noise": float(10 ** rng.uniform(-0.2, 1.5)),
        "steps": min(int(10 ** rng.uniform(1.5, 4.0) / rate) + 1, 200_000),
        "delta": float(10 ** rng.uniform(-14, -0.4)),
        "epsilon": float(10 ** rng.uniform(-2.5, 1.3)),
    }


RARE = 0.005  # of the sets that follow are drawn without regard to their cost


def tight(rng):
    """The tight accountant: Poisson, fixed-size and seen draws, pure steps, mixed plans, all adjacencies."""
    rare = rng.random() < RARE
    rate, noise, steps, delta, epsilon = (p := (draw if rare else usual)(rng)).values()
    adjacency, kind = ADJACENCIES[int(rng.integers(3))], int(rng.integers(20))
    p = p, adjacency, kind
    lower = lower_delta
    event = PoissonEvent(rate, GaussianEvent(noise))
    if kind == 0:
        size = max(1, round(rate * 100_000))
        rate, steps = size / 100_000, min(steps, 10**5)
        event = FixedSizeEvent(size, 100_000, GaussianEvent(noise))
    elif kind == 1:
        adjacency = Adjacency.ZERO_OUT
        event = DrawnEvent(rate, GaussianEvent(noise))

        def lower(rate, noise, steps, epsilon, adjacency):
            return seen_delta(noise, rate, steps, epsilon)

    elif kind == 2:
        steps, single = min(steps, 1000), min(epsilon, 3.0)
        event = PureEvent(single)

        def lower(rate, noise, steps, epsilon, adjacency):
            return responses_delta(single, steps, epsilon)

    plan = RepeatedEvent(event, steps)
    if kind == 3:  # the oracle knows only a part of the plan
        plan = ComposedEvent((plan, PoissonEvent(rate, GaussianEvent(2 * noise)), LaplaceEvent(noise)))
    if rng.random() < 0.4:
        at = timed(pld.delta, plan, epsilon, adjacency)
        assert at <= 1, (p, at)
        assert holds(lower(rate, noise, steps, epsilon, adjacency), at), (p, at)
        return
    found = timed(pld.epsilon, plan, delta, adjacency)
    assert not found < 1e4 or holds(lower(rate, noise, steps, found, adjacency), delta), (p, found)
    if kind > 3 and adjacency is not Adjacency.REPLACE_ONE and (rare or rng.random() < 0.05):
        bounds = [gaussian.epsilon(math.sqrt(steps) / noise, delta)]
        bounds.append(rdp.epsilon(steps * rdp.poisson_gaussian(noise, rate, ORDERS), ORDERS, delta)[0])
        bounds.append(composition.advanced_sampled(noise, rate, steps, delta))
        # with hardly a draw in all the line cannot tell such small losses apart; 0.03 is nothing to lose
        slack = 1e-6 if rate * steps > 20 else 0.03
        assert min(found, 1e4) <= min(bounds) * (1 + 1e-6) + slack, (p, found, bounds)


def calibrated(rng):
    """Noise and steps for a budget, against a test at what was found, and against the accountant itself."""
    rare = rng.random() < RARE / 4
    rate, noise, steps, delta, epsilon = (p := (draw if rare else usual)(rng)).values()
    epsilon = epsilon if rare else max(epsilon, float(10 ** rng.uniform(-1.5, 1.3)))
    budget = Budget(epsilon, delta, ADJACENCIES[int(rng.integers(3))])
    p = p, budget.adjacency
    if rng.random() < 0.5:
        sigma = timed(
            calibrate.noise, lambda s: RepeatedEvent(PoissonEvent(rate, GaussianEvent(s)), steps), budget
        )
        assert holds(lower_delta(rate, sigma, steps, epsilon, budget.adjacency), delta), (p, sigma)
        if rng.random() < 0.02 and not rare:
            plan = RepeatedEvent(PoissonEvent(rate, GaussianEvent(sigma)), steps)
            assert pld.delta(plan, epsilon, budget.adjacency) <= delta * 1.001, (p, sigma)
    else:
        count = timed(calibrate.steps, PoissonEvent(rate, GaussianEvent(noise)), budget)
        told = not count or holds(lower_delta(rate, noise, count, epsilon, budget.adjacency), delta)
        assert told, (p, count)


def filtered(rng):
    """The filters: what they let through fits the budget."""
    _, noise, steps, delta, epsilon = (p := draw(rng)).values()
    exact, small = gaussian.epsilon(math.sqrt(steps) / noise, delta), min(epsilon, 1.0)
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
    single = rng.uniform(0.01, 5, 1000)
    orders = np.array([2.0, 8.0])
    checked([rdp.pure(float(x), orders) for x in single[:50]])


KINDS = {  # every accountant's function, and how many sets the slow tests draw unless told otherwise
    gaussians: 6000,
    concentrated: 6000,
    renyis: 4000,
    compositions: 4000,
    samplings: 4000,
    momented: 4000,
    tight: 3000,
    calibrated: 1000,
    filtered: 3000,
    arrays: 100,
}
PARTS = 4
SETS = int(os.environ.get("FARTHING_FUZZ", "0"))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_some_sets(kind):
    @given(st.integers(0, 2**63))
    @settings(max_examples=12 if kind is calibrated else 60, deadline=None)
    def sets(seed):
        kind(np.random.default_rng(seed))

    sets()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_many_sets(kind, part):
    rng = np.random.default_rng([part, *kind.__name__.encode()])
    for _ in range(-(-(SETS or KINDS[kind] // 3) // PARTS)):
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
]


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
