"""Compare a simulated round of 100 parties that train one network with a step of central training.

    python -m benchmarks.federated_networks [--parties 100] [--rounds 20]

A network of 101,770 weights (784-128-10), 60,000 made-up records, batches of 3,000 on average. Central
training is `farthing.torch.train` with SGD. Parties: `fedsgd` over `Simulated`, in which the drawn records of
all parties go through one forward and backward pass, because clipping is record by record: with one budget
for all; with three levels of budgets (weighed by precision, so three sums); and with every party's own noise
on its own upload (100 sums and 10^7 normal numbers a round). Times are CPU time a round, the median.
"""

import argparse
import statistics
import time
from collections.abc import Iterable

import numpy as np
import torch
from torch import nn

import farthing as ft
from farthing.federated import Simulated, fedsgd, personal

RECORDS, RATE, DELTA = 60_000, 0.05, 1e-5


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 128), nn.Tanh(), nn.Linear(128, 10))


def median(steps: Iterable[object]) -> float:
    """The CPU time of a step, in seconds; the first two warm up."""
    taken, last = [], time.process_time()
    for _ in steps:
        now = time.process_time()
        taken.append(now - last)
        last = now
    return statistics.median(taken[2:])


def main(arguments: list[str] | None = None) -> None:
    """Print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parties", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    chosen = parser.parse_args([] if arguments is None else arguments)
    torch.manual_seed(0)
    data = torch.rand(RECORDS, 784), torch.randint(10, (RECORDS,))
    loss, rounds = nn.CrossEntropyLoss(reduction="none"), chosen.rounds
    first = model()
    optimizer = torch.optim.SGD(first.parameters(), 0.1, momentum=0.9)
    central = median(
        ft.torch.train(
            first, loss, data, epsilon=1.0, delta=DELTA, sampling_rate=RATE, steps=rounds, optimizer=optimizer
        )
    )
    print(f"{'':34}{'ms a round':>12}{'of central':>12}")
    print(f"{'central':34}{1e3 * central:12.1f}{1.0:12.2f}", flush=True)
    for name, levels, noise, most in (
        ("parties, one budget", (1.0,), "sum", rounds),
        ("parties, three budgets", (0.5, 1.0, 2.0), "sum", rounds),
        ("parties, each noise on its own", (1.0,), "each", 5),
    ):
        budgets = personal(np.resize(levels, chosen.parties), DELTA)
        examples = ft.torch.Examples(data)
        clients = Simulated.split(examples, clients=chosen.parties, budgets=budgets, noise=noise)  # type: ignore[arg-type]
        network = ft.torch.Network(model(), loss)
        taken = median(fedsgd(clients, network, rounds=most, sampling_rate=RATE, lr=0.1))
        print(f"{name:34}{1e3 * taken:12.1f}{taken / central:12.2f}", flush=True)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
