"""Train principal components and a network on top of them from one budget.

    pip install '.[torch]'
    python examples/dppca_network.py --images mnist.npz

The network of AdaDP's paper (Xu et al. 2020, Section IV-A): 60 principal components, released once with noise
(DpPCA: Dwork et al. 2014, "Analyze Gauss"), then 1,000 ReLU units trained by AdaDP on batches of 600. The
paper accounts for the batches and leaves DpPCA out. Here both are promised to one ledger before anything is
asked, so that they are priced together, tightly: DpPCA gets a twentieth of μ², and the noise of the batches
follows.

Guarantee: (ε, δ)-DP, add-remove, per record, against an observer who does not see the batches' members. The
number of images counts as public. ``--images`` names an .npz file with X_train, y_train, X_test and y_test;
without it the images are made up.
"""

import argparse
import math

import numpy as np
import torch
from torch import nn

import farthing as ft
from farthing.data import Features, Table
from farthing.linear.methods.dppca import Scatter, components
from farthing.queries.events import GaussianEvent

PART = 0.05  # DpPCA's share of μ²
LENGTH = 8.0  # the norm that rows are scaled to before the network


def pictures(path: str | None, count: int = 6000) -> tuple[np.ndarray, ...]:
    """Return rows of norm 1 and labels for training and for testing."""
    if path is not None:
        with np.load(path) as data:
            x, y, test, answers = (data[key] for key in ("X_train", "y_train", "X_test", "y_test"))
    else:
        random = np.random.default_rng(0)
        labels = random.integers(10, size=count + 1000)
        made = random.random((10, 64))[labels] + 0.3 * random.normal(size=(len(labels), 64))
        x, test, y, answers = made[:count], made[count:], labels[:count], labels[count:]
    rows, held = (part.reshape(len(part), -1).astype(np.float64) for part in (x, test))
    unit = (part / np.linalg.norm(part, axis=1, keepdims=True).clip(1e-12) for part in (rows, held))
    return *unit, y.astype(np.int64), answers.astype(np.int64)


def main(
    epsilon: float = 2.0, steps: int = 300, kept: int = 60, units: int = 1000, images: str | None = None
) -> tuple[float, ft.Ledger]:
    """Train, print the guarantee and the accuracy; return the accuracy and the ledger."""
    rows, held, labels, answers = pictures(images)
    width, rate, budget = rows.shape[1], 600 / len(rows), ft.Budget(epsilon, 1e-5)
    pca_noise = 1 / (math.sqrt(PART) * budget.mu)
    noise = ft.torch.fitted(lambda t: 1.0, rate, steps, budget, GaussianEvent(pca_noise))[0]

    ledger = ft.Ledger(budget)  # journal="digits.ledger" to keep it
    moments = ft.Query(
        ft.Everyone(),
        Scatter(Features(width, intercept=0.0), np.zeros(width)),
        ft.ClipOuter(1.0),
        ft.SymmetricGaussian(pca_noise),
    )
    ledger.promise(moments, 1)
    ledger.promise(ft.Poisson(rate).amplify(ft.Gaussian(noise)), steps)

    _, axes = components(ledger.over(Table(rows)).ask(moments).value, kept)
    inputs, tests = (torch.from_numpy(LENGTH * part @ axes.T).float() for part in (rows, held))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(kept, units), nn.ReLU(), nn.Linear(units, 10))
    method = ft.torch.AdaDP(model, lr=0.01, clip_norm=1.0)
    training = ft.torch.train(
        model,
        nn.CrossEntropyLoss(reduction="none"),
        (inputs, torch.from_numpy(labels)),
        ledger,
        sampling_rate=rate,
        steps=steps,
        noise_multiplier=noise,
        clip_norm=method.bound,
        optimizer=method,
    )
    for _ in training:
        pass
    with torch.no_grad():
        found = float((model(tests).argmax(1).numpy() == answers).mean())
    print(ledger.guarantee)
    print(f"DpPCA with noise {pca_noise:.2f}, {training.t} batches with noise {noise:.2f}")
    print(f"{found:.1%} right on the test pictures")
    return found, ledger


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--epsilon", type=float, default=2.0)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--images", default=None)
    chosen = options.parse_args()
    main(chosen.epsilon, chosen.steps, images=chosen.images)
