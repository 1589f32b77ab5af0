"""Private arrays as people bring them in. Their form is looked at, their values decide and name nothing.

Form is public: the type, the number of dimensions, the width. It is refused here, once, before anything is
charged, in words of our own: the errors of other libraries quote cells and counts, so none of them is passed
on, neither as a message nor as the cause or the context of one (`attempt`). Values are not refused: a row
with a value that is no finite number counts as nothing (`farthing.data.tables.Table`).

>>> attempt(float, "a private word", said="the cell must be a number")
Traceback (most recent call last):
    ...
farthing.errors.InvalidValue: the cell must be a number
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from farthing.errors import FarthingError, InvalidValue

T = TypeVar("T")

_LISTED = ("to_pylist", "to_list")  # pyarrow, polars, and pandas' own types: numpy would make floats of nulls
_REAL = "biuf"  # numpy's letters for booleans, whole numbers and floats
_ENCODE = (
    "Give an array of floats, with NaN for what is missing; text is encoded by a declared schema "
    "(farthing.data.Schema, or farthing train --schema)"
)


def attempt(
    function: Callable[..., T], *given: Any, said: str, error: type[FarthingError] = InvalidValue
) -> T:
    """Return ``function`` of ``given``; where it fails, raise ``error`` with the words ``said`` alone.

    It is raised after the other one is gone, so that no traceback shows what that said.
    """
    try:
        return function(*given)
    except FarthingError as own:
        own.__cause__ = own.__context__ = None
        raise
    except Exception:
        pass
    raise error(said)


def features(X: Any) -> Any:
    """A table of real numbers, dense or sparse by rows, as it lies in memory.

    The type of an array, and of each column of a data frame, is its form, which whoever made it has chosen:
    objects, text and dates are refused whatever the cells hold. A list has no type, and numpy would take one
    that fits all of its cells: its rows become floats one by one, a cell that is no number becomes NaN, and a
    row that is not as wide as most is NaN, whatever the others are.

    >>> features([[1, 2.5], [True, "x"], [3]]).tolist()
    [[1.0, 2.5], [1.0, nan], [nan, nan]]
    """
    if hasattr(X, "tocsr"):  # scipy's, which is slow to import
        X = attempt(_compressed, X, said="features must be a sparse table of real numbers")
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
    """Return one real number a row; of a list, NaN for a cell that is no number."""
    if isinstance(y, list | tuple):
        return np.array([_number(cell) for cell in y], dtype=np.float64)
    values = attempt(np.asanyarray, y, said="targets must be one number a row")
    if values.ndim != 1:
        raise InvalidValue(f"targets must be one number a row, got {values.ndim} dimensions")
    return np.asarray(_real(values, "targets"))


def column(values: Any, name: str = "values") -> NDArray[Any]:
    """Return one value of any type a record; a typed array as it is, anything else as an array of objects.

    A list has no type: numpy would take one that fits all of its cells, so that a record more could make text
    or floats of all others.

    >>> column([True, 2, "x"]).tolist(), column(np.array([1.5, 2])).dtype.kind
    ([True, 2, 'x'], 'f')
    """
    said = f"{name} must be a column, one value a record"
    found = attempt(_array if typed(values) else _objects, values, said=said)
    if found.ndim != 1:
        raise InvalidValue(f"{said}, got {found.ndim} dimensions")
    return found


def typed(values: Any) -> bool:
    """Return whether all values share a declared type that numpy knows, or lie in more than one dimension."""
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
        raise TypeError("one value is no column")
    cells = next((getattr(values, way)() for way in _LISTED if hasattr(values, way)), values)
    return np.fromiter(cells, dtype=object, count=len(cells))


def _compressed(X: Any) -> Any:
    """Return sparse rows in an object of our own: arrays that others put into theirs are not ours.

    A column that is stored several times in a row counts as the sum, which norms must be those of.
    """
    X = X.tocsr()
    own = type(X)((X.data, X.indices, X.indptr), shape=X.shape)
    if not own.has_canonical_format:  # the arrays may be the caller's
        own = own.copy()
        own.sum_duplicates()
    return own


def _listed(rows: list[Any] | tuple[Any, ...]) -> NDArray[np.float64]:
    """Return rows of numbers, as wide as most of them."""
    cells = [_cells(row) for row in rows]
    widths = sorted(len(row) for row in cells if row is not None)
    if rows and not widths:  # one number a row, as most: what is no table
        return np.zeros(len(rows))
    width = widths[len(widths) // 2] if widths else 0
    found = np.full((len(rows), width), np.nan)
    for place, row in enumerate(cells):
        if row is not None and len(row) == width:
            found[place] = [_number(cell) for cell in row]
    return found


def _framed(X: Any) -> Any:
    """Return a data frame whose columns are numbers, missing ones as NaN; refuse columns of other types."""
    types = list(getattr(X, "dtypes", ()))
    named = list(zip(list(getattr(X, "columns", range(len(types)))), types, strict=False))
    if types and all(hasattr(kind, "is_numeric") for kind in types):  # those of polars
        wrong = [(name, kind) for name, kind in named if not (kind.is_numeric() or str(kind) == "Boolean")]
        _refuse_columns([f"{name!r} ({kind})" for name, kind in wrong])
        return np.column_stack([target(X[name]).astype(np.float64) for name, _ in named])
    if any(not hasattr(kind, "kind") for kind in types):
        return X  # types that are not numpy's, nor like them: its array says what it holds
    _refuse_columns([f"{name!r} ({kind})" for name, kind in named if kind.kind not in _REAL])
    own = any(not isinstance(kind, np.dtype) for kind in types)  # pandas' own types, which would be objects
    if own or 0 < sum(kind.kind == "b" for kind in types) < len(types):  # and so would booleans among others
        said = "features must be a data frame of real numbers"
        return attempt(lambda: X.to_numpy(dtype=np.float64, na_value=np.nan), said=said)
    return X


def _of_arrow(X: Any) -> Any:
    """Return the numbers of an Arrow table, missing ones as NaN; refuse columns of other types.

    numpy would make objects of booleans with a null among them, and floats of whole numbers.
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
    """Return the cells of a row; None of what has none."""
    if isinstance(row, str | bytes | Mapping):
        return None
    try:
        return list(row)
    except Exception:
        return None


def _number(cell: Any) -> float:
    try:
        return float(cell)
    except Exception:  # whatever a cell is, it is one record's
        return float("nan")


def rows(values: Any) -> NDArray[Any]:
    """An array with one row a record."""
    return attempt(np.asarray, values, said="records must be arrays with rows of equal shape")


def indexed(values: Any) -> Any:
    """Rows of any kind, of which some can be taken by their places: data frames and lists as they are."""
    if hasattr(values, "tocsr"):
        return attempt(values.tocsr, said="records must be rows")
    if hasattr(values, "column_names") or (hasattr(values, "dtypes") and not hasattr(values, "iloc")):
        return features(values)  # Arrow's and polars': numpy makes objects of all booleans where one is null
    known = hasattr(values, "iloc") or isinstance(values, list | tuple | np.ndarray)
    return values if known else rows(values)


def length(rows: Any) -> int:
    """Return the number of rows of anything that has some."""
    count = attempt(
        lambda: rows.shape[0] if hasattr(rows, "shape") else len(rows), said="records must have rows"
    )
    return int(count)


def _real(values: Any, name: str) -> Any:
    if values.dtype.kind == "O":
        if hasattr(values, "tocsr"):
            raise InvalidValue(f"{name} must be real numbers, got a sparse table of objects")
        if values.ndim == 2:  # by the form alone, whatever the cells hold
            raise InvalidValue(f"{name} must be real numbers, got an array of objects. {_ENCODE}")
        with np.errstate(all="ignore"):  # a warning of a wider float would tell that there is one
            return np.frompyfunc(_number, 1, 1)(np.ma.filled(values, None)).astype(np.float64)
    if isinstance(values, np.ma.MaskedArray) and values.dtype.kind in _REAL:
        return np.ma.filled(values.astype(np.float64), np.nan)
    if values.dtype.kind not in _REAL:
        what = "Complex data not supported: " if values.dtype.kind == "c" else ""
        raise InvalidValue(f"{what}{name} must be real numbers, got {values.dtype.type.__name__}")
    if values.dtype.char == "g":  # what is finite there may be infinite in float64, where it is computed
        with np.errstate(over="ignore"):
            return values.astype(np.float64)
    return values
