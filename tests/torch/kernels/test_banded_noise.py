"""Correlated noise on tensors: the noise of the core, on any device and for float32 sums."""

import math
from collections import deque

import numpy as np
import pytest
import torch

from farthing.errors import InvalidValue
from farthing.noise import native
from farthing.noise.lattice import SeededStream
from farthing.queries import buffered, correlated
from farthing.queries.bounds import ClipNorm
from farthing.queries.buffered import BufferedGaussian
from farthing.torch.kernels import banded_noise
from farthing.torch.kernels.banded_noise import BandedTensorGaussian, BufferedTensorGaussian
from farthing.torch.kernels.totals import SLACK

BOUND = ClipNorm(2.0)


@pytest.fixture(params=["kernels", "torch"])
def way(request, monkeypatch):
    """By the kernels in C, where there are any, and without them."""
    if request.param == "torch":
        monkeypatch.setattr(native, "kernels", lambda work=0: None)


def less(drawn, before, column, bits):
    own = torch.from_numpy(drawn.copy())
    kept = []
    for one in reversed(before):  # as if each had been released before
        kept.insert(0, banded_noise._less(torch.from_numpy(one.copy()), [], column, bits))
    last = banded_noise._less(own, kept, column, bits)
    return own.numpy(), kept, last.numpy()


@pytest.mark.parametrize("size", [30, 70_000, 150_001])  # in one piece, and in several
@pytest.mark.parametrize("count", [0, 1, 4])
def test_noise_is_that_of_the_core_less_the_same_integers(size, count):
    rng, column, bits = np.random.default_rng(0), correlated.coefficients(5, 0.7), 22
    before = deque(rng.integers(-(2**25), 2**25, (count, size)))
    drawn = rng.integers(-(2**24), 2**24, size)
    wanted = drawn - correlated.correction(before, column, bits, (size,))
    found, kept, last = less(drawn, before, column, bits)
    assert all(one.dtype == torch.int32 for one in kept)
    difference = np.abs(found - wanted)  # a fused multiplication may decide a tie otherwise
    assert difference.max() <= 1
    assert difference.mean() < 0.01
    assert np.array_equal(last, found)


@pytest.mark.parametrize(("bands", "size"), [(2, 30), (3, 600_000), (5, 70_001), (12, 4_099), (30, 50)])
def test_several_turns_in_one_pass_are_the_turns_one_by_one(bands, size, way):
    rng, bits = np.random.default_rng(1), 22
    mechanism = BandedTensorGaussian(1.0, bands, 0.7)
    ahead, before = banded_noise._Ahead(mechanism, (size, bits), 0), deque(maxlen=bands - 1)
    slot, far = 0, 2 ** (bits + correlated.FAR)
    for turns in (1, *[ahead._ahead] * 5):
        drawn = rng.integers(-(2**24), 2**24, (turns, size))
        drawn[0, :2] = 2 * far, -2 * far  # clamped where they enter later turns
        assert not ahead._mix_part(drawn, 0, slot)
        for i, one in enumerate(drawn):
            wanted = one - correlated.correction(before, mechanism.coefficients, bits, (size,))
            found = ahead._rows[(slot + i) % len(ahead._rows), :size]
            assert np.abs(found - wanted).max() <= 1  # a tie
            assert np.mean(found != wanted) < 0.05
            before.appendleft(found.astype(np.int64))
        slot = (slot + turns) % len(ahead._rows)


@pytest.mark.parametrize("place", [0, 29])
def test_noise_that_does_not_fit_into_a_row_is_an_error(place, way):
    ahead = banded_noise._Ahead(BandedTensorGaussian(1.0, 2), (30, 22), 0)
    drawn = np.zeros((1, 30), np.int64)
    drawn[0, place] = -(2**33)
    assert ahead._mix_part(drawn, 0, 0) == 1


def test_noise_whose_rows_may_grow_without_bound_is_kept_turn_by_turn():
    total = torch.zeros(10)
    assert banded_noise._Ahead.fits(total, BandedTensorGaussian(1.0, 16, 0.9), 24)
    assert not banded_noise._Ahead.fits(total, BandedTensorGaussian(1.0, 16, 1.0), 24)
    assert not banded_noise._Ahead.fits(total, BandedTensorGaussian(1.0, 16, 0.9), 25)
    assert not banded_noise._Ahead.fits(total, BandedTensorGaussian(1.0, 1), 24)


@pytest.mark.parametrize("bits", [20, 30])  # kept in 32 bits, and in 64
def test_noise_far_out_is_clamped_alike(bits):
    column, far = correlated.coefficients(2, 0.5), np.array([2**40, -(2**40), 5])
    wanted = -correlated.correction(deque([far]), column, bits, (3,))
    found, kept, _ = less(np.zeros(3, np.int64), deque([far]), column, bits)
    assert found.tolist() == wanted.tolist()
    assert kept[0].tolist() == [2 ** (bits + 6), -(2 ** (bits + 6)), 5]


@pytest.mark.parametrize(
    ("size", "bands", "steps", "exponent"),
    [(20_000, 4, 6, 0.8), (50, 4, 6, 0.8), (2_000, 12, 30, 0.5), (5_000, 4, 6, 1.0)],
)
def test_the_noise_times_c_is_independent_noise(size, bands, steps, exponent, way):
    mechanism, stream = BandedTensorGaussian(3.0, bands, exponent), SeededStream(2)
    runs = 20_000 // size
    noise = [
        torch.stack([begun.release(torch.zeros(size), BOUND, stream, turn) for turn in range(steps)])
        for begun in (mechanism.begin() for _ in range(runs))
    ]
    noise = torch.cat(noise, dim=1).double().numpy()
    c = sum(factor * np.eye(steps, k=-j) for j, factor in enumerate(mechanism.coefficients))
    independent = c @ noise
    deviation = 3.0 * 2.0 * correlated.spread(bands, exponent) * (1 + SLACK)
    ratios = independent @ independent.T / noise.shape[1] / deviation**2
    assert np.abs(ratios - np.eye(steps)).max() < 6 * math.sqrt(2 / noise.shape[1])


def test_a_release_adds_the_sum_and_follows_a_scale():
    scale = torch.full((20_000,), 2.0)
    scale[:10_000] = 0.5
    bound = ClipNorm(1.0, scale=scale.numpy())
    total = torch.linspace(-5, 5, 20_000)
    released = BandedTensorGaussian(1.0, 2).begin().release(total, bound, SeededStream(3))
    noise = (released - total) / scale
    assert float(noise.std()) == pytest.approx(correlated.spread(2, 0.5), rel=0.05)
    assert released.dtype == torch.float32


def test_a_skipped_turn_begins_anew():
    begun, stream = BandedTensorGaussian(1.0, 3).begin(), SeededStream(4)
    first, later = (begun.release(torch.zeros(20_000), BOUND, stream, turn) for turn in (0, 2))
    assert abs(float(first @ later)) / 20_000 < 6 / math.sqrt(20_000) * 4 * correlated.spread(3, 0.5) ** 2


def turns(begun, stream, *numbers):
    return [begun.release(torch.zeros(20_000), BOUND, stream, turn) for turn in numbers]


def related(one, other):
    return float(one @ other / (one.norm() * other.norm())) < -0.1  # cancels, by 14 standard deviations


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_turn_that_was_interrupted_begins_anew(at, monkeypatch):
    begun, stream = BandedTensorGaussian(1.0, 3).begin(), SeededStream(4)
    last = turns(begun, stream, *range(at))[-1]
    seen = []

    def interrupted(total, own, *rest):
        seen.append(own.clone())
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(banded_noise.noise, "released", interrupted)
        with pytest.raises(KeyboardInterrupt):
            turns(begun, stream, at)
    again, after = turns(begun, stream, at, at + 1)  # the ledger never gives a turn twice; nor is its noise
    assert related(last, seen[0].float())
    assert not related(last, again)
    assert related(again, after)


def test_noise_that_could_not_be_made_is_an_error_and_begins_anew(monkeypatch):
    begun, stream = BandedTensorGaussian(1.0, 3).begin(), SeededStream(4)
    last = turns(begun, stream, 0)[-1]
    with monkeypatch.context() as patched:
        patched.setattr(banded_noise._Ahead, "_mix_part", lambda *_: 1)
        with pytest.raises(ArithmeticError, match="standard deviations"):
            turns(begun, stream, 1)
    assert not related(last, turns(begun, stream, 1)[0])


def test_a_forked_process_has_no_noise_of_its_parent(monkeypatch):
    begun, stream = BandedTensorGaussian(1.0, 3).begin(), SeededStream(4)
    third = turns(begun, stream, 0, 1, 2)[-1]
    number = banded_noise.os.getpid()
    monkeypatch.setattr(banded_noise.os, "getpid", lambda: number + 1)
    assert not related(third, turns(begun, stream, 3)[0])


BUFFERED = {"weights": (0.2, 0.5), "decays": (0.97, 0.6), "steps": 6, "groups": 3}


@pytest.mark.parametrize("size", [1, 5, 70_000])
def test_tensors_go_through_buffers_as_arrays_do(size):
    mechanism, bits, units = BufferedTensorGaussian(3.0, **BUFFERED), 22, 2.0**16
    rng, arrays, tensors = np.random.default_rng(0), [], []
    for _ in range(6):
        drawn = rng.integers(-(2**24), 2**24, size=size)
        own = torch.from_numpy(drawn.copy())
        tensors = banded_noise._through(own, tensors, mechanism, bits, units)
        noise = drawn - buffered.correction(arrays, mechanism.weights, units, (size,))
        arrays = buffered.followed(arrays, mechanism.decays, noise, bits, units)
        assert np.array_equal(own.numpy(), noise)
        assert all(np.array_equal(a, b.numpy()) for a, b in zip(arrays, tensors, strict=True))


def test_tensors_have_the_noise_of_arrays_and_the_slack():
    bound, size = ClipNorm(2.0), 40_000
    arrays, tensors = (kind(3.0, **BUFFERED).begin() for kind in (BufferedGaussian, BufferedTensorGaussian))
    for turn in range(6):
        wanted = arrays.release(np.zeros(size), bound, SeededStream(turn), turn).std() * (1 + SLACK)
        found = tensors.release(torch.zeros(size), bound, SeededStream(turn), turn)
        assert found.dtype is torch.float32
        assert float(found.std()) == pytest.approx(wanted, rel=0.04)  # eight standard deviations


def test_a_tensor_is_refused_beyond_the_turns_of_its_noise():
    with pytest.raises(InvalidValue, match="got turn 6"):
        BufferedTensorGaussian(3.0, **BUFFERED).begin().release(
            torch.zeros(3), ClipNorm(1.0), SeededStream(0), 6
        )
