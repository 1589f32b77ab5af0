"""Time rounds of Apple's pfl: 400 clients, one record each, clipped and noised by the client itself.

`benchmarks.simulated_peers` runs this in an environment of its own, without farthing; it prints CPU seconds a
round as JSON. ``torch`` follows pfl's tutorials: a PyTorch model, federated averaging, one local step on one
record, and its Gaussian mechanism as a local one. ``numpy`` is the least work that pfl can do for a client:
an algorithm of our own on NumPy statistics, without any framework.
"""

import json
import sys
import time

import numpy as np
from pfl.aggregate.simulate import SimulatedBackend
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.privacy.gaussian_mechanism import GaussianMechanism

CLIP, NOISE, RATE = 3.0, 100.0, 0.1


def clients_of(path):
    """Return X with a constant, y, and one slice per client."""
    with np.load(path) as found:
        X, y, records = found["X"], found["y"], int(found["records"])
    rows = np.column_stack([X, np.ones(len(X))]).astype(np.float32)
    return rows, y.astype(np.float32), [slice(i, i + records) for i in range(0, len(X), records)]


def federated(dataset, clients):
    return FederatedDataset(dataset, get_user_sampler("minimize_reuse", list(range(clients))))


def torch_rounds(path, rounds):
    """Return time stamps of the ends of rounds, with PyTorch."""
    import torch
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    torch.set_num_threads(1)
    rows, y, slices = clients_of(path)
    rows, y = torch.from_numpy(rows), torch.from_numpy(y)
    generator = np.random.default_rng(0)

    class Logistic(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(rows.shape[1], 1, bias=False)

        def loss(self, x, target, eval=False):
            self.eval() if eval else self.train()
            return torch.nn.functional.binary_cross_entropy_with_logits(self.linear(x).squeeze(1), target)

        @torch.no_grad()
        def metrics(self, x, target, eval=False):
            return {"loss": Weighted(self.loss(x, target, eval).item() * len(target), len(target))}

    class Clock(TrainingProcessCallback):
        def __init__(self):
            self.ends = []

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            self.ends.append(time.process_time())
            return False, Metrics()

    def dataset(client):  # a client's data is the record it drew
        place = slices[client].start + int(generator.integers(slices[client].stop - slices[client].start))
        return Dataset([rows[place : place + 1], y[place : place + 1]], user_id=str(client))

    inner = Logistic()
    model = PyTorchModel(inner, torch.optim.SGD, torch.optim.SGD(inner.parameters(), lr=RATE))
    mechanism = GaussianMechanism(CLIP, NOISE)
    backend = SimulatedBackend(federated(dataset, len(slices)), None, postprocessors=[mechanism])
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds + 1,
            evaluation_frequency=10**9,
            train_cohort_size=len(slices),
            val_cohort_size=None,
        ),
        backend,
        model,
        NNTrainHyperParams(
            local_num_epochs=None, local_num_steps=1, local_learning_rate=1.0, local_batch_size=1
        ),
        NNEvalHyperParams(local_batch_size=1),
        callbacks=[clock],
    )
    return clock.ends


def numpy_rounds(path, rounds):
    """Return time stamps of the ends of rounds, with NumPy."""
    from pfl.algorithm.base import FederatedAlgorithm
    from pfl.common_types import Population
    from pfl.context import CentralContext
    from pfl.metrics import Metrics
    from pfl.model.base import Model
    from pfl.stats import MappedVectorStatistics

    rows, y, slices = clients_of(path)
    generator = np.random.default_rng(0)

    class Weights(Model):
        w = np.zeros(rows.shape[1], np.float32)

    class OneRecord(FederatedAlgorithm):
        def get_next_central_contexts(self, *_, **__):
            raise NotImplementedError

        def process_aggregated_statistics(self, *_, **__):
            raise NotImplementedError

        def simulate_one_user(self, model, user_dataset, central_context):
            x, target = user_dataset.raw_data
            place = generator.integers(len(x))
            residual = 1 / (1 + np.exp(-x[place] @ model.w)) - target[place]
            return MappedVectorStatistics({"w": residual * x[place]}, weight=1.0), Metrics()

    def dataset(client):
        return Dataset((rows[slices[client]], y[slices[client]]), user_id=str(client))

    clients = len(slices)
    mechanism = GaussianMechanism(CLIP, NOISE)
    backend = SimulatedBackend(federated(dataset, clients), None, postprocessors=[mechanism])
    model, ends = Weights(), []
    for t in range(rounds + 1):
        context = CentralContext(t, False, clients, Population.TRAIN, None, None, seed=t)
        total, _ = backend.gather_results(model, OneRecord(), central_context=context)
        model.w = model.w - RATE * total["w"] / clients
        ends.append(time.process_time())
    return ends


if __name__ == "__main__":
    kind, path, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    ends = (torch_rounds if kind == "torch" else numpy_rounds)(path, rounds)
    print(json.dumps(np.diff(ends).tolist()))
