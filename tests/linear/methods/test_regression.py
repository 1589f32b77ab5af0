"""Laws that every method for linear regression keeps, whatever it does inside."""

import numpy as np
import pytest
from scipy import sparse

import farthing as ft
from farthing.accounting.filters import BasicFilter, GdpFilter, ZcdpFilter
from farthing.data.tables import Features, Table
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.linear.losses import logistic, squared
from farthing.linear.methods.functional import functional
from farthing.linear.methods.leastsquares import least_squares
from farthing.linear.methods.regression import Space, noisy_gradient, ridge
from farthing.linear.methods.sufficient import adassp, sufficient
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream

METHODS = {
    "least squares": (least_squares, GdpFilter),
    "adassp": (adassp, GdpFilter),
    "sufficient": (sufficient, GdpFilter),
    "functional": (functional, BasicFilter),
    "gradient": (noisy_gradient, GdpFilter),
}
ADJACENCIES = ("add-remove", "replace-one", "zero-out")
RNG = np.random.default_rng(0)
X = RNG.uniform(size=(2000, 4))
X[:, 1] = 0.7 * X[:, 0] + 0.3 * X[:, 1]
Y = np.clip(X @ [0.3, -0.2, 0.1, 0.4] + 0.1 + 0.05 * RNG.normal(size=2000), 0, 1)


def fit(
    name,
    X,
    y,
    epsilon=1.0,
    adjacency="add-remove",
    unit=False,
    options=None,
    stream=None,
    filter=None,
    **public,
):
    method, own = METHODS[name]
    ledger = ft.Ledger(ft.Budget(epsilon, 1e-6, adjacency), filter=filter or own, stream=stream)
    problem = Problem(squared, **{"records": max(1, len(y)), "width": X.shape[1], "unit": unit, **public})
    return ft.run(method(ledger.over(Table(X, y, unit=unit)), problem, **(options or {}))), ledger


def oracle(X, y, penalty, intercept):
    rows = np.column_stack([X, np.ones(len(X))]) if intercept else X
    strength = np.diag([penalty] * X.shape[1] + [0.0] * intercept)
    w = np.linalg.solve(rows.T @ rows + strength, rows.T @ y)
    return (w[:-1], w[-1]) if intercept else (w, 0.0)


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("penalty", [0.0, 50.0])
@pytest.mark.parametrize("adjacency", ADJACENCIES[:2])
@pytest.mark.parametrize("name", METHODS)
def test_with_all_the_budget_in_the_world_it_is_plain_ridge_regression(
    name, adjacency, penalty, intercept, unit
):
    if name == "gradient":  # a thousand plain steps come as far with a strong penalty only
        penalty = 40 * penalty or 1000.0
    steps = {"steps": 1000} if name == "gradient" else {}
    run, _ = fit(name, X, Y, 1e8, adjacency, unit, steps, intercept=intercept, penalty=penalty)
    rows = X / np.linalg.norm(X, axis=1, keepdims=True) if unit else X
    u, constant = oracle(rows, Y, penalty, intercept)
    np.testing.assert_allclose(run.w[0], u, atol=4e-4)  # ten standard deviations
    np.testing.assert_allclose(run.w[1], constant, atol=4e-4)
    assert np.shape(run.w[1]) == ()


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("epsilon", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("name", METHODS)
def test_all_of_the_budget_is_spent_and_no_more(name, epsilon, adjacency):
    run, ledger = fit(name, X, Y, epsilon, adjacency)
    assert 0.999999 < ledger.share <= 1.0
    total = ledger.filter.start()
    for receipt in run.receipts:
        total = ledger.filter.add(total, receipt.event)
    assert ledger.filter.share(total) == pytest.approx(ledger.share, rel=1e-12)


@pytest.mark.parametrize("filter", [ZcdpFilter, GdpFilter])
@pytest.mark.parametrize("name", METHODS)
def test_any_filter_that_can_price_it_is_spent_to_its_end(name, filter):
    _, ledger = fit(name, X, Y, 1.0, filter=filter)
    assert 0.999 < ledger.share <= 1.0


@pytest.mark.parametrize("name", METHODS)
def test_a_spent_ledger_gives_nothing(name):
    method, filter = METHODS[name]
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6), filter=filter)
    ledger.allot()
    steps = method(ledger.over(Table(X, Y)), Problem(squared, 2000, 4, unit=False))
    with pytest.raises(BudgetSpent):
        ft.run(steps)


class Spy:
    """A door that remembers what it was asked."""

    def __init__(self, ledger):
        self.ledger, self.budget, self.affords, self.asked = ledger, ledger.budget, ledger.affords, []
        self.share, self.filter = ledger.share, ledger.filter

    def ask(self, query, w=None):
        self.asked.append((query, w))
        return self.ledger.ask(query, w)


CORNERS = [
    ([1.0, 1.0, 1.0, 1.0], 1.0),
    ([0.0, 0.0, 0.0, 0.0], 1.0),
    ([1.0, 0.0, 1.0, 0.0], 0.0),
    ([0.0, 1.0, 1.0, 0.0], 1.0),
    ([1e300, -1e300, 3.0, 0.0], 1e300),
    ([1e200, 0.0, 0.0, 0.0], -1e308),
    ([0.5, 0.5, 0.5, 0.5], np.nan),
]


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("epsilon", [0.05, 10.0])
@pytest.mark.parametrize("name", METHODS)
def test_neighbours_are_no_further_apart_than_the_bound_says(name, epsilon, intercept, unit):
    """All that a run asks, asked again without noise of tables with one record more, or another one."""
    method, filter = METHODS[name]
    spy = Spy(ft.Ledger(ft.Budget(epsilon, 1e-6), filter=filter).over(Table(X, Y, unit=unit)))
    list(method(spy, Problem(squared, 2000, 4, intercept=intercept, unit=unit)))
    assert spy.asked
    few = slice(0, 20)
    for query, w in spy.asked:
        bound, order = query.bound, query.mechanism.order

        def total(*extra, query=query, w=w):
            rows = np.vstack([X[few], *([x] for x, _ in extra)])
            y = np.append(Y[few], [y for _, y in extra])
            return query.contribution.bounded_sum(Table(rows, y, unit=unit), w, query.bound)

        base = total()
        moved = [np.ravel((total(corner) - base) / bound.scale) for corner in CORNERS]
        sizes = [np.linalg.norm(move, order) for move in moved]
        assert max(sizes) <= bound.sensitivity(ft.Adjacency.ADD_REMOVE, order) * (1 + 1e-9)
        apart = [np.linalg.norm(a - b, order) for a in moved for b in moved]
        assert max(apart) <= bound.sensitivity(ft.Adjacency.REPLACE_ONE, order) * (1 + 1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_the_same_seed_gives_the_same_model(name):
    fits = [fit(name, X, Y, stream=SeededStream(seed))[0].w for seed in (1, 1, 2)]
    np.testing.assert_array_equal(fits[0][0], fits[1][0])
    assert fits[0][1] == fits[1][1]
    assert not np.array_equal(fits[0][0], fits[2][0])


@pytest.mark.parametrize("name", METHODS)
def test_sparse_and_float32_rows_give_the_same_model(name):
    holes = np.where(X > 0.4, X, 0.0).astype(np.float32)
    kinds = (np.asarray, np.float64, sparse.csr_array)
    fits = [fit(name, kind(holes), Y, stream=SeededStream(0))[0].w for kind in kinds]
    for u, constant in fits[1:]:
        np.testing.assert_allclose(u, fits[0][0], rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(constant, fits[0][1], rtol=1e-6)


ODD = {
    "constant columns": (np.ones((200, 3)), np.arange(200) % 2),
    "zeros": (np.zeros((200, 3)), np.zeros(200)),
    "fewer rows than features": (np.random.default_rng(0).uniform(size=(15, 60)), np.arange(15) % 2),
    "one row": (np.full((1, 2), 0.5), np.array([0.3])),
    "no rows": (np.empty((0, 2)), np.empty(0)),
    "enormous": (np.full((50, 2), 1e300), np.full(50, 1e300)),
    "one feature": (np.linspace(0, 1, 300)[:, None], np.linspace(0, 1, 300)),
}


@pytest.mark.filterwarnings("ignore:bounds=None divided rows")  # odd rows are alike
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("epsilon", [1e-3, 1.0, 1e5])
@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("name", METHODS)
def test_odd_tables_are_no_error(name, case, epsilon, unit):
    rows, y = ODD[case]
    run, ledger = fit(name, rows, np.asarray(y, dtype=float), epsilon, unit=unit)
    assert run.w[0].shape == rows.shape[1:]
    assert np.isfinite(run.w[0]).all()
    assert np.isfinite(run.w[1])
    assert ledger.share <= 1.0


@pytest.mark.parametrize("name", METHODS)
def test_other_losses_are_refused_before_anything_is_charged(name):
    method, filter = METHODS[name]
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6), filter=filter)
    for problem in (Problem(logistic, 2000, 4), Problem(squared, 2000, 4, outputs=3)):
        with pytest.raises(Unsupported, match="squared"):
            list(method(ledger.over(Table(X, Y)), problem))
    assert ledger.share == 0


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (least_squares, {"steps": 0}),
        (least_squares, {"penalty": -1.0}),
        (adassp, {"failure": 0.0}),
        (noisy_gradient, {"steps": 1.5}),
        (noisy_gradient, {"clip_norm": -1.0}),
        (noisy_gradient, {"length": 0.0}),
    ],
)
def test_bad_options_are_refused_before_anything_is_charged(method, options):
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6))
    with pytest.raises(InvalidValue):
        list(method(ledger.over(Table(X, Y)), Problem(squared, 2000, 4), **options))
    assert ledger.share == 0


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
def test_the_space_bounds_rows_and_residuals(intercept, unit):
    space = Space.of(Problem(squared, 2000, 4, intercept=intercept, unit=unit))
    (block,) = Table(X, Y, unit=unit).blocks(space.features)
    assert (block.norm <= space.radius + 1e-12).all()
    assert block.shrink is None or np.allclose(block.shrink, 1.0, rtol=1e-15)
    residual = block.y - block.margins(*space.features.unfold(space.start))
    assert np.abs(residual).max() <= space.most


def test_a_ridge_is_the_penalty_on_weights_of_x():
    for scale in (2.0, np.arange(1.0, 5.0), RNG.normal(size=(4, 4))):
        features = Features(4, 0.3, scale, intercept=0.7)
        w = RNG.normal(size=5)
        u, _ = features.unfold(w)
        assert w @ ridge(features, 3.0) @ w == pytest.approx(3 * u @ u)
