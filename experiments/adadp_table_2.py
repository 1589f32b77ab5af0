"""AdaDP, Table II: time per batch by each method (Xu et al. 2020).

Batches of 120 on MNIST's network and of 32 on CIFAR-10's fully connected layers, on one core, noise and
update included (the lattice noise of the ledger); DP-AGD on so many records: a gradient and the choice among
11 lengths. Rows are made up, which does not affect the time. Each time is the least of several means over a
few batches, with the methods in turn, so that other load on the machine affects all of them.
"""

import time
from typing import Any

import numpy as np
import torch

import farthing as ft
from experiments.deep import LOSS, Setting, method
from experiments.frame import COLOURS, Grid, Row, Size, canvas, seed, values
from experiments.pictures import Problem
from farthing.accounting.filters import ZcdpFilter
from farthing.torch.methods.adadp import AdaDP
from farthing.torch.methods.dpagd import dpagd
from farthing.torch.training.loop import train
from farthing.torch.training.records import Examples

SIZES = {"MNIST": ((60, 1000, 10), 120), "CIFAR-10": ((4096, 384, 192, 10), 32)}
METHODS = ("ordinary", "DP-SGD", "AdaDP", "DpOpt", "DP-AGD")
SAID = {
    "MNIST": {"AdaDP": 0.5, "DP-SGD": 0.3, "DP-AGD": 12.0, "DpOpt": 15.5},
    "CIFAR-10": {"AdaDP": 1.2, "DP-SGD": 0.9, "DP-AGD": 23.7, "DpOpt": 19.1},
}
LOTS, REPEATS = 10, 6


def measure(size: Size) -> list[Row]:
    size.only("repeats")
    rows, threads = list[Row](), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for data, (widths, lot) in SIZES.items():
            if size.small:
                widths, lot = (8, 16, 10), 20
            runs = {name: _lots(name, data, widths, lot) for name in METHODS}
            for run in runs.values():
                for _ in range(LOTS):  # the first lots choose routes and scales
                    next(run)
            for _ in range(size.repeats_or(REPEATS)):
                for name, run in runs.items():
                    begun = time.perf_counter()
                    for _ in range(LOTS):
                        next(run)
                    seconds = (time.perf_counter() - begun) / LOTS
                    rows.append({"data": data, "method": name, "seconds": seconds})
    finally:
        torch.set_num_threads(threads)
    return rows


def _lots(name: str, data: str, widths: tuple[int, ...], lot: int) -> Any:
    """One lot after another."""
    random = np.random.default_rng(seed(data))
    records = lot if name == "DP-AGD" else 20 * lot
    x = torch.from_numpy(random.normal(size=(records, widths[0]))).float()
    y = torch.from_numpy(random.integers(10, size=records))
    model = Problem(data, x.numpy(), y, x.numpy(), y, widths, None).network(0).cpu()
    setting = Setting(
        method=name, epsilon=50.0, delta=1e-5, noise=4.0, lot=lot, lots=10_000, clip=4.0, step=1e-3
    )
    budget = ft.Budget(setting.epsilon, setting.delta)
    if name == "ordinary":
        return _ordinary(model, x, y, lot)
    if name == "DP-AGD":
        return dpagd(ft.Ledger(budget, filter=ZcdpFilter), model, LOSS, Examples((x, y)), splits=200.0)
    optimizer = method(model, setting)
    clip = optimizer.bound if isinstance(optimizer, AdaDP) else setting.clip
    lots = len(METHODS) * LOTS * (REPEATS + 2)
    return train(
        model, LOSS, (x, y), ft.Ledger(budget), sampling_rate=lot / len(x),
        noise_multiplier=setting.noise, steps=lots, clip_norm=clip, optimizer=optimizer,
    )  # fmt: skip


def _ordinary(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, lot: int) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    while True:
        optimizer.zero_grad()
        LOSS(model(x[:lot]), y[:lot]).mean().backward()
        optimizer.step()
        yield


def tables(rows: list[Row]) -> list[Grid]:
    names = values(rows, "data")
    best = {(row["data"], row["method"]): row["seconds"] for row in sorted(rows, key=lambda r: -r["seconds"])}
    cells = []
    for name in METHODS:
        cells.append([name])
        for data in names:
            base, said = best[data, "DP-SGD"], SAID[data].get(name)
            cells[-1] += [
                f"{1000 * best[data, name]:.1f} ms",
                f"{best[data, name] / base:.2f}",
                "" if said is None else f"{said:g} s",
                "" if said is None else f"{said / SAID[data]['DP-SGD']:.2f}",
            ]
    head = [""]
    for data in names:
        head += [f"{data}: a batch", "÷ DP-SGD", "the paper says", "÷ DP-SGD"]
    note = "The paper's machine had a GTX 1080 Ti; these are of one core of a shared machine."
    return [Grid("Time per batch, least of several means", head, cells, note)]


def draw(rows: list[Row]) -> Any:
    names = values(rows, "data")
    figure, grid = canvas(1, len(names))
    for axes, data in zip(grid[0], names, strict=True):
        least = [min(r["seconds"] for r in rows if (r["data"], r["method"]) == (data, m)) for m in METHODS]
        axes.bar(METHODS, [1000 * value for value in least], color=COLOURS[: len(METHODS)])
        axes.set(title=data, ylabel="milliseconds per batch")
        axes.set_axisbelow(True)
        axes.tick_params(axis="x", labelrotation=30)
    return figure
