"""The methods for models under their attacks: none is refuted, and the attacks have teeth."""

import pytest

torch = pytest.importorskip("torch")

from farthing.audit import deep, methods  # noqa: E402
from farthing.noise.lattice import SeededStream  # noqa: E402
from farthing.torch.kernels import noise  # noqa: E402


def test_all_are_named():
    assert tuple(methods.models()) == methods.MODELS
    assert set(methods.MODELS) <= set(methods.names())


def test_neighbours_differ_in_the_canary():
    without, within = deep.pair()
    assert len(within) == len(without) + 1
    first, second = (part.batch(torch.arange(len(without)).numpy()) for part in (without, within))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("name", ["torch-dpsgd", "torch-adadp-box"])
def test_stands_in_a_small_audit(name):
    for _, verdict in methods.attack(name, scale=0.025, confidence=0.999, stream=SeededStream(1)):
        assert not verdict.broken, verdict


@pytest.mark.slow
def test_noise_that_is_too_small_is_noticed(monkeypatch):
    real = noise.TensorGaussian.release

    def quieter(self, total, bound, stream, turn=0):
        exact = total.clone()  # which the release may write over
        return exact + (real(self, total, bound, stream) - exact) / 4

    monkeypatch.setattr(noise.TensorGaussian, "release", quieter)
    verdicts = [v for _, v in methods.attack("torch-dpsgd", scale=0.1, stream=SeededStream(4))]
    assert any(verdict.broken for verdict in verdicts)
