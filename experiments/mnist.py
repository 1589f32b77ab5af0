"""MNIST within a budget: the recipe that wins, and AdaDP's comparison at equal budgets.

    python experiments/mnist.py recipe  [--epsilons 1 3] [--seeds 3] [--data mnist] [--small]
    python experiments/mnist.py compare [--epsilons 0.5 2 8] [--seeds 3] [--lots 600] [--data mnist] [--small]

`recipe`: scattering features (`farthing.torch.scattering`, public), their logarithms normalised in groups of
channels within each image (public), whitened by three noisy answers, and a linear head by DP-SGD with large
lots and momentum. One ledger pays for all of it. Its constants were chosen on Fashion-MNIST and then frozen.

`compare`: the network of the AdaDP paper (60 dimensions of DpPCA, 1,000 ReLU units), Figure 2 and Table I:
DP-SGD, AdaL, AdaN, AdaDP, DpOpt and DP-AGD, each with the same (ε, δ), DpPCA's cost included. The paper's
levels are ε = .5, 2, 8 at δ = 1e-5 with noise 8, 4, 2 on lots of 600, which tight accounting lets run for ten
thousands of lots; here --lots fixes their number, and the noise follows from it and the budget. Learning
rates are those that did best on Fashion-MNIST (--tune prints them).

Data are read from $FARTHING_DATA or ../shared/data. Each command prints a table and writes the numbers (JSON)
and a figure beside them. --small takes a few thousand images and lots, to see that everything runs.
"""

import argparse
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import farthing as ft
from farthing.accounting.filters import ZcdpFilter
from farthing.algorithms.dpagd import at_price
from farthing.algorithms.dppca import Scatter, components
from farthing.bounds import ClipOuter
from farthing.events import GaussianEvent, RepeatedEvent
from farthing.mechanisms import SymmetricGaussian
from farthing.query import Query
from farthing.samplers import Everyone
from farthing.tables import Features, Table
from farthing.torch.adadp import AdaDP, AdaL
from farthing.torch.dpagd import dpagd
from farthing.torch.dpopt import DpOpt
from farthing.torch.plan import fitted
from farthing.torch.records import Examples
from farthing.torch.scattering import Scattering
from farthing.torch.training import train
from farthing.torch.whitening import promised, whitening

DELTA = 1e-5
LOSS = nn.CrossEntropyLoss(reduction="none")

GROUPS = 9  # of channels, normalised together
MOMENTS = 0.05  # the part of μ² that whitening may cost
RATE, LOTS, CLIP, MOMENTUM = 0.05, 800, 0.1, 0.9
LEARNING_RATE, MOST = 35.0, 100.0  # times √ε, and at most
FAINT = 1e-3  # added before logarithms are taken

COMPONENTS, UNITS, SCALE = 60, 1000, 8.0  # rows of norm 1 are multiplied by SCALE before the network
PCA = 0.05  # the part of μ² (or ρ) that DpPCA may cost
LOT_RATE = 0.01
RATES = {  # clip, learning rate: the best on Fashion-MNIST of those in GRID
    "DP-SGD": (1.0, 0.3),
    "AdaL": (1.0, 0.01),
    "AdaN": (1.0, 0.8),
    "AdaDP": (1.0, 0.01),
    "DpOpt": (1.0, 0.3),
    "DP-AGD": (1.0, 0.0),
}
GRID = {
    "DP-SGD": (0.1, 0.3, 0.6),
    "AdaL": (0.005, 0.01, 0.02),
    "AdaN": (0.1, 0.3, 0.8),
    "AdaDP": (0.005, 0.01, 0.02),
    "DpOpt": (0.1, 0.3, 0.6),
    "DP-AGD": (0.0,),
}


def folder(file="mnist.npz"):
    """Where the data are, or None."""
    places = [os.environ.get("FARTHING_DATA"), Path(__file__).resolve().parents[2] / "shared" / "data"]
    return next((Path(place) for place in places if place and (Path(place) / file).exists()), None)


def images(name, small):
    data = np.load(folder() / f"{name}.npz")
    most = 4000 if small else None
    parts = [torch.from_numpy(data[key][:most]) for key in ("X_train", "y_train", "X_test", "y_test")]
    return parts[0].float() / 255, parts[1].long(), parts[2].float() / 255, parts[3].long()


def accuracy(model, x, y):
    with torch.no_grad():
        batches = zip(x.split(1000), y.split(1000), strict=True)
        return 100 * sum(int((model(rows).argmax(1) == labels).sum()) for rows, labels in batches) / len(y)


def scattered(x, kept=None):
    """Normalised features of images in half precision; kept in a file if one is named."""
    if kept is not None and kept.exists():
        return torch.from_numpy(np.load(kept))
    scattering = Scattering(tuple(x.shape[-2:]))
    features = torch.cat([normalised(scattering(part)).half() for part in x.split(32)])
    if kept is not None:
        np.save(kept, features.numpy())
    return features


def normalised(features):
    if features.ndim == 5:  # colours become channels
        features = features.flatten(1, 2)
    return nn.functional.group_norm((features.float().clamp(min=0) + FAINT).log(), GROUPS)


def mapped(white, features, device):
    """Whitened rows on the device, block by block: they are the largest thing in memory."""
    rows = torch.empty(len(features), features[0].numel(), device=device)
    for start in range(0, len(features), 500):
        rows[start : start + 500] = white(features[start : start + 500].to(device))
    return rows


def recipe(features, labels, test, answers, epsilon, *, lots=LOTS, device="cpu"):
    """Accuracy and the guarantee of one run."""
    ledger = ft.Ledger(ft.Budget(epsilon, DELTA))
    moments = math.sqrt(3 / MOMENTS) / ledger.budget.mu
    before = RepeatedEvent(GaussianEvent(moments), 3)
    noise = 1.001 * fitted(lambda t: 1.0, RATE, lots, ledger.budget, before)[0]
    promised(ledger, noise=moments)
    ledger.promise(ft.Poisson(RATE).amplify(ft.Gaussian(noise)), lots)
    white = whitening(ledger, features.to(device), noise=moments)
    rows, labels = mapped(white, features, device), labels.to(device)
    model = nn.Linear(rows.shape[1], 10).to(device)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    step = min(LEARNING_RATE * math.sqrt(epsilon), MOST)
    optimizer = torch.optim.SGD(model.parameters(), 2 * step, momentum=MOMENTUM)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / lots)
    for _ in train(
        model, LOSS, (rows, labels), ledger, rate=RATE, steps=lots, clip=CLIP, optimizer=optimizer,
        scheduler=falling, physical=2000,
    ):  # fmt: skip
        pass
    return accuracy(model, mapped(white, test, device), answers.to(device)), ledger.guarantee


def network():
    return nn.Sequential(nn.Linear(COMPONENTS, UNITS), nn.ReLU(), nn.Linear(UNITS, 10))


def method(name, model, clip, rate):
    match name:
        case "AdaL":
            return AdaL(model, rate, clip=clip)
        case "AdaN":
            return AdaDP(model, rate, clip=clip, rate=False, momentum=0.9, period=5)
        case "AdaDP":
            return AdaDP(model, rate, clip=clip, period=5)
        case "DpOpt":
            return DpOpt(model, rate, clip=clip, momentum=0.9, period=5)
    return torch.optim.SGD(model.parameters(), rate, momentum=0.9)


def compared(name, x, y, test, answers, epsilon, lots, clip, rate, marks=8):
    """[(share of the budget, accuracy)] along one run, DpPCA included, and the guarantee."""
    rows = [part.flatten(1).double().numpy() for part in (x, test)]
    rows = [part / np.linalg.norm(part, axis=1, keepdims=True).clip(1e-12) for part in rows]
    width, model = rows[0].shape[1], network()
    query = Query(
        Everyone(),
        Scatter(Features(width, intercept=0.0), np.zeros(width)),
        ClipOuter(1.0),
        SymmetricGaussian(1.0),
    )
    agd = name == "DP-AGD"
    ledger = ft.Ledger(ft.Budget(epsilon, DELTA), filter=ZcdpFilter if agd else None)
    if agd:
        query = at_price(query, PCA * ledger.filter.rho, ledger.filter)
    else:
        moments = 1 / (math.sqrt(PCA) * ledger.budget.mu)
        query = Query(query.sampler, query.contribution, query.bound, SymmetricGaussian(moments))
        noise = 1.001 * fitted(lambda t: 1.0, LOT_RATE, lots, ledger.budget, GaussianEvent(moments))[0]
        ledger.promise(query, 1)
        ledger.promise(ft.Poisson(LOT_RATE).amplify(ft.Gaussian(noise)), lots)
    axes = components(ledger.over(Table(rows[0])).ask(query).value, COMPONENTS)[1]
    seen, held = (torch.from_numpy(SCALE * part @ axes.T).float() for part in rows)
    if agd:
        steps = dpagd(
            ledger, model, LOSS, Examples((seen, y)), clip=clip, splits=30 / (1 - PCA), physical=4000
        )
        every = 4
    else:
        optimizer = method(name, model, clip, rate)
        bound = optimizer.bound if isinstance(optimizer, AdaDP) else clip
        steps = train(
            model, LOSS, (seen, y), ledger, rate=LOT_RATE, steps=lots, clip=bound, optimizer=optimizer
        )
        every = max(1, lots // marks)
    curve = [
        (getattr(step, "share", None) or ledger.share, accuracy(model, held, answers))
        for step in steps
        if step.t % every == 0
    ]
    return [*curve, (1.0, accuracy(model, held, answers))], ledger.guarantee


def run_recipe(given):
    x, y, test, answers = images(given.data, given.small)
    kept = Path(given.cache) if given.cache else None
    names = [kept / f"{given.data}_{part}.npy" if kept and not given.small else None for part in ("a", "b")]
    start = time.time()
    features, held = scattered(x, names[0]), scattered(test, names[1])
    print(f"features of {len(x) + len(test)} images: {time.time() - start:.0f} s", flush=True)
    found = {}
    for epsilon in given.epsilons or (1.0, 3.0):
        results = []
        for seed in range(given.seeds):
            torch.manual_seed(seed)
            start = time.time()
            right, guarantee = recipe(features, y, held, answers, epsilon, lots=20 if given.small else LOTS)
            results.append(right)
            print(
                f"ε {epsilon:g}, run {seed}: {right:.2f} %  ({time.time() - start:.0f} s)  {guarantee}",
                flush=True,
            )
        found[epsilon] = results
    print(f"\n{given.data}, δ = {DELTA:g}, add-remove, per record\n{'ε':>6} {'mean':>7} {'sd':>6}  runs")
    for epsilon, results in found.items():
        print(f"{epsilon:6g} {np.mean(results):7.2f} {np.std(results):6.2f}  {len(results)}")
    return {"data": given.data, "delta": DELTA, "accuracy": found}


def run_compare(given):
    x, y, test, answers = images(given.data, given.small)
    lots = 30 if given.small else given.lots
    found = {}
    for epsilon in given.epsilons or (0.5, 2.0, 8.0):
        for name in given.methods or RATES:
            clip, best = RATES[name]
            for rate in GRID[name] if given.tune else (best,):
                curves = []
                for seed in range(given.seeds):
                    torch.manual_seed(seed)
                    start = time.time()
                    curve, guarantee = compared(name, x, y, test, answers, epsilon, lots, clip, rate)
                    curves.append(curve)
                last = [curve[-1][1] for curve in curves]
                took = time.time() - start
                print(
                    f"ε {epsilon:g}  {name:7} rate {rate:<6g} {np.mean(last):6.2f} ± {np.std(last):.2f}"
                    f"  ({took:.0f} s a run)  {guarantee}",
                    flush=True,
                )
                found[f"{epsilon:g} {name} {rate:g}"] = curves
    return {"data": given.data, "delta": DELTA, "lots": lots, "curves": found}


def draw(command, numbers, path):
    try:
        from matplotlib import pyplot
    except ImportError as error:
        print(f"no figure: {error}")
        return
    if command == "recipe":
        figure, axes = pyplot.subplots(figsize=(5, 4))
        found = numbers["accuracy"]
        axes.errorbar(
            list(found), [np.mean(v) for v in found.values()], [np.std(v) for v in found.values()], marker="o"
        )
        axes.set(xlabel="ε", ylabel="test accuracy, %", xscale="log", title=numbers["data"])
    else:
        levels = list(dict.fromkeys(key.split()[0] for key in numbers["curves"]))
        figure, grid = pyplot.subplots(1, len(levels), figsize=(5 * len(levels), 4), squeeze=False)
        for axes, level in zip(grid[0], levels, strict=True):
            for key, curves in numbers["curves"].items():
                if key.split()[0] == level:
                    shares = [share for share, _ in curves[0]]
                    heights = [
                        np.mean([c[min(i, len(c) - 1)][1] for c in curves]) for i in range(len(shares))
                    ]
                    axes.plot(shares, heights, marker="o", markersize=3, label=" ".join(key.split()[1:]))
            axes.set(xlabel="part of the budget spent", ylabel="test accuracy, %", title=f"ε = {level}")
            axes.grid(alpha=0.3)
        grid[0, 0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"drawn in {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("recipe", "compare"))
    parser.add_argument("--epsilons", type=float, nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", default="mnist", choices=("mnist", "fashion_mnist"))
    parser.add_argument("--lots", type=int, default=600)
    parser.add_argument("--methods", nargs="+", choices=tuple(RATES))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--cache", help="a folder to keep features in")
    parser.add_argument("--out", help="where the figure and the numbers go, without an ending")
    given = parser.parse_args()
    if folder() is None:
        print("skipped: no data; set FARTHING_DATA to the folder that holds mnist.npz")
        return
    numbers = {"recipe": run_recipe, "compare": run_compare}[given.command](given)
    out = given.out or f"{given.data}-{given.command}"
    Path(f"{out}.json").write_text(json.dumps(numbers, indent=1))
    draw(given.command, numbers, f"{out}.png")


if __name__ == "__main__":
    main()
