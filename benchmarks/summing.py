"""Compare bounded sums with the same sums made plainly: what a proven rounding costs on a CPU, in time.

    python -m benchmarks.summing [mlp cnn transformer ...] [--sizes 64 256 512 1024 4096] [--rounds 60]

Both sides read a Poisson batch, find every example's gradient and its norm, clip and add up, in float32 on
one thread. One adds as `farthing.torch.kernels.blocks` proves it (secret blocks, added in float64), the other
by one plain product a layer, which no theorem covers. Both get the same batches by turns in one process, and
what is printed is the median over rounds of the ratio of processor times, with quartiles.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.deep import Transformer, cnn, losses
from farthing.queries.bounds import ClipNorm
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.kernels import totals
from farthing.torch.training.records import Examples

SIZES = (64, 256, 512, 1024, 4096)
MOST = 1.05  # the goal
_LARGEST = {"cnn": 1024, "transformer": 256}  # what takes minutes otherwise


def mlp() -> nn.Module:
    """Return 784-256-256-10."""
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def wide() -> nn.Module:
    """Return 60-1000-10."""
    return nn.Sequential(nn.Linear(60, 1000), nn.ReLU(), nn.Linear(1000, 10))


def large() -> nn.Module:
    """Return 512-1024-1024-10: sums of more numbers than a core's cache holds."""
    return nn.Sequential(
        nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (mlp, lambda n: torch.randn(n, 784)),
    "wide": (wide, lambda n: torch.randn(n, 60)),
    "large": (large, lambda n: torch.randn(n, 512)),
    "cnn": (cnn, lambda n: torch.randn(n, 1, 28, 28)),
    "transformer": (Transformer, lambda n: torch.randint(0, 1000, (n, 64))),
}


@contextmanager
def plainly() -> Iterator[None]:
    """Sums as a library makes them without a thought of rounding."""

    def product(u: Tensor, v: Tensor, examples: int, out: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
        return torch.mm(u.t(), v, out=out)

    def weighted(rows: Tensor, factors: Tensor) -> Tensor:
        return torch.mv(rows.t(), factors)

    def add_rows(ids: Tensor, values: Tensor, table: Tensor) -> None:
        table.index_add_(0, ids, values)

    places: list[tuple[Any, str, Any]] = [
        *((totals, made.__name__, made) for made in (product, weighted, add_rows)),
        (Gradient, "_blocks", lambda self, batch: 0),
    ]
    before = [getattr(where, name) for where, name, _ in places]
    try:
        for where, name, made in places:
            setattr(where, name, made)
        yield
    finally:
        for (where, name, _), old in zip(places, before, strict=True):
            setattr(where, name, old)


def compared(name: str, size: int, rounds: int) -> list[float]:
    """Return the ratio of every round, of batches of ``size`` examples to expect."""
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    model, draws = build(), np.random.default_rng(0)
    examples = Examples((inputs(4 * size), torch.randint(0, 10, (4 * size,))))
    bound, gradient = ClipNorm(1.0), Gradient(model, losses, expected_batch_size=size)

    def batch() -> Any:
        return examples.take(np.flatnonzero(draws.random(4 * size) < 0.25))

    def seconds(batches: list[Any]) -> float:
        gc.collect()
        start = time.process_time()
        for one in batches:
            gradient.bounded_sum(one, None, bound)
        return time.process_time() - start

    def plain_seconds(batches: list[Any]) -> float:
        with plainly():
            return seconds(batches)

    some = [batch() for _ in range(3)]
    seconds(some)
    plain_seconds(some)
    each = max(1, round(0.1 / (plain_seconds(some) / 3)))
    found = []
    for n in range(rounds):
        batches = [batch() for _ in range(each)]
        if n % 2:
            plain, ours = plain_seconds(batches), seconds(batches)
        else:
            ours, plain = seconds(batches), plain_seconds(batches)
        found.append(ours / plain)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Print the ratios of models and batch sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", default=["mlp"])
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args([] if arguments is None else arguments)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread; a proven sum over a plain one, at most {MOST} is the goal")
    for name in given.names:
        for size in given.sizes:
            if size <= _LARGEST.get(name, size):
                found = compared(name, size, given.rounds)
                low, _, high = quantiles(found, n=4)
                print(
                    f"  {name:12s} {size:6d}  {median(found):.3f}  (quartiles {low:.3f} {high:.3f})",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1:])
