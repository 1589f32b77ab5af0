"""M(s) on a line: against integrals of high precision, and its bound beyond the last frequency."""

import math

import mpmath
import numpy as np
import pytest

from farthing.accounting.pairs import (
    DoubleExponential,
    Mixture,
    Piece,
    SeenShift,
    Shift,
    TwoPoint,
    _symmetric,
)
from farthing.accounting.transform import (
    Contour,
    frequencies,
    log_moment,
    rough_log_moment,
    steepest,
    transform,
)

PAIRS = {
    "add": Mixture((Piece(0.05, 0.8, 0.0, 0.0),)),
    "remove": Mixture((Piece(0.0, 0.0, 0.05, 0.8),)),
    "replace": Mixture((Piece(0.3, 1.1, 0.3, -1.1),)),
    "add, large shift": Mixture((Piece(1e-3, 4.0, 0.0, 0.0),)),
    "remove, nearly always": Mixture((Piece(0.0, 0.0, 1 - 1e-13, 1.0),)),
    "fixed size": _symmetric(0.1, 1.0),
    "fixed size, small shift": _symmetric(0.01, 0.1),
    "shift": Shift(0.4),
    "seen": SeenShift(0.1, 0.7),
    "pure": TwoPoint(0.7),
    "laplace": DoubleExponential(1.3),
}
CONTOURS = [Contour(0.4, 0.06, 40), Contour(4.0, 0.6, 60), Contour(30.0, 4.5, 30)]


LONG = np.longdouble
PANEL, WEIGHTS = np.polynomial.legendre.leggauss(40)


def exact(pair, tilt, u, scale):
    """M(λ + iu) e^-scale in extended precision, by short Gauss panels, or in closed form."""
    if isinstance(pair, Mixture):
        total = np.array([pair.atom * np.exp(-LONG(scale)), 0], LONG)
        for piece in pair.pieces:
            total += _piece(piece, tilt, u, scale)
        return total[0] + 1j * total[1]
    with mpmath.workdps(40):
        s = mpmath.mpc(tilt, u)
        match pair:
            case Shift(mu):
                value = mpmath.exp(mpmath.mpf(mu) ** 2 * s * (s + 1) / 2)
            case SeenShift(rate, mu):
                value = 1 - mpmath.mpf(rate) + rate * mpmath.exp(mpmath.mpf(mu) ** 2 * s * (s + 1) / 2)
            case TwoPoint(epsilon):
                up = 1 / (1 + mpmath.exp(-mpmath.mpf(epsilon)))
                value = up * mpmath.exp(epsilon * s) + (1 - up) * mpmath.exp(-epsilon * s)
            case DoubleExponential(epsilon):  # e^-|x| / 2 against the same at ε
                e = mpmath.mpf(epsilon)
                value = (mpmath.exp(s * e) + mpmath.exp(-s * e - e)) / 2
                value += (mpmath.exp(s * e) - mpmath.exp(-s * e - e)) / (2 * (2 * s + 1))
        return complex(value * mpmath.exp(-mpmath.mpf(scale)))


def _piece(piece, tilt, u, scale):
    low = -12 - tilt * max(piece.b, 0) if piece.start is None else piece.start
    high = max(12 + (tilt + 1) * piece.a + tilt * max(-piece.b, 0), low + 12)
    width = min(0.1, 20 / (1 + u * (piece.a + abs(piece.b))))
    panels = np.arange(int((high - low) / width) + 1, dtype=LONG)
    x = (LONG(low) + LONG(width) * (panels[:, None] + (1 + PANEL.astype(LONG)) / 2)).ravel()
    weights = np.tile(WEIGHTS.astype(LONG), panels.size) * width / 2
    p, a, r, b = map(LONG, (piece.p, piece.a, piece.r, piece.b))
    log_a = np.log((1 - p) + p * np.exp(a * x - a * a / 2))
    log_b = np.log((1 - r) + r * np.exp(b * x - b * b / 2))
    log_f = (LONG(tilt) + 1) * log_a - LONG(tilt) * log_b - x * x / 2 - np.log(2 * LONG(math.pi)) / 2
    f, phase = weights * np.exp(log_f - LONG(scale)), LONG(u) * (log_a - log_b)
    return np.array([np.sum(f * np.cos(phase)), np.sum(f * np.sin(phase))])


def gap_of(pair, contour, found, k):
    """|computed - true| / M(λ), and what is allowed: log M itself is rounded, as every logarithm is."""
    scale = float(found.log[0].real)
    s = frequencies(contour)[k]
    truth = exact(pair, s.real, s.imag, scale)
    return abs(np.exp(found.log[k] - scale) - truth), found.error + 4 * 2**-52 * (1 + found.reach)


@pytest.mark.parametrize("contour", CONTOURS, ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_values_within_their_error(name, contour):
    pair = PAIRS[name]
    found = transform(pair, contour)
    assert found.error < 1e-8
    for k in (0, 1, contour.count // 2, contour.count):
        gap, allowed = gap_of(pair, contour, found, k)
        assert gap <= allowed


@pytest.mark.parametrize("contour", CONTOURS, ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_beyond_bounds_all_higher_frequencies(name, contour):
    pair = PAIRS[name]
    found = transform(pair, contour)
    for far in (1.0, 1.03, 1.3, 2.0, 5.0, 17.0):
        assert abs(exact(pair, contour.tilt, contour.top * far, found.log_beyond)) <= 1 + 1e-12
    assert found.log_beyond <= found.log[0].real + 2 * found.error


@pytest.mark.parametrize("seed", range(40))
def test_random_pairs(seed):
    rng = np.random.default_rng(seed)
    rate, shift = 10 ** rng.uniform(-6, 0), 10 ** rng.uniform(-2.5, 0.7)
    pair = [
        Mixture((Piece(rate, shift, 0.0, 0.0),)),
        Mixture((Piece(0.0, 0.0, rate, shift),)),
        Mixture((Piece(rate, shift, rate, -shift),)),
        _symmetric(rate, shift),
    ][seed % 4]
    tilt = 10 ** rng.uniform(-1, 1.2)
    contour = Contour(tilt, tilt * rng.uniform(0.02, 0.3), int(rng.integers(1, 90)))
    found = transform(pair, contour)
    for k in {0, contour.count // 2, contour.count}:
        gap, allowed = gap_of(pair, contour, found, k)
        assert gap <= allowed
    for far in (1.0, 1.7, 4.1, 30.0):
        assert abs(exact(pair, tilt, contour.top * far, found.log_beyond)) <= 1 + 1e-12


def test_quadrature_does_not_depend_on_the_frequencies():
    pair = PAIRS["replace"]
    coarse, fine = transform(pair, Contour(3.0, 0.5, 20)), transform(pair, Contour(3.0, 0.5, 300))
    gap = np.abs(np.exp(coarse.log) - np.exp(fine.log[:21])) / np.exp(coarse.log[0].real)
    assert gap.max() <= coarse.error + fine.error


def test_moment_is_rounded_up():
    for pair in PAIRS.values():
        for tilt in (1e-3, 0.5, 7.0):
            found = log_moment(pair, tilt)
            off = float(np.log(exact(pair, tilt, 0.0, found).real))  # log of true over found
            assert -1e-11 < off <= 1e-17


def test_too_wild_is_none():
    assert transform(Mixture((Piece(0.5, 1e4, 0.0, 0.0),)), Contour(100.0, 1.0, 10)) is None
    assert transform(Mixture((Piece(0.5, 1e300, 0.0, 0.0),)), Contour(1.0, 1.0, 10)) is None
    assert transform(_symmetric(0.5, 1e7), Contour(1.0, 1.0, 10)) is None
    assert transform(Shift(1e200), Contour(1.0, 1.0, 10)) is None
    assert transform(TwoPoint(1e200), Contour(1.0, 1.0, 10)) is None
    assert log_moment(Shift(1e200), 1.0) == math.inf


def test_steepest():
    assert steepest(Shift(1.0)) == math.inf
    assert steepest(Mixture((Piece(0.0, 0.0, 0.1, 1.0),))) == math.inf
    assert steepest(Mixture((Piece(0.1, 1.0, 0.0, 0.0),))) == pytest.approx(1 + 2 * math.log(10))
    assert steepest(Mixture((Piece(0.1, 1e-200, 0.0, 0.0),))) > 1e100


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("tilt", [0.05, 1.0, 13.0])
def test_rough_moments_are_close(name, tilt):
    assert rough_log_moment(PAIRS[name], tilt) == pytest.approx(
        log_moment(PAIRS[name], tilt), rel=1e-6, abs=1e-9
    )
