"""Compare a federated round of ours, Apple's pfl and Flower on Ray: 400 clients, 100 records, 124 features.

    python -m benchmarks.simulated_peers [--clients 400] [--rounds 5] [--pfl PYTHON] [--flower PYTHON]

All draw one record a client, take the gradient of logistic regression there, clip it, add each client's own
Gaussian noise and average (`peers/` has the details). Each peer runs as a process of its own, with the
interpreter of an environment of its own, and is left out where there is none:

    python -m venv .peers/pfl && .peers/pfl/bin/pip install "pfl[pytorch]==0.6.0"
    python -m venv .peers/flower && .peers/flower/bin/pip install "flwr[simulation]"

pfl runs in one process and is compared by CPU time, Flower in several and by wall clock. Of a peer the
quickest round counts, of ours the median of all, taken before and after the peers; the first round of each,
with its start-up, is left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from farthing.budget import Budget
from farthing.federated.methods.addp import addp
from farthing.federated.simulated import Simulated
from farthing.linear.losses import logistic
from farthing.linear.problem import Problem

RECORDS, FEATURES = 100, 123  # and a constant
SCRIPTS = Path(__file__).parent / "peers"
CLOCKS = {"CPU": time.process_time, "wall": time.perf_counter}
PEERS = (  # name, option with the interpreter, script, first argument, clock
    ("pfl, NumPy statistics", "pfl", "pfl_rounds.py", "numpy", "CPU"),
    ("pfl, PyTorch as in its tutorials", "pfl", "pfl_rounds.py", "torch", "CPU"),
    ("Flower on Ray, apps", "flower", "flower_rounds.py", "app", "wall"),
    ("Flower on Ray, older engine", "flower", "flower_rounds.py", "engine", "wall"),
)


def made(clients: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    X = (rng.random((clients * RECORDS, FEATURES)) < 0.1).astype(np.uint8)
    return X, (rng.random(len(X)) < 0.3).astype(np.float64)


def ours(X: Any, y: Any, fidelity: str, rounds: int = 200) -> dict[str, list[float]]:
    """Return the seconds of each of our rounds, by either clock."""
    clients = Simulated.split(X, y, records=RECORDS, budgets=Budget(0.5, 1e-8), noise=fidelity)
    steps = addp(clients, Problem(logistic, len(X), FEATURES, unit=False))
    next(steps)
    ends = {name: [clock()] for name, clock in CLOCKS.items()}
    for _ in range(rounds):
        next(steps)
        for name, clock in CLOCKS.items():
            ends[name].append(clock())
    return {name: np.diff(found).tolist() for name, found in ends.items()}


def peer(python: str, script: str, kind: str, table: str, rounds: int) -> list[float] | str:
    """Return the seconds of each of a peer's rounds, or the reason why there are none."""
    if not Path(python).exists():
        return f"there is no {python}"
    call = [python, str(SCRIPTS / script), kind, table, str(rounds)]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        return (ended.stderr.strip().splitlines() or ["it failed without a word"])[-1]
    taken: list[float] = json.loads(ended.stdout.strip().splitlines()[-1])
    return taken


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pfl", default=".peers/pfl/bin/python", metavar="PYTHON")
    parser.add_argument("--flower", default=".peers/flower/bin/python", metavar="PYTHON")
    given = parser.parse_args([] if arguments is None else arguments)
    X, y = made(given.clients)
    print(f"{given.clients} clients, {RECORDS} records of {FEATURES + 1} features each, one record a round")
    taken = {fidelity: ours(X, y, fidelity) for fidelity in ("sum", "each")}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        table = os.path.join(folder, "table.npz")
        np.savez(table, X=X, y=y, records=RECORDS)
        for name, option, script, kind, _ in PEERS:
            found[name] = peer(getattr(given, option), script, kind, table, given.rounds)
    medians: dict[str, dict[str, float]] = {}
    for fidelity, before in taken.items():
        after = ours(X, y, fidelity)
        medians[fidelity] = {clock: float(np.median(before[clock] + after[clock])) for clock in CLOCKS}
        for clock, median in medians[fidelity].items():
            each = f"{1e6 * median / given.clients:.2f} µs a client"
            print(f"  {f'ours, noise={fidelity!r}':<34}{1e3 * median:10.3f} ms of {clock} a round, {each}")
    for name, _, _, _, clock in PEERS:
        times = found[name]
        if isinstance(times, str):
            print(f"  {name:<34} left out: {times}")
            continue
        ratios = ", ".join(f"×{min(times) / median[clock]:,.0f} ({f})" for f, median in medians.items())
        print(f"  {name:<34}{1e3 * min(times):10.3f} ms of {clock} a round: {ratios}")


if __name__ == "__main__":
    main(sys.argv[1:])
