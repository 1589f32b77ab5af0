"""Compute image features for a small private head: scattering, and whitening of feature maps.

**Scattering** is a fixed, public transform. Bruna & Mallat 2013, "Invariant scattering convolution networks":
moduli of Morlet wavelets, then moduli of wavelets of those, each averaged over 2^J × 2^J pixels. Nothing is
learnt, and the features of an image depend on that image alone, so they cost no privacy: whatever is trained
on them is as private as if they were the records. With J = 2 and 8 orientations a 28 × 28 image becomes 81
channels of 7 × 7, and each colour of a 32 × 32 image 81 channels of 8 × 8. Tramèr & Boneh 2021 found that
private linear models of such features beat private networks that learn their own from the pixels.

>>> import torch
>>> scattering = Scattering((28, 28))
>>> features = scattering(torch.zeros(5, 28, 28))
>>> features.shape
torch.Size([5, 81, 7, 7])

**Whitening** goes by released moments: channels and places, each by a small noisy matrix. Features such as
these come as (channels, places) with means far from zero and variances that differ a thousandfold, on which
noisy descent is slow. A full matrix of second moments would drown in noise (its width is channels × places).
The two factors of it do not: with x an example's feature map, shrunk to norm 1,

    m = Σ x / n,    G = Σ (x - m)(x - m)ᵀ,    H = Σ (x - m)ᵀ(x - m),

of sizes (channels, places), (channels, channels) and (places, places), each a Gaussian answer on everybody:
x - m is shrunk to norm 1 as well, so a term of either sum has Frobenius norm at most 1. Sums are float64.
What is handed out is the public map x -> G^(-power/2) (x - m) H^(-power/2), of norm 1 again, so the rows a
linear head sees have one length and a gradient's norm depends on how wrong it is alone.

Guarantee: three promised answers, priced together with whatever the ledger's plan holds beside them (tight
accounting), under the ledger's adjacency; the map is post-processing. Promise before anything is asked:
`promised`, then the plan of training, then `whitening`.

>>> import farthing as ft
>>> features = torch.randn(3000, 4, 9) + 1.0
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
>>> promised(ledger, noise_multiplier=12.0)
>>> white = whitening(ledger, features, noise_multiplier=12.0)
>>> rows = white(features[:100])
>>> rows.shape, bool(torch.allclose(rows.norm(dim=1), torch.ones(100)))
(torch.Size([100, 36]), True)
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from farthing import validate
from farthing.errors import InvalidValue
from farthing.ledger.ledger import Ledger
from farthing.queries.bounds import ClipNorm, ClipOuter, Kind
from farthing.queries.mechanisms import Gaussian, SymmetricGaussian
from farthing.queries.query import Query, Rows
from farthing.queries.samplers import Everyone

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
        self.register_buffer("_bands", torch.stack(bands), persistent=False)
        for halved in range(scales):
            for side, length in zip(("rows", "columns"), padded, strict=True):
                low = _low_pass(length, scales, halved)
                self.register_buffer(f"_{side}_{halved}", low, persistent=False)

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
        flat = nn.functional.pad(images.reshape(-1, 1, *self.size).float(), (cell,) * 4, mode="reflect")
        waves = torch.fft.fft2(flat)
        found, second = [self._averaged(flat, 0)], []
        for j in range(self.scales):
            moved = self._modulus(waves, j, 0)
            found.append(self._averaged(moved, j))
            spectrum = torch.fft.fft2(moved) if j + 1 < self.scales else moved
            for finer in range(j + 1, self.scales):
                second.append(self._averaged(self._modulus(spectrum, finer, j), finer))
        return torch.cat(found + second, dim=1).reshape(*lead, self.channels, *(s // cell for s in self.size))

    def _modulus(self, waves: Tensor, band: int, halved: int) -> Tensor:
        """Return |x * ψ| of every channel for all orientations of a band, at resolution 2^-band."""
        filters = _folded(self._bands[band], 2**halved)
        moved: Tensor = torch.fft.ifft2(_subsampled(waves, filters, 2 ** (band - halved)))
        return moved.abs()

    def _averaged(self, pictures: Tensor, halved: int) -> Tensor:
        """Return x * φ at every 2^J-th pixel, without mirrored edges; φ is a product of rows and columns."""
        rows, columns = (self.get_buffer(f"_{side}_{halved}") for side in ("rows", "columns"))
        averaged: Tensor = rows @ pictures @ columns.T
        return averaged


def _subsampled(waves: Tensor, filters: Tensor, step: int) -> Tensor:
    """Return spectra of all filtered channels at every ``step``-th pixel: the mean over aliases.

    A frequency of the result is a product (channels, aliases) · (aliases, filters).
    """
    count, _, height, width = waves.shape
    if step == 1:
        plain: Tensor = (waves.unsqueeze(2) * filters).flatten(1, 2)
        return plain
    height, width = height // step, width // step
    places, aliases = height * width, step * step
    left = waves.reshape(-1, step, height, step, width).permute(2, 4, 0, 1, 3).reshape(places, -1, aliases)
    right = filters.reshape(-1, step, height, step, width).permute(2, 4, 1, 3, 0).reshape(places, aliases, -1)
    both: Tensor = torch.bmm(left, right / aliases).reshape(height, width, count, -1)
    return both.permute(2, 3, 0, 1)


def _folded(filters: Tensor, step: int) -> Tensor:
    """Return the spectra of filters at every ``step``-th pixel: aliases are added up."""
    height, width = filters.shape[-2] // step, filters.shape[-1] // step
    aliases: Tensor = filters.unflatten(-1, (step, width)).unflatten(-3, (step, height))
    return aliases.sum(dim=(-4, -2))


def _gabor(size: list[int], width: float, frequency: float, angle: float, slant: float) -> Tensor:
    """Return a periodic wave times a Gaussian of deviation ``width`` along ``angle``, width/slant across."""
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
    """Return the spectrum of ψ at scale 2^band: a Gabor wave minus a multiple of its envelope, of mean 0."""
    width, frequency, slant = _WIDTH * 2**band, _CENTRE / 2**band, 4 / orientations
    wave = _gabor(size, width, frequency, angle, slant)
    envelope = _gabor(size, width, 0.0, angle, slant)
    spectrum: Tensor = torch.fft.fft2(wave - wave.sum() / envelope.sum() * envelope)
    return spectrum.to(torch.complex64)


def _low_pass(length: int, scales: int, halved: int) -> Tensor:
    """Return φ along one side, from every 2^halved-th pixel to every 2^scales-th that is no mirrored edge."""
    width = _WIDTH * 2 ** (scales - 1)
    places = torch.arange(-_COPIES * length, (_COPIES + 1) * length, dtype=torch.float64)
    wave = torch.exp(-(places**2) / (2 * width**2)) * (2**halved / (math.sqrt(2 * math.pi) * width))
    wave = wave.unflatten(0, (-1, length)).sum(0)
    after, before = (torch.arange(0, length, 2**step) for step in (scales, halved))
    low: Tensor = wave[(after[1:-1, None] - before) % length].float()
    return low


POWER, RIDGE = 0.7, 0.1  # chosen on Fashion-MNIST: how far to white, and the share of mean variance added
_BLOCK = 500  # examples at a time
_SHORTEST = 2.0**-480  # of feature maps: squares of shorter ones vanish, and their norms come out too small
_NORM, _OUTER = ClipNorm(1.0), ClipOuter(1.0)


@dataclass(frozen=True, slots=True, eq=False)
class Whitening:
    """The map: public, made of released numbers."""

    mean: Tensor
    channels: Tensor
    places: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """Return rows of norm 1, one a feature map (…, channels, height, width) or (…, channels, places)."""
        mean, channels, places = (
            part.to(features.device) for part in (self.mean, self.channels, self.places)
        )
        white = (channels @ (_unit(features).float() - mean) @ places).flatten(1)
        unit: Tensor = white / white.norm(dim=1, keepdim=True).clamp_min(1e-12)
        return unit


def promised(ledger: Ledger, *, noise_multiplier: float, places: bool = True) -> None:
    """Promise the answers of `whitening`: one of a mean, one or two of matrices, at one noise multiplier."""
    event = Query(Everyone(), _Mean(), _NORM, Gaussian(noise_multiplier)).price(ledger.budget)
    outer = Query(Everyone(), _Moments(np.zeros(()), 0), _OUTER, SymmetricGaussian(noise_multiplier)).price(
        ledger.budget
    )
    matrices = 2 if places else 1
    if event == outer:
        ledger.promise(event, 1 + matrices)
        return
    ledger.promise(event, 1)
    ledger.promise(outer, matrices)


def whitening(
    ledger: Ledger,
    features: Tensor,
    *,
    noise_multiplier: float,
    records: int | None = None,
    power: float = POWER,
    ridge: float = RIDGE,
    places: bool = True,
) -> Whitening:
    """Ask for the moments of feature maps, and return the map that they make.

    ``noise_multiplier`` is each answer's, over the bound 1 of one example. ``records`` is the public number
    of examples (None: that of the features). Without ``places`` only channels are whitened, by two answers:
    for a head that looks at neighbouring places.
    """
    if features.ndim < 3 or not len(features):
        raise InvalidValue(f"features must be (examples, channels, …places), got {tuple(features.shape)}")
    count = len(features) if records is None else validate.count(records=records)
    validate.positive(ridge=ridge)
    door = ledger.over(Rows(features))
    mean = door.ask(Query(Everyone(), _Mean(), _NORM, Gaussian(noise_multiplier))).value / count
    moments = [
        door.ask(Query(Everyone(), _Moments(mean, axis), _OUTER, SymmetricGaussian(noise_multiplier))).value
        / count
        for axis in ((1, 2) if places else (1,))
    ]
    roots = [_root(matrix, -power / 2, ridge) for matrix in moments]
    if not places:
        roots.append(np.eye(mean.shape[1]))
    return Whitening(*(torch.as_tensor(part, dtype=torch.float32) for part in (mean, *roots)))


@dataclass(frozen=True, slots=True, eq=False)
class _Mean:
    """Σ x."""

    honours: ClassVar[tuple[str, ...]] = (Kind.NORM,)
    shape: ClassVar[None] = None

    def bounded_sum(self, records: Rows, w: Any, bound: ClipNorm) -> NDArray[np.float64]:
        parts = [_unit(block).sum(0) for block in records[0].split(_BLOCK)]
        return np.asarray(torch.stack(parts).sum(0).cpu().numpy()) * min(1.0, bound.clip)


@dataclass(frozen=True, slots=True, eq=False)
class _Moments:
    """Σ (x - m)(x - m)ᵀ over channels (axis 1) or over places (axis 2)."""

    mean: NDArray[np.float64]
    axis: int
    honours: ClassVar[tuple[str, ...]] = (Kind.OUTER,)
    shape: ClassVar[None] = None

    def bounded_sum(self, records: Rows, w: Any, bound: ClipOuter) -> NDArray[np.float64]:
        centre = torch.as_tensor(self.mean, device=records[0].device)
        width = centre.shape[self.axis - 1]
        total = torch.zeros(width, width, dtype=torch.float64, device=centre.device)
        for block in records[0].split(_BLOCK):
            rows = _shrunk(_unit(block) - centre, bound.clip)
            if self.axis == 2:
                rows = rows.transpose(1, 2)
            wide = rows.transpose(0, 1).flatten(1)
            total += wide @ wide.T
        return np.asarray(total.cpu().numpy())


def _unit(features: Tensor) -> Tensor:
    """Return feature maps (…, channels, places) of norm 1; those not finite, or too short, become zeros."""
    rows = features.flatten(2).double()
    norms = rows.flatten(1).norm(dim=1)
    good = torch.isfinite(norms) & (norms >= _SHORTEST)
    safe = torch.where(good, norms, 1.0)[:, None, None]
    return torch.where(good[:, None, None], rows, 0.0) / safe


def _shrunk(rows: Tensor, clip: float) -> Tensor:
    norms = rows.flatten(1).norm(dim=1)
    shrunk: Tensor = rows * (clip / norms.clamp_min(clip))[:, None, None]
    return shrunk


def _root(matrix: NDArray[np.float64], power: float, ridge: float) -> NDArray[np.float64]:
    """Return a power of a noisy matrix of moments, without negative eigenvalues and with a ridge added."""
    values, vectors = np.linalg.eigh(matrix)
    values = np.maximum(values, 0.0)
    values = values + ridge * max(float(values.mean()), 1e-300)
    found: NDArray[np.float64] = (vectors * values**power) @ vectors.T
    return found
