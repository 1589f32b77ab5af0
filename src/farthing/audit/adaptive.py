"""AdaDP and AdaL in their sound form, all runs side by side, through the house's own bounds and noise.

What sets the next clip and noise is made of released values only: E' <- γ' E' + (1 - γ') max((g̃/L)² -
(σ_i/L)², 0), s_i = min(C, β √(E' + floor²)), each example clipped to s by coordinates (`ClipCoordinates`),
one noise vector a lot. Noise over sensitivity is σ √m s_i / (√m s_i) = σ in every step, so that the price is
that of DP-SGD at σ, whatever the scales. AdaL adapts the steps alone, which is post-processing. Runs are the
coordinates of one large release here, so that noise, grid and clip are those of the library.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farthing.audit.groups import Groups
from farthing.noise.lattice import Stream
from farthing.queries.bounds import ClipCoordinates, ClipNorm
from farthing.queries.mechanisms import Gaussian

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SoundAdaDP:
    """A run's output is the path of its weights and of its noisy sums, (steps, 2, weights)."""

    rate: float = 0.1
    steps: int = 30
    noise: float = 8.0
    clip: float = 4.0
    factor: float = 1.2
    remembered: float = 0.1
    remembered_raw: float = 0.9
    gate: float = 1e-6
    step: float = 0.002
    smoothing: float = 1e-8
    floor: float = 1e-3
    noise_adapts: bool = True  # False: AdaL

    def __call__(self, data: Groups, runs: int, stream: Stream) -> Array:
        size = data.x.shape[1]
        lot = self.rate * float(data.counts[:2].sum())
        w = np.zeros((runs, size))
        seen, known = np.zeros_like(w), np.zeros_like(w)
        path = []
        for _ in range(self.steps):
            came, gradients = data.lots(self.rate, runs, stream), data.gradients(w)
            scales = np.full_like(w, self.clip / math.sqrt(size))  # σ √m scale is σ C
            if self.noise_adapts:
                local = np.sqrt(known).var(axis=1, keepdims=True) > self.gate
                adapted = np.minimum(self.clip, self.factor * np.sqrt(known + self.floor**2))
                scales = np.where(local, adapted, scales)
            bound = ClipCoordinates(scales.ravel())
            rows = np.moveaxis(gradients, 1, 0).reshape(len(data.x), -1)  # one coordinate a run and weight
            if self.noise_adapts:
                clipped = bound.apply(rows)
            else:
                clipped = ClipNorm(self.clip).apply(rows.reshape(-1, size))
            clipped = clipped.reshape(len(data.x), runs, size)
            total = np.einsum("rk,krm->rm", came, clipped)
            # in units of scale the norm of all coordinates together is √(runs m), of one run's √m
            mechanism = Gaussian(self.noise / math.sqrt(runs))
            noisy = mechanism.release(total.ravel(), bound, stream).reshape(w.shape)
            seen = (1 - self.remembered) * seen + self.remembered * np.square(noisy)
            excess = np.square(noisy / lot) - np.square(self.noise * math.sqrt(size) * scales / lot)
            known = self.remembered_raw * known + (1 - self.remembered_raw) * np.maximum(excess, 0.0)
            w = w - self.step / lot * noisy / np.sqrt(seen + self.smoothing)
            path.append(np.stack([w, noisy], axis=1))
        return np.stack(path, axis=1)
