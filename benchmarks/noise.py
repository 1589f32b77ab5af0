"""Compare lattice noise with float noise: CPU nanoseconds a sample, in one run.

python benchmarks/noise.py [samples] [repeats]

Rivals are numpy's generators and, where it is installed, torch.randn on one thread. ``without kernels`` is
the same sampler as it runs where there is no C compiler. A small draw is one answer's noise: a call of 124.
"""

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from farthing.noise import lattice as noise
from farthing.noise import native

BITS = 20
Draw = Callable[[], object]


def seconds(draw: Draw) -> float:
    start = time.process_time()
    draw()
    return time.process_time() - start


def times(draw: Draw, count: int) -> Draw:
    def many() -> None:
        for _ in range(count):
            draw()

    return many


def without_kernels(draw: Draw) -> Draw:
    def plain() -> None:
        kept, native._loaded = native.kernels(), None
        try:
            draw()
        finally:
            native._loaded = kept

    return plain


def compare(title: str, samples: int, repeats: int, rows: dict[str, tuple[Draw, ...]]) -> None:
    """Print medians of interleaved repeats; every row names ours first, then its peers."""
    print(f"{title}: CPU ns a sample, median of {repeats}; ratio = farthing / rival")
    for name, draws in rows.items():
        for draw in draws:  # warm-up: imports, builds and first touches
            draw()
        timed = [[seconds(draw) for draw in draws] for _ in range(repeats)]
        mine, *others = (statistics.median(column) * 1e9 / samples for column in zip(*timed, strict=True))
        rivals = "".join(f"{other:10.2f}{mine / other:8.2f}" for other in others)
        print(f"  {name:34}{mine:10.2f}{rivals}")


def main(samples: int = 10**6, repeats: int = 11) -> None:
    stream, generator = noise.Stream(), np.random.default_rng()
    print(f"{BITS} bits; kernels: {'yes' if native.kernels() else 'no'}")

    def ours(size: int) -> Draw:
        return lambda: noise.gaussian(stream, size, BITS)

    small, calls = 124, max(1, samples // 1240)
    rows: dict[str, tuple[Draw, ...]] = {
        "gaussian, numpy": (ours(samples), lambda: generator.standard_normal(samples)),
        "  without kernels, numpy": (
            without_kernels(ours(samples)),
            lambda: generator.standard_normal(samples),
        ),
        "laplace, numpy": (
            lambda: noise.laplace(stream, samples, BITS),
            lambda: generator.laplace(size=samples),
        ),
        "gumbel, numpy": (
            lambda: noise.gumbel(stream, samples, BITS),
            lambda: generator.gumbel(size=samples),
        ),
    }
    few: dict[str, tuple[Draw, ...]] = {
        "gaussian, numpy": (
            times(ours(small), calls),
            times(lambda: generator.standard_normal(small), calls),
        ),
    }
    try:
        import torch

        torch.set_num_threads(1)
        rows["gaussian, torch"] = ours(samples), lambda: torch.randn(samples)
        few["gaussian, torch"] = times(ours(small), calls), times(lambda: torch.randn(small), calls)
    except ImportError as error:
        print(f"  torch is left out: {error}")
    compare(f"{samples} at once", samples, repeats, rows)
    compare(f"{small} a call", calls * small, repeats, few)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
