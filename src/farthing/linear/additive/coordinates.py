"""Descend along noisy gradients in coordinates that are rescaled by what was learnt of them.

A gradient with Gaussian noise has the same noise in every coordinate, and more of it the larger E|z|² is, the
sum of the variances of all coordinates. A coordinate without information costs as much as an informative one.
So at `WEIGHED` of the steps each linear coordinate and each block is compared with what noise alone would
have left of it (`shrinkage`): its variance is multiplied by the part of its square that is signal, at least
`LEAST`, and its weights are shortened by as much. What is left has a smaller E|z|², so later gradients have
less noise in the coordinates that count. That is the best use of a sum of variances: for weights θ, an error
of θ² / (1 + θ² t) in a coordinate of variance t, and Σt given, t = max(0, κ - 1/θ²) has the least error.

A shape is a block of its own. All trees are one block, held in principal components of their coordinates:
trees that ask alike vary much in few directions, along which steps must be short, and hardly in the others,
along which noise is never pulled back. A rotation leaves Gaussian noise as it is, so slopes are rotated after
their release.

All of it is computed from released gradients and public numbers, so it costs nothing.
"""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.data.tables import Features
from farthing.linear.additive.shrinkage import Residue, kept
from farthing.linear.additive.sums import GroupedSpace, GroupGradient
from farthing.linear.budget_schedule import BudgetSchedule
from farthing.linear.losses import Loss
from farthing.linear.methods.descent import INTERCEPT, MOMENTUM
from farthing.linear.problem import Problem
from farthing.queries.bounds import ClipNorm

Array = NDArray[np.float64]

STEPS, AVERAGED = 40, 0.5
LOGIT_NOISE, TARGET_NOISE, LONGEST = 2.5, 1.2, 5.0
WEIGHED = (0.25, 0.55)  # of the steps, when coordinates are rescaled
LEAST = 0.03  # of its variance, that every coordinate keeps
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


@dataclass(frozen=True, slots=True, eq=False)
class CoordinateBlock:
    """Groups with one share of their variance: those of their coordinates, or of principal components.

    ``directions`` holds the components of all coordinates of the groups as columns; None if coordinates are
    uncorrelated already. ``slower`` is a factor of the steps.
    """

    groups: tuple[Any, ...]
    variances: Array
    directions: Array | None = None
    share: float = 1.0
    slower: float = 1.0

    def scaled(self) -> list[Any]:
        """Return the groups with coordinates of their share."""
        return [replace(each, matrix=each.matrix * math.sqrt(self.share)) for each in self.groups]

    @property
    def spread(self) -> Array:
        return self.variances * self.share

    @property
    def steepest(self) -> Array:
        """Return the variances by which steps are shortened: of components, a guess, the mean or more."""
        if self.directions is None:
            return self.spread
        return np.asarray(np.maximum(self.spread, self.spread.mean()))


class Coordinates:
    """Weights in linear coordinates and blocks, each with a share of its variance, and the steps in them.

    ``part`` is what all steps cost of μ²; ``covariance`` that of the linear coordinates, or None if it is not
    known; ``lines`` are the variances that linear coordinates begin with.
    """

    def __init__(
        self,
        schedule: BudgetSchedule,
        problem: Problem,
        loss: Loss,
        part: float,
        features: Features,
        covariance: Array | None,
        blocks: list[CoordinateBlock],
        lines: Array | None = None,
    ) -> None:
        self.schedule, self.loss, self.part, self.covariance = schedule, loss, part, covariance
        self.bare, self.height, self.records = features, 1.0, problem.records
        self.lines: Array = np.ones(problem.width) if lines is None else lines
        self.blocks, self.slower = list(blocks), 1.0  # the factor of steps along lines
        self._before: Array | None = None
        self._steps: int | None = None
        self._w: Array = problem.zeros(problem.width + 1 + sum(len(block.variances) for block in blocks))
        self.velocity, self.total, self.count = np.zeros_like(self._w), np.zeros_like(self._w), 0
        self.residue, self.classes = Residue(len(self._w)), math.isfinite(loss.slope)
        self._place()

    def _place(self) -> None:
        """Make the space of the present shares, and the rates in it."""
        d, steps = self.bare.width, self._steps
        spreads = [block.spread for block in self.blocks]
        self.size = float(self.lines.sum() + sum(spread.sum() for spread in spreads))
        height = INTERCEPT * math.sqrt(self.size)
        unit = np.ones(len(self._w))
        unit[d], self.height = self.height / height, height
        self._scale(unit, unit)
        features = Features(d, self.bare.centre, self.bare.scale * np.sqrt(self.lines), height)
        self.space = GroupedSpace(features, tuple(group for block in self.blocks for group in block.scaled()))
        self.pace = Pace(self.schedule, self.loss, self.part, self.size, steps)
        self._steps = self.pace.steps
        self.spread = np.concatenate([self.lines, [height**2], *spreads])
        steepest = np.concatenate([self.lines, [height**2], *(block.steepest for block in self.blocks)])
        self.rates = self.pace.rates(steepest)
        self.rates[d] = self.pace.constant(height)
        self.turned: Array | None = None
        if self.covariance is not None:
            root = np.sqrt(self.lines)
            values, vectors = np.linalg.eigh(self.covariance * root * root[:, None])
            self.turned = (vectors * self.pace.rates(values)) @ vectors.T
            self.rates[:d] = np.sqrt(np.square(self.turned).sum(axis=1))  # how far noise moves each
        self._before = None
        for place, factor in enumerate([self.slower, *(block.slower for block in self.blocks)]):
            self._slow(place, factor)

    def _slow(self, place: int, factor: float) -> None:
        """Multiply the rates of the lines, or of the block before this place."""
        self.rates[[slice(0, self.bare.width), *self._parts()][place]] *= factor
        if not place and self.turned is not None:
            self.turned = factor * self.turned

    def _look(self, slope: Array, noise: float) -> None:
        """Shorten the steps along lines or a block whose last two gradients point against each other.

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
                self._slow(place, SLOWER)
                if place:
                    block = self.blocks[place - 1]
                    self.blocks[place - 1] = replace(block, slower=block.slower * SLOWER)
                else:
                    self.slower *= SLOWER

    def _scale(self, weights: Array, units: Array) -> None:
        self._w, self.velocity, self.total = (
            (each.T * weights).T for each in (self._w, self.velocity, self.total)
        )
        self.residue.scale(weights, units)

    def _turn(self, w: Array, back: bool = False) -> Array:
        """Return weights on components as weights on coordinates; or slopes along these, back again."""
        w = w.copy()
        for here, block in zip(self._parts(), self.blocks, strict=True):
            if block.directions is not None:
                w[here] = (block.directions.T if back else block.directions) @ w[here]
        return w

    def step(self, rms: float, averaged: bool) -> None:
        """Buy a gradient and take a step; residuals are clipped as if they were ``rms`` times as large."""
        d, gradient = self.bare.width, GroupGradient(self.loss, self.space)
        bound = ClipNorm(self.pace.clip * rms)
        slope, noise = self.schedule.mean(self.part / self.pace.steps, gradient, bound, self.w)
        slope = self._turn(slope, back=True)
        self._look(slope, noise)
        move = (slope.T * self.rates).T
        if self.turned is not None:
            move[:d] = self.turned @ slope[:d]
        self.velocity = MOMENTUM * self.velocity - move
        self._w = self._w + self.velocity
        self.residue.step(self.rates, self._curvatures, noise, averaged)
        if averaged:
            self.total, self.count = self.total + self._w, self.count + 1

    @property
    def _curvatures(self) -> Array:
        """Return the curvature of the loss along every coordinate or component."""
        return np.asarray(self.loss.curvature * (TYPICAL if self.classes else 1.0) * self.spread)

    @property
    def w(self) -> Array:
        """Return the present weights, in the space."""
        return self._turn(self._w)

    @property
    def found(self) -> Array:
        """Return the mean of the averaged iterates, or the last one where none is yet."""
        return self._turn(self.total / self.count) if self.count else self.w

    def _parts(self) -> list[slice]:
        """Return the places of the blocks' weights."""
        ends = np.cumsum([self.bare.width + 1, *(len(block.variances) for block in self.blocks)])
        return [slice(a, b) for a, b in itertools.pairwise(ends)]

    def _noise(self, place: int, rms: float) -> Array:
        """Return the variance that noise and sampling leave on weights, at ``place`` of a `Residue`."""
        residual = RESIDUAL if self.classes else rms**2
        sampled = np.square(self.residue.slope[:, place]) * self.spread * residual / self.records
        return np.asarray(self.residue.noise[:, place, place] + sampled + _TINY)

    def _arrived(self, place: int, count: int) -> Array:
        """Return the part of the way to the best weights that steps without noise would have come."""
        return np.clip(-self.residue.slope[:, place] * self._curvatures / count, _LITTLE, 1.0)

    def _kept(self, squares: Array, noise: Array) -> tuple[Array, Array]:
        """Return which part of each line's and of each block's square is signal, not noise."""
        outputs, d = self._w[0].size, self.bare.width
        left, length = self.spread * noise, self.spread * squares
        lines = kept(length[:d] / left[:d], np.full(d, float(outputs)))
        ratios = np.array([length[here].sum() / left[here].sum() for here in self._parts()])
        freedoms = np.array([left[here].sum() ** 2 / np.square(left[here]).sum() for here in self._parts()])
        forest = np.array([block.directions is not None for block in self.blocks], dtype=bool)
        parts = np.zeros(len(forest))
        for alike in (forest, ~forest):
            parts[alike] = kept(ratios[alike], outputs * freedoms[alike])
        return lines, parts

    def weigh(self, rms: float) -> None:
        """Rescale every line and every block by what noise explains of it, and shorten its weights.

        Weights of classes that are a part f of the way to the best ones are shortened by signal / f, since
        that is the mean of the best ones given them (`shrunk`).
        """
        lines, parts = self._kept(_squares(self._w), self._noise(0, rms))
        least = np.maximum(lines, LEAST)
        signal, units = [lines, np.ones(1)], [np.sqrt(self.lines / least), np.ones(1)]
        for k, (part, block) in enumerate(zip(parts, self.blocks, strict=True)):
            self.blocks[k] = replace(block, share=max(float(part), LEAST))
            signal.append(np.full(len(block.variances), part))
            units.append(np.full(len(block.variances), math.sqrt(block.share / self.blocks[k].share)))
        unit = np.concatenate(units)
        shorter = np.concatenate(signal)
        if self.classes:
            shorter = np.minimum(shorter / self._arrived(0, 1), 1.0)
        self._scale(shorter * unit, unit)
        self.lines = least
        self._place()

    def signal(self, rms: float) -> Array:
        """Return the present weights times the part of them that is not noise: what is likely to matter."""
        lines, parts = self._kept(_squares(self._w), self._noise(0, rms))
        w = self._w.copy()
        w[: self.bare.width] = (w[: self.bare.width].T * lines).T
        for here, part in zip(self._parts(), parts, strict=True):
            w[here] *= part
        return self._turn(w)

    def parts(self, w: Array) -> tuple[Array, Array]:
        """Return weights of one output cut into parts, as columns, and the deviation of the margin of each.

        The parts are lines, shapes and trees; one that is nothing is left out. The constant is in none.
        Deviations are those of coordinates that are uncorrelated, except for lines of known covariance.
        """
        d = self.bare.width
        squares = self.spread * _squares(self._turn(w, back=True))
        kind = np.repeat([0, 1], [d + 1, len(w) - d - 1])
        for here, block in zip(self._parts(), self.blocks, strict=True):
            kind[here] += block.directions is not None
        cut = np.where(kind[:, None] == np.arange(3), w[:, None], 0.0)
        cut[d] = squares[d] = 0.0
        sizes = np.array([squares[kind == each].sum() for each in range(3)])
        if self.covariance is not None:
            scaled = w[:d] * np.sqrt(self.lines)
            sizes[0] = max(sizes[0], float(scaled @ self.covariance @ scaled))
        known = sizes > _TINY
        return cut[:, known], np.sqrt(sizes[known])

    def grow(self, block: CoordinateBlock) -> None:
        """Add a block, whose weights are zero so far."""
        more = len(block.variances)
        self._w, self.velocity, self.total = (
            np.concatenate([each, np.zeros((more, *each.shape[1:]))])
            for each in (self._w, self.velocity, self.total)
        )
        self.residue.grow(more)
        self.blocks.append(block)
        self._place()

    def shrunk(self, rms: float) -> Array:
        """Return the averaged weights with those of blocks shortened by what noise explains of each.

        Steps have brought a weight to f θ of the best one, θ, beside noise of variance ν. If the θ of a block
        have a variance s, which its squares tell (their mean is f² s + ν), the best estimate of θ is
        f s / (f² s + ν) times the weight. Weights are never made longer.
        """
        w, squares = self.total / self.count, _squares(self.total)
        noise = self._noise(2, rms)
        arrived = self._arrived(2, self.count)
        for here, part in zip(self._parts(), self._kept(squares, noise)[1], strict=True):
            f, left, spread = arrived[here] * self.count, noise[here], self.spread[here]
            strength = part * float(spread @ squares[here] / (spread @ np.square(f)))
            best = f * strength / (np.square(f) * strength + left) * self.count
            w[here] = (w[here].T * np.minimum(best, 1.0)).T
        return self._turn(w)


def _squares(w: Array) -> Array:
    """Return the square of every weight, the mean over outputs."""
    return np.asarray(np.square(w).reshape(len(w), -1).mean(axis=1))
