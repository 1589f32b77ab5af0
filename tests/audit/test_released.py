"""Statistics as people call them, attacked end to end; half of the noise is noticed."""

import pytest

from farthing.audit import methods
from farthing.noise.lattice import SeededStream
from farthing.statistics import spending


@pytest.mark.slow
@pytest.mark.parametrize("name", ["count-released", "mean-released", "quantiles-released", "bounds-released"])
def test_a_statistic_stands_end_to_end(name: str) -> None:
    for _, verdict in methods.attack(name, scale=0.3, confidence=0.999, stream=SeededStream(1)):
        assert not verdict.broken, verdict


@pytest.mark.slow
def test_a_third_of_the_noise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = spending.Laplace.release
    monkeypatch.setattr(
        spending.Laplace, "release", lambda self, total, *rest: total + (real(self, total, *rest) - total) / 3
    )
    found = methods.attack("count-released", stream=SeededStream(4))
    assert any(verdict.broken for _, verdict in found)
