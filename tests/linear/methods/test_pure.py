"""Pure ε-DP classification: the theorem against exact probabilities, and what is released and refused."""

import math

import numpy as np
import pytest

import farthing as ft
from farthing.accounting.filters import BasicFilter
from farthing.budget import Adjacency
from farthing.data.tables import Features, Table
from farthing.errors import InvalidValue, Unsupported
from farthing.linear.losses import huber_hinge, logistic, multinomial, one_against_rest, squared
from farthing.linear.methods import perturbation, pure
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream

LINE = Features(1, intercept=0.0, radius=1.0)
X = np.random.default_rng(0).uniform(size=(2000, 3))
Y = (X[:, 0] > X[:, 1]).astype(float)
PURE = ft.Budget(2.0, 0.0)


def slope(loss, rows, labels, penalty, at):
    """F' at many places, of weights on one feature."""
    terms = [z * loss.residual(z * at, np.full(len(at), y)) for z, y in zip(rows, labels, strict=True)]
    return np.sum(terms, axis=0) + penalty * at


def cells(loss, rows, labels, penalty, noise, edges):
    """The probability of each interval of minimisers: w <= t just if b >= -F'(t), b Laplace."""
    at = slope(loss, rows, labels, penalty, edges) / noise
    below = np.where(at < 0, np.exp(at) / 2, 1 - np.exp(-at) / 2)
    return np.diff(below)


@pytest.mark.parametrize("loss", [logistic, huber_hinge])
@pytest.mark.parametrize("noise", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("factor", [0.05, 1.0, 10.0])
def test_no_interval_of_minimisers_is_likelier_than_the_theorem_says(loss, noise, factor):
    penalty = factor * noise
    epsilon = pure.epsilon_of(loss, noise, penalty)
    edges, largest = np.linspace(-6, 6, 2001), 0.0
    for rows in ([], [0.3, -0.7], [1.0] * 5 + [-1.0] * 3):
        labels = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0][: len(rows)]
        without = cells(loss, rows, labels, penalty, noise, edges)
        for record in ((1.0, 1.0), (-1.0, 1.0), (0.5, 0.0)):
            within = cells(loss, [*rows, record[0]], [*labels, record[1]], penalty, noise, edges)
            seen = (within > 1e-9) & (without > 1e-9)
            largest = max(largest, np.abs(np.log(within[seen] / without[seen])).max())
    assert largest <= epsilon + 1e-4
    if loss is logistic and factor >= 1:
        assert epsilon == 1 / noise
        assert largest > 0.4 / noise  # and the theorem is not idle


def softmax_gradient(rows, labels, penalty, w):
    """The gradient of the penalised softmax loss, one row a coordinate, by its formula."""
    p = np.exp(rows @ w - (rows @ w).max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return rows.T @ (p - np.eye(w.shape[1])[labels]) + penalty * w


def log_density(rows, labels, penalty, scale, w):
    """The density of minimisers at w, up to a constant: Laplace at -∇F(w), times det ∇²F by differences."""
    flat = [
        (
            softmax_gradient(rows, labels, penalty, w + d.reshape(w.shape))
            - softmax_gradient(rows, labels, penalty, w - d.reshape(w.shape))
        ).ravel()
        for d in 1e-5 * np.eye(w.size)
    ]
    inside = softmax_gradient(rows, labels, penalty, w)
    return np.linalg.slogdet(np.array(flat) / 2e-5)[1] - np.abs(inside).sum() / scale


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize(("noise", "penalty"), [(1.0, 0.1), (1.0, 3.0), (0.3, 30.0)])
def test_no_minimiser_of_several_classes_is_likelier_than_the_theorem_says(classes, noise, penalty):
    rng, largest = np.random.default_rng(classes), 0.0
    epsilon = pure.epsilon_of(multinomial, noise, penalty, classes)
    scale = noise * pure.WideConvex(multinomial, 1.0, 2, classes).norm(1)
    for trial in range(200):
        count = trial % 4
        rows = rng.normal(size=(count + 1, 2))
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        rows[-1] = np.sqrt([0.5, 0.5])  # the longest in L1
        labels, w = (
            rng.integers(classes, size=count + 1),
            rng.normal(size=(2, classes)) * 10 ** rng.uniform(-2, 1),
        )
        pair = [log_density(rows[:end], labels[:end], penalty, scale, w) for end in (count, count + 1)]
        largest = max(largest, abs(pair[1] - pair[0]))
    assert 0.3 * epsilon < largest <= epsilon + 1e-4


def test_several_classes_are_told_apart_without_a_delta():
    classes = (3 * X[:, 0]).astype(int)
    model = ft.LogisticRegression(3.0, 0.0, bounds=(0, 1), classes=range(3)).fit(X, classes)
    assert (model.privacy_.epsilon, model.privacy_.delta) == (3.0, 0.0)
    assert model.coef_.shape == (3, 3)
    assert model.score(X, classes) > 0.6  # the largest class has a third


def test_a_label_that_is_no_class_counts_as_nothing_and_each_solver_finds_the_same(monkeypatch):
    features, bound = Features(3, intercept=0.3, radius=1.0), pure.WideConvex(multinomial, 1.0, 4, 3)
    labels = (3 * X[:, 0]).astype(float)
    labels[::7] = np.nan
    known = np.floor(labels[np.isfinite(labels)])
    objective = pure.WideObjective(features, 1e-9)
    linear = np.linspace(-3, 3, 12)
    whole = objective.bounded_sum(Table(X, np.floor(labels)), None, bound)
    part = objective.bounded_sum(Table(X[np.isfinite(labels)], known), None, bound)
    usual = pure.minimiser(whole, bound, linear, 20.0)
    np.testing.assert_allclose(pure.minimiser(part, bound, linear, 20.0), usual, atol=1e-8)
    monkeypatch.setattr(pure, "_CURVED", 0)  # no Hessian
    np.testing.assert_allclose(pure.minimiser(whole, bound, linear, 20.0), usual, atol=1e-8)
    monkeypatch.setattr(pure, "_LBFGS_STEPS", 1)
    np.testing.assert_allclose(pure.minimiser(whole, bound, linear, 20.0), usual, atol=1e-8)
    with pytest.raises(InvalidValue, match="not a loss of 3 outputs"):
        objective.bounded_sum(Table(X, Y), None, pure.WideConvex(squared, 1.0, 4, 3))


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("loss", [logistic, huber_hinge])
def test_it_spends_the_budget_without_a_delta(loss, adjacency):
    ledger = ft.Ledger(ft.Budget(2.0, 0.0, adjacency), filter=BasicFilter)
    ft.run(pure.pure(ledger.over(Table(X, Y)), Problem(loss, 2000, 3, unit=False)))
    assert ledger.guarantee.delta == 0
    assert 0.99 < ledger.share <= 1


def test_replaced_records_cost_twice():
    mechanism, bound = pure.LaplaceObjective(2.0, 100.0, 5.0), pure.WideConvex(logistic, 1.0, 4)
    pair = Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE
    costs = [mechanism.event(bound, each, False).epsilon for each in pair]
    assert costs == [pytest.approx(0.51), pytest.approx(1.02)]
    with pytest.raises(Unsupported, match="takes all records"):
        mechanism.event(bound, Adjacency.ADD_REMOVE, True)


@pytest.mark.parametrize("loss", [logistic, huber_hinge])
def test_where_newtons_steps_do_not_arrive_nesterovs_do(loss, monkeypatch):
    features = Features(3, intercept=0.3, radius=1.0)
    total = pure.WideObjective(features, 1e-9).bounded_sum(
        Table(X, Y), None, bound := pure.WideConvex(loss, 1.0, 4)
    )
    linear = np.array([3.0, -2.0, 1.0, 0.5])
    usual = pure.minimiser(total, bound, linear, 20.0)
    monkeypatch.setattr(perturbation, "_NEWTON_STEPS", 0)
    np.testing.assert_allclose(pure.minimiser(total, bound, linear, 20.0), usual, atol=1e-9)


def test_the_noise_has_the_scale_that_is_priced():
    mechanism, bound = pure.LaplaceObjective(3.0, 1e6, 50.0), pure.WideConvex(logistic, 1.0, 1)
    nobody = pure.WideObjective(LINE, 1e-9).bounded_sum(Table(np.zeros((0, 1)), np.zeros(0)), None, bound)
    stream = SeededStream(0)
    found = [mechanism.release(nobody, bound, stream)[0] * 50 for _ in range(2000)]
    # the mean of |Laplace| is its scale, here 3, known to 2.2 % of it; seven deviations
    assert np.abs(found).mean() == pytest.approx(3.0, rel=0.16)


@pytest.mark.parametrize(
    ("problem", "settings", "said"),
    [
        (Problem(one_against_rest, 2000, 3, 4, unit=False), {}, "proven for the softmax loss"),
        (Problem(multinomial, 2000, 3, 4, unit=False), {"penalty": 0.01}, "Jacobian costs more"),
        (Problem(logistic, 2000, 3, unit=False), {"penalty": 0.01}, "Jacobian costs more"),
        (Problem(logistic, 2000, 3, unit=False), {"penalty": -1.0}, "penalty"),
    ],
)
def test_what_has_no_proof_is_refused(problem, settings, said):
    ledger = ft.Ledger(PURE, filter=BasicFilter)
    with pytest.raises((Unsupported, InvalidValue), match=said):
        ft.run(pure.pure(ledger.over(Table(X, Y)), problem, **settings))
    assert ledger.share == 0


def test_a_bound_of_another_width_is_refused():
    ledger = ft.Ledger(PURE, filter=BasicFilter).over(Table(X, Y))
    objective = pure.WideObjective(Features(3, intercept=0.3, radius=1.0), 1e-9)
    bound = pure.WideConvex(logistic, 1.0, 1)
    with pytest.raises(InvalidValue, match="size 4"):
        ledger.ask(ft.Query(ft.Everyone(), objective, bound, pure.LaplaceObjective(1.0, 200.0, 5.0)))
    assert ledger.share == 0


def test_estimators_take_a_budget_without_a_delta():
    model = ft.LogisticRegression(2.0, 0.0, bounds=(0, 1)).fit(X, Y.astype(int))
    assert (model.privacy_.epsilon, model.privacy_.delta) == (2.0, 0.0)
    assert model.score(X, Y.astype(int)) > 0.8
    line = ft.LinearRegression(2.0, 0.0, bounds=(0, 1), target_bounds=(0, 1)).fit(X, X[:, 0])
    assert line.privacy_.delta == 0
    ledger = ft.Ledger(ft.Budget(2.0, 0.0), filter=BasicFilter)
    ft.LinearSVC(1.0, 0.0, bounds=(0, 1), ledger=ledger).fit(X, Y.astype(int))
    assert ledger.share == pytest.approx(0.5)
    assert math.isclose(ledger.guarantee.delta, 0.0)


@pytest.mark.parametrize("solver", ["dpagd", "sgd-ma", "objective", "output"])
def test_solvers_that_need_a_delta_name_the_one_that_does_not(solver):
    with pytest.raises(Unsupported, match="solver='pure'"):
        ft.LogisticRegression(1.0, 0.0, bounds=(0, 1), solver=solver).fit(X, Y.astype(int))
    with pytest.raises(Unsupported, match="solver='functional'"):
        ft.LinearRegression(1.0, 0.0, target_bounds=(0, 1), solver="adassp").fit(X, X[:, 0])
    with pytest.raises(Unsupported, match="none here is proven at delta 0"):
        ft.HuberRegressor(1.0, 0.0, target_bounds=(0, 1)).fit(X, X[:, 0])
