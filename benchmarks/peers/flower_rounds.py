"""Time rounds of Flower's simulation on Ray: 400 clients, one record each, clipped and noised locally.

`benchmarks.simulated_peers` runs this in an environment of its own, without farthing; it prints seconds a
round as JSON. Every client is a `NumPyClient` that makes one step on a record it drew; the update is clipped
and noised by the client; the server averages by `FedAvg`. Ray gets two cores, and a client one of them. Log
lines, several a client and round, are switched off. ``app`` is Flower's current way to simulate, with its
`LocalDpMod`; ``engine`` is the older, deprecated way, which does less work per message.
"""

import functools
import json
import logging
import sys
import time

import numpy as np
from flwr.client import ClientApp, NumPyClient
from flwr.client.mod import LocalDpMod
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation, start_simulation

CLIP, EPSILON, DELTA = 3.0, 10.0, 1e-8  # LocalDpMod divides by 0 where noise drowns an update in float32

RAY = {"num_cpus": 2, "log_to_driver": False}

logging.getLogger("flwr").setLevel(logging.ERROR)


@functools.cache
def table(path):
    """Return rows with a constant, and labels; read once in every process."""
    with np.load(path) as found:
        X, y, records = found["X"], found["y"], int(found["records"])
    return np.column_stack([X, np.ones(len(X))]).astype(np.float32), y, records


class User(NumPyClient):
    """A client that owns rows start to start + records of the table."""

    def __init__(self, path, client):
        rows, y, records = table(path)
        own = slice(client * records, (client + 1) * records)
        self.rows, self.y = rows[own], y[own]

    def fit(self, parameters, config):
        (w,) = parameters
        place = np.random.default_rng().integers(len(self.rows))
        x = self.rows[place]
        residual = 1 / (1 + np.exp(-x @ w)) - self.y[place]
        return [(w - residual * x).astype(np.float32)], 1, {}


class Noisy(User):
    """A client that clips its update and adds noise itself."""

    def fit(self, parameters, config):
        (moved,), count, told = super().fit(parameters, config)
        update = moved - parameters[0]
        update *= min(1.0, CLIP / max(float(np.linalg.norm(update)), 1e-30))
        noise = CLIP * np.sqrt(2 * np.log(1.25 / DELTA)) / EPSILON  # as in LocalDpMod
        update += np.random.default_rng().normal(0, noise, len(update))
        return [parameters[0] + update], count, told


class Clocked(FedAvg):
    """A strategy that records the end of each round."""

    def __init__(self, ends, width, clients):
        start = ndarrays_to_parameters([np.zeros(width, np.float32)])
        super().__init__(
            fraction_fit=1.0,
            fraction_evaluate=0.0,
            min_fit_clients=clients,
            min_available_clients=clients,
            initial_parameters=start,
        )
        self.ends = ends

    def aggregate_fit(self, server_round, results, failures):
        assert not failures, failures[0]
        found = super().aggregate_fit(server_round, results, failures)
        self.ends.append(time.perf_counter())
        return found


def app_rounds(path, rounds):
    """Return time stamps of the ends of rounds of a ServerApp and a ClientApp."""
    rows, _, records = table(path)
    clients, ends = len(rows) // records, []

    def client(context):
        return User(path, int(context.node_config["partition-id"])).to_client()

    def server(context):
        strategy = Clocked(ends, rows.shape[1], clients)
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=rounds + 1))

    run_simulation(
        ServerApp(server_fn=server),
        ClientApp(client_fn=client, mods=[LocalDpMod(CLIP, CLIP, EPSILON, DELTA)]),
        num_supernodes=clients,
        backend_config={"client_resources": {"num_cpus": 1}, "init_args": RAY},
    )
    return ends


def engine_rounds(path, rounds):
    """Return time stamps of the ends of rounds of the older engine, which has no mods: noise by hand."""
    rows, _, records = table(path)
    clients, ends = len(rows) // records, []

    def client(context):
        return Noisy(path, int(context.node_config["partition-id"])).to_client()

    start_simulation(
        client_fn=client,
        num_clients=clients,
        config=ServerConfig(num_rounds=rounds + 1),
        strategy=Clocked(ends, rows.shape[1], clients),
        client_resources={"num_cpus": 1},
        ray_init_args=RAY,
    )
    return ends


if __name__ == "__main__":
    import flower_rounds  # imported by name, so that Ray's processes find the classes

    kind, path, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    chosen = flower_rounds.app_rounds if kind == "app" else flower_rounds.engine_rounds
    print(json.dumps(np.diff(chosen(path, rounds)).tolist()))
