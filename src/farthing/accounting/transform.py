"""Compute M(s) = E_P[(P/Q)^s] of a dominating pair on a vertical line, with error bounds.

For s = λ + iu, λ > 0, the composition of independent steps multiplies M, so an accountant keeps
log M at the frequencies u = 0, h, 2h, ..., Kh and adds. Three numbers make that rigorous:

* ``log``: log M(λ + iu_k), each M known within ``error`` · M(λ);
* ``error``: quadrature and rounding (but that of log M itself is relative: see ``reach``). On the line
  the trapezoidal rule with step η errs by at most 2 S / (e^(2πd/η) - 1), S bounding the integral of |f|
  on the edges of the strip |Im x| < d (Trefethen & Weideman 2014, Thm. 5.1). In that strip
  |A(x+iy)| <= A(x), |B(x+iy)| >= B(x) cos(by/2) and |arg A| <= |ay|, |arg B| <= |by|, so
  S <= M(λ) exp(d²/2 + u(a+b)d) cos(bd/2)^-λ. On a half line Gauss-Legendre panels err by
  (64/15) S ρ^-2n / (1 - ρ^-2) a half panel, S bounding f on the Bernstein ellipse ρ (Trefethen 2013,
  Thm. 19.3);
* ``log_beyond``: log G with |M(λ + iu)| <= G for *every* u >= (K+1)h. Moving the line of integration to
  x + iy turns (P/Q)^(iu) into a factor e^(-u arg) that only falls as u grows, so one integral bounds
  all higher frequencies.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from farthing.accounting.pairs import (
    Allocation,
    DoubleExponential,
    Mixture,
    Pair,
    Piece,
    SeenShift,
    Shift,
    TwoPoint,
)

Real = npt.NDArray[np.float64]
Complex = npt.NDArray[np.complex128]

ROUNDING = 2.0**-52
_MARGIN = 10.0  # standard deviations kept beyond the outermost place where the integrand can peak
_TARGET = 37.0  # quadrature errors are aimed at e^-37, below rounding
_LARGEST = 1 << 15  # quadrature nodes; a pair that needs more is left to coarser bounds
_NODES = 32  # a Gauss-Legendre panel
_LONGEST = 1e6  # of anything multiplied into an exponent


@dataclass(frozen=True, slots=True)
class Contour:
    """The line Re s = ``tilt`` and its frequencies 0, ``spacing``, ..., ``count`` · ``spacing``."""

    tilt: float
    spacing: float
    count: int

    @property
    def top(self) -> float:
        """Return the first frequency that is not kept."""
        return self.spacing * (self.count + 1)


@dataclass(frozen=True)
class Transform:
    """log M on a contour, with bounds on its errors (see the module's docstring)."""

    log: Complex
    error: float
    log_beyond: float

    @cached_property
    def reach(self) -> float:
        """Return the largest |log M|, to which rounding errors of sums of logarithms are relative."""
        return float(np.abs(self.log).max())


def frequencies(contour: Contour) -> Complex:
    """Return the points s = λ + iu_k."""
    s = np.empty(contour.count + 1, dtype=np.complex128)
    s.real, s.imag = contour.tilt, contour.spacing * np.arange(contour.count + 1)
    return s


@lru_cache(maxsize=4096)
def transform(pair: Pair, contour: Contour) -> Transform | None:
    """Return the transform of one step, or None if it would take more than ``_LARGEST`` nodes.

    It is also None if logarithms are so large that their phases have no correct digits in floating point.
    """
    s, tilt, top = frequencies(contour), contour.tilt, contour.top
    farthest = float(abs(s[-1])) + 1
    match pair:
        case Shift(mu) | SeenShift(_, mu) if not mu * farthest < _LONGEST:
            return None
        case TwoPoint(epsilon) | DoubleExponential(epsilon) if not epsilon * farthest < _LONGEST**2:
            return None
        case Shift(mu):
            log = mu * mu * s * (s + 1) / 2
            size = mu * mu * farthest * farthest
            return Transform(log, _rounding(2 * size), mu * mu * (tilt * (tilt + 1) - top * top) / 2)
        case SeenShift(rate, mu):
            inner = 0.5 * mu * mu * s * (s + 1)
            edge = 0.5 * mu * mu * (tilt * (tilt + 1) - top * top)
            size = mu * mu * farthest * farthest
            return Transform(_log_seen(rate, inner), _rounding(2 * size), float(_log_seen(rate, edge)))
        case TwoPoint(epsilon):
            log = _log_sum(epsilon * s, -epsilon * (s + 1)) - math.log1p(math.exp(-epsilon))
            return Transform(log, _rounding(4 * epsilon * farthest), float(log[0].real))
        case DoubleExponential(epsilon):
            up, down = np.log((s + 1) / (2 * s + 1)), np.log(s / (2 * s + 1))
            log = _log_sum(epsilon * s + up, -epsilon * (s + 1) + down)
            return Transform(log, _rounding(4 * epsilon * farthest), float(log[0].real))
        case Mixture():
            return _mixture(pair, contour)
        case Allocation():
            return None  # such plans are composed on grids of losses


def log_moment(pair: Pair, tilt: float) -> float:
    """Return an upper bound on log M(λ), which is λ times the Rényi divergence of order λ + 1."""
    value = transform(pair, Contour(tilt, 1.0, 0))
    if value is None:
        return math.inf
    log = float(value.log[0].real)
    return log + math.log1p(value.error) + 2 * ROUNDING * abs(log)


@lru_cache(maxsize=4096)
def rough_log_moment(pair: Pair, tilt: float) -> float:
    """Return log M(λ) to about ten digits without a certified bound, for the search of a good λ."""
    if not isinstance(pair, Mixture):
        return log_moment(pair, tilt)
    logs = [_rough(piece, tilt) for piece in pair.pieces]
    if pair.atom > 0:
        logs.append(math.log(pair.atom))
    peak = max(logs)
    found = peak + math.log(sum(math.exp(log - peak) for log in logs)) if peak < math.inf else math.inf
    return max(found, 0.0)  # a log moment is never negative, but a rounded one may be


def _rough(piece: Piece, tilt: float) -> float:
    p, a, r, b = piece.p, piece.a, piece.r, piece.b
    low, high = _ends(piece, tilt)
    strip = min(3 / max(a, abs(b), 1e-9), math.sqrt(50 / (1 + 0.25 * tilt * b * b)))
    step = 2 * math.pi * strip / 50
    if not high - low < min(0.5 * _LARGEST * step, _LONGEST):
        return math.inf
    if piece.start is None:
        x = step * np.arange(math.floor(low / step), high / step + 1)
        w = np.full_like(x, step)
    else:
        panels = math.ceil((high - low) / min(4.0, strip))
        x, w = _legendre(low, (high - low) / panels, panels)
    log_f = -0.5 * x * x
    if p:
        log_f += (tilt + 1) * _log_mix(p, a, x)
    if r:
        log_f -= tilt * _log_mix(r, b, x)
    scale = float(log_f.max())
    mass = float(np.exp(log_f - scale) @ w) * piece.weight
    return scale + math.log(mass / math.sqrt(2 * math.pi))


def steepest(pair: Pair) -> float:
    """Return the tilt beyond which the far tail of A, q^(λ+1) e^(a²λ(λ+1)/2), makes up nearly all of M(λ)."""
    if not isinstance(pair, Mixture):
        return math.inf
    return max(
        (1 - 2 * math.log(piece.p) / (piece.a * piece.a + 1e-300) for piece in pair.pieces if piece.p > 0),
        default=math.inf,
    )


def _rounding(size: float) -> float:
    return float((16 + size) * ROUNDING)


def _log_seen(rate: float, x: Any) -> Any:
    """Return log(1 - q + q e^x), for real parts of any size."""
    large = np.real(x) > 0
    up, down = np.where(large, x, 0.0), np.where(large, 0.0, x)
    return np.where(large, up + np.log(rate + (1 - rate) * np.exp(-up)), np.log1p(rate * np.expm1(down)))


def _log_sum(x: Complex, y: Complex) -> Complex:
    """Return log(e^x + e^y) for Re x >= Re y."""
    result: Complex = x + np.log1p(np.exp(y - x))
    return result


def _mixture(pair: Mixture, contour: Contour) -> Transform | None:
    parts = [_integral(piece, contour) for piece in pair.pieces]
    if any(part is None for part in parts):
        return None
    found = [part for part in parts if part is not None]
    peak = max([part.log_scale for part in found] + [0.0])
    atom = pair.atom * math.exp(-peak)
    shares = [math.exp(part.log_scale - peak) for part in found]
    total: Complex = np.full(contour.count + 1, atom, dtype=np.complex128)
    beyond, error = atom, 0.0
    for part, share in zip(found, shares, strict=True):
        total += part.values * share
        beyond += part.beyond * share
        error += part.error * share
    mass = float(total[0].real)
    error = float(error / mass + 4 * ROUNDING)
    beyond = min(beyond, mass * (1 + error))
    total[total == 0.0] = 1e-300  # a value below rounding, so that the logarithm exists
    log: Complex = np.log(total)
    return Transform(log + peak, error, math.log(beyond) + peak)


@dataclass(frozen=True, slots=True)
class _Integral:
    """One piece over e^log_scale, with its weight: values, their error, a bound beyond the last frequency."""

    log_scale: float
    values: Complex
    error: float
    beyond: float


def _integral(piece: Piece, contour: Contour) -> _Integral | None:
    tilt, highest = contour.tilt, contour.spacing * contour.count
    low, high = _ends(piece, tilt)
    if not max(high, -low, piece.a, abs(piece.b)) < _LONGEST:
        return None
    rule = _line(low, high, piece, contour) if piece.start is None else _panels(low, high, piece, contour)
    if rule is None:
        return None
    x = rule.x
    log_a, log_b = _log_mix(piece.p, piece.a, x), _log_mix(piece.r, piece.b, x)
    log_f = -0.5 * x * x + (tilt + 1) * log_a - tilt * log_b - 0.5 * math.log(2 * math.pi)
    scale = float(log_f.max())
    weighed = scale + math.log(piece.weight)
    f = np.exp(log_f - scale) * rule.weights
    loss = log_a - log_b
    values = _characteristic(f, loss, contour)
    mass = values[0].real
    # beyond the nodes the integrand falls at least as fast as e^(-10 |x - end|)
    tails = math.exp(log_f[-1] - scale) / _MARGIN
    tails += math.exp(log_f[0] - scale) / _MARGIN if piece.start is None else 0.0
    # nodes, exponents, logarithms and phases each carry a few units of relative rounding
    turning = _turning(piece.p, piece.a, x, log_a) + _turning(piece.r, piece.b, x, log_b)
    each = np.abs(log_a) + np.abs(log_b) + turning * (np.abs(x) + 0.5 * max(piece.a, abs(piece.b)))
    size = float(f @ (each * (tilt + 1 + highest) + 0.5 * x * x)) / mass
    rounding = (40 + _multiplied(contour) + len(x) / 16 + 4 * size) * ROUNDING
    error = mass * (rule.error + rounding) + 2 * tails
    if contour.count == 0:
        return _Integral(weighed, values, error, mass + error)
    guess = contour.top * float(f @ turning) / mass  # where e^(y²/2) and e^(-u arg) balance
    beyond = _beyond(piece, contour, rule, scale, mass, error, rounding, guess)
    return _Integral(weighed, values, error, beyond)


def _ends(piece: Piece, tilt: float) -> tuple[float, float]:
    """Return the ends of the integrand, beyond which its logarithm has a slope of at least ten."""
    high = _MARGIN + (tilt + 1) * max(piece.a, 0.0) + tilt * max(-piece.b, 0.0)
    if piece.start is not None:
        return piece.start, max(high, piece.start + _MARGIN)
    part = 0.0  # the share of B's slope b at the left end
    if piece.b > 0 and piece.r > 0:
        log_part = math.log(piece.r) - _MARGIN * piece.b - 0.5 * piece.b * piece.b
        part = min(1.0, math.exp(log_part) / (1 - piece.r)) if piece.r < 1 else 1.0
    return -_MARGIN - tilt * part * max(piece.b, 0.0), high


def _log_mix(p: float, a: float, x: Any) -> Any:
    """Return log(1 - p + p e^(ax - a²/2))."""
    return np.zeros_like(x) if p == 0.0 else _log_blend(p, a * x - 0.5 * a * a)


def _log_blend(p: float, w: Any) -> Any:
    """Return log(1 - p + p e^w), real or complex, for tiny p > 0 and for exponents of any size."""
    large = w.real > 600.0
    low, high = np.where(large, 0.0, w), np.where(large, w, 600.0)
    result = np.log1p(p * np.expm1(low))
    if p > 0.5:  # 1 - p is exact, and is the result if e^w vanishes
        result = np.where(w.real < -1.0, np.log(1 - p + p * np.exp(low)), result)
    if large.any():
        high = high + math.log(p)
        result = np.where(large, high + np.log1p((1 - p) * np.exp(-high)), result)
    return result


def _characteristic(f: Real, loss: Real, contour: Contour) -> Complex:
    """Return Σ_n f_n exp(i k h loss_n) for k = 0..K, by two short tables of powers and their product.

    Sums run over 16 nodes at a time, so that rounding grows with a sixteenth of their number.
    """
    if contour.count == 0:
        return np.array([f.sum()], complex)
    inner, outer = _powers(loss.reshape(-1, 1, 16), contour)
    table = ((outer * f.reshape(-1, 1, 16)) @ inner.transpose(0, 2, 1)).sum(axis=0)
    values: Complex = table.reshape(-1)[: contour.count + 1]
    return values


def _powers(loss: Real, contour: Contour) -> tuple[Complex, Complex]:
    """Return exp(i k h loss) for k = 0, 1, ..., B - 1 and for k = 0, B, 2B, ..., where B² is about K.

    Repeated products need far fewer exponentials, at the cost of `_multiplied` units of rounding.
    """
    block = math.isqrt(contour.count + 1)
    blocks = -(-(contour.count + 1) // block)
    tables = []
    for count, stride in ((block, 1), (blocks, block)):
        table = np.empty((loss.shape[0], count, *loss.shape[2:]), complex)
        table[:, 0] = 1.0
        if count > 1:
            table[:, 1] = np.exp(1j * (contour.spacing * stride) * loss[:, 0])
        for k in range(2, count):
            np.multiply(table[:, k - 1], table[:, 1], out=table[:, k])
        tables.append(table)
    return tables[0], tables[1]


def _multiplied(contour: Contour) -> float:
    return 6.0 * math.sqrt(contour.count + 1)


@dataclass(frozen=True, slots=True)
class _Rule:
    """Nodes, weights, and the error relative to M(λ): on the real line, and on a line moved up."""

    x: Real
    weights: Real
    error: float
    moved_error: float


_STRIPS = np.geomspace(0.02, 0.98, 12) * math.pi
_MOVE, _ROOM = 0.75, 0.8  # the largest move of a line, and the strip around it, in radians of A or B


def _highest(piece: Piece, contour: Contour) -> float:
    """Return the largest distance by which `_beyond` moves the line: its guess is below top · (a + |b|)."""
    return min(1.2 * contour.top * (piece.a + abs(piece.b)), _MOVE / max(piece.a, abs(piece.b), 1e-9))


def _line(low: float, high: float, piece: Piece, contour: Contour) -> _Rule | None:
    """Return the trapezoidal rule; ``growth`` is log S - log M(λ) for strips of several widths."""
    radius = 1 / max(piece.a, abs(piece.b), 1e-9)
    drift = contour.spacing * contour.count * (piece.a + abs(piece.b))
    strip = np.minimum(_STRIPS * radius, 40.0)
    growth = strip**2 / 2 + drift * strip - contour.tilt * np.log(np.cos(0.5 * abs(piece.b) * strip))
    room = min(_ROOM * radius, 8.0)
    angle = abs(piece.b) * (room + _highest(piece, contour))
    moved = room**2 / 2 - contour.tilt * math.log(math.cos(0.5 * angle))
    step = min(
        float(np.max(2 * math.pi * strip / (growth + _TARGET))), 2 * math.pi * room / (moved + _TARGET)
    )
    nodes = 16 * math.ceil((high - low) / step / 16 + 1 / 16)
    if nodes > _LARGEST:
        return None
    exponent = float(np.max(2 * math.pi * strip / step - growth))
    x: Real = low + step * np.arange(nodes, dtype=np.float64)
    error, moved_error = 3 * math.exp(-exponent), 3 * math.exp(moved - 2 * math.pi * room / step)
    return _Rule(x, np.full(nodes, step), error, moved_error)


def _panels(low: float, high: float, piece: Piece, contour: Contour) -> _Rule | None:
    """Return the rule of Gauss-Legendre panels on [low, high].

    log f has a slope of at most ``slope``, so f is at most e^(slope · over) times its largest value in
    the panel on the ellipse's real extent, and that value at most 2 · slope times the integral.
    """
    turn = piece.a + abs(piece.b)
    drift = contour.spacing * contour.count * turn
    slope = _MARGIN + (contour.tilt + 1) * turn
    rho = np.geomspace(1.3, 16.0, 16)
    width, kept, moved = 8.0, -math.inf, -math.inf
    while min(kept, moved) < _TARGET and width > 1e-4:
        width /= 2
        edge = 0.25 * width * (rho - 1 / rho)
        over = 0.25 * width * (rho + 1 / rho - 2) + 0.01 * width
        gain = 2 * _NODES * np.log(rho) - edge**2 / 2 - slope * over + np.log1p(-1 / rho**2)
        gain = gain - math.log(8.6 * slope * (high - low + width))
        near, far = abs(piece.b) * edge, abs(piece.b) * (edge + _highest(piece, contour))
        kept_gain = gain - drift * edge + contour.tilt * np.log(np.cos(0.5 * np.minimum(near, 1.5)))
        moved_gain = gain + contour.tilt * np.log(np.cos(0.5 * np.minimum(far, 1.6)))
        kept = float(np.max(np.where(turn * edge < 1.5, kept_gain, -np.inf)))
        moved = float(np.max(np.where(turn * edge < _ROOM, moved_gain, -np.inf)))
    panels = math.ceil((high - low) / width)
    if panels * _NODES > _LARGEST:
        return None
    x, w = _legendre(low, width, panels)
    return _Rule(x, w, math.exp(-kept), math.exp(-moved))


_X, _W = np.polynomial.legendre.leggauss(_NODES)


def _legendre(low: float, width: float, panels: int) -> tuple[Real, Real]:
    nodes: Real = (low + width * (np.arange(panels)[:, None] + 0.5 * (_X + 1))).ravel()
    return nodes, np.tile(0.5 * width * _W, panels)


def _beyond(
    piece: Piece,
    contour: Contour,
    rule: _Rule,
    scale: float,
    mass: float,
    error: float,
    rounding: float,
    guess: float,
) -> float:
    """Return a bound on the integral's modulus for every frequency from ``contour.top`` on.

    ``guess`` is approximately the best distance by which to move the line.
    """
    x = rule.x
    rounding = 1e-13 + 2 * rounding + 8 * (contour.tilt + 1) * ROUNDING
    sign = 1.0 if piece.p > 0 else -1.0
    best = mass + error
    for height in {min(part * guess, _MOVE / max(piece.a, abs(piece.b), 0.05)) for part in (0.4, 0.8, 1.2)}:
        value = float(_modulus(piece, x, sign * height, contour, scale) @ rule.weights)
        if piece.start is not None:
            value += _side(piece, contour, height, scale)
        # the tail beyond the nodes grows by at most the strip's bound when the line is moved
        rise = 0.5 * height * height - contour.tilt * math.log(math.cos(0.5 * piece.b * height))
        slack = (error + mass * rule.moved_error) * math.exp(rise) if rise < 700 else math.inf
        best = min(best, value * (1 + rounding) + slack)
    return best


def _turning(p: float, a: float, x: Real, log_mix: Real) -> Real:
    """Return the rate at which |arg(1 - p + p e^(ax - a²/2))| grows as x leaves the real line."""
    if p == 0.0:
        return np.zeros_like(x)
    result: Real = abs(a) * np.exp(a * x - 0.5 * a * a + math.log(p) - log_mix)
    return result


def _side(piece: Piece, contour: Contour, height: float, scale: float) -> float:
    """Return the short upright side of a moved half line, where A or B is 1 - p + p e^(iay).

    Its argument is at least 0.79 p a y and its modulus at least cos(ay/2) while ay <= 3/4.
    """
    start = piece.start or 0.0
    rate = 0.79 * contour.top * (piece.p * piece.a + piece.r * piece.b)
    log_peak = 0.5 * height * height - 0.5 * start * start - 0.5 * math.log(2 * math.pi) - scale
    log_peak -= contour.tilt * math.log(math.cos(0.5 * piece.b * height))
    return math.exp(log_peak) * min(height, -math.expm1(-rate * height) / max(rate, 1e-300))


def _modulus(piece: Piece, x: Real, height: float, contour: Contour, scale: float) -> Real:
    """Return |φ A^(s+1) B^-s| at x + i·height and the first frequency not kept, divided by e^scale."""
    z: Complex = x + np.complex128(1j * height)
    log_a, log_b = _log_mix(piece.p, piece.a, z), _log_mix(piece.r, piece.b, z)
    exponent = 0.5 * height * height - 0.5 * x * x - scale - 0.5 * math.log(2 * math.pi)
    exponent = exponent + (contour.tilt + 1) * log_a.real - contour.tilt * log_b.real
    result: Real = np.exp(exponent - contour.top * (log_a.imag - log_b.imag))
    return result
