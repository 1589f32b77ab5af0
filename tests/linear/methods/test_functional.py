"""The functional mechanism: the paper's sensitivities and noise. Laws are in test_regression.py."""

import itertools

import numpy as np
import pytest

import farthing as ft
from farthing.accounting.filters import BasicFilter
from farthing.data.tables import Features, Table
from farthing.linear.losses import squared
from farthing.linear.methods import functional as module
from farthing.linear.methods.functional import Coefficients, functional
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream
from farthing.queries.events import LaplaceEvent

RNG = np.random.default_rng(0)
X = RNG.uniform(size=(3000, 2))
Y = 0.2 + X @ [0.3, 0.4]


class Spy:
    """A door that keeps the query."""

    def __init__(self, ledger):
        self.ledger, self.budget, self.affords = ledger, ledger.budget, ledger.affords
        self.share, self.filter = ledger.share, ledger.filter

    def ask(self, query, w=None):
        self.query = query
        return self.ledger.ask(query, w)


def asked(adjacency="replace-one", width=2, unit=False, quadratic_share=None, **options):
    options["quadratic_share"] = quadratic_share
    X = RNG.uniform(size=(50, width))
    spy = Spy(ft.Ledger(ft.Budget(1.5, 0.0, adjacency)).over(Table(X, X[:, 0], unit=unit)))
    (step,) = functional(spy, Problem(squared, 50, width, unit=unit), **options)
    return spy.query, step.receipts[0].event, spy.ledger


@pytest.mark.parametrize("width", [1, 2, 7])
def test_noise_is_the_papers_under_replace_one(width):
    """Laplace of scale Δ₁/ε₁ = Δ₂/ε₂ = (2 (d+1)² + 4 (d+1)) / ε."""
    query, event, ledger = asked(width=width)
    size = width + 1
    scale = query.mechanism.noise_multiplier * query.bound.norm(1)
    assert scale == pytest.approx((2 * size**2 + 4 * size) / 1.5)
    assert isinstance(event, LaplaceEvent)
    assert ledger.share == pytest.approx(1.0)
    assert ledger.guarantee.delta == 0.0


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("triangle", [False, True])
def test_the_two_budgets_of_the_text_can_be_set(share, triangle):
    """Laplace of scale Δ₁/ε₁ on a and Δ₂/ε₂ on b; together they cost ε, in the corners of the cube too."""
    width, size = 3, 4
    query, _, ledger = asked(width=width, quadratic_share=share, triangle=triangle)
    scale, louder = query.mechanism.noise_multiplier * query.bound.norm(1), query.contribution.louder
    first = size * (size + 1) if triangle else 2 * size**2  # Δ₁
    assert scale == pytest.approx(first / (share * 1.5))
    assert scale / louder == pytest.approx(4 * size / ((1 - share) * 1.5))
    assert ledger.share == pytest.approx(1.0)
    corner = Table(np.ones((1, width)), np.ones(1))
    term = query.contribution.bounded_sum(corner, None, query.bound)
    assert np.abs(term).sum() / scale == pytest.approx(1.5 / 2)  # half of ε, as one record comes or goes


def test_a_record_that_comes_or_goes_costs_half():
    replaced, added = (
        asked(adjacency)[0].mechanism.noise_multiplier for adjacency in ("replace-one", "add-remove")
    )
    assert replaced == pytest.approx(2 * added)


@pytest.mark.parametrize("triangle", [False, True])
def test_the_sensitivity_is_reached_in_the_corners_of_the_cube(triangle):
    """All pairs of records in {0, 1}^d x {0, 1}. One alone reaches the bound.

    Two of them are half as far apart as the paper allows for: not all products can change their sign at once.
    """
    width = 3
    query, _, _ = asked(width=width, triangle=triangle)
    corners = [(list(x), y) for *x, y in itertools.product([0.0, 1.0], repeat=width + 1)]
    terms = [
        query.contribution.bounded_sum(Table(np.array([x]), np.array([y])), None, query.bound)
        for x, y in corners
    ]
    alone = max(np.abs(term).sum() for term in terms)
    apart = max(np.abs(a - b).sum() for a in terms for b in terms)
    assert alone == pytest.approx(query.bound.sensitivity(ft.Adjacency.ADD_REMOVE, 1))
    assert apart == pytest.approx(query.bound.sensitivity(ft.Adjacency.REPLACE_ONE, 1) / 2)


def test_unit_rows_are_bounded_by_their_l1_norm():
    query, _, _ = asked(width=9, unit=True)
    assert query.bound.clip == pytest.approx((3 + 1) ** 2 + 2 * (3 + 1))
    even = Table(np.full((1, 9), 5.0), np.ones(1), unit=True)
    total = query.contribution.bounded_sum(even, None, query.bound)
    assert np.abs(total).sum() == pytest.approx(query.bound.clip)


def test_the_coefficients_are_those_of_the_loss():
    features = Features(2, 0.5, 2.0)
    z, t = np.column_stack([2 * X - 1, np.ones(3000)]), 2 * Y - 1
    a, b = z.T @ z, -2 * z.T @ t
    whole = Coefficients(features, 3.0, 0.5, 2.0).bounded_sum(Table(X, Y), None, ft.ClipNorm(15, order=1))
    np.testing.assert_allclose(whole, [*a.ravel(), *b])
    upper = Coefficients(features, 3.0, 0.5, 2.0, True)
    entries = upper.bounded_sum(Table(X, Y), None, ft.ClipNorm(12, order=1))
    np.testing.assert_allclose(module._mirrored(entries[:-3], 3), a)
    theta = RNG.normal(size=3)
    loss = theta @ a @ theta + b @ theta + t @ t
    assert loss == pytest.approx(np.square(t - z @ theta).sum())


@pytest.mark.parametrize(
    "options",
    [{"repair": False}, {"triangle": True}, {"repair": False, "triangle": True}, {"quadratic_share": 0.3}],
)
def test_every_variant_finds_the_minimum_with_a_large_budget(options):
    ledger = ft.Ledger(ft.Budget(1e7, 0.0))
    u, constant = ft.run(
        functional(ledger.over(Table(X, Y)), Problem(squared, 3000, 2, unit=False), **options)
    ).w
    np.testing.assert_allclose(u, [0.3, 0.4], atol=1e-4)
    assert constant == pytest.approx(0.2, abs=1e-4)


def test_repair_changes_what_is_made_of_the_noise_not_the_noise():
    """At a small budget the noisy quadratic has no minimum; repaired, it has a small one."""
    sizes = {}
    for repair in (False, True):
        models = []
        for seed in range(30):
            ledger = ft.Ledger(ft.Budget(0.01, 0.0), stream=SeededStream(seed))
            door = ledger.over(Table(X[:300], Y[:300]))
            models.append(ft.run(functional(door, Problem(squared, 300, 2, unit=False), repair=repair)))
        sizes[repair] = [np.linalg.norm(model.w[0]) for model in models]
        events = {model.receipts[0].event for model in models}
        assert len(events) == 1
    assert max(sizes[True]) < 10 < max(sizes[False])


def test_it_is_pure_on_a_ledger_with_a_delta_too():
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6), filter=BasicFilter)
    run = ft.run(functional(ledger.over(Table(X, Y)), Problem(squared, 3000, 2, unit=False)))
    assert ledger.filter.cost(run.receipts[0].event)[1] == 0.0
