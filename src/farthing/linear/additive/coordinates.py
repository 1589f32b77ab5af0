"""Descend along noisy gradients in coordinates that are rescaled by what was learnt of them.

A gradient with Gaussian noise has the same noise in every coordinate, and more of it the larger E|z|² is, the
sum of the variances of all coordinates. A coordinate that tells nothing is paid for like one that tells all.
So at `WEIGHED` of the steps each linear coordinate and each group is compared with what noise alone would
have left of it (`Residue`): its variance is multiplied by James & Stein's factor 1 - noise / square, at least
`LEAST`, and its weights are shortened by theirs. What is left has a smaller E|z|², so later gradients have
less noise in the coordinates that count. That is the best use of a sum of variances: for weights θ, an error
of θ² / (1 + θ² t) in a coordinate of variance t, and Σt given, t = max(0, κ - 1/θ²) has the least error.

All of it is computed from released gradients and public numbers, so it costs nothing.

>>> left = Residue(1)
>>> for averaged in (False, True):
...     left.step(np.ones(1), np.ones(1), 3.0, averaged)
>>> bool(np.isclose(left.noise[0, 2, 2], 3.0**2 * (1 + 0.5**2)))
True
"""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.data.tables import Features
from farthing.linear.additive.sums import GroupedSpace, GroupGradient
from farthing.linear.budget_schedule import BudgetSchedule
from farthing.linear.losses import Loss
from farthing.linear.methods.descent import INTERCEPT, MOMENTUM
from farthing.linear.problem import Problem
from farthing.queries.bounds import ClipNorm

Array = NDArray[np.float64]

STEPS, AVERAGED = 40, 0.5
LOGIT_NOISE, TARGET_NOISE, LONGEST = 2.5, 1.2, 5.0
WEIGHED = (0.25, 0.5)  # of the steps, when coordinates are rescaled
LEAST = 0.03  # of its variance, that every coordinate keeps
LINES, GROUPS = 1.5, 1.25  # times the noise, below which a linear coordinate or a group keeps the least
TYPICAL, RESIDUAL = 0.4, 0.1  # of classes: the curvature over its bound, and the square of a residual
SURE, AGAINST, SLOWER = 3.0, 0.5, 0.7  # when gradients turn (deviations of noise, -cosine), and what follows
_TINY, _LITTLE = 1e-300, 1e-6


class Pace:
    """How far and how often to step, by the rules of `descent` for coordinates with E|z|² = ``size``."""

    def __init__(
        self, schedule: BudgetSchedule, loss: Loss, part: float, size: float, steps: int | None = None
    ) -> None:
        self.curvature, typical = loss.curvature, math.sqrt(size * (1 + INTERCEPT**2))
        reach = 1 / (schedule.deviation(1.0, ClipNorm(1.0)) * size)  # μ n a coordinate
        clip = float(np.clip(reach / 300, 0.4, max(2.0, math.sqrt(reach / 250))))
        self.clip = clip * min(loss.slope, 1.5) * typical
        noise = schedule.deviation(part / STEPS, ClipNorm(self.clip)) * math.sqrt(STEPS)
        self.reach = (1 - MOMENTUM) / noise
        noisy = LOGIT_NOISE if math.isfinite(loss.slope) else TARGET_NOISE
        self.most = noisy * min(1.0, reach) * self.reach / typical
        more = float(np.clip(math.sqrt(self.most * self.curvature), 1.0, LONGEST))
        self.steps = round(STEPS * more) if steps is None else steps
        more = self.steps / STEPS
        self.most, self.reach = self.most / more, self.reach / more

    def rates(self, variances: Array) -> Array:
        """Return the rates of coordinates with these variances."""
        return np.minimum(self.most, 1 / (self.curvature * np.maximum(variances, 1e-9)))

    def constant(self, height: float) -> float:
        """Return the rate of the constant."""
        return min(1 / (self.curvature * height**2), 2 * self.reach / height)


class Residue:
    """What noise and sampling leave on weights, coordinate by coordinate, if the loss is quadratic.

    ``noise`` holds the covariance of a weight, its velocity and the sum of its averaged iterates, ``slope``
    their response to a slope of 1 in every step, as the records' own deviation from their population is.
    """

    def __init__(self, size: int) -> None:
        self.noise, self.slope = np.zeros((size, 3, 3)), np.zeros((size, 3))

    def step(self, rates: Array, curvatures: Array, noise: float, averaged: bool) -> None:
        """Follow one step with momentum, of these rates."""
        moves = np.zeros_like(self.noise)
        moves[:, 1, 0], moves[:, 1, 1] = -rates * curvatures, MOMENTUM
        moves[:, 0] = moves[:, 1]
        moves[:, 0, 0] += 1
        moves[:, 2] = moves[:, 0] * averaged
        moves[:, 2, 2] = 1
        push = -rates[:, None] * np.array([1.0, 1.0, averaged])
        self.slope = np.einsum("kij,kj->ki", moves, self.slope) + push
        self.noise = moves @ self.noise @ moves.transpose(0, 2, 1)
        self.noise += noise**2 * push[:, :, None] * push[:, None, :]

    def scale(self, weights: Array, units: Array) -> None:
        """Multiply weights, and slopes by the inverse of ``units``."""
        self.noise *= np.square(weights)[:, None, None]
        self.slope *= (weights * units)[:, None]

    def grow(self, more: int) -> None:
        """Add coordinates on which nothing was learnt yet."""
        self.noise = np.concatenate([self.noise, np.zeros((more, 3, 3))])
        self.slope = np.concatenate([self.slope, np.zeros((more, 3))])


class Coordinates:
    """Weights in linear coordinates and groups, each with a share of its variance, and the steps in them.

    ``part`` is what all steps cost of μ²; ``covariance`` that of the linear coordinates, or None if it is not
    known; ``variances`` are those of the groups' coordinates, ``lines`` those that linear ones begin with.
    """

    def __init__(
        self,
        schedule: BudgetSchedule,
        problem: Problem,
        loss: Loss,
        part: float,
        features: Features,
        covariance: Array | None,
        groups: list[Any],
        variances: list[Array],
        lines: Array | None = None,
    ) -> None:
        self.schedule, self.loss, self.part, self.covariance = schedule, loss, part, covariance
        self.bare, self.height, self.records = features, 1.0, problem.records
        self.lines: Array = np.ones(problem.width) if lines is None else lines
        self.groups, self.variances = list(groups), list(variances)
        self.shares, self.alike = [1.0] * len(groups), [1.0] * len(groups)
        self.slower = [1.0] * (1 + len(groups))  # the factors of steps along lines and groups
        self._before: Array | None = None
        self._steps: int | None = None
        self.w: Array = problem.zeros(problem.width + 1 + sum(map(len, variances)))
        self.velocity, self.total, self.count = np.zeros_like(self.w), np.zeros_like(self.w), 0
        self.residue, self.classes = Residue(len(self.w)), math.isfinite(loss.slope)
        self._place()

    def _place(self) -> None:
        """Make the space of the present shares, and the rates in it."""
        d, steps = self.bare.width, self._steps
        spreads = [v * share for v, share in zip(self.variances, self.shares, strict=True)]
        self.size = float(self.lines.sum() + sum(v.sum() for v in spreads))
        height = INTERCEPT * math.sqrt(self.size)
        unit = np.ones(len(self.w))
        unit[d], self.height = self.height / height, height
        self._scale(unit, unit)
        features = Features(d, self.bare.centre, self.bare.scale * np.sqrt(self.lines), height)
        pairs = zip(self.groups, self.shares, strict=True)
        groups = tuple(replace(group, matrix=group.matrix * math.sqrt(share)) for group, share in pairs)
        self.space = GroupedSpace(features, groups)
        self.pace = Pace(self.schedule, self.loss, self.part, self.size, steps)
        self._steps = self.pace.steps
        self.spread = np.concatenate([self.lines, [height**2], *spreads])
        joint = [spread * like for spread, like in zip(spreads, self.alike, strict=True)]
        self.steepest = np.concatenate([self.lines, [height**2], *joint])
        self.rates = self.pace.rates(self.steepest)
        self.rates[d] = self.pace.constant(height)
        self.turned: Array | None = None
        if self.covariance is not None:
            root = np.sqrt(self.lines)
            values, vectors = np.linalg.eigh(self.covariance * root * root[:, None])
            self.turned = (vectors * self.pace.rates(values)) @ vectors.T
            self.rates[:d] = np.sqrt(np.square(self.turned).sum(axis=1))  # how far noise moves each
        self._before = None
        for place, factor in enumerate(self.slower):
            self._slow(place, factor)

    def _slow(self, place: int, factor: float) -> None:
        """Multiply the rates of the lines, or of the group before this place."""
        self.rates[[slice(0, self.bare.width), *self._parts()][place]] *= factor
        if not place and self.turned is not None:
            self.turned = factor * self.turned

    def _look(self, slope: Array, noise: float) -> None:
        """Shorten the steps along lines or a group whose last two gradients point against each other.

        With momentum m, gradients turn by more than a right angle where rate times curvature is above 1 + m,
        and steps diverge above 2 (1 + m). It comes to that where several groups tell the same, which no
        histogram shows.
        """
        before, self._before = self._before, slope
        if before is None:
            return
        products = (slope * before).reshape(len(slope), -1)
        squares = [np.square(each).reshape(len(each), -1).sum(axis=1) for each in (slope, before)]
        for place, here in enumerate([slice(0, self.bare.width), *self._parts()]):
            rates = self.rates[here]
            chance = noise**2 * math.sqrt(products.shape[1]) * float(np.linalg.norm(rates))
            long = math.sqrt(float((rates @ squares[0][here]) * (rates @ squares[1][here])))
            if float((rates @ products[here]).sum()) < -max(SURE * chance, AGAINST * long):
                self.slower[place] *= SLOWER
                self._slow(place, SLOWER)

    def _scale(self, weights: Array, units: Array) -> None:
        self.w, self.velocity, self.total = (
            (each.T * weights).T for each in (self.w, self.velocity, self.total)
        )
        self.residue.scale(weights, units)

    def step(self, rms: float, averaged: bool) -> None:
        """Buy a gradient and take a step; residuals are clipped as if they were ``rms`` times as large."""
        d, gradient = self.bare.width, GroupGradient(self.loss, self.space)
        bound = ClipNorm(self.pace.clip * rms)
        slope, noise = self.schedule.mean(self.part / self.pace.steps, gradient, bound, self.w)
        self._look(slope, noise)
        move = (slope.T * self.rates).T
        if self.turned is not None:
            move[:d] = self.turned @ slope[:d]
        self.velocity = MOMENTUM * self.velocity - move
        self.w = self.w + self.velocity
        self.residue.step(self.rates, self._curvatures, noise, averaged)
        if averaged:
            self.total, self.count = self.total + self.w, self.count + 1

    @property
    def _curvatures(self) -> Array:
        """Return the curvature of the loss along every coordinate."""
        return np.asarray(self.loss.curvature * (TYPICAL if self.classes else 1.0) * self.steepest)

    @property
    def found(self) -> Array:
        """Return the mean of the averaged iterates, or the last one where none is yet."""
        return self.total / self.count if self.count else self.w

    def _parts(self) -> list[slice]:
        """Return the places of the groups' weights."""
        ends = np.cumsum([self.bare.width + 1, *map(len, self.variances)])
        return [slice(a, b) for a, b in itertools.pairwise(ends)]

    def _noise(self, place: int, rms: float) -> Array:
        """Return the variance that noise and sampling leave on weights, at ``place`` of a `Residue`."""
        residual = RESIDUAL if self.classes else rms**2
        sampled = np.square(self.residue.slope[:, place]) * self.spread * residual / self.records
        return np.asarray(self.residue.noise[:, place, place] + sampled + _TINY)

    def _ratios(self, rms: float) -> tuple[Array, list[float]]:
        """Return how many times what noise leaves the square of each line and of each group is."""
        left = self.spread * self._noise(0, rms)
        length = self.spread * _squares(self.w)
        lines = (length / left)[: self.bare.width]
        return lines, [float(length[here].sum() / left[here].sum()) for here in self._parts()]

    def weigh(self, rms: float) -> None:
        """Rescale every line and every group by what noise explains of it, and shorten its weights."""
        lines, groups = self._ratios(rms)
        kept = np.maximum(kept_of(lines, LINES), LEAST)
        shares = [max(float(kept_of(each, GROUPS)), LEAST) for each in groups]
        shorter, units = [kept_of(lines, 1.0), np.ones(1)], [np.sqrt(self.lines / kept), np.ones(1)]
        for each, old, new, v in zip(groups, self.shares, shares, self.variances, strict=True):
            shorter.append(np.full(len(v), kept_of(each, 1.0)))
            units.append(np.full(len(v), math.sqrt(old / new)))
        unit = np.concatenate(units)
        self._scale(np.concatenate(shorter) * unit, unit)
        self.lines, self.shares = kept, shares
        self._place()

    def grow(self, groups: list[Any], variances: list[Array], alike: float = 1.0) -> None:
        """Add groups, whose weights are zero so far; together they vary ``alike`` times as much as one."""
        more = sum(map(len, variances))
        self.w, self.velocity, self.total = (
            np.concatenate([each, np.zeros((more, *each.shape[1:]))])
            for each in (self.w, self.velocity, self.total)
        )
        self.residue.grow(more)
        self.groups, self.variances = [*self.groups, *groups], [*self.variances, *variances]
        self.shares = [*self.shares, *[1.0] * len(groups)]
        self.alike = [*self.alike, *[alike] * len(groups)]
        self.slower = [*self.slower, *[1.0] * len(groups)]
        self._place()

    def shrunk(self, rms: float) -> Array:
        """Return the averaged weights with those of groups shortened by what noise explains of each.

        Steps have brought a weight to f θ of the best one, θ, beside noise of variance ν. If the θ of a group
        have a variance s, which its squares tell (their mean is f² s + ν), the best estimate of θ is
        f s / (f² s + ν) times the weight. Weights are never made longer.
        """
        w, squares = self.found.copy(), _squares(self.total)
        noise = self._noise(2, rms)
        arrived = np.clip(-self.residue.slope[:, 2] * self._curvatures / self.count, _LITTLE, 1.0)
        for here in self._parts():
            f, left, spread = arrived[here] * self.count, noise[here], self.spread[here]
            strength = max(0.0, float(spread @ (squares[here] - left) / (spread @ np.square(f))))
            best = f * strength / (np.square(f) * strength + left) * self.count
            w[here] = (w[here].T * np.minimum(best, 1.0)).T
        return w


def _squares(w: Array) -> Array:
    """Return the square of every weight, the mean over outputs."""
    return np.asarray(np.square(w).reshape(len(w), -1).mean(axis=1))


def kept_of(ratios: Any, least: float) -> Any:
    """Return James & Stein's factor max(0, 1 - least / ratio) of squares that are so many times the noise.

    >>> kept_of(np.array([0.0, 1.0, 4.0]), 1.0).tolist()
    [0.0, 0.0, 0.75]
    """
    return np.maximum(0.0, 1 - least / np.maximum(ratios, _TINY))
