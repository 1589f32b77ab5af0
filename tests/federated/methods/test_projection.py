"""The ball that iterates are projected onto."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from farthing.errors import InvalidValue
from farthing.federated.methods.server import L2Projection, lipschitz_of
from farthing.linear.losses import logistic, multinomial, squared
from farthing.linear.problem import Problem

vectors = hnp.arrays(np.float64, 4, elements=st.floats(-1e6, 1e6))


@given(vectors, vectors, st.floats(1e-3, 1e3))
def test_projecting_is_idempotent_stays_inside_and_never_spreads(a, b, radius):
    projection = L2Projection(radius)
    p, q = projection.project(a), projection.project(b)
    assert np.linalg.norm(p) <= radius * (1 + 1e-12)
    assert np.allclose(projection.project(p), p, rtol=1e-12)
    assert np.linalg.norm(p - q) <= np.linalg.norm(a - b) + 1e-9 * (1 + radius)
    if np.linalg.norm(a) <= radius:
        assert np.array_equal(p, a)


def test_a_weight_matrix_is_projected_as_a_whole():
    assert np.linalg.norm(L2Projection(2.0).project(np.ones((3, 3)))) == pytest.approx(2.0)


def test_both_step_rules():
    projection = L2Projection(3.0)
    assert projection.length(4, 25.0, 0.0) == pytest.approx(6.0 / (2 * 5))
    assert projection.length(4, 25.0, 0.5) == pytest.approx(1 / (0.5 * 4))


def test_where_a_run_begins():
    zeros = np.zeros(2)
    assert L2Projection(1.0).start(None, zeros) is zeros
    assert L2Projection(1.0).start([3.0, 4.0], zeros) == pytest.approx([0.6, 0.8])
    for bad in ([1.0], [np.nan, 0.0], [[1.0, 2.0]]):
        with pytest.raises(InvalidValue, match="start"):
            L2Projection(1.0).start(bad, zeros)


@pytest.mark.parametrize("loss", [logistic, multinomial])
def test_a_default_clip_touches_no_gradient(loss):
    problem = Problem(loss, 10, 3, outputs=0 if loss is logistic else 4)
    features = problem.rows()
    assert lipschitz_of(problem, features, None) == loss.slope * features.radius
    assert lipschitz_of(problem, features, 0.3) == 0.3


def test_a_slope_without_bound_needs_a_clip():
    problem = Problem(squared, 10, 3)
    with pytest.raises(InvalidValue, match="lipschitz must be given"):
        lipschitz_of(problem, problem.rows(), None)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf, "1"])
def test_bad_radii(bad):
    with pytest.raises(InvalidValue, match="radius"):
        L2Projection(bad)
