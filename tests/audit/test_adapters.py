"""Other libraries under attack, where they are installed."""

import numpy as np
import pytest

import farthing as ft
from farthing.audit import GaussianCurve, adapters, statistics


def test_diffprivlib():
    mechanisms = pytest.importorskip("diffprivlib.mechanisms", exc_type=ImportError)
    seeds = [1, 2, 3, 4, 5, 6]  # one a world
    attacked = adapters.diffprivlib(
        lambda: mechanisms.Laplace(epsilon=1.0, sensitivity=1.0, random_state=seeds.pop())
    )
    pair, claim = (0.0, 1.0), ft.Budget(1.0, 0.0)
    verdict = ft.audit_mechanism(attacked, pair, claim, statistics.value, 4000, 0.9999)
    assert not verdict.broken
    assert verdict.eps_lower > 0.5
    # its noise is added in floats, whose last bits tell the worlds apart
    verdict = ft.audit_mechanism(attacked, pair, claim, trials=4000, confidence=0.9999)
    assert verdict.eps_lower > 2
    assert "bit" in verdict.attack
    # the same mechanism under half of its claim is broken
    assert ft.audit_mechanism(attacked, pair, ft.Budget(0.4, 0.0), statistics.value, 4000).broken
    with pytest.raises(ft.FarthingError, match="must be one of diffprivlib, got int"):
        ft.audit_mechanism(adapters.diffprivlib(lambda: 3), (0, 1), ft.Budget(1.0, 0.0))


class Rounded:
    """A mechanism with the names of diffprivlib's, or of OpenDP's measurements."""

    epsilon = 1.0

    def randomise(self, value):
        return round(value)


class Measurement:
    def __call__(self, value):
        return round(value)

    invoke = __call__

    def map(self, distance):
        return distance


@pytest.mark.parametrize("mechanism", [Rounded(), Measurement()])
def test_objects_of_other_libraries_are_taken_as_they_are(mechanism):
    claim = adapters.diffprivlib_claim(Rounded())
    assert (claim.epsilon, claim.delta) == (1.0, 0.0)
    assert ft.audit_mechanism(mechanism, (0.0, 1.0), claim, trials=100).broken
    assert not ft.audit_mechanism(mechanism, (0.0, 0.1), claim, trials=100).broken
    if isinstance(mechanism, Rounded):
        for given in (mechanism, Rounded):
            assert ft.audit_mechanism(adapters.diffprivlib(given), (0.0, 1.0), claim, trials=100).broken
    with pytest.raises(ft.FarthingError, match="must be a function of data, runs and a stream, got float"):
        ft.audit_mechanism(1.0, (0.0, 1.0), claim)


def test_opendp():
    dp = pytest.importorskip("opendp.prelude")
    dp.enable_features("contrib")
    space = dp.atom_domain(T=float, nan=False), dp.absolute_distance(T=float)
    measurement = dp.m.make_laplace(*space, scale=1.0)
    claim = adapters.opendp_claim(measurement, 1.0)
    assert claim.epsilon == pytest.approx(1.0)
    verdict = ft.audit_mechanism(
        adapters.opendp(measurement), (0.0, 1.0), claim, trials=4000, confidence=0.9999
    )
    assert not verdict.broken
    assert verdict.eps_lower > 0.5
    gauss = dp.m.make_gaussian(*space, scale=1.0)
    claim = adapters.opendp_claim(gauss, 1.0, delta=1e-5)
    attacked = adapters.opendp(gauss)
    verdict = ft.audit_mechanism(
        attacked, (0.0, 1.0), claim, trials=4000, confidence=0.9999, curve=GaussianCurve()
    )
    assert not verdict.broken
    assert verdict.eps_lower > 3


def opacus_parts(width):
    torch = pytest.importorskip("torch")
    pytest.importorskip("opacus")
    torch.manual_seed(0)
    x = torch.zeros((2, width))
    x[1] = 1.0 / np.sqrt(width)
    y = torch.ones(2)

    def model():
        linear = torch.nn.Linear(width, 1, bias=False)
        torch.nn.init.zeros_(linear.weight)
        return linear

    def loss(scores, y):
        return torch.nn.functional.binary_cross_entropy_with_logits(scores[:, 0], y, reduction="sum")

    return model, loss, (x[:1], y[:1]), (x, y)


@pytest.mark.filterwarnings("ignore")
def test_an_opacus_step_stands_where_floats_are_not_looked_at():
    model, loss, without, within = opacus_parts(4)
    step = adapters.OpacusStep(model, loss, noise_multiplier=1.0, clip_norm=0.25)
    verdict = ft.audit_mechanism(
        step,
        (without, within),
        step.claim(1e-5),
        statistics.Projection(),
        1000,
        0.9999,
        curve=GaussianCurve(),
    )
    assert not verdict.broken
    assert verdict.eps_lower > 2


@pytest.mark.filterwarnings("ignore")
def test_an_opacus_step_is_told_apart_by_its_float_noise():
    model, loss, without, within = opacus_parts(16_000)
    step = adapters.OpacusStep(model, loss, noise_multiplier=5.0, clip_norm=1.0)
    verdict = ft.audit_mechanism(step, (without, within), step.claim(1e-5), statistics.lowest_bit, 300)
    assert verdict.broken
