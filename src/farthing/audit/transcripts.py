"""Record the transcript of a whole run, and its log-likelihood ratio of "with" against "without".

The strongest observer that a guarantee covers sees every answer and knows everything but one record.
`Transcript` records a ledger's answers for such an audit (`Ledger.with_listener`): the ledger answers as any
other does, and the log-likelihood ratio of each answer between the two data sets is kept. Their sum is the
optimal statistic for answers of known noise (Neyman & Pearson 1933); if the noise is not what it claims to
be, it is still a statistic.

Neighbours must differ in their last record only. Where records are drawn, the others must not move the sum
along the canary's own contribution, or must all be alike (`FixedSize`).

>>> import numpy as np
>>> import farthing as ft
>>> without, within = ft.Rows(np.zeros((3, 2))), ft.Rows(np.array([[0.0, 0.0]] * 3 + [[5.0, 0.0]]))
>>> transcript = Transcript((without, within))
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-5)).over(within).with_listener(transcript)
>>> rows = ft.PerExample(lambda rows, w: rows[0])
>>> query = ft.Query(ft.Everyone(), rows, ft.ClipNorm(1.0), ft.Gaussian(4.0))
>>> answer = ledger.ask(query)
>>> bool(abs(transcript.loss) < 3), transcript.asked
(True, 1)

The module also has AdaDP and AdaL in their sound form, vectorised over runs, with the library's own bounds
and noise. The next clipping norm and noise depend on released values only: E' <- γ' E' + (1 - γ') max((g̃/L)²
- (σ_i/L)², 0), s_i = min(C, β √(E' + floor²)), each example clipped to s by coordinates (`ClipCoordinates`),
one noise vector a batch. Noise over sensitivity is σ √m s_i / (√m s_i) = σ in every step, so that the price
is that of DP-SGD at σ, whatever the scales. AdaL adapts the steps alone, which is post-processing. Runs are
the coordinates of one large release here, so that noise, grid and clipping are those of the library.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from farthing.audit.statistics import SampledCurve
from farthing.audit.steps import Groups
from farthing.errors import Unsupported
from farthing.federated.noise import ClientNoise, Share
from farthing.linear.methods.perturbation import ObjectiveNoise
from farthing.linear.methods.privgene import NoisyTop
from farthing.linear.methods.pure import LaplaceObjective
from farthing.noise.lattice import Stream
from farthing.queries.bounds import ClipCoordinates, ClipNorm
from farthing.queries.mechanisms import Gaussian, Laplace, NoisyMax, SymmetricGaussian
from farthing.queries.query import Answer, Query, Records
from farthing.queries.samplers import Everyone, FixedSize, Poisson, Sampler

Array = NDArray[np.float64]


@dataclass(slots=True)
class Transcript:
    """A listener that keeps the log-likelihood ratio of every answer in ``losses``.

    ``neighbours`` are the two data sets (without, with) between which the ratios are taken.
    """

    neighbours: tuple[Records, Records]
    losses: list[float] = field(default_factory=list)
    kinds: set[tuple[Sampler, float]] = field(default_factory=set)

    def __call__(self, query: Query, w: Any, answer: Answer) -> None:
        self.losses.append(log_ratio(query, w, answer.value, *self.neighbours))
        self.kinds.add((query.sampler, getattr(query.mechanism, "noise_multiplier", math.nan)))

    @property
    def loss(self) -> float:
        """Return the log-likelihood ratio of all answers."""
        return sum(self.losses)

    @property
    def asked(self) -> int:
        """Return how many answers there were."""
        return len(self.losses)

    def curve(self) -> SampledCurve:
        """Return the curve of a run of equal steps, each of which is a trial."""
        if len(self.kinds) != 1:
            raise Unsupported(
                f"steps are trials of one kind where all are equal, got {len(self.kinds)} kinds"
            )
        ((sampler, _),) = self.kinds
        match sampler:
            case Everyone():
                return SampledCurve(1.0, self.asked)
            case Poisson(rate):
                return SampledCurve(rate, self.asked)
            case FixedSize(size, of):
                return SampledCurve(size / of, self.asked, fixed_size=True)
        raise Unsupported(f"no curve is known for the draws of {sampler!r}")


def log_ratio(query: Query, w: Any, value: Any, without: Any, within: Any) -> float:
    """Return the log-likelihood ratio of ``value`` between ``within`` and ``without``."""

    def total(records: Any) -> Any:
        return query.contribution.bounded_sum(records, w, query.bound)

    match query.sampler:
        case Everyone():
            whole = slice(None)
            return _ratio(query, value, total(without.take(whole)), total(within.take(whole)))
        case Poisson(rate):
            none = total(within.take(np.empty(0, np.int64)))
            mine = _ratio(query, value, none, total(_last(within)))
            theirs = 0.0
            if len(without) == len(within):
                theirs = _ratio(query, value, none, total(_last(without)))
            return _mixed(rate, mine) - _mixed(rate, theirs)
        case FixedSize(size, of):
            others = total(without.take(np.arange(min(size, len(without)))))
            pushed = np.append(np.arange(size - 1), len(within) - 1)
            return _mixed(size / of, _ratio(query, value, others, total(within.take(pushed))))
    raise Unsupported(f"no log-likelihood ratio is known for the draws of {query.sampler!r}")


def _last(records: Any) -> Any:
    return records.take(np.array([len(records) - 1]))


def _mixed(rate: float, loss: float) -> float:
    """Return ln (1 - rate + rate e^loss)."""
    return float(np.logaddexp(math.log1p(-rate), math.log(rate) + loss)) if rate < 1 else loss


def _ratio(query: Query, value: Any, without: Any, within: Any) -> float:
    """Return the log-likelihood ratio between two totals, under the noise that the mechanism claims."""
    mechanism: Any = query.mechanism
    match mechanism:
        case ObjectiveNoise() | LaplaceObjective():
            return _objective(query, mechanism, value, without, within)
        case SymmetricGaussian():
            upper = np.triu_indices(len(value))
            stretch = np.where(upper[0] == upper[1], 1.0, math.sqrt(2))
            seen, first, second = (np.asarray(part)[upper] * stretch for part in (value, without, within))
            return _gaussian(seen, first, second, mechanism.noise_multiplier * query.bound.norm())
        case Gaussian():
            deviation = mechanism.noise_multiplier * query.bound.norm()
            if isinstance(mechanism, Share | ClientNoise):
                deviation /= math.sqrt(mechanism.survivors)
            return _gaussian(value, without, within, deviation * np.asarray(query.bound.scale))
        case Laplace():
            scale = mechanism.noise_multiplier * query.bound.norm(1) * np.asarray(query.bound.scale)
            return float(np.sum((np.abs(value - without) - np.abs(value - within)) / scale))
        case NoisyMax():
            return _chosen([int(value)], without, within, mechanism.noise_multiplier * query.bound.norm())
        case NoisyTop():
            return _chosen(list(value), without, within, mechanism.noise_multiplier * query.bound.norm())
    raise Unsupported(f"no log-likelihood ratio is known for the noise of {mechanism!r}")


def _gaussian(value: Any, without: Any, within: Any, deviation: Any) -> float:
    first, second = ((np.asarray(value) - np.asarray(part)) / deviation for part in (without, within))
    return float(np.sum(np.square(first) - np.square(second))) / 2


def _chosen(places: list[int], without: Any, within: Any, scale: float) -> float:
    """Return the log-likelihood ratio of successive exponential choices; approximate for Laplace noise."""
    loss, left = 0.0, np.ones(len(without), np.bool_)
    for place in places:
        for sign, scores in ((1.0, within), (-1.0, without)):
            held = np.asarray(scores)[left] / scale
            loss += sign * (float(scores[place]) / scale - float(logsumexp(held)))
        left[place] = False
    return loss


def _objective(
    query: Query, mechanism: ObjectiveNoise | LaplaceObjective, w: Array, without: Any, within: Any
) -> float:
    """Return the ratio of a minimiser: w gives the noise b = -∇F(w), with the Hessian as Jacobian."""
    bound: Any = query.bound
    w = np.asarray(w).ravel()  # of several classes: a matrix
    order = 1 if isinstance(mechanism, LaplaceObjective) else 2
    penalty, scale = mechanism.penalty * bound.radius**2, mechanism.noise_multiplier * bound.norm(order)
    logs = []
    for behind in (without, within):
        _, gradient, hessian = behind._look(bound.loss, np.zeros(len(w)), penalty, np.asarray(w))
        far = float(np.sum(np.abs(gradient / scale) ** order)) / order
        logs.append(np.linalg.slogdet(hessian)[1] - far)
    return float(logs[1] - logs[0])


@dataclass(frozen=True, slots=True)
class SoundAdaDP:
    """AdaDP in its sound form; a run's output is (steps, 3, weights).

    Of each step the weights, the noisy sums and their scales, which follow from the sums before.
    """

    rate: float = 0.1
    steps: int = 30
    noise: float = 8.0
    clip: float = 4.0
    factor: float = 1.2
    remembered: float = 0.1
    remembered_raw: float = 0.9
    gate: float = 1e-6
    step: float = 0.002
    smoothing: float = 1e-8
    floor: float = 1e-3
    noise_adapts: bool = True  # False: AdaL

    def __call__(self, data: Groups, runs: int, stream: Stream) -> Array:
        size = data.x.shape[1]
        batch = self.rate * float(data.counts[:2].sum())
        w = np.zeros((runs, size))
        seen, known = np.zeros_like(w), np.zeros_like(w)
        path = []
        for _ in range(self.steps):
            came, gradients = data.batches(self.rate, runs, stream), data.gradients(w)
            scales = np.full_like(w, self.clip / math.sqrt(size))  # σ √m scale is σ C
            if self.noise_adapts:
                local = np.sqrt(known).var(axis=1, keepdims=True) > self.gate
                adapted = np.minimum(self.clip, self.factor * np.sqrt(known + self.floor**2))
                scales = np.where(local, adapted, scales)
            bound = ClipCoordinates(scales.ravel())
            # one coordinate for each run and weight
            rows = np.moveaxis(gradients, 1, 0).reshape(len(data.x), -1)
            if self.noise_adapts:
                clipped = bound.apply(rows)
            else:
                clipped = ClipNorm(self.clip).apply(rows.reshape(-1, size))
            clipped = clipped.reshape(len(data.x), runs, size)
            total = np.einsum("rk,krm->rm", came, clipped)
            # in units of scale all coordinates together have norm √(runs m), those of one run √m
            mechanism = Gaussian(self.noise / math.sqrt(runs))
            noisy = mechanism.release(total.ravel(), bound, stream).reshape(w.shape)
            seen = (1 - self.remembered) * seen + self.remembered * np.square(noisy)
            excess = np.square(noisy / batch) - np.square(self.noise * math.sqrt(size) * scales / batch)
            known = self.remembered_raw * known + (1 - self.remembered_raw) * np.maximum(excess, 0.0)
            w = w - self.step / batch * noisy / np.sqrt(seen + self.smoothing)
            path.append(np.stack([w, noisy, scales], axis=1))
        return np.stack(path, axis=1)
