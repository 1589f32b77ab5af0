"""The functional mechanism's loss against ε, with and without repair, beside least squares.

    python experiments/functional_mechanism.py [--repeats 10] [--figure functional_mechanism.png]

The curve of "Deep learning with differential privacy" (Jiang), Figure 2: the loss J = Σ (y - x·θ)² / 2m on
features and target in [-1, 1], 80 % of the records to train and 20 % to test, pure ε-DP when a record is
replaced. The paper's 370,000 records of IPUMS "US" are not at hand; us_cps_income.npz, 280,005 tax units of
the US Current Population Survey, stands in for them, so that shapes may be compared and figures may not. The
stationary point of a noisy quadratic that is not convex can be anywhere: medians and worst draws are shown.
"""

import argparse

import numpy as np

import farthing as ft
from farthing.algorithms.functional import functional
from farthing.algorithms.problem import Problem
from farthing.data import find
from farthing.losses import squared
from farthing.tables import Table

FILE = "us_cps_income.npz"
EPSILONS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0)
VARIANTS = {
    "as published": {"repair": False},
    "repaired": {"repair": True},
    "repaired, upper triangle": {"repair": True, "triangle": True},
}


def loss(X, y, u, constant):
    """J on targets mapped from [0, 1] to [-1, 1]: residuals double."""
    return float(np.mean(np.square(2 * (y - X @ u - constant))) / 2)


def measure(X, y, repeats):
    """{variant: losses of shape (ε, repeat)}, and the loss of least squares and of the training mean."""
    order = np.random.default_rng(0).permutation(len(y))
    train, test = np.split(order, [int(0.8 * len(y))])
    rows = np.column_stack([X[train], np.ones(len(train))])
    *u, constant = np.linalg.lstsq(rows, y[train], rcond=None)[0]
    table, problem = Table(X[train], y[train]), Problem(squared, len(train), X.shape[1], unit=False)
    found = {}
    for name, options in VARIANTS.items():
        found[name] = np.empty((len(EPSILONS), repeats))
        for place in np.ndindex(found[name].shape):
            ledger = ft.Ledger(ft.Budget(EPSILONS[place[0]], 0.0, "replace-one"))
            model = ft.run(functional(ledger.over(table), problem, **options))
            found[name][place] = loss(X[test], y[test], *model.w)
    mean = loss(X[test], y[test], np.zeros(X.shape[1]), y[train].mean())
    return found, loss(X[test], y[test], np.array(u), constant), mean


def report(found, plain, mean):
    print(f"J on held-out records: least squares {plain:.4f}, the mean alone {mean:.4f}")
    print(f"{'ε':26}" + "".join(f"{epsilon:>10g}" for epsilon in EPSILONS))
    for name, losses in found.items():
        for figure, values in (("median", np.median(losses, axis=1)), ("worst", losses.max(axis=1))):
            title = name if figure == "median" else f"{'worst of ' + str(losses.shape[1]):>24}"
            print(f"{title:26}" + "".join(f"{value:10.4g}" for value in values))


def draw(found, plain, mean, path):
    try:
        from matplotlib import pyplot
    except ImportError as error:
        print(f"no figure: {error}")
        return
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name, losses in found.items():
        (line,) = axes.plot(EPSILONS, np.median(losses, axis=1), marker="o", label=name)
        low, high = np.quantile(losses, [0.1, 0.9], axis=1)
        axes.fill_between(EPSILONS, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.axhline(plain, color="black", linestyle="--", label="least squares, not private")
    axes.axhline(mean, color="grey", linestyle=":", label="the mean alone")
    axes.set(xscale="log", yscale="log", xlabel="ε", ylabel="J, held-out (median, 10 % to 90 %)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"drawn in {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--figure", default="functional_mechanism.png")
    given = parser.parse_args()
    path = find(FILE)
    if path is None:
        print(f"skipped: there is no {FILE} in the folder that FARTHING_DATA names")
        return
    data = np.load(path)
    measured = measure(data["X"].astype(np.float64), data["y"].astype(np.float64), given.repeats)
    report(*measured)
    draw(*measured, given.figure)


if __name__ == "__main__":
    main()
