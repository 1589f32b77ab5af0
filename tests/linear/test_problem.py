"""Probabilities from weights that were learnt from shrunk rows and clipped gradients."""

import numpy as np
import pytest
from scipy.optimize import brentq, minimize
from scipy.special import expit, softmax

from farthing.data.tables import Features, Table
from farthing.errors import Unsupported
from farthing.linear.losses import LinearGradient, huber_hinge, logistic, multinomial
from farthing.linear.problem import Problem
from farthing.queries.bounds import ClipNorm


@pytest.mark.parametrize("clip", [0.1, 0.4, 0.7, 2.0])
@pytest.mark.parametrize("rate", [0.05, 0.4, 0.9])
def test_the_rate_of_a_label_comes_back_however_hard_gradients_are_clipped(clip, rate):
    """A thousand equal rows: the constant at which their clipped gradients sum to nothing, then back."""
    X, y = np.zeros((1000, 1)), (np.arange(1000) < 1000 * rate) * 1.0
    problem = Problem(logistic, 1000, 1, unit=False)
    gradient = LinearGradient(logistic, problem.rows())

    def slope(constant):
        return gradient.bounded_sum(Table(X, y), np.array([0.0, constant]), ClipNorm(clip))[1]

    found = brentq(slope, -40, 40)
    said = problem.probabilities((np.zeros(1), np.array(found)), X[:2], clip_norm=clip)
    assert said == pytest.approx([rate, rate], abs=1e-6)
    if clip < min(rate, 1 - rate):
        assert abs(expit(found) - rate) > 1e-3  # so that there is something to undo


@pytest.mark.parametrize("clip", [0.3, 0.8])
def test_and_those_of_several_labels(clip):
    rates = np.array([0.6, 0.3, 0.1])
    y = np.repeat([0, 1, 2], (1000 * rates).astype(int))
    problem = Problem(multinomial, 1000, 1, outputs=3, unit=False)
    gradient, table = LinearGradient(multinomial, problem.rows()), Table(np.zeros((1000, 1)), y)

    def steepness(constants):
        w = np.stack([np.zeros(3), constants])
        return np.square(gradient.bounded_sum(table, w, ClipNorm(clip))[1] / 1000).sum()

    found = minimize(steepness, np.log(rates), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-20})
    said = problem.probabilities((np.zeros((1, 3)), found.x), np.zeros((1, 1)), clip_norm=clip)
    assert said[0] == pytest.approx(rates, abs=1e-3)
    assert np.abs(softmax(found.x) - rates).max() > 0.01


def test_margins_are_those_of_the_rows_that_were_learnt_from():
    X = np.random.default_rng(0).uniform(size=(20, 3))
    w = np.array([1.0, -2.0, 0.5]), np.array(0.3)
    shrunk = Problem(logistic, 20, 3, unit=False)
    norms = np.sqrt(1 + np.square(X).sum(axis=1))
    assert shrunk.probabilities(w, X) == pytest.approx(expit((X @ w[0] + 0.3) / norms))
    assert shrunk.probabilities(w, X, features=Features(3)) == pytest.approx(expit(X @ w[0] + 0.3))
    lengths = np.linalg.norm(X, axis=1)
    unit = Problem(logistic, 20, 3)
    assert unit.probabilities(w, X) == pytest.approx(expit(X @ w[0] / lengths + 0.3))
    assert unit.probabilities(w, X[:0]).shape == (0,)


def test_labels_stay_what_they_were():
    X = np.random.default_rng(1).uniform(size=(200, 2))
    problem, w = Problem(logistic, 200, 2, unit=False), (np.array([9.0, -9.0]), np.array(0.1))
    for clip in (0.05, 0.4, 1.0):
        said = problem.probabilities(w, X, clip_norm=clip)
        assert ((said > 0.5) == (X @ w[0] + 0.1 > 0))[np.abs(said - 0.5) > 1e-9].all()


def test_a_hinge_has_none():
    with pytest.raises(Unsupported, match="HuberHinge gives no probabilities"):
        Problem(huber_hinge, 5, 2).probabilities((np.zeros(2), np.zeros(())), np.zeros((1, 2)))
