"""Text for a report: escaped, free of what cannot be seen, and numbers that people can read.

>>> escape('<b>"x"</b>')
'&lt;b&gt;&quot;x&quot;&lt;/b&gt;'
>>> number(0.0001), number(32561), number(1e-5), number(0.9468), number(math.inf)
('0.0001', '32,561', '10⁻⁵', '0.9468', 'infinite')
"""

import html
import math
import unicodedata

from farthing.queries.events import (
    ApproximateEvent,
    BoundedRangeEvent,
    ComposedEvent,
    DrawnEvent,
    Event,
    FixedSizeEvent,
    GaussianEvent,
    LaplaceEvent,
    PoissonEvent,
    PureEvent,
    RepeatedEvent,
    ZcdpEvent,
)

_UNSEEN = {"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"}  # control, direction, halves of pairs, nothing at all
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_MOST = 300


def plain(text: object, most: int = _MOST) -> str:
    """What may be shown of a text: nothing unseen, nothing endless.

    A mark that turns the direction of what follows, or a null, is shown as a replacement character.
    """
    said = " ".join(str(text)[: 4 * most].split())
    said = "".join("\ufffd" if unicodedata.category(letter) in _UNSEEN else letter for letter in said)
    return said if len(said) <= most else said[: most - 1] + "…"


def escape(text: object, most: int = _MOST) -> str:
    """`plain`, for the inside of an element or of a quoted attribute."""
    return html.escape(plain(text, most))


def number(value: float, digits: int = 4) -> str:
    """So many significant digits; powers of ten where it is very small or large."""
    if not math.isfinite(value):
        return "infinite" if value > 0 else "minus infinity" if value < 0 else "not a number"
    if value == 0:
        return "0"
    power = math.floor(math.log10(abs(value)))
    if -5 < power < 7:
        text = f"{value:,.{max(0, digits - 1 - power)}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    factor = f"{value / 10.0**power:.{digits - 1}f}".rstrip("0").rstrip(".")
    if factor == "10":
        factor, power = "1", power + 1
    raised = f"10{str(power).translate(RAISED)}"
    return raised if factor == "1" else f"{factor} × {raised}"


def exponential(exponent: float, digits: int = 3) -> str:
    """e to some power, by its logarithm where it is too large for a float.

    >>> exponential(1.0), exponential(1000.0)
    ('2.72', '1.97 × 10⁴³⁴')
    """
    if exponent < 700:
        return number(math.exp(exponent), digits)
    power, rest = divmod(exponent / math.log(10), 1)
    factor = f"{10**rest:.{digits - 1}f}"
    return f"{factor} × 10{str(int(power)).translate(RAISED)}"


def percent(value: float) -> str:
    """Of one, with a digit behind the point; never 100 % for what is less.

    >>> percent(0.9999), percent(1), percent(0.731)
    ('99.99 %', '100 %', '73.1 %')
    """
    for digits in (1, 2, 3, 4):
        text = f"{100 * value:.{digits}f}"
        if value >= 1 or float(text) < 100:
            break
    return f"{text.rstrip('0').rstrip('.')} %"


def priced(event: Event) -> str:
    """An event in words.

    >>> priced(PoissonEvent(0.01, GaussianEvent(1.1)))
    'Gaussian noise 1.1 × bound, on a Poisson sample of rate 0.01'
    """
    match event:
        case GaussianEvent(noise):
            return f"Gaussian noise {number(noise)} × bound"
        case LaplaceEvent(noise):
            return f"Laplace noise {number(noise)} × bound"
        case PureEvent(epsilon):
            return f"an answer of ε {number(epsilon)}"
        case BoundedRangeEvent(epsilon):
            return f"a noisy choice of ε {number(epsilon)}"
        case ZcdpEvent(rho, delta):
            return f"zCDP of ρ {number(rho)}" + (f" and δ {number(delta)}" if delta else "")
        case ApproximateEvent(epsilon, delta):
            return f"a part of ε {number(epsilon)}, δ {number(delta)}"
        case PoissonEvent(rate, inner):
            return f"{priced(inner)}, on a Poisson sample of rate {number(rate)}"
        case FixedSizeEvent(size, of, inner):
            return f"{priced(inner)}, on {size:,} of {of:,} records"
        case DrawnEvent(rate, inner):
            return f"{priced(inner)}, drawn openly with probability {number(rate)}"
        case RepeatedEvent(inner, count):
            return f"{count:,} × {priced(inner)}"
        case ComposedEvent(events):
            return " and ".join(map(priced, events))


def noise_of(event: Event) -> float | None:
    """Noise over the bound of one contribution, where an event has one."""
    match event:
        case GaussianEvent(noise) | LaplaceEvent(noise):
            return noise
        case PoissonEvent() | FixedSizeEvent() | DrawnEvent() | RepeatedEvent():
            return noise_of(event.event)
    return None
