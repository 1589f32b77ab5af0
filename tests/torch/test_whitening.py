"""Whitened features: one term's bound, the price, the map's algebra."""

import numpy as np
import pytest
import torch

import farthing as ft
from farthing.errors import BudgetSpent, InvalidValue
from farthing.noise.lattice import SeededStream
from farthing.queries.bounds import ClipNorm, ClipOuter
from farthing.queries.events import GaussianEvent
from farthing.queries.query import Rows
from farthing.torch.features import _Mean, _Moments, promised, whitening


def maps(records=2000, seed=0):
    made = torch.Generator().manual_seed(seed)
    mixed = torch.randn(records, 5, 9, generator=made) * torch.tensor([3.0, 1.0, 1.0, 0.5, 0.2])[:, None]
    return mixed + 0.5


def sum_of(contribution, features, bound):
    return contribution.bounded_sum(Rows(features), None, bound)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_one_record_moves_a_sum_by_one_at_most(size):
    """Added, or put in another's place: by the sensitivity that is charged."""
    features, strange = maps(40), maps(25, seed=1) * size
    mean = np.full((5, 9), 0.1)
    cases = (
        (_Mean(), ClipNorm(1.0)),
        (_Moments(mean, 1), ClipOuter(1.0)),
        (_Moments(mean, 2), ClipOuter(1.0)),
    )
    for contribution, bound in cases:
        base = sum_of(contribution, features, bound)
        for row in strange:
            more = sum_of(contribution, torch.cat([features, row[None]]), bound)
            other = sum_of(contribution, torch.cat([row[None], features[1:]]), bound)
            assert np.linalg.norm(more - base) <= 1 + 1e-9
            assert np.linalg.norm(other - base) <= bound.sensitivity(ft.Adjacency.REPLACE_ONE) + 1e-9


@pytest.mark.parametrize("size", [1e-163, 1e-162, 1e-161, 1e-158, 1e-150, 1e-130])
def test_a_map_whose_squares_vanish_moves_a_sum_by_one_at_most(size):
    features = torch.full((1, 10, 100), 1.5 * size, dtype=torch.float64)
    features[0, 0, 0] = 2.3 * size  # the only one whose square is above 0
    assert np.linalg.norm(sum_of(_Mean(), features, ClipNorm(1.0))) <= 1 + 1e-9


@pytest.mark.parametrize("strange", [torch.nan, torch.inf, 0.0])
def test_a_map_that_is_not_finite_counts_as_nothing(strange):
    features = maps(10)
    clean = sum_of(_Mean(), features[1:], ClipNorm(1.0))
    features[0] = strange
    assert sum_of(_Mean(), features, ClipNorm(1.0)) == pytest.approx(clean)


def test_a_sum_is_the_plain_sum():
    features = maps(700)
    rows = features / features.flatten(1).norm(dim=1)[:, None, None] - 0.05
    rows = rows / rows.flatten(1).norm(dim=1).clamp_min(1.0)[:, None, None]
    mean = np.full((5, 9), 0.05)
    wanted = sum(row.double() @ row.double().T for row in rows)
    assert sum_of(_Moments(mean, 1), features, ClipOuter(1.0)) == pytest.approx(wanted.numpy(), rel=1e-4)


def test_three_answers_are_charged_and_no_more():
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
    promised(ledger, noise_multiplier=9.0)
    whitening(ledger, maps(), noise_multiplier=9.0)
    assert ledger.spent.epsilon == pytest.approx(
        ft.epsilon(GaussianEvent(9.0), steps=3, delta=1e-5), rel=1e-6
    )
    with pytest.raises(BudgetSpent):
        whitening(ledger, maps(), noise_multiplier=9.0)


def test_it_pays_beside_training_from_one_ledger():
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
    promised(ledger, noise_multiplier=12.0)
    batches = ft.Poisson(0.1).amplify(ft.Gaussian(3.0))
    times = ledger.promise(batches).times
    white = whitening(ledger, maps(), noise_multiplier=12.0)
    assert times > 10
    assert ledger.guarantee.epsilon <= 1.0
    assert white(maps(4)).shape == (4, 45)


def test_rows_have_norm_one_and_even_variances():
    ledger = ft.Ledger(ft.Budget(50.0, 1e-5), stream=SeededStream(2))
    promised(ledger, noise_multiplier=0.5)
    features = maps()
    rows = whitening(ledger, features, noise_multiplier=0.5, power=1.0, ridge=1e-6)(features)
    assert rows.norm(dim=1).tolist() == pytest.approx([1.0] * len(rows), rel=1e-5)
    before = (features / features.flatten(1).norm(dim=1)[:, None, None]).flatten(1).var(0)
    after = rows.var(0)
    assert after.max() / after.min() < 0.1 * before.max() / before.min()


def test_wrong_shapes_are_refused():
    with pytest.raises(InvalidValue, match="channels"):
        whitening(ft.Ledger(ft.Budget(1.0, 1e-5)), torch.zeros(10, 3), noise_multiplier=1.0)


def test_channels_alone_cost_two_answers():
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
    promised(ledger, noise_multiplier=9.0, places=False)
    whitening(ledger, maps(), noise_multiplier=9.0, places=False)
    assert ledger.spent.epsilon == pytest.approx(
        ft.epsilon(GaussianEvent(9.0), steps=2, delta=1e-5), rel=1e-6
    )


def test_channels_alone_leave_places_where_they_are():
    ledger = ft.Ledger(ft.Budget(50.0, 1e-5), stream=SeededStream(2))
    promised(ledger, noise_multiplier=0.5, places=False)
    features = maps()
    white = whitening(ledger, features, noise_multiplier=0.5, power=1.0, ridge=1e-6, places=False)
    rows = white(features).unflatten(1, (5, 9))
    spread = torch.cov(rows.transpose(0, 1).flatten(1))
    assert torch.allclose(spread / spread.trace() * 5, torch.eye(5), atol=0.15)
    other = features.clone()
    other[:, :, 3:] *= -1  # as long as before
    assert torch.allclose(
        white(other).unflatten(1, (5, 9))[:, :, :3] / rows[:, :, :3],
        (white(other).unflatten(1, (5, 9)) / rows)[:, :1, :1],
        rtol=1e-3,
    )
