"""scikit-learn's and joblib's machinery around private estimators: all of it pays from one ledger."""

import math
import pickle

import joblib
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import make_classification
from sklearn.ensemble import AdaBoostClassifier, BaggingClassifier
from sklearn.exceptions import FitFailedWarning
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV, RandomizedSearchCV, cross_val_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import MinMaxScaler

import farthing as ft
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.linear.selection import Folds, PrivateScore, equal_part

X, Y = make_classification(600, 4, n_informative=3, n_redundant=0, class_sep=2.0, random_state=0)
X3, Y3 = make_classification(600, 4, n_informative=3, n_redundant=0, n_classes=3, random_state=0)
GRID = {"bounds": [None, (-9, 9), (-5, 5)]}
pytestmark = pytest.mark.filterwarnings("ignore:A worker stopped")  # loky's, on a machine short of memory
BACKENDS = [(1, "loky"), (2, "loky"), (2, "threading")]


@pytest.fixture
def ledger(tmp_path):
    with ft.Ledger(ft.Budget(2.0, 1e-5), journal=tmp_path / "one.ledger") as made:
        yield made


def charges(ledger):
    """How many were written, and the journal is whole."""
    ledger.journal.verify()
    return sum(row.body["count"] for row in ledger.journal.rows() if row.kind == "charge")


def model_of(ledger, fits):
    """An estimator of which ``fits`` fits are paid for, to the last farthing."""
    part = equal_part(ledger, fits)
    return ft.LogisticRegression(part.epsilon, part.delta, ledger=ledger)


@pytest.mark.parametrize(("jobs", "backend"), BACKENDS)
class TestSearch:
    def test_fits_and_scores_are_all_paid_for(self, ledger, jobs, backend):
        model = model_of(ledger, 3 * 2 * 2 + 1)
        score = PrivateScore(ledger, model.epsilon, model.delta, records=len(Y) // 2)
        search = GridSearchCV(model, GRID, cv=Folds(2), scoring=score, n_jobs=jobs, error_score="raise")
        with joblib.parallel_config(backend):
            search.fit(X, Y)
        assert charges(ledger) == 3 * 2 * 2 + 1
        assert ledger.share == pytest.approx(1.0, abs=1e-6)
        with pytest.raises(BudgetSpent):
            clone(model).fit(X, Y)

    def test_it_stops_at_the_budget_with_a_typed_error(self, ledger, jobs, backend):
        search = GridSearchCV(model_of(ledger, 4), GRID, cv=Folds(2), n_jobs=jobs, error_score="raise")
        with joblib.parallel_config(backend), pytest.raises(BudgetSpent):
            search.fit(X, Y)
        assert charges(ledger) <= 4
        assert ledger.spent.epsilon <= 2.0
        assert not hasattr(search, "best_estimator_")

    def test_by_default_what_is_not_paid_for_scores_nan(self, ledger, jobs, backend):
        """scikit-learn's error_score=nan: a warning, nan where nothing was fitted, no charge beyond."""
        search = GridSearchCV(model_of(ledger, 4), GRID, cv=Folds(2), n_jobs=jobs, refit=False)
        with (
            joblib.parallel_config(backend),
            pytest.warns(FitFailedWarning, match="BudgetSpent"),
            pytest.warns(UserWarning, match="non-finite"),
        ):
            search.fit(X, Y)
        folds = np.array([search.cv_results_[f"split{k}_test_score"] for k in range(2)])
        assert charges(ledger) == 4
        assert np.isnan(folds).sum() == 2
        assert ledger.share == pytest.approx(1.0, abs=1e-6)

    def test_the_last_fit_must_be_paid_for_too(self, ledger, jobs, backend):
        search = GridSearchCV(model_of(ledger, 6), GRID, cv=Folds(2), n_jobs=jobs)
        with joblib.parallel_config(backend), pytest.raises(BudgetSpent):
            search.fit(X, Y)
        assert charges(ledger) == 6

    def test_at_random(self, ledger, jobs, backend):
        search = RandomizedSearchCV(
            model_of(ledger, 5), GRID, n_iter=2, cv=Folds(2), n_jobs=jobs, random_state=0, error_score="raise"
        )
        with joblib.parallel_config(backend):
            search.fit(X, Y)
        assert charges(ledger) == 5

    def test_cross_validation(self, ledger, jobs, backend):
        model = model_of(ledger, 6)
        score = PrivateScore(ledger, model.epsilon, model.delta, records=len(Y) // 2)
        with joblib.parallel_config(backend):
            found = cross_val_score(model, X, Y, cv=Folds(3), scoring=score, n_jobs=jobs, error_score="raise")
        assert np.isfinite(found).all()
        assert charges(ledger) == 6

    def test_parallel_fits(self, ledger, jobs, backend):
        model = model_of(ledger, 3)
        tasks = (joblib.delayed(clone(model).fit)(X, Y) for _ in range(3))
        fitted = joblib.Parallel(n_jobs=jobs, backend=backend)(tasks)
        assert charges(ledger) == 3
        assert len({one.coef_.tobytes() for one in fitted}) == 3  # no two of the same noise
        with pytest.raises(BudgetSpent):
            joblib.Parallel(n_jobs=jobs, backend=backend)([joblib.delayed(clone(model).fit)(X, Y)] * 2)


def test_a_score_that_is_not_paid_for_is_not_given(ledger):
    model = model_of(ledger, 3)
    score = PrivateScore(ledger, model.epsilon, model.delta, records=len(Y) // 2)
    with pytest.warns(UserWarning, match="Scoring failed"):
        found = cross_val_score(model, X, Y, cv=Folds(2), scoring=score)
    assert np.isnan(found).sum() == 1
    assert charges(ledger) == 3


def test_scikit_learns_own_scorers_pay_nothing(ledger):
    """Why PrivateScore exists: three fits are charged, and three exact scores leave unpaid."""
    cross_val_score(model_of(ledger, 3), X, Y, cv=Folds(3), error_score="raise")
    assert charges(ledger) == 3


def test_a_ledger_in_memory_stays_in_its_process():
    memory = ft.Ledger(ft.Budget(2.0, 1e-5))
    search = GridSearchCV(model_of(memory, 7), GRID, cv=Folds(2), n_jobs=2)
    with joblib.parallel_config("loky"), pytest.raises((pickle.PicklingError, Unsupported)) as caught:
        search.fit(X, Y)
    shown = [str(caught.value), str(caught.value.__cause__)]
    assert any("journal file" in text for text in shown)
    assert memory.share == 0
    with joblib.parallel_config("threading"):
        search.fit(X, Y)
    assert memory.share == pytest.approx(1.0, abs=1e-6)


class TestPipeline:
    @staticmethod
    def scaler():
        """Fitted on the public bounds, and frozen: a pipeline's fit does not fit it again."""
        bounds = np.array([np.full(4, -9.0), np.full(4, 9.0)])
        return FrozenEstimator(MinMaxScaler(clip=True).fit(bounds))

    def test_public_bounds_then_components_then_a_model(self, ledger):
        part = equal_part(ledger, 2)
        pipe = make_pipeline(
            self.scaler(),
            ft.PCA(3, part.epsilon, part.delta, ledger=ledger, centre=0.5),
            ft.LogisticRegression(part.epsilon, part.delta, ledger=ledger),
        ).fit(X, Y)
        assert charges(ledger) == 2
        assert pipe.predict(X).shape == Y.shape
        with pytest.raises(BudgetSpent):
            clone(pipe).fit(X, Y)

    def test_the_frozen_scaler_learns_nothing(self, ledger):
        pipe = make_pipeline(self.scaler(), model_of(ledger, 2)).fit(X, Y)
        moved = clone(pipe).fit(X * 1000, Y)
        for one in (pipe, moved):
            np.testing.assert_array_equal(one[0].data_max_, 9.0)

    def test_it_does_what_bounds_do(self):
        seeded = {"epsilon": 1.0, "delta": 1e-5, "random_state": 0}
        inside = ft.LogisticRegression(**seeded, bounds=(-9, 9)).fit(X, Y)
        outside = make_pipeline(self.scaler(), ft.LogisticRegression(**seeded, bounds=(0, 1))).fit(X, Y)
        np.testing.assert_allclose(inside.decision_function(X), outside.decision_function(X), atol=1e-6)

    def test_searched_as_a_whole(self, ledger):
        part = equal_part(ledger, 2 * (2 * 2 + 1))
        options = {"epsilon": part.epsilon, "delta": part.delta, "ledger": ledger}
        pipe = Pipeline(
            [
                ("rows", self.scaler()),
                ("pca", ft.PCA(3, **options)),
                ("model", ft.LogisticRegression(**options)),
            ]
        )
        search = GridSearchCV(pipe, {"pca__n_components": [2, 3]}, cv=Folds(2), error_score="raise")
        search.fit(X, Y)
        assert charges(ledger) == 2 * (2 * 2 + 1)

    def test_a_cached_step_is_paid_for_once(self, ledger, tmp_path):
        part = equal_part(ledger, 3)
        options = {"epsilon": part.epsilon, "delta": part.delta, "ledger": ledger}
        steps = [("pca", ft.PCA(3, **options)), ("model", ft.LogisticRegression(**options))]
        memory = joblib.Memory(tmp_path / "cache", verbose=0)
        first = Pipeline(steps, memory=memory).fit(X, Y)
        again = Pipeline(steps, memory=memory).fit(X, Y)
        assert charges(ledger) == 3  # one PCA, two models
        np.testing.assert_array_equal(first["pca"].components_, again["pca"].components_)


class TestFiles:
    def test_a_dumped_model_comes_back_to_its_ledger(self, ledger, tmp_path):
        model = model_of(ledger, 2).fit(X, Y)
        joblib.dump(model, tmp_path / "model.joblib")
        back = joblib.load(tmp_path / "model.joblib")
        np.testing.assert_array_equal(back.predict(X), model.predict(X))
        assert str(back.privacy_) == str(model.privacy_)
        back.fit(X, Y)
        with pytest.raises(BudgetSpent):
            model.fit(X, Y)

    def test_where_the_journal_is_not_it_does_not_load(self, tmp_path):
        with ft.Ledger(ft.Budget(2.0, 1e-5), journal=tmp_path / "gone.ledger") as gone:
            model = model_of(gone, 1).fit(X, Y)
            joblib.dump(model, tmp_path / "model.joblib")
            joblib.dump(model.to_sklearn(), tmp_path / "plain.joblib")
            joblib.dump(model.set_params(ledger=None), tmp_path / "alone.joblib")
        for file in tmp_path.glob("gone.ledger*"):
            file.unlink()
        with pytest.raises(InvalidValue, match="no ledger"):
            joblib.load(tmp_path / "model.joblib")
        for name in ("plain", "alone"):
            np.testing.assert_array_equal(
                joblib.load(tmp_path / f"{name}.joblib").predict(X), model.predict(X)
            )


def test_one_against_the_rest_pays_for_every_class(ledger):
    OneVsRestClassifier(model_of(ledger, 3)).fit(X3, Y3)
    assert charges(ledger) == 3
    assert ledger.share == pytest.approx(1.0, abs=1e-6)
    with pytest.raises(BudgetSpent):
        OneVsRestClassifier(ft.LogisticRegression(0.1, 1e-6, ledger=ledger)).fit(X3, Y3)


def test_calibration_pays_for_its_fits_and_costs_nothing_on_public_rows(ledger):
    model = model_of(ledger, 3)
    CalibratedClassifierCV(model, cv=Folds(2)).fit(X, Y)
    assert charges(ledger) == 2
    fitted, public = clone(model).fit(X[:300], Y[:300]), (X[300:], Y[300:])
    found = CalibratedClassifierCV(FrozenEstimator(fitted)).fit(*public)
    assert charges(ledger) == 3
    np.testing.assert_allclose(found.predict_proba(X).sum(axis=1), 1)


def test_ensembles_that_draw_or_weigh_records_are_refused_or_say_that_nothing_is_private(ledger):
    """What docs/ecosystem.md says of them."""
    for kind in (BaggingClassifier, AdaBoostClassifier):
        with pytest.raises(ValueError, match=r"random_state|sample_weight"):
            kind(ft.LogisticRegression(0.1, 1e-6, ledger=ledger), n_estimators=2).fit(X, Y)
        assert ledger.share == 0
    with pytest.raises(ValueError, match="sample_weight"):
        AdaBoostClassifier(ft.LogisticRegression(0.1, 1e-6), n_estimators=2).fit(X, Y)
    model = ft.LogisticRegression(0.1, 1e-6, max_sample_weight=10.0)
    bagged = BaggingClassifier(model, n_estimators=2).fit(X, Y)
    assert all(math.isinf(one.privacy_.epsilon) for one in bagged.estimators_)
    assert all("seeded noise" in one.privacy_.note for one in bagged.estimators_)
    for kind in (BaggingClassifier, AdaBoostClassifier):
        paid = ft.LogisticRegression(0.1, 1e-6, ledger=ledger, max_sample_weight=10.0)
        with pytest.raises(ValueError, match="random_state"):
            kind(paid, n_estimators=2).fit(X, Y)
        assert ledger.share == 0
