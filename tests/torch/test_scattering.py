"""Scattering: against convolutions written out, its invariances, what it refuses."""

import math

import numpy as np
import pytest
import torch

from farthing.errors import InvalidValue
from farthing.torch.features import Scattering


def images(count=3, size=16, seed=0):
    return torch.rand(count, size, size, generator=torch.Generator().manual_seed(seed))


def wavelet(padded, band, angle, orientations):
    """ψ by its formula on a torus, in numpy: independent of the library's filters."""
    width, frequency, slant = 0.8 * 2**band, 0.75 * math.pi / 2**band, 4 / orientations
    total, envelope = np.zeros((padded, padded), complex), np.zeros((padded, padded))
    for shift_r in range(-2, 3):
        for shift_c in range(-2, 3):
            r, c = np.mgrid[:padded, :padded]
            r, c = r + shift_r * padded, c + shift_c * padded
            along = c * math.cos(angle) + r * math.sin(angle)
            across = -c * math.sin(angle) + r * math.cos(angle)
            size = (
                np.exp(-(along**2 + (slant * across) ** 2) / (2 * width**2))
                * slant
                / (2 * math.pi * width**2)
            )
            total += size * np.exp(1j * frequency * along)
            envelope += size
    return total - total.sum() / envelope.sum() * envelope


def smooth(padded, scales):
    r, c = (np.minimum(x, padded - x) for x in np.mgrid[:padded, :padded])
    width = 0.8 * 2 ** (scales - 1)
    return np.exp(-(r**2 + c**2) / (2 * width**2)) / (2 * math.pi * width**2)


def convolved(x, kernel):
    return np.fft.ifft2(np.fft.fft2(x) * np.fft.fft2(kernel))


@pytest.mark.parametrize("path", [(), (0, 1), (1, 3), (0, 2, 1, 5)], ids=str)
def test_channels_are_moduli_of_convolutions(path):
    """At full resolution throughout, and only then every fourth pixel; the library folds on the way."""
    image, scattering = images(1)[0], Scattering((16, 16), orientations=6)
    x = np.pad(image.double().numpy(), 4, mode="reflect")
    for band, turn in zip(path[::2], path[1::2], strict=True):
        x = np.abs(convolved(x, wavelet(24, band, turn * math.pi / 6, 6)))
    wanted = convolved(x, smooth(24, 2)).real[::4, ::4][1:-1, 1:-1]
    place = {0: 0, 2: 1, 4: 1 + 2 * 6}[len(path)]
    if len(path) == 2:
        place += 6 * path[0] + path[1]
    elif path:
        place += 6 * path[1] + path[3]
    found = scattering(image[None])[0, place].double().numpy()
    # folding before the modulus lets some aliases in: white noise, as here, has the most of them
    assert found == pytest.approx(wanted, abs=0.06 * np.abs(wanted).max())


@pytest.mark.parametrize("path", [(0, 1), (1, 3), (0, 2, 1, 5)], ids=str)
def test_channels_are_computed_at_the_resolution_of_their_band(path):
    """To the last digits: each convolution at full resolution, then every second pixel where a band is."""
    image, scattering = images(1)[0], Scattering((16, 16), orientations=6)
    x, halved, size = np.pad(image.double().numpy(), 4, mode="reflect"), 0, 24
    for band, turn in zip(path[::2], path[1::2], strict=True):
        x = np.abs(convolved(x, wavelet(size, band, turn * math.pi / 6, 6))[:: 2**band, :: 2**band])
        halved = band
    step, kernel = 2**halved, smooth(size, 2)
    coarse = kernel[::step, ::step] * step**2
    wanted = convolved(x, coarse).real[:: 4 // step, :: 4 // step][1:-1, 1:-1]
    place = 1 + 6 * path[0] + path[1] if len(path) == 2 else 13 + 6 * path[1] + path[3]
    assert scattering(image[None])[0, place].double().numpy() == pytest.approx(wanted, abs=1e-6)


def test_shapes_and_channels():
    assert Scattering((28, 28)).channels == 81
    assert Scattering((16, 32))(torch.zeros(2, 3, 16, 32)).shape == (2, 3, 81, 4, 8)
    assert Scattering((16, 16), scales=3, orientations=4)(images()).shape == (3, 1 + 12 + 48, 2, 2)


def test_an_image_depends_on_itself_alone():
    scattering, batch = Scattering((16, 16)), images()
    alone = torch.cat([scattering(one[None]) for one in batch])
    assert torch.allclose(scattering(batch), alone, atol=1e-6)


def test_a_constant_has_no_waves_and_brightness_only_scales():
    scattering, batch = Scattering((16, 16)), images()
    flat = scattering(torch.ones(1, 16, 16))[0]
    assert torch.allclose(flat[0], torch.ones(4, 4), atol=1e-3)
    assert flat[1:].abs().max() < 1e-4
    assert torch.allclose(scattering(3 * batch), 3 * scattering(batch), rtol=1e-4, atol=1e-5)


def test_nothing_to_train_or_to_save():
    scattering = Scattering((16, 16))
    assert not list(scattering.parameters())
    assert not scattering.state_dict()


@pytest.mark.parametrize("size", [(27, 28), (4, 16)])
def test_sizes_that_do_not_fit_are_refused(size):
    with pytest.raises(InvalidValue, match="multiples"):
        Scattering(size)
    with pytest.raises(InvalidValue, match="images must be"):
        Scattering((16, 16))(torch.zeros(1, 28, 28))
