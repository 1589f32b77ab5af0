"""Text within a budget: a pre-trained transformer, fine-tuned by LoRA, by all weights or by its head.

Texts are of a made-up language, one for every run: words have classes (a grammar orders them), each subject
has words of its own and shares others, and moods choose among verbs and adjectives. A small transformer fills
in masked words of public texts; then it learns on private, labelled texts of the same language which subject
and mood they have (four classes). δ = 1e-5, add-remove, per text, against anyone who does not see who is in a
batch. Constants were chosen on another made-up language (`TUNING`) and then frozen.
"""

import copy
import functools
import math
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import farthing as ft
from experiments.deep import LOSS, right
from experiments.frame import (
    COLOURS,
    MARKERS,
    Grid,
    Row,
    Size,
    canvas,
    level,
    say,
    seed,
    stream,
    ticks,
    values,
)
from experiments.pictures import kept

DELTA, EPSILONS, RUNS = 1e-5, (1.0, 3.0, 8.0), 3
TUNING = 100  # the run whose language constants were chosen on
SUBJECTS, CLASSES, LENGTH = 8, 4, 24
KINDS = {"article": 6, "adjective": 90, "noun": 160, "verb": 90, "preposition": 8, "adverb": 40}  # words
SENTENCE = ("article", "adjective", "noun", "adverb", "verb", "preposition", "article", "noun")
MASK = sum(KINDS.values())  # the number of the mask, after those of all words
WIDTH, DEPTH, HEADS, RANK = 64, 2, 4, 4
EPOCHS, HIDDEN = 5, 0.15  # of the public texts, and the share of words that is masked
RATE, STEPS, CLIP = 0.05, 60, 0.1
LEARNING_RATES = {"LoRA": 0.04, "all weights": 0.012, "head": 1.0, "no pre-training": 0.012}
NO_PRIVACY = "no privacy"


class Texts(NamedTuple):
    """Public texts, private ones with their classes, and others for the test."""

    public: Tensor
    x: Tensor
    labels: Tensor
    test: Tensor
    answers: Tensor


class Language:
    """A made-up language: how likely every word of a class is, for each subject and mood."""

    def __init__(self, run: int) -> None:
        self.random = np.random.default_rng(seed("lora", "language", run))
        starts = np.cumsum([0, *KINDS.values()])
        self.starts = dict(zip(KINDS, starts[:-1].tolist(), strict=True))
        self.groups = self.random.permutation(SUBJECTS) % 2  # which subjects are told apart
        self.shares = {name: self._shares(name, size) for name, size in KINDS.items()}

    def _shares(self, name: str, size: int) -> NDArray[np.float64]:
        """(subjects, moods, words): frequent and rare words, some of them favoured."""
        common = 1.0 / np.arange(1, size + 1) ** 0.7
        found = np.tile(self.random.permutation(common), (SUBJECTS, 2, 1))
        if name in ("noun", "verb"):
            found *= np.exp(1.6 * self.random.standard_normal((SUBJECTS, 1, size)))
        if name in ("adjective", "verb", "adverb"):
            found *= np.exp(0.6 * self.random.standard_normal((1, 2, size)))
        return np.asarray(found / found.sum(2, keepdims=True))

    def texts(self, count: int) -> tuple[Tensor, Tensor]:
        """So many texts of `LENGTH` words, and their classes."""
        subjects, moods = self.random.integers(SUBJECTS, size=count), self.random.integers(2, size=count)
        words = np.empty((count, LENGTH), np.int64)
        for place in range(LENGTH):
            name = SENTENCE[place % len(SENTENCE)]
            edges = self.shares[name].cumsum(2)[subjects, moods]
            drawn = (edges < self.random.random((count, 1))).sum(1)
            words[:, place] = self.starts[name] + drawn.clip(max=KINDS[name] - 1)
        return torch.from_numpy(words), torch.from_numpy(2 * self.groups[subjects] + moods)


class Block(nn.Module):
    """Attention and two linear layers, with norms before them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        sides = (
            side(h).unflatten(2, (HEADS, -1)).transpose(1, 2) for side in (self.query, self.key, self.value)
        )
        x = x + self.out(F.scaled_dot_product_attention(*sides).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """A transformer over the words of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(MASK + 1, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(DEPTH))), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.blocks(self.words(x) + self.places(torch.arange(LENGTH))))
        return out


class Classifier(nn.Module):
    """An encoder, its mean over words, and a linear head that begins at zero."""

    def __init__(self, body: Encoder) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(WIDTH, CLASSES)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).mean(1))
        return out


class Lora(nn.Module):
    """A frozen linear layer with a trained product of low rank beside it, which begins at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = (
            nn.Linear(base.in_features, RANK, bias=False),
            nn.Linear(RANK, base.out_features, bias=False),
        )
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.b(self.a(x))
        return out


def prepared(body: Encoder, kind: str) -> Classifier:
    """A classifier of which that is trained what ``kind`` says."""
    model = Classifier(copy.deepcopy(body))
    if kind in ("LoRA", "head"):
        model.body.requires_grad_(False)
    if kind == "LoRA":
        for block in model.body.blocks:
            block.query, block.value = Lora(block.query), Lora(block.value)
    return model


def pretrained(public: Tensor, run: int, epochs: int) -> Encoder:
    """An encoder that fills in masked words of public texts."""
    torch.manual_seed(seed("lora", "pre-training", run))
    body = Encoder()
    head = nn.Linear(WIDTH, MASK)
    weights = [*body.parameters(), *head.parameters()]
    steps = epochs * len(public) // 128
    optimizer = torch.optim.AdamW(weights, 2e-3)
    falling = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        x = public[torch.randint(len(public), (128,))]
        hidden = torch.rand(x.shape) < HIDDEN
        loss = F.cross_entropy(head(body(torch.where(hidden, MASK, x))[hidden]), x[hidden])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        falling.step()
    return body


@functools.lru_cache(maxsize=1)
def problem(run: int, small: bool) -> tuple[Texts, Encoder]:
    """The texts of a run's language, and an encoder that was trained on the public ones."""
    language, counts = Language(run), (512, 200, 200) if small else (20_000, 4_000, 4_000)
    public, _ = language.texts(counts[0])
    texts = Texts(public, *language.texts(counts[1]), *language.texts(counts[2]))
    return texts, pretrained(public, run, 1 if small else EPOCHS)


def trained(kind: str, epsilon: float, run: int, small: bool = False, lr: float | None = None) -> float:
    """Test accuracy of one run, in percent; ε = ∞ for no privacy."""
    texts, body = problem(run, small)
    torch.manual_seed(seed("lora", kind, epsilon, run))
    steps = 6 if small else STEPS
    model = prepared(Encoder() if kind == "no pre-training" else body, kind)
    optimizer = torch.optim.Adam(
        [p for p in model.parameters() if p.requires_grad], lr or LEARNING_RATES[kind]
    )
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / steps)
    if math.isinf(epsilon):
        for _ in range(steps):
            some = torch.rand(len(texts.x)) < RATE
            optimizer.zero_grad()
            LOSS(model(texts.x[some]), texts.labels[some]).mean().backward()
            optimizer.step()
            falling.step()
    else:
        ledger = ft.Ledger(ft.Budget(epsilon, DELTA), stream=stream("lora", kind, epsilon, run))
        for _ in ft.torch.train(
            model, LOSS, (texts.x, texts.labels), ledger, sampling_rate=RATE, steps=steps, clip_norm=CLIP,
            optimizer=optimizer, scheduler=falling,
        ):  # fmt: skip
            pass
    return right(model, texts.test, texts.answers)


def measure(size: Size) -> list[Row]:
    size.only("repeats")
    rows = list[Row]()
    for run in range(size.repeats_or(RUNS)):
        for kind in LEARNING_RATES:
            for epsilon in (8.0, math.inf) if size.small else (*EPSILONS, math.inf):
                place = ("lora", kind, epsilon, run, size.small, STEPS, CLIP, LEARNING_RATES[kind])
                found = kept(place, lambda k=kind, e=epsilon, r=run: trained(k, e, r, size.small))
                say(f"{kind}, ε {epsilon:g}, run {run}: {found:.2f} %")
                budget = NO_PRIVACY if math.isinf(epsilon) else epsilon
                rows.append({"trained": kind, "ε": budget, "run": run, "accuracy": found})
    return rows


def tables(rows: list[Row]) -> list[Grid]:
    budgets, cells = values(rows, "ε"), []
    for kind in values(rows, "trained"):
        cells.append([kind])
        for budget in budgets:
            found = [row["accuracy"] for row in rows if row["ε"] == budget and row["trained"] == kind]
            spread = f" ± {pstdev(found):.1f}" if len(found) > 1 else " (one run)"
            cells[-1].append(f"{fmean(found):.1f}{spread}" if found else "")
    head = ["trained", *(b if b == NO_PRIVACY else f"ε = {b:g}" for b in budgets)]
    runs = f"{len(values(rows, 'run'))} run(s), each in a language of its own"
    note = f"δ = {DELTA:g}; ± is the standard deviation of {runs}; four classes."
    return [Grid("Test accuracy on texts of a made-up language, %", head, cells, note)]


def draw(rows: list[Row]) -> Any:
    figure, grid = canvas(1, 1, width=4.4)
    axes, epsilons = grid[0, 0], [b for b in values(rows, "ε") if b != NO_PRIVACY]
    for place, kind in enumerate(values(rows, "trained")):
        mine = [row for row in rows if row["trained"] == kind]
        found = [[row["accuracy"] for row in mine if row["ε"] == epsilon] for epsilon in epsilons]
        style = {"marker": MARKERS[place], "color": COLOURS[place], "label": kind}
        axes.errorbar(epsilons, [fmean(one) for one in found], [pstdev(one) for one in found], **style)
        level(axes, fmean(row["accuracy"] for row in mine if row["ε"] == NO_PRIVACY), "", COLOURS[place])
    axes.set(
        xlabel="ε at δ = 1e-5 (dotted: without privacy)", ylabel="test accuracy, %", title="made-up texts"
    )
    ticks(axes, epsilons)
    axes.legend(frameon=False)
    return figure
