"""Implement methods as published where that is unsound. **They guarantee nothing.**

They exist to be attacked: an audit must break them. No estimator, command or document offers them for
training, and `GUARANTEE` states what they guarantee. All runs are vectorised (`Groups`), with numpy alone;
its pseudo-random noise suffices here, since the leak is in the noise's scale.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from farthing.audit.steps import Groups, binomial, normal, uniform
from farthing.noise.lattice import Stream

Array = NDArray[np.float64]

GUARANTEE = None


@dataclass(frozen=True, slots=True)
class PublishedAdaDP:
    """AdaDP, Algorithm 1 (Xu et al. 2020); with ``learning=False`` AdaN: adaptive noise, plain steps.

    E'[g²] (line 23) and its gate (line 7) use gradients before noise, and they set the clipping norm and the
    noise of the next step (lines 9 and 12). A coordinate that no record has moved gets no noise at all, so
    its weight stays constant until the one record that moves it is drawn.

    A run's output is the path of its weights, (steps + 1, weights).
    """

    rate: float = 0.1
    steps: int = 30
    noise: float = 8.0
    clip: float = 4.0
    factor: float = 1.2  # β
    remembered: float = 0.1  # γ
    remembered_raw: float = 0.9  # γ'
    gate: float = 1e-6  # G
    step: float = 0.002  # η
    smoothing: float = 1e-8  # ε₀
    floor: float = 0.0  # added under E'; it does not make the method sound
    learning: bool = True

    def __call__(self, data: Groups, runs: int, stream: Stream) -> Array:
        size = data.x.shape[1]
        batch = self.rate * float(data.counts[:2].sum())
        w = np.zeros((runs, size))
        seen, raw = np.zeros_like(w), np.zeros_like(w)
        path = [w]
        for _ in range(self.steps):
            came = data.batches(self.rate, runs, stream)
            gradients = data.gradients(w)
            known = np.sqrt(raw + self.floor**2)
            local = known.var(axis=1, keepdims=True) > self.gate  # line 7
            limit = self.factor * known  # line 9
            norms = np.linalg.norm(gradients, axis=2, keepdims=True)
            whole = gradients / np.maximum(1.0, norms / self.clip)  # line 16
            clipped = np.where(local[:, None], np.clip(gradients, -limit[:, None], limit[:, None]), whole)
            deviation = np.where(local, self.noise * np.sqrt(size) * limit, self.clip * self.noise)
            noisy = np.einsum("rk,rkm->rm", came, clipped) + deviation * normal(stream, w.shape)
            seen = (1 - self.remembered) * seen + self.remembered * np.square(noisy)  # line 22
            mean = np.einsum("rk,rkm->rm", came, gradients) / batch
            raw = self.remembered_raw * raw + (1 - self.remembered_raw) * np.square(mean)  # line 23
            move = noisy / np.sqrt(seen + self.smoothing) if self.learning else noisy
            w = w - self.step / batch * move  # line 26
            path.append(w)
        return np.stack(path, axis=1)


@dataclass(frozen=True, slots=True)
class PublishedDpOpt:
    """Xiang, Yang & Li 2019, "Differentially-private deep learning from an optimization perspective".

    The standard deviations of a step's noise minimise the expected harm under Σ (Δ_i/σ_i)² <= 1/σ², and Δ_i
    is taken from the step's own gradient before noise. This is the closed form, σ_i² = σ² Δ_i ΣΔ, instead of
    50 steps of projected gradient descent. A run's output is the path of its weights.
    """

    rate: float = 0.1
    steps: int = 30
    noise: float = 8.0
    clip: float = 4.0
    step: float = 0.1

    def __call__(self, data: Groups, runs: int, stream: Stream) -> Array:
        batch = self.rate * float(data.counts[:2].sum())
        w = np.zeros((runs, data.x.shape[1]))
        path = [w]
        for _ in range(self.steps):
            came, gradients = data.batches(self.rate, runs, stream), data.gradients(w)
            norms = np.linalg.norm(gradients, axis=2, keepdims=True)
            clipped = gradients / np.maximum(1.0, norms / self.clip)
            moved = np.max(np.abs(clipped) * (came > 0)[:, :, None], axis=1)
            deviation = self.noise * np.sqrt(moved * moved.sum(axis=1, keepdims=True))
            noisy = np.einsum("rk,rkm->rm", came, clipped) + deviation * normal(stream, w.shape)
            w = w - self.step / batch * noisy
            path.append(w)
        return np.stack(path, axis=1)


@dataclass(frozen=True, slots=True)
class ExponentialNoisyMin:
    """DP-AGD's public code: the least of costs plus exponential noise of scale ``clip`` / ``epsilon``.

    With many candidates the smallest noises lie close together, so that a cost which grows by one clip is
    hardly ever chosen: exponential noise has no lower tail. A run's output is the index that it chose.
    """

    epsilon: float
    clip: float = 1.0

    def __call__(self, costs: Array, runs: int, stream: Stream) -> NDArray[np.int64]:
        draws = -np.log1p(-uniform(stream, runs * len(costs))).reshape(runs, -1)
        return np.asarray(np.argmin(costs + self.clip / self.epsilon * draws, axis=1))


@dataclass(frozen=True, slots=True)
class RealisedBatch:
    """DP-SGD that divides a step's noisy sum by the realised batch size, not by the expected one.

    ``data`` is the number of records, none of which moves the sum; a run's output is one row with the scale
    of each step.
    """

    rate: float = 0.5
    steps: int = 100
    noise: float = 1.0

    def __call__(self, data: int, runs: int, stream: Stream) -> Array:
        came = binomial(stream, data, self.rate, runs * self.steps).reshape(runs, -1)
        return self.noise * normal(stream, came.shape) / np.maximum(came, 1)


@dataclass(frozen=True, slots=True)
class PublishedFloatGaussian:
    """A number plus floating-point Gaussian noise, as most code has it. Its grid reveals the number."""

    noise: float = 1.0

    def __call__(self, data: float, runs: int, stream: Stream) -> Array:
        words = stream.integers(runs)
        normals = ndtri((words >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54)
        return np.asarray(data + self.noise * normals)


@dataclass(frozen=True, slots=True)
class WeightMoved:
    """Return, for each path, whether a weight moved after the first step (1 or 0)."""

    coordinate: int

    @property
    def name(self) -> str:
        return f"weight {self.coordinate + 1} moved"

    def __call__(self, paths: Array) -> Array:
        steps = paths[:, 1:, self.coordinate]
        return np.asarray((steps != steps[:, :1]).any(axis=1), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class FarthestMove:
    """Return, for each path, the longest step of a weight after the first."""

    coordinate: int

    @property
    def name(self) -> str:
        return f"longest move of weight {self.coordinate + 1}"

    def __call__(self, paths: Array) -> Array:
        return np.asarray(np.abs(np.diff(paths[:, 1:, self.coordinate], axis=1)).max(axis=1))
