"""The adversary that plays adaptive strategies against a menu: its strength, and the bugs that it notices."""

import math

import numpy as np
import pytest
from scipy.stats import binom

import farthing as ft
from farthing.accounting import menu as menus
from farthing.audit import games, methods
from farthing.audit.games import GameBatch, MenuGame, best_strategy
from farthing.ledger.books import Books
from farthing.noise.lattice import SeededStream
from farthing.queries.events import GaussianEvent, LaplaceEvent, PoissonEvent, PureEvent


@pytest.fixture(autouse=True)
def prices_are_found_anew():
    yield
    menus._priced.cache_clear()


def attacked(scale=0.5, seed=1):
    return [v for _, v in methods.attack("menu", scale=scale, confidence=0.999999, stream=SeededStream(seed))]


def test_the_adversary_shows_most_of_what_is_claimed_and_no_more():
    for verdict in attacked():
        assert 0.4 < verdict.eps_lower < verdict.claim.epsilon == 1.0


@pytest.mark.parametrize("batch", [GameBatch(0.5, 3.0), GameBatch(0.1, 1.0), GameBatch(1.0, 2.0)])
@pytest.mark.parametrize("present", [False, True])
def test_losses_have_the_moments_that_the_strategy_reckons_with(batch, present):
    found = batch.play(present, 20_000, 5, SeededStream(4))
    mean, deviation = batch.moments(present, 5)
    assert abs(found.mean() - mean) < 6 * deviation / math.sqrt(20_000)
    assert found.std() == pytest.approx(deviation, rel=0.1)


def test_with_one_entry_the_best_strategy_is_to_buy_all_of_it():
    rule = ft.Menu([PureEvent(0.5)], units=8)(ft.Budget(1.0, 0.1))
    most, heads = rule.most(rule.events[0]), np.arange(rule.most(rule.events[0]) + 1)
    coin = 1 / (1 + math.exp(-0.5))
    p, q = binom.pmf(heads, most, coin), binom.pmf(heads, most, 1 - coin)
    assert best_strategy(rule) == pytest.approx(np.maximum(p - math.e * q, 0).sum(), rel=1e-9)


def test_to_adapt_shows_more_than_any_single_entry():
    """Otherwise the game would not test what the theorem is about."""
    rule = ft.Menu((PureEvent(one) for one in (0.2, 0.5, 1.2)), units=12)(ft.Budget(2.0, 0.05))
    alone = []
    for event in rule.events:
        most = rule.most(event)
        heads, coin = np.arange(most + 1), 1 / (1 + math.exp(-event.epsilon))
        p, q = binom.pmf(heads, most, coin), binom.pmf(heads, most, 1 - coin)
        alone.append(np.maximum(p - math.exp(2.0) * q, 0).sum())
    assert max(alone) < 0.98 * best_strategy(rule)


def test_the_adversary_says_what_it_cannot_play():
    game = MenuGame(ft.Menu([LaplaceEvent(10.0)]), ft.Budget(1.0, 1e-2))
    with pytest.raises(ft.FarthingError, match="Gaussian noise on Poisson batches"):
        game.verdicts(0.1, 0.99, SeededStream(0), lambda: None)


def test_the_real_code_sets_off_no_alarm(tmp_path):
    assert games.games() + games.dominations() + games.blocks(str(tmp_path)) == []


# --- planted bugs


def test_blocks_at_the_price_of_a_fixed_plan_set_off_the_law(monkeypatch):
    monkeypatch.setattr(menus, "_reach", lambda events, steps, prices, units, budget: units)
    menus._priced.cache_clear()
    assert len(games.games()) == 3


@pytest.mark.slow
def test_twice_as_many_units_are_noticed_by_the_adversary(monkeypatch):
    monkeypatch.setattr(menus.MenuFilter, "fits", lambda self, total: self._used(total) <= 2 * self.units)
    assert all(verdict.broken for verdict in attacked(scale=2.0))
    assert games.games()


def test_an_event_charged_as_an_entry_that_does_not_dominate_it_is_noticed(monkeypatch):
    monkeypatch.setattr(menus.MenuFilter, "_covers", lambda self, entry, event: True)
    assert games.dominations()
    assert all(verdict.broken for verdict in attacked())


def test_a_larger_sampling_rate_at_the_price_of_a_smaller_one_sets_off_the_law(monkeypatch):
    real = menus._dominates

    def careless(entry, event):
        if isinstance(entry, menus.pairs.Mixture) and isinstance(event, menus.pairs.Mixture):
            return abs(event.pieces[0].a) <= abs(entry.pieces[0].a)
        return real(entry, event)

    monkeypatch.setattr(menus, "_dominates", careless)
    assert games.dominations()


def test_a_block_that_is_begun_and_not_paid_sets_off_the_law(monkeypatch, tmp_path):
    def used(self, total):
        parts = zip(total, self.steps, self.prices, strict=True)
        return sum(int(count) // steps * price for count, steps, price in parts)

    monkeypatch.setattr(menus.MenuFilter, "_used", used)
    assert games.games()
    assert games.blocks(str(tmp_path))


def test_a_refund_of_used_units_sets_off_the_law(monkeypatch, tmp_path):
    real = Books._refund

    def generous(self, event, held):
        held.left += held.used
        real(self, event, held)

    monkeypatch.setattr(Books, "_refund", generous)
    assert games.blocks(str(tmp_path))


def test_one_entry_is_played_as_well_as_many():
    game = MenuGame(ft.Menu([PoissonEvent(0.5, GaussianEvent(4.0))], units=8), ft.Budget(1.0, 0.01), 20_000)
    for verdict in game.verdicts(1.0, 0.999999, SeededStream(2), lambda: None):
        assert 0.2 < verdict.eps_lower < 1.0
