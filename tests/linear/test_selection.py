"""Folds, scores and choices for searches: what they cost, what they tell, and what they must not."""

import math

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import KFold, StratifiedKFold

import farthing as ft
from farthing.accounting.filters import BasicFilter, GdpFilter, RdpFilter, ZcdpFilter
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.linear import selection
from farthing.linear.budget_schedule import choice_epsilon
from farthing.linear.selection import _ONE, Folds, Held, PrivateScore, _Values, choose, equal_part
from farthing.noise.lattice import SeededStream

BUDGET = ft.Budget(1.0, 1e-5)
X = np.arange(200.0)[:, None]
Y = (np.arange(200) % 4 == 0).astype(int)


class Says:
    """A model that answers as told; ``seen`` notes what was charged when it was asked."""

    def __init__(self, answers, ledger=None):
        self.answers, self.ledger, self.seen = answers, ledger, []

    def predict(self, X):
        if self.ledger is not None:
            self.seen.append(self.ledger.share)
        return self.answers[X[:, 0].astype(int)]


NO, YES = Says(np.zeros(200, int)), Says(np.ones(200, int))


@pytest.mark.parametrize("filter", [GdpFilter, ZcdpFilter, BasicFilter])
@pytest.mark.parametrize("times", [1, 2, 7, 13])
@pytest.mark.parametrize("used", [False, True])
def test_so_many_equal_parts_fit_and_no_more(filter, times, used):
    ledger = ft.Ledger(BUDGET, filter=filter)
    if used:
        ledger.allot(0.3, 1e-6)
    part = equal_part(ledger, times)
    for _ in range(times):
        ledger.allot(part.epsilon, part.delta)
    assert ledger.share == pytest.approx(1.0, abs=1e-6)
    with pytest.raises(BudgetSpent):
        ledger.allot(part.epsilon, part.delta)


def test_a_filter_without_equal_parts_says_so():
    with pytest.raises(Unsupported, match="rdp"):
        equal_part(ft.Ledger(BUDGET, filter=RdpFilter), 3)


class TestScore:
    @pytest.mark.parametrize("adjacency", ["add-remove", "replace-one", "zero-out"])
    def test_right_answers_with_the_noise_of_its_part(self, adjacency):
        """A count of right answers moves by 1 under every adjacency: deviation 1/μ of it, over the rows."""
        part = ft.Budget(0.1, 1e-6, adjacency)
        scores = []
        for seed in range(60):
            ledger = ft.Ledger(ft.Budget(1.0, 1e-5, adjacency), stream=SeededStream(seed))
            scores.append(PrivateScore(ledger, part.epsilon, part.delta, records=200)(NO, X, Y))
        deviation = 1 / (part.mu * 200)
        assert abs(np.mean(scores) - 0.75) < 4 * deviation / math.sqrt(60)
        assert np.std(scores) == pytest.approx(deviation, rel=4 / math.sqrt(120))

    @pytest.mark.parametrize("delta", [0.0, 1e-5])
    def test_under_basic_composition_the_noise_is_laplaces(self, delta):
        """Which is the smaller one there, whatever the δ."""
        scores = []
        for seed in range(150):
            ledger = ft.Ledger(ft.Budget(1.0, delta), filter=BasicFilter, stream=SeededStream(seed))
            scores.append(PrivateScore(ledger, 0.5, 0.0, records=200)(NO, X, Y))
            assert ledger.share == pytest.approx(0.5)
        deviation = math.sqrt(2) / (0.5 * 200)
        assert abs(np.mean(scores) - 0.75) < 4 * deviation / math.sqrt(150)
        assert np.std(scores) == pytest.approx(deviation, rel=0.3)

    @pytest.mark.parametrize("filter", [GdpFilter, ZcdpFilter, BasicFilter])
    def test_each_is_charged_before_the_rows_are_read_and_the_last_is_refused(self, filter):
        ledger = ft.Ledger(BUDGET, filter=filter)
        part = equal_part(ledger, 4)
        model, score = Says(Y, ledger), PrivateScore(ledger, part.epsilon, part.delta, records=200)
        for _ in range(4):
            score(model, X, Y)
        assert sorted(set(model.seen)) == pytest.approx([0.25, 0.5, 0.75, 1.0])
        with pytest.raises(BudgetSpent):
            score(model, X, Y)
        assert len(set(model.seen)) == 4

    def test_a_record_counts_for_one_at_most_and_nan_for_nothing(self):
        def wild(true, predicted):
            return np.where(np.arange(len(true)) < 50, np.nan, np.where(true == predicted, 1e9, -1e9))

        ledger = ft.Ledger(ft.Budget(1e4, 1e-5))
        expected = (Y == 0)[50:].sum() / 200
        assert PrivateScore(ledger, 1e3, 1e-6, value=wild, records=200)(NO, X, Y) == pytest.approx(
            expected, abs=0.01
        )

    def test_a_declared_number_of_records_divides(self):
        ledger = ft.Ledger(ft.Budget(1e4, 1e-5))
        assert PrivateScore(ledger, 1e3, 1e-6, records=400)(NO, X, Y) == pytest.approx(0.375, abs=0.01)

    def test_the_number_of_rows_is_not_told(self):
        """All are right: divided by their own number, three records would score as four do."""
        score = PrivateScore(ft.Ledger(ft.Budget(1e4, 1e-5)), 1e3, 1e-6, records=4)
        found = [score(Says(0 * Y[:n]), X[:n], 0 * Y[:n]) for n in (0, 3, 4)]
        assert found == pytest.approx([0.0, 0.75, 1.0], abs=0.05)
        with pytest.raises(TypeError, match="records"):
            PrivateScore(ft.Ledger(BUDGET), 0.1, 1e-6)

    @pytest.mark.parametrize(
        ("options", "rows", "target"),
        [
            ({}, X, Y[:-1]),
            ({}, X, np.column_stack([Y, Y])),
            ({"records": 0}, X, Y),
            ({"epsilon": -1.0}, X, Y),
            ({"delta": 2.0}, X, Y),
            ({"epsilon": math.nan}, X, Y),
        ],
    )
    def test_nonsense_costs_nothing(self, options, rows, target):
        ledger = ft.Ledger(BUDGET)
        with pytest.raises(InvalidValue):
            PrivateScore(**{"ledger": ledger, "epsilon": 0.1, "delta": 1e-6, "records": 200, **options})(
                NO, rows, target
            )
        assert ledger.share == 0

    @pytest.mark.parametrize("odd", [None, math.nan, "x", 0.5, 1 + 2j, [1], np.array([1, 2]), b"x"], ids=str)
    def test_a_target_of_another_kind_changes_no_other_records_value(self, odd):
        sums = [
            _Values((Says(np.ones(len(y))),), None).bounded_sum(Held(np.zeros((len(y), 1)), y), None, _ONE)
            for y in ([1] * 50, [1] * 25 + [odd] + [1] * 25, np.ones(50, int))
        ]
        assert [total.item() for total in sums] == [50, 50, 50]

    def test_one_value_a_record(self):
        ledger = ft.Ledger(BUDGET)
        with pytest.raises(InvalidValue, match="per record"):
            PrivateScore(ledger, 0.1, 1e-6, value=lambda true, predicted: 1.0, records=200)(NO, X, Y)

    def test_copies_share_the_ledger(self):
        ledger = ft.Ledger(BUDGET)
        assert clone(PrivateScore(ledger, 0.1, 1e-6, records=200), safe=False).ledger is ledger


class TestChoose:
    @pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
    def test_follows_the_exponential_mechanism(self, adjacency):
        """P(i) ∝ e^(ε cᵢ), or e^(ε cᵢ/2) if records are replaced, for the ε that the part affords."""
        close = Says(np.where(np.arange(200) < 170, 0, 1))  # not far from NO
        gap = int((NO.answers == Y).sum() - (close.answers == Y).sum())
        budget = ft.Budget(1.0, 1e-5, adjacency)
        epsilon = choice_epsilon(ft.Ledger(budget).allot(0.5, 1e-6))
        expected = 1 / (1 + math.exp(-epsilon * gap / (2 if adjacency == "replace-one" else 1)))
        assert 0.6 < expected < 0.95
        picks = [
            choose([close, NO], X, Y, ft.Ledger(budget, stream=SeededStream(seed)), 0.5, 1e-6)
            for seed in range(200)
        ]
        assert abs(np.mean(picks) - expected) < 4 * math.sqrt(expected * (1 - expected) / 200)

    def test_its_price_does_not_grow_with_the_candidates(self):
        shares = []
        for count in (2, 50):
            ledger = ft.Ledger(BUDGET)
            assert 0 <= choose([YES] * count, X, Y, ledger, 0.5, 1e-6) < count
            shares.append(ledger.share)
        assert shares[0] == shares[1]

    def test_it_is_charged_before_the_rows_are_read(self):
        ledger = ft.Ledger(ft.Budget(1.0, 0.0))
        model = Says(Y, ledger)
        choose([model, model], X, Y, ledger)
        with pytest.raises(BudgetSpent):
            choose([model], X, Y, ledger)
        assert set(model.seen) == {1.0}

    def test_under_basic_composition_it_costs_its_epsilon(self):
        """One ε-DP choice, however small the δ of its part: nothing is lost to a conversion."""
        ledger = ft.Ledger(BUDGET, filter=BasicFilter)
        close = Says(np.where(np.arange(200) < 195, 0, 1))
        picks = [
            choose(
                [close, NO], X, Y, ft.Ledger(BUDGET, filter=BasicFilter, stream=SeededStream(seed)), 0.5, 0.0
            )
            for seed in range(200)
        ]
        gap = int((NO.answers == Y).sum() - (close.answers == Y).sum())
        expected = 1 / (1 + math.exp(-0.5 * gap))
        assert 0.6 < expected < 0.95
        assert abs(np.mean(picks) - expected) < 4 * math.sqrt(expected * (1 - expected) / 200)
        choose([close, NO], X, Y, ledger, 0.5, 0.0)
        assert ledger.share == pytest.approx(0.5)

    def test_nobody_to_choose_from(self):
        ledger = ft.Ledger(BUDGET)
        with pytest.raises(InvalidValue):
            choose([], X, Y, ledger)
        assert ledger.share == 0

    def test_of_real_models(self):
        models = [DummyClassifier(strategy="constant", constant=c).fit(X, Y) for c in (1, 0)]
        assert choose(models, X, Y, ft.Ledger(ft.Budget(5.0, 1e-5))) == 1


def folds_of(splitter, rows, target):
    """The fold of every record."""
    fold = np.empty(len(rows), int)
    for place, (_, held) in enumerate(splitter.split(rows, target)):
        fold[held] = place
    return fold


class TestFolds:
    def test_they_part_the_rows(self):
        folds = Folds(4)
        seen = np.zeros(200, int)
        for train, held in folds.split(X, Y):
            assert len(train) + len(held) == 200
            assert not set(train) & set(held)
            seen[held] += 1
        assert (seen == 1).all()
        assert folds.get_n_splits() == 4

    def test_no_record_decides_the_fold_of_another(self):
        """With the same dice: whoever comes, goes or changes, the others stay. Not so in scikit-learn's."""
        flipped, longer = Y.copy(), np.arange(201.0)[:, None]
        flipped[40] = 1 - flipped[40]
        once = folds_of(Folds(3, SeededStream(1)), X, Y)
        np.testing.assert_array_equal(folds_of(Folds(3, SeededStream(1)), X, flipped), once)
        np.testing.assert_array_equal(folds_of(Folds(3, SeededStream(1)), longer, np.append(Y, 0))[:-1], once)
        stratified = [folds_of(StratifiedKFold(3), X, y) for y in (Y, flipped)]
        assert np.delete(stratified[0] != stratified[1], 40).any()
        # a record that comes first moves all others on
        by_place = folds_of(KFold(3), X, Y), folds_of(KFold(3), longer, np.append(Y, 0))[1:]
        assert (by_place[0] != by_place[1]).any()

    def test_groups_stay_together(self):
        groups = np.arange(200) // 5
        for train, held in Folds(3).split(X, Y, groups):
            assert not set(groups[train]) & set(groups[held])

    @pytest.mark.parametrize("odd", [None, 3, float("nan"), [1], ("a", 1)])
    def test_a_group_without_a_name_is_one_records_matter(self, odd):
        groups = [f"person {place // 5}" for place in range(199)] + [odd]
        for train, held in Folds(3).split(X, Y, groups):
            names = np.array(groups[:-1])
            assert not set(names[train[train < 199]]) & set(names[held[held < 199]])

    def test_thrown_anew(self):
        folds = Folds(2)
        assert (folds_of(folds, X, Y) != folds_of(folds, X, Y)).any()

    @pytest.mark.parametrize("splits", [0, 1, -3, 2.5, None])
    def test_at_least_two(self, splits):
        with pytest.raises(InvalidValue):
            Folds(splits)


def test_labels_that_hang_on_last_bits_are_predicted_alike_beside_other_rows(monkeypatch):
    """Rows on the border of a public model: which side they are on depends on how many are multiplied."""
    rng, d, n = np.random.default_rng(0), 64, 300
    model = LogisticRegression()
    model.coef_, model.intercept_, model.classes_ = rng.normal(size=(1, d)), np.zeros(1), np.array([0, 1])
    w, X = model.coef_[0], rng.normal(size=(n, d))
    for _ in range(3):
        X = X - np.outer(X @ w / (w @ w), w)
    y, places = np.ones(n, dtype=int), rng.integers(0, 256, n)  # each record's own, whoever else is there
    values, bound = selection._Values((model,), None), ft.ClipValue(0.0, 1.0)

    def hits(kept):
        monkeypatch.setattr(selection, "drawn_places", lambda count, _: places[kept])
        return values.bounded_sum(selection.Held(X[kept], y[kept]), None, bound)[0]

    whole = hits(np.arange(n))
    assert 0 < whole < n
    assert max(abs(whole - hits(np.delete(np.arange(n), place))) for place in range(n)) <= 1
