"""Means over uploads: their weights, and how far one liar moves them."""

import math

import numpy as np
import pytest

from farthing.deploy.averages import Averaging, MeanRule, Upload
from farthing.errors import InvalidValue
from farthing.federated.terms import Weights


def uploads(values, expected=10.0, variance=4.0, **options):
    return [Upload(np.atleast_1d(np.asarray(v, dtype=float)), expected, variance, **options) for v in values]


def test_a_weighted_mean_is_the_sum_over_the_divisor():
    some = [Upload(np.array([10.0, 0.0]), 10.0, 4.0), Upload(np.array([0.0, 30.0]), 30.0, 1.0)]
    got = Averaging().combined(some, Weights.PRECISION)
    weights = np.array([10 / 4, 30 / 1])
    np.testing.assert_allclose(got.mean, [weights[0] * 10, weights[1] * 30] / (weights @ [10, 30]))
    assert got.variance == pytest.approx((weights[0] ** 2 * 4 + weights[1] ** 2) / (weights @ [10, 30]) ** 2)


@pytest.mark.parametrize("mean", [MeanRule.TRIMMED, MeanRule.MEDIAN])
@pytest.mark.parametrize("parties", [3, 4, 7, 10])
def test_one_liar_moves_no_coordinate_beyond_the_honest(mean, parties):
    rng = np.random.default_rng(parties)
    for lie in (1e9, -1e9, 0.0, 50.0):
        honest = rng.normal(size=(parties - 1, 20))
        some = uploads([*(10 * honest), np.full(20, lie)])
        got = Averaging(mean=mean).combined(some, Weights.PRECISION).mean
        assert (got >= honest.min(axis=0) - 1e-12).all()
        assert (got <= honest.max(axis=0) + 1e-12).all()


def test_a_trimmed_mean_leaves_out_as_many_as_it_says():
    some = uploads([10.0 * value for value in (0, 1, 2, 3, 4, 5, 6, 7, 8, 900)])
    assert Averaging(mean="trimmed", trim=0.2).combined(some, Weights.PLAIN).mean[0] == 4.5
    assert Averaging(mean="median").combined(some, Weights.PLAIN).mean[0] == 4.5


@pytest.mark.parametrize("mean", list(MeanRule))
@pytest.mark.parametrize("parties", [2, 3, 5, 12])
def test_the_variance_of_a_mean_is_no_less_than_what_its_noise_has(mean, parties):
    """20,000 draws of equal noise: 6 standard errors of a variance are 6 √(2/20000) of it."""
    noise = np.random.default_rng(1).normal(scale=2.0, size=(parties, 20_000))
    got = Averaging(mean=mean).combined(uploads(noise), Weights.PLAIN)
    assert got.mean.var() <= got.variance * (1 + 6 * math.sqrt(2 / 20_000))
    assert got.mean.var() >= 0.5 * got.variance


def test_statements_beyond_the_caps_weigh_no_more():
    """A liar states a million records and no noise; capped, it has the weight of the others."""
    liar = Upload(np.array([1e6]), 1e6, 1e-6, least=4.0)
    some = [*uploads([0.0] * 9), liar]
    assert Averaging().combined(some, Weights.PRECISION).mean[0] == pytest.approx(1.0)
    for weights in Weights:
        capped = Averaging(records=10, epsilon=1.0).combined(some, weights)
        assert capped.mean[0] == pytest.approx(0.1)


def test_one_liar_moves_the_stated_variance_of_a_robust_mean_no_further_than_the_honest():
    honest = uploads([0.0] * 4, variance=4.0)
    for variance, expected in ((1e300, 1.0), (1e-300, 1e15)):
        for mean in (MeanRule.TRIMMED, MeanRule.MEDIAN):
            liar = Upload(np.array([0.0]), expected, variance)
            got = Averaging(mean=mean).combined([*honest, liar], Weights.PRECISION)
            assert got.variance <= 4.0 / 100


def test_as_many_votes_are_left_out_as_the_share_says():
    """0.29 of 100 is 28.999999999999996 in binary."""
    some = uploads([10.0 * value for value in [*range(71), *[900] * 29]])
    assert Averaging(mean="trimmed", trim=0.29).combined(some, Weights.PLAIN).mean[0] == 49.5


def test_late_answers_count_less():
    late = Upload(np.array([10.0]), 10.0, 4.0, stale=3)
    got = Averaging(staleness=3).combined([*uploads([0.0]), late], Weights.PLAIN)
    assert got.mean[0] == pytest.approx(0.5 / 1.5)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"mean": "mode"}, "mean must be one of"),
        ({"trim": 0.5}, "trim"),
        ({"trim": 0.0}, "trim"),
        ({"records": 0}, "records"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"staleness": -1}, "staleness"),
    ],
)
def test_what_averaging_must_be(options, what):
    with pytest.raises(InvalidValue, match=what):
        Averaging(**options)
