"""Compare linear models on real tables with peers: accuracy at the same budget, and time.

    python -m benchmarks.tabular [classify regress components speed turns] [--repeats 3] [--methods] [--data]

Data come from the folder named by FARTHING_DATA (or ../shared/data); missing data is reported and left out.
Every figure is computed in this run. Classification: 5-fold cross-validation, δ = 1e-8, add-remove; accuracy
in percent, and for some methods AUC and mean log-loss; ± is the standard error over repeats. The tables
marked "unseen" played no part in choosing the rules of the default. diffprivlib is given, at every ε, the
best of `SETTINGS` on the test folds of the first repeat, at no charge: an advantage that we do not take.
"a9a" is LIBSVM's encoding of Adult (123 binary columns), "adult" the table that farthing ships (108 columns).
All of it takes about two hours.
"""

import argparse
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from scipy import sparse
from sklearn import linear_model
from sklearn.metrics import (
    d2_absolute_error_score,
    d2_pinball_score,
    d2_tweedie_score,
    log_loss,
    r2_score,
    roc_auc_score,
)
from sklearn.model_selection import KFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer

import farthing as ft
from farthing.data.schema import find
from farthing.linear.solvers import CLASSIFIERS, REGRESSORS

EPSILONS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
DELTA = 1e-8
SEEN = ("a9a", "adult", "bank", "ipums-br")
UNSEEN = ("census", "kddcup99", "mnist 0-4/5-9")
Fit = Callable[[Any, Any, float], Any]


def load(name: str) -> tuple[Any, Any] | None:
    """Return features in [0, 1] and labels, or None."""
    file = {
        "a9a": "adult_a9a.npz",
        "adult": "adult.npz",
        "bank": "bank.npz",
        "ipums-br": "ipums_br.npz",
        "census": "census_income_kdd.npz",
        "kddcup99": "kddcup99_10pct.npz",
        "mnist 0-4/5-9": "mnist.npz",
        "mnist": "mnist.npz",
    }[name]
    path = find(file)
    if path is None:
        print(f"{name} is left out: there is no {file}")
        return None
    data = np.load(path)
    if name in ("a9a", "adult"):
        return np.vstack([data["X_train"], data["X_test"]]), np.concatenate([data["y_train"], data["y_test"]])
    if "mnist" in name:
        X = (data["X_train"].reshape(-1, 784) / 255).astype(np.float32)
        return X, (data["y_train"] > 4).astype(int) if "-" in name else data["y_train"].astype(int)
    X, y = (data["X"], data["y"]) if "X" in data else (data["X_train"], data["y_train"])
    if name in UNSEEN:
        chosen = np.random.default_rng(0).choice(len(X), 60_000, replace=False)
        X, y = X[chosen], y[chosen]
    return X, y.astype(int)


def ours(solver: str) -> Fit:
    def fit(X: Any, y: Any, epsilon: float) -> Any:
        return ft.LogisticRegression(epsilon, DELTA, solver=solver, classes=(0, 1), bounds=(0, 1)).fit(X, y)

    return fit


# diffprivlib's C, the inverse of its penalty; rows are shrunk to norm 1, which did better everywhere than a
# bound of √columns on rows as they are
SETTINGS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 10.0)


def diffprivlib(C: float) -> Fit:
    """Return diffprivlib's scores under pure ε-DP, which is all it offers."""
    from diffprivlib.models import LogisticRegression

    def fit(X: Any, y: Any, epsilon: float) -> Any:
        model = LogisticRegression(epsilon=epsilon, data_norm=1.0, C=C, max_iter=1000)
        return make_pipeline(Normalizer(), model).fit(X, y)

    return fit


def best_of_diffprivlib(X: Any, y: Any, epsilon: float, repeats: int) -> dict[str, Any]:
    """Return its results with the setting that does best on the test folds of the first repeat."""
    scores = {
        setting: cross_validated(diffprivlib(setting), X, y, epsilon, 1)["accuracy"][0]
        for setting in SETTINGS
    }
    best = max(scores, key=lambda setting: scores[setting])
    print(f"    diffprivlib at ε = {epsilon:g}: C =", best, flush=True)
    return cross_validated(diffprivlib(best), X, y, epsilon, repeats)


def folds(X: Any, y: Any, repeats: int) -> Iterator[tuple[int, Any, Any, Any, Any]]:
    for repeat in range(repeats):
        for train, test in KFold(5, shuffle=True, random_state=repeat).split(X):
            yield repeat, X[train], y[train], X[test], y[test]


def cross_validated(fit: Fit, X: Any, y: Any, epsilon: float, repeats: int) -> dict[str, Any]:
    """Return accuracy, AUC and log-loss: means over folds, one per repeat."""
    found: dict[int, list[tuple[float, float, float]]] = {}
    for repeat, X_train, y_train, X_test, y_test in folds(X, y, repeats):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # diffprivlib warns about clipping, scikit-learn about iterations
            model = fit(X_train, y_train, epsilon)
        positive = model.predict_proba(X_test)[:, 1]
        found.setdefault(repeat, []).append(
            (
                100 * float(np.mean(model.predict(X_test) == y_test)),
                float(roc_auc_score(y_test, positive)),
                float(log_loss(y_test, positive, labels=[0, 1])),
            )
        )
    return {
        name: np.array([np.mean([fold[place] for fold in found[repeat]]) for repeat in found])
        for place, name in enumerate(("accuracy", "AUC", "log-loss"))
    }


def classify(repeats: int, methods: list[str], names: list[str]) -> None:
    """Print the accuracy of every method and peer at every ε."""
    rows: dict[str, Callable[[Any, Any, float], dict[str, Any]]] = {
        name: functools.partial(cross_validated, ours(name), repeats=repeats) for name in methods
    }
    try:
        import diffprivlib as _  # noqa: F401

        rows["diffprivlib"] = functools.partial(best_of_diffprivlib, repeats=repeats)
    except ImportError as error:
        print(f"diffprivlib is left out: {error}")
    for name in names:
        data = load(name)
        if data is None:
            continue
        X, y = data
        majority = 100 * max(np.mean(y), 1 - np.mean(y))
        epsilons = EPSILONS if name in SEEN else (0.1, 1.0)
        print(f"\n{name}{' (unseen)' if name in UNSEEN else ''}: {X.shape[0]} x {X.shape[1]}, ", end="")
        print(f"majority {majority:.1f}; accuracy at ε =", *epsilons, flush=True)
        for method, row in rows.items():
            if name in UNSEEN and method not in ("auto", "diffprivlib"):
                continue
            results = [row(X, y, epsilon) for epsilon in epsilons]
            show(method, "accuracy", results, "6.2f")
            if method in ("auto", "dpagd", "diffprivlib"):
                show("", "AUC", results, "6.3f")
                show("", "log-loss", results, "6.3f")


def show(method: str, figure: str, results: list[dict[str, Any]], form: str) -> None:
    cells = []
    for result in results:
        values = result[figure]
        error = f" ±{values.std(ddof=1) / np.sqrt(len(values)):.2g}" if len(values) > 1 else ""
        cells.append(f"{values.mean():{form}}{error}")
    print(f"  {method:12} {figure:9}", "  ".join(cells), flush=True)


REGRESSIONS = {
    "us_cps_income": "us_cps_income.npz",
    "california_housing": "california_housing.npz",
    "census weeks worked": "census_income_kdd.npz",
    "fertility": "us_census1980_fertility.npz",
}


def load_regression(name: str) -> tuple[Any, Any] | None:
    path = find(REGRESSIONS[name])
    if path is None:
        print(f"{name} is left out: there is no {REGRESSIONS[name]}")
        return None
    data = np.load(path)
    if name == "census weeks worked":
        return data["X_train"][:, :-1], data["X_train"][:, -1].astype(float)
    return data["X"], data["y"].astype(float)


def regress(repeats: int) -> None:
    """Print the held-out R² of every method."""
    for name in REGRESSIONS:
        data = load_regression(name)
        if data is None:
            continue
        X, y = data
        plain = np.mean(
            [
                r2_score(y_test, linear_model.LinearRegression().fit(X_train, y_train).predict(X_test))
                for _, X_train, y_train, X_test, y_test in folds(X, y, 1)
            ]
        )
        epsilons = (0.1, 1.0, 10.0)
        print(f"\n{name}: {X.shape[0]} x {X.shape[1]}, least squares {plain:.3f}; R² at ε =", *epsilons)
        for solver in REGRESSORS:
            results = []
            for epsilon in epsilons:
                scores: dict[int, list[float]] = {}
                for repeat, X_train, y_train, X_test, y_test in folds(X, y, repeats):
                    model = ft.LinearRegression(
                        epsilon, DELTA, solver=solver, bounds=(0, 1), target_bounds=(0, 1)
                    ).fit(X_train, y_train)
                    scores.setdefault(repeat, []).append(r2_score(y_test, model.predict(X_test)))
                results.append({"R²": np.array([np.mean(found) for found in scores.values()])})
            show(solver, "R²", results, "7.3f")


LOSSES: dict[str, tuple[Any, Any, Any]] = {  # private model, without privacy, share of the loss explained
    "median": (
        lambda *budget, **more: ft.QuantileRegressor(*budget, **more),
        None,
        lambda y, found: d2_pinball_score(y, found, alpha=0.5),
    ),
    "quantile 0.9": (
        lambda *budget, **more: ft.QuantileRegressor(*budget, quantile=0.9, **more),
        None,
        lambda y, found: d2_pinball_score(y, found, alpha=0.9),
    ),
    "Huber, mean absolute error": (
        lambda *budget, **more: ft.HuberRegressor(*budget, threshold=0.05, **more),
        lambda: linear_model.HuberRegressor(alpha=0.0, max_iter=1000),
        lambda y, found: d2_absolute_error_score(y, found),
    ),
    "Poisson, deviance": (
        lambda *budget, **more: ft.PoissonRegressor(*budget, **more),
        lambda: linear_model.PoissonRegressor(alpha=0.0, max_iter=1000),
        lambda y, found: d2_tweedie_score(y, np.maximum(found, 1e-9), power=1),
    ),
}


MOST_ROWS = 20_000  # of each table: a few thousand are where noise tells


def losses(repeats: int) -> None:
    """Print the share of each loss that is explained on held-out rows, beside models without privacy."""
    for name in REGRESSIONS:
        data = load_regression(name)
        if data is None:
            continue
        places = np.random.default_rng(0).permutation(len(data[1]))[:MOST_ROWS]
        X, y = data[0][places], data[1][places]
        print(f"\n{name}: {X.shape[0]} x {X.shape[1]}; D² at ε = 0.1 1, and without privacy", flush=True)
        for loss, (private, plain, score) in LOSSES.items():
            results = []
            for epsilon in (0.1, 1.0, None):
                found: dict[int, list[float]] = {}
                for repeat, X_train, y_train, X_test, y_test in folds(X, y, repeats):
                    if epsilon is not None:
                        model = private(epsilon, DELTA, bounds=(0, 1), target_bounds=(0, 1))
                    elif plain is not None:
                        model = plain()
                    else:  # scikit-learn's linear programme takes hours here
                        model = private(1e6, 1e-3, bounds=(0, 1), target_bounds=(0, 1))
                    answers = model.fit(X_train, y_train).predict(X_test)
                    found.setdefault(repeat, []).append(score(y_test, answers))
                results.append({"D²": np.array([np.mean(each) for each in found.values()])})
            show(loss, "D²", results, "7.3f")


def components(repeats: int) -> None:
    """Print the variance captured by 10 private components, over that of the best 10."""
    data = load("mnist")
    if data is None:
        return
    rows = data[0].astype(float)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    moments = rows.T @ rows
    best = np.linalg.eigvalsh(moments)[-10:].sum()
    print("\nMNIST, rows of norm 1, 10 components: captured over best at ε = 0.1 0.4 1")
    results = []
    for epsilon in (0.1, 0.4, 1.0):
        found = [ft.PCA(10, epsilon, DELTA).fit(rows).components_ for _ in range(repeats)]
        results.append({"captured": np.array([np.trace(c @ moments @ c.T) / best for c in found])})
    show("PCA", "captured", results, "6.4f")


def seconds(function: Callable[[], object], times: int = 5) -> float:
    """Return the least CPU time of a few calls."""
    taken = []
    for _ in range(times):
        start = time.process_time()
        function()
        taken.append(time.process_time() - start)
    return min(taken)


def speed() -> None:
    """Time one thread (set OMP_NUM_THREADS=1) on Adult as a9a at ε = 1."""
    data = load("a9a")
    if data is None:
        return
    X, y = data[0].astype(np.float32), data[1]
    print(f"\nspeed on {X.shape[0]} x {X.shape[1]} float32, ε = 1, CPU seconds (best of 5)")
    auto = seconds(lambda: ours("auto")(X, y, 1.0))
    print(f"  auto {auto:.3f}")
    plain = seconds(lambda: linear_model.LogisticRegression(max_iter=1000).fit(X, y), 3)
    print(f"  scikit-learn lbfgs, not private {plain:.3f}: ×{plain / auto:.1f}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            peer = seconds(lambda: diffprivlib(0.01)(X, y, 1.0), 3)
            print(f"  diffprivlib {peer:.3f}: ×{peer / auto:.1f}")
        except ImportError as error:
            print(f"  diffprivlib is left out: {error}")
    if "dpagd" in CLASSIFIERS:
        print(f"  dpagd {seconds(lambda: ours('dpagd')(X, y, 1.0), 3):.3f}")
    hundred_steps(X, y)
    for size in (256, 1024, 4096):
        batches(X, y, size)


def turns() -> None:
    """Time made-up tables of several forms by turns with scikit-learn's lbfgs and Ridge, not private."""
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(30_000, 100))
    y, numbers = made_up(X, rng)
    ten = ((X - 0.5) @ rng.normal(size=(100, 10)) * 3 + rng.gumbel(size=(30_000, 10))).argmax(axis=1)
    print("\nmade-up tables, ε = 1, CPU seconds (medians of 7, by turns): ours, scikit-learn's, ratio")
    turn("30,000 x 100", bounded((0, 1)), lbfgs, X, y)
    turn("the same in units of their own", bounded((-300, 700)), lbfgs, X * 1000 - 300, y, X)
    turn("the same, ten classes", bounded((0, 1), range(10)), lbfgs, X, ten)
    turn("the same, regression and Ridge", least, linear_model.Ridge().fit, X, numbers)
    units = X * 1000 - 300, numbers * 10 - 5
    turn("that in units of its own", in_units, linear_model.Ridge().fit, *units)
    for rows, width in ((5_000, 20), (200_000, 10), (50_000, 300)):
        X = rng.uniform(size=(rows, width))
        y, numbers = made_up(X, rng)
        turn(f"{rows:,} x {width}", bounded((0, 1)), lbfgs, X, y)
        turn("the same, regression and Ridge", least, linear_model.Ridge().fit, X, numbers)
    for rows, width, share in ((100_000, 1_000, 0.01), (20_000, 5_000, 0.002)):
        stored = sparse.random(rows, width, share, format="csr", random_state=1)
        turn(
            f"{rows:,} x {width:,}, {share:.1%} stored",
            bounded((0, 1)),
            lbfgs,
            stored,
            made_up(stored, rng)[0],
        )
    X = rng.uniform(size=(1_000_000, 50)).astype(np.float32)
    y, numbers = made_up(X, rng)
    turn("1,000,000 x 50", bounded((0, 1)), lbfgs, X, y)
    turn("the same, regression and Ridge", least, linear_model.Ridge().fit, X, numbers)


def made_up(X: Any, rng: np.random.Generator) -> tuple[Any, Any]:
    """Return labels that follow a line, and numbers in [0, 1] on it."""
    line = np.asarray(X @ rng.normal(size=X.shape[1])).ravel()
    line = (line - line.mean()) / line.std()
    labels = (rng.uniform(size=len(line)) < 1 / (1 + np.exp(-2 * line))).astype(int)
    return labels, np.clip(line / 8 + 0.5, 0, 1)


def bounded(bounds: Any, classes: Any = (0, 1)) -> Callable[[Any, Any], Any]:
    return lambda X, y: ft.LogisticRegression(1.0, DELTA, classes=list(classes), bounds=bounds).fit(X, y)


def least(X: Any, y: Any) -> Any:
    return ft.LinearRegression(1.0, DELTA, bounds=(0, 1), target_bounds=(0, 1)).fit(X, y)


def in_units(X: Any, y: Any) -> Any:
    return ft.LinearRegression(1.0, DELTA, bounds=(-300, 700), target_bounds=(-5, 5)).fit(X, y)


def lbfgs(X: Any, y: Any) -> Any:
    return linear_model.LogisticRegression(max_iter=1000).fit(X, y)


def turn(name: str, ours: Any, theirs: Any, X: Any, y: Any, scaled: Any = None) -> None:
    """Print median CPU times and ratios of both, taken by turns; a peer may be given the table ``scaled``."""
    other = X if scaled is None else scaled
    pairs = [(seconds(lambda: ours(X, y), 1), seconds(lambda: theirs(other, y), 1)) for _ in range(8)][1:]
    mine, peer = np.median(pairs, axis=0)
    ratios = sorted(its / own for own, its in pairs)
    said = f"×{np.median(ratios):.2f} (×{ratios[0]:.2f} to ×{ratios[-1]:.2f})"
    print(f"  {name:32} {mine:8.3f} {peer:8.3f}  {said}", flush=True)


def hundred_steps(X: Any, y: Any) -> None:
    """Time full-batch steps through the ledger, relative to the two products they need."""
    from farthing.data.tables import Features, Table
    from farthing.linear.losses import LinearGradient, logistic

    features = Features(X.shape[1])
    query = ft.Query(ft.Everyone(), LinearGradient(logistic, features), ft.ClipNorm(1.0), ft.Gaussian(1e3))
    attached = ft.Ledger(ft.Budget(1.0, 1e-5)).over(Table(X, y.astype(float)))
    w, wide, v = np.zeros(features.size), X.astype(np.float64), np.ones(len(X))

    def steps() -> None:
        for _ in range(100):
            attached.ask(query, w)

    def products() -> None:
        for _ in range(100):
            wide @ w[:-1]
            wide.T @ v

    ours_, needed = seconds(steps, 2), seconds(products, 2)
    print(f"  100 full-batch steps {ours_:.3f}, 200 products in float64 {needed:.3f}: ×{ours_ / needed:.2f}")


def batches(X: Any, y: Any, size: int, steps: int = 1500, repeats: int = 3) -> None:
    """Time the same number of Poisson batches of DP-SGD, ours and Opacus's."""
    from farthing.data.tables import Features, Table
    from farthing.linear.losses import LinearGradient, logistic

    rate = size / len(X)
    features = Features(X.shape[1])
    query = ft.Query(ft.Poisson(rate), LinearGradient(logistic, features), ft.ClipNorm(1.0), ft.Gaussian(4.0))

    def train() -> None:
        ledger = ft.Ledger(ft.Budget(10.0, 1e-5))
        ledger.promise(query, times=steps)
        attached, w = ledger.over(Table(X, y.astype(float))), np.zeros(features.size)
        for _ in range(steps):
            w = w - 0.5 * attached.ask(query, w).value / (rate * len(X))

    try:
        import opacus
        import torch
    except ImportError as error:
        print(
            f"  {steps} DP-SGD batches of {size}: {seconds(train, repeats):.3f}; Opacus is left out: {error}"
        )
        return
    torch.set_num_threads(1)

    def rival() -> None:
        model = torch.nn.Linear(X.shape[1], 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        rows = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(y.astype(np.float32)))
        loader = torch.utils.data.DataLoader(rows, batch_size=size)
        model, optimizer, loader = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=4.0, max_grad_norm=1.0
        )
        loss = torch.nn.BCEWithLogitsLoss()
        taken = 0
        while taken < steps:
            for x, target in loader:
                optimizer.zero_grad()
                loss(model(x).squeeze(1), target).backward()
                optimizer.step()
                taken += 1
                if taken == steps:
                    break

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # alternating, under equal conditions
        timed = [(seconds(train, 1), seconds(rival, 1)) for _ in range(repeats)]
    mine, theirs = map(min, zip(*timed, strict=True))
    print(f"  {steps} DP-SGD batches of {size}: {mine:.3f}; Opacus {theirs:.3f}: ×{theirs / mine:.1f}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("classify", "regress", "losses", "components", "speed", "turns")
    parser.add_argument("parts", nargs="*", default=parts, help="which parts to run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--methods", nargs="*", default=list(CLASSIFIERS))
    parser.add_argument("--data", nargs="*", default=[*SEEN, *UNSEEN])
    given = parser.parse_args([] if arguments is None else arguments)
    if "speed" in given.parts:
        speed()
    if "turns" in given.parts:
        turns()
    if "classify" in given.parts:
        classify(given.repeats, given.methods, given.data)
    if "regress" in given.parts:
        regress(given.repeats)
    if "losses" in given.parts:
        losses(given.repeats)
    if "components" in given.parts:
        components(given.repeats)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
