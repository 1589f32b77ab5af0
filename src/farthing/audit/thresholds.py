"""Choose how an attack flags runs, on runs that are not counted: a statistic, a threshold and a side.

A fitted statistic may separate the runs that it was fitted on by chance alone, as a likelihood ratio of
outcomes does where none comes twice. So the statistic is the one that shows most on runs that it was not
fitted on, and its threshold is then chosen on all that may be looked at.

>>> from farthing.audit.statistics import Outcomes, Unknown, value
>>> rng = np.random.default_rng(0)
>>> without, within = rng.integers(0, 10**9, 400), rng.integers(10**9, 2 * 10**9, 400)
>>> named = [("outcomes", Outcomes()), ("value", value)]
>>> name, rule = best(named, without, within, Unknown(), Budget(1.0, 1e-5), 0.99)
>>> name, rule.flagged(without), rule.flagged(within)
('value', 0, 400)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.audit.statistics import Curve, FittedStatistic, Scores
from farthing.budget import Budget
from farthing.errors import InvalidValue

Array = NDArray[np.float64]
Statistic = Scores | FittedStatistic

_THRESHOLDS = 400
_STRICTER = 100  # times less failure allowed in that choice, so that no threshold wins by luck in a tail
_FEWEST = 4  # runs a world that are divided once more


@dataclass(frozen=True, slots=True)
class FlagRule:
    """A rule that flags the runs whose score, times ``sign``, is at least ``threshold``."""

    scores: Scores
    threshold: float
    sign: float = 1.0

    def flagged(self, outputs: Any) -> int:
        """Return the number of runs that are flagged."""
        return int(np.count_nonzero(self.sign * _seen(self.scores, outputs) >= self.threshold))


def best(
    statistics: Sequence[tuple[str, Statistic]],
    without: Any,
    within: Any,
    curve: Curve,
    claim: Budget,
    confidence: float,
) -> tuple[str, FlagRule]:
    """Return the name and the rule of the statistic that shows most."""
    strict = 1 - (1 - confidence) / _STRICTER
    chosen = [_chosen(statistic, without, within, curve, claim, strict) for _, statistic in statistics]
    middle = len(without) // 2
    shown = [0.0] * len(chosen)
    if len(chosen) > 1 and middle >= _FEWEST:
        parts = without[:middle], within[:middle], without[middle:], within[middle:]
        shown = [_shown(statistic, parts, curve, claim, confidence) for _, statistic in statistics]
    place = max(range(len(chosen)), key=lambda place: (shown[place], chosen[place][0]))
    return statistics[place][0], chosen[place][1]


def _shown(
    statistic: Statistic, parts: tuple[Any, Any, Any, Any], curve: Curve, claim: Budget, confidence: float
) -> float:
    """Return the strength that a rule chosen on the first runs of both worlds shows on the others."""
    without, within, other, another = parts
    _, rule = _chosen(statistic, without, within, curve, claim, 1 - (1 - confidence) / _STRICTER)
    counts = rule.flagged(another), rule.flagged(other)
    strength = float(curve.strengths(*counts, len(other), claim, confidence))
    return -np.inf if np.isnan(strength) else strength


def _chosen(
    statistic: Statistic, without: Any, within: Any, curve: Curve, claim: Budget, confidence: float
) -> tuple[float, FlagRule]:
    """Return the strength of the best threshold on these runs, and the rule."""
    scores = statistic.fit(without, within) if isinstance(statistic, FittedStatistic) else statistic
    found = [_seen(scores, part) for part in (without, within)]
    options = []
    for sign in (1.0, -1.0):
        first, second = np.sort(sign * found[0]), np.sort(sign * found[1])
        levels = np.unique(np.concatenate([first, second]))
        if len(levels) > _THRESHOLDS:  # evenly spaced, and every value in the tails, where few remain
            tails = _THRESHOLDS // 8
            places = np.linspace(tails, len(levels) - tails - 1, _THRESHOLDS - 2 * tails).astype(int)
            levels = np.concatenate([levels[:tails], levels[places], levels[-tails:]])
        flagged = [len(part) - np.searchsorted(part, levels, side="left") for part in (first, second)]
        strengths = curve.strengths(flagged[1], flagged[0], len(first), claim, confidence)
        strengths = np.where(np.isnan(strengths), -np.inf, strengths)
        place = int(np.argmax(strengths))
        between = _between(float(levels[place - 1]) if place else -np.inf, float(levels[place]))
        options.append((float(strengths[place]), FlagRule(scores, between, sign)))
    return max(options, key=lambda option: option[0])


def _between(below: float, level: float) -> float:
    """Return a threshold halfway between, so that values beyond those seen are flagged too.

    It is above ``below``: halfway between two floats without another between them is one of the two.
    """
    middle = below / 2 + level / 2 if np.isfinite([below, level]).all() else level
    return middle if below < middle <= level else level


def _seen(scores: Scores, outputs: Any) -> Array:
    """Return scores of outputs; NaN, which may also be evidence, is ranked below all others."""
    values = np.asarray(scores(outputs), dtype=np.float64)
    if values.shape != (len(outputs),):
        raise InvalidValue(
            f"a statistic must return one number a run, {len(outputs)} of them, got shape {values.shape}"
        )
    return np.where(np.isnan(values), -np.inf, values)
