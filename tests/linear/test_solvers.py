"""Methods as objects, and their settings: the algorithm's signature is the one list of them."""

import inspect
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV

import farthing as ft
from farthing.accounting.filters import BasicFilter, RdpFilter
from farthing.linear import solvers
from farthing.linear.methods.dpagd import Lengths, dpagd
from farthing.linear.selection import Folds, PrivateScore
from farthing.linear.solvers import CLASSIFIERS, REGRESSORS, Solver, SolverMethod

RNG = np.random.default_rng(3)
X = RNG.uniform(size=(600, 2))
Y = (X[:, 0] > X[:, 1]).astype(int)
KINDS = {kind.__name__: kind for kind in Solver.__subclasses__()}
KNOWN = [*CLASSIFIERS.items(), *REGRESSORS.items()]


def keywords(algorithm: Any) -> dict[str, Any]:
    found = inspect.signature(algorithm).parameters.values()
    return {each.name: each.default for each in found if each.kind is each.KEYWORD_ONLY}


def test_every_method_has_one_object_with_its_algorithms_arguments() -> None:
    assert sorted(id(kind._plain) for kind in KINDS.values()) == sorted(id(method) for _, method in KNOWN)
    for name, kind in KINDS.items():
        assert getattr(ft, name) is kind
        assert kind().get_params() == keywords(kind._plain.algorithm)
        assert list(inspect.signature(kind).parameters) == list(keywords(kind._plain.algorithm))


def test_an_argument_that_an_algorithm_is_given_needs_no_second_list() -> None:
    def novel(ledger: Any, problem: Any, *, depth: int | None = None, flat: bool = False) -> Any: ...

    class Novel(Solver, known=SolverMethod(novel)):
        """One of the day after."""

    assert Novel(depth=3).get_params() == {"depth": 3, "flat": False}
    assert SolverMethod(novel).parsed(["depth=none", "flat=true"], "novel") == {"depth": None, "flat": True}


@pytest.mark.parametrize(("name", "method"), KNOWN)
def test_aliases_lead_to_settings_and_hide_none(name: str, method: SolverMethod) -> None:
    assert {*method.aliases.values()} <= {*method.settings}, name
    assert not {*method.aliases} & {*method.settings}


def test_the_papers_names_say_the_same() -> None:
    paper = ft.DPAGD(gamma=0.2, C_grad=3.0, clip_objective=2.0, steps=60, m=20, tau=5)
    ours = ft.DPAGD(growth=0.2, clip_norm=3.0, objective_clip=2.0, splits=60, grid=Lengths(20, period=5))
    assert paper.get_params() == ours.get_params()
    assert repr(ft.DPAGD(gamma=0.2)) == "DPAGD(growth=0.2)"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gama": 1}, r"DPAGD has no setting 'gama': it has .*growth.*splits"),
        ({"gamma": 1, "growth": 2}, "'growth' sets 'growth' a second time"),
        ({"grid.width": 1}, "has no setting"),
    ],
)
def test_names_that_do_not_exist_are_refused_with_those_that_do(settings: Any, said: str) -> None:
    with pytest.raises(ft.InvalidValue, match=said):
        ft.DPAGD(**settings)


def test_the_settings_reach_the_algorithm() -> None:
    fits = [
        ft.LogisticRegression(1.0, 1e-6, solver=solver, random_state=1).fit(X, Y)
        for solver in (
            "dpagd",
            ft.DPAGD(),
            ft.DPAGD(splits=5.0),
            SolverMethod(dpagd, CLASSIFIERS["dpagd"].filter),
        )
    ]
    np.testing.assert_array_equal(fits[0].coef_, fits[1].coef_)
    np.testing.assert_array_equal(fits[0].coef_, fits[3].coef_)
    assert fits[2].n_iter_ <= 5 < fits[0].n_iter_
    assert fits[2].privacy_.accountant == "zcdp"


def test_batches_of_dpagd_are_charged_by_another_filter() -> None:
    model = ft.LogisticRegression(2.0, 1e-6, solver=ft.DPAGD(sampling_rate=0.3, splits=8.0)).fit(X, Y)
    assert model.privacy_.accountant == "rdp"
    assert model.privacy_.epsilon <= 2.0


@pytest.mark.parametrize("solver", [ft.NonPrivate(penalty=1e6), ft.OutputPerturbation(penalty=1e6)])
def test_a_large_penalty_makes_small_weights(solver: Solver) -> None:
    model = ft.LogisticRegression(1.0, 1e-6, solver=solver).fit(X, Y)
    assert float(np.abs(model.coef_).max()) < 0.01
    assert (model.privacy_.epsilon == np.inf) is (type(solver) is ft.NonPrivate)


def test_scikit_learn_copies_them_and_looks_into_them() -> None:
    model = ft.LogisticRegression(1.0, 1e-6, solver=ft.DPAGD(gamma=0.2))
    copy = clone(model).set_params(solver__growth=0.5)
    assert (copy.solver.growth, model.solver.growth) == (0.5, 0.2)
    assert copy.get_params()["solver__growth"] == 0.5
    ledger = ft.Ledger(ft.Budget(4.0, 1e-5), filter=BasicFilter)
    model = ft.LogisticRegression(0.3, 5e-7, ledger=ledger, solver=ft.DPSGD())
    grid = {"solver__momentum": [0.0, 0.9]}
    score = PrivateScore(ledger, 0.1, 0.0, records=300)
    search = GridSearchCV(model, grid, cv=Folds(2), scoring=score, error_score="raise").fit(X, Y)
    assert search.best_estimator_.solver.momentum == search.best_params_["solver__momentum"]
    assert ledger.spent.epsilon == pytest.approx(5 * 0.3 + 4 * 0.1)


def test_batches_are_spent_by_the_filter_that_prices_them() -> None:
    batches = ft.DPAGD(sampling_rate=0.2, splits=4)
    model = ft.LogisticRegression(1.0, 1e-6, solver=batches).fit(X, Y)
    assert model.privacy_.accountant == "rdp"
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6), filter=RdpFilter)
    assert ft.LogisticRegression(ledger=ledger, solver=batches).fit(X, Y).privacy_.accountant == "rdp"
    assert 0 < ledger.share <= 1
    basic = ft.Ledger(ft.Budget(1.0, 1e-6), filter=BasicFilter)
    ft.LogisticRegression(0.5, 1e-7, ledger=basic, solver=batches).fit(X, Y)
    assert basic.spent.epsilon == pytest.approx(0.5)
    with pytest.raises(ft.Unsupported, match="uses batches: pass a fresh ledger with filter=RdpFilter"):
        ft.LogisticRegression(ledger=ft.Ledger(ft.Budget(1.0, 1e-6)), solver=batches).fit(X, Y)


def numbers() -> list[tuple[str, str, SolverMethod]]:
    def is_number(kind: Any) -> bool:
        return bool({int, float} & {*solvers._alternatives(kind)})

    return [
        (name, setting, method)
        for name, method in KNOWN
        for setting in method.settings
        if is_number(solvers._annotation(method.algorithm, setting))
    ]


@pytest.mark.parametrize(("name", "setting", "method"), numbers())
def test_nonsense_is_refused_before_anything_is_charged(
    name: str, setting: str, method: SolverMethod
) -> None:
    if setting == "seed":
        pytest.skip("any whole number will do")
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6), filter=method.filter)
    model = ft.LogisticRegression(ledger=ledger)
    if method in REGRESSORS.values():
        model = ft.LinearRegression(ledger=ledger, target_bounds=(0, 1))
    for nonsense in (float("nan"), -1.0, "much"):
        with pytest.raises((ft.InvalidValue, ft.Unsupported)):
            model.set_params(solver=method.with_({setting: nonsense})).fit(X, Y)
    assert ledger.share == 0


def test_a_class_is_not_an_object() -> None:
    with pytest.raises(ft.InvalidValue, match=r"DPAGD\(\), not the class itself"):
        ft.LogisticRegression(1.0, 1e-6, solver=ft.DPAGD).fit(X, Y)
