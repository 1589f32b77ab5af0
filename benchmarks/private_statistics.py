"""Compare the errors of private statistics with OpenDP's and diffprivlib's, in one run.

python benchmarks/private_statistics.py [repeats]

Each library releases the same statistic of the same column at the same ε (pure, and for farthing also with
δ = 1e-6 where it may), and the median absolute error over the repeats is printed: for quantiles in ranks,
as a share of all records, the worst of the quantiles asked for. Peers are given what does best: a column
centred between its bounds and a public number of records for means, the better of noisy choices and a
consistent tree for OpenDP's quantiles. Peers that are not installed are left out.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import farthing as ft
from farthing.data import load_adult

Release = Callable[[float], Any]
QUARTILES = [0.25, 0.5, 0.75]
DECILES = [q / 10 for q in range(1, 10)]
DELTA = 1e-6


def above(values: Any) -> Any:
    """Return which records a count is about: those above a public number."""
    return values > 30


def ours(values: Any, low: float, high: float) -> dict[str, dict[str, Release]]:
    """Return farthing's releases, by statistic and way."""
    size = len(values)
    ranks = {
        name: {
            "farthing": lambda eps, q=q: ft.quantiles(values, q, (low, high), epsilon=eps).value,
            "farthing, delta": lambda eps, q=q: (
                ft.quantiles(values, q, (low, high), epsilon=eps, delta=DELTA).value
            ),
        }
        for name, q in (("median", [0.5]), ("quartiles", QUARTILES), ("deciles", DECILES))
    }
    return {
        "count": {
            "farthing": lambda eps: ft.count(np.where(above(values), values, np.nan), epsilon=eps).value
        },
        "mean": {"farthing": lambda eps: ft.mean(values, (low, high), epsilon=eps).value},
        "mean, size public": {
            "farthing": lambda eps: ft.mean(values, (low, high), records=size, epsilon=eps).value
        },
        **ranks,
    }


def opendp(values: Any, low: float, high: float) -> dict[str, dict[str, Release]]:
    """Return OpenDP's releases; a plan is made once for an ε, so that only the release is repeated."""
    import functools

    import opendp.prelude as dp

    dp.enable_features("contrib")
    size, middle = len(values), (low + high) / 2
    space = dp.vector_domain(dp.atom_domain(T=float, nan=False)), dp.symmetric_distance()
    plain, half = values.tolist(), (high - low) / 2
    # Whole numbers, of 32 bits: a sum of them costs half of what OpenDP charges for floats of both signs.
    steps = 2**16
    centred = np.rint((values - middle) / half * steps).astype(int).tolist()
    wholes = dp.vector_domain(dp.atom_domain(T=int)), dp.symmetric_distance()

    @functools.cache
    def counted(eps: float) -> Any:
        return space >> dp.t.then_count() >> dp.m.then_laplace(1 / eps)

    @functools.cache
    def summed(eps: float) -> Any:
        chain = wholes >> dp.t.then_clamp((-steps, steps)) >> dp.t.then_sum()
        return dp.binary_search_chain(lambda scale: chain >> dp.m.then_laplace(scale), 1, eps)

    def distance(eps: float) -> float:
        return float(summed(eps)(centred)) * half / steps

    edges = np.linspace(low, high, 4097)

    @functools.cache
    def chosen(eps: float, q: float) -> Any:
        chain = dp.t.make_quantile_score_candidates(*space, edges.tolist(), q)
        noisy = lambda scale: chain >> dp.m.then_noisy_max(dp.max_divergence(), scale, negate=True)  # noqa: E731
        return dp.binary_search_chain(noisy, 1, eps)

    def quantiles(eps: float, q: list[float]) -> Any:
        return [edges[chosen(eps / len(q), one)(plain)] for one in q]

    @functools.cache
    def treed(eps: float) -> Any:
        leaves, branching = 4096, 16
        inner = edges[1:-1].tolist()
        chain = (
            space
            >> dp.t.then_find_bin(edges=inner)
            >> dp.t.then_count_by_categories(categories=list(range(leaves)), null_category=False)
            >> dp.t.then_b_ary_tree(leaf_count=leaves, branching_factor=branching)
        )
        return dp.binary_search_chain(lambda scale: chain >> dp.m.then_laplace(scale), 1, eps)

    def from_tree(eps: float, q: list[float]) -> Any:
        counts = dp.t.make_consistent_b_ary_tree(branching_factor=16)(treed(eps)(plain))
        below = np.maximum.accumulate(np.concatenate([[0.0], np.cumsum(counts)]))
        return np.interp(np.array(q) * below[-1], below + np.linspace(0, 1e-6, len(below)), edges)

    return {
        "count": {"OpenDP": lambda eps: counted(eps)(values[above(values)].tolist())},
        "mean": {"OpenDP": lambda eps: middle + distance(eps / 2) / counted(eps / 2)(plain)},
        "mean, size public": {"OpenDP": lambda eps: middle + distance(eps) / size},
        **{
            name: {
                "OpenDP, choices": lambda eps, q=q: quantiles(eps, q),
                "OpenDP, tree": lambda eps, q=q: from_tree(eps, q),
            }
            for name, q in (("median", [0.5]), ("quartiles", QUARTILES), ("deciles", DECILES))
        },
    }


def diffprivlib(values: Any, low: float, high: float) -> dict[str, dict[str, Release]]:
    """Return diffprivlib's releases, which take the number of records as public."""
    import sklearn.tree._tree as trees

    for name in ("DOUBLE", "DTYPE", "NODE_DTYPE"):  # its forests, which are not used here, want them
        if not hasattr(trees, name):
            setattr(trees, name, np.float64)
    from diffprivlib import tools

    floats = np.asarray(values, dtype=np.float64)
    bounds = (low, high)
    return {
        "count": {"diffprivlib": lambda eps: tools.count_nonzero(above(values), epsilon=eps)},
        "mean, size public": {"diffprivlib": lambda eps: tools.mean(floats, epsilon=eps, bounds=bounds)},
        **{
            name: {"diffprivlib": lambda eps, q=q: tools.quantile(floats, q, epsilon=eps, bounds=bounds)}
            for name, q in (("median", [0.5]), ("quartiles", QUARTILES), ("deciles", DECILES))
        },
    }


def errors(name: str, release: Release, eps: float, values: Any, repeats: int) -> float:
    """Return the median error of a statistic over the repeats."""
    wanted = {"median": [0.5], "quartiles": QUARTILES, "deciles": DECILES}.get(name)
    ordered = np.sort(values)
    found = []
    for _ in range(repeats):
        value = release(eps)
        if wanted is None:
            exact = np.count_nonzero(above(values)) if name == "count" else np.mean(values)
            found.append(abs(float(value) - float(exact)))
            continue
        below, upto = (np.searchsorted(ordered, np.ravel(value), side) for side in ("left", "right"))
        ranks = np.array(wanted) * len(values)
        off = np.maximum(np.maximum(below - ranks, ranks - upto), 0)
        found.append(float(off.max()) / len(values))
    return float(np.median(found))


def main(repeats: int = 201) -> None:
    """Print a table for two columns and two budgets."""
    ages = np.asarray(load_adult().table["age"], dtype=np.float64)[:10_000]
    ages = ages + np.random.default_rng(0).uniform(size=len(ages))  # without ties
    incomes = np.random.default_rng(0).lognormal(10, 0.6, 10_000)
    for title, values, low, high in (
        ("ages, 10,000, bounds 0 to 120", ages, 0.0, 120.0),
        ("incomes, 10,000 lognormal, bounds 0 to 200,000", incomes, 0.0, 200_000.0),
    ):
        ways = ours(values, low, high)
        for peer in (opendp, diffprivlib):
            try:
                found = peer(values, low, high)
            except ImportError as error:
                print(f"(without {peer.__name__}: {error})")
                continue
            for name, some in found.items():
                ways[name] |= some
        print(
            f"\n{title}: median error of {repeats} at epsilon 0.1 and 1 (quantiles: worst rank, as a share)"
        )
        for name, some in ways.items():
            for way, release in some.items():
                each = [errors(name, release, eps, values, repeats) for eps in (0.1, 1.0)]
                print(f"  {name:20}{way:20}" + "".join(f"{one:14.4g}" for one in each), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
