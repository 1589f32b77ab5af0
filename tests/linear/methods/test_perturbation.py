"""Objective and output perturbation: the theorem against brute force, the solver, and the charges."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import ndtr
from scipy.stats import norm

import farthing as ft
from farthing.accounting import gaussian
from farthing.accounting.filters import BasicFilter
from farthing.data.tables import Features, Table
from farthing.errors import FarthingError, InvalidValue, Unsupported
from farthing.linear.losses import HuberHinge, Logistic, Squared, huber_hinge, logistic, multinomial
from farthing.linear.methods import perturbation
from farthing.linear.methods.perturbation import Convex, Minimiser, Objective, delta_of, objective, output
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream
from farthing.queries.bounds import ClipNorm
from farthing.queries.events import ApproximateEvent, GaussianEvent

ADD, REPLACE = ft.Adjacency.ADD_REMOVE, ft.Adjacency.REPLACE_ONE


def divergence(loss, one, other, penalty, noise, epsilon):
    """Σ (P - e^ε Q)+ over small cells of w, the larger of both directions, in one dimension and with R = 1.

    b falls as w grows, so a cell has a difference of normal probabilities: no density, no Jacobian.
    """
    reach = (9 * noise + 5) / penalty
    edges = np.concatenate([[-np.inf], np.linspace(-reach, reach, 20001), [np.inf]])

    def cells(rows, labels):
        w = edges[1:-1]
        pull = sum(
            loss.residual(z * w, np.full(len(w), y)) * z for z, y in zip(rows[:, 0], labels, strict=True)
        )
        return -np.diff(np.concatenate([[1.0], ndtr(-(pull + penalty * w) / noise), [0.0]]))

    p, q = cells(*one), cells(*other)
    assert p.sum() == pytest.approx(1)
    return max(np.maximum(a - math.exp(epsilon) * b, 0).sum() for a, b in ((p, q), (q, p)))


def divergence_in_the_plane(loss, one, other, penalty, noise, epsilon):
    """∫ (p - e^ε q)+ on a grid, p being the density of w: that of b times the Jacobian, by differences."""
    axis = np.linspace(-1, 1, 501) * (6 * noise + 3) / penalty
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)
    step = 1e-6

    def density(rows, labels):
        def b(w):
            y = np.broadcast_to(labels, (len(w), len(rows)))
            return -loss.residual((w @ rows.T).ravel(), y.ravel()).reshape(y.shape) @ rows - penalty * w

        columns = [(b(grid + step * e) - b(grid - step * e)) / (2 * step) for e in np.eye(2)]
        determinant = columns[0][:, 0] * columns[1][:, 1] - columns[0][:, 1] * columns[1][:, 0]
        return np.exp(-np.square(b(grid)).sum(axis=1) / 2 / noise**2) / (2 * np.pi * noise**2) * determinant

    cell = (axis[1] - axis[0]) ** 2
    p, q = density(*one), density(*other)
    assert p.sum() * cell == pytest.approx(1, abs=0.01)
    return max(np.maximum(a - math.exp(epsilon) * b, 0).sum() * cell for a, b in ((p, q), (q, p)))


def rows_of(*pairs):
    z, y = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(z, dtype=float).reshape(len(pairs), -1 if pairs else 1), np.array(y, dtype=float)


@settings(max_examples=150, deadline=None)
@given(
    loss=st.sampled_from([logistic, huber_hinge, HuberHinge(0.1)]),
    rest=st.lists(st.tuples(st.floats(-1, 1), st.sampled_from([0.0, 1.0])), max_size=3),
    record=st.tuples(st.floats(0.2, 1), st.sampled_from([0.0, 1.0])),
    noise=st.floats(0.3, 8),
    epsilon=st.floats(0.05, 3),
    slack=st.sampled_from([0.3, 1.0, 1.0, 3.0]),
)
def test_adding_a_record_costs_at_most_the_theorem(loss, rest, record, noise, epsilon, slack):
    penalty = slack / epsilon
    pairs = [((z,), y) for z, y in rest]
    one, other = rows_of(*pairs, ((record[0],), record[1])), rows_of(*pairs)
    true = divergence(loss, one, other, penalty, noise, epsilon)
    assert true <= delta_of(loss, noise, penalty, epsilon, ADD) + 1e-12


@settings(max_examples=150, deadline=None)
@given(
    loss=st.sampled_from([logistic, huber_hinge]),
    rest=st.lists(st.tuples(st.floats(-1, 1), st.sampled_from([0.0, 1.0])), max_size=2),
    records=st.tuples(st.sampled_from([-1.0, 0.5, 1.0]), st.sampled_from([-1.0, 0.7, 1.0])),
    labels=st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 1.0])),
    noise=st.floats(0.3, 8),
    epsilon=st.floats(0.05, 3),
    slack=st.sampled_from([0.3, 1.0, 3.0]),
)
def test_replacing_a_record_costs_at_most_the_theorem(loss, rest, records, labels, noise, epsilon, slack):
    penalty = slack / epsilon
    pairs = [((z,), y) for z, y in rest]
    one, other = (rows_of(*pairs, ((z,), y)) for z, y in zip(records, labels, strict=True))
    true = divergence(loss, one, other, penalty, noise, epsilon)
    assert true <= delta_of(loss, noise, penalty, epsilon, REPLACE) + 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("angle", [0.0, 0.5, 1.5, 3.0])
@pytest.mark.parametrize("loss", [logistic, huber_hinge])
def test_the_theorem_in_two_dimensions(loss, angle):
    one = rows_of(((0.6, 0.8), 1.0), ((1.0, 0.0), 1.0))
    other = rows_of(((0.6, 0.8), 1.0), ((math.cos(angle), math.sin(angle)), 0.0))
    for noise, epsilon in [(1.0, 1.0), (3.0, 0.3), (0.6, 2.0)]:
        penalty = 1 / epsilon
        without = tuple(part[:1] for part in one)
        for a, b, adjacency in [(one, other, REPLACE), (one, without, ADD)]:
            true = divergence_in_the_plane(loss, a, b, penalty, noise, epsilon)
            assert true <= delta_of(loss, noise, penalty, epsilon, adjacency) + 1e-3


def test_the_theorem_is_nearly_attained_by_a_record_that_is_surely_misclassified():
    """Many records pull w to where the residual of the added one is 1: then b moves by all of R."""
    noise, epsilon, penalty = 2.0, 0.5, 2.0
    many = [((1.0,), 1.0)] * 60
    one, other = rows_of(*many, ((1.0,), 0.0)), rows_of(*many)
    true = divergence(logistic, one, other, penalty, noise, epsilon)
    assert 0.8 * delta_of(logistic, noise, penalty, epsilon, ADD) < true


def test_a_smaller_penalty_than_the_theorem_asks_would_break_the_free_jacobian():
    """λ >= R²/ε is needed: far below it one lone record costs more than the Gaussian curve alone."""
    noise, epsilon, penalty = 50.0, 0.2, 0.5
    many, one = [((1.0,), 1.0)], ((1.0,), 0.0)
    true = divergence(logistic, rows_of(*many, one), rows_of(*many), penalty, noise, epsilon)
    assert true > 1e-6 > gaussian.delta(1 / noise, epsilon)
    assert true <= delta_of(logistic, noise, penalty, epsilon, ADD)


def table(n=400, d=3, seed=0, **options):
    x = (np.arange(n * d).reshape(n, d) * 0.618 * (seed + 1)) % 1.0
    return Table(x, (x[:, 0] > x[:, 1]).astype(float), **options)


def behind(records, features, tolerance=1e-9):
    return Objective(features, tolerance).bounded_sum(records, None, Convex(logistic, features.radius))


@pytest.mark.parametrize("loss", [logistic, huber_hinge])
def test_the_minimiser_is_scipys(loss):
    features = Features(3, intercept=0.5, radius=0.9)
    records, linear = table(), np.array([1.0, -2.0, 0.5, 3.0])
    z = np.vstack([block.rows(features) for block in records.blocks(features)])

    def value(w):
        return loss.value(z @ w, records.y).sum() + 1.5 * w @ w + linear @ w

    expected = minimize(value, np.zeros(4), method="BFGS", options={"gtol": 1e-4}).x
    found = behind(records, features).minimise(loss, linear, 3.0)
    assert found == pytest.approx(expected, abs=1e-5)
    gradient = z.T @ loss.residual(z @ found, records.y) + 3 * found + linear
    assert np.linalg.norm(gradient) <= 1e-9


def test_labels_other_than_0_and_1_are_read_as_one_of_them():
    features = Features(3, radius=1.0)
    odd = Table(table().X, np.where(table().y > 0, 40.0, -7.0))
    found, expected = (behind(t, features).minimise(logistic, np.zeros(4), 3.0) for t in (odd, table()))
    assert found == pytest.approx(expected, abs=1e-8)


def test_no_records_at_all_give_the_noise_alone():
    empty = Table(np.zeros((0, 3)), np.zeros(0))
    found = behind(empty, Features(3, radius=1.0)).minimise(logistic, np.ones(4), 2.0)
    assert found == pytest.approx(-0.5 * np.ones(4))


@settings(max_examples=40, deadline=None)
@given(
    place=st.integers(0, 399),
    row=st.lists(st.floats(-5, 5), min_size=3, max_size=3),
    label=st.sampled_from([0.0, 1.0]),
    loss=st.sampled_from([logistic, huber_hinge]),
    penalty=st.floats(0.05, 50),
)
def test_minimisers_of_neighbours_are_as_near_as_output_perturbation_says(place, row, label, loss, penalty):
    features = Features(3, radius=0.8)
    minimiser = Minimiser(loss, features, penalty, 1e-8)
    before, after = table(), table()
    after.X[place], after.y[place] = row, label
    fewer = Table(np.delete(before.X, place, axis=0), np.delete(before.y, place))
    w, replaced, removed = (
        minimiser.bounded_sum(t, None, ClipNorm(minimiser.reach)) for t in (before, after, fewer)
    )
    assert np.linalg.norm(w - removed) <= 0.8 / penalty * (1 + 1e-6)
    assert np.linalg.norm(w - replaced) <= 2 * 0.8 / penalty * (1 + 1e-6)


def door(method, adjacency=ADD, epsilon=1.0, delta=1e-6, stream=None, **options):
    budget = ft.Budget(epsilon, delta, adjacency)
    rule = BasicFilter if method is objective else None
    return ft.Ledger(budget, filter=rule, stream=stream).over(table(**options))


@pytest.mark.parametrize("adjacency", list(ft.Adjacency))
@pytest.mark.parametrize("loss", [logistic, huber_hinge])
@pytest.mark.parametrize("epsilon", [0.05, 1.0, 5.0])
def test_objective_perturbation_charges_what_the_theorem_says_and_no_more_than_the_budget(
    adjacency, loss, epsilon
):
    ledger = door(objective, adjacency, epsilon)
    run = ft.run(objective(ledger, Problem(loss, 400, 3, unit=False)))
    (receipt,) = run.receipts
    assert isinstance(receipt.event, ApproximateEvent)
    assert receipt.event.epsilon == epsilon
    assert 0.95e-6 < receipt.event.delta <= 1e-6
    assert ledger.share <= 1


@pytest.mark.parametrize(("adjacency", "moves"), [(ADD, 1.0), (REPLACE, 2.0)])
def test_output_perturbation_charges_one_gaussian_of_the_whole_budget(adjacency, moves):
    ledger = door(output, adjacency)
    run = ft.run(output(ledger, Problem(logistic, 400, 3, unit=False)))
    (receipt,) = run.receipts
    assert isinstance(receipt.event, GaussianEvent)
    assert gaussian.delta(moves / receipt.event.noise, 1.0) == pytest.approx(1e-6, rel=1e-6)
    assert ledger.spent.epsilon <= 1.0


@pytest.mark.parametrize("method", [objective, output])
def test_fits_end_by_themselves_repeat_under_a_seed_and_learn(method):
    n, runs = 40_000, []
    for _ in range(2):
        ledger = door(method, stream=SeededStream(3), n=n, unit=True)
        steps = list(method(ledger, Problem(logistic, n, 3)))
        assert [step.t for step in steps] == [1]
        runs.append(steps[0].w)
    (u, constant), (again, _) = runs
    assert u.shape == (3,)
    assert np.shape(constant) == ()
    assert (u == again).all()
    records = table(n)
    x = records.X / np.linalg.norm(records.X, axis=1, keepdims=True)
    assert np.mean((x @ u + constant > 0) == records.y) > 0.9


def test_the_noise_of_objective_perturbation_is_that_of_the_linear_term():
    """With no records w = -b/λ plus what the tolerance costs: its spread is the price's."""
    mechanism = perturbation._calibrate(Convex(logistic, 1.5), 4.0, ft.Budget(1.0, 1e-6))
    total = behind(Table(np.zeros((0, 2)), np.zeros(0)), Features(2, radius=1.5))
    stream = SeededStream(0)
    draws = np.array([mechanism.release(total, Convex(logistic, 1.5), stream) for _ in range(700)])
    assert draws.std() == pytest.approx(mechanism.noise_multiplier * 1.5 / (4.0 * 1.5**2), rel=0.06)


@pytest.mark.parametrize("noise", [1.5, 2.0, 6.0])
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("loss", [logistic, huber_hinge])
def test_a_replaced_record_is_charged_for_every_corner_of_its_residuals(loss, noise, epsilon):
    """Each of two residuals is at 0 or at its largest: three corners but the origin, and |Δ| is their sum."""

    def curve(mu, at):  # P(L > ε) - e^ε P'(L > ε) for the Gaussian loss L, from its two tails
        return norm.sf(at / mu - mu / 2) - math.exp(at) * norm.sf(at / mu + mu / 2)

    penalty = 4 / epsilon
    corners = [sum(corner) / noise for corner in itertools.product((0, 1), repeat=2) if any(corner)]
    room = epsilon - math.log1p(loss.curvature / penalty)
    expected = sum(curve(mu, room) for mu in corners)
    if loss is logistic:  # one of the two single corners may meet the Jacobian, the other two corners do not
        free = sum(curve(mu, epsilon) for mu in (2 / noise, 1 / noise)) + curve(
            1 / noise, epsilon - 1 / penalty
        )
        expected = min(expected, free)
    found = delta_of(loss, noise, penalty, epsilon, REPLACE)
    assert found == pytest.approx(min(1.0, expected), rel=1e-9)
    assert found > curve(2 / noise, epsilon) + curve(1 / noise, epsilon)


def test_the_tolerance_of_the_minimiser_is_priced_and_covered_by_noise_around_it():
    bound, budget = Convex(logistic, 1.0), ft.Budget(1.0, 1e-6, REPLACE)
    mechanism = perturbation._calibrate(bound, 9.0, budget)
    event = mechanism.event(bound, REPLACE, False)
    inner = delta_of(logistic, mechanism.noise_multiplier, 9.0, 0.995, REPLACE)
    mu = 1 / mechanism.rest  # twice the tolerance over its noise
    outer = norm.sf(0.005 / mu - mu / 2) - math.exp(0.005) * norm.sf(0.005 / mu + mu / 2)
    assert outer == pytest.approx(1e-8, rel=1e-3)
    assert event.delta == pytest.approx(inner + outer, rel=1e-9)

    class Found:  # a solver that is off by a tolerance of 100
        features, tolerance = Features(2000, intercept=0.0), 100.0

        def minimise(self, loss, linear, penalty):
            return np.zeros(2000)

    released = mechanism.release(Found(), bound, SeededStream(1))
    assert released.std() == pytest.approx(mechanism.rest * 2 * 100.0 / 9.0, rel=0.1)


@pytest.mark.parametrize("method", [objective, output])
def test_what_has_no_proof_is_refused(method):
    for problem in [Problem(multinomial, 400, 3, outputs=3), Problem(Squared(), 400, 3)]:
        with pytest.raises(Unsupported, match="against the rest"):
            list(method(door(method), problem))
    with pytest.raises(InvalidValue, match="penalty"):
        list(method(door(method), Problem(logistic, 400, 3), penalty=-1.0))


def test_a_penalty_too_small_for_the_budget_is_refused():
    with pytest.raises(Unsupported, match="too small"):
        list(objective(door(objective, epsilon=0.1), Problem(huber_hinge, 400, 3), penalty=1e-3))


def test_a_mechanism_without_its_bound_or_on_a_sample_has_no_price():
    mechanism = perturbation._calibrate(Convex(logistic, 1.0), 4.0, ft.Budget(1.0, 1e-6))
    with pytest.raises(Unsupported, match="Convex"):
        mechanism.event(ft.ClipNorm(1.0), ADD, False)
    with pytest.raises(Unsupported, match="all records"):
        ft.Poisson(0.1).amplify(mechanism.event(Convex(logistic, 1.0), ADD, True))
    with pytest.raises(Unsupported, match="L2"):
        Convex(Logistic(), 1.0).norm(1)
    with pytest.raises(Unsupported, match="no price without its loss"):
        mechanism.unit_event()


def test_a_solver_that_cannot_reach_its_tolerance_comes_as_near_as_floats_do():
    near, hopeless = (behind(table(), Features(3, radius=1.0), tolerance=each) for each in (1e-9, 1e-30))
    with pytest.raises(FarthingError, match="not minimised"):
        hopeless.minimise(logistic, np.ones(4), 1.0)
    found = [
        perturbation.minimiser(each, Convex(logistic, 1.0), np.ones(4), 1.0) for each in (near, hopeless)
    ]
    np.testing.assert_allclose(*found, atol=1e-8)


@pytest.mark.parametrize("method", [objective, output])
def test_records_on_which_newton_does_not_arrive_are_learnt_from_all_the_same(method, monkeypatch):
    """Noise on nothing in place of an answer tells that some record is there which Newton stumbles over."""
    monkeypatch.setattr(perturbation, "_NEWTON_STEPS", 1)
    x = np.linspace(-1, 1, 401)[:, None]
    rule = BasicFilter if method is objective else None
    ledger = ft.Ledger(ft.Budget(100.0, 1e-6), filter=rule).over(Table(x, 1.0 * (x[:, 0] > 0)))
    u, _ = ft.run(method(ledger, Problem(huber_hinge, 401, 1, unit=False), penalty=1.0)).w
    assert u[0] > 2


def test_a_bound_that_the_rows_or_the_minimiser_exceed_is_refused():
    noise = perturbation.ObjectiveNoise(2.0, 50.0, 3.0, 1.0)
    with pytest.raises(InvalidValue, match="above"):
        ft.Query(ft.Everyone(), Objective(Features(3, radius=2.0), 1e-9), Convex(logistic, 1.0), noise)
    minimiser = Minimiser(logistic, Features(3, radius=2.0), 4.0, 1e-9)
    with pytest.raises(InvalidValue, match="above"):
        ft.Query(ft.Everyone(), minimiser, ClipNorm(0.5), ft.Gaussian(1.0))


@pytest.mark.parametrize("seed", [61, 526, 1786])
def test_the_hinge_does_not_send_newton_in_circles(seed):
    """Draws at which a step that halved the gradient and raised the value was once taken, again and again."""
    ledger = door(objective, stream=SeededStream(seed))
    assert np.isfinite(ft.run(objective(ledger, Problem(huber_hinge, 400, 3, unit=False))).w[0]).all()
