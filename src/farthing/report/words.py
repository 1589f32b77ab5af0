"""Format text for a report: escaped, without invisible characters, with readable numbers.

>>> escape('<b>"x"</b>')
'&lt;b&gt;&quot;x&quot;&lt;/b&gt;'
>>> number(0.0001), number(32561), number(1e-5), number(0.9468), number(math.inf)
('0.0001', '32,561', '10⁻⁵', '0.9468', 'infinite')
"""

import html
import math
import unicodedata

# control, direction, surrogate and unassigned characters
_UNSEEN = {"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"}
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_MOST = 300


def plain(text: object, most: int = _MOST) -> str:
    """Return a text without invisible characters, cut to a maximal length.

    A mark that changes the direction of text, or a null, is replaced by a replacement character.
    """
    said = " ".join(str(text)[: 4 * most].split())
    said = "".join("\ufffd" if unicodedata.category(letter) in _UNSEEN else letter for letter in said)
    return said if len(said) <= most else said[: most - 1] + "…"


def escape(text: object, most: int = _MOST) -> str:
    """Return `plain` text, escaped for an element or a quoted attribute."""
    return html.escape(plain(text, most))


def number(value: float, digits: int = 4) -> str:
    """Return a number with so many significant digits; powers of ten where it is very small or large."""
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


def exponential(exponent: float) -> str:
    """Return e to some power, by its logarithm where it is too large for a float.

    >>> exponential(1.0), exponential(1000.0)
    ('2.72', '1.97 × 10⁴³⁴')
    """
    if exponent < 700:
        return number(math.exp(exponent), digits=3)
    power, rest = divmod(exponent / math.log(10), 1)
    return f"{10**rest:.2f} × 10{str(int(power)).translate(RAISED)}"


def percent(value: float) -> str:
    """Return a share of 1 as a percentage with one decimal; never 100 % for less.

    >>> percent(0.9999), percent(1), percent(0.731)
    ('99.99 %', '100 %', '73.1 %')
    """
    for digits in (1, 2, 3, 4):
        text = f"{100 * value:.{digits}f}"
        if value >= 1 or float(text) < 100:
            break
    return f"{text.rstrip('0').rstrip('.')} %"
