"""Feature maps whitened by released moments: channels and places, each by a small noisy matrix.

Features such as `Scattering`'s come as (channels, places) with means far from zero and variances that differ
a thousandfold, on which noisy descent is slow. A full matrix of second moments would drown in noise (its
width is channels × places). The two factors of it do not: with x an example's feature map, shrunk to norm 1,

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

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farthing import validate
from farthing.errors import InvalidValue
from farthing.ledger.ledger import Ledger
from farthing.queries.bounds import ClipNorm, ClipOuter, Kind
from farthing.queries.mechanisms import Gaussian, SymmetricGaussian
from farthing.queries.query import Query, Rows
from farthing.queries.samplers import Everyone

POWER, RIDGE = 0.7, 0.1  # chosen on Fashion-MNIST: how far to white, and the share of mean variance added
_BLOCK = 500  # examples at a time
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
    """Asks for the moments of feature maps and makes the map of them.

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
    """Feature maps (…, channels, places) of norm 1; what is not finite, or nothing, counts as nothing."""
    rows = features.flatten(2).double()
    norms = rows.flatten(1).norm(dim=1)
    good = torch.isfinite(norms) & (norms > 0)
    safe = torch.where(good, norms, 1.0)[:, None, None]
    return torch.where(good[:, None, None], rows, 0.0) / safe


def _shrunk(rows: Tensor, clip: float) -> Tensor:
    norms = rows.flatten(1).norm(dim=1)
    shrunk: Tensor = rows * (clip / norms.clamp_min(clip))[:, None, None]
    return shrunk


def _root(matrix: NDArray[np.float64], power: float, ridge: float) -> NDArray[np.float64]:
    """A power of a noisy matrix of moments, its noise below zero cut off and a share of the mean added."""
    values, vectors = np.linalg.eigh(matrix)
    values = np.maximum(values, 0.0)
    values = values + ridge * max(float(values.mean()), 1e-300)
    found: NDArray[np.float64] = (vectors * values**power) @ vectors.T
    return found
