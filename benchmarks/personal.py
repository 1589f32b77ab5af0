"""What personal budgets cost beside a training step: a million people on 32 levels of budget.

    python benchmarks/personal.py [--people 1000000] [--steps 60]

A small network on batches of a hundredth of the people, with one budget for all and with personal budgets.
"books" is the CPU time of an ask outside drawing, summing and adding noise; "draw" is that of drawing a
batch; both as a share of the whole step. All numbers come from one run.
"""

import argparse
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from torch import nn

import farthing as ft
from farthing.ledger.ledger import Ledger

LOSS = nn.CrossEntropyLoss(reduction="none")


class Timed(Ledger):
    """A ledger whose time inside answers, and inside draws, is added up."""

    inside = 0.0

    def _compute(self, ready: Any, w: Any, turn: int) -> Any:
        start = process_time()
        value = super()._compute(ready, w, turn)
        Timed.inside += process_time() - start
        return value


def measure(people: int, steps: int, **budget: Any) -> tuple[float, float, float, float]:
    """Seconds of the plan, then CPU seconds a step: of all of it, of the books, of a draw."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(people, 64, generator=generator)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2))
    begun = perf_counter()
    training = ft.torch.train(
        model, LOSS, (inputs, (inputs[:, 0] > 0).long()), delta=1e-7, steps=steps + 2, sampling_rate=0.01,
        **budget,
    )  # fmt: skip
    planned = perf_counter() - begun
    door = training._asks.door
    door.__class__ = Timed
    asked, ask = 0.0, door.ask

    def timed(*args: Any) -> Any:
        nonlocal asked
        start = process_time()
        answer = ask(*args)
        asked += process_time() - start
        return answer

    door.ask = timed
    next(training)
    next(training)
    asked = Timed.inside = 0.0
    start = process_time()
    for _ in range(steps):
        next(training)
    whole, books = process_time() - start, asked - Timed.inside
    query, start = training._last[2], process_time()
    for turn in range(20):
        query.draw(door._records, door._stream, turn)
    return planned, whole / steps, books / steps, (process_time() - start) / 20


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--people", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args([] if arguments is None else arguments)
    torch.set_num_threads(1)
    own = np.clip(np.exp(np.random.default_rng(0).normal(size=given.people)), 0.1, 10.0)
    print(f"{given.people:,} people, CPU time of a step")
    for name, budget in (("one budget", {"epsilon": 1.0}), ("32 levels", {"budgets": own})):
        planned, step, books, draw = measure(given.people, given.steps, **budget)
        print(
            f"{name:12} {1e3 * step:7.2f} ms a step, books {1e3 * books:6.3f} ms ({books / step:.2%}), "
            f"draw {1e3 * draw:6.3f} ms ({draw / step:.2%}); planned in {planned:.1f} s"
        )


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
