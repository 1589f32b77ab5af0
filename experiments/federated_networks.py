"""A network over 100 parties, each with its records and budget: distributed noise, local noise, own budgets.

MNIST is dealt out to 100 parties, evenly or with labels and sizes that differ (Dirichlet 0.3: each label's
images go to parties in proportions drawn from it). Every party has a budget of its own, δ = 1e-5, add-remove,
per record. *Distributed*: each party adds a share of one noise, against whoever sees the sums; batches are
Poisson draws. *Local*: each party adds all of the noise that its own upload needs, against the server; all
records take part, as nothing is gained by drawing. Uploads are weighted by precision, or by their numbers of
records ("by records"). "0.5, 1, 2 in turn": parties with unequal budgets; under distributed noise that of a
party at 1, enough for two thirds of the parties, and those at 0.5 leave when theirs is spent. Features are
histograms of oriented gradients at two scales (Dalal & Triggs 2005, a function of each image alone), and the
network is one linear layer on them (11,930 weights), by `farthing.federated.fedsgd`. Learning rates were
chosen on Fashion-MNIST. Noise is simulated as one draw with the distribution of its sum.
"""

from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import farthing as ft
from experiments.frame import COLOURS, INK, Grid, Row, Size, canvas, say, seed, stream, values
from experiments.pictures import Images, digits, kept
from farthing.federated import Simulated, fedsgd, personal
from farthing.noise.lattice import Stream

Array = NDArray[Any]

PARTIES, DELTA, RUNS = 100, 1e-5, 3
ORIENTATIONS, CELL = 8, 4
CLIP, MOMENTUM = 0.1, 0.9
RATE, ROUNDS, LEARNING_RATE = 0.05, 400, 300.0  # distributed noise
LOCAL_ROUNDS, LOCAL_RATE = 30, 400.0
SKEW = 0.3
LEVELS = 0.5, 1.0, 2.0


@dataclass(frozen=True, slots=True)
class Way:
    """A row of the table: shards, who adds the noise, budgets in turn, and how uploads are weighed."""

    shards: str
    trust: str
    epsilons: tuple[float, ...] = (1.0,)
    weights: str = "precision"

    @property
    def budgets(self) -> str:
        return ", ".join(f"{one:g}" for one in self.epsilons) + (" in turn" if len(self.epsilons) > 1 else "")

    @property
    def name(self) -> str:
        by = ", by records" if self.weights == "records" else ""
        return f"{self.trust}{by}"


WAYS = [
    *(Way("even", trust, own) for trust in ("distributed", "local") for own in ((1.0,), LEVELS, (0.5,))),
    *(Way("Dirichlet 0.3", "distributed", own) for own in ((1.0,),)),
    *(Way("Dirichlet 0.3", "local", (1.0,), weights) for weights in ("precision", "records")),
]


def features(pictures: Array) -> NDArray[np.float32]:
    """Histograms of oriented gradients in rows of norm 1: cells in two places, and of the halved image."""
    rows = []
    for start in range(0, len(pictures), 2000):
        light = pictures[start : start + 2000].astype(np.float32) / 255
        halved = sum(light[:, a::2, b::2] for a in (0, 1) for b in (0, 1)) / 4
        moved = np.pad(light, ((0, 0), (CELL // 2,) * 2, (CELL // 2,) * 2))
        parts = [histograms(light, CELL), histograms(halved, CELL // 2), histograms(moved, CELL)]
        rows.append(np.concatenate(parts, axis=1) / np.float32(len(parts) ** 0.5))
    return np.concatenate(rows)


def histograms(light: Array, cell: int) -> Array:
    """Root of the gradient's size by orientation, in each cell; an image's row has norm 1."""
    down, right = np.gradient(light, axis=(1, 2))
    size, at = np.hypot(down, right), np.arctan2(down, right) % (2 * np.pi) / (2 * np.pi) * ORIENTATIONS
    low = np.floor(at)
    part, low = at - low, low.astype(int) % ORIENTATIONS
    n, cells = len(light), light.shape[1] // cell
    found = np.empty((n, cells, cells, ORIENTATIONS), np.float32)
    for each in range(ORIENTATIONS):
        shared = np.where((low + 1) % ORIENTATIONS == each, part, 0)
        held = (size * np.where(low == each, 1 - part, shared))[:, : cells * cell, : cells * cell]
        found[..., each] = held.reshape(n, cells, cell, cells, cell).sum(axis=(2, 4))
    rows = np.sqrt(found.reshape(n, -1))
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9))


def dealt(labels: Array, shards: str, parties: int, run: int) -> tuple[Array, Array]:
    """The order of records by party, and how many each has; who has which is public."""
    rng = np.random.default_rng(seed("shards", shards, run))
    if shards == "even":
        order = rng.permutation(len(labels))
        return order, np.diff(np.arange(parties + 1) * len(labels) // parties)
    owners = np.empty(len(labels), int)
    for label in np.unique(labels):
        mine = rng.permutation(np.flatnonzero(labels == label))
        shares = np.cumsum(rng.dirichlet(np.full(parties, SKEW)))[:-1]
        for party, rows in enumerate(np.split(mine, (shares * len(mine)).astype(int))):
            owners[rows] = party
    counts = np.bincount(owners, minlength=parties)
    return np.argsort(owners, kind="stable"), counts


def accuracy(data: Images, way: Way, run: int, small: bool) -> dict[str, float]:
    """Test accuracy in percent, rounds, and records of the smallest and largest party."""
    parties = 10 if small else PARTIES
    labels = data.labels.numpy()
    order, counts = dealt(labels, way.shards, parties, run)
    model = nn.Linear(data.x.shape[1], 10)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    local, noise, survivors = way.trust == "local", None, None
    rounds = (10 if small else LOCAL_ROUNDS) if local else (20 if small else ROUNDS)
    rate, first = (1.0, LOCAL_RATE) if local else (RATE, LEARNING_RATE)
    network = ft.torch.Network(
        model, nn.CrossEntropyLoss(reduction="none"), most=len(labels) if local else 2**15
    )
    budgets = personal(np.resize(way.epsilons, parties), DELTA)
    if not local and len(way.epsilons) > 1:
        noise = one_noise(rounds, int(counts.max()))
        survivors = sum(one.epsilon >= 1 for one in budgets)
    drawn: Stream = stream("federated-networks", way, run)
    clients = Simulated(
        ft.torch.Examples((data.x[order], data.labels[order])),
        np.concatenate([[0], np.cumsum(counts)]), budgets, stream=drawn,
    )  # fmt: skip
    steps = 0
    for step in fedsgd(
        clients, network, rounds=rounds, clip_norm=CLIP, sampling_rate=rate,
        lr=lambda t: first * max(1 - (t - 1) / rounds, 1 / rounds), server="momentum", weights=way.weights,
        noise_multiplier=noise, trust=way.trust, survivors=survivors,
    ):  # fmt: skip
        steps = step.t
        if steps == rounds:
            break
    found = 100 * float(np.mean(network.outputs(data.test, step.w).argmax(1) == data.answers.numpy()))
    return {"accuracy": found, "rounds": steps, "fewest": int(counts.min()), "most": int(counts.max())}


def one_noise(rounds: int, records: int) -> float:
    """The noise with which a party at ε = 1 affords all rounds."""
    invitation = ft.federated.Invitation(CLIP, ft.Poisson(RATE), rounds)
    terms = invitation.terms(ft.Budget(1.0, DELTA, observer="server"), records)
    return terms.mechanism.noise_multiplier


def measure(size: Size) -> list[Row]:
    size.only("repeats")
    pictures = digits(size.small)
    x, test = (
        torch.from_numpy(features(np.asarray(part) * (255 if size.small else 1)))
        for part in (pictures.x, pictures.test)
    )
    data = replace(pictures, x=x, test=test)
    rows = list[Row]()
    for way in WAYS:
        for run in range(size.repeats_or(RUNS)):
            place = (
                "federated",
                data.name,
                len(x),
                way,
                run,
                LEARNING_RATE,
                LOCAL_RATE,
                ROUNDS,
                LOCAL_ROUNDS,
            )
            found = kept(place, lambda w=way, r=run: accuracy(data, w, r, size.small))
            say(f"{way.shards}, {way.name}, ε {way.budgets}, run {run}: {found['accuracy']:.2f} %")
            about = {"data": data.name, "shards": way.shards, "noise": way.name, "ε": way.budgets, "run": run}
            rows.append(about | found)
    return rows


def tables(rows: list[Row]) -> list[Grid]:
    found = []
    for shards in values(rows, "shards"):
        mine = [row for row in rows if row["shards"] == shards]
        epsilons = values(mine, "ε")
        cells = []
        for noise in values(mine, "noise"):
            cells.append([str(noise)])
            for epsilon in epsilons:
                one = [row["accuracy"] for row in mine if (row["noise"], row["ε"]) == (noise, epsilon)]
                cells[-1].append(f"{fmean(one):.2f} ± {pstdev(one):.2f}" if one else "")
        fewest, most = min(row["fewest"] for row in mine), max(row["most"] for row in mine)
        sizes = f"{fewest:,} to {most:,} records per party"
        note = f"{sizes}; δ = {DELTA:g}; ± is the standard deviation of {len(values(rows, 'run'))} run(s)."
        head = ["noise", *(f"ε = {epsilon}" for epsilon in epsilons)]
        found.append(
            Grid(f"{rows[0]['data']} over parties, {shards} shards: test accuracy, %", head, cells, note)
        )
    return found


def draw(rows: list[Row]) -> Any:
    figure, grid = canvas(1, 1, width=6.4)
    axes = grid[0, 0]
    names = list(dict.fromkeys((row["shards"], row["noise"], row["ε"]) for row in rows))
    for place, name in enumerate(reversed(names)):
        one = [row["accuracy"] for row in rows if (row["shards"], row["noise"], row["ε"]) == name]
        colour = COLOURS[1 if str(name[1]).startswith("local") else 0]
        axes.errorbar(fmean(one), place, xerr=pstdev(one), marker="o", color=colour)
        axes.text(fmean(one), place + 0.2, f"{fmean(one):.1f}", ha="center", color=INK)
    axes.set(xlabel="test accuracy, %", title=f"{rows[0]['data']}, parties with their own budgets")
    axes.set_ylim(-0.5, len(names) - 0.2)
    axes.set_yticks(range(len(names)), [f"{a}, {b}, ε {c}" for a, b, c in reversed(names)])
    return figure
