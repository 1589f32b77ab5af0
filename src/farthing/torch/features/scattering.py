"""Scattering features of images: a fixed, public transform that a small private head can be trained on.

Bruna & Mallat 2013, "Invariant scattering convolution networks": moduli of Morlet wavelets, then moduli of
wavelets of those, each averaged over 2^J × 2^J pixels. Nothing is learnt, and the features of an image depend
on that image alone, so they cost no privacy: whatever is trained on them is as private as if they were the
records. With J = 2 and 8 orientations a 28 × 28 image becomes 81 channels of 7 × 7, and each colour of a
32 × 32 image 81 channels of 8 × 8. Tramèr & Boneh 2021 found that private linear models of such features beat
private networks that learn their own from the pixels.

>>> import torch
>>> scattering = Scattering((28, 28))
>>> features = scattering(torch.zeros(5, 28, 28))
>>> features.shape
torch.Size([5, 81, 7, 7])
"""

import math

import torch
from torch import Tensor, nn

from farthing import validate
from farthing.errors import InvalidValue

_WIDTH, _CENTRE = 0.8, 0.75 * math.pi  # of the smallest wavelet: deviation in pixels, and frequency
_COPIES = 2  # periods on each side that a filter is summed over


class Scattering(nn.Module):
    """A scattering transform of order two, of images (..., height, width) of one public size.

    Its filters are buffers and follow the module to its device; there is nothing to train. Edges mirror.

    Parameters
    ----------
    size : tuple of int
        Height and width, multiples of 2^scales.
    scales : int, default 2
        J: an image is averaged over 2^J pixels each way.
    orientations : int, default 8
        L. There are 1 + J L + L² J (J - 1)/2 channels, the coarsest first.

    Examples
    --------
    >>> tuple(Scattering((28, 28))(torch.zeros(5, 28, 28)).shape)
    (5, 81, 7, 7)
    """

    _low: Tensor
    _bands: Tensor

    def __init__(self, size: tuple[int, int], scales: int = 2, orientations: int = 8) -> None:
        super().__init__()
        self.scales = validate.count(scales=scales)
        self.orientations = validate.count(orientations=orientations)
        cell = 2**scales
        if any(side % cell or side < 2 * cell for side in size):
            raise InvalidValue(f"size must be multiples of 2^scales = {cell}, at least two, got {size!r}")
        self.size = size
        padded = [side + 2 * cell for side in size]
        bands = [
            torch.stack(
                [_morlet(padded, j, k * math.pi / orientations, orientations) for k in range(orientations)]
            )
            for j in range(scales)
        ]
        self.register_buffer("_low", _low_pass(padded, scales), persistent=False)
        self.register_buffer("_bands", torch.stack(bands), persistent=False)

    @property
    def channels(self) -> int:
        """Return the number of channels that come out."""
        order = self.orientations
        return 1 + self.scales * order + order**2 * self.scales * (self.scales - 1) // 2

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-2:] != self.size:
            raise InvalidValue(f"images must be {self.size}, got {tuple(images.shape[-2:])}")
        lead, cell = images.shape[:-2], 2**self.scales
        flat = images.reshape(-1, 1, *self.size).float()
        waves = torch.fft.fft2(nn.functional.pad(flat, (cell,) * 4, mode="reflect"))
        found = [self._averaged(waves, 0)]
        second = []
        for j in range(self.scales):
            moved = self._modulus(waves, j, 0)
            found.append(self._averaged(moved, j))
            for finer in range(j + 1, self.scales):
                both = self._modulus(moved.unsqueeze(2), finer, j)
                second.append(self._averaged(both.flatten(1, 2), finer))
        return torch.cat(found + second, dim=1).reshape(*lead, self.channels, *(s // cell for s in self.size))

    def _modulus(self, waves: Tensor, band: int, halved: int) -> Tensor:
        """Spectrum of |x * ψ| for all orientations of a band, at resolution 2^-band."""
        filters = _folded(self._bands[band], 2**halved, filters=True)
        moved: Tensor = torch.fft.ifft2(_folded(waves * filters, 2 ** (band - halved)))
        spectrum: Tensor = torch.fft.fft2(moved.abs())
        return spectrum

    def _averaged(self, waves: Tensor, halved: int) -> Tensor:
        """x * φ at every 2^J-th pixel, less the mirrored edges."""
        low = _folded(self._low, 2**halved, filters=True)
        smooth = _folded(waves * low, 2 ** (self.scales - halved))
        averaged: Tensor = torch.fft.ifft2(smooth).real
        return averaged[..., 1:-1, 1:-1]


def _folded(waves: Tensor, step: int, *, filters: bool = False) -> Tensor:
    """Return the spectrum of every ``step``-th pixel: aliases are averaged, those of a filter added up."""
    if step == 1:
        return waves
    height, width = waves.shape[-2] // step, waves.shape[-1] // step
    aliases: Tensor = waves.unflatten(-1, (step, width)).unflatten(-3, (step, height))
    return aliases.sum(dim=(-4, -2)) if filters else aliases.mean(dim=(-4, -2))


def _gabor(size: list[int], width: float, frequency: float, angle: float, slant: float) -> Tensor:
    """A Gaussian of deviation ``width`` along ``angle`` and width/slant across, times a wave; periodic."""
    height, length = size
    rows = torch.arange(-_COPIES * height, (_COPIES + 1) * height, dtype=torch.float64)[:, None]
    columns = torch.arange(-_COPIES * length, (_COPIES + 1) * length, dtype=torch.float64)[None, :]
    along = columns * math.cos(angle) + rows * math.sin(angle)
    across = -columns * math.sin(angle) + rows * math.cos(angle)
    size_of = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * width**2))
    whole = size_of * torch.exp(1j * frequency * along) * (slant / (2 * math.pi * width**2))
    copies = 2 * _COPIES + 1
    copied: Tensor = whole.unflatten(0, (copies, height)).unflatten(-1, (copies, length))
    return copied.sum(dim=(0, 2))


def _morlet(size: list[int], band: int, angle: float, orientations: int) -> Tensor:
    """Spectrum of ψ at scale 2^band: a Gabor wave less as much of its envelope as makes its mean zero."""
    width, frequency, slant = _WIDTH * 2**band, _CENTRE / 2**band, 4 / orientations
    wave = _gabor(size, width, frequency, angle, slant)
    envelope = _gabor(size, width, 0.0, angle, slant)
    spectrum: Tensor = torch.fft.fft2(wave - wave.sum() / envelope.sum() * envelope)
    return spectrum.to(torch.complex64)


def _low_pass(size: list[int], scales: int) -> Tensor:
    """Spectrum of φ."""
    spectrum: Tensor = torch.fft.fft2(_gabor(size, _WIDTH * 2 ** (scales - 1), 0.0, 0.0, 1.0))
    return spectrum.to(torch.complex64)
