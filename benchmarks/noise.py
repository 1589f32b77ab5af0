"""CPU seconds a million samples: lattice noise against numpy's float noise, in one run.

python benchmarks/noise.py [samples] [repeats]
"""

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from farthing import noise

BITS = 20


def seconds(draw: Callable[[], object]) -> float:
    start = time.process_time()
    draw()
    return time.process_time() - start


def main(samples: int = 10**6, repeats: int = 11) -> None:
    stream, numpy_generator = noise.Stream(), np.random.default_rng()
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "gaussian": (
            lambda: noise.gaussian(stream, samples, BITS),
            lambda: numpy_generator.standard_normal(samples),
        ),
        "laplace": (
            lambda: noise.laplace(stream, samples, BITS),
            lambda: numpy_generator.laplace(size=samples),
        ),
        "gumbel": (
            lambda: noise.gumbel(stream, samples, BITS),
            lambda: numpy_generator.gumbel(size=samples),
        ),
    }
    print(f"CPU seconds per 1e6 samples at {BITS} bits, median of {repeats} interleaved repeats")
    print(f"{'':10}{'farthing':>10}{'numpy':>10}{'ratio':>8}")
    for name, (ours, theirs) in pairs.items():
        ours(), theirs()  # imports and first touches
        timed = [(seconds(ours), seconds(theirs)) for _ in range(repeats)]
        mine, other = (statistics.median(column) * 1e6 / samples for column in zip(*timed, strict=True))
        print(f"{name:10}{mine:10.4f}{other:10.4f}{mine / other:8.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
