"""DP-AGD: contributions against plain sums, prices against formulas, rounds against a scripted ledger."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import farthing as ft
from farthing.accounting import zcdp
from farthing.accounting.filters import RdpFilter, ZcdpFilter
from farthing.data.tables import Features, Table
from farthing.errors import BudgetSpent, FarthingError, InvalidValue, Unsupported
from farthing.linear.losses import Total, huber_hinge, logistic, multinomial, squared
from farthing.linear.methods.dpagd import Lengths, Ray, RayScores, dpagd, paper_splits
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream
from farthing.queries.bounds import ClipNorm, ClipValue
from farthing.queries.events import BoundedRangeEvent, GaussianEvent, PureEvent
from farthing.queries.mechanisms import NoisyMax
from farthing.queries.query import Answer, Receipt

ADD, REPLACE, ZERO = ft.Adjacency.ADD_REMOVE, ft.Adjacency.REPLACE_ONE, ft.Adjacency.ZERO_OUT
STEPS = np.array([0.0, 0.5, 3.0, 40.0])


def rows(n, d, classes=2, seed=0):
    """Features in [0, 1] whose first ``classes`` columns tell the class."""
    rng = np.random.default_rng(seed)
    X = rng.random((n, d))
    return X, np.argmax(X[:, :classes], axis=1).astype(np.float64)


def ledger_of(budget, seed=1):
    return ft.Ledger(budget, filter=ZcdpFilter, stream=SeededStream(seed))


def price(event, adjacency):
    """ρ of an event by the formulas of the papers."""
    match event:
        case GaussianEvent(noise):
            return (2.0 if adjacency is REPLACE else 1.0) ** 2 / (2 * noise**2)
        case BoundedRangeEvent(epsilon):
            return epsilon**2 / 8
        case PureEvent(epsilon):
            return epsilon * math.tanh(epsilon / 2)  # of randomised response; the paper rounds it up to ε²/2
    raise AssertionError(event)


@pytest.mark.parametrize(("loss", "classes"), [(logistic, 0), (huber_hinge, 0), (multinomial, 3)])
def test_scores_along_a_ray_are_the_clipped_losses_at_its_points(loss, classes):
    X, y = rows(700, 5, classes or 2)
    features = Features(5, np.full(5, 0.4), np.linspace(0.5, 2, 5), intercept=0.7, radius=1.1)
    rng = np.random.default_rng(1)
    shape = (6, classes) if classes else (6,)
    w, direction = rng.normal(size=shape), rng.normal(size=shape)
    z = np.column_stack([(X - 0.4) * np.linspace(0.5, 2, 5), np.full(700, 0.7)])
    z *= np.minimum(1, 1.1 / np.linalg.norm(z, axis=1))[:, None]
    expected = [-np.minimum(loss.value(z @ (w - step * direction), y), 2.5).sum() for step in STEPS]
    found = RayScores(loss, features).bounded_sum(Table(X, y), Ray(w, direction, STEPS), ClipValue(-2.5, 0))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    record=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    label=st.sampled_from([0.0, 1.0]),
    size=st.sampled_from([1e-3, 1.0, 1e4, 1e200, 1e308]),
    loss=st.sampled_from([logistic, huber_hinge]),
)
def test_one_record_only_lowers_scores_and_by_no_more_than_the_clip(record, label, size, loss):
    X, y = rows(20, 3)
    ray = Ray(np.full(4, size), size * np.array([-1.0, -0.3, 0.3, 1.0]), STEPS)
    scores, bound = RayScores(loss, Features(3)), ClipValue(-2.0, 0.0)
    without = scores.bounded_sum(Table(X, y), ray, bound)
    joined = Table(np.vstack([X, record]), np.append(y, label))
    moved = scores.bounded_sum(joined, ray, bound) - without
    assert np.all((moved <= 1e-9) & (moved >= -2.0 - 1e-9))


@settings(max_examples=60, deadline=None)
@given(record=st.lists(st.floats(-1e200, 1e200), min_size=3, max_size=3))
def test_one_record_moves_the_total_by_no_more_than_the_clip(record):
    X, _ = rows(20, 3)
    total, bound = Total(Features(3, radius=1.0)), ClipNorm(0.8)
    without = total.bounded_sum(Table(X), None, bound)
    moved = total.bounded_sum(Table(np.vstack([X, record])), None, bound) - without
    assert np.linalg.norm(moved) <= 0.8 + 1e-9


def test_the_total_is_the_sum_of_clipped_rows():
    X, _ = rows(900, 4)
    z = np.column_stack([X, np.ones(900)])
    z *= np.minimum(1, 1.2 / np.linalg.norm(z, axis=1))[:, None]
    z *= np.minimum(1, 0.9 / np.linalg.norm(z, axis=1))[:, None]
    found = Total(Features(4, radius=1.2)).bounded_sum(Table(X), None, ClipNorm(0.9))
    np.testing.assert_allclose(found, z.sum(axis=0), rtol=1e-12)


def test_no_records_sum_to_nothing():
    table = Table(np.empty((0, 3)), np.empty(0))
    ray = Ray(np.ones(4), np.ones(4), STEPS)
    assert not RayScores(logistic, Features(3)).bounded_sum(table, ray, ClipValue(-1.0, 0.0)).any()
    assert not Total(Features(3)).bounded_sum(table, None, ClipNorm(1.0)).any()
    budget = ft.Budget(0.5, 1e-6)
    run = ft.run(dpagd(ledger_of(budget).over(table), Problem(logistic, 100, 3)))
    assert np.isfinite(run.w[0]).all()


@pytest.mark.parametrize("adjacency", [ADD, REPLACE, ZERO])
@pytest.mark.parametrize("noise", ["gumbel", "laplace"])
@pytest.mark.parametrize("unit", [True, False])
def test_what_is_charged_is_what_was_released_and_never_above_the_budget(adjacency, noise, unit):
    X, y = rows(400, 3)
    budget = ft.Budget(0.7, 1e-6, adjacency)
    ledger = ledger_of(budget)
    door = ledger.over(Table(X, y, unit=unit))
    run = ft.run(dpagd(door, Problem(logistic, 400, 3, unit=unit), choice_noise=noise))
    kind = BoundedRangeEvent if noise == "gumbel" else PureEvent
    assert {type(receipt.event) for receipt in run.receipts} == {GaussianEvent, kind}
    spent = sum(price(receipt.event, adjacency) for receipt in run.receipts)
    rho = ZcdpFilter(budget).rho
    assert 0.8 * rho < spent <= rho
    # a last round that did not fit may have bought answers that no step shows
    assert spent <= ledger.share * rho * (1 + 1e-6)
    assert ledger.share <= 1


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    epsilon=st.floats(0.02, 20),
    splits=st.floats(1, 40),
    search=st.floats(0.05, 0.95),
    growth=st.floats(0.05, 2),
    opening=st.sampled_from([0.0, 0.3]),
)
def test_no_choice_of_options_overspends(seed, epsilon, splits, search, growth, opening):
    X, y = rows(50, 2)
    ledger = ledger_of(ft.Budget(epsilon, 1e-5), seed)
    options = {"splits": splits, "search": search, "growth": growth, "opening": opening}
    for step in dpagd(ledger.over(Table(X, y)), Problem(logistic, 50, 2, unit=False), **options):
        assert np.isfinite(step.w[0]).all()
    assert ledger.share <= 1


def test_replacing_doubles_the_noise_and_keeps_the_rounds():
    X, y = rows(3000, 3)
    first = []
    for adjacency in (ADD, REPLACE):
        door = ledger_of(ft.Budget(1.0, 1e-6, adjacency)).over(Table(X, y))
        first.append(next(dpagd(door, Problem(logistic, 3000, 3, unit=False))).receipts)
    gaussians = [
        [r.event.noise for r in receipts if isinstance(r.event, GaussianEvent)] for receipts in first
    ]
    assert gaussians[1][:2] == pytest.approx([2 * noise for noise in gaussians[0][:2]])
    choices = [
        [r.event.epsilon for r in receipts if isinstance(r.event, BoundedRangeEvent)] for receipts in first
    ]
    assert choices[1][0] == pytest.approx(choices[0][0])


class Scripted:
    """A ledger whose answers are written down ahead: gradients in turn, and which step is chosen."""

    def __init__(self, gradients, choices):
        self.budget, self.asked = ft.Budget(1.0, 1e-6), []
        self.gradients, self.choices = iter(gradients), iter(choices)

    def ask(self, query, w):
        event = query.price(self.budget)
        self.asked.append(SimpleNamespace(rho=price(event, ADD), query=query, w=w))
        chooses = isinstance(query.mechanism, NoisyMax)
        value = next(self.choices if chooses else self.gradients, None)
        if value is None:
            raise BudgetSpent("the script ends here")
        return Answer(value, Receipt(len(self.asked), "", event))


def test_where_no_step_helps_the_gradient_is_bought_again_and_averaged():
    g = [np.array([3.0, 4.0, 0.0]), np.array([-1.0, 0.0, 5.0]), np.array([1.0, 1.0, 1.0])]
    ledger = Scripted(g, [0, 2])
    problem = Problem(logistic, 100, 2)
    steps = list(dpagd(ledger, problem, opening=0, growth=0.25, search=0.4, splits=10, averaging=None))
    rho = ZcdpFilter(ledger.budget).rho / 10
    # gradient, choice (none), the same gradient again, choice, the next round's gradient at the higher price
    assert [ask.rho for ask in ledger.asked[:5]] == pytest.approx(
        [0.6 * rho, 0.4 * rho, 0.15 * rho, 0.4 * rho, 0.75 * rho]
    )
    np.testing.assert_array_equal(ledger.asked[2].w, ledger.asked[0].w)
    np.testing.assert_allclose(ledger.asked[1].w.direction, g[0] / 5)
    blend = (g[0] + 0.25 * g[1]) / 1.25  # weights 1/variance, normalised only afterwards
    blend /= np.linalg.norm(blend)
    np.testing.assert_allclose(ledger.asked[3].w.direction, blend)
    np.testing.assert_allclose(steps[0].w[0], -0.4 * blend[:2])
    assert len(steps) == 1
    assert len(steps[0].receipts) == 4


def test_in_later_rounds_too_a_failed_search_buys_a_better_gradient_at_once():
    """Algorithm 2, lines 9-19 of the second and third round, without momentum: GradAvg follows every 0."""
    g = [np.eye(3)[i % 3] * (i + 1) for i in range(6)]
    ledger = Scripted(g, [1, 0, 0, 2, 0, 1])
    options = {"opening": 0, "momentum": 0, "growth": 0.5, "search": 0.4, "splits": 10, "averaging": None}
    steps = list(dpagd(ledger, Problem(logistic, 100, 2), **options))
    rho = ZcdpFilter(ledger.budget).rho / 10
    kinds = "".join("S" if isinstance(ask.w, Ray) else "G" for ask in ledger.asked)
    # round 1: G S; round 2: G S (0) G S (0) G S; round 3: G S (0) G S; round 4: G, where the script ends
    assert kinds == "GS" + "GSGSGS" + "GSGS" + "G"
    prices = [ask.rho / rho for ask in ledger.asked if not isinstance(ask.w, Ray)]
    assert prices == pytest.approx([0.6, 0.6, 0.3, 0.45, 1.35, 0.675, 2.025])  # lines 7 and 19
    assert [ask.rho / rho for ask in ledger.asked if isinstance(ask.w, Ray)] == pytest.approx([0.4] * 6)
    rays = [ask.w.direction for ask in ledger.asked if isinstance(ask.w, Ray)]
    second = (0.6 * g[1] + 0.3 * g[2]) / 0.9  # lines 25-29
    third = (0.9 * second + 0.45 * g[3]) / 1.35
    for ray, wanted in zip(rays[1:4], (g[1], second, third), strict=True):
        np.testing.assert_allclose(ray, wanted / np.linalg.norm(wanted))
    bought = [ask.w for ask in ledger.asked if not isinstance(ask.w, Ray)]
    for again in bought[2:4]:  # bought at the point where the search failed: w has not moved
        np.testing.assert_array_equal(again, bought[1])
    assert len(steps) == 3


def test_without_growth_a_failed_search_takes_a_fresh_gradient_at_the_same_price():
    g = [np.array([1.0, 0.0, 0.0]), np.array([0.0, 1.0, 0.0]), np.array([0.0, 0.0, 2.0])]
    ledger = Scripted(g, [0, 0, 1])
    steps = list(dpagd(ledger, Problem(logistic, 100, 2), opening=0, growth=None, averaging=None))
    assert [isinstance(ask.w, Ray) for ask in ledger.asked[:6]] == [False, True] * 3
    assert len({round(ask.rho, 9) for ask in ledger.asked if not isinstance(ask.w, Ray)}) == 1
    np.testing.assert_allclose(ledger.asked[5].w.direction, [0, 0, 1])
    assert len(steps) == 1


def test_memory_is_dropped_before_anything_is_bought_again():
    g = [np.array([1.0, 0.0, 0.0]), np.array([0.0, 1.0, 0.0]), np.array([0.0, 0.0, 1.0])]
    ledger = Scripted(g, [1, 0, 1, 0])
    steps = list(dpagd(ledger, Problem(logistic, 100, 2), opening=0, momentum=0.5, averaging=None))
    rays = [ask.w.direction for ask in ledger.asked if isinstance(ask.w, Ray)]
    np.testing.assert_allclose(rays[1], np.array([0.5, 1, 0]) / math.sqrt(1.25))
    np.testing.assert_allclose(rays[2], [0, 1, 0])
    np.testing.assert_allclose(rays[3], np.array([0, 0.5, 1]) / math.sqrt(1.25))
    assert len(steps) == 2


def test_once_memory_is_dropped_a_failed_search_buys_a_better_gradient():
    g = [np.array([1.0, 0.0, 0.0]), np.array([0.0, 1.0, 0.0]), np.array([0.0, 0.0, 2.0])]
    ledger = Scripted(g, [1, 0, 0, 1])
    steps = list(dpagd(ledger, Problem(logistic, 100, 2), opening=0, momentum=0.5, growth=1, averaging=None))
    kinds = "".join("S" if isinstance(ask.w, Ray) else "G" for ask in ledger.asked)
    assert kinds == "GS" + "GSSGS" + "G"
    np.testing.assert_allclose(ledger.asked[6].w.direction, np.array([0.0, 1.0, 2.0]) / math.sqrt(5))
    assert len(steps) == 2


def test_late_iterates_weigh_more_in_the_average():
    """Weights of Shamir and Zhang's average with η = 1, the second of its steps: (1, 2) / 3."""
    ledger = Scripted([np.array([50.0, 0.0, 0.0])] * 2, [1, 1])
    first, second = dpagd(ledger, Problem(logistic, 100, 2), opening=0, momentum=0, averaging=1)
    assert first.w[0][0] == pytest.approx(-0.2)
    assert second.w[0][0] == pytest.approx((1 * -0.2 + 2 * -0.4) / 3)


@pytest.mark.parametrize("splits", [1, 3, 7, 10, 18, 49])
@pytest.mark.parametrize("opening", [0, 0.05])
def test_no_round_is_lost_to_rounding(splits, opening):
    """Where every choice moves, the budget pays for exactly the rounds asked for."""
    X, y = rows(100, 2)
    ledger = ledger_of(ft.Budget(0.3, 1e-6))
    door = ledger.over(Table(X, y))

    def ask(query, w=None):
        answer = door.ask(query, w)
        return Answer(1, answer.receipt) if isinstance(query.mechanism, NoisyMax) else answer

    willing = SimpleNamespace(budget=ledger.budget, ask=ask)
    assert len(list(dpagd(willing, Problem(logistic, 100, 2), splits=splits, opening=opening))) == splits
    assert ledger.share == pytest.approx(1)


def test_displacements_are_made_anew_every_tenth_step():
    chosen = [0.2, 1.0, *[0.1] * 8, 0.5, *[0.3] * 9]
    tops = [Lengths().after(chosen[:t])[-1] for t in (0, 9, 10, 19, 20)]
    assert tops == pytest.approx([2.0, 2.0, 1.1, 1.1, 0.55])
    assert Lengths().after([3.0] * 10)[-1] == 2.0
    np.testing.assert_allclose(np.diff(Lengths(20).after([])), 0.1)


def test_the_papers_prices():
    budget = ft.Budget(0.4, 1e-8)
    splits, search = paper_splits(budget, 60)
    part, rho = 0.4 / 120, ZcdpFilter(budget).rho
    sigma = math.sqrt(2 * math.log(1.25 / 1e-8)) / part
    assert search * rho / splits == pytest.approx(part**2 / 2)
    assert (1 - search) * rho / splits == pytest.approx(1 / (2 * sigma**2))


@pytest.mark.parametrize("closed", [False, True])
def test_the_papers_splits_set_both_numbers(closed):
    budget = ft.Budget(0.4, 1e-8)
    rho = budget.rho if closed else None
    splits, search = paper_splits(budget, 10, rho)
    X = np.random.default_rng(0).uniform(size=(200, 2))
    found = []
    for given_splits in ({"published_splits": 10}, {"splits": splits, "search": search}):
        ledger = ft.Ledger(budget, filter=ZcdpFilter, stream=SeededStream(1)).over(Table(X, X[:, 0] > 0.5))
        steps = dpagd(ledger, Problem(logistic, 200, 2), rho=rho, opening=0, **given_splits)
        found.append([(step.w[0].tolist(), step.receipts[0].event) for step in itertools.islice(steps, 3)])
    assert found[0] == found[1]
    with pytest.raises(InvalidValue, match="leave out published_splits or sampling_rate"):
        next(dpagd(ledger, Problem(logistic, 200, 2), published_splits=10, sampling_rate=0.1))


def test_the_tight_rho_is_up_to_1_6_times_that_of_equation_5():
    ratios = [zcdp.rho_tight(epsilon, 1e-8) / zcdp.rho(epsilon, 1e-8) for epsilon in (0.05, 0.4, 0.8, 1.6)]
    assert [round(ratio, 2) for ratio in ratios] == [1.63, 1.39, 1.32, 1.26]
    budget = ft.Budget(0.4, 1e-8)
    tight, closed = paper_splits(budget, 60), paper_splits(budget, 60, budget.rho)
    assert tight[0] / closed[0] == pytest.approx(ratios[1])  # the same prices, so many more rounds
    assert tight[1] == closed[1]


def test_batches_need_another_adjacency_than_replace_one_and_an_rdp_filter():
    X, y = rows(50, 2)
    for budget, rule in ((ft.Budget(1.0, 1e-6, REPLACE), RdpFilter), (ft.Budget(1.0, 1e-6), ZcdpFilter)):
        ledger = ft.Ledger(budget, filter=rule)
        with pytest.raises(Unsupported):
            next(dpagd(ledger.over(Table(X, y)), Problem(logistic, 50, 2), sampling_rate=0.2, opening=0))
        assert ledger.share == 0


@pytest.mark.parametrize("adjacency", [ADD, ZERO])
@pytest.mark.parametrize("noise", ["gumbel", "laplace"])
def test_it_learns_on_batches_and_no_round_is_lost_to_rounding(adjacency, noise):
    X, y = rows(3000, 4)
    ledger = ft.Ledger(ft.Budget(2.0, 1e-6, adjacency), filter=RdpFilter, stream=SeededStream(2))
    door, problem = ledger.over(Table(X, y)), Problem(logistic, 3000, 4, unit=False)

    def ask(query, w=None):
        """Steps are always taken, so that as many rounds as asked for must fit."""
        answer = door.ask(query, w)
        return (
            Answer(max(answer.value, 1), answer.receipt) if isinstance(query.mechanism, NoisyMax) else answer
        )

    willing = SimpleNamespace(budget=ledger.budget, ask=ask)
    run = ft.run(dpagd(willing, problem, sampling_rate=0.2, splits=12, choice_noise=noise))
    assert run.steps == 12
    assert 0.99 < ledger.share <= 1
    assert np.mean((X @ run.w[0] + run.w[1] > 0) == y) > 0.85


def test_a_penalty_shortens_the_weights_and_costs_nothing():
    X, y = rows(4000, 3)
    found = {}
    for penalty in (0.0, 0.5):
        ledger = ledger_of(ft.Budget(4.0, 1e-6))
        steps = dpagd(ledger.over(Table(X, y)), Problem(logistic, 4000, 3, unit=False), penalty=penalty)
        first = next(steps)
        found[penalty] = (
            float(np.linalg.norm(ft.run(steps).w[0])),
            [receipt.event for receipt in first.receipts],
        )
    assert found[0.5][0] < 0.5 * found[0.0][0]
    assert found[0.5][1] == found[0.0][1]


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize(("loss", "classes"), [(logistic, 0), (huber_hinge, 0), (multinomial, 3)])
def test_it_learns(loss, classes, unit):
    X, y = rows(4000, 4, classes or 2)
    problem = Problem(loss, 4000, 4, classes, unit=unit)
    u, constant = ft.run(dpagd(ledger_of(ft.Budget(2.0, 1e-6)).over(Table(X, y, unit=unit)), problem)).w
    margins = (X / np.linalg.norm(X, axis=1, keepdims=True) if unit else X) @ u + constant
    assert u.shape == ((4, 3) if classes else (4,))
    assert np.shape(constant) == ((3,) if classes else ())
    assert np.mean((np.argmax(margins, axis=1) if classes else margins > 0) == y) > 0.9


def test_it_learns_as_in_the_paper():
    X, y = rows(4000, 4)
    budget = ft.Budget(2.0, 1e-6)
    splits, search = paper_splits(budget, 10)
    steps = dpagd(
        ledger_of(budget).over(Table(X, y)),
        Problem(logistic, 4000, 4, unit=False),
        splits=splits,
        search=search,
        grid=Lengths(20),
        choice_noise="laplace",
        opening=0,
        momentum=0,
        averaging=None,
        radius=None,
        clip_norm=3,
        objective_clip=3,
    )
    u, constant = ft.run(steps).w
    assert np.mean((X @ u + constant > 0) == y) > 0.85


def test_without_an_intercept_the_constant_is_zero():
    X, y = rows(1000, 3)
    door = ledger_of(ft.Budget(1.0, 1e-6)).over(Table(X, y, unit=True))
    assert ft.run(dpagd(door, Problem(logistic, 1000, 3, intercept=False))).w[1] == 0


def test_the_noise_decides_and_nothing_else():
    X, y = rows(500, 3)
    runs = []
    for seed in (1, 1, 2):
        door = ledger_of(ft.Budget(1.0, 1e-6), seed).over(Table(X, y, unit=True))
        runs.append(ft.run(dpagd(door, Problem(logistic, 500, 3))).w[0])
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


@pytest.mark.parametrize(
    "options",
    [
        {"splits": 0},
        {"search": 0},
        {"search": 1.0},
        {"growth": -1},
        {"clip_norm": 0},
        {"objective_clip": 0},
        {"choice_noise": "normal"},
        {"opening": 1.0},
        {"momentum": 1.0},
        {"averaging": -1},
        {"radius": 0},
        {"sampling_rate": 0.0},
        {"sampling_rate": 1.5},
        {"penalty": -1.0},
        {"rho": 0.0},
        {"rho": 1.0},
        {"rho": 0.001, "sampling_rate": 0.5},
    ],
    ids=str,
)
def test_bad_options_are_refused_before_anything_is_charged(options):
    X, y = rows(50, 2)
    ledger = ledger_of(ft.Budget(1.0, 1e-6))
    with pytest.raises(InvalidValue):
        next(dpagd(ledger.over(Table(X, y)), Problem(logistic, 50, 2, unit=False), **options))
    assert ledger.share == 0


@pytest.mark.parametrize("options", [{"count": 0}, {"period": 0}, {"longest": 0}, {"growth": -1}], ids=str)
def test_bad_grids_are_refused(options):
    with pytest.raises(InvalidValue):
        Lengths(**options)


def test_a_loss_without_a_slope_needs_a_clip():
    X, y = rows(50, 2)
    ledger = ledger_of(ft.Budget(1.0, 1e-6))
    with pytest.raises(Unsupported, match="clip"):
        next(dpagd(ledger.over(Table(X, y)), Problem(squared, 50, 2)))
    next(dpagd(ledger.over(Table(X, y)), Problem(squared, 50, 2), clip_norm=1.0))


def test_pure_budgets_are_refused():
    X, y = rows(50, 2)
    with pytest.raises(FarthingError, match="delta"):
        next(dpagd(ft.Ledger(ft.Budget(1.0, 0.0)).over(Table(X, y)), Problem(logistic, 50, 2)))
