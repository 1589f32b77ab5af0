"""No contribution gets past its bound, and sums move no further than the sensitivity."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from farthing.budget import Adjacency
from farthing.errors import InvalidValue, Unsupported
from farthing.noise.lattice import SeededStream
from farthing.queries.bounds import LARGEST, SMALLEST, ClipCoordinates, ClipNorm, ClipOuter, ClipValue
from farthing.queries.mechanisms import Gaussian, Laplace

wild = hnp.arrays(np.float64, (4, 3), elements=st.floats(allow_nan=True, allow_infinity=True, width=64))
clips = st.floats(1e-100, 1e100)


@given(wild, clips, st.sampled_from([1, 2]))
def test_clip_norm_holds_for_any_float(rows, clip, order):
    clipped = ClipNorm(clip, order=order).apply(rows)
    assert np.isfinite(clipped).all()
    # exact rational norms would be slower; scaling by clip keeps squares in range
    assert (np.linalg.norm(clipped / clip, ord=order, axis=1) <= 1 + 4e-15).all()


@given(wild, st.floats(1e-3, 1e3))
def test_rows_that_fit_are_untouched_and_directions_kept(rows, clip):
    rows = np.nan_to_num(rows, nan=0.0, posinf=1.0, neginf=-1.0)
    rows = np.clip(rows, -1e150, 1e150)
    clipped = ClipNorm(clip).apply(rows)
    norms = np.linalg.norm(rows, axis=1)
    fits = norms <= clip * (1 - 1e-12)
    np.testing.assert_array_equal(clipped[fits], rows[fits])
    large = norms > clip * (1 + 1e-12)
    np.testing.assert_allclose(
        clipped[large] / clip, rows[large] / norms[large, None], rtol=1e-12, atol=1e-300
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_counts_as_zero(bad):
    rows = np.array([[bad, 0.5], [0.5, 0.0]])
    for bound in (ClipNorm(1.0), ClipCoordinates(np.ones(2)), ClipValue(-1, 1)):
        np.testing.assert_array_equal(bound.apply(rows), [[0.0, 0.0], [0.5, 0.0]])
    np.testing.assert_array_equal(ClipNorm(1.0).factors([bad, 0.5, 2.0, 0.0])[[0, 1, 3]], [0.0, 1.0, 1.0])


@given(hnp.arrays(np.float64, 5, elements=st.floats(0, 1e300)), st.floats(1e-10, 1e10))
def test_factors_bring_norms_within_the_clip(norms, clip):
    assert (norms * ClipNorm(clip).factors(norms) <= clip * (1 + 4e-16)).all()


def test_an_ellipsoid_is_clipped_in_its_own_scale():
    scale = np.array([1.0, 10.0])
    clipped = ClipNorm(1.0, scale).apply(np.array([[0.0, 100.0], [3.0, 40.0]]))
    np.testing.assert_allclose(clipped, [[0.0, 10.0], [0.6, 8.0]])


bounds = [
    (ClipNorm(2.0), 2),
    (ClipNorm(2.0, order=1), 1),
    (ClipNorm(2.0, np.array([1.0, 2.0, 3.0])), 2),
    (ClipCoordinates(np.array([1.0, 2.0, 3.0])), 2),
    (ClipCoordinates(np.array([1.0, 2.0, 3.0])), 1),
]


@pytest.mark.parametrize(("bound", "order"), bounds)
@pytest.mark.parametrize("adjacency", list(Adjacency))
@given(rows=wild)
def test_sums_move_no_further_than_the_sensitivity(bound, order, adjacency, rows):
    terms = bound.apply(rows) / bound.scale
    moved = terms[0] - terms[1] if adjacency is Adjacency.REPLACE_ONE else terms[0]
    assert np.linalg.norm(moved, ord=order) <= bound.sensitivity(adjacency, order) * (1 + 1e-14)
    assert np.linalg.norm(moved, ord=order) <= 2 * bound.norm(order) * (1 + 1e-14)


@given(st.floats(-5, 5), st.floats(0.1, 5), st.floats(), st.floats())
def test_a_clipped_value_moves_by_its_range_when_replaced(low, width, x, y):
    bound = ClipValue(low, low + width)
    first, second = bound.apply([[x]])[0, 0], bound.apply([[y]])[0, 0]
    assert abs(first) <= bound.sensitivity(Adjacency.ADD_REMOVE)
    assert abs(first - second) <= bound.sensitivity(Adjacency.REPLACE_ONE) * (1 + 1e-15)


@given(wild)
def test_outer_products_move_by_root_two(rows):
    bound = ClipOuter(1.5)
    x, y = bound.rows.apply(rows)[:2]
    assert not hasattr(bound, "apply")  # of what: rows, or their products?
    assert np.linalg.norm(np.outer(x, x)) <= bound.sensitivity(Adjacency.ADD_REMOVE) * (1 + 1e-14)
    moved = np.linalg.norm(np.outer(x, x) - np.outer(y, y))
    assert moved <= bound.sensitivity(Adjacency.REPLACE_ONE) * (1 + 1e-14)


def test_laplace_wants_an_l1_bound():
    with pytest.raises(Unsupported, match="order=1"):
        ClipNorm(1.0).sensitivity(Adjacency.ADD_REMOVE, 1)
    assert ClipNorm(1.0, order=1).sensitivity(Adjacency.REPLACE_ONE, 2) == 2.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: ClipNorm(0),
        lambda: ClipNorm(np.nan),
        lambda: ClipNorm(1.0, np.array([1.0, 0.0])),
        lambda: ClipNorm(1.0, order=3),
        lambda: ClipCoordinates(np.array([])),
        lambda: ClipCoordinates(np.array([1.0, np.inf])),
        lambda: ClipValue(1.0, 1.0),
        lambda: ClipValue(0.0, np.inf),
        lambda: ClipOuter(-1.0),
        lambda: ClipNorm(1.0).apply(np.zeros(3)),
    ],
)
def test_impossible_bounds_cannot_be_made(make):
    with pytest.raises(InvalidValue):
        make()


class Tensorlike(np.ndarray):
    """What of torch's tensors a bound asks for."""

    def detach(self):
        return self

    def clone(self):
        return self.copy()

    def aminmax(self):
        return self.min(), self.max()


def test_a_tensor_stays_one_and_a_copy_of_its_own():
    scale = np.array([1.0, 2.0]).view(Tensorlike)
    bounds = ClipNorm(3.0, scale), ClipCoordinates(scale)
    scale[0] = -1.0
    for bound in bounds:
        assert isinstance(bound.scale, Tensorlike)
        assert bound.scale.tolist() == [1.0, 2.0]
    assert bounds[1].norm() == pytest.approx(2**0.5)
    for make in (lambda: ClipNorm(3.0, scale), lambda: ClipCoordinates(scale)):
        with pytest.raises(InvalidValue, match="everywhere"):
            make()


@pytest.mark.parametrize("scale", [1.0, np.float64(2.0), np.array(3.0)])
def test_a_box_names_every_coordinate(scale):
    with pytest.raises(InvalidValue, match="per coordinate"):
        ClipCoordinates(scale)


@pytest.mark.parametrize("clip", [1e307, 1e101, 1e-101, 7e-318, 5e-324])
def test_bounds_with_which_sums_overflow_or_noise_loses_its_bits_are_refused(clip):
    for make in (
        lambda: ClipNorm(clip),
        lambda: ClipNorm(1.0, clip),
        lambda: ClipNorm(1.0, np.array([1.0, clip])),
        lambda: ClipCoordinates(np.array([1.0, clip])),
        lambda: ClipValue(0.0, clip),
        lambda: ClipOuter(clip),
        lambda: ClipOuter(clip**0.5),
        lambda: Gaussian(clip),
        lambda: Laplace(clip),
    ):
        with pytest.raises(InvalidValue, match="1e-100 and 1e"):
            make()


@pytest.mark.parametrize("clip", [SMALLEST, LARGEST])
@pytest.mark.parametrize("scale", [SMALLEST, 1.0, LARGEST])
@pytest.mark.parametrize("noise_multiplier", [SMALLEST, 1.0])
def test_noise_and_sums_are_right_at_the_ends_of_what_bounds_may_be(clip, scale, noise_multiplier):
    bound = ClipNorm(clip, scale)
    assert np.isfinite(2.0**30 * bound.apply(np.full((1, 1), 1e300))).all()
    released = Gaussian(noise_multiplier).release(np.zeros(4000), bound, SeededStream(1))
    assert 0.9 < (released / scale / clip / noise_multiplier).std() < 1.1


@pytest.mark.parametrize(
    ("typed", "plain"),
    [
        (ClipOuter(np.uint8(20)), ClipOuter(20.0)),  # 20² is 144 in uint8
        (ClipOuter(np.int32(70_000)), ClipOuter(70_000.0)),
        (ClipValue(np.int8(-128), np.int8(1)), ClipValue(-128.0, 1.0)),  # |-128| is -128 in int8
        (ClipValue(np.int8(-100), np.int8(100)), ClipValue(-100.0, 100.0)),  # their difference is -56
        (ClipNorm(np.float16(0.0898)), ClipNorm(float(np.float16(0.0898)))),
    ],
)
@pytest.mark.parametrize("adjacency", Adjacency)
def test_the_type_of_a_bound_changes_neither_its_price_nor_its_noise(typed, plain, adjacency):
    assert typed.norm() == plain.norm()
    assert typed.sensitivity(adjacency) == plain.sensitivity(adjacency)
    for noise in (1.0, np.float16(1.0), np.float32(1.0)):
        assert Gaussian(noise).grid(typed, 1) == Gaussian(1.0).grid(plain, 1)
        assert type(Gaussian(noise).noise_multiplier) is float


def test_bounds_of_the_same_type_are_compared_as_numbers():
    with pytest.raises(InvalidValue, match="high must be above"):
        ClipValue(np.uint8(3), np.uint8(3))
