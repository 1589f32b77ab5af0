"""A-DDP's Figures 1 and 2: accuracy and objective against ε, and what the paper left on the table.

    python experiments/figures_1_2.py [--folds 2] [--data adult bank ipums-br] [--figure figures_1_2.png]

Cheng, Liu, Wang & Lu 2020, "Adaptive Distributed Differential Privacy with SGD", Figures 1 and 2: logistic
regression on Adult (a9a's 123 binary features), BANK and IPUMS-BR, 100 records a user, δ = 1e-8, clip 3,
T = 10 for private methods, means over 5 folds. The budget is each user's, for one record. Rows are shuffled
with a fixed seed and dealt out to users in that order. The objective is the mean logistic loss of the records
that were learnt from (`together` learns from rows shrunk to norm 1, so its margins are divided by their
norms). Nothing is tuned: every rate follows from public numbers (`algorithms.addp`), so that no figure is the
best of several. The paper does not give its rates.

Above the line is what the paper compares. Below it is the same budget of the same users, spent by tight
accounting; with the whole local gradient in place of one record; and with each user adding a share of the
noise, where only sums are seen. Only the last changes whom a user trusts.
"""

import argparse
import time

import numpy as np

from farthing.algorithms.addp import addp
from farthing.algorithms.addp_baselines import non_private, sgd_adv, sgd_maj, sgd_pass
from farthing.algorithms.problem import Problem
from farthing.algorithms.together import learnt_in, together
from farthing.budget import Adjacency, Budget
from farthing.crowd.protocol import Accountant, Trust, Weights
from farthing.crowd.simulated import Simulated
from farthing.data import find
from farthing.losses import logistic
from farthing.query import run
from farthing.samplers import Everyone, Poisson
from farthing.tables import Table

EPSILONS = (0.1, 0.4, 0.8, 1.6)
DELTA, CLIP, EACH, PLANNED, MORE = 1e-8, 3.0, 100, 10, 1000
FILES = {"adult": "adult_a9a.npz", "bank": "bank.npz", "ipums-br": "ipums_br.npz"}
TIGHT = Accountant.TIGHT

# Name: (adjacency of the budget, steps over a crowd).
PAPER = {
    "A-DDP, one record (2C)": (Adjacency.ADD_REMOVE, lambda c, p: addp(c, p, weights=Weights.PLAIN)),
    "A-DDP, Poisson 1/100 (C)": (
        Adjacency.ADD_REMOVE,
        lambda c, p: addp(c, p, draw=Poisson(1 / EACH), weights=Weights.PLAIN),
    ),
    "SGD-Adv": (Adjacency.ADD_REMOVE, lambda c, p: sgd_adv(c, p, clip=CLIP, rounds=PLANNED)),
    "SGD-Pass": (Adjacency.ZERO_OUT, lambda c, p: sgd_pass(c, p, clip=CLIP, rounds=PLANNED)),
    "SGD-Maj": (Adjacency.ADD_REMOVE, lambda c, p: sgd_maj(c, p, clip=CLIP, rounds=PLANNED)),
}
BETTER = {
    "one record, tight": (
        Adjacency.ADD_REMOVE,
        lambda c, p: addp(c, p, rounds=MORE, calibration=TIGHT, accountant=TIGHT),
    ),
    "ten records, tight": (
        Adjacency.ADD_REMOVE,
        lambda c, p: addp(c, p, draw=Poisson(10 / EACH), rounds=MORE, calibration=TIGHT, accountant=TIGHT),
    ),
    "whole gradient, tight": (
        Adjacency.ADD_REMOVE,
        lambda c, p: addp(c, p, draw=Everyone(), rounds=100, calibration=TIGHT, accountant=TIGHT),
    ),
    "together, local noise": (Adjacency.ADD_REMOVE, lambda c, p: together(c, p)),
    "together, distributed": (
        Adjacency.ADD_REMOVE,
        lambda c, p: together(c, p, trust=Trust.DISTRIBUTED),
    ),
}
PRIVATE = PAPER | BETTER
SHRUNK = {  # learn from a row and its constant, shrunk to norm 1
    "together, local noise": Trust.LOCAL,
    "together, distributed": Trust.DISTRIBUTED,
}
NON_PRIVATE, MAJORITY = "non-private", "majority"


def load(name):
    """X and y of a data set, or None where it is not there."""
    path = find(FILES[name])
    if path is None:
        return None
    with np.load(path) as found:
        if "X" in found:
            return found["X"], found["y"].astype(np.float64)
        X, y = ([found[f"{part}_{half}"] for half in ("train", "test")] for part in "Xy")
        return np.concatenate(X), np.concatenate(y).astype(np.float64)


def folds(n, of, used):
    """Rows to learn from and to test on, for the first ``used`` folds of ``of``."""
    order = np.random.default_rng(0).permutation(n)
    for fold in range(used):
        yield np.delete(order, np.s_[fold::of]), order[fold::of]


def judged(w, X, y, tested, shrunk=0.0):
    """Accuracy on the test rows in percent, and the objective on those learnt from."""
    u, constant = w
    accuracy = 100 * np.mean((tested[0] @ u + constant > 0) == tested[1])
    margins = X @ u + constant
    if shrunk:
        margins /= np.sqrt(shrunk**2 + np.einsum("ij,ij->i", X, X, dtype=np.float64))
    return accuracy, float(np.mean(logistic.value(margins, y)))


def measure(X, y, used):
    """{(method, ε): [(accuracy, objective, rounds), ...]}, one a fold; ε is None where there is none."""
    found = {}
    for learnt, test in folds(len(y), 5, used):
        Xf, yf, tested = X[learnt], y[learnt], (X[test], y[test])
        problem = Problem(logistic, len(yf), X.shape[1], unit=False)
        guess = 100 * max(np.mean(tested[1]), 1 - np.mean(tested[1]))
        share = np.mean(yf)
        entropy = -share * np.log(share) - (1 - share) * np.log(1 - share)
        found.setdefault((MAJORITY, None), []).append((guess, entropy, 0))
        trained = run(non_private(Table(Xf, yf), problem))
        found.setdefault((NON_PRIVATE, None), []).append((*judged(trained.w, Xf, yf, tested), trained.steps))
        for name, (adjacency, method) in PRIVATE.items():
            for epsilon in EPSILONS:
                crowd = Simulated.split(Xf, yf, records=EACH, budgets=Budget(epsilon, DELTA, adjacency))
                trained = run(method(crowd, problem))
                shrunk = learnt_in(crowd, problem, trust=SHRUNK[name]).intercept if name in SHRUNK else 0.0
                result = judged(trained.w, Xf, yf, tested, shrunk)
                found.setdefault((name, epsilon), []).append((*result, trained.steps))
    return found


def report(name, found, n, width, seconds):
    used = len(found[MAJORITY, None])
    print(f"\n{name}: {n:,} records of {width} features, {used} of 5 folds, {seconds:.0f} s")
    heads = "".join(f"{f'eps {epsilon:g}':>10}" for epsilon in EPSILONS)
    print(f"{'':27}{'accuracy (%)':^40}{'objective':^40}{'rounds':>9}")
    print(f"{'':27}{heads}{heads}")
    for method in (*PAPER, None, *BETTER, None, NON_PRIVATE, MAJORITY):
        if method is None:
            print("-" * (27 + 80 + 9))
            continue
        keys = [(method, epsilon) for epsilon in (EPSILONS if method in PRIVATE else (None,) * len(EPSILONS))]
        means = [np.mean(found[key], axis=0) for key in keys]
        rounds = max(mean[2] for mean in means)
        numbers = "".join(f"{mean[0]:10.1f}" for mean in means) + "".join(
            f"{mean[1]:10.3f}" for mean in means
        )
        print(f"{method:27}{numbers}{rounds:9,.0f}", flush=True)


def draw(measured, path):
    try:
        from matplotlib import pyplot
    except ImportError as error:
        print(f"no figure: {error}")
        return
    figure, grid = pyplot.subplots(2, len(measured), figsize=(5.2 * len(measured), 8), squeeze=False)
    for column, (name, found) in zip(grid.T, measured.items(), strict=True):
        for place, (axes, label) in enumerate(zip(column, ("accuracy (%)", "objective"), strict=True)):
            for method in PRIVATE:
                heights = [np.mean(found[method, epsilon], axis=0)[place] for epsilon in EPSILONS]
                style = {"marker": "o"} if method in BETTER else {"marker": "x", "linestyle": "--"}
                axes.plot(EPSILONS, heights, label=method, markersize=4, **style)
            for method, shade in ((NON_PRIVATE, "black"), (MAJORITY, "grey")):
                level = np.mean(found[method, None], axis=0)[place]
                axes.axhline(level, color=shade, linestyle=":", label=method)
            if place:
                level = np.mean(found[NON_PRIVATE, None], axis=0)[1]
                axes.set_ylim(level * 0.9, 1.0)
            axes.set(xscale="log", xlabel="ε of each user", ylabel=label, title=name)
            axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS], minor=False)
            axes.minorticks_off()
            axes.grid(alpha=0.3)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="lower center", ncols=6, fontsize=9)
    figure.suptitle("Accuracy and objective against ε, 100 records a user, δ = 1e-8 (A-DDP, Figures 1 and 2)")
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=110, bbox_inches="tight")
    print(f"\ndrawn in {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folds", type=int, choices=range(1, 6), default=5)
    parser.add_argument("--data", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--figure", default="figures_1_2.png")
    given = parser.parse_args()
    measured = {}
    for name in given.data:
        loaded, begun = load(name), time.perf_counter()
        if loaded is None:
            print(f"{name}: skipped, there is no {FILES[name]} in the folder that FARTHING_DATA names")
            continue
        measured[name] = measure(*loaded, given.folds)
        report(name, measured[name], *loaded[0].shape, time.perf_counter() - begun)
    if measured:
        draw(measured, given.figure)


if __name__ == "__main__":
    main()
