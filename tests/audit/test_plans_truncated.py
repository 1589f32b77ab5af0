"""The attack on truncated batches: it respects their price, and breaks planted bugs."""

import numpy as np
import pytest

import farthing as ft
from farthing.audit import plans
from farthing.audit.plans import TruncatedBandedTarget, TruncatedTarget
from farthing.noise.lattice import SeededStream

TARGET = TruncatedTarget(runs=6000)


def broken(target=TARGET):
    return target.verdicts(1.0, 0.999999, SeededStream(0), lambda: None)[0].broken


def test_the_price_of_truncated_batches_is_not_refuted():
    assert not broken()


def test_a_tail_that_is_not_charged_is_refuted(monkeypatch):
    free = type("Free", (ft.TruncatedPoisson,), {"amplify": lambda self, step: ft.Poisson(0.9).amplify(step)})
    monkeypatch.setattr(plans, "TruncatedPoisson", free)
    assert broken()


def test_a_full_batch_that_is_skipped_is_refuted(monkeypatch):
    """Eight records, of which the batch holds seven: the canary makes it overflow, and the sum vanish."""

    class Skipped(ft.TruncatedPoisson):
        def draw(self, records, stream, turn=0):
            drawn = ft.Poisson(self.sampling_rate).draw(records, stream)
            return drawn if len(drawn) <= self.max_batch_size else drawn[:0]

    class Known(TruncatedTarget):
        def _density(self, present, answers):
            total = -self.others + (self.others if present else 0)  # all are drawn, nearly
            return np.exp(-(((answers - total) / self.noise_multiplier) ** 2) / 2) + 1e-300

    monkeypatch.setattr(plans, "TruncatedPoisson", Skipped)
    assert broken(Known(others=7, sampling_rate=0.98, max_batch_size=7, noise_multiplier=6.0, runs=4000))


BANDED = TruncatedBandedTarget(runs=3000)


def test_the_price_of_truncated_batches_in_turns_is_not_refuted():
    assert not broken(BANDED)


def test_a_tail_of_a_group_that_is_not_charged_is_refuted(monkeypatch):
    def amplify(self, step, observer=None):
        return ft.Poisson(self.rate).amplify(step)

    monkeypatch.setattr(plans, "TruncatedCyclic", type("Free", (ft.TruncatedCyclic,), {"amplify": amplify}))
    assert broken(TruncatedBandedTarget(runs=6000))


@pytest.mark.parametrize("present", [False, True])
def test_the_law_of_a_turn_is_that_of_its_sums(present):
    totals, stream = np.arange(-BANDED.max_batch_size, 2.0), SeededStream(int(present))
    law = BANDED._law(20, present, totals)
    assert law.sum() == pytest.approx(1.0)
    values, sampler = np.array([1.0] * present + [-1.0] * 20), BANDED.sampler().within_group
    sums = [values[sampler.draw(len(values), stream)].sum() for _ in range(20_000)]
    assert np.mean(sums) == pytest.approx(law @ totals, abs=0.05)


@pytest.mark.parametrize("present", [False, True])
def test_the_density_is_that_of_the_answers(present):
    answers = np.linspace(-30, 12, 8001)
    density = TARGET._density(present, answers)
    mean = float(density @ answers / density.sum())
    stream, sampler = SeededStream(int(present)), TARGET.sampler()
    values = np.array([1.0] * present + [-1.0] * TARGET.others)
    sums = [values[sampler.draw(len(values), stream)].sum() for _ in range(20_000)]
    assert np.mean(sums) == pytest.approx(mean, abs=0.05)
