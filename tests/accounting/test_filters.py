"""Filters: never more than an oracle allows, also where the last answer picks the next query."""

import itertools
import math

import mpmath
import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant as peer
from hypothesis import given, settings
from hypothesis import strategies as st

from farthing.accounting import gaussian, rdp, zcdp
from farthing.accounting.filters import BasicFilter, GdpFilter, RdpFilter, ZcdpFilter
from farthing.budget import Adjacency, Budget
from farthing.errors import InvalidValue, Unsupported
from farthing.queries.events import (
    ApproximateEvent,
    BoundedRangeEvent,
    FixedSizeEvent,
    GaussianEvent,
    LaplaceEvent,
    PoissonEvent,
    PureEvent,
    RepeatedEvent,
    ZcdpEvent,
)

BUDGET = Budget(2.0, 1e-5)
REPLACE = Budget(2.0, 1e-5, Adjacency.REPLACE_ONE)


def spend(rule, events):
    """Charges what fits, in turn; the totals and what was charged."""
    total, charged = rule.start(), []
    for event in events:
        after = rule.add(total, event)
        if rule.fits(after):
            total = after
            charged.append(event)
    return total, charged


@given(st.lists(st.floats(2, 200), max_size=60))
@settings(deadline=None)
def test_gdp_never_exceeds_the_exact_epsilon(noises):
    rule = GdpFilter(BUDGET)
    total, charged = spend(rule, map(GaussianEvent, noises))
    mu = gaussian.compose(1 / event.noise for event in charged)
    assert gaussian.epsilon(mu, 1e-5) <= 2.0 * (1 + 1e-9)
    assert 0 <= rule.share(total) <= 1
    assert rule.epsilon(total) <= 2.0 * (1 + 1e-9)


def test_gdp_spends_it_all():
    rule = GdpFilter(BUDGET)
    total, _ = spend(rule, [GaussianEvent(50.0)] * 10_000)
    assert rule.share(total) > 1 - 2e-3
    assert rule.add(rule.start(), GaussianEvent(4.0)) == [1 / 16]
    assert GdpFilter(REPLACE).add([0.0], GaussianEvent(4.0)) == [4 / 16]


@pytest.mark.parametrize("epsilon", [1e-18, 1e-9, 1e-4, 0.1, 1.0, 20.0, 699.0, 701.0, 5000.0])
def test_gdp_price_of_pure(epsilon):
    """At the corner of randomised response the Gaussian curve lies below: Φ(-μ/2) <= 1/(1+e^ε)."""
    (price,) = GdpFilter(BUDGET).cost(PureEvent(epsilon))
    mu = math.sqrt(price)
    assert mu >= math.sqrt(math.pi / 2) * 2 * math.tanh(epsilon / 2) * (1 - 1e-9)
    if 1e-6 < epsilon < 700:
        assert 0.5 * math.erfc(mu / 2 / math.sqrt(2)) <= 1 / (1 + math.exp(epsilon)) * (1 + 1e-9)
    if epsilon > 100:
        assert mu * mu / 8 >= epsilon - 0.5 * math.log(epsilon) - 4
    assert GdpFilter(BUDGET).cost(LaplaceEvent(1 / epsilon)) == pytest.approx([price], rel=1e-9)


def test_gdp_refuses_a_pure_answer_beyond_the_budget():
    rule = GdpFilter(Budget(4000.0, 1e-5))
    assert not rule.fits(rule.add(rule.start(), PureEvent(5000.0)))


@pytest.mark.parametrize("order", [1.5, 4.0, 16.0])
def test_rdp_of_one_order_against_dp_accounting(order):
    rule = RdpFilter(BUDGET, (order,))
    event = PoissonEvent(0.02, GaussianEvent(1.3))
    (cost,) = rule.cost(event)
    expected = peer._compute_rdp_poisson_subsampled_gaussian(0.02, 1.3, np.array([order]))[0]
    assert cost <= expected * (1 + 1e-9)
    if order == round(order):
        assert cost == pytest.approx(expected, rel=1e-9)
    assert rule.cost(GaussianEvent(3.0)) == pytest.approx([order / 18])
    total, _ = spend(rule, [event] * 5000)
    expected, _ = peer.compute_epsilon([order], [total[0]], 1e-5)
    assert expected <= 2.0 * (1 + 1e-9)
    assert rule.epsilon(total) == pytest.approx(expected, rel=1e-9)


@given(st.lists(st.floats(1.001, 1000), min_size=1, max_size=20), st.floats(0.01, 20), st.floats(1e-12, 0.5))
def test_rdp_limits(orders, epsilon, delta):
    rule = RdpFilter(Budget(epsilon, delta), tuple(orders))
    for order, limit in zip(orders, rule.limits, strict=True):
        found, _ = rdp.epsilon(np.array([max(limit, 0.0)]), np.array([order]), delta / len(orders))
        if limit > 0:
            assert found <= epsilon * (1 + 1e-9) + 1e-12


def test_rdp_costs_agree_with_the_curves():
    rule = RdpFilter(BUDGET)
    orders = np.array(rule.orders)
    for event, curve in [
        (GaussianEvent(2.0), rdp.gaussian(2.0, orders)),
        (PureEvent(0.7), rdp.pure(0.7, orders)),
        (LaplaceEvent(1.5), rdp.laplace(1.5, orders)),
        (BoundedRangeEvent(0.7), np.minimum(orders * 0.7**2 / 8, rdp.pure(0.7, orders))),
        (ZcdpEvent(0.1), rdp.zcdp(0.1, orders)),
        (PoissonEvent(0.05, GaussianEvent(1.2)), rdp.poisson_gaussian(1.2, 0.05, orders)),
    ]:
        assert rule.cost(event) == pytest.approx(list(curve), rel=1e-6)
    fixed = RdpFilter(REPLACE, (2.0, 8.0)).cost(FixedSizeEvent(1, 100, GaussianEvent(2.0)))
    assert (np.array(fixed) <= rdp.without_replacement_gaussian(1.0, 0.01, np.array([2.0, 8.0]))).all()


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0, 1e-6)), max_size=30))
def test_basic(parts):
    rule = BasicFilter(BUDGET)
    total, charged = spend(rule, [ApproximateEvent(*part) for part in parts])
    assert math.fsum(event.epsilon for event in charged) <= 2.0 * (1 + 1e-12)
    assert math.fsum(event.delta for event in charged) <= 1e-5 * (1 + 1e-12)
    assert rule.share(total) <= 1


def test_basic_prices():
    rule = BasicFilter(BUDGET)
    assert rule.cost(PureEvent(0.5)) == [0.5, 0.0]
    assert rule.cost(LaplaceEvent(4.0)) == [0.25, 0.0]
    assert BasicFilter(REPLACE).cost(LaplaceEvent(4.0)) == [0.5, 0.0]
    assert rule.cost(PoissonEvent(0.1, PureEvent(1.0)))[0] == pytest.approx(math.log1p(0.1 * math.expm1(1.0)))
    assert rule.epsilon([1.0, 1.0]) == math.inf
    assert BasicFilter(Budget(1.0, 0.0)).share([0.5, 0.0]) == 0.5


@given(
    st.lists(st.one_of(st.builds(GaussianEvent, st.floats(2, 100)), st.builds(PureEvent, st.floats(0.01, 1))))
)
@settings(deadline=None)
def test_zcdp_never_exceeds_its_conversion(events):
    rule = ZcdpFilter(BUDGET)
    total, _ = spend(rule, events)
    assert zcdp.epsilon(total[0], 1e-5) <= 2.0 * (1 + 1e-9)
    assert rule.share(total) <= 1


def test_zcdp_approximate():
    rule = ZcdpFilter(BUDGET, approximate=4e-6)
    assert rule.rho < ZcdpFilter(BUDGET).rho
    assert zcdp.delta(rule.rho, 2.0, 4e-6) <= 1e-5 * (1 + 1e-9)
    total, charged = spend(rule, [ZcdpEvent(1e-4, 1e-6)] * 10)
    assert len(charged) == 4
    assert rule.share(total) == pytest.approx(1)
    assert not ZcdpFilter(BUDGET).fits([1e-4, 1e-9])
    with pytest.raises(InvalidValue, match="approximate must be below"):
        ZcdpFilter(BUDGET, approximate=1e-5)
    assert ZcdpFilter(REPLACE).cost(GaussianEvent(1.0))[0] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("rule", "event", "words"),
    [
        (BasicFilter(BUDGET), GaussianEvent(1.0), "use the GDP or RDP filter"),
        (BasicFilter(BUDGET), PoissonEvent(0.1, GaussianEvent(1.0)), "use the GDP or RDP filter"),
        (BasicFilter(BUDGET), ZcdpEvent(0.1), "use the GDP or RDP filter"),
        (ZcdpFilter(BUDGET), PoissonEvent(0.1, GaussianEvent(1.0)), "use the RDP filter"),
        (ZcdpFilter(BUDGET), ApproximateEvent(0.1, 1e-9), "use"),
        (GdpFilter(BUDGET), PoissonEvent(0.1, GaussianEvent(1.0)), "use the RDP filter"),
        (GdpFilter(BUDGET), ZcdpEvent(0.1), "use"),
        (RdpFilter(BUDGET), ApproximateEvent(0.1, 1e-9), "the basic filter"),
        (RdpFilter(BUDGET), ZcdpEvent(0.1, 1e-9), "zCDP filter"),
    ],
)
def test_unsupported_names_what_to_do(rule, event, words):
    with pytest.raises(Unsupported, match=words):
        rule.add(rule.start(), event)


def test_repetitions_and_reservations():
    for rule in (BasicFilter(BUDGET), ZcdpFilter(BUDGET), GdpFilter(BUDGET), RdpFilter(BUDGET)):
        many = rule.add(rule.start(), RepeatedEvent(PureEvent(0.1), 3), 2)
        assert many == pytest.approx([6 * cost for cost in rule.cost(PureEvent(0.1))])
        assert rule.add(many, PureEvent(0.1), -6) == pytest.approx(rule.start(), abs=1e-12)
        with pytest.raises(InvalidValue, match="count must be below"):
            rule.add(many, RepeatedEvent(RepeatedEvent(PureEvent(0.1), 2**61), 2**61))


@pytest.mark.parametrize("orders", [(), (1.0,), (0.5, 2.0), (math.nan,), (math.inf,), ("two",)])
def test_bad_orders(orders):
    with pytest.raises(InvalidValue, match="orders must be finite numbers > 1"):
        RdpFilter(BUDGET, orders)


def test_pure_budget_has_no_gaussian_filter():
    for kind in (GdpFilter, RdpFilter, ZcdpFilter):
        with pytest.raises(InvalidValue, match=r"delta|approximate"):
            kind(Budget(1.0, 0.0))


def test_basic_composition_counts_the_deltas_as_well():
    rule = BasicFilter(Budget(1.0, 1e-5))
    assert rule.fits([0.1, 1e-5])
    assert not rule.fits([0.1, 1.1e-5])
    assert rule.epsilon([0.1, 1.1e-5]) == math.inf
    total = rule.start()
    for _ in range(4):
        total = rule.add(total, ApproximateEvent(0.01, 3e-6))
    assert not rule.fits(total)


PRICES = (0.15, 0.4, 0.9)


def realised_delta(rule, epsilon, strategy, rounds):
    """δ(ε) of an adaptive run, exactly: every path of answers of randomised response, both worlds.

    ``strategy`` picks the next price from the answers so far; the filter stops the run.
    """

    def walk(path, log_p, log_q, total):
        wanted = PRICES[strategy(path)] if len(path) < rounds else None
        after = None if wanted is None else rule.add(total, PureEvent(wanted))
        if after is None or not rule.fits(after):
            return max(math.exp(log_p) - math.exp(epsilon + log_q), 0.0)
        up = -math.log1p(math.exp(-wanted))
        return sum(
            walk(
                (*path, answer),
                log_p + (up if answer else up - wanted),
                log_q + (up - wanted if answer else up),
                after,
            )
            for answer in (0, 1)
        )

    return walk((), 0.0, 0.0, rule.start())


@pytest.mark.parametrize("delta", [0.01, 0.1])
def test_nobody_beats_the_filters_by_adapting(delta):
    """Greedy, stubborn and every strategy that looks at the last two answers."""
    budget = Budget(1.0, delta)
    rules = (
        RdpFilter(budget, (1.5, 3.0, 8.0)),
        RdpFilter(budget),
        ZcdpFilter(budget),
        GdpFilter(budget),
        BasicFilter(budget),
    )
    tables = list(itertools.product(range(3), repeat=4))[::3]
    worst = {}
    for rule in rules:
        for table in tables:

            def strategy(path, table=table):
                return table[2 * path[-2] + path[-1]] if len(path) > 1 else table[0]

            found = realised_delta(rule, budget.epsilon, strategy, 8)
            worst[rule.name] = max(worst.get(rule.name, 0.0), found)
            assert found <= delta
        ahead = realised_delta(rule, budget.epsilon, lambda path: 2 if sum(path) * 2 >= len(path) else 0, 9)
        assert ahead <= delta
    assert worst["gdp"] > 0  # the strategies do reach beyond ε


def tanh_rho(epsilon):
    return epsilon * math.tanh(epsilon / 2)


@pytest.mark.parametrize(
    ("rule", "event", "cost"),
    [
        (BasicFilter(BUDGET), ApproximateEvent(0.1, 1e-7), [0.1, 1e-7]),
        (BasicFilter(BUDGET), PureEvent(0.3), [0.3, 0.0]),
        (BasicFilter(BUDGET), BoundedRangeEvent(0.3), [0.3, 0.0]),
        (BasicFilter(BUDGET), PoissonEvent(0.1, PureEvent(0.3)), [math.log1p(0.1 * math.expm1(0.3)), 0.0]),
        (ZcdpFilter(BUDGET), GaussianEvent(4.0), [1 / 32, 0.0]),
        (ZcdpFilter(REPLACE), GaussianEvent(4.0), [4 / 32, 0.0]),
        (ZcdpFilter(BUDGET, 1e-6), ZcdpEvent(0.1, 1e-7), [0.1, 1e-7]),
        (ZcdpFilter(BUDGET), PureEvent(0.3), [tanh_rho(0.3), 0.0]),
        (ZcdpFilter(BUDGET), LaplaceEvent(4.0), [tanh_rho(0.25), 0.0]),
        (ZcdpFilter(REPLACE), LaplaceEvent(4.0), [tanh_rho(0.5), 0.0]),
        (ZcdpFilter(BUDGET), BoundedRangeEvent(0.3), [0.3**2 / 8, 0.0]),
        (ZcdpFilter(BUDGET), BoundedRangeEvent(40.0), [40.0, 0.0]),
        (GdpFilter(BUDGET), GaussianEvent(4.0), [1 / 16]),
        (GdpFilter(REPLACE), GaussianEvent(4.0), [4 / 16]),
        (RdpFilter(BUDGET, (2.0, 8.0)), ZcdpEvent(0.1), [0.2, 0.8]),
    ],
)
def test_what_every_filter_charges_for_an_event(rule, event, cost):
    assert rule.cost(event) == pytest.approx(cost, rel=1e-9)
    assert rule.add(rule.start(), RepeatedEvent(event, 3), 2) == pytest.approx(
        [6 * c for c in cost], rel=1e-9
    )


def test_laplace_noise_under_replace_one_costs_a_pure_event_of_twice_the_epsilon():
    assert GdpFilter(REPLACE).cost(LaplaceEvent(4.0)) == pytest.approx(GdpFilter(BUDGET).cost(PureEvent(0.5)))


def test_no_filter_lets_a_thousandth_more_through_than_its_limit():
    rdp_rule, gdp_rule = RdpFilter(BUDGET, (16.0,)), GdpFilter(BUDGET)
    zcdp_rule, basic = ZcdpFilter(BUDGET, 1e-6), BasicFilter(BUDGET)
    limits = [
        (rdp_rule, list(rdp_rule.limits)),
        (gdp_rule, [gdp_rule.mu**2]),
        (zcdp_rule, [zcdp_rule.rho, 1e-6]),
        (basic, [2.0, 1e-5]),
    ]
    for rule, limit in limits:
        assert rule.fits(limit)
        for place in range(len(limit)):
            assert not rule.fits([x * (1.001 if i == place else 1.0) for i, x in enumerate(limit)])


def choice_on_a_batch(scores, mine, rate, scale):
    """How often each candidate wins by Gumbel noise on a Poisson batch, with and without a record."""
    without, joined = np.zeros(len(mine)), np.zeros(len(mine))
    for drawn in itertools.product((False, True), repeat=len(scores)):
        chance = math.prod(rate if one else 1 - rate for one in drawn)
        others = scores[np.array(drawn)].sum(axis=0)
        alone, beside = (np.exp((total - total.max()) / scale) for total in (others, others + mine))
        without += chance * alone / alone.sum()
        joined += chance * (rate * beside / beside.sum() + (1 - rate) * alone / alone.sum())
    return joined, without


def test_a_choice_on_a_batch_costs_no_less_than_the_exact_divergence_and_less_than_a_pure_answer():
    """Every subset of five other records is summed up; the record's scores lie in [-1, 0]."""
    rng, closest = np.random.default_rng(0), 0.0
    for _ in range(300):
        rate, epsilon = rng.uniform(0.02, 0.9), rng.uniform(0.05, 4.0)
        rule = RdpFilter(Budget(1.0, 1e-6), orders=(1.5, 2.0, 4.0, 16.0, 64.0))
        cost = rule.cost(PoissonEvent(rate, BoundedRangeEvent(epsilon)))
        pure = rule.cost(PoissonEvent(rate, PureEvent(epsilon)))
        assert all(a <= b * (1 + 1e-12) for a, b in zip(cost, pure, strict=True))
        scores = -rng.integers(0, 2, size=(5, 3)).astype(float) * rng.choice([1.0, 40.0])
        mine = -rng.integers(0, 2, size=3).astype(float)
        p, q = choice_on_a_batch(scores, mine, rate, 1 / epsilon)
        for order, limit in zip(rule.orders, cost, strict=True):
            for one, other in ((p, q), (q, p)):
                exact = math.log(np.sum(one**order * other ** (1 - order))) / (order - 1)
                assert exact <= limit * (1 + 1e-9) + 1e-12
                closest = max(closest, exact / limit)
    assert closest > 0.5  # so that it would be noticed if the price were half as much
    small = RdpFilter(Budget(1.0, 1e-6), orders=(2.0,))
    price, pure = (small.cost(PoissonEvent(0.1, kind(0.05)))[0] for kind in (BoundedRangeEvent, PureEvent))
    assert price == pytest.approx(pure / 4, rel=1e-3)
    with pytest.raises(Unsupported):
        RdpFilter(Budget(1.0, 1e-6, "replace-one")).cost(PoissonEvent(0.1, BoundedRangeEvent(0.5)))


@pytest.mark.parametrize("epsilon", [*np.geomspace(1e-9, 30, 60), 0.00013047261628956034, 9.99e-4, 1e-3])
def test_the_mu_of_a_pure_answer_is_not_below_the_truth(epsilon):
    """μ >= 2 Φ⁻¹(e^ε / (1 + e^ε)), in 60 digits; the difference is what `tolerance` allows a cost."""
    with mpmath.workdps(60):
        found = math.sqrt(GdpFilter(Budget(1.0, 1e-6)).cost(PureEvent(float(epsilon)))[0])
        truth = 2 * mpmath.sqrt(2) * mpmath.erfinv(mpmath.tanh(mpmath.mpf(float(epsilon)) / 2))
        assert -1e-15 <= float(mpmath.mpf(found) / truth - 1) <= 5e-8
