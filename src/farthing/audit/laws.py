"""Check laws of noise, bounds, draws and contributions; each returns a list of complaints.

They hold for every query. `contributions` records the methods' own queries and tries records with extreme
gradients: each record's part is within its bound, and parts add up over records.

A law that holds returns an empty list. A statistical law complains falsely with probability 1e-6 at most:
counts are tested at `_RARE`, two-sided.
"""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, bdtrc, ndtr

from farthing.audit import methods
from farthing.audit.targets import TrainedTarget
from farthing.budget import Adjacency
from farthing.data.tables import Features, Table
from farthing.ledger import answers
from farthing.ledger.ledger import Ledger
from farthing.linear.losses import Gram, LinearGradient, Moments, logistic
from farthing.linear.methods.perturbation import Convex, Minimiser, Objective, ObjectiveNoise
from farthing.linear.methods.privgene import NoisyTop
from farthing.noise import lattice
from farthing.noise.lattice import Stream
from farthing.queries.bounds import ClipCoordinates, ClipNorm, ClipOuter, ClipValue
from farthing.queries.mechanisms import Gaussian, Laplace, NoisyMax, SymmetricGaussian
from farthing.queries.query import Answer, PerExample, Query
from farthing.queries.samplers import Everyone, FixedSize, Poisson, Sampler

Array = NDArray[np.float64]

_RARE = 5e-8
_BITS = 20


def rare(successes: int, trials: int, rate: float) -> bool:
    """Return whether this count of ``trials`` at a ``rate`` has a probability of 1e-7 at most."""
    low, high = bdtr(successes, trials, rate), bdtrc(successes - 1, trials, rate) if successes else 1.0
    return bool(min(low, high) < _RARE)


def off_law(values: Array, law: Callable[[Array], Array], levels: Array) -> list[float]:
    """Return the levels at which a sample of independent values has too many or too few at or below."""
    ordered = np.sort(values)
    counts = np.searchsorted(ordered, levels, side="right")
    rates = law(levels)
    found = zip(levels, counts, rates, strict=True)
    return [float(level) for level, count, rate in found if rare(int(count), len(values), float(rate))]


def _laplace(x: Array) -> Array:
    return np.where(x < 0, np.exp(np.minimum(x, 0.0)) / 2, 1 - np.exp(-np.maximum(x, 0.0)) / 2)


_GAUSSIAN_LEVELS = np.array([-4.0, -3.3, -2.5, -1.5, -0.75, -0.25, 0.0, 0.25, 0.75, 1.5, 2.5, 3.3, 4.0])
_LAPLACE_LEVELS = np.array([-9.0, -5.0, -2.5, -1.0, -0.3, 0.0, 0.3, 1.0, 2.5, 5.0, 9.0])
_GUMBEL_LEVELS = np.array([-2.2, -1.5, -0.75, 0.0, 0.5, 1.5, 3.0, 5.0, 9.0])


def samplers_of_noise(stream: Stream, size: int = 100_000) -> list[str]:
    """Check that Gaussian, Laplace and Gumbel samples are independent and follow their laws, with tails."""
    kinds: list[tuple[str, Any, Any, Array]] = [
        ("gaussian", lattice.gaussian, ndtr, _GAUSSIAN_LEVELS),
        ("laplace", lattice.laplace, _laplace, _LAPLACE_LEVELS),
        ("gumbel", lattice.gumbel, lambda x: np.exp(-np.exp(-x)), _GUMBEL_LEVELS),
    ]
    complaints = []
    for name, draw, law, levels in kinds:
        values = draw(stream, size, _BITS) * 2.0**-_BITS
        complaints += [f"{name}: off its law at {level:g}" for level in off_law(values, law, levels)]
        complaints += [f"{name}: {text}" for text in memory(values)]
    return complaints


def memory(values: Array) -> list[str]:
    """Check that successive samples lie on one side of the median half of the time, and are rarely equal."""
    above = values > np.median(values)
    complaints = []
    for lag in (1, 2, 7):
        same = int(np.count_nonzero(above[lag:] == above[:-lag]))
        if rare(same, len(above) - lag, 0.5):
            complaints.append(f"values {lag} apart are not independent")
    if len(np.unique(values)) < 0.9 * len(values):
        complaints.append("values repeat")
    return complaints


def releases(stream: Stream, size: int = 60_000) -> list[str]:
    """Check that noise has the deviation of the event, drawn anew in every answer and coordinate."""
    complaints = []
    scale = np.resize([0.25, 4.0], size)
    gaussians: list[tuple[str, Any, Any]] = [
        ("Gaussian on ClipNorm", Gaussian(0.7), ClipNorm(2.0)),
        ("Gaussian on scaled ClipNorm", Gaussian(0.7), ClipNorm(2.0, scale)),
        ("Gaussian on ClipCoordinates", Gaussian(0.7 / math.sqrt(size)), ClipCoordinates(scale)),
    ]
    for name, mechanism, bound in gaussians:
        answers = [mechanism.release(np.zeros(size), bound, stream) for _ in range(2)]
        unit = mechanism.noise_multiplier * bound.norm() * np.asarray(bound.scale)
        for answer in answers:
            values = answer / unit
            complaints += [f"{name}: off its law at {x:g}" for x in off_law(values, ndtr, _GAUSSIAN_LEVELS)]
            complaints += [f"{name}: {text}" for text in memory(values)]
        complaints += [f"{name}: {text}" for text in _apart(answers[0] / unit, answers[1] / unit)]
        complaints += [f"{name}: {text}" for text in _on_lattice(mechanism, bound, size, stream)]
    answer = Laplace(1.5).release(np.zeros(size), ClipNorm(2.0, order=1), stream)
    found = off_law(answer / 3.0, _laplace, _LAPLACE_LEVELS)
    complaints += [f"Laplace: off its law at {level:g}" for level in found]
    side = math.isqrt(size)
    symmetric = SymmetricGaussian(0.7)
    matrices = [symmetric.release(np.zeros((side, side)), ClipOuter(2.0), stream) for _ in range(8)]
    answer, upper = matrices[0], np.triu_indices(side, 1)
    diagonal = np.concatenate([np.diag(matrix) for matrix in matrices]) / 2.8
    beside = answer[upper] / 2.8 * math.sqrt(2)
    for name, values in (("diagonal", diagonal), ("off-diagonal", beside)):
        found = off_law(values, ndtr, _GAUSSIAN_LEVELS)
        complaints += [f"SymmetricGaussian: {name} off its law at {level:g}" for level in found]
    if not np.array_equal(answer, answer.T):
        complaints.append("SymmetricGaussian: not symmetric")
    return complaints


def _apart(first: Array, second: Array) -> list[str]:
    """Check that two answers agree about the sign of noise half of the time."""
    same = int(np.count_nonzero((first > 0) == (second > 0)))
    return ["two answers share noise"] if rare(same, len(first), 0.5) else []


def _on_lattice(mechanism: Any, bound: Any, size: int, stream: Stream) -> list[str]:
    """Check that answers are integer multiples of a cell, whatever the noise was added to."""
    _, cell = mechanism.grid(bound, size)
    total = np.resize([0.0, 0.1, -0.3], size)
    cells = mechanism.release(total, bound, stream) / np.asarray(bound.scale) / cell
    away = np.abs(cells - np.rint(cells)) > 1e-6 * np.maximum(1.0, np.abs(cells) * 1e-8)
    return ["answers lie off the lattice"] if away.any() else []


def streams(stream: Stream) -> list[str]:
    """Check that no two holders of a stream get the same words."""
    complaints = []
    if np.array_equal(Stream().integers(4), Stream().integers(4)):
        complaints.append("two streams begin alike")
    if copy.deepcopy(stream) is not stream or copy.copy(stream) is not stream:
        complaints.append("a copy of a stream is another one, in the same state")
    if np.array_equal(stream.integers(8), stream.integers(8)):
        complaints.append("a stream repeats itself")
    words = stream.integers(1 << 14)
    for bit in (0, 11, 32, 63):
        ones = int(np.count_nonzero(words >> np.uint64(bit) & np.uint64(1)))
        if rare(ones, len(words), 0.5):
            complaints.append(f"bit {bit} of the words is not fair")
    if type(stream) is not Stream and stream.sound:
        complaints.append("a seeded stream says that it is sound")
    return complaints


NASTY = np.array(
    [
        [3.0, 4.0, 12.0],
        [-1e200, 1e200, 0.0],
        [1e-300, -1e-300, 0.0],
        [np.nan, 1.0, 0.0],
        [np.inf, 0.0, 0.0],
        [-np.inf, np.nan, 1.0],
        [0.0, 0.0, -7.0],
        [1e308, 1e308, 1e308],
        [0.1, -0.2, 0.05],
        [0.0, 0.0, 0.0],
    ]
)


def clipping(stream: Stream) -> list[str]:
    """Check that every clipped row is within its bound, NaN, infinity and overflow included."""
    scale = np.array([0.5, 1.0, 8.0])
    bounds: list[tuple[Any, int]] = [
        (ClipNorm(1.5), 2),
        (ClipNorm(1.5, scale), 2),
        (ClipNorm(1.5, order=1), 1),
        (ClipCoordinates(scale), 2),
        (ClipOuter(1.5), 2),
    ]
    complaints = []
    for bound, order in bounds:
        most = 1.5 if isinstance(bound, ClipOuter) else bound.norm(order)
        with np.errstate(over="ignore", invalid="ignore"):
            clip = bound.rows if isinstance(bound, ClipOuter) else bound
            rows = np.asarray(clip.apply(NASTY)) / np.asarray(bound.scale)
            sizes = np.abs(rows).sum(axis=1) if order == 1 else np.sqrt(np.square(rows).sum(axis=1))
        if not (sizes <= most * (1 + 1e-9)).all():
            complaints.append(f"{type(bound).__name__} of order {order} lets a row through")
        if isinstance(bound, ClipCoordinates) and not (np.abs(rows) <= 1 + 1e-12).all():
            complaints.append("ClipCoordinates lets an entry through")
    for value in (ClipValue(-1.0, 0.5), ClipValue(0.0, 2.0)):
        rows = value.apply(NASTY)
        if not ((rows >= value.low) & (rows <= value.high)).all():
            complaints.append(f"{value} lets an entry through")
    norms = np.array([0.5, 1.5, 3.0, 1e300, np.inf, np.nan])
    with np.errstate(invalid="ignore"):
        left = np.where(np.isfinite(norms), norms, 1.0) * ClipNorm(1.5).factors(norms)
    if not (left <= 1.5 * (1 + 1e-9)).all() or not (ClipNorm(1.5).factors(norms)[-2:] == 0).all():
        complaints.append("ClipNorm.factors leaves more than the clip")
    return complaints


def sensitivities(stream: Stream) -> list[str]:
    """Check that two clipped rows differ by the bound's sensitivity at most, and that none is longer."""
    rows = np.concatenate(
        [1e3 * np.eye(3), -1e3 * np.eye(3), [[0.6, 0.8, 0.0], [-500.0, 1.0, 1.0]], np.zeros((1, 3))]
    )
    complaints = []
    for bound in (ClipNorm(1.5), ClipNorm(1.5, order=1), ClipCoordinates(np.ones(3)), ClipOuter(1.5)):
        order = 1 if isinstance(bound, ClipNorm) and bound.order == 1 else 2
        clipped = np.asarray((bound.rows if isinstance(bound, ClipOuter) else bound).apply(rows))
        if isinstance(bound, ClipCoordinates):
            clipped = np.vstack([clipped, np.ones((1, 3)), -np.ones((1, 3))])
        if isinstance(bound, ClipOuter):
            clipped = np.einsum("ij,ik->ijk", clipped, clipped).reshape(len(clipped), -1)
        apart = _longest([a - b for a in clipped for b in clipped], order)
        alone = _longest(list(clipped), order)
        for adjacency, needed in ((Adjacency.REPLACE_ONE, apart), (Adjacency.ADD_REMOVE, alone)):
            if bound.sensitivity(adjacency, order) < needed * (1 - 1e-9):
                complaints.append(f"{type(bound).__name__} of order {order} moves further under {adjacency}")
    for value in (ClipValue(-1.0, 0.5), ClipValue(0.5, 2.0)):
        if value.sensitivity(Adjacency.REPLACE_ONE) < value.high - value.low:
            complaints.append(f"{value} moves further when a record is replaced")
        if value.sensitivity(Adjacency.ADD_REMOVE) < max(abs(value.low), abs(value.high)):
            complaints.append(f"{value} moves further when a record comes")
    return complaints


def _longest(rows: Sequence[Array], order: int) -> float:
    return max(float(np.linalg.norm(row, order)) for row in rows)


def draws(stream: Stream, rounds: int = 2000) -> list[str]:
    """Check that each record is drawn at its rate, independently of others and of other draws, once."""
    n, rate = 12, 0.25
    complaints = [f"Poisson: {text}" for text in _drawn(Poisson(rate), n, rate, stream, rounds, poisson=True)]
    fixed = FixedSize(3, n)
    complaints += [f"FixedSize: {text}" for text in _drawn(fixed, n, rate, stream, rounds, poisson=False)]
    blank = FixedSize(3, 24)
    complaints += [
        f"FixedSize, half of the records there: {text}"
        for text in _drawn(blank, n, 3 / 24, stream, rounds, poisson=None)
    ]
    return complaints


def _drawn(
    sampler: Sampler, n: int, rate: float, stream: Stream, rounds: int, poisson: bool | None
) -> list[str]:
    came = np.zeros((rounds, n), np.bool_)
    complaints = set()
    for row in came:
        places = np.arange(n)[sampler.draw(n, stream)]
        if len(np.unique(places)) != len(places):
            complaints.add("a record comes twice in a draw")
        row[places] = True
    for record in range(n):
        if rare(int(came[:, record].sum()), rounds, rate):
            complaints.add("a record does not come with its rate")
    again = int(np.count_nonzero(came[1:] & came[:-1]))
    if rare(again, (rounds - 1) * n, rate**2) and poisson:
        complaints.add("draws depend on each other")
    if not poisson and not came[1:].__and__(came[:-1]).any():
        complaints.add("draws depend on each other")
    if poisson:
        together = int(np.count_nonzero(came[:, ::2] & came[:, 1::2]))
        if rare(together, rounds * (n // 2), rate**2):
            complaints.add("records do not come independently")
        sizes = came.sum(axis=1)
        if rare(int(np.count_nonzero(sizes == 0)), rounds, (1 - rate) ** n):
            complaints.add("empty draws are not as frequent as they must be")
        if rare(int(np.count_nonzero(sizes <= 2)), rounds, float(bdtr(2, n, rate))):
            complaints.add("sizes of draws are off their law")
    return sorted(complaints)


def elections(stream: Stream, rounds: int = 4000) -> list[str]:
    """Check that Gumbel choices have the probabilities of the exponential mechanism, at any noise scale."""
    scores, bound = np.array([1.0, 0.0, -1.0]), ClipValue(-1.0, 1.0)
    weights = np.exp(scores / 0.8)
    rates = weights / weights.sum()
    complaints = []
    choosers: list[tuple[str, Callable[[], int]]] = [
        ("NoisyMax", lambda: NoisyMax(0.8).release(scores, bound, stream)),
        ("NoisyMax of noise 1e3", lambda: NoisyMax(1e3).release(scores * 1250, bound, stream)),
        ("NoisyMax of noise 1e6", lambda: NoisyMax(1e6).release(scores * 1.25e6, bound, stream)),
        ("NoisyTop", lambda: int(NoisyTop(0.8, 2).release(scores, bound, stream)[0])),
    ]
    for name, choose in choosers:
        counts = np.bincount([choose() for _ in range(rounds)], minlength=3)
        if any(rare(int(count), rounds, float(rate)) for count, rate in zip(counts, rates, strict=True)):
            complaints.append(f"{name}: places are not chosen with their probabilities")
    return complaints


_HARD = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1e-3, 1.0]])


_LISTENED = "descent dpagd dpsgd privgene least-squares adassp sufficient gradient functional pca majority"


def contributions(stream: Stream, names: str = _LISTENED) -> list[str]:
    """Check that one record's part of every query is within the bound, and that parts add up."""
    complaints = []
    for name in names.split():
        target = methods.targets()[name]
        assert isinstance(target, TrainedTarget)
        asked: list[tuple[Query, Any]] = []
        ledger = Ledger(target.claim, filter=target.rule, stream=stream).over(target.pair[1])
        for _ in target.run(ledger.with_listener(partial(_noted, asked))):
            pass
        width = target.pair[1].X.shape[1]
        records = [Table(row[None, :width], np.array([label])) for row in _HARD for label in (0.0, 1.0)]
        for query, w in asked[:: max(1, len(asked) // 6)]:
            complaints += [f"{name}: {text}" for text in _within(query, w, records)]
    return complaints


def _noted(asked: list[tuple[Query, Any]], query: Query, w: Any, _: Answer) -> None:
    asked.append((query, w))


def _within(query: Query, w: Any, records: list[Table]) -> list[str]:
    kind = type(query.contribution).__name__
    bound: Any = query.bound
    parts = [np.asarray(query.contribution.bounded_sum(record, w, bound)) for record in records]
    complaints = set()
    for part in parts:
        scaled = part / np.asarray(bound.scale)
        if isinstance(bound, ClipValue):
            fits = bool(((scaled >= bound.low - 1e-9) & (scaled <= bound.high + 1e-9)).all())
        elif isinstance(bound, ClipNorm) and bound.order == 1:
            fits = float(np.abs(scaled).sum()) <= bound.norm(1) * (1 + 1e-9)
        else:
            fits = float(np.linalg.norm(scaled)) <= bound.norm() * (1 + 1e-9)
        if not fits:
            complaints.add(f"a record's part of {kind} is beyond its bound")
    if kind != "Smallest":  # an eigenvalue, which is not a sum over records
        both = Table(
            np.vstack([record.X for record in records[:4]]),
            np.concatenate([record.y for record in records[:4]]),
        )
        together = np.asarray(query.contribution.bounded_sum(both, w, bound))
        if not np.allclose(together, sum(parts[:4]), rtol=1e-9, atol=1e-9):
            complaints.add(f"parts of {kind} do not add up over records")
    return sorted(complaints)


def pairs() -> list[str]:
    """Check that a contribution interprets its bound as the price does, or that the pair is refused."""
    features = Features(3, intercept=0.0)
    rows = np.vstack([np.zeros((1, 3)), 1e3 * np.eye(3), np.full((2, 3), [[1e6], [-1e6]])])
    table, w = Table(rows, np.resize([0.0, 1.0], len(rows))), np.array([1.0, -2.0, 0.5])
    kinds: list[Any] = [PerExample(lambda table, w: table.X), Moments(features), Gram(features)]
    bounds: list[Any] = [ClipNorm(0.1), ClipNorm(10.0), ClipNorm(1.0, order=1), ClipNorm(1.0, 0.1)]
    bounds += [ClipOuter(0.1), ClipOuter(10.0), ClipValue(-1.0, 1.0), ClipNorm(1.0, np.ones(1))]
    bounds += [ClipCoordinates(np.full(size, 0.5)) for size in (1, 3, 6)]
    complaints = set()
    for contribution, bound in itertools.product([*kinds, LinearGradient(logistic, features)], bounds):
        try:
            query = Query(Everyone(), contribution, bound, Gaussian(1.0))
            nobody = answers.zero_sum(contribution, table, w, bound)
            query.mechanism.check(bound, answers.shape_of(nobody))
        except Exception:  # any refusal before a charge will do
            continue
        sums = [contribution.bounded_sum(table.take(np.array([n])), w, bound) for n in range(len(rows))]
        terms = np.array(sums).reshape(len(rows), -1) / np.asarray(bound.scale)
        apart = np.linalg.norm(terms[:, None] - terms[None], axis=-1).max()
        alone = np.linalg.norm(terms, axis=-1).max()
        for adjacency, moved in ((Adjacency.ADD_REMOVE, alone), (Adjacency.REPLACE_ONE, apart)):
            if moved > bound.sensitivity(adjacency) * (1 + 2.0**-20):
                complaints.add(f"{type(contribution).__name__} moves further than {bound.kind} is priced for")
    return sorted(complaints)


def objectives(stream: Stream, runs: int = 120) -> list[str]:
    """Check that the noise in a perturbed objective, recovered from its minimiser, is what was priced."""

    size = 20
    table = Table(np.eye(size), np.arange(size) % 2.0)
    features = Features(size, intercept=0.0, radius=1.0)
    bound = Convex(logistic, 1.0)
    mechanism = ObjectiveNoise(2.0, 50.0, 3.0, 1.0)

    behind = Objective(features, 1e-9).bounded_sum(table, None, bound)
    implied = []
    for _ in range(runs):
        w = mechanism.release(behind, bound, stream)
        implied.append(behind._look(logistic, np.zeros(size), 3.0, w)[1] / 2.0)
    levels = np.array([-1.5, -0.5, 0.0, 0.5, 1.5])
    return (
        ["noise in an objective is not what was priced"]
        if off_law(np.concatenate(implied), ndtr, levels)
        else []
    )


def minimisers(stream: Stream) -> list[str]:
    """Check that a minimiser moves no further than its bound when an extreme record is added."""
    features = Features(1, intercept=0.0, radius=1.0)
    minimiser = Minimiser(logistic, features, 0.5, 1e-9)
    bound = ClipNorm(minimiser.reach)
    without = Table(-np.ones((3, 1)), np.ones(3))
    within = Table(np.append(-np.ones(3), 1.0)[:, None], np.ones(4))
    ends = [minimiser.bounded_sum(table, None, bound) for table in (without, within)]
    # far from 0, so that the record's residual is near 1 and it moves the minimiser by at least half of R/λ
    moved = float(np.linalg.norm(ends[0] - ends[1]))
    return ["a minimiser moves further than it says"] if moved > minimiser.reach * (1 + 1e-9) else []
