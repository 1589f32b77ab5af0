"""Compute δ(ε) from M on one vertical line, as a certified upper bound.

With L the privacy loss and M(s) = E[e^(sL)], for any λ > 0

    δ(ε) = E[(1 - e^(ε-L))₊] = 1/2π ∫ M(s) e^(-sε) / (s(s+1)) du,   s = λ + iu,

because ∫ e^(-st) (1 - e^(-t)) dt = 1/(s(s+1)). The tilt λ puts the line through the saddle point, so
the result has *relative* precision however small δ is. Four errors remain; every one is bounded:

1. **Discretisation and wrap-around.** By Poisson's summation formula, summing at spacing h instead of
   integrating returns Σ_m δ(ε + mw) e^(λmw) with w = 2π/h: the truth plus terms that are never
   negative. Nothing has to be added; the sum can only over-report.
2. **Truncation** at K frequencies: |M(λ + iu)| <= G for u > Kh (see `transform`), and the rest sums to
   at most e^(-λε) G / (π h K).
3. **Quadrature** of M and 4. **rounding**: each M is known within error · M(λ), so the product of
   all is known within expm1(Σ error) · ΠM(λ), plus the rounding of phases.

If G decays too slowly (few steps), a small Gaussian step of size η is composed in as well: it can only raise
δ, and multiplies the terms beyond K by e^(-η²u²/2).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from farthing.accounting.transform import ROUNDING, Complex, Contour, Transform, frequencies

_FARTHEST = 1e12
_SHARE = 1e-7  # truncation is brought below this part of δ, by smoothing if needed


@dataclass(slots=True)
class Line:
    """log M of everything composed so far, on one contour, in one direction."""

    contour: Contour
    log: Complex
    error: float = 0.0
    log_beyond: float = 0.0
    adds: int = 0
    reach: float = 0.0  # Σ of the largest |log M| of every step
    weak: bool = False  # whether the last bound needed smoothing: more frequencies would tighten it
    loose: bool = False  # whether errors were a large part of it: another line may be tighter
    coarse: bool = False  # whether its frequencies are too far apart, so that much mass wraps around
    slack: float = 0.0  # the share of errors other than truncation in the last bound

    @classmethod
    def empty(cls, contour: Contour) -> "Line":
        """Return the line of an empty composition."""
        return cls(contour, np.zeros(contour.count + 1, complex))

    def add(self, step: Transform, count: int = 1) -> None:
        """Compose ``count`` more steps."""
        self.log += step.log * count
        self.error += step.error * count
        self.log_beyond += step.log_beyond * count
        self.adds += 1
        self.reach += step.reach * count

    @property
    def log_mass(self) -> float:
        """Return log M(λ), rounded up."""
        return float(self.log[0].real) + self.error + self.adds * ROUNDING * abs(float(self.log[0].real))

    @property
    def is_poor(self) -> bool:
        """Return whether there were too few frequencies: smoothed, or too far apart."""
        return self.weak or self.coarse or not math.isfinite(self.error)

    def chernoff(self, epsilon: float) -> float:
        """Return log of the Rényi bound on δ(ε) at order λ + 1 (Canonne, Kamath & Steinke 2020, Prop. 12)."""
        return min(0.0, self.log_mass - self.contour.tilt * epsilon + log_factor(self.contour.tilt))

    def log_delta(self, epsilon: float) -> float:
        """Return the log of a certified upper bound on δ(ε)."""
        if not math.isfinite(self.error):
            self.loose, self.slack = True, 1.0
            return 0.0
        bound = self.chernoff(epsilon)
        if not epsilon * self.contour.top < _FARTHEST:  # phases would lose all digits
            return bound
        total, excess, self.slack = self._sum(epsilon, 0.0)
        bound = min(bound, total)
        self.weak = bool(excess > 0.0)
        self.loose = self.weak or self.slack > _SHARE
        if self.weak:
            bound = min(bound, self._sum(epsilon, 2 * excess / self.contour.top**2)[0])
        return bound

    def _sum(self, epsilon: float, smoothing: float) -> tuple[float, float, float]:
        """Return log δ, the excess of the log of the truncation error, and the other errors' share of δ."""
        s, kernel, weight = _kernel(self.contour)
        tilt, spacing, top = self.contour.tilt, self.contour.spacing, self.contour.top
        exponent = self.log - s * epsilon
        log_beyond = self.log_beyond + self.error - tilt * epsilon
        phase = (self.adds + 2) * self.reach + 2 * float(abs(s[-1])) * epsilon
        if smoothing:
            exponent = exponent + 0.5 * smoothing * s * (s + 1)
            phase += smoothing * (top + tilt + 1) ** 2
            log_beyond += 0.5 * smoothing * (tilt * (tilt + 1) - top * top)
        scale = float(exponent[0].real)
        with np.errstate(over="ignore", invalid="ignore"):
            total = float((np.exp(exponent - scale) * kernel).real.sum())
        if not math.isfinite(total):  # errors overflow: this line gives no bound
            return 0.0, 0.0, 1.0
        relative = self.error + (2 * phase + 64 + len(s)) * ROUNDING
        slack = weight * (math.expm1(relative) if relative < 1 else math.inf)
        beyond = log_beyond - scale - math.log(math.pi * spacing * max(self.contour.count, 0.5))
        value = max(total, 0.0) + slack + math.exp(min(beyond, 700.0))
        excess = beyond - math.log(_SHARE * max(total, slack, 1e-300))
        return min(0.0, scale + math.log(value)), excess, slack / value


def log_factor(tilt: float) -> float:
    """Return log sup_t (1 - e^-t) e^(-λt), the factor by which M(λ) e^(-λε) bounds δ(ε)."""
    return -tilt * math.log1p(1 / tilt) - math.log1p(tilt)


_KERNELS: dict[Contour, tuple[Complex, Complex, float]] = {}


def _kernel(contour: Contour) -> tuple[Complex, Complex, float]:
    """Return s, (h/π) / (s(s+1)) with half weight at u = 0, and the sum of its moduli."""
    if contour not in _KERNELS:
        if len(_KERNELS) > 512:
            _KERNELS.clear()
        s = frequencies(contour)
        kernel = contour.spacing / math.pi / (s * (s + 1))
        kernel[0] /= 2
        _KERNELS[contour] = s, kernel, float(np.abs(kernel).sum())
    return _KERNELS[contour]


def smallest(
    holds: Callable[[float], float],
    low: float,
    high: float,
    relative: float = 1e-10,
    absolute: float = 1e-14,
) -> float:
    """Return a small x in the bracket with ``holds(x) <= 0``, which must be true of ``high``.

    A secant search kept inside the bracket. The result has been checked, so errors of the search only cost
    tightness.
    """
    at_low, at_high = holds(low), holds(high)
    if at_low <= 0:
        return low
    for turn in range(100):
        tolerance = relative * abs(high) + absolute
        if high - low <= tolerance:
            break
        secant = turn % 3 != 2 and math.isfinite(at_low - at_high) and at_low > at_high
        x = low + (high - low) * at_low / (at_low - at_high) if secant else (low + high) / 2
        nudge = 0.25 * tolerance
        x = min(max(x + nudge, low + nudge), high - nudge)
        value = holds(x)
        if value <= 0:
            high, at_high = x, value
        else:
            low, at_low = x, value
    return high
