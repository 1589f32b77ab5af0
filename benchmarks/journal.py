"""Measure charges a second of the journal, beside bare SQLite commits of the same row.

    python benchmarks/journal.py [--seconds 1] [--processes 4]

All numbers come from one run on one disk. ``ratio`` is the rate divided by that of the bare commits in the
same place, where one durable commit waits for the disk once; a durable charge waits twice (row, then head).
"""

import argparse
import multiprocessing
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from farthing.ledger.journal import Journal, Row

BODY = {"query": "gradient", "event": {"kind": "gaussian", "noise": 1.1}, "cost": 0.001}


def decide(last: Row) -> tuple[dict[str, Any], list[float]]:
    total = last.state[0] if last.state else 0.0
    return BODY, [total + 0.001]


def rate(step: Callable[[], object], seconds: float) -> float:
    """Return calls a second, after a short warm-up."""
    for _ in range(20):
        step()
    done, start = 0, perf_counter()
    while (elapsed := perf_counter() - start) < seconds:
        step()
        done += 1
    return done / elapsed


def bare(path: str, seconds: float) -> float:
    """Commit one INSERT per transaction, in WAL with synchronous=FULL, and nothing else."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE chain(seq INTEGER PRIMARY KEY, body TEXT)")

    def step() -> None:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO chain(body) VALUES (?)", ("x" * 350,))
        connection.execute("COMMIT")

    result = rate(step, seconds)
    connection.close()
    return result


def worker(path: str, seconds: float, begin: Any) -> float:
    with Journal(path) as journal:
        begin.wait()
        return rate(lambda: journal.append("charge", decide), seconds)


def shared(path: str, seconds: float, processes: int) -> float:
    """Return the summed rates of several processes on one journal."""
    with multiprocessing.Manager() as manager, multiprocessing.Pool(processes) as pool:
        begin = manager.Barrier(processes)
        return sum(pool.starmap(worker, [(path, seconds, begin)] * processes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument(
        "--directory", default=None, help="the disk to measure (default: that of temporary files)"
    )
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        path = Path(directory)

        def journalled(place: Path | None) -> float:
            with Journal(place, {}) as journal:
                return rate(lambda: journal.append("charge", decide), options.seconds)

        memory = bare(":memory:", options.seconds)
        disk = bare(str(path / "bare.db"), options.seconds)
        lines = [
            ("bare SQLite, in memory", memory, memory),
            ("journal, in memory", journalled(None), memory),
            ("bare SQLite, durable", disk, disk),
            ("journal, durable", journalled(path / "one.ledger"), disk),
            (
                f"journal, durable, {options.processes} processes",
                shared(str(path / "one.ledger"), options.seconds, options.processes),
                disk,
            ),
        ]
        start = perf_counter()
        with Journal(path / "one.ledger") as journal:
            rows = journal.last().seq + 1
            opening = rows / (perf_counter() - start)

    print(f"{'':36}{'per second':>12}{'microseconds':>14}{'ratio':>8}")
    for name, value, base in lines:
        print(f"{name:36}{value:12,.0f}{1e6 / value:14,.1f}{value / base:8.2f}")
    print(f"{'rows verified on opening':36}{opening:12,.0f}{1e6 / opening:14,.1f}")


if __name__ == "__main__":
    main()
