"""Check single values, and raise errors that name the value.

>>> positive(epsilon=0.5)
0.5
>>> positive(epsilon=-1)
Traceback (most recent call last):
    ...
farthing.errors.InvalidValue: epsilon must be a finite number > 0, got -1
"""

import json
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, TypeVar

from farthing.errors import InvalidValue

_LARGEST_COUNT = 2**62
_NARROWEST, _WIDEST = 1e-290, 1e307  # within, neither the width of an interval nor a share of it overflows
APART = f"low < high, from {_NARROWEST:g} to {_WIDEST:g} apart"  # what `interval` asks for
T = TypeVar("T", bound=StrEnum)


def _one(values: dict[str, Any]) -> tuple[str, Any]:
    ((name, value),) = values.items()
    return name, value


def _number(values: dict[str, Any], allowed: str, fits: Callable[[float], bool]) -> float:
    name, value = _one(values)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool | str | bytes) or math.isnan(number) or not fits(number):
        raise InvalidValue(f"{name} must be {allowed}, got {value!r}")
    return number


def positive(**value: Any) -> float:
    """Return the value if it is a finite number > 0."""
    return _number(value, "a finite number > 0", lambda x: 0 < x < math.inf)


def non_negative(**value: Any) -> float:
    """Return the value if it is a finite number >= 0."""
    return _number(value, "a finite number >= 0", lambda x: 0 <= x < math.inf)


def finite(**value: Any) -> float:
    """Return the value if it is a finite number."""
    return _number(value, "a finite number", math.isfinite)


def rate(**value: Any) -> float:
    """Return the value if it is a probability in (0, 1]."""
    return _number(value, "a number in (0, 1]", lambda x: 0 < x <= 1)


def probability(**value: Any) -> float:
    """Return the value if it is a probability strictly between 0 and 1."""
    return _number(value, "a number strictly between 0 and 1", lambda x: 0 < x < 1)


def delta(**value: Any) -> float:
    """Return the value if it is a delta in [0, 1); 0 means pure differential privacy."""
    return _number(value, "a number in [0, 1)", lambda x: 0 <= x < 1)


def count(**value: Any) -> int:
    """Return the value if it is a whole number from 1 to 2**62 - 1, of an integer type (not 100.0)."""
    name, number = _one(value)
    try:
        whole = operator.index(number)
    except TypeError:
        whole = 0
    if isinstance(number, bool) or not 1 <= whole < _LARGEST_COUNT:
        raise InvalidValue(f"{name} must be a whole number from 1 to 2**62 - 1, got {number!r}")
    return whole


def flag(**value: Any) -> bool:
    """Return the value if it is True or False, of Python or of numpy."""
    name, given = _one(value)
    if type(given).__name__ not in ("bool", "bool_"):
        raise InvalidValue(f"{name} must be True or False, got {given!r}")
    return bool(given)


def interval(low: Any, high: Any) -> Any:
    """Return whether numbers (of arrays: each pair) are the ends of an interval that has exact shares.

    >>> interval(0, 1), interval(1, 1), interval(0, 5e-324), interval(-1e308, 1e308), interval(0, math.nan)
    (True, False, False, False, False)
    """
    half = high / 2 - low / 2
    return (half >= _NARROWEST / 2) & (half <= _WIDEST / 2)


def choice(options: type[T], /, **value: Any) -> T:
    """Return the member of an enumeration that the value, a member or its text, names."""
    name, given = _one(value)
    try:
        return options(given)
    except ValueError:
        raise _not_one_of(name, given, [str(option) for option in options]) from None


def one_of(known: Iterable[str], /, **value: Any) -> str:
    """Return the value if it is one of several names; an error lists all of them.

    >>> one_of(["auto", "dpagd"], method="dpag")
    Traceback (most recent call last):
        ...
    farthing.errors.InvalidValue: method must be one of 'auto', 'dpagd', got 'dpag' (did you mean 'dpagd'?)
    """
    name, given = _one(value)
    names = [*known]
    if given not in names:
        raise _not_one_of(name, given, names)
    return str(given)


def _not_one_of(name: str, given: Any, known: list[str]) -> InvalidValue:
    hint = did_you_mean(given, known) if isinstance(given, str) else ""
    return InvalidValue(f"{name} must be one of {', '.join(map(repr, known))}, got {given!r}{hint}")


def offers(*methods: str, **value: Any) -> Any:
    """Return the value if it is an object (not a class) with these methods."""
    name, given = _one(value)
    if isinstance(given, type):
        raise InvalidValue(f"{name} must be an object: {given.__name__}(...), not the class itself")
    if not all(callable(getattr(given, method, None)) for method in methods):
        raise InvalidValue(f"{name} must have {' and '.join(methods)}, got {given!r}")
    return given


def counted(count: int, what: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "step"), counted(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def repeated(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once, in their order.

    >>> repeated(["b", "a", "c", "a", "b"])
    ['b', 'a']
    """
    return [name for name, count in Counter(names).items() if count > 1]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name that is most like a wrong one, or nothing.

    >>> did_you_mean("Incom", ["age", "income"])
    " (did you mean 'income'?)"
    """
    import difflib

    by_lower = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.75)
    return f" (did you mean {by_lower[close[0]]!r}?)" if close else ""


def read_json(text: str) -> Any:
    """Return what a JSON text says; where it is none, a ValueError says what to change and in which line.

    >>> read_json('{"columns": [1, 2,]}')
    Traceback (most recent call last):
        ...
    ValueError: line 1: remove the comma before ']'
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(_to_change(text, error)) from None


def _to_change(text: str, error: json.JSONDecodeError) -> str:
    """Return what to change in a text that is no JSON; of the text it quotes no more than a bracket."""
    if not text.strip():
        return "it is empty"
    before, rest = text[: error.pos].rstrip(), text[error.pos :].lstrip()
    after = rest.removeprefix(",").lstrip()  # newer versions of Python point at the comma, older behind it
    if f"{before[-1:]}{rest[:1]}".count(",") and after[:1] in ("]", "}"):
        return f"line {before.count(chr(10)) + 1}: remove the comma before {after[0]!r}"
    where = f"line {error.lineno}, column {error.colno}"
    if rest.startswith("'"):
        return f"{where}: write texts between double quotes, not single ones"
    if rest.startswith(("//", "/*", "#")):
        return f"{where}: remove the comment, JSON has none"
    if not rest:
        return f"{where}: the text ends before its last bracket is closed"
    return f"{where}: {error.msg}"
