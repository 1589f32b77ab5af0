"""Define the noise that a client adds to its upload: a share of the sum's, or enough for all its records.

>>> Share(6.0, survivors=4).unit_event()
GaussianEvent(noise=6.0)
>>> ClientNoise(6.0, records=3).unit_event()
GaussianEvent(noise=2.0)
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farthing.budget import Adjacency, Observer
from farthing.noise.lattice import Stream
from farthing.queries.bounds import Bound
from farthing.queries.events import Event, GaussianEvent
from farthing.queries.mechanisms import Gaussian
from farthing.queries.samplers import FixedSize, HasEvent

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Share(Gaussian):
    """A client's share of Gaussian noise on a sum to which at least ``survivors`` clients add a share.

    The price is that of the whole ``noise_multiplier`` in the sum. On a common lattice the sum of integer
    shares is, up to a total variation below 1e-300, round(G + V) with G Gaussian of the summed variance and V
    independent of the records: post-processing of the Gaussian mechanism (the error of sampling a convolution
    at the integers is its Fourier transform beyond 2π, e^(-2π²σ²/2) with σ >= 2²⁰ cells).
    """

    survivors: int = 1

    def release(self, total: ArrayLike, bound: Bound, stream: Stream, turn: int = 0) -> Array:
        return Gaussian(self.noise_multiplier / math.sqrt(self.survivors)).release(total, bound, stream)


@dataclass(frozen=True, slots=True)
class ClientNoise(Gaussian):
    """Noise that covers all of a client's records at once; an upload holds at most ``records`` of them.

    The price is that of ``noise_multiplier`` relative to ``records`` clipping norms. If a client holds more
    records than announced, the sum is shrunk to the bound for the announced number. The noise is the client's
    own, or its share of the noise of ``survivors`` clients.
    """

    records: int = 1
    survivors: int = 1

    def unit_event(self) -> Event:
        return GaussianEvent(self.noise_multiplier / self.records)

    def event(self, bound: Bound, adjacency: Adjacency, sampled: bool) -> Event:
        return Gaussian(self.noise_multiplier / self.records).event(bound, adjacency, sampled)

    def release(self, total: ArrayLike, bound: Bound, stream: Stream, turn: int = 0) -> Array:
        most, sums = self.records * bound.norm(), np.asarray(total, dtype=np.float64)
        size = float(np.linalg.norm(sums))
        within = sums if size <= most else sums * (most / size)
        return Gaussian(self.noise_multiplier / math.sqrt(self.survivors)).release(within, bound, stream)


@dataclass(frozen=True, slots=True)
class Unhidden(FixedSize):
    """A draw without amplification, for records protected together: any drawn record reveals the unit."""

    def amplify(self, step: Event | HasEvent, observer: Observer = Observer.ANYONE) -> Event:
        return step if isinstance(step, Event) else step.unit_event()
