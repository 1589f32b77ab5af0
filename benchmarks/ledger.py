"""Measure a ledger's answers a second, and its overhead over the answer itself.

    python benchmarks/ledger.py [--seconds 1] [--processes 4]

The query is small on purpose (a sum of 100 records in 10 dimensions, Gaussian noise), so that the ledger's
cost is visible. "overhead" is the time of `ask` outside drawing, summing and adding noise, measured in the
same asks; "ratio" is the rate divided by that of drawing, summing and adding noise alone. All numbers come
from one run.
"""

import argparse
import multiprocessing
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import farthing as ft
from farthing.ledger.ledger import Ledger
from farthing.queries.events import GaussianEvent

NOISE = 1e4  # so cheap that no run exhausts the budget
RECORDS = ft.Rows(np.random.default_rng(0).normal(size=(100, 10)))
QUESTION = ft.Query(
    ft.Everyone(), ft.PerExample(lambda rows, w: rows[0] - w), ft.ClipNorm(1.0), ft.Gaussian(NOISE)
)
W = np.zeros(10)


class Timed(Ledger):
    """A ledger that adds up the time spent on the answers themselves."""

    inside = 0.0

    def _compute(self, ready: Any, w: Any, turn: int) -> Any:
        start = perf_counter()
        value = super()._compute(ready, w, turn)
        self.inside += perf_counter() - start
        return value


def opened(promised: bool, path: Path | str | None = None, block: int | None = None) -> Timed:
    ledger = Timed(ft.Budget(1.0, 1e-5), journal=path, block=block)
    if promised:
        ledger.promise(GaussianEvent(NOISE))
    ledger._records = RECORDS
    return ledger


def measure(ledger: Timed, seconds: float) -> tuple[float, float]:
    """Return asks a second, and seconds of each outside the answer itself."""
    for _ in range(50):
        ledger.ask(QUESTION, W)
    ledger.inside, done, start = 0.0, 0, perf_counter()
    while (elapsed := perf_counter() - start) < seconds:
        ledger.ask(QUESTION, W)
        done += 1
    return done / elapsed, (elapsed - ledger.inside) / done


def bare(seconds: float) -> float:
    """Return answers a second without a ledger."""
    ledger, done, start = opened(False), 0, perf_counter()
    ready = ledger._readied(QUESTION, W)
    while (elapsed := perf_counter() - start) < seconds:
        ledger._compute(ready, W, 0)
        done += 1
    return done / elapsed


def worker(path: str, block: int, seconds: float, begin: Any) -> tuple[float, float]:
    ledger = opened(True, path, block)
    begin.wait()
    found = measure(ledger, seconds)
    ledger.close()
    return found


def shared(path: str, block: int, seconds: float, processes: int) -> tuple[float, float]:
    """Return the summed rates of several processes on one file, and their mean overhead."""
    with multiprocessing.Manager() as manager, multiprocessing.Pool(processes) as pool:
        begin = manager.Barrier(processes)
        found = pool.starmap(worker, [(path, block, seconds, begin)] * processes)
    return sum(rate for rate, _ in found), sum(overhead for _, overhead in found) / processes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument(
        "--directory", default=None, help="the disk to measure (default: that of temporary files)"
    )
    options = parser.parse_args()

    alone = bare(options.seconds)
    lines = [
        ("in memory, filter", measure(opened(False), options.seconds)),
        ("in memory, promised", measure(opened(True), options.seconds)),
    ]
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        path = Path(directory)
        with opened(False, path / "filter.ledger") as ledger:
            lines.append(("file, filter", measure(ledger, options.seconds)))
        for block in (1, 32, 256):
            with opened(True, path / f"{block}.ledger", block) as ledger:
                lines.append((f"file, promised, block {block}", measure(ledger, options.seconds)))
        for block in (1, 32):
            place = str(path / f"shared{block}.ledger")
            opened(True, place, block).close()
            name = f"file, promised, block {block}, {options.processes} processes"
            lines.append((name, shared(place, block, options.seconds, options.processes)))

    print(f"{'':44}{'asks/second':>12}{'overhead µs':>13}{'share':>8}{'ratio':>8}")
    print(f"{'no ledger: draw, sum, noise':44}{alone:12,.0f}{0:13.1f}{0:8.1%}{1:8.2f}")
    for name, (rate, overhead) in lines:
        share = min(1.0, overhead * rate / (options.processes if "processes" in name else 1))
        print(f"{name:44}{rate:12,.0f}{1e6 * overhead:13,.1f}{share:8.1%}{rate / alone:8.2f}")


if __name__ == "__main__":
    main()
