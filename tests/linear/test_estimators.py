"""Estimators: scikit-learn's own checks, one balance however they are copied, nothing charged in vain."""

import copy
import pickle
import traceback
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import make_classification, make_regression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import estimator_checks_generator

import farthing as ft
from farthing.accounting.filters import BasicFilter
from farthing.errors import BudgetSpent, FarthingError, InvalidValue, LedgerLocked, Unsupported
from farthing.linear.base import PUBLIC_SIZE
from farthing.linear.solvers import CLASSIFIERS, REGRESSORS

BUDGET = {"epsilon": 2.0, "delta": 1e-5}
X, Y = make_classification(3000, 5, n_informative=4, n_redundant=0, class_sep=2.0, random_state=0)
X3, Y3 = make_classification(3000, 5, n_informative=4, n_redundant=0, n_classes=3, random_state=0)
XR, YR = make_regression(3000, 4, noise=5.0, random_state=0)
XR = (np.clip(XR, -4, 4) + 4) / 8
RANGE = (float(YR.min()), float(YR.max()))


class _Declared:
    """scikit-learn's checks bring their own labels and do not declare them: here the test does."""

    def fit(self, X, y):
        given = self.classes
        try:
            self.classes = np.unique(np.asarray(y)) if y is not None else given
            return super().fit(X, y)
        finally:
            self.classes = given


class LogisticRegression(_Declared, ft.LogisticRegression):
    """With the classes of its data."""


class LinearSVC(_Declared, ft.LinearSVC):
    """With the classes of its data."""


ESTIMATORS = [
    LogisticRegression(1e4, 1e-3),
    LinearSVC(1e4, 1e-3),
    ft.LinearRegression(1e4, 1e-3, target_bounds=(-300, 300), max_sample_weight=10.0),
    ft.PCA(1, 1e4, 1e-3),
]


def wants_a_row_refused(model, check):
    """One that is not finite, which counts as nothing: an error would tell of it."""
    name = getattr(check, "func", check).__name__
    labels = name == "check_supervised_y_no_nan" and isinstance(model, ft.LinearRegression)
    return labels or name in {*("check_estimators_nan_inf", "check_all_zero_sample_weights_error")}


# They compare two fits, whose noise differs; or go on with a fitted model that no ledger pays for.
UNLIKE = {
    "check_sample_weight_equivalence_on_dense_data": AssertionError,
    "check_sample_weight_equivalence_on_sparse_data": AssertionError,
    "check_fit_score_takes_y": InvalidValue,
}


def expected(model, check):
    """The error that a check ends with where a private estimator cannot do as it asks."""
    if wants_a_row_refused(model, check):
        return AssertionError
    name = getattr(check, "func", check).__name__
    if name == "check_dtype_object":  # an array of objects has no type, and is refused
        return InvalidValue
    return None if isinstance(model, ft.PCA) else UNLIKE.get(name)


# As a list: pytest takes no generator any more, and `parametrize_with_checks` handed it one before 1.8.
@pytest.mark.parametrize(
    ("estimator", "check"),
    [pair for estimator in ESTIMATORS for pair in estimator_checks_generator(estimator)],
    ids=lambda part: getattr(part, "func", type(part)).__name__,
)
def test_scikit_learns_own_checks(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some checks warn on purpose
        error = expected(estimator, check)
        refused = pytest.raises(error) if error else nullcontext()
        with refused:
            check(estimator)


def test_a_budget_is_all_it_needs():
    model = ft.LogisticRegression(**BUDGET).fit(X, Y)
    assert model.score(X, Y) > 0.8
    assert (model.privacy_.epsilon, model.privacy_.delta) == (2.0, 1e-5)
    assert "public" in model.privacy_.note
    assert "public" not in ft.LogisticRegression(**BUDGET, records=3000).fit(X, Y).privacy_.note
    assert model.n_iter_ == model.history_[-1].t == len(model.history_) > 1  # the last step's weights, of all
    assert all(step.receipts for step in model.history_)


@pytest.mark.parametrize("kind", [ft.LogisticRegression, ft.LinearSVC])
def test_several_classes(kind):
    model = kind(20.0, 1e-5, classes=range(3), bounds=(-10, 10)).fit(X3, Y3)
    assert model.coef_.shape == (3, 5)
    assert model.score(X3, Y3) > 0.5
    labels = np.array(["ant", "bee", "cat"])
    named = kind(20.0, 1e-5, classes=labels[::-1], bounds=(-10, 10)).fit(X3, labels[Y3])
    assert named.score(X3, labels[Y3]) > 0.5


def test_regression():
    model = ft.LinearRegression(20.0, 1e-5, bounds=(0, 1), target_bounds=RANGE).fit(XR, YR)
    assert model.score(XR, YR) > 0.9


def test_a_target_beyond_its_bounds_counts_as_the_nearest():
    y = X @ np.arange(1.0, X.shape[1] + 1)
    low, high = float(np.quantile(y, 0.2)), float(np.quantile(y, 0.8))
    options = {**BUDGET, "target_bounds": (low, high), "random_state": 3}
    beyond, at = (ft.LinearRegression(**options).fit(X, given) for given in (y, np.clip(y, low, high)))
    np.testing.assert_array_equal(beyond.coef_, at.coef_)


def test_probabilities_are_those_of_the_scores():
    model = ft.LogisticRegression(**BUDGET).fit(X, Y)
    p = model.predict_proba(X)
    np.testing.assert_allclose(p.sum(axis=1), 1)
    np.testing.assert_allclose(np.log(p[:, 1] / p[:, 0]), model.decision_function(X), atol=1e-6)


@pytest.mark.parametrize("bounds", [None, (-9, 9), (np.full(5, -9.0), np.arange(9.0, 14.0))])
@pytest.mark.parametrize("kind", [ft.LogisticRegression, ft.LinearSVC])
@pytest.mark.parametrize("several", [False, True])
def test_exported_models_predict_the_same(kind, bounds, several):
    X_, y = (X3, Y3) if several else (X, Y)
    model = kind(**BUDGET, classes=range(3) if several else (0, 1), bounds=bounds).fit(X_, y)
    np.testing.assert_allclose(model.to_sklearn().decision_function(X_), model.decision_function(X_))
    np.testing.assert_array_equal(model.to_sklearn().predict(X_), model.predict(X_))
    if kind is ft.LogisticRegression:
        np.testing.assert_allclose(model.to_sklearn().predict_proba(X_), model.predict_proba(X_))


def test_exported_regression_and_components():
    model = ft.LinearRegression(**BUDGET, bounds=(0, 1), target_bounds=RANGE).fit(XR, YR)
    np.testing.assert_allclose(model.to_sklearn().predict(XR), model.predict(XR))
    pca = ft.PCA(2, **BUDGET, centre=0.5).fit(XR)
    np.testing.assert_allclose(pca.to_sklearn().transform(XR), pca.transform(XR))
    np.testing.assert_allclose(pca.inverse_transform(pca.transform(XR)).shape, XR.shape)
    assert list(pca.get_feature_names_out()) == ["pca0", "pca1"]


@pytest.mark.parametrize("solver", ["auto"])
def test_float32_and_sparse_input_give_the_same_answer(solver):
    """With the same seeded noise the sums agree to float32, so the weights do."""
    small = (np.abs(X) * (np.abs(X) > 0.5)).astype(np.float32)
    fits = [
        ft.LogisticRegression(**BUDGET, solver=solver, bounds=(0, 8), random_state=0).fit(kind(small), Y)
        for kind in (np.float64, np.float32, sparse.csr_matrix, sparse.csc_array)
    ]
    for other in fits[1:]:
        np.testing.assert_allclose(other.coef_, fits[0].coef_, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(
            other.decision_function(small), fits[0].decision_function(small), atol=1e-4
        )


def test_a_seed_voids_the_guarantee():
    first, again = (ft.LogisticRegression(**BUDGET, random_state=3).fit(X, Y) for _ in range(2))
    np.testing.assert_array_equal(first.coef_, again.coef_)
    assert first.privacy_.epsilon == np.inf
    other = ft.LogisticRegression(**BUDGET).fit(X, Y)
    assert not np.array_equal(other.coef_, ft.LogisticRegression(**BUDGET).fit(X, Y).coef_)


class TestOneBalance:
    """However an estimator is copied, there is one ledger, and it is never overspent."""

    def test_copies_share_it(self):
        ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
        model = ft.LogisticRegression(0.5, 1e-5, ledger=ledger)
        for made in (clone(model), copy.deepcopy(model), clone(clone(model))):
            assert made.ledger is ledger

    def test_fits_add_up_and_end(self):
        ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
        model = ft.LogisticRegression(0.5, 1e-5, ledger=ledger)
        for _ in range(3):  # parts add up in mu squared, not in epsilon
            clone(model).fit(X, Y)
        with pytest.raises(BudgetSpent):
            clone(model).fit(X, Y)
        assert ledger.spent.epsilon <= 1.0
        assert ledger.share <= 1.0

    def test_who_promises_a_plan_has_a_fresh_ledger_or_a_part_of_one(self):
        fresh, used = ft.Ledger(ft.Budget(2.0, 1e-5)), ft.Ledger(ft.Budget(2.0, 1e-5))
        ft.LogisticRegression(ledger=used, solver="majority", epsilon=0.1, delta=1e-6).fit(X, Y)
        spent = used.share
        for ledger, part in ((used, {}), (fresh, {"epsilon": 1.0, "delta": 1e-6})):
            with pytest.raises(Unsupported, match="pass a fresh ledger"):
                ft.LogisticRegression(ledger=ledger, solver="sgd-ma", **part).fit(X, Y)
        assert (fresh.share, used.share) == (0.0, spent)

    def test_the_rest_goes_to_who_names_no_part(self):
        ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
        ft.LogisticRegression(0.3, 1e-5, ledger=ledger).fit(X, Y)
        last = ft.LogisticRegression(ledger=ledger).fit(X, Y)
        assert 0.3 < last.privacy_.epsilon < 1.0
        assert ledger.share == pytest.approx(1.0)
        with pytest.raises(BudgetSpent):
            ft.PCA(1, ledger=ledger).fit(X)

    @pytest.mark.parametrize("jobs", [1, 2])
    def test_a_grid_search_pays_for_every_fit(self, tmp_path, jobs):
        ledger = ft.Ledger(ft.Budget(1.0, 1e-5), journal=tmp_path / "grid.ledger")
        model = ft.LogisticRegression(0.05, 1e-6, ledger=ledger)
        search = GridSearchCV(model, {"bounds": [None, (-9, 9)]}, cv=2, n_jobs=jobs, refit=True)
        search.fit(X, Y)
        charges = [row for row in ledger.journal.rows() if row.kind == "charge"]
        assert len(charges) == 2 * 2 + 1
        ledger.journal.verify()
        one = ft.Ledger(ft.Budget(1.0, 1e-5))
        one.allot(0.05, 1e-6)
        assert ledger.share == pytest.approx(5 * one.share)

    def test_a_search_that_does_not_fit_raises(self):
        ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
        model = ft.LogisticRegression(0.6, 1e-5, ledger=ledger)
        with pytest.raises(BudgetSpent):
            cross_val_score(model, X, Y, cv=5, error_score="raise")
        assert ledger.spent.epsilon <= 1.0

    def test_a_ledger_in_memory_does_not_leave_its_process(self):
        model = ft.LogisticRegression(0.5, 1e-5, ledger=ft.Ledger(ft.Budget(1.0, 1e-5)))
        with pytest.raises(Unsupported, match="journal file"):
            pickle.dumps(model)

    def test_pickled_with_a_journal_it_comes_back_to_it(self, tmp_path):
        ledger = ft.Ledger(ft.Budget(1.0, 1e-5), journal=tmp_path / "a.ledger")
        model = ft.LogisticRegression(0.5, 1e-5, ledger=ledger).fit(X, Y)
        back = pickle.loads(pickle.dumps(model))
        np.testing.assert_array_equal(back.predict(X), model.predict(X))
        assert back.ledger.share == ledger.share > 0

    def test_in_a_pipeline(self):
        ledger = ft.Ledger(ft.Budget(4.0, 1e-5), filter=BasicFilter)
        pipe = make_pipeline(
            FunctionTransformer(lambda x: x / 10),
            ft.PCA(4, 2.0, 5e-6, ledger=ledger),
            ft.LogisticRegression(2.0, 5e-6, ledger=ledger),
        )
        pipe.fit(X, Y)
        assert pipe.score(X, Y) > 0.6
        assert ledger.share == 1.0


def odd(value, place=7):
    return np.where(np.arange(X.size).reshape(X.shape) == place, value, X)


BAD_X = {
    "text": np.full(X.shape, "a"),
    "no rows": X[:0],
    "no columns": X[:, :0],
    "one dimension": X[:, 0],
    "complex": X + 1j,
    "dates": np.full(X.shape, "2020-01-01", dtype="datetime64[D]"),
}


@pytest.mark.parametrize("cell", ["a private word", {"a": 1}, None, 0.5])
def test_an_array_of_objects_is_refused_whatever_its_cells_are(cell):
    ledger, objects = ft.Ledger(ft.Budget(1.0, 1e-5)), X.astype(object)
    objects[1, 2] = cell
    with pytest.raises(InvalidValue, match="got an array of objects") as caught:
        ft.LogisticRegression(bounds=(-10, 10), ledger=ledger).fit(objects, Y)
    assert ledger.share == 0
    assert "private" not in str(caught.value)
    found = ft.LogisticRegression(**BUDGET, bounds=(-10, 10)).fit(X, Y)
    with pytest.raises(InvalidValue, match="array of objects"):
        found.predict(objects)


@pytest.mark.parametrize("kind", [ft.LogisticRegression, ft.LinearSVC, ft.LinearRegression, ft.PCA])
@pytest.mark.parametrize("case", BAD_X)
def test_the_form_of_rows_is_refused_before_any_charge(kind, case):
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
    options = {"target_bounds": (0, 1)} if kind is ft.LinearRegression else {}
    target = Y[: len(BAD_X[case])]
    with pytest.raises(InvalidValue) as caught:
        kind(ledger=ledger, **options).fit(BAD_X[case], target)
    assert ledger.share == 0
    assert "private" not in "".join(traceback.format_exception(caught.value))
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    ("options", "y"),
    [
        ({"classes": (0, 1, 2)}, np.where(Y == 1, "a", "b")),
        ({"classes": (0,)}, Y * 0),
        ({"classes": ()}, Y),
        ({"classes": 3}, Y),
        ({"classes": (0.5, 1.5)}, Y + 0.5),
        ({"classes": (0, 1, np.nan)}, Y),
        ({}, Y[:-1]),
        ({}, Y + 1j),
        ({"bounds": (1, 0)}, Y),
        ({"bounds": (0, np.inf)}, Y),
        ({"bounds": ([0, 0], 1)}, Y),
        ({"solver": "magic"}, Y),
        ({"records": 0}, Y),
        ({"adjacency": "replace-one"}, Y),  # not the ledger's
        ({"random_state": 0}, Y),
        ({"epsilon": -1.0, "delta": 1e-6}, Y),
        ({"epsilon": 0.5}, Y),
        ({"epsilon": np.nan, "delta": 1e-6}, Y),
        ({"epsilon": 0.5, "delta": 1.0}, Y),
    ],
)
def test_bad_options_are_refused_before_any_charge(options, y):
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
    with pytest.raises(InvalidValue):
        ft.LogisticRegression(**{"ledger": ledger, **options}).fit(X, y)
    assert ledger.share == 0


BLANK_X = [np.nan, np.inf, -np.inf, None]
BLANK_Y = [9, -1, np.nan, np.inf, 0.5, 2**70, "the only one", None, [], b"x", 1j]


@pytest.mark.parametrize("kind", [ft.LogisticRegression, ft.LinearSVC])
@pytest.mark.parametrize("solver", sorted(CLASSIFIERS))
@pytest.mark.parametrize("several", [False, True])
def test_a_label_that_is_not_declared_counts_as_nothing(kind, solver, several):
    if several and (
        solver in ("objective", "output", "privgene")
        or (solver in ("dpagd", "pure") and kind is ft.LinearSVC)
    ):
        pytest.skip("for two classes")
    rows, labels, k = (X3, Y3, (0, 1, 2)) if several else (X, Y, (0, 1))
    fitted = []
    for odd_label in (9, 2**40, -3):  # which one makes no difference
        mixed = np.append(labels[:400], odd_label)
        model = kind(50.0, 1e-3, classes=k, solver=solver, records=400, random_state=1)
        fitted.append(model.fit(rows[:401], mixed).coef_)
        assert np.isfinite(fitted[-1]).all()
    np.testing.assert_array_equal(fitted[0], fitted[1])
    np.testing.assert_array_equal(fitted[0], fitted[2])


@pytest.mark.parametrize("kind", [ft.LogisticRegression, ft.GradientBoostingClassifier])
def test_a_score_warns_of_labels_that_were_not_declared(kind):
    model = kind(**BUDGET, bounds=(-10, 10)).fit(X, 2 * Y - 1)  # where 0 and 1 are the default
    with pytest.warns(UserWarning, match=r"not among classes=\[0, 1\].*classes=\[\.\.\.\]") as told:
        model.score(X, 2 * Y - 1)
    assert "-1" not in str(told[0].message)  # it quotes what was declared, no label
    assert 0.0 <= model.score(X, Y) <= 1.0  # and is silent where all are known


@pytest.mark.parametrize("label", BLANK_Y)
def test_no_label_is_refused(label):
    labels = Y[:300].astype(object)
    labels[17] = label
    given = labels if label in (None, [], b"x", 1j, "the only one", 2**70) else labels.astype(float)
    assert np.isfinite(ft.LogisticRegression(**BUDGET).fit(X[:300], given).coef_).all()


@pytest.mark.parametrize("value", BLANK_X)
@pytest.mark.parametrize("bounds", [None, (-1, 1)])
@pytest.mark.parametrize("storage", [np.asarray, sparse.csr_array, np.float32])
def test_a_row_that_is_not_finite_counts_as_nothing(value, bounds, storage):
    if storage is sparse.csr_array and bounds is not None:
        bounds = (0, 1)
    rows = odd(value).astype(float)[:300]
    blank = rows.copy()
    blank[7 // X.shape[1]] = np.nan
    options = {"bounds": bounds, "records": 300, "random_state": 1}
    fits = [ft.LogisticRegression(**BUDGET, **options).fit(storage(x), Y[:300]) for x in (rows, blank)]
    np.testing.assert_array_equal(fits[0].coef_, fits[1].coef_)
    assert np.isfinite(fits[0].coef_).all()


@pytest.mark.parametrize("solver", sorted(REGRESSORS))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_target_that_is_not_finite_counts_as_nothing(solver, value):
    target = YR[:400].copy()
    target[3] = value
    options = {"target_bounds": RANGE, "bounds": (0, 1), "solver": solver, "records": 400, "random_state": 1}
    fits = []
    for other in (0.0, 0.9):  # the row does not matter either
        rows = XR[:400].copy()
        rows[3] = other
        fits.append(ft.LinearRegression(5.0, 1e-3, **options).fit(rows, target))
    np.testing.assert_allclose(fits[0].coef_, fits[1].coef_, rtol=1e-9)
    assert np.isfinite(fits[0].coef_).all()


def test_no_rows_at_all_are_noise_where_their_number_is_private():
    model = ft.LogisticRegression(**BUDGET, records=1000).fit(X[:0], Y[:0])
    assert np.isfinite(model.coef_).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_to_predict_must_be_finite(value):
    model = ft.LogisticRegression(**BUDGET).fit(X, Y)
    with pytest.raises(InvalidValue, match="must hold finite numbers"):
        model.predict(odd(value))


def test_that_the_number_of_records_was_taken_as_public_reaches_the_ledger(tmp_path):
    for journal in (None, tmp_path / "a.ledger"):
        ledger = ft.Ledger(ft.Budget(1.0, 1e-5), journal=journal)
        ft.LogisticRegression(0.1, 1e-5, ledger=ledger, records=3000).fit(X, Y)
        assert "public" not in ledger.guarantee.note
        for _ in range(2):
            ft.LogisticRegression(0.1, 1e-5, ledger=ledger).fit(X, Y)
        assert ledger.guarantee.note == ledger.spent.note.split("; ")[-1] == PUBLIC_SIZE
        ledger.journal.verify()
    ledger.close()
    assert ft.Ledger.open(journal).guarantee.note == PUBLIC_SIZE


@pytest.mark.parametrize("options", [{}, {"epsilon": 1.0}, {"delta": 1e-5}, {"epsilon": 1.0, "delta": 1.0}])
def test_a_fit_needs_a_whole_budget(options):
    with pytest.raises(FarthingError):
        ft.LogisticRegression(**options).fit(X, Y)


@pytest.mark.parametrize("bounds", [None, (1,), (1, 0), (0, np.inf), "ab"])
def test_a_target_needs_bounds(bounds):
    with pytest.raises(InvalidValue):
        ft.LinearRegression(**BUDGET, target_bounds=bounds).fit(XR, YR)


def test_an_exhausted_or_locked_ledger(tmp_path):
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
    ledger.allot()
    with pytest.raises(BudgetSpent):
        ft.LogisticRegression(ledger=ledger).fit(X, Y)
    path = tmp_path / "torn.ledger"
    with ft.Ledger(ft.Budget(1.0, 1e-5), journal=path) as torn:
        ft.LogisticRegression(0.1, 1e-6, ledger=torn).fit(X, Y)
    (head,) = (file for file in tmp_path.iterdir() if "head" in file.name)
    head.write_text("nonsense")
    with pytest.raises(LedgerLocked), ft.Ledger.open(path) as locked:
        ft.LogisticRegression(0.1, 1e-6, ledger=locked).fit(X, Y)


class TestNeutral:
    """Odd tables that are no error: a fit like any other, the guarantee unchanged."""

    @pytest.mark.parametrize(
        ("rows", "y"),
        [
            (np.ones((50, 3)), np.arange(50) % 2),  # constant columns
            (np.zeros((50, 3)), np.arange(50) % 2),
            (np.random.default_rng(0).normal(size=(50, 3)), np.zeros(50)),  # one class only
            (np.ones((1, 3)), np.ones(1)),  # a single row
            (np.random.default_rng(0).normal(size=(20, 300)), np.arange(20) % 2),  # fewer rows than features
            (np.vstack([np.ones((49, 3)), np.full((1, 3), 1e300)]), np.arange(50) % 2),  # an enormous row
        ],
    )
    @pytest.mark.parametrize("bounds", [None, (0, 1)])
    @pytest.mark.parametrize("solver", sorted(CLASSIFIERS))
    def test_classifiers(self, rows, y, bounds, solver):
        model = ft.LogisticRegression(**BUDGET, bounds=bounds, solver=solver).fit(rows, y)
        assert np.isfinite(model.coef_).all()
        assert (
            model.privacy_.epsilon == pytest.approx(2.0)
            or solver == "nonprivate"
            or (model.privacy_.epsilon < 2.0)
        )

    @pytest.mark.parametrize("rows", [np.ones((50, 3)), np.ones((1, 3)), np.full((20, 3), 1e300)])
    @pytest.mark.parametrize("solver", sorted(REGRESSORS))
    def test_regressors(self, rows, solver):
        model = ft.LinearRegression(**BUDGET, bounds=(0, 1), target_bounds=(0, 1), solver=solver)
        model.fit(rows, np.full(len(rows), 3.0))
        assert np.isfinite(model.coef_).all()
        assert np.isfinite(model.intercept_)


def test_what_lies_outside_the_bounds_is_clipped_and_not_told():
    """The same seeded noise on a table and on its clipped copy: the same model."""
    wild = X.copy()
    wild[::7] *= 50
    models = [
        ft.LogisticRegression(**BUDGET, bounds=(-3, 3), random_state=0).fit(rows, Y)
        for rows in (wild, np.clip(wild, -3, 3))
    ]
    np.testing.assert_allclose(models[0].coef_, models[1].coef_)


def test_replace_one_is_noisier_at_the_same_budget():
    first, second = (
        ft.LogisticRegression(**BUDGET, adjacency=adjacency).fit(X, Y)
        for adjacency in ("add-remove", "replace-one")
    )
    assert first.privacy_.adjacency == "add-remove"
    assert second.privacy_.adjacency == "replace-one"
    events = [model.history_[-1].receipts[-1].event for model in (first, second)]
    assert events[1].noise > 1.9 * events[0].noise


def test_a_method_of_ones_own():
    def nothing(ledger, problem):
        yield ft.Step(1, (np.zeros(problem.width), np.array(1.0)))

    model = ft.LogisticRegression(**BUDGET, solver=nothing).fit(X, Y)
    assert (model.predict(X) == 1).all()


@pytest.mark.parametrize(
    ("kind", "solver", "several", "filter"),
    [
        (ft.LogisticRegression, "objective", True, BasicFilter),
        (ft.LogisticRegression, "objective", False, None),
        (ft.LogisticRegression, "output", True, BasicFilter),
        (ft.LogisticRegression, "privgene", True, None),
        (ft.LinearSVC, "dpagd", True, None),
    ],
)
def test_what_a_method_refuses_costs_nothing(kind, solver, several, filter):
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5), filter=filter)
    model = kind(0.5, 5e-6, ledger=ledger, solver=solver, classes=range(3) if several else (0, 1))
    with pytest.raises(Unsupported):
        model.fit(X3 if several else X, Y3 if several else Y)
    assert ledger.share == 0


FAR = np.vstack([X[:50], 1e6 * X[:50], np.full((1, 5), 1e300), -np.full((1, 5), 1e12), X[:20] + 3])


@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (np.full(5, -2.0), np.arange(1.0, 6.0)), None])
@pytest.mark.parametrize("storage", [np.asarray, sparse.csr_array])
def test_rows_are_clipped_alike_by_fit_predict_and_exports(bounds, storage):
    """What lies beyond the bounds is answered as what lies on them."""
    several = LogisticRegression(5.0, 1e-5, classes=(0, 1, 2), bounds=bounds).fit(X3, Y3)
    models = [
        ft.LogisticRegression(5.0, 1e-5, bounds=bounds).fit(X, Y),
        ft.LinearSVC(5.0, 1e-5, bounds=bounds).fit(X, Y),
        several,
    ]
    within = FAR if bounds is None else np.clip(FAR, *bounds)
    for model in models:
        scores = model.decision_function(storage(FAR))
        np.testing.assert_allclose(scores, model.decision_function(within), rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(model.predict(storage(FAR)), model.predict(within))
        plain = model.to_sklearn()
        np.testing.assert_allclose(plain.decision_function(FAR), scores, rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(plain.predict(FAR), model.predict(FAR))
        if hasattr(model, "predict_proba"):
            np.testing.assert_allclose(plain.predict_proba(FAR), model.predict_proba(FAR), atol=1e-9)


@pytest.mark.parametrize("bounds", [(0, 1), None])
def test_a_regression_stays_within_its_bounds(bounds):
    model = ft.LinearRegression(5.0, 1e-5, bounds=bounds, target_bounds=(-50, 60)).fit(XR, YR)
    far = np.vstack([XR[:50], 1e9 * XR[:50], -1e9 * XR[:50], XR[:50] - 1])
    found = model.predict(far)
    assert found.min() >= -50
    assert found.max() <= 60
    assert found.std() > 1
    np.testing.assert_allclose(found, model.predict(far if bounds is None else np.clip(far, 0, 1)), rtol=1e-9)
    np.testing.assert_allclose(model.to_sklearn().predict(far), found, rtol=1e-9)
    assert pickle.loads(pickle.dumps(model.to_sklearn())).predict(far).shape == found.shape


def test_one_row_far_out_does_not_ruin_a_score():
    rows, target = XR.copy(), YR.copy()
    rows[0] = 1e9
    model = ft.LinearRegression(20.0, 1e-5, bounds=(0, 1), target_bounds=RANGE).fit(rows, target)
    assert model.score(rows, target) > 0.8


@pytest.mark.parametrize("bounds", [(0, np.nan), (np.nan, 1), ([0, 0, 0, np.nan, 0], 1)])
def test_a_bound_without_its_other_end_is_refused_and_not_bought(bounds):
    ledger = ft.Ledger(ft.Budget(2.0, 1e-5))
    with pytest.raises(InvalidValue, match="NaN at both ends of a feature"):
        ft.LogisticRegression(ledger=ledger, bounds=bounds).fit(X, Y)
    assert ledger.share == 0
