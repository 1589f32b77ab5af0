"""Check the form of arrays that users pass, with errors that quote no record.

The form of an array is public: its type, its number of dimensions and its width. A wrong form is refused
here, once, before anything is charged, with messages of this module only: errors of other libraries quote
cells and counts, so they are never passed on, neither as a message nor as a cause or context (`attempt`).
Values are not refused: a row with a value that is not finite counts as zero (`farthing.data.tables.Table`).

>>> attempt(float, "a private word", said="the cell must be a number")
Traceback (most recent call last):
    ...
farthing.errors.InvalidValue: the cell must be a number
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from farthing.errors import FarthingError, InvalidValue

T = TypeVar("T")
P = ParamSpec("P")

_LISTED = ("to_pylist", "to_list")  # pyarrow, polars, pandas' extension types: numpy converts nulls
_REAL = "biuf"  # numpy's kinds: booleans, integers and floats
# types that `float` accepts only with another value or a warning, which would reveal a record
_NO_NUMBERS = complex, np.complexfloating, np.datetime64, np.timedelta64, np.ma.core.MaskedConstant
_ENCODE = (
    "Give an array of floats, with NaN for what is missing; text is encoded by a declared schema "
    "(farthing.data.Schema, or farthing train --schema)"
)


def attempt(function: Callable[..., T], *given: Any, said: str | Callable[[], str]) -> T:
    """Return ``function`` of ``given``; if it fails, raise `InvalidValue` with the message ``said`` only.

    A message that quotes an array takes longer than a step of a fit, so it may be a function.
    The new error is raised outside the handler, so that no traceback shows the original message.
    """
    try:
        return function(*given)
    except FarthingError as own:
        own.__cause__ = own.__context__ = None
        raise
    except Exception:
        pass
    raise InvalidValue(said if isinstance(said, str) else said())


def quietly(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that reads private records without numpy's warnings and errors about their values.

    What numpy says of a number (`np.seterr`) would reveal its record.

    >>> quietly(np.divide)(np.array([1e300]), 1e-300).tolist()
    [inf]
    """

    @functools.wraps(function)
    def quiet(*given: P.args, **named: P.kwargs) -> T:
        with np.errstate(all="ignore"):  # for any np.seterr
            return function(*given, **named)

    return quiet


def features(X: Any) -> Any:
    """Return a table of real numbers, dense or sparse by rows, without a copy where possible.

    The type of an array, and of each column of a data frame, is public form: objects, text and dates are
    refused for any cells. A list has no type, and numpy would infer one from all of its cells, so the rows of
    a list are converted one by one: a cell that is not a number becomes NaN, and so does a row whose width
    differs from that of most rows.

    >>> features([[1, 2.5], [True, "x"], [3]]).tolist()
    [[1.0, 2.5], [1.0, nan], [nan, nan]]
    """
    if hasattr(X, "tocsr"):  # a scipy matrix; importing scipy is slow
        said = "features must be a sparse table of real numbers with valid row and column indices"
        X = attempt(_compressed, X, said=said)
    elif isinstance(X, list | tuple):
        X = _listed(X)
    else:
        X = _framed(X) if hasattr(X, "dtypes") and hasattr(X, "to_numpy") else X
        X = _of_arrow(X) if hasattr(X, "column_names") and hasattr(X, "schema") else X
        X = attempt(np.asanyarray, X, said="features must be a table with rows of equal width")
        X = np.asarray(X) if isinstance(X, np.matrix) else X
    if X.ndim != 2:
        raise InvalidValue(
            f"features must be a table, rows by columns, got {X.ndim} dimensions. Reshape your data either "
            "using array.reshape(-1, 1) if there is a single feature or array.reshape(1, -1) for a single row"
        )
    return _real(X, "features")


def target(y: Any) -> NDArray[Any]:
    """Return one real number per row; cells of a list that are not numbers become NaN."""
    if isinstance(y, list | tuple):
        return np.array([number(cell) for cell in y], dtype=np.float64)
    values = attempt(np.asanyarray, y, said="targets must be one number per row")
    if values.ndim != 1:
        raise InvalidValue(f"targets must be one number per row, got {values.ndim} dimensions")
    return np.asarray(_real(values, "targets"))


def column(values: Any, name: str = "values") -> NDArray[Any]:
    """Return one value of any type per record: typed arrays unchanged, anything else as objects.

    A list has no type: numpy would infer one from all of its cells, so that one more record could turn all
    others into text or floats.

    >>> column([True, 2, "x"]).tolist(), column(np.array([1.5, 2])).dtype.kind
    ([True, 2, 'x'], 'f')
    """
    said = f"{name} must be a column, one value per record"
    found = attempt(_array if typed(values) else _objects, values, said=said)
    if found.ndim != 1:
        raise InvalidValue(f"{said}, got {found.ndim} dimensions")
    return found


def typed(values: Any) -> bool:
    """Return whether all values share a declared numpy type or the array has more than one dimension."""
    known = isinstance(getattr(values, "dtype", None), np.dtype)
    return hasattr(values, "__array__") and (known or not any(hasattr(values, way) for way in _LISTED))


def _array(values: Any) -> NDArray[Any]:
    found = np.asarray(values)
    if isinstance(values, np.ma.MaskedArray):
        found = found.astype(object)
        found[np.ma.getmaskarray(values)] = None
    return found


def _objects(values: Any) -> NDArray[Any]:
    if isinstance(values, str | bytes | Mapping):
        raise TypeError("a single value is not a column")
    cells = next((getattr(values, way)() for way in _LISTED if hasattr(values, way)), values)
    return np.fromiter(cells, dtype=object, count=len(cells))


def _compressed(X: Any) -> Any:
    """Return sparse rows in new arrays, with duplicate entries of a cell added up.

    Norms must be those of the added-up entries.
    """
    X = X.tocsr()
    if getattr(X, "_checked", None) == tuple(map(id, (X.data, X.indices, X.indptr))):  # an object of our own
        return X
    own = type(X)((X.data, X.indices, X.indptr), shape=X.shape)
    own.check_format(full_check=True)  # a column index out of range would read out of bounds
    if not own.has_canonical_format:  # the arrays may belong to the caller
        own = own.copy()
        own.sum_duplicates()
    own._checked = tuple(map(id, (own.data, own.indices, own.indptr)))
    return own


def _listed(rows: list[Any] | tuple[Any, ...]) -> NDArray[np.float64]:
    """Return rows of numbers, all of the width that most rows have."""
    cells = [_cells(row) for row in rows]
    widths = sorted(len(row) for row in cells if row is not None)
    if rows and not widths:  # most rows are single numbers: not a table
        return np.zeros(len(rows))
    width = widths[len(widths) // 2] if widths else 0
    found = np.full((len(rows), width), np.nan)
    for place, row in enumerate(cells):
        if row is not None and len(row) == width:
            found[place] = [number(cell) for cell in row]
    return found


def _framed(X: Any) -> Any:
    """Return a data frame whose columns are numbers, missing ones as NaN; refuse columns of other types."""
    types = list(getattr(X, "dtypes", ()))
    named = list(zip(list(getattr(X, "columns", range(len(types)))), types, strict=False))
    if types and all(hasattr(kind, "is_numeric") for kind in types):  # polars types
        wrong = [(name, kind) for name, kind in named if not (kind.is_numeric() or str(kind) == "Boolean")]
        _refuse_columns([f"{name!r} ({kind})" for name, kind in wrong])
        return np.column_stack([target(X[name]).astype(np.float64) for name, _ in named])
    if any(not hasattr(kind, "kind") for kind in types):
        return X  # unknown types: the array of the frame decides
    _refuse_columns([f"{name!r} ({kind})" for name, kind in named if kind.kind not in _REAL])
    own = any(not isinstance(kind, np.dtype) for kind in types)  # extension types become objects
    if own or 0 < sum(kind.kind == "b" for kind in types) < len(types):  # so do mixed booleans
        said = "features must be a data frame of real numbers"
        return attempt(lambda: X.to_numpy(dtype=np.float64, na_value=np.nan), said=said)
    return X


def _of_arrow(X: Any) -> Any:
    """Return the numbers of an Arrow table, missing ones as NaN; refuse columns of other types.

    numpy would convert booleans with nulls to objects, and integers with nulls to floats.
    """
    from pyarrow import types

    real = types.is_boolean, types.is_integer, types.is_floating
    kinds = [(name, X.schema.field(place).type) for place, name in enumerate(X.column_names)]
    _refuse_columns([f"{name!r} ({kind})" for name, kind in kinds if not any(is_it(kind) for is_it in real)])
    said = "features must be an Arrow table of real numbers"
    return attempt(lambda: np.column_stack([_floats(each) for each in X.columns]), said=said)


def _floats(column: Any) -> NDArray[np.float64]:
    return np.asarray(column.cast("float64", safe=False), dtype=np.float64)


def _refuse_columns(wrong: list[str]) -> None:
    if wrong:
        raise InvalidValue(
            f"columns of features must be real numbers, these are not: {', '.join(wrong)}. {_ENCODE}"
        )


def _cells(row: Any) -> list[Any] | None:
    """Return the cells of a row; None if it is not a sequence."""
    if isinstance(row, str | bytes | Mapping):
        return None
    try:
        return list(row)
    except Exception:
        return None


def number(cell: Any) -> float:
    """Return a cell as a number, or NaN without any message: the cell belongs to one record.

    >>> number(True), number("2.5"), number(np.array(3)), number(1 + 2j), number(np.ma.masked)
    (1.0, 2.5, 3.0, nan, nan)
    """
    try:
        if isinstance(cell, np.ndarray) and not isinstance(cell, _NO_NUMBERS):
            cell = cell[()] if cell.ndim == 0 else None
        return math.nan if isinstance(cell, _NO_NUMBERS) else float(cell)
    except Exception:
        return math.nan


def rows(values: Any) -> NDArray[Any]:
    """Return an array with one row per record."""
    return attempt(np.asarray, values, said="records must be arrays with rows of equal shape")


def indexed(values: Any) -> Any:
    """Return rows that can be selected by position; data frames and lists are returned unchanged."""
    if hasattr(values, "tocsr"):
        return attempt(values.tocsr, said="records must be rows")
    if hasattr(values, "column_names") or (hasattr(values, "dtypes") and not hasattr(values, "iloc")):
        return features(values)  # Arrow and polars: numpy converts booleans to objects if one is null
    known = hasattr(values, "iloc") or isinstance(values, list | tuple | np.ndarray)
    return values if known else rows(values)


def length(rows: Any) -> int:
    """Return the number of rows."""
    count = attempt(
        lambda: rows.shape[0] if hasattr(rows, "shape") else len(rows), said="records must have rows"
    )
    return int(count)


def _real(values: Any, name: str) -> Any:
    if values.dtype.kind == "O":
        if hasattr(values, "tocsr"):
            raise InvalidValue(f"{name} must be real numbers, got a sparse table of objects")
        if values.ndim == 2:  # decided by the form, not by the cells
            raise InvalidValue(f"{name} must be real numbers, got an array of objects. {_ENCODE}")
        with np.errstate(all="ignore"):  # an overflow warning would reveal a record
            return np.frompyfunc(number, 1, 1)(np.ma.filled(values, None)).astype(np.float64)
    if isinstance(values, np.ma.MaskedArray) and values.dtype.kind in _REAL:
        return np.ma.filled(values.astype(np.float64), np.nan)
    if values.dtype.kind not in _REAL:
        what = "Complex data not supported: " if values.dtype.kind == "c" else ""
        raise InvalidValue(f"{what}{name} must be real numbers, got {values.dtype.type.__name__}")
    if values.dtype.char == "g":  # finite long doubles may overflow in float64
        with np.errstate(over="ignore", under="ignore"):
            return values.astype(np.float64)
    return values
