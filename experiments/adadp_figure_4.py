"""AdaDP, Figure 4: what each half of it contributes, and how well E' estimates a gradient (Xu et al. 2020).

(a) MNIST and (b) CIFAR-10: adaptive noise alone (AdaN), adaptive steps alone (AdaL), both (AdaDP), at the
paper's settings of figures 2(a) and 3(a): 1,635 batches (`adadp_figure_2`) and 854 (`adadp_figure_3`). (c)
|g| and its estimate √E', and (d) the deviations σ_i of noise, at batches 100 to 1,000 on MNIST. Published
AdaDP reads gradients before noise; ours estimates the same from released gradients, of which a coordinate's
value is a hundredth of its noise, pooled over rows and columns. Where a gate is closed (line 7), noise is
that of the clip, and ours has no estimate.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import farthing as ft
from experiments import adadp_figure_2, adadp_figure_3, deep, pictures
from experiments.deep import CROSS, MARKS, Run, Setting, final, key, lines, marked, measured, shown
from experiments.frame import COLOURS, Grid, Row, Size, canvas, seed, stream, values
from experiments.published import published
from farthing.torch.gradients.layout import Layout
from farthing.torch.training.loop import train

METHODS = ("DP-SGD", "AdaL", "AdaN", "AdaDP", "published AdaN", "published AdaDP")
STEPS = {"AdaL": 0.001, "AdaN": 0.1, "published AdaN": 0.1}  # the paper's, where `adadp_figure_2` has none
QUANTILES = (0.1, 0.5, 0.9)
PLACES = (100, 250, 500, 750, 1000)
RUNS = 3


def measure(size: Size) -> list[Row]:
    size.only("repeats")
    mnist, cifar10 = pictures.mnist(size.small), pictures.cifar10(size.small)
    rows = [row for problem in (mnist, cifar10) for row in measured(problem, runs(problem, size))]
    return rows + _estimates(mnist, size.small)


def runs(problem: pictures.Problem, size: Size) -> Iterator[Run]:
    for run in range(size.repeats_or(RUNS)):
        for method in METHODS:
            if problem.name == "MNIST":
                setting = _mnist(problem, method, run, size.small)
            else:
                setting = adadp_figure_3.paper(problem, method, run, size.small, high=True)
            yield setting, MARKS, {"what": "accuracy", "data": problem.name}


def _mnist(problem: pictures.Problem, method: str, run: int, small: bool) -> Setting:
    if method not in STEPS:
        return adadp_figure_2.paper(problem, "high", method, run, small)
    setting = adadp_figure_2.paper(problem, "high", "AdaDP", run, small)
    return replace(setting, method=method, step=STEPS[method])


def _estimates(problem: pictures.Problem, small: bool) -> list[Row]:
    """Quantiles of |g|, √E' and σ_i, and how |g| and √E' go together, along a run of each version."""
    places, rows = (4, 8) if small else PLACES, list[Row]()

    def note(version: str, t: int, known: np.ndarray, found: np.ndarray, deviations: np.ndarray) -> None:
        row: Row = {"what": "estimate", "version": version, "lots": t}
        for name, part in (("|g|", found), ("√E'", known), ("σ", deviations)):
            for share, value in zip(QUANTILES, np.quantile(part, QUANTILES), strict=True):
                row[f"{name} {share:g}"] = float(value)
        row["correlation"] = float(np.corrcoef(known, found)[0, 1]) if known.std() > 0 else 0.0
        rows.append(row)

    setting = _mnist(problem, "published AdaDP", 0, small)
    inputs, _ = deep._seen(problem, None, setting)

    def watch(t: int, *parts: list[torch.Tensor]) -> None:
        if t in places:
            flat = [torch.cat([p.flatten() for p in part]).cpu().numpy() for part in parts]
            note("published AdaDP", t, *flat)

    for t in published(problem.network(0), deep.LOSS, inputs, problem.labels, setting, watch):
        if t == places[-1]:
            break
    _ours(problem, replace(setting, method="AdaDP"), inputs, places, note)
    return rows


def _ours(problem: pictures.Problem, setting: Setting, inputs: torch.Tensor, places: Any, note: Any) -> None:
    """The same of the sound version; its exact gradients are looked at from outside, on public data."""
    model, labels = problem.network(0), problem.labels
    method, random = deep.method(model, setting), np.random.default_rng(seed("looks"))
    budget, rate = ft.Budget(setting.epsilon, setting.delta), setting.lot / len(inputs)
    steps = train(
        model, deep.LOSS, (inputs, labels), ft.Ledger(budget, stream=stream("estimates")), sampling_rate=rate,
        steps=setting.lots, noise_multiplier=setting.noise, clip_norm=method.bound, optimizer=method,
    )  # fmt: skip
    shapes = Layout.of(model).shapes
    for step in steps:
        if step.t in places:
            lot = torch.from_numpy(random.choice(len(inputs), setting.lot, replace=False)).to(inputs.device)
            loss = deep.LOSS(model(inputs[lot]), labels[lot]).mean()
            exact = torch.autograd.grad(loss, list(model.parameters()))
            found = torch.cat([part.abs().flatten() for part in exact]).cpu().numpy()
            scales, bound = method.scales(), method.bound(step.t + 1)
            known = np.zeros_like(found)
            if scales is not None:
                parts = zip(scales, shapes, strict=True)
                known = torch.cat([part.expand(shape).flatten() for part, shape in parts]).cpu().numpy()
            scale = torch.as_tensor(bound.scale).cpu().numpy()
            deviations = setting.noise * bound.norm() * np.broadcast_to(scale, found.shape)
            note("AdaDP", step.t, known, found, deviations)
        if step.t == places[-1]:
            break


def tables(rows: list[Row]) -> list[Grid]:
    scores = [row for row in rows if row["what"] == "accuracy"]
    names = values(scores, "data")
    cells = [
        [marked(method), *(shown(final(scores, method=method, data=data)) for data in names)]
        for method in values(scores, "method")
    ]
    said = "The paper draws AdaDP above AdaN above AdaL and prints no numbers. " + CROSS
    grids = [Grid("(a), (b): test accuracy, %", ["", *names], cells, said)]
    cells = [
        [
            marked(row["version"]),
            str(row["lots"]),
            *(f"{row[f'{name} 0.5']:.3g} ({row[f'{name} 0.1']:.2g} to {row[f'{name} 0.9']:.2g})"
              for name in ("|g|", "√E'", "σ")),
            f"{row['correlation']:.2f}",
        ]
        for row in rows
        if row["what"] == "estimate"
    ]  # fmt: skip
    head = ["", "batch", "abs(g): median (10 to 90 %)", "√E'", "σ_i", "correlation of abs(g) and √E'"]
    said = "The paper: most σ_i are below 10 at batch 1,000, and many from 10 to 20 at batch 100."
    return [*grids, Grid("(c), (d): gradients, estimates and noise on MNIST", head, cells, said)]


def draw(rows: list[Row]) -> Any:
    scores = [row for row in rows if row["what"] == "accuracy"]
    found = [row for row in rows if row["what"] == "estimate"]
    figure, grid = canvas(2, 2, width=4.6)
    for axes, data in zip(grid[0], values(scores, "data"), strict=True):
        lines(axes, [row for row in scores if row["data"] == data])
        axes.set(title=data, xlabel="batches", ylabel="test accuracy, %")
    versions = values(found, "version")
    for place, version in enumerate(versions):
        colour = COLOURS[deep.ORDER.index(version)]
        for axes, name, style in (
            (grid[1, 0], "|g|", ":"), (grid[1, 0], "√E'", "-"), (grid[1, 1], "σ", "-"),
        ):  # fmt: skip
            # a closed gate has no estimate
            mine = [row for row in found if row["version"] == version and row[f"{name} 0.5"] > 0]
            lots, middle = [row["lots"] for row in mine], [row[f"{name} 0.5"] for row in mine]
            label = f"{name} of {marked(version)}"
            axes.plot(lots, middle, style, color=colour, marker="os"[place], label=label)
            if style == "-":
                low, high = ([row[f"{name} {share}"] for row in mine] for share in (0.1, 0.9))
                axes.fill_between(lots, low, high, color=colour, alpha=0.15)
    for axes, title in zip(grid[1], ("gradients and estimates", "deviations of noise"), strict=True):
        axes.set(title=f"MNIST: {title}, median and 10 to 90 %", xlabel="batch", yscale="log")
        axes.legend(fontsize=7, frameon=False, loc="best")
    key(figure, grid[0], 3)
    return figure
