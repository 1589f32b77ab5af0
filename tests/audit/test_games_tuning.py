"""Laws of tuning: silent on the library as it is, and loud where a bug is planted."""

import numpy as np
import pytest

from farthing.accounting import tuning as prices
from farthing.accounting.tuning import RunCount
from farthing.audit import games, methods
from farthing.ledger import tuning as ledgers
from farthing.noise.lattice import SeededStream
from farthing.noise.streams import Stream


@pytest.fixture(autouse=True)
def fresh():
    yield
    for cached in (prices.selection, prices._profile, prices._epsilon, prices.largest_mu, prices._totals):
        cached.cache_clear()


def test_the_library_as_it_is_gives_no_cause_for_complaint():
    assert games.selections() == games.gaussian_selections() == []
    assert games.runs(Stream()) == []


@pytest.mark.slow
def test_a_fixed_number_of_runs_is_noticed(monkeypatch):
    monkeypatch.setattr(RunCount, "draw", lambda self, stream: 10)
    assert "another distribution" in games.runs(SeededStream(0))[0]


@pytest.mark.slow
def test_the_price_of_one_run_is_noticed(monkeypatch):
    real = prices.largest_mu
    monkeypatch.setattr(prices, "largest_mu", lambda budget, runs: budget.mu)
    monkeypatch.setattr(ledgers, "_paid", lambda ledger, event: ledgers.Receipt(0, "", event))
    assert any("costs more" in told for told in games.runs(SeededStream(0)))
    assert real is not prices.largest_mu


@pytest.mark.slow
def test_a_run_with_more_than_was_paid_for_is_noticed(monkeypatch):
    real = ledgers._rule
    monkeypatch.setattr(
        ledgers, "_rule", lambda run, delta, terms: real(type(run)(run.noise / 1.5), delta, terms)
    )
    assert any("1.5" in told for told in games.runs(SeededStream(0)))


@pytest.mark.slow
def test_a_price_that_forgets_how_scores_move_is_noticed(monkeypatch):
    real = prices.Selection.of.__func__

    def careless(cls, profile, runs):
        found = real(cls, profile, runs)
        return cls(found.points, found.means, found.high, found.high)

    monkeypatch.setattr(prices.Selection, "of", classmethod(careless))
    prices.selection.cache_clear()
    assert games.selections()


@pytest.mark.slow
def test_a_price_that_forgets_the_number_of_runs_is_noticed(monkeypatch):
    real = prices.Selection.delta
    monkeypatch.setattr(prices.Selection, "delta", lambda self, epsilon: real(self, epsilon) / 2.5)
    assert games.selections()


def test_a_price_of_gaussian_runs_that_is_too_low_is_noticed(monkeypatch):
    real = prices.Selection.delta
    monkeypatch.setattr(prices.Selection, "delta", lambda self, epsilon: real(self, epsilon) / 2)
    assert games.gaussian_selections()


@pytest.mark.slow
def test_another_distribution_than_the_one_that_is_priced_is_noticed(monkeypatch):
    fixed = np.append(np.zeros(10), 1.0)
    monkeypatch.setattr(games, "distribution", lambda runs: fixed)
    assert games.selections()


def test_a_score_that_was_looked_up_in_the_records_tells_everything():
    """The better candidate is there or not as a record is: no price covers that."""

    def released(record: bool) -> int:
        def run(candidate, own):
            return candidate, float(candidate == record)

        return ledgers.best_of(run, [0, 1], ledgers.Ledger(games._BUDGET), runs=30.0).candidate

    told = [[released(record) for _ in range(40)] for record in (False, True)]
    assert np.mean(told[1]) - np.mean(told[0]) > 0.5


def _attacked() -> list:
    return [v for _, v in methods.attack("tuning", scale=1.0, confidence=0.999999, stream=SeededStream(3))]


def test_an_order_of_scores_that_an_adversary_chose_does_not_refute_the_claim():
    (verdict,) = _attacked()
    assert not verdict.broken
    assert verdict.eps_lower > 1.2  # of 2


def test_the_attack_refutes_the_price_of_one_run(monkeypatch):
    monkeypatch.setattr(prices, "largest_mu", lambda budget, runs: budget.mu)
    (verdict,) = _attacked()
    assert verdict.broken
