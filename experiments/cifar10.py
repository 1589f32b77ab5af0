"""CIFAR-10 from scratch within a budget: accuracy against ε, and AdaDP's comparison on the paper's network.

    python experiments/cifar10.py recipe  [--epsilons 1 3 8] [--seeds 3] [--device cuda] [--minutes 6]
    python experiments/cifar10.py compare [--epsilons 2 4 8] [--seeds 1] [--lots 300]

`recipe` is the linear head of Tramèr & Boneh (2021) with the constants they publish: scattering features of
each colour, normalised in 27 groups of channels within each image, lots of 8,192, 60 passes, clip .1,
learning rate 4. No public images, nothing pre-trained. (The whitened features of experiments/mnist.py, with
the constants chosen on Fashion-MNIST, do worse here: --whiten.)

`compare` is the AdaDP paper's second network: two frozen convolutions and trained fully connected layers. The
paper takes its convolutions from CIFAR-100; here they are random filters with unit variance (frozen all the
same, and public), since nothing is pre-trained, so accuracies are below the paper's and only the order of the
methods can be compared.

Data are read from $FARTHING_DATA or ../shared/data (folder cifar10). --shards says how many of the five
training shards to use; --minutes stops before a run that would not end in time; --cache keeps features in a
folder; --small takes a few thousand images and lots, to see that everything runs.
"""

import argparse
import json
import time
from pathlib import Path

import mnist
import numpy as np
import torch
from mnist import DELTA, LOSS, accuracy, draw, folder, method
from torch import nn

import farthing as ft
from farthing.torch.adadp import AdaDP
from farthing.torch.plan import fitted
from farthing.torch.scattering import Scattering
from farthing.torch.training import train

FILE = "cifar10/train_1.npz"
GROUPS, LOT, PASSES, LINEAR_CLIP, LEARNING_RATE = 27, 8192, 60, 0.1, 4.0  # published
CONVOLUTIONS, HIDDEN, LOT_RATE, CLIP = 64, 384, 0.04, 3.0
RATES = {"DP-SGD": 0.1, "AdaL": 0.004, "AdaN": 0.1, "AdaDP": 0.004, "DpOpt": 0.1}


def shard(path):
    """Images (n, 3, 32, 32) in bytes, and labels; shards hold differences along rows and columns."""
    data = np.load(path)
    c = data["X_delta"].cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
    return np.stack([c[:, 0] + c[:, 1], c[:, 0], c[:, 0] + c[:, 2]], 1), data["y"]


def images(shards, small):
    place, most = folder(FILE) / "cifar10", 2000 if small else None
    names = [f"train_{i}" for i in range(1, (1 if small else shards) + 1)]
    parts = [shard(place / f"{name}.npz") for name in names]
    train_x, train_y = (np.concatenate(part)[:most] for part in zip(*parts, strict=True))
    test_x, test_y = (part[:most] for part in shard(place / "test.npz"))
    return [torch.from_numpy(np.ascontiguousarray(part)) for part in (train_x, train_y, test_x, test_y)]


def normalised(features):
    return nn.functional.group_norm(features.flatten(1, 2).float(), GROUPS)


def linear(features, labels, test, answers, epsilon, *, lots, device):
    """Accuracy and the guarantee of one run of the linear head."""
    rows, held = (part.flatten(1).to(device).float() for part in (features, test))
    ledger, rate = ft.Ledger(ft.Budget(epsilon, DELTA)), min(1.0, LOT / len(rows))
    noise = 1.001 * fitted(lambda t: 1.0, rate, lots, ledger.budget)[0]
    model = nn.Linear(rows.shape[1], 10).to(device)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9)
    for _ in train(
        model, LOSS, (rows, labels.to(device)), ledger, rate=rate, steps=lots, noise=noise, clip=LINEAR_CLIP,
        optimizer=optimizer, physical=4096,
    ):  # fmt: skip
        pass
    return accuracy(model, held, answers.to(device)), ledger.guarantee


def scattered(x, device, form, kept=None):
    """Features (n, 243, 8, 8), normalised, in half precision on the CPU."""
    if kept is not None and kept.exists():
        return torch.from_numpy(np.load(kept))
    scattering = Scattering((32, 32)).to(device)
    size = 1000 if device.type == "cuda" else 10
    parts = [form(scattering(part.to(device).float() / 255)).half().cpu() for part in x.split(size)]
    if kept is not None:
        np.save(kept, torch.cat(parts).numpy())
    return torch.cat(parts)


def frozen(seed):
    """The paper's network with random, frozen convolutions."""
    torch.manual_seed(seed)
    norm = nn.LocalResponseNorm(4)
    body = nn.Sequential(
        nn.Conv2d(3, CONVOLUTIONS, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), norm,
        nn.Conv2d(CONVOLUTIONS, CONVOLUTIONS, 5, padding=2), nn.ReLU(), norm, nn.MaxPool2d(2), nn.Flatten(),
    )  # fmt: skip
    return body.requires_grad_(False)


def head(width):
    return nn.Sequential(
        nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 192), nn.ReLU(), nn.Linear(192, 10)
    )


def run_recipe(given):
    device, began = torch.device(given.device), time.time()
    x, y, test, answers = images(given.shards, given.small)
    kept = [
        Path(given.cache) / f"cifar10_{name}.npy" if given.cache and not given.small else None
        for name in (("white_a", "white_b") if given.whiten else ("a", "b"))
    ]
    form = mnist.normalised if given.whiten else normalised
    features, held = (scattered(part, device, form, name) for part, name in zip((x, test), kept, strict=True))
    recipe, lots = (mnist.recipe, mnist.LOTS) if given.whiten else (linear, round(PASSES * len(x) / LOT))
    print(f"features of {len(x) + len(test)} images: {time.time() - began:.0f} s", flush=True)
    found, longest = {}, 0.0
    for epsilon in given.epsilons or (1.0, 2.0, 3.0, 8.0):
        for seed in range(given.seeds):
            if given.minutes and time.time() - began + 1.2 * longest > 60 * given.minutes:
                print(f"no time left for ε {epsilon:g}, run {seed}")
                continue
            torch.manual_seed(seed)
            start = time.time()
            right, guarantee = recipe(
                features,
                y.long(),
                held,
                answers.long(),
                epsilon,
                lots=20 if given.small else lots,
                device=device,
            )
            longest = max(longest, time.time() - start)
            found.setdefault(epsilon, []).append(right)
            print(f"ε {epsilon:g}, run {seed}: {right:.2f} %  ({longest:.0f} s)  {guarantee}", flush=True)
    print(f"\nCIFAR-10, {len(x)} images, δ = {DELTA:g}, add-remove, per record")
    print(f"{'ε':>6} {'mean':>7} {'sd':>6}  runs")
    for epsilon, results in found.items():
        print(f"{epsilon:6g} {np.mean(results):7.2f} {np.std(results):6.2f}  {len(results)}")
    return {"data": "cifar10", "delta": DELTA, "records": len(x), "accuracy": found}


def run_compare(given):
    device, (x, y, test, answers) = torch.device(given.device), images(given.shards, given.small)
    lots, curves = 20 if given.small else given.lots, {}
    for epsilon in given.epsilons or (2.0, 4.0, 8.0):
        for name, rate in RATES.items():
            runs = []
            for seed in range(given.seeds):
                body = frozen(seed).to(device)
                with torch.no_grad():
                    seen, held = (
                        torch.cat([body(part.to(device).float() / 127.5 - 1) for part in rows.split(250)])
                        for rows in (x, test)
                    )
                seen, held = (8 * rows / rows.norm(dim=1, keepdim=True) for rows in (seen, held))
                model = head(seen.shape[1]).to(device)
                ledger = ft.Ledger(ft.Budget(epsilon, DELTA))
                noise = 1.001 * fitted(lambda t: 1.0, LOT_RATE, lots, ledger.budget)[0]
                optimizer = method(name, model, CLIP, rate)
                bound = optimizer.bound if isinstance(optimizer, AdaDP) else CLIP
                steps = train(
                    model, LOSS, (seen, y.long()), ledger, rate=LOT_RATE, steps=lots, noise=noise, clip=bound,
                    optimizer=optimizer,
                )  # fmt: skip
                labels, every = answers.long().to(device), max(1, lots // 8)
                curve = [(s.share, accuracy(model, held, labels)) for s in steps if s.t % every == 0]
                runs.append([*curve, (1.0, accuracy(model, held, labels))])
            last = [curve[-1][1] for curve in runs]
            print(f"ε {epsilon:g}  {name:7} {np.mean(last):6.2f} ± {np.std(last):.2f}", flush=True)
            curves[f"{epsilon:g} {name} {rate:g}"] = runs
    return {"data": "cifar10", "delta": DELTA, "lots": lots, "curves": curves}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("recipe", "compare"), nargs="?", default="recipe")
    parser.add_argument("--epsilons", type=float, nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lots", type=int, default=300)
    parser.add_argument("--shards", type=int, default=5, choices=range(1, 6))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--cache", help="a folder to keep features in")
    parser.add_argument("--whiten", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", help="where the figure and the numbers go, without an ending")
    given = parser.parse_args()
    if folder(FILE) is None:
        print("skipped: no data; set FARTHING_DATA to the folder that holds cifar10/train_1.npz")
        return
    numbers = {"recipe": run_recipe, "compare": run_compare}[given.command](given)
    out = given.out or f"cifar10-{given.command}"
    Path(f"{out}.json").write_text(json.dumps(numbers, indent=1))
    draw(given.command, numbers, f"{out}.png")


if __name__ == "__main__":
    main()
