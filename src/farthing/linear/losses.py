"""Define the losses of linear models, and a record's contribution to their bounded sums.

A loss is a pair of functions of margins m = z·w and targets y: its value, and its residual ∂loss/∂m. The
gradient of a record is residual · z, with norm |residual| |z|: `LinearGradient` clips from these norms with
two products with the table, and never materialises a per-record gradient.

>>> import farthing as ft
>>> from farthing.data.tables import (Block, Features, Table)
>>> table = Table(np.array([[1.0], [2.0], [30.0]]), np.array([1.0, 0.0, 1.0]))
>>> gradient = LinearGradient(logistic, Features(1, intercept=0.0))
>>> gradient.bounded_sum(table, np.zeros(1), ft.ClipNorm(5.0))
array([-4.5])

`PlacedGradient` is for weights that other parties choose: each row is computed at a random position. The
theorem is in `farthing.data.weighted`.

>>> table, bound = Table(np.ones((3, 1)), np.ones(3)), ClipNorm(1.0)
>>> gradient = PlacedGradient(logistic, Features(1))
>>> np.round(gradient.bounded_sum(table, np.zeros(2), bound), 6).tolist()
[-1.5, -1.5]
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logsumexp, softmax

from farthing.data import raw
from farthing.data.tables import Block, Features, Table, Weighted
from farthing.data.weighted import PLACES, placed, weighed
from farthing.errors import InvalidValue, Unsupported
from farthing.noise import summing
from farthing.noise.summing import Sum
from farthing.queries.bounds import ROWS, ClipNorm, ClipOuter, Kind

Array = NDArray[np.float64]


class Loss(Protocol):
    """A loss of margins: one number per row, or one per class. All operations are row by row."""

    @property
    def curvature(self) -> float:
        """The largest second derivative in m (an eigenvalue, with several classes)."""

    @property
    def slope(self) -> float:
        """The largest |residual|; infinite if it is unbounded."""

    def value(self, margins: Array, y: Array) -> Array:
        """Return the loss of every row; margins may have further columns, one per candidate."""

    def residual(self, margins: Array, y: Array) -> Array:
        """Return the derivative of the loss in the margins."""


def _beside(y: Array, margins: Array) -> Array:
    return y if margins.ndim == 1 else y[:, None]


@dataclass(frozen=True, slots=True)
class Logistic:
    """log(1 + e^m) - y m, for targets 0 and 1."""

    curvature: float = 0.25
    slope: float = 1.0

    def value(self, margins: Array, y: Array) -> Array:
        softplus = np.log1p(np.exp(-np.abs(margins))) + np.maximum(margins, 0.0)  # twice as fast as logaddexp
        return np.asarray(softplus - _beside(y, margins) * margins)

    def residual(self, margins: Array, y: Array) -> Array:
        return np.asarray(expit(margins)) - _beside(y, margins)


@dataclass(frozen=True, slots=True)
class Softmax:
    """-log softmax(m)[y], for targets 0, 1, ..., K-1 and one margin per class.

    The loss and the residual of a record with any other target are 0, as an error would reveal the record.
    """

    curvature: float = 0.5
    slope: float = float(np.sqrt(2.0))

    def value(self, margins: Array, y: Array) -> Array:
        known, places = _places(margins, y)
        values = np.asarray(logsumexp(margins, axis=1)) - margins[np.arange(len(y)), places]
        return np.where(known, values, 0.0)

    def residual(self, margins: Array, y: Array) -> Array:
        known, places = _places(margins, y)
        residual: Array = softmax(margins, axis=1)
        residual[np.arange(len(y)), places] -= 1.0
        if not known.all():
            residual[~known] = 0.0
        return residual


def _places(margins: Array, y: Array) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which targets are valid classes, and the column of each (the first if it is not valid)."""
    y = np.asarray(y, dtype=np.float64)
    known = (y >= 0) & (y < margins.shape[1]) & (y == np.floor(y))
    return known, np.where(known, y, 0.0).astype(np.int64)


@dataclass(frozen=True, slots=True)
class HuberHinge:
    """The hinge of s = (2y-1) m, smoothed within ``width`` of 1 (Chaudhuri et al. 2011), targets 0 and 1.

    0 for s > 1 + h, 1 - s for s < 1 - h, (1 + h - s)² / 4h between.
    """

    width: float = 0.5
    slope: float = 1.0

    @property
    def curvature(self) -> float:
        return 1 / (2 * self.width)

    def value(self, margins: Array, y: Array) -> Array:
        below = 1 + self.width - (2 * _beside(y, margins) - 1) * margins
        return np.where(
            below > 2 * self.width, below - self.width, np.square(np.maximum(below, 0)) / (4 * self.width)
        )

    def residual(self, margins: Array, y: Array) -> Array:
        sign = 2 * _beside(y, margins) - 1
        return -sign * np.clip((1 + self.width - sign * margins) / (2 * self.width), 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Squared:
    """(m - y)² / 2."""

    curvature: float = 1.0
    slope: float = float("inf")

    def value(self, margins: Array, y: Array) -> Array:
        return np.square(margins - _beside(y, margins)) / 2

    def residual(self, margins: Array, y: Array) -> Array:
        return margins - _beside(y, margins)


@dataclass(frozen=True, slots=True)
class Huber:
    """The squared loss of m - y within ``threshold``, and its tangents beyond (Huber 1964)."""

    threshold: float = 0.1
    curvature: ClassVar[float] = 1.0

    @property
    def slope(self) -> float:
        return self.threshold

    def value(self, margins: Array, y: Array) -> Array:
        off = np.abs(margins - _beside(y, margins))
        return np.where(off > self.threshold, self.threshold * (off - self.threshold / 2), off * off / 2)

    def residual(self, margins: Array, y: Array) -> Array:
        return np.clip(margins - _beside(y, margins), -self.threshold, self.threshold)


@dataclass(frozen=True, slots=True)
class Pinball:
    """The loss of a ``quantile``, smoothed within ``width`` of its corner.

    It is the expected pinball loss of y plus uniform noise on [-width, width] (Fernandes, Guerre & Horta
    2021, "Smoothing quantile regressions", with a uniform kernel), so its minimiser is a quantile of that
    sum.
    """

    quantile: float = 0.5
    width: float = 0.02

    @property
    def slope(self) -> float:
        return max(self.quantile, 1 - self.quantile)

    @property
    def curvature(self) -> float:
        return 1 / (2 * self.width)

    def value(self, margins: Array, y: Array) -> Array:
        off = margins - _beside(y, margins)
        within = np.clip(off + self.width, 0.0, 2 * self.width)
        return within * within / (4 * self.width) + np.maximum(off - self.width, 0.0) - self.quantile * off

    def residual(self, margins: Array, y: Array) -> Array:
        off = margins - _beside(y, margins)
        return np.clip(off / (2 * self.width) + 0.5, 0.0, 1.0) - self.quantile


@dataclass(frozen=True, slots=True)
class LogLinear:
    """e^m - y m for a target from 0 to 1 with a log link; linear beyond m = 0, the upper bound.

    Predicted means end at the bound of the target, so nothing is lost there, and the residual, min(e^m, 1) -
    y, lies in [-1, 1] everywhere.
    """

    curvature: ClassVar[float] = 1.0
    slope: ClassVar[float] = 1.0

    def value(self, margins: Array, y: Array) -> Array:
        return np.exp(np.minimum(margins, 0.0)) + np.maximum(margins, 0.0) - _beside(y, margins) * margins

    def residual(self, margins: Array, y: Array) -> Array:
        return np.exp(np.minimum(margins, 0.0)) - _beside(y, margins)


@dataclass(frozen=True, slots=True)
class OneAgainstRest:
    """The sum over K classes of a binary loss of one class against the rest, with one margin per class."""

    loss: Loss

    @property
    def curvature(self) -> float:
        return self.loss.curvature

    @property
    def slope(self) -> float:
        return float("inf")  # at most √K times that of the binary loss; not needed

    def value(self, margins: Array, y: Array) -> Array:
        values = self.loss.value(margins.ravel(), _indicators(margins, y)).reshape(margins.shape)
        return np.asarray(values.sum(axis=1))

    def residual(self, margins: Array, y: Array) -> Array:
        return self.loss.residual(margins.ravel(), _indicators(margins, y)).reshape(margins.shape)


def _indicators(margins: Array, y: Array) -> Array:
    indicators: Array = y[:, None] == np.arange(margins.shape[1])
    return indicators.ravel().astype(np.float64)


_KINDS: dict[type, int] = {Logistic: 0, HuberHinge: 1, Squared: 2}  # the numbers of kernels.c
logistic, multinomial, huber_hinge, squared = Logistic(), Softmax(), HuberHinge(), Squared()
one_against_rest = OneAgainstRest(huber_hinge)


@dataclass(frozen=True, slots=True)
class LinearGradient:
    """Σ residual z of a `Table`, with clipped terms (`ClipNorm`). w has one row per coordinate of z."""

    loss: Loss
    features: Features
    honours: ClassVar[tuple[str, ...]] = (Kind.NORM,)
    shape: ClassVar[None] = None

    def bounded_sum(self, records: Table, w: Array, bound: ClipNorm) -> Array:
        if np.ndim(bound.scale) or bound.scale != 1.0 or bound.order != 2:
            raise Unsupported(
                "the gradient of a linear model is clipped by its plain L2 norm: ClipNorm(clip)"
            )
        u, constant = self.features.unfold(w)
        if (quick := self.quick_sum(records, u, constant, bound)) is not None:
            return quick[0]
        total = Weighted(len(records), self.features, u.shape[1:])
        for block in records.blocks(self.features):
            factors = self.factors(block, u, constant, bound)
            total.add(block, weighed(factors, getattr(block, "weight", None)))
        return total.value

    def quick_sum(
        self, records: Any, u: Array, constant: Any, bound: ClipNorm, rms: float = 0.0
    ) -> tuple[Array, Any] | None:
        """Return the sums of `Raw.gradient`, with Σ v z in place of Σ v x and Σ v; None without a kernel."""
        rows = records.raw(self.features) if type(records) is Table else None
        # rows of clients with different bounds are clipped one by one
        if rows is None or type(bound) is not ClipNorm or (loss := self.kernel_loss(bound.clip, rms)) is None:
            return None
        features, n = self.features, len(records)
        centred = summing.long(n, features.spread) and np.ndim(features.scale) == 1 and rows.centrable
        chain = Sum(n, spread=1.0 if centred else features.spread).rows
        found = rows.gradient(
            u, constant, loss, chain, np.ascontiguousarray(features.centre) if centred else None
        )
        return None if found is None else (features.gather(found[:-2], found[-2], n, centred), found[-1])

    def kernel_loss(self, clip: float, rms: float = 0.0) -> raw.KernelLoss | None:
        """Return the loss in the kernels' encoding; None if they do not support it."""
        kind = _KINDS.get(type(self.loss))
        width = self.loss.width if isinstance(self.loss, HuberHinge) else 0.0
        return None if kind is None else raw.KernelLoss(kind, width, clip, rms)

    def judged(self, records: Any, w: Array) -> Iterator[tuple[Array, Array, Array]]:
        """Yield losses, whether labels are predicted (0 if there are none) and weights of rows, by blocks.

        A predicted label may depend on last bits: rows that are used directly have secret positions.
        """
        u, constant = self.features.unfold(np.asarray(w))
        if type(records) is Table and records.placeable:
            for part in placed(records):
                yield from LinearGradient.judged(self, part, w)
            return
        for block in records.blocks(self.features):
            with np.errstate(over="ignore", invalid="ignore"):
                margins = block.margins(u, constant)
                losses = self.loss.value(margins, block.y)
            weight = getattr(block, "weight", None)
            there = np.ones(len(losses)) if weight is None else weight
            yield losses, _found(self.loss, margins, block.y), there

    def judge_nobody(self, w: Any) -> None:
        """Refuse weights of the wrong shape."""
        self.features.unfold(np.asarray(w))

    def factors(self, block: Block, u: Array, constant: Array, bound: ClipNorm) -> Array:
        """Return the clipped residuals, the factors of the z of a block's rows."""
        if block.y is None:
            raise InvalidValue("a gradient needs a table with targets: Table(X, y)")
        with np.errstate(over="ignore", invalid="ignore"):
            residual = self.loss.residual(block.margins(u, constant), block.y)
            size = np.abs(residual) if residual.ndim == 1 else np.sqrt(np.square(residual).sum(axis=1))
            factors = bound.factors(size * block.norm)
            clipped = residual * (factors if residual.ndim == 1 else factors[:, None])
        if not factors.all():  # NaN and infinity count as zero
            clipped[factors == 0] = 0.0
        return clipped


def _found(loss: Loss, margins: Array, y: Array) -> Array:
    """Return 1 for rows whose label has the largest margin, or whose margin has its sign; 0 for numbers."""
    if isinstance(loss, Squared | Huber | Pinball | LogLinear):
        return np.zeros(len(margins))
    labels = margins.argmax(axis=1) if margins.ndim == 2 else margins > 0
    return np.asarray(labels == y, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Scores:
    """-Σ loss at several candidates, the columns of w, each term clamped by `ClipValue`: for `NoisyMax`."""

    loss: Loss
    features: Features
    honours: ClassVar[tuple[str, ...]] = (Kind.VALUE,)
    shape: ClassVar[None] = None

    def bounded_sum(self, records: Table, w: Array, bound: Any) -> Array:
        u, constant = self.features.unfold(w)
        total = Sum(len(records), w.shape[1:])
        for block in records.blocks(self.features):
            with np.errstate(over="ignore", invalid="ignore"):
                values = bound.apply(-self.loss.value(block.margins(u, constant), block.y))
            total.add(values.sum(axis=0), len(values))
        return total.value


@dataclass(frozen=True, slots=True)
class Total:
    """Σ z of a table, each z clipped (`ClipNorm`)."""

    features: Features
    honours: ClassVar[tuple[str, ...]] = (Kind.NORM,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.features.size,)

    def bounded_sum(self, records: Table, w: Any, bound: ClipNorm) -> Array:
        total = Weighted(len(records), self.features)
        for block in records.blocks(self.features):
            total.add(block, bound.factors(block.norm))
        return total.value


@dataclass(frozen=True, slots=True)
class Moments:
    """Σ [z; z²] of a table, with the pair clipped together: first and second moments at once."""

    features: Features
    honours: ClassVar[tuple[str, ...]] = ROWS

    @property
    def shape(self) -> tuple[int, ...]:
        return (2 * self.features.size,)

    def bounded_sum(self, records: Table, w: Any, bound: ClipNorm) -> Array:
        total = Sum(len(records), (2 * self.features.size,))
        for block in records.blocks(self.features):
            z = block.rows(self.features)
            total.add(bound.apply(np.hstack([z, z * z])).sum(axis=0), len(z))
        return total.value


@dataclass(frozen=True, slots=True)
class Gram:
    """Σ z zᵀ of a table, each z clipped (`ClipOuter`); with ``target`` z is [z; target · y]."""

    features: Features
    target: float = 0.0
    honours: ClassVar[tuple[str, ...]] = (Kind.OUTER,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._size, self._size)

    @property
    def _size(self) -> int:
        return self.features.size + (self.target > 0)

    def bounded_sum(self, records: Table, w: Any, bound: ClipOuter) -> Array:
        total = Sum(len(records), self.shape)
        for block in records.blocks(self.features):
            z = block.rows(self.features)
            rows = bound.rows.apply(np.column_stack([z, self.target * block.y]) if self.target else z)
            total.add(rows.T @ rows, len(rows))
        return total.value


@dataclass(frozen=True, slots=True)
class PlacedGradient(LinearGradient):
    """A `LinearGradient` whose terms do not depend on the other records, not even in their last bits."""

    def bounded_sum(self, records: Table, w: Array, bound: ClipNorm) -> Array:
        if len(records) == 0:
            return LinearGradient.bounded_sum(self, records, w, bound)
        total = Sum(len(records), np.shape(w))
        for block in placed(records):
            some = LinearGradient.bounded_sum(self, block, w, bound)  # type: ignore[arg-type]
            total.add(some, min(PLACES, len(block)))
        return total.value

    def quick_sum(self, records: Any, u: Array, constant: Any, bound: ClipNorm, rms: float = 0.0) -> None:
        """Return None: whether a kernel can read a table, and so the last bits, depends on all rows."""

    def judged(self, records: Any, w: Array) -> Iterator[tuple[Array, Array, Array]]:
        for block in placed(records):
            yield from LinearGradient.judged(self, block, w)
