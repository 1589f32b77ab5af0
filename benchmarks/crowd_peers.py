"""A round of a crowd, ours and Apple's pfl, in one run: 400 users of 100 records and 124 features.

    python -m benchmarks.crowd_peers [--users 400] [--rounds 3]

Both draw one record a user, clip its gradient, add each user's own Gaussian noise and average. pfl is given
numpy statistics and no framework at all, which is the least it can do for a user. pfl 0.6 asks for an older
dp-accounting than farthing: install it into an environment of its own, then farthing, and ignore that.
Flower's simulation runs every user in a Ray actor and is left out: its own floor is far above pfl's.
"""

import argparse
import time
from typing import Any

import numpy as np

from farthing.algorithms.addp import addp
from farthing.algorithms.problem import Problem
from farthing.budget import Budget
from farthing.crowd.simulated import Simulated
from farthing.losses import logistic

RECORDS, FEATURES = 100, 123  # and a constant


def made(users: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    X = (rng.random((users * RECORDS, FEATURES)) < 0.1).astype(np.uint8)
    return X, (rng.random(len(X)) < 0.3).astype(np.float64)


def ours(X: Any, y: Any, fidelity: str, rounds: int = 200) -> float:
    """Seconds a round."""
    crowd = Simulated.split(X, y, records=RECORDS, budgets=Budget(0.5, 1e-8), noise=fidelity)
    steps = addp(crowd, Problem(logistic, len(X), FEATURES, unit=False))
    next(steps)
    start = time.process_time()
    for _ in range(rounds):
        next(steps)
    return (time.process_time() - start) / rounds


def pfl_rounds(X: Any, y: Any, users: int, rounds: int) -> float:
    """Seconds a round."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import FederatedAlgorithm
    from pfl.common_types import Population
    from pfl.context import CentralContext
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.metrics import Metrics
    from pfl.model.base import Model
    from pfl.privacy.gaussian_mechanism import GaussianMechanism
    from pfl.stats import MappedVectorStatistics

    rng = np.random.default_rng(0)
    rows = np.column_stack([X, np.ones(len(X))]).astype(np.float32)

    class Weights(Model):
        w = np.zeros(FEATURES + 1, np.float32)

    class OneRecord(FederatedAlgorithm):
        def get_next_central_contexts(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

        def process_aggregated_statistics(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

        def simulate_one_user(self, model: Any, user_dataset: Any, central_context: Any) -> Any:
            x, target = user_dataset.raw_data
            place = rng.integers(len(x))
            residual = 1 / (1 + np.exp(-x[place] @ model.w)) - target[place]
            return MappedVectorStatistics({"w": residual * x[place]}, weight=1.0), Metrics()

    def dataset(user: int) -> Any:
        place = slice(user * RECORDS, (user + 1) * RECORDS)
        return Dataset((rows[place], y[place]), user_id=str(user))

    data = FederatedDataset(dataset, get_user_sampler("minimize_reuse", list(range(users))))
    backend = SimulatedBackend(data, None, postprocessors=[GaussianMechanism(3.0, 100.0)])
    model, taken = Weights(), []
    for t in range(rounds + 1):
        context: Any = CentralContext(t, False, users, Population.TRAIN, None, None, seed=t)
        start = time.process_time()
        total, _ = backend.gather_results(model, OneRecord(), central_context=context)
        model.w = model.w - 0.1 * total["w"] / users
        taken.append(time.process_time() - start)
    return float(np.mean(taken[1:]))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args([] if arguments is None else arguments)
    X, y = made(given.users)
    print(f"{given.users} users, {RECORDS} records of {FEATURES + 1} features each, one record a round")
    times = {fidelity: ours(X, y, fidelity) for fidelity in ("sum", "each")}
    for fidelity, taken in times.items():
        each = 1e6 * taken / given.users
        print(f"  ours, noise={fidelity!r}: {1e3 * taken:.3f} ms a round, {each:.2f} µs a user")
    try:
        peer = pfl_rounds(X, y, given.users, given.rounds)
    except ImportError as error:
        print(f"  pfl is left out: {error}")
        return
    print(f"  pfl: {1e3 * peer:.1f} ms a round:", end="")
    print(*(f" ×{peer / taken:.0f} ({fidelity})" for fidelity, taken in times.items()))


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
