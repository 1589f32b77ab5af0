"""Measure simulated clients: rounds a second, and microseconds a client and round.

    python benchmarks/simulated.py [--seconds 1] [--largest 1000000]

Clients have 100 records of 123 features and a constant, and draw one record a round, with logistic loss,
clipping norm 3 and a countdown each. "sum" draws the noise of all uploads at once, "each" every client's own,
on its lattice, from a cryptographic stream. Beside them, in the same run, a loop of plain NumPy on float32
rows does the same arithmetic with a seeded generator and without accounting (up to 10,000 clients). Times are
CPU time; memory is the process's peak. The largest run stores rows as the positions of their ones
(`Indicators`).

Federated frameworks are not needed here: `benchmarks.simulated_peers` measures them.
"""

import argparse
import resource
import time
from collections.abc import Callable

import numpy as np

from farthing.budget import Budget
from farthing.data.tables import Features
from farthing.federated import Exactly, Invitation
from farthing.federated.draws import Indicators
from farthing.federated.simulated import Simulated
from farthing.linear.losses import LinearGradient, logistic

RECORDS, WIDTH, ONES, CLIP = 100, 123, 14, 3.0


def places(clients: int) -> Indicators:
    """Draw random rows with up to 14 ones, in parts that limit memory."""
    generator, n = np.random.default_rng(0), clients * RECORDS
    found, y = np.empty((n, ONES), np.uint8), np.empty(n, np.uint8)
    for start in range(0, n, 10**6):
        part = slice(start, min(start + 10**6, n))
        found[part] = generator.integers(0, WIDTH, (part.stop - start, ONES), dtype=np.uint8)
        y[part] = generator.integers(0, 2, part.stop - start, dtype=np.uint8)
    return Indicators(found, WIDTH, y)


def dense(rows: Indicators) -> np.ndarray:
    """Return these rows as bytes."""
    x = np.zeros((len(rows), WIDTH), np.uint8)
    np.add.at(x, (np.arange(len(rows))[:, None], rows.places), 1)
    return x


def seconds_a_round(step: Callable[[], object], seconds: float) -> float:
    """Return the CPU time of a round, the median of at least three."""
    step()
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < seconds:
        start = time.process_time()
        step()
        taken.append(time.process_time() - start)
    return float(np.median(taken))


def ours(rows: Indicators | np.ndarray, y: np.ndarray | None, noise: str) -> Callable[[], object]:
    clients = Simulated.split(rows, y, records=RECORDS, budgets=Budget(1.0, 1e-8), noise=noise)  # type: ignore[arg-type]
    clients.invite(Invitation(CLIP, Exactly(1), 10**6))
    gradient, w = LinearGradient(logistic, Features(WIDTH)), np.zeros(WIDTH + 1)

    def step() -> None:
        nonlocal w
        w = w - 0.01 * clients.ask(gradient, w).mean

    return step


def plain(x: np.ndarray, y: np.ndarray, noise: str, deviation: float) -> Callable[[], object]:
    """Run the usual loop: float32 rows, float noise, no accounting."""
    clients, generator = len(x) // RECORDS, np.random.default_rng(0)
    rows = np.hstack([x, np.ones((len(x), 1))]).astype(np.float32)
    w, first = np.zeros(WIDTH + 1), np.arange(clients) * RECORDS

    def step() -> None:
        nonlocal w
        drawn = first + generator.integers(0, RECORDS, clients)
        z = rows[drawn]
        residual = 1 / (1 + np.exp(-(z @ w))) - y[drawn]
        norms = np.abs(residual) * np.sqrt(np.einsum("ij,ij->i", z, z))
        uploads = z * (residual / np.maximum(1, norms / CLIP))[:, None]
        if noise == "each":
            total = (uploads + deviation * generator.standard_normal(uploads.shape)).sum(axis=0)
        else:
            total = uploads.sum(axis=0) + deviation * np.sqrt(clients) * generator.standard_normal(WIDTH + 1)
        w = w - 0.01 * total / clients

    return step


def report(clients: int, storage: str, noise: str, taken: float, other: float | None) -> None:
    ratio = f"{other / taken:9.2f}" if other else " " * 9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{clients:>9,} {storage:<8}{noise:<6}{taken * 1e3:11.3f}{1 / taken:12.1f}"
        f"{taken / clients * 1e6:17.3f}{ratio}{peak:10.2f}",
        flush=True,
    )


def main(seconds: float = 1.0, largest: int = 10**6) -> None:
    print(f"{'clients':>9} {'rows as':<8}{'noise':<6}{'ms a round':>11}{'rounds/s':>12}", end="")
    print(f"{'us/client/round':>17}{'x NumPy':>9}{'GiB peak':>10}")
    for clients in (400, 10**4):
        rows = places(clients)
        x, y = dense(rows), rows.y.astype(np.float64)
        for noise in ("sum", "each"):
            other = seconds_a_round(plain(x, y, noise, 100.0), seconds)
            for storage, step in (("bytes", ours(x, y, noise)), ("places", ours(rows, None, noise))):
                taken = seconds_a_round(step, seconds)
                report(clients, storage, noise, taken, other)
    rows = places(largest)
    for noise in ("sum", "each"):
        report(largest, "places", noise, seconds_a_round(ours(rows, None, noise), seconds), None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--largest", type=int, default=10**6)
    options = parser.parse_args()
    main(options.seconds, options.largest)
