"""A search that ends when its budget does: trials while they fit, and a last fit from what was kept."""

import numpy as np
import pytest

import farthing as ft
from farthing.accounting.filters import BasicFilter, RdpFilter
from farthing.linear.searching import search

RNG = np.random.default_rng(1)
X = RNG.uniform(size=(3000, 2))
Y = (X[:, 0] > X[:, 1]).astype(int)
GOOD, BAD = {"bounds": (0, 1)}, {"bounds": (-1000, 1000)}


def _ledger(**options) -> ft.Ledger:
    return ft.Ledger(ft.Budget(3.0, 1e-5), **options)


def test_it_goes_on_while_trials_fit_and_fits_the_best_with_what_was_kept():
    ledger = _ledger()
    found = search(ft.LogisticRegression(), [BAD, GOOD] * 50, X, Y, ledger, 0.8, 1e-5)
    mu = ft.Budget(0.8, 1e-5).mu
    assert len(found.trials) == int(0.5 * ledger.filter.mu**2 / mu**2)
    assert found.candidate == GOOD
    assert found.model.score(X, Y) > 0.8
    assert ledger.share == pytest.approx(1.0)
    assert found.privacy.epsilon == 3.0
    assert "number of records" in found.privacy.note


def test_the_next_candidate_and_the_end_may_follow_from_the_scores():
    def following(trials):
        return None if len(trials) == 2 else (GOOD, BAD)[len(trials)]

    ledger = _ledger()
    found = search(ft.LogisticRegression(), following, X, Y, ledger, 0.5, 1e-5, keep=0.1)
    assert [trial.candidate for trial in found.trials] == [GOOD, BAD]
    assert found.trials[0].score > found.trials[1].score
    assert ledger.share == pytest.approx(1.0)  # the last fit takes what the trials left


def test_basic_composition_pays_for_it_as_well():
    ledger = _ledger(filter=BasicFilter)
    found = search(ft.LogisticRegression(), [GOOD] * 50, X, Y, ledger, 0.5, 1e-6)
    assert len(found.trials) == 3
    assert ledger.share == pytest.approx(1.0)


def test_where_not_one_trial_fits_nothing_is_charged():
    ledger = _ledger()
    with pytest.raises(ft.BudgetSpent, match="not one trial"):
        search(ft.LogisticRegression(), [GOOD], X, Y, ledger, 2.9, 1e-5)
    assert ledger.share == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"candidates": [{"depth": 1}]}, "depth"),
        ({"candidates": 3}, "candidates"),
        ({"keep": 1.0}, "keep"),
        ({"delta": 0.0}, "delta"),
        ({"y": Y[:3]}, "targets"),
        ({"ledger": ft.Ledger(ft.Budget(1.0, 1e-5), filter=RdpFilter)}, "rdp"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_charged(options, said):
    ledger = _ledger()
    given = {"candidates": [GOOD], "X": X, "y": Y, "ledger": ledger, "epsilon": 0.5, "delta": 1e-5}
    with pytest.raises(ft.FarthingError, match=said):
        search(ft.LogisticRegression(), **{**given, **options})
    assert ledger.share == 0


@pytest.mark.parametrize("candidate", [{"solver": "nonsense"}, {"bounds": (1, 0)}, {"depth": 3}])
def test_a_candidate_that_is_refused_costs_nothing(candidate):
    ledger = ft.Ledger(ft.Budget(2.0, 1e-5))
    with pytest.raises(ft.InvalidValue):
        search(ft.LogisticRegression(), [candidate], np.zeros((50, 2)), np.zeros(50), ledger, 0.3, 1e-6)
    assert ledger.share == 0
