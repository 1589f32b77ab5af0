"""Bounds: what they promise the mechanism, and what they do to rows."""

import math

import numpy as np
import pytest
import torch

from farthing.budget import Adjacency, Budget
from farthing.errors import InvalidValue, Unsupported
from farthing.queries.bounds import ClipCoordinates, ClipNorm
from farthing.queries.events import GaussianEvent
from farthing.queries.mechanisms import Gaussian
from farthing.queries.query import Query
from farthing.queries.samplers import Everyone
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.clipping import Automatic, ClipCounted, ClipLayers, ClipRule, plain_sum
from farthing.torch.training.records import Examples

ROWS = torch.randn(40, 10, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 40)[:, None]
BOUNDS = [
    ClipNorm(0.7),
    ClipNorm(0.7, np.linspace(0.5, 2.0, 10)),
    ClipCoordinates(np.linspace(0.1, 1.0, 10)),
    ClipLayers((0.3, 0.6), (4, 6)),
    ClipLayers((0.3, 0.6), (4, 6), (0.5, 4.0)),
    Automatic(0.7, 0.05),
    ClipCounted(0.7, 0.2),
]


@pytest.mark.parametrize("bound", BOUNDS)
def test_no_row_is_longer_than_its_bound(bound):
    strange = torch.cat([ROWS, torch.tensor([[math.nan] * 10, [math.inf] + [0.0] * 9, [0.0] * 10])])
    for row in strange:
        length = (plain_sum(row[None], bound) / torch.as_tensor(np.array(bound.scale))).double().norm()
        assert float(length) <= bound.norm() * (1 + 1e-6)


@pytest.mark.parametrize("bound", BOUNDS)
def test_the_price_is_that_of_the_noise(bound):
    gradient = Gradient(torch.nn.Linear(9, 1), torch.nn.MSELoss(reduction="none"))
    query = Query(Everyone(), gradient, bound, Gaussian(1.3))
    assert query.price(Budget(1.0, 1e-5)) == GaussianEvent(1.3)
    assert bound.sensitivity(Adjacency.REPLACE_ONE) == 2 * bound.sensitivity(Adjacency.ADD_REMOVE)


def test_counting_is_paid_for_out_of_the_same_norm():
    bound = ClipCounted(2.0, share=0.04)
    assert bound.norm() ** 2 == pytest.approx(2.0**2 + (bound.unit / 2) ** 2)
    rows = torch.tensor([[1.0, 0.0], [3.0, 4.0], [math.nan, 0.0], [0.0, 2.0]])
    gradient, count = bound.read(plain_sum(rows, bound))
    assert gradient.tolist() == pytest.approx([1.0 + 1.2, 1.6 + 2.0])
    assert count == pytest.approx(2 * 0.5 - 0.5)  # and 0 for the gradient that is as long as the clip


def test_last_bits_of_a_norm_at_the_clip_do_not_decide_what_is_counted():
    bound, clip = ClipCounted(2.0, share=0.04), torch.tensor(2.0)
    norms = torch.stack([torch.nextafter(clip, clip + side) for side in (-1, 1)])
    below, above = (float(bound.extras(each[None], None, clip)) for each in norms)
    assert abs(below - above) < 1e-5 * bound.unit
    assert float(bound.extras(torch.tensor([1.0, 3.0, 9.0]), None, clip)) == pytest.approx(-0.5 * bound.unit)


def test_stretches_move_noise_between_layers():
    plain, stretched = ClipLayers((1.0, 1.0), (2, 3)), ClipLayers((1.0, 1.0), (2, 3), (1.0, 3.0))
    assert plain.scale == 1.0
    assert plain.norm() == pytest.approx(math.sqrt(2))
    assert stretched.norm() == pytest.approx(math.hypot(1, 1 / 3))
    assert np.asarray(stretched.scale).tolist() == [1.0, 1.0, 3.0, 3.0, 3.0]


def test_automatic_is_never_quite_the_clip():
    found = plain_sum(torch.tensor([[3.0, 4.0]]), Automatic(1.0, 0.01))
    assert found.tolist() == pytest.approx([3 / 5.01, 4 / 5.01])


def test_bad_bounds_are_refused():
    with pytest.raises(InvalidValue, match="one clip, size and stretch a layer"):
        ClipLayers((1.0, 1.0), (2,))
    with pytest.raises(InvalidValue, match="clip_norm must be"):
        ClipLayers((0.0,), (2,))
    with pytest.raises(InvalidValue, match="share must be"):
        ClipCounted(1.0, 1.0)
    for bound in (ClipLayers((1.0,), (2,)), Automatic(), ClipCounted(1.0)):
        with pytest.raises(Unsupported, match="Gaussian"):
            bound.norm(1)


def test_a_scale_that_was_changed_in_place_is_refused():
    """Measured in one scale and given noise in another, an example would get past its bound."""
    bound = ClipNorm(1.0, torch.ones(4))
    rows = torch.ones(3, 4)
    plain_sum(rows, bound)
    bound.scale.mul_(1e-3)
    with pytest.raises(InvalidValue, match="changed in place"):
        plain_sum(rows, bound)


@pytest.mark.parametrize(
    "bound",
    [
        ClipNorm(1e37),  # a sum of 40 such gradients is infinite in float32
        ClipNorm(1e-24),  # squares of longer gradients vanish
        ClipNorm(1e-20, np.array([1e20])),
        ClipNorm(1.0, np.array([1e-40])),
        ClipNorm(1e10, np.array([1e25])),
        ClipCoordinates(np.array([1e-40])),
        ClipLayers((1e-24,), (1,)),
        ClipLayers((1e37,), (1,)),
        Automatic(1e-24),
    ],
    ids=repr,
)
def test_clips_that_float32_cannot_keep_are_refused(bound):
    gradient = Gradient(torch.nn.Linear(1, 1, bias=False), lambda outputs, targets: outputs[:, 0])
    with pytest.raises(InvalidValue, match="float32"):
        gradient.zero(None, None, bound)


class Normalised(ClipRule):
    """Every gradient has one length, however short it was."""

    largest_norm = 1.0

    def factors(self, norms, clip):
        return clip / norms


class HalfClipped(ClipRule):
    """Gradients up to twice the norm that is promised."""

    largest_norm = 1.0

    def factors(self, norms, clip):
        return 2 * clip / norms.clamp_min(2 * clip)  # 1 up to a norm of 2


@pytest.mark.parametrize("rule", [Automatic(1.0, 1e-25), Automatic(3.0, 1e-30), Normalised(), HalfClipped()])
@pytest.mark.parametrize("route", ["fast", "vmap"])
def test_rules_that_leave_a_gradient_longer_than_they_promise_are_refused(rule, route):
    gradient = Gradient(torch.nn.Linear(3000, 1, bias=False), lambda outputs, _: outputs[:, 0], route=route)
    with pytest.raises(InvalidValue, match="promises a largest norm"):
        gradient.zero(None, None, rule)


class ToTheMedian(ClipRule):
    """Gradients are clipped where half of the others are longer: bounded, and each moves them all."""

    largest_norm = 1.0

    def factors(self, norms, clip):
        return clip / norms.clamp_min(max(clip, float(norms.median())))


@pytest.mark.parametrize("route", ["fast", "vmap"])
def test_a_rule_by_which_one_gradient_moves_the_factors_of_others_is_refused(route):
    gradient = Gradient(torch.nn.Linear(3, 1, bias=False), lambda outputs, _: outputs[:, 0], route=route)
    with pytest.raises(InvalidValue, match="moves all others"):
        gradient.zero(None, None, ToTheMedian())


@pytest.mark.parametrize("route", ["fast", "vmap"])
@pytest.mark.parametrize("size", [1e-24, 2e-23, 1e-21, 1e-16, 1e-12, 1e-9])
def test_the_least_gamma_holds(route, size):
    gradient = Gradient(torch.nn.Linear(4096, 1, bias=False), lambda outputs, _: outputs[:, 0], route=route)
    batch = Examples((torch.full((1, 4096), size), torch.zeros(1))).take(slice(None))
    assert gradient.bounded_sum(batch, None, Automatic(1.0, 4e-12)).double().norm() <= 1 + 2**-10


@pytest.mark.parametrize("route", ["fast", "vmap"])
@pytest.mark.parametrize("size", [1e-19, 1e-16, 3e-14, 1e-13, 1e-11])
def test_the_smallest_clips_hold(route, size):
    gradient = Gradient(torch.nn.Linear(4096, 1, bias=False), lambda outputs, _: outputs[:, 0], route=route)
    batch = Examples((torch.full((1, 4096), size), torch.zeros(1))).take(slice(None))
    clip = 2.0**-43
    assert gradient.bounded_sum(batch, None, ClipNorm(clip)).double().norm() <= clip * (1 + 2**-10)


class Rows(torch.nn.Module):
    """Rows of an embedding, times a number that comes with each record."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(5, 3)

    def forward(self, x):
        return self.table(x[:, 1:].long()).sum(1) * x[:, :1]


@pytest.mark.parametrize("make", [Rows, lambda: torch.nn.Sequential(torch.nn.Linear(4, 3))])
def test_a_factor_too_small_for_float32_does_not_lengthen_a_gradient(make):
    torch.manual_seed(0)
    model = make()
    gradient = Gradient(model, lambda outputs, _: outputs.sum(1))
    for huge in (1e18, 1e30, 1e32, 1e36, 1e37, 1e38):
        x = torch.tensor([[huge, 1.0, 2.0, 3.0]])
        for clip in (2.0**-43, 1e-12, 1e-8, 1e-6, 3e-6, 1.0):
            found = gradient.bounded_sum(
                Examples((x, torch.zeros(1))).take(slice(None)), None, ClipNorm(clip)
            )
            assert float(found.double().norm()) <= clip * (1 + 2.0**-9)
