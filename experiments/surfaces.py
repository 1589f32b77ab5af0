"""Functions of two variables on which methods of optimisation are tried, with their minima.

They are those of the list that AdaDP's authors cite ("Test functions for optimization", Wikipedia) which have
two variables and no kinks and are not hundreds wide (left out: Bukin N. 6, cross-in-tray, Eggholder, Hölder
table, Schaffer N. 2 and 4). Gradients are exact to the last digits, by a complex step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_STEP = 1e-20


@dataclass(frozen=True, slots=True, eq=False)
class Surface:
    """A function, its minima, and where descent starts.

    Where no start is given it lies a third of the way from the first minimum to ``corner``, the upper corner
    of the usual domain.
    """

    value: Callable[[Any, Any], Any]
    minima: tuple[tuple[float, float], ...]
    corner: tuple[float, float]
    begin: tuple[float, float] | None = None

    @property
    def start(self) -> tuple[float, float]:
        if self.begin is not None:
            return self.begin
        (x, y), (far, high) = self.minima[0], self.corner
        return x + (far - x) / 3, y + (high - y) / 3

    def gradient(self, points: Array) -> Array:
        """(n, 2) at n points; complex numbers carry it."""
        x, y = points.T
        parts = self.value(x + _STEP * 1j, y + 0j), self.value(x + 0j, y + _STEP * 1j)
        return np.stack([part.imag / _STEP for part in parts], axis=1)

    def distance(self, points: Array) -> Array:
        """From each point to the nearest minimum."""
        return np.min([np.linalg.norm(points - minimum, axis=1) for minimum in self.minima], axis=0)


def _ackley(x: Any, y: Any) -> Any:
    wide = np.exp(-0.2 * np.sqrt(0.5 * (x * x + y * y)))
    return -20 * wide - np.exp(0.5 * (np.cos(2 * np.pi * x) + np.cos(2 * np.pi * y)))


def _goldstein_price(x: Any, y: Any) -> Any:
    one = (x + y + 1) ** 2 * (19 - 14 * x + 3 * x**2 - 14 * y + 6 * x * y + 3 * y**2)
    other = (2 * x - 3 * y) ** 2 * (18 - 32 * x + 12 * x**2 + 48 * y - 36 * x * y + 27 * y**2)
    return (1 + one) * (30 + other)


def _levi(x: Any, y: Any) -> Any:
    one = (x - 1) ** 2 * (1 + np.sin(3 * np.pi * y) ** 2)
    return np.sin(3 * np.pi * x) ** 2 + one + (y - 1) ** 2 * (1 + np.sin(2 * np.pi * y) ** 2)


def _beale(x: Any, y: Any) -> Any:
    pairs = enumerate((1.5, 2.25, 2.625), start=1)
    return sum((constant - x + x * y**power) ** 2 for power, constant in pairs)


def _rastrigin(x: Any, y: Any) -> Any:
    return 20 + x * x + y * y - 10 * (np.cos(2 * np.pi * x) + np.cos(2 * np.pi * y))


def _easom(x: Any, y: Any) -> Any:
    return -np.cos(x) * np.cos(y) * np.exp(-((x - np.pi) ** 2) - (y - np.pi) ** 2)


def _mccormick(x: Any, y: Any) -> Any:
    return np.sin(x + y) + (x - y) ** 2 - 1.5 * x + 2.5 * y + 1


def _styblinski_tang(x: Any, y: Any) -> Any:
    return (x**4 - 16 * x**2 + 5 * x + y**4 - 16 * y**2 + 5 * y) / 2


HIMMELBLAU = ((3.0, 2.0), (-2.805118, 3.131312), (-3.779310, -3.283186), (3.584428, -1.848126))
BEALE = "Beale"
SURFACES = {
    BEALE: Surface(_beale, ((3.0, 0.5),), (4.5, 4.5), (1.0, 1.5)),
    "Ackley": Surface(_ackley, ((0.0, 0.0),), (5.0, 5.0)),
    "Booth": Surface(lambda x, y: (x + 2 * y - 7) ** 2 + (2 * x + y - 5) ** 2, ((1.0, 3.0),), (10.0, 10.0)),
    "Easom": Surface(_easom, ((np.pi, np.pi),), (6.0, 6.0)),
    "Goldstein-Price": Surface(_goldstein_price, ((0.0, -1.0),), (2.0, 2.0)),
    "Himmelblau": Surface(lambda x, y: (x * x + y - 11) ** 2 + (x + y * y - 7) ** 2, HIMMELBLAU, (5.0, 5.0)),
    "Lévi N. 13": Surface(_levi, ((1.0, 1.0),), (10.0, 10.0)),
    "Matyas": Surface(lambda x, y: 0.26 * (x * x + y * y) - 0.48 * x * y, ((0.0, 0.0),), (10.0, 10.0)),
    "McCormick": Surface(_mccormick, ((-0.547198, -1.547198),), (4.0, 4.0)),
    "Rastrigin": Surface(_rastrigin, ((0.0, 0.0),), (5.12, 5.12)),
    "Rosenbrock": Surface(lambda x, y: 100 * (y - x * x) ** 2 + (1 - x) ** 2, ((1.0, 1.0),), (2.0, 3.0)),
    "sphere": Surface(lambda x, y: x * x + y * y, ((0.0, 0.0),), (5.0, 5.0)),
    "Styblinski-Tang": Surface(_styblinski_tang, ((-2.903534, -2.903534),), (5.0, 5.0)),
    "three-hump camel": Surface(
        lambda x, y: 2 * x**2 - 1.05 * x**4 + x**6 / 6 + x * y + y * y, ((0.0, 0.0),), (5.0, 5.0)
    ),
}
