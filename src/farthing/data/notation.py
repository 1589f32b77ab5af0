"""Read numbers and dates as people write them in tables: every rule is for one cell, by itself.

>>> number("$1,234.50"), number("12.5 %"), number("(300)"), number("1'000"), number("70 kg")
(1234.5, 12.5, -300.0, 1000.0, nan)
>>> [number(point(text)) for text in ("1.234,5", "3,14", "2.5")]
[1234.5, 3.14, 2.5]
>>> ways("31.12.2019"), ways("01/02/2019 14:30")
(['%d.%m.%Y'], ['%d/%m/%Y %H:%M', '%m/%d/%Y %H:%M'])
"""

import math
import re
from datetime import date, datetime

_CODES = "AUD|BRL|CAD|CHF|CNY|CZK|DKK|EUR|GBP|HUF|INR|JPY|MXN|NOK|NZD|PLN|RON|SEK|TRY|USD|ZAR"
_SIGNS = r"(?:US|A|C|CA|R|NZ|HK|MX)?\$|[€£¥₹₩₪₫₱₴₺₽₿]|kr\.?|zł|Kč|Ft|Fr\."
_UNIT = rf"(?:{_SIGNS}|(?:{_CODES})\b)"
_GAP = "[,'’ \u00a0\u2009\u202f]"  # separators of thousands
_GROUPS = rf"\d{{1,3}}(?P<gap>{_GAP})\d{{3}}(?:(?P=gap)\d{{3}})*|\d\d?(?:,\d\d)+,\d{{3}}"  # or lakhs
_NUMBER = re.compile(
    rf"(?P<open>\()?\s*(?P<sign>[-+\u2212])?\s*{_UNIT}?\s*(?P<inner>[-+\u2212])?\s*"
    rf"(?P<digits>(?:{_GROUPS})(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
    rf"\s*(?:%|{_UNIT})?\s*(?P<after>[-\u2212])?\s*(?P<close>\))?",
    re.ASCII,
)
_AS_TEXT = re.compile(r"'([^']+)|=\"([^\"]*)\"")  # a number that a spreadsheet is told to take for text
_PLAIN = re.compile(r"[-+]?\d*\.?\d*", re.ASCII)
_POINTED = re.compile(r"(?<![\d.,])\d{1,3}(?:\.\d{3})+(?:,\d*)?(?![\d.,])", re.ASCII)

# Words for a number, a date or a label that is missing, in small letters.
NO_LABEL = frozenset({"", "nan", "na", "n/a", "null", "?", ".", "#n/a", "<na>", "(null)", "\\n"})
NO_VALUE = NO_LABEL | {"none", "nil", "nat", "-", "--", "..", "n.a.", "k.a.", "#na", "#value!", "#div/0!"}
NO_VALUE |= {"\u2013", "\u2014", "(blank)", "k. a.", "#ref!", "missing", "unknown", "not available"}
NO_VALUE |= {"not known", "no data"}


def number(text: str) -> float:
    """Return a number, NaN for what is none.

    Thousands may be separated, and a currency or a percent sign may stand beside (12.5 % is 12.5). Negative
    numbers have a minus in front or behind, or stand in parentheses.
    """
    try:
        return float(text)
    except ValueError:
        pass
    text = text.strip()
    if (told := _AS_TEXT.fullmatch(text)) is not None:
        return number(told[1] or told[2])
    found = _NUMBER.fullmatch(text)
    if found is None or bool(found["open"]) != bool(found["close"]):
        return math.nan
    signs = [found[name] for name in ("open", "sign", "inner", "after") if found[name]]
    if len(signs) > 1:
        return math.nan
    digits = found["digits"].replace(found["gap"] or ",", "")
    return float(digits) * (-1.0 if signs and signs[0] != "+" else 1.0)


def point(text: str, declared: bool = False) -> str:
    """Return a number that may have a comma before its fraction as one with a point.

    ``declared`` says that it must be a comma: a point between groups of three digits then separates
    thousands, as it does before a comma in any case.
    """
    if "." not in text:
        return text.replace(",", ".") if text.count(",") == 1 else text
    if (declared or "," in text) and _POINTED.search(text):
        return text.replace(".", "").replace(",", ".")
    return text


_DAYS: tuple[str, ...] = (
    "%d.%m.%Y",
    "%d/%m/%Y",
    "%m/%d/%Y",
    "%d-%m-%Y",
    "%m-%d-%Y",
    "%Y/%m/%d",
    "%Y-%m-%d",
    "%d.%m.%y",
)
_DAYS += ("%d/%m/%y", "%m/%d/%y", "%d %b %Y", "%d-%b-%Y", "%d-%b-%y", "%d %B %Y", "%B %d, %Y", "%b %d, %Y")
_DAYS += ("%d. %b %Y", "%d. %B %Y", "%a, %d %b %Y", "%Y%m%d", "%Y-%m", "%m/%Y", "%b %Y", "%b-%Y", "%B %Y")
_TIMES: tuple[str, ...] = (
    "",
    " %H:%M",
    " %H:%M:%S",
    " %H:%M:%S.%f",
    " %H:%M:%S GMT",
    " %I:%M %p",
    " %I:%M:%S %p",
)
_TIMES += ("T%H%M%S", "T%H%M%SZ")
_PARTS = {"%Y": r"\d{4}", "%y": r"\d\d", "%p": "[AaPp][Mm]", "%b": "[A-Za-z]{3}", "%B": "[A-Za-z]{3,}"}
_PARTS |= {"%a": "[A-Za-z]{3}", "%f": r"\d{1,6}"}
_YEARS = range(1900, 2101)  # of eight digits without a mark, which may be another number


def _shape(way: str) -> re.Pattern[str]:
    """Return what dates that are written in this way look like."""
    width = r"\d\d" if way.startswith("%Y%m%d") else r"\d{1,2}"
    parts = re.split("(%.)", way)
    return re.compile(
        "".join(_PARTS.get(part, width) if part[:1] == "%" else re.escape(part) for part in parts)
    )


_SHAPES = {way + time: _shape(way + time) for way in _DAYS for time in _TIMES}
ISO = ""  # YYYY-MM-DD, with or without a time


def ways(text: str) -> list[str]:
    """Return the ways to write dates (formats of `datetime.strptime`, or `ISO`) that fit a text."""
    if day(text, ISO) is not None:
        return [ISO]
    if not any(figure in text for figure in "0123456789") or (_PLAIN.fullmatch(text) and len(text) != 8):
        return []  # of plain numbers only YYYYMMDD may be a date, and hundreds of ways take long to try
    fits = [way for way, shape in _SHAPES.items() if shape.fullmatch(text)]
    return [way for way in fits if day(text, way) is not None]


def day(text: str, way: str) -> int | None:
    """Return the ordinal of a date that is written in this way, None for what is none."""
    if way == ISO and (len(text) < 10 or text[4] != "-"):
        return None
    try:
        found = date.fromisoformat(text[:10]) if way == ISO else datetime.strptime(text, way)
    except ValueError:
        return None
    if way.startswith("%Y%m%d") and found.year not in _YEARS:
        return None
    return found.toordinal()


def swapped(way: str) -> str:
    """Return the way in which day and month stand in the other order."""
    return way.replace("%d", "%\0").replace("%m", "%d").replace("%\0", "%m")
