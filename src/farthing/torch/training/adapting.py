"""Define rules by which noise, sampling rate and clipping norm follow released values.

A rule is a function of the last `TrainingStep`, whose every number is public, and returns a `Change` of the
terms of the batches to come, or None. `train` takes one as ``adapt``. The price of the next batch then
depends on earlier answers, so nothing can be promised: each batch is charged to the ledger's privacy
filter, and the filter's theorem is the guarantee (a `Menu`: `farthing.accounting.menu`). A rule sees
nothing that was not released, so it may be any function at all.

>>> changes = Change(noise_multiplier=4.0), Change(noise_multiplier=2.0)
>>> rule = Plateau(changes, patience=2, score=lambda model: 0.5)
>>> [rule(TrainingStep(t, None)) for t in (1, 2, 3)][-1]
Change(noise_multiplier=4.0, sampling_rate=None, clip_norm=None)
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from farthing import validate
from farthing.accounting.menu import Menu
from farthing.budget import Budget
from farthing.errors import InvalidValue
from farthing.queries.events import GaussianEvent
from farthing.queries.samplers import Poisson
from farthing.torch.training.plan import planned
from farthing.torch.training.watching import TrainingStep

_SPREAD = tuple(2.0 ** (place / 2) for place in (0, -1, 1, 2, 3))  # of a menu's noise around a plan's


@dataclass(frozen=True, slots=True)
class Change:
    """New terms for the batches to come; terms that are not given stay.

    Parameters
    ----------
    noise_multiplier : float, optional
        Standard deviation of the noise over the clipping norm.
    sampling_rate : float, optional
        An example's chance to be in a batch, in (0, 1].
    clip_norm : float, optional
        The clipping norm. It takes the place of whatever ``clip_norm`` was given to `train`, and changes no
        price.

    Examples
    --------
    >>> Change(noise_multiplier=2.0).noise_multiplier
    2.0
    """

    noise_multiplier: float | None = None
    sampling_rate: float | None = None
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if self.noise_multiplier is not None:
            validate.positive(noise_multiplier=self.noise_multiplier)
        if self.sampling_rate is not None:
            validate.rate(sampling_rate=self.sampling_rate)
        if self.clip_norm is not None:
            validate.positive(clip_norm=self.clip_norm)


Rule = Callable[[TrainingStep], Change | None]


class Plateau:
    """A rule that makes the next of several changes whenever training stops improving.

    Parameters
    ----------
    changes : iterable of Change
        What to change to at the first plateau, at the second, and so on; after the last nothing changes.
    patience : int, default 20
        Looks without a better value that make a plateau.
    every : int, default 1
        Updates from one look to the next.
    score : callable, optional
        ``score(model)``, larger being better, on *public* data: `evaluate` on a public set, say. None: the
        norm of the released gradients with the noise's share taken off, smoothed, smaller being better.
    least : float, default 0.01
        The relative gain that counts as better.
    memory : float, default 0.9
        Decay of the smoothed norm, in [0, 1).

    Examples
    --------
    >>> rule = Plateau([Change(sampling_rate=0.02)], patience=1, score=lambda model: 1.0)
    >>> rule(TrainingStep(1, None)), rule(TrainingStep(2, None)).sampling_rate, rule(TrainingStep(3, None))
    (None, 0.02, None)
    """

    def __init__(
        self,
        changes: Iterable[Change],
        *,
        patience: int = 20,
        every: int = 1,
        score: Callable[[nn.Module], float] | None = None,
        least: float = 0.01,
        memory: float = 0.9,
    ) -> None:
        self.changes = _changes(changes)
        self.patience, self.every = validate.count(patience=patience), validate.count(every=every)
        self.score, self.least = score, validate.non_negative(least=least)
        self._signal = _Signal(memory)
        self._best, self._since, self._taken = -math.inf, 0, 0

    def __call__(self, step: TrainingStep) -> Change | None:
        """Return the next change where the last ``patience`` looks brought nothing better."""
        if self.score is None:
            self._signal.learn(step)
        if step.t % self.every or self._taken == len(self.changes):
            return None
        value = -self._signal.norm() if self.score is None else float(self.score(step.w))
        if value > self._best + self.least * abs(self._best) or self._best == -math.inf:
            self._best, self._since = value, 0
            return None
        self._since += 1
        if self._since < self.patience:
            return None
        self._best, self._since, self._taken = -math.inf, 0, self._taken + 1
        return self.changes[self._taken - 1]

    def state_dict(self) -> dict[str, Any]:
        """Return all that changes, for checkpoints."""
        own = {"best": self._best, "since": self._since, "taken": self._taken}
        return {**own, "signal": self._signal.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._best, self._since, self._taken = state["best"], state["since"], state["taken"]
        self._signal.load_state_dict(state["signal"])


class Stages:
    """A rule that changes terms once certain shares of the budget are used: growing batches, falling noise.

    Parameters
    ----------
    changes : mapping of float to Change
        From a share of the budget, in (0, 1), to what it changes to.

    Examples
    --------
    >>> rule = Stages({0.5: Change(sampling_rate=0.02), 0.75: Change(sampling_rate=0.04)})
    >>> steps = [TrainingStep(t, None, share=share) for t, share in ((1, 0.2), (2, 0.6), (3, 0.6))]
    >>> [rule(step) for step in steps][1].sampling_rate
    0.02
    """

    def __init__(self, changes: Mapping[float, Change]) -> None:
        self.shares = tuple(sorted(validate.probability(share=share) for share in changes))
        self.changes = _changes(changes[share] for share in self.shares)
        self._taken = 0

    def __call__(self, step: TrainingStep) -> Change | None:
        """Return the change of the last stage that is reached and was not taken yet."""
        reached = sum(share <= step.share for share in self.shares)
        if reached <= self._taken:
            return None
        self._taken = reached
        return self.changes[reached - 1]

    def state_dict(self) -> dict[str, Any]:
        """Return all that changes, for checkpoints."""
        return {"taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._taken = state["taken"]


class NoiseGate:
    """A rule with two noise multipliers: a large one while gradients exceed their noise, else a small one.

    AdaDP's gate (Xu et al. 2020, Algorithm 1, line 7), of released values only: the mean of released squared
    norms, less those of the noise, is compared with its own standard deviation.

    Parameters
    ----------
    large, small : float
        The noise multipliers; both should be entries of the ledger's menu.
    margin : float, default 3.0
        Standard deviations by which gradients must stand out for the large one.
    memory : float, default 0.9
        Decay of the mean, in [0, 1).

    Examples
    --------
    >>> model, rule = nn.Linear(9, 1), NoiseGate(8.0, 4.0)
    >>> hidden = TrainingStep(1, model, noise_multiplier=8.0, gradient_norm=1.0, noise_norm=1.0)
    >>> clear = TrainingStep(2, model, noise_multiplier=4.0, gradient_norm=9.0, noise_norm=1.0)
    >>> rule(hidden).noise_multiplier, rule(clear).noise_multiplier
    (4.0, 8.0)
    """

    def __init__(self, large: float, small: float, *, margin: float = 3.0, memory: float = 0.9) -> None:
        if not validate.positive(small=small) < validate.positive(large=large):
            raise InvalidValue(f"large must be above small, got {large!r} and {small!r}")
        self.large, self.small = large, small
        self.margin, self._signal = validate.non_negative(margin=margin), _Signal(memory)

    def __call__(self, step: TrainingStep) -> Change | None:
        """Return a change where the gate opens or closes."""
        self._signal.learn(step)
        size = sum(parameter.numel() for parameter in step.w.parameters() if parameter.requires_grad)
        noise = self.large if self._signal.stands_out(size, self.margin) else self.small
        return Change(noise_multiplier=noise) if noise != step.noise_multiplier else None

    def state_dict(self) -> dict[str, Any]:
        """Return all that changes, for checkpoints."""
        return self._signal.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._signal.load_state_dict(state)


class _Signal:
    """A moving mean of released squared norms less those of the noise: the squared norm of mean gradients."""

    def __init__(self, memory: float) -> None:
        if not 0 <= memory < 1:
            raise InvalidValue(f"memory must be in [0, 1), got {memory!r}")
        self._memory, self._mean, self._noise, self._weight = memory, 0.0, 0.0, 0.0

    def learn(self, step: TrainingStep) -> None:
        part, noise = 1 - self._memory, float(step.noise_norm) ** 2
        self._mean += part * (float(step.gradient_norm) ** 2 - noise - self._mean)
        self._noise += part * (noise - self._noise)
        self._weight += part * (1 - self._weight)

    def norm(self) -> float:
        """Return the norm of mean gradients, 0 where it is lost in the noise."""
        return math.sqrt(max(self._mean / self._weight, 0.0))

    def stands_out(self, size: int, margin: float) -> bool:
        """Return whether the mean is above 0 by ``margin`` of its deviations, that of noise alone."""
        batches = (1 + self._memory) / (1 - self._memory)
        one = self._noise * math.sqrt(2 / size)  # the deviation of one squared norm
        return self._mean > margin * one / math.sqrt(batches)

    def state_dict(self) -> dict[str, float]:
        return {"mean": self._mean, "noise": self._noise, "weight": self._weight}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._mean, self._noise, self._weight = state["mean"], state["noise"], state["weight"]


def menu(
    budget: Budget,
    records: int,
    *,
    sampling_rate: float | Sequence[float] | None = None,
    noise_multiplier: float | Sequence[float] | None = None,
) -> Menu:
    """Return a menu of Poisson batches, every sampling rate with every noise multiplier.

    Parameters
    ----------
    budget : Budget
        The budget of the ledger that it is for.
    records : int
        The public number of examples.
    sampling_rate : float or sequence of float, optional
        The sampling rates. None: the one that `train` would choose.
    noise_multiplier : float or sequence of float, optional
        The noise multipliers. None: the one that `train` would choose, and 0.7, 1.4, 2 and 2.8 times that.

    Returns
    -------
    Menu
        Training begins with its first entry, unless told otherwise.

    Examples
    --------
    >>> from farthing.ledger.ledger import Ledger
    >>> budget = Budget(1.0, 1e-5)
    >>> ledger = Ledger(budget, filter=menu(budget, 60_000, sampling_rate=0.02, noise_multiplier=(4.0, 2.0)))
    >>> [event.event.noise for event in ledger.filter.events]
    [4.0, 2.0]
    """
    rates, noises = _several(sampling_rate), _several(noise_multiplier)
    if rates is None or noises is None:
        plan = planned(budget, validate.count(records=records), sampling_rate=rates[0] if rates else None)
        rates = rates or (plan.sampling_rate,)
        noises = noises or tuple(plan.noise_multiplier(0) * part for part in _SPREAD)
    pairs = ((rate, noise) for rate in rates for noise in noises)
    return Menu(Poisson(rate).amplify(GaussianEvent(noise), budget.observer) for rate, noise in pairs)


def _several(values: float | Sequence[float] | None) -> tuple[float, ...] | None:
    if values is None:
        return None
    return (float(values),) if isinstance(values, int | float) else tuple(float(value) for value in values)


def _changes(changes: Iterable[Change]) -> tuple[Change, ...]:
    found = tuple(changes)
    if not found or not all(isinstance(one, Change) for one in found):
        raise InvalidValue(f"changes must be at least one Change, got {found!r}")
    return found
