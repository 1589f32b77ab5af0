"""A-DDP's Figure 3: the sampling composition theorem against advanced composition, and the tight value.

    python experiments/figure3.py [--figure figure3.png]

Cheng, Liu, Wang & Lu 2020, "Adaptive Distributed Differential Privacy with SGD", Figure 3: with p = .1,
clip = 3, δ = 1e-5, ε = .1 and T = 10 but for the one that varies, calibrate the noise of *one* iteration to
(ε, δ), let advanced composition (δ' = δ) say the total ε', and compare what each says of δ at this ε'. The
paper does not say whether the p of an iteration is counted in ε'. Both readings are shown:

* plain: advanced composition of T steps (ε, δ). Nothing here depends on p but the sampling theorem.
* amplified: each step first amplified by p, as its SGD-Adv does. Only this reading has the remark of the
  text, "when the probability of sampling becomes extremely small, Advanced Composition perform better".
  The paper's (pε, pδ) is slightly too small; ln(1 + p(e^ε - 1)) holds and is used.

The third curve is `accounting.pld` for the same rounds with Poisson draws that stay secret. Neighbours differ
by a record zeroed out, so the sum moves by the clip C. The sampling theorem is itself exact against an
observer who sees who was drawn; what separates the two lower curves is what the secret is worth. The last row
turns the question round: ε at the δ of advanced composition, which is what a budget is spent in. The tight δ
is a certified upper bound, its own errors counted in; for p below .01 they are most of it (at p = .001 an
integral in high precision shows less than 1e-44, where 7e-14 is certified). Its ε does not suffer.
"""

import argparse

from farthing.accounting import composition, gaussian, pld, sampling
from farthing.budget import Adjacency
from farthing.events import GaussianEvent, PoissonEvent, RepeatedEvent

DEFAULT = {"p": 0.1, "clip": 3.0, "delta": 1e-5, "epsilon": 0.1, "T": 10}
VARIED = {
    "p": (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    "clip": (0.5, 1.0, 2.0, 3.0, 4.0, 6.0),
    "delta": (1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3),
    "epsilon": (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
    "T": (1, 2, 5, 10, 20, 50, 100, 200),
}
CURVES = ("advanced", "sampling", "tight")
ROWS = ("δ at ε', plain", "δ at ε', amplified", "ε at that δ, amplified")


def compare(p, clip, delta, epsilon, T):
    """{row: (ε' or δ where the curves are compared, what each of the three says)}, and σ of an iteration."""
    sigma = clip * gaussian.noise(epsilon, delta)
    noise = sigma / clip  # the clip cancels, in every theorem
    event = RepeatedEvent(PoissonEvent(p, GaussianEvent(noise)), T)
    found = {}
    readings = ((epsilon, delta), composition.amplify_poisson(epsilon, delta, p))
    for row, step in zip(ROWS, readings, strict=False):
        total, failure = composition.advanced(*step, T, slack=delta)
        tight = pld.delta(event, total, Adjacency.ZERO_OUT)
        found[row] = total, (failure, sampling.delta(noise, p, T, total), tight)
    spent = sampling.epsilon(noise, p, T, failure), pld.epsilon(event, failure, Adjacency.ZERO_OUT)
    found[ROWS[2]] = failure, (total, *spent)
    return found, sigma


def measure():
    """{parameter: [(value, found, σ), ...]}"""
    return {
        name: [(value, *compare(**{**DEFAULT, name: value})) for value in values]
        for name, values in VARIED.items()
    }


def shown(row, x):
    """Floats end at 1e-323; a δ is never printed as 0."""
    return f"{x:.3g}" if x or row == ROWS[2] else "< 1e-323"


def report(measured):
    print(f"σ/C of an iteration at (ε, δ) = (.1, 1e-5): {gaussian.noise(0.1, 1e-5):.8f}")
    for name, results in measured.items():
        print(f"\n{name} varies, others " + ", ".join(f"{k} {v:g}" for k, v in DEFAULT.items() if k != name))
        print(f"{'':>10}{'σ':>10}" + "".join(f"{row:^44}" for row in ROWS))
        print(f"{name:>10}{'':>10}" + f"{'at':>11}{CURVES[0]:>11}{CURVES[1]:>11}{CURVES[2]:>11}" * len(ROWS))
        for value, found, sigma in results:
            numbers = "".join(f"{shown(row, x):>11}" for row in ROWS for x in (found[row][0], *found[row][1]))
            print(f"{value:10g}{sigma:10.4g}{numbers}")


def draw(measured, path):
    try:
        from matplotlib import pyplot
    except ImportError as error:
        print(f"no figure: {error}")
        return
    figure, grid = pyplot.subplots(len(ROWS), len(VARIED), figsize=(16, 9), squeeze=False)
    for axes_row, row in zip(grid, ROWS, strict=True):
        for axes, (name, results) in zip(axes_row, measured.items(), strict=True):
            values = [value for value, _, _ in results]
            for place, curve in enumerate(CURVES):
                heights = [found[row][1][place] or float("nan") for _, found, _ in results]
                axes.plot(values, heights, marker="o", markersize=3, label=curve)
            if row == ROWS[0]:
                axes.set_title("tight: below 1e-323 where p < 1", fontsize=8)
            axes.set(xscale="linear" if name == "clip" else "log", yscale="log", xlabel=name)
            axes.grid(alpha=0.3)
        axes_row[0].set_ylabel(row)
    grid[0, 0].legend()
    figure.suptitle("Sampling composition, advanced composition and the tight value (A-DDP, Figure 3)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"drawn in {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", default="figure3.png")
    given = parser.parse_args()
    measured = measure()
    report(measured)
    draw(measured, given.figure)


if __name__ == "__main__":
    main()
