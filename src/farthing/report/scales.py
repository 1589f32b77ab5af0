"""Axes: from values to places on paper, and which values to write beside them.

>>> Scale(0, 1, 50, 450)(0.5)
250.0
>>> Scale(0, 1, 50, 450).ticks(5)
[0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]
>>> Scale(1e-8, 1e-2, 0, 100, log=True).ticks(4)
[1e-08, 1e-06, 0.0001, 0.01]
"""

import math
from dataclasses import dataclass

from farthing.report.words import RAISED, number


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from ``low`` to ``high`` at places from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * share

    def ticks(self, most: int) -> list[float]:
        """About ``most`` round values, within the ends."""
        return self._powers(most) if self.log else self._steps(most)

    def _steps(self, most: int) -> list[float]:
        step = _step((self.high - self.low) / most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [place * step for place in range(first, last + 1)]

    def _powers(self, most: int) -> list[float]:
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        if last - first >= 2:
            every = math.ceil((last - first) / max(1, most - 1))
            return [_ten(power) for power in range(first, last + 1) if (power - first) % every == 0]
        for parts in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
            found = [part * _ten(power) for power in range(first - 1, last + 1) for part in parts]
            found = [v for v in found if self.low * (1 - 1e-9) <= v <= self.high * (1 + 1e-9)]
            if len(found) >= 2:
                return found
        return [self.low, self.high]

    def words(self, values: list[float]) -> list[str]:
        """The ticks as written: all with as many digits as the step asks for."""
        if self.log and values and min(values) < 1e-4 and all(_is_power(value) for value in values):
            return [f"10{str(round(math.log10(value))).translate(RAISED)}" for value in values]
        if self.log or len(values) < 2:
            return [number(value, 3) for value in values]
        step = values[1] - values[0]
        if max(map(abs, values)) >= 1e7 or step < 1e-5:
            return [number(value, 3) for value in values]
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        digits += round(step * 10**digits, 6) % 1 > 0  # a step of 2.5
        return [f"{value:,.{digits}f}" for value in values]


def _is_power(value: float) -> bool:
    return value == _ten(round(math.log10(value)))


def _ten(power: int) -> float:
    return float(f"1e{power}")


def _step(rough: float) -> float:
    unit = 10.0 ** math.floor(math.log10(rough))
    return next(unit * part for part in (1, 2, 2.5, 5, 10) if unit * part >= rough * (1 - 1e-9))


def around(values: list[float], *, log: bool = False, zero: bool = False) -> tuple[float, float]:
    """Ends that hold all values with a little air; from 0 on where that is asked for."""
    low, high = min(values), max(values)
    if log:
        air = max((high / low) ** 0.06, 1.25)
        return low / air, high * air
    if zero:
        return 0.0, (high or 1.0) * 1.08
    air = max(0.08 * (high - low), 0.005 * abs(high), 1e-9)
    return low - air, high + air
