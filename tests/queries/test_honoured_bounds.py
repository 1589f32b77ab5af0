"""Every contribution under every bound: refused before a charge, or it moves no further than is priced."""

import importlib
import inspect
import pkgutil
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import farthing as ft
from farthing.budget import Adjacency
from farthing.cli import measuring
from farthing.data.tables import Features, Table
from farthing.errors import FarthingError, InvalidValue, Unsupported
from farthing.federated.evaluation import Evaluation
from farthing.ledger import answers
from farthing.linear.additive import basis, sums
from farthing.linear.losses import (
    Gram,
    LinearGradient,
    Moments,
    PlacedGradient,
    Scores,
    Total,
    logistic,
    squared,
)
from farthing.linear.methods import (
    baselines,
    centroids,
    descent,
    dpagd,
    dppca,
    functional,
    leastsquares,
    perturbation,
    privgene,
    pure,
    sufficient,
)
from farthing.linear.selection import Held, _Values
from farthing.noise.lattice import SeededStream
from farthing.queries.bounds import ROWS, ClipCoordinates, ClipNorm, ClipOuter, ClipValue, Kind
from farthing.queries.events import BoundedRangeEvent, GaussianEvent, LaplaceEvent, PureEvent, RepeatedEvent
from farthing.queries.mechanisms import Gaussian, Laplace, NoisyMax, SymmetricGaussian
from farthing.queries.query import PerExample, Query, Rows
from farthing.queries.samplers import Everyone, FixedSize, Poisson

torch = pytest.importorskip("torch")

from farthing.statistics import cells, describing, ranks  # noqa: E402
from farthing.torch import features as torch_features  # noqa: E402
from farthing.torch.gradients.bookkeeping import Gradient as ModelGradient  # noqa: E402
from farthing.torch.gradients.clipping import Automatic, ClipCounted, ClipLayers  # noqa: E402
from farthing.torch.methods import dpagd as torch_dpagd  # noqa: E402
from farthing.torch.training.distributed import _Parts  # noqa: E402
from farthing.torch.training.network import Network  # noqa: E402
from farthing.torch.training.randomness import OwnRandomness  # noqa: E402
from farthing.torch.training.records import Examples  # noqa: E402

BASE = 4  # records that stay; the others come, go and take each other's place
PLAIN = np.array([[0.1, -0.2, 0.3], [0.5, 0.5, 0.5], [0.0, 0.0, 0.0], [-0.3, 0.2, 0.9]])
HARD = np.array(
    [[1e150, 1e150, 1e150], [-1e150] * 3, [1e3, 0, 0], [0, -1e3, 0], [0, 0, 1e200], [1, 1, 1], [0.6, 0, 0.8]]
)
ODD = np.array([[np.nan, 1, 1], [np.inf, 0, 0], [-np.inf, np.nan, 1e308]])
X = np.vstack([PLAIN, HARD, HARD])
Y = np.concatenate([[0.0, 1.0, 1.0, 0.0], np.zeros(len(HARD)), np.ones(len(HARD))])
WILD = np.append(Y[:-3], [1e300, -1e300, np.nan])
TABLE, WILD_TABLE = Table(X, Y), Table(X, WILD)
ROWS_ = Rows(np.vstack([PLAIN, HARD, ODD]))
NUMBERS = np.vstack([PLAIN, HARD, ODD])[:, 0]
CODES = np.resize([0, 1, 2, -1, 7], 2 * len(NUMBERS)).reshape(-1, 2)
PLAIN_FEATURES = Features(3, intercept=0.0)
FEATURES, UNIT = Features(3), Features(3, intercept=0.0, radius=1.0)
W, CANDIDATES = np.array([0.3, -0.2, 0.1, 0.5]), np.array([[0.5, -1.0], [0.0, 2.0], [1.0, 0.0], [0.0, 1.0]])


STEPS = np.linspace(-1.0, 2.0, 3 * basis.CELLS).reshape(basis.CELLS, 3)
SPACE = sums.GroupedSpace(FEATURES, (basis.Cell(0, STEPS[:, :2]), basis.Cell(2, STEPS[:, 2:])))


def binned(table):
    """The table with cells as if its features were bounded by -1 and 1.5."""
    return basis.Binned(table, basis.codes_of(table.X, np.full(3, -1.0), np.full(3, 1.5)))


class Predicts:
    def __init__(self, sign):
        self.sign = sign

    def predict(self, X):
        return (self.sign * X[:, 0] > 0).astype(float)


def model():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


def residuals(outputs, y):
    return (outputs[:, 0] - y).square()


def examples():
    with np.errstate(over="ignore"):
        x = np.vstack([PLAIN, HARD, [[1e18, -1e18, 1e18], [5.0, 0, 0]], ODD]).astype(np.float32)
    y = np.resize([0.0, 1.0], len(x)).astype(np.float32)
    return Examples((torch.from_numpy(x), torch.from_numpy(y)))


def maps():
    with np.errstate(over="ignore"):
        values = np.vstack([PLAIN, HARD, ODD]).astype(np.float32)
    return Rows(torch.from_numpy(np.stack([values, values[:, ::-1] * 0.5], axis=1).copy()))


@dataclass
class Case:
    contribution: Any
    records: Any = TABLE
    w: Any = None
    slack: float = 2.0**-20
    own: tuple = ()  # bounds that only this one takes
    powerful: bool = True  # whether some record comes near the bound

    @property
    def name(self):
        return f"{type(self.contribution).__module__}.{type(self.contribution).__name__}"


def cases():
    linear, layout = model(), ModelGradient(model(), residuals).layout
    torch_gradient, network = ModelGradient(linear, residuals), Network(model(), residuals)
    ray = torch_dpagd.ModelRay(np.full(layout.size, 0.5), np.array([0.0, 1.0, 5.0]))
    slope = leastsquares.Slope(FEATURES, 0.5, 2.0, 1.0)
    minimiser = perturbation.Minimiser(logistic, UNIT, 0.5, 1e-9)
    coefficients = [functional.Coefficients(UNIT, 2.0, 0.5, 2.0, triangle) for triangle in (False, True)]
    slack = 2.0**-10
    return [
        Case(PerExample(lambda rows, w: rows[0]), ROWS_),
        Case(PerExample(lambda rows, w: rows[0][:, :1]), ROWS_),
        Case(LinearGradient(logistic, FEATURES), w=W),
        Case(LinearGradient(squared, FEATURES), WILD_TABLE, W),
        Case(PlacedGradient(logistic, FEATURES), w=W),
        Case(PlacedGradient(squared, FEATURES), WILD_TABLE, W),
        Case(Scores(logistic, FEATURES), w=CANDIDATES),
        Case(Moments(FEATURES)),
        Case(Gram(FEATURES)),
        Case(Gram(FEATURES, target=0.5), WILD_TABLE),
        Case(descent.Norms(3, np.array([10.0, 1.0, 0.1]))),
        *(Case(descent.Spread(UNIT, gram)) for gram in (False, True)),
        Case(descent.Stretch(LinearGradient(logistic, FEATURES)), w=W),
        Case(centroids.ClassSums(UNIT)),
        Case(centroids.ClassSums(UNIT), WILD_TABLE),
        Case(centroids.Projected(UNIT, np.full(UNIT.width, 3.0), 0.5)),
        Case(centroids.Projected(UNIT, np.full(UNIT.width, 3.0), 0.5), WILD_TABLE),
        Case(sums.GroupGradient(logistic, SPACE), binned(TABLE), w=np.linspace(-1.0, 1.0, 7)),
        Case(sums.GroupGradient(squared, SPACE), binned(WILD_TABLE), w=np.linspace(-1.0, 1.0, 7)),
        Case(sums.Length(logistic, SPACE), binned(TABLE), w=np.linspace(-1.0, 1.0, 7)),
        Case(sums.Misfit(squared, SPACE, 0.5), binned(WILD_TABLE), w=np.linspace(-1.0, 1.0, 7)),
        Case(sums.FactorSlopes(squared, SPACE, np.eye(7)[:, :2]), binned(WILD_TABLE), w=np.ones(3)),
        Case(sums.Crowded((0, 1, 2, 3)), binned(TABLE)),
        Case(sums.Inside(3), binned(TABLE)),
        Case(sums.Histograms(3), binned(TABLE)),
        Case(sums.Whole(descent.Norms(3, np.array([10.0, 1.0, 0.1]))), binned(TABLE)),
        Case(dpagd.RayScores(logistic, FEATURES), w=dpagd.Ray(W, W[::-1], np.array([0.0, 1.0, 9.0]))),
        Case(Total(FEATURES)),
        Case(minimiser, powerful=False),
        Case(
            perturbation.Objective(UNIT, 1e-9),
            own=(perturbation.Convex(logistic, 0.5), perturbation.Convex(logistic, 1.0)),
        ),
        Case(
            pure.WideObjective(UNIT, 1e-9),
            own=tuple(pure.WideConvex(logistic, 1.0, size) for size in (2, 3, 4)),
        ),
        Case(sufficient.Smallest(UNIT), powerful=False),
        Case(leastsquares.Targets(0.5), WILD_TABLE),
        Case(leastsquares.Targets(0.5, 2, 0.1), WILD_TABLE),
        Case(leastsquares.RowMoments(PLAIN_FEATURES, FEATURES)),
        Case(leastsquares.RowScatter(PLAIN_FEATURES, FEATURES)),
        Case(slope, w=W, own=(slope.bound, ClipNorm(0.1, slope.bound.scale), ClipNorm(9.0, np.ones(5)))),
        Case(sufficient.Statistics(FEATURES, 0.5, 2.0), WILD_TABLE),
        *(Case(one, WILD_TABLE, own=(ClipNorm(one.least, order=1),)) for one in coefficients),
        Case(dppca.Scatter(FEATURES, np.full(4, 0.2))),
        Case(privgene.Advantages(logistic, FEATURES), w=CANDIDATES),
        Case(baselines.Counts(2)),
        Case(_Values((Predicts(1), Predicts(-1)), None), Held(X, Y)),
        Case(measuring._Figures(None, lambda model, X, y: X), Rows(X, Y)),
        Case(_Values((Predicts(1),), lambda y, p: 1e9 * (p - y)), Held(X, WILD)),
        Case(cells.Cells(2, 3), Rows(CODES)),
        Case(cells.Sums(3, -1.0, 2.0), Rows(CODES[:, 0], NUMBERS)),
        Case(ranks.Tree(-1.0, 2.0), Rows(NUMBERS)),
        Case(ranks.QuantileScores(0.25, -1.0, 2.0), Rows(NUMBERS), own=(ClipValue(-0.75, 0.75),)),
        Case(describing.ColumnSums((-1.0, -1.0, -1.0), (1.0, 1.0, 2.0)), ROWS_),
        Case(torch_gradient, examples(), slack=slack),
        Case(OwnRandomness(torch_gradient, torch.device("cpu")), examples(), slack=slack),
        Case(network.gradient, examples(), network.start(), slack=slack),
        Case(network.update(2, 0.5), examples(), network.start(), slack=slack),
        Case(Evaluation(network.gradient, 0.5, 9.0), examples(), network.start(), slack=slack),
        Case(Evaluation(LinearGradient(logistic, FEATURES), 1e-3, 9.0), w=W),
        Case(Evaluation(PlacedGradient(squared, FEATURES), 2.0, 9.0), WILD_TABLE, W),
        Case(torch_dpagd.RayLosses(linear, residuals, layout), examples(), ray, slack=slack),
        Case(torch_features._Mean(), maps()),
        *(Case(torch_features._Moments(np.full((2, 3), 0.1), axis), maps()) for axis in (1, 2)),
    ]


# Not paired: stand-ins without a sum, planted ones, and one whose sum is another's in parts
ELSEWHERE = {
    "farthing.queries.query.Contribution",  # the protocol
    "farthing.federated.terms._Nothing",  # only priced; its sum raises
    "farthing.federated.rounds.LocalSteps",  # several answers; its sum raises
    "farthing.deploy.flower.mod._Update",  # of one app: tests/deploy/flower/test_mod.py
    "farthing.audit.charges._Counted",
    "farthing.audit.charges._Failing",
    "farthing.torch.training.distributed._Parts",  # honours what its contribution does: below
}


def found(member):
    """Classes of the package that have a method of this name."""
    names = set()
    for module in pkgutil.walk_packages(ft.__path__, "farthing."):
        if module.name.endswith("__main__"):
            continue
        try:
            loaded = importlib.import_module(module.name)
        except ImportError:  # an extra that is not installed
            continue
        for _, kind in inspect.getmembers(loaded, inspect.isclass):
            if kind.__module__ == module.name and callable(getattr(kind, member, None)):
                names.add(f"{module.name}.{kind.__name__}")
    return names


def test_no_contribution_is_forgotten():
    assert found("bounded_sum") == {case.name for case in cases()} | ELSEWHERE


# What bounds are made from, and the torch rules of ClipNorm and ClipCoordinates, which are tried as these.
BASES = {"farthing.queries.bounds.Bound"} | {
    f"farthing.torch.gradients.clipping.{name}" for name in ("ClipRule", "_OfBound", "_Norm", "_Coordinates")
}


def test_no_bound_is_forgotten():
    tried = {type(bound) for case in cases() for bound in bounds(case, 3)}
    named = {f"{kind.__module__}.{kind.__name__}" for kind in tried}
    assert found("sensitivity") == named | BASES


def bounds(case, size):
    """Every kind of bound: tight, loose, scaled, of the sum's own width and of another."""
    some = [1, size, size + 1]
    for clip in (0.1, 5.0):
        yield from (ClipNorm(clip), ClipNorm(clip, order=1), ClipNorm(clip, scale=0.25), ClipOuter(clip))
        yield from (ClipNorm(clip, np.linspace(0.5, 2.0, width), order) for width in some for order in (1, 2))
        yield from (Automatic(clip), ClipCounted(clip))
    for width in some:
        yield ClipCoordinates(np.linspace(0.5, 2.0, width))
        yield ClipLayers((0.5, 2.0), (max(1, width - 1), 1), (0.25, 1.0))
    for low, high in ((-1.0, 0.0), (0.0, 1.0), (-0.5, 2.0), (0.5, 1.0), (-1.0, -0.5)):
        yield ClipValue(low, high)
    yield perturbation.Convex(logistic, 1.0)
    yield from case.own


MECHANISMS = [
    Gaussian(1.0),
    Laplace(1.0),
    SymmetricGaussian(1.0),
    NoisyMax(1.0),
    NoisyMax(1.0, "laplace"),
    privgene.NoisyTop(1.0, 1),
    perturbation.ObjectiveNoise(2.0, 50.0, 3.0, 1.0),
    pure.LaplaceObjective(2.0, 50.0, 3.0),
]
SAMPLERS = [Everyone(), Poisson(0.5), FixedSize(2, 30)]


def allowed(query, adjacency):
    """How far a sum may move by the event that is charged: (order of the norm or 'gap', distance)."""
    sampled = not isinstance(query.sampler, Everyone)
    event = query.mechanism.event(query.bound, adjacency, sampled)
    step = 2 if adjacency is Adjacency.REPLACE_ONE else 1
    if isinstance(query.mechanism, pure.LaplaceObjective):
        return 1, query.bound.norm(1) * step
    match event:
        case GaussianEvent(noise):
            return 2, query.mechanism.noise_multiplier * query.bound.norm(2) / noise * step
        case LaplaceEvent(noise):
            return 1, query.mechanism.noise_multiplier * query.bound.norm(1) / noise * step
        case BoundedRangeEvent(epsilon) | PureEvent(epsilon) | RepeatedEvent(BoundedRangeEvent(epsilon), _):
            return "gap", epsilon * query.mechanism.noise_multiplier * query.bound.norm()
    return "gradient", query.bound.radius * step


def total(case, bound, places):
    sums = case.contribution.bounded_sum(case.records.take(places), case.w, bound)
    if isinstance(sums, perturbation.Behind):  # what a record adds to the objective's gradient
        sums = sums._look(logistic, np.zeros(3), 0.0, np.array([3.0, -2.0, 1.0]))[1]
    return np.asarray(sums, dtype=np.float64) / np.asarray(bound.scale)


def size(move, order):
    if order == "gap":
        return float(np.ptp(move))
    return float(np.linalg.norm(move.ravel(), 1 if order == 1 else 2))


def moves(case, bound):
    """By how much each record moves the sum when it comes; NaN nowhere."""
    base = np.arange(BASE)
    with np.errstate(all="ignore"):
        without = total(case, bound, base)
        came = [total(case, bound, np.append(base, n)) - without for n in range(BASE, len(case.records))]
    return np.stack(came)


def accepted(case):
    """The pairs with a bound that are not refused, and every query that can be made of them."""
    width = len(np.ravel(np.asarray(total_of_nobody(case))))
    for bound in bounds(case, width):
        queries = []
        for mechanism in MECHANISMS:
            for sampler in SAMPLERS:
                try:
                    query = Query(sampler, case.contribution, bound, mechanism)
                    zero = answers.zero_sum(case.contribution, case.records, case.w, bound)
                    mechanism.check(bound, answers.shape_of(zero))
                    query.price(ft.Budget(1.0, 1e-5))
                except FarthingError:
                    continue
                queries.append(query)
        if queries:
            yield bound, queries


def total_of_nobody(case):
    """The sum over nobody under the first bound that is honoured."""
    for bound in bounds(case, 3):
        if bound.kind in case.contribution.honours:
            try:
                return answers.zero_sum(case.contribution, case.records, case.w, bound)
            except FarthingError:
                continue
    raise AssertionError(f"{case.name} takes no bound")


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_pair_is_refused_or_moves_no_further_than_is_priced(case):
    near = 0.0
    for bound, queries in accepted(case):
        came = moves(case, bound)
        replaced = (came[:, None] - came[None]).reshape(-1, *came.shape[1:])
        for query in queries:
            for adjacency in Adjacency:
                order, most = allowed(query, adjacency)
                sampled = not isinstance(query.sampler, Everyone)
                tried = replaced if adjacency is Adjacency.REPLACE_ONE else came
                moved = max(size(move, order) for move in tried)
                assert moved <= most * (1 + case.slack), (bound, query.mechanism, adjacency)
                if sampled and adjacency is Adjacency.REPLACE_ONE and order != "gap":
                    alone = max(size(move, order) for move in came)
                    assert alone <= most / 2 * (1 + case.slack), (bound, query.mechanism)
                near = max(near, moved / most)
    assert near >= (0.5 if case.powerful else 0.01)  # otherwise nothing was tried


@pytest.mark.parametrize(
    ("contribution", "bound", "mechanism"),
    [
        (PerExample(lambda rows, w: rows[0]), ClipOuter(0.1), Gaussian(1.0)),
        (Gram(FEATURES), ClipNorm(10.0), Gaussian(1.0)),
        (Gram(FEATURES), ClipNorm(10.0), SymmetricGaussian(1.0)),
        (Gram(FEATURES), ClipOuter(1.0), Laplace(1.0)),
        (LinearGradient(logistic, FEATURES), ClipNorm(1.0, scale=0.01), Gaussian(1.0)),
        (LinearGradient(logistic, FEATURES), ClipNorm(1.0), Laplace(1.0)),
        (LinearGradient(logistic, FEATURES), ClipNorm(1.0), NoisyMax(1.0)),
        (Moments(FEATURES), ClipValue(-1.0, 1.0), Gaussian(1.0)),
        (Moments(FEATURES), ClipCoordinates(np.ones(3)), Gaussian(1.0)),
        (Moments(FEATURES), ClipNorm(1.0), SymmetricGaussian(1.0)),
        (baselines.Counts(2), ClipValue(0.0, 1.0), Gaussian(1.0)),
        (functional.Coefficients(UNIT, 2.0, 0.5, 2.0), ClipNorm(0.1, order=1), Laplace(1.0)),
        (OwnRandomness(Gram(FEATURES), torch.device("cpu")), ClipNorm(1.0), Gaussian(1.0)),
        (_Parts(Gram(FEATURES), None), ClipNorm(1.0), Gaussian(1.0)),
    ],
)
def test_a_pair_that_nothing_bounds_is_refused_when_it_is_made(contribution, bound, mechanism):
    with pytest.raises((Unsupported, InvalidValue)):
        Query(Everyone(), contribution, bound, mechanism)


def test_one_number_is_no_scale_of_all_coordinates():
    for scale in (1.0, np.float64(2.0), np.array(3.0), torch.tensor(1.0)):
        with pytest.raises(InvalidValue, match="per coordinate"):
            ClipCoordinates(scale)
    with pytest.raises(InvalidValue, match="has 1 coordinates, a contribution has 3"):
        ClipCoordinates(np.ones(1)).apply(np.ones((2, 3)))
    with pytest.raises(InvalidValue, match="has 1 coordinates, a contribution has 3"):
        ClipNorm(1.0, np.ones(1)).apply(np.ones((2, 3)))


@pytest.mark.parametrize("bound", [ClipCoordinates(np.ones(1)), ClipNorm(1.0, np.ones(2)), ClipValue(-1, 1)])
def test_a_width_that_only_the_sum_shows_is_refused_before_the_charge(bound):
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
    query = Query(Everyone(), PerExample(lambda rows, w: rows[0]), bound, Gaussian(9.0))
    with pytest.raises(InvalidValue, match=r"the bound has|ClipValue bounds one number"):
        ledger.over(ROWS_).ask(query)
    assert ledger.share == 0


def test_a_contribution_without_a_declaration_is_told_what_to_add():
    class Silent:
        def bounded_sum(self, records, w, bound):
            return np.zeros(2)

    with pytest.raises(Unsupported, match=r"no 'honours'; add honours = farthing.queries.bounds.ROWS"):
        Query(Everyone(), Silent(), ClipNorm(1.0), Gaussian(1.0))
    Silent.honours = ROWS
    with pytest.raises(Unsupported, match="no 'shape'; add shape = None"):
        Query(Everyone(), Silent(), ClipNorm(1.0), Gaussian(1.0))


def test_a_refusal_names_the_bounds_that_hold():
    with pytest.raises(
        Unsupported, match=r"Gram does not enforce ClipNorm\(clip\): it honours ClipOuter\(clip\)"
    ):
        Query(Everyone(), Gram(FEATURES), ClipNorm(1.0), Gaussian(1.0))


def test_a_bound_of_a_kind_that_nobody_knows_is_refused():
    class Soft:
        scale = 1.0

        def norm(self, order=2):
            return 1.0

        def sensitivity(self, adjacency, order=2):
            return 1.0

    with pytest.raises(Unsupported, match="Soft"):
        Query(Everyone(), PerExample(lambda rows, w: rows[0]), Soft(), Gaussian(1.0))


def test_of_a_sum_that_is_not_symmetric_the_symmetric_part_is_released():
    """Otherwise its upper triangle would count twice: √2 times as far as the Frobenius norm says."""
    upper = np.array([[0.0, 1.0], [0.0, 0.0]])
    answers = [SymmetricGaussian(1e-6).release(upper, ClipOuter(1.0), SeededStream(n)) for n in (0, 1)]
    assert np.mean(answers, axis=0) == pytest.approx(np.array([[0.0, 0.5], [0.5, 0.0]]), abs=1e-4)


def test_clients_refuse_what_their_clip_does_not_bound():
    from farthing.federated.protocol import Invitation
    from farthing.federated.simulated import Simulated

    clients = Simulated.split(X[:4], Y[:4], clients=2, budgets=ft.Budget(1.0, 1e-5))
    clients.invite(Invitation(1.0, rounds=2))
    with pytest.raises(Unsupported, match="Gram"):
        clients.ask(Gram(FEATURES), W)
    assert clients.left.tolist() == [2, 2]


def test_the_kinds_of_rows_are_those_that_can_be_applied():
    assert set(ROWS) == set(Kind) - {Kind.OUTER}
