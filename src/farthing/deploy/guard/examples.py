"""Load a party's records for networks: arrays, folders, tables, tokens, or a dataset of its own.

Everything is checked here, once, on the party's own machine and before anything is charged; no message quotes
a record. Afterwards no refusal depends on a record: what fails in a round counts as zero.
"""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from farthing.budget import Unit
from farthing.data import table_files
from farthing.deploy import factories
from farthing.deploy.guard.models import Inputs, check_sources
from farthing.errors import InvalidValue

if TYPE_CHECKING:
    from farthing.deploy.guard.policy import Policy
    from farthing.torch.training.records import Examples

Column = NDArray[Any]
_ARRAYS = ("X", "y", "users", "tokens", "ends")


def examples_of(policy: "Policy") -> "Examples":
    """Return a party's records as the examples of a network: records, users, or the party as one."""
    from farthing.torch.training.records import Examples

    inputs = policy.inputs
    check_sources(policy)
    if inputs.dataset:
        return _dataset(policy, inputs)
    columns = _columns(policy)
    X, y = _inputs(columns, inputs, policy.modules), _labels(columns["y"], inputs)
    if len(X) != len(y):
        raise InvalidValue("X and y must have one row per record each")
    users, most = _users(policy, columns.get("users"), len(X))
    return Examples((X, y), users=users, records_per_user=most)


def _users(policy: "Policy", users: Column | None, records: int) -> tuple[Column | None, int | None]:
    """Return whose record each is, and how many of one count: what the budget protects is an example."""
    match policy.budget.unit:
        case Unit.RECORD:
            return None, None
        case Unit.USER:
            if users is None or not policy.inputs.records_per_user:
                raise InvalidValue(
                    "a budget for users needs an array ``users`` in the records, and records_per_user"
                )
            return users, policy.inputs.records_per_user
    return np.zeros(records, dtype=np.int64), records


def _dataset(policy: "Policy", inputs: Inputs) -> "Examples":
    from farthing.torch.training.records import Examples

    data = _called(inputs.dataset, policy.modules)
    if policy.budget.unit is Unit.USER:
        raise InvalidValue("a dataset has no users: a budget for users needs arrays")
    count = len(data) if hasattr(data, "__len__") else 0
    users, most = _users(policy, None, count)
    found = Examples(data, users=users, records_per_user=most)
    _refuse_form(found.form, inputs)
    return found.within(inputs.classes) if inputs.classes else found


def _refuse_form(form: Any, inputs: Inputs) -> None:
    """Refuse records that are not of the policy's form: the first alone must not decide who counts."""
    label = "int64" if inputs.classes else "float32"
    if len(form) != 2 or not all(isinstance(part, tuple) for part in form):
        raise InvalidValue("records of the dataset must be pairs of inputs and a label")
    (shape, kind), (target, labelled) = ((tuple(shape)[1:], str(kind)[6:]) for shape, kind in form)
    if (shape, kind) != (inputs.shape, inputs.kind):
        raise InvalidValue(
            f"inputs in the dataset must have the shape {list(inputs.shape)} and the kind {inputs.kind} of "
            "[inputs]"
        )
    if (target, labelled) != ((), label):
        raise InvalidValue(f"labels in the dataset must be single numbers of kind {label}")


def _called(name: str, folder: Path | None) -> Any:
    try:
        return factories.found(name, folder)()
    except InvalidValue:
        raise
    except Exception as error:  # what it says may quote a record
        raise InvalidValue(f"{name} failed ({type(error).__name__})") from None


def _columns(policy: "Policy") -> dict[str, Column]:
    if policy.schema is not None:
        X, y = table_files.read(str(policy.records), table_files.schema_of(policy.schema, None))
        return {"X": X, "y": y}
    path = policy.records
    try:
        if path.is_dir():
            files = {name: path / f"{name}.npy" for name in _ARRAYS}
            found = {
                name: np.load(file, mmap_mode="c", allow_pickle=False)
                for name, file in files.items()
                if file.exists()
            }
        else:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as held:
                found = {name: np.asarray(held[name]) for name in _ARRAYS if name in held.files}
    except OSError as error:
        raise InvalidValue(f"records cannot be read, {str(path)!r}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, EOFError, zipfile.BadZipFile):
        raise InvalidValue(f"records must be .npz or a folder of .npy files, {str(path)!r} is not") from None
    if "y" not in found or not ("X" in found or {"tokens", "ends"} <= set(found)):
        raise InvalidValue(f"records need arrays X (or tokens and ends) and y, {str(path)!r} has others")
    return found


def _inputs(columns: dict[str, Column], inputs: Inputs, folder: Path | None) -> Column:
    X = columns["X"] if "X" in columns else _padded(columns["tokens"], columns["ends"], inputs.length)
    if inputs.transform:
        X = _transformed(X, factories.found(inputs.transform, folder))
    if X.ndim < 1 or tuple(X.shape[1:]) != inputs.shape:
        raise InvalidValue(f"inputs of a record must have the shape {list(inputs.shape)} of the policy")
    if X.dtype.kind not in "biuf":
        raise InvalidValue("inputs must be numbers")
    if inputs.kind == "int64":
        if X.dtype.kind == "f":
            raise InvalidValue("inputs must be whole numbers, kind is int64")
        if inputs.vocabulary and not ((X >= 0) & (inputs.vocabulary > X)).all():
            raise InvalidValue(f"tokens must be whole numbers from 0 to {inputs.vocabulary - 1}")
        return np.ascontiguousarray(X, dtype=np.int64)
    with np.errstate(over="ignore"):
        found = np.ascontiguousarray(X, dtype=np.float32)
    if not np.isfinite(found).all():
        raise InvalidValue("inputs must be finite in float32; replace missing values by a public constant")
    return found


def _transformed(X: Column, transform: Callable[[Any], Any]) -> Column:
    """Return each record's transform: one record at a time, so that records cannot meet."""
    try:
        return np.stack([np.asarray(transform(np.array(x))) for x in X])
    except Exception as error:  # what it says may quote a record
        raise InvalidValue(
            f"the transform failed ({type(error).__name__}), or made records of different shapes"
        ) from None


def _padded(tokens: Column, ends: Column, length: int) -> Column:
    """Return texts, end to end in ``tokens``, cut or filled up with 0 to a public length."""
    if not length:
        raise InvalidValue("tokens need length, the public number of tokens of a record")
    if tokens.ndim != 1 or ends.ndim != 1 or tokens.dtype.kind not in "iu" or ends.dtype.kind not in "iu":
        raise InvalidValue("tokens and ends must be whole numbers, end to end")
    steps = np.diff(ends, prepend=0)
    if (steps < 0).any() or (len(ends) and ends[-1] != len(tokens)):
        raise InvalidValue("ends must grow, and the last must be the number of tokens")
    found = np.zeros((len(ends), length), dtype=np.int64)
    for row, (end, size) in enumerate(zip(ends.tolist(), steps.tolist(), strict=True)):
        taken = min(size, length)
        found[row, :taken] = tokens[end - size : end - size + taken]
    return found


def _labels(y: Column, inputs: Inputs) -> Column:
    if y.ndim < 1 or y.dtype.kind not in "biuf":
        raise InvalidValue("labels must be numbers, one row per record")
    if not inputs.classes:
        with np.errstate(over="ignore"):
            found = np.ascontiguousarray(y, dtype=np.float32)
        if not np.isfinite(found).all():
            raise InvalidValue("labels must be finite in float32")
        return found
    if not np.isin(y, np.arange(inputs.classes)).all():
        raise InvalidValue(f"labels must be whole numbers from 0 to {inputs.classes - 1}")
    return np.ascontiguousarray(y, dtype=np.int64)
