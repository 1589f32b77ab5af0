"""Check laws of data entry: no record decides whether an input is refused, and no message quotes one.

Each entry point is tried on a table and on its neighbour with one odd record more: both calls must end in the
same way, with an answer or with the same error, and no message may contain anything of the record.
"""

import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from farthing.budget import Budget
from farthing.data.schema import Categorical, Numeric, Schema
from farthing.errors import FarthingError
from farthing.federated.simulated import Simulated
from farthing.ledger.ledger import Ledger
from farthing.linear.estimators import LinearRegression, LinearSVC, LogisticRegression
from farthing.linear.pca import PCA
from farthing.linear.selection import PrivateScore
from farthing.queries.arrays import attempt

MARK = 918273645  # values that no message may contain
_ROWS, _WIDTH = 12, 3
_VALUES = (float(MARK), float("nan"), float("inf"))
_CELLS = (str(MARK), f"word {MARK}", "", "1e999")

Entrance = Callable[[Any, Any], Any]


class _Answers:
    """A model that always predicts one answer."""

    def predict(self, X: Any) -> Any:
        return np.zeros(len(X), int)


def outcome(entrance: Entrance, X: Any, y: Any) -> tuple[str, str]:
    """Return how a call ends, and everything that a traceback would show of an error."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            entrance(X, y)
        except Exception as error:
            own = isinstance(error, FarthingError)
            shown = [str(error), *traceback.format_exception_only(error), *_chained(error)]
            return ("refused: " if own else "failed: ") + str(error), "".join(shown)
    told = "".join(str(warning.message) for warning in said)
    return f"answered {told}", told


def _chained(error: BaseException) -> list[str]:
    """Return the causes and contexts of an error, printed or not."""
    behind = [each for each in (error.__cause__, error.__context__) if each is not None]
    return [text for each in behind for text in (str(each), *_chained(each))]


def _spent() -> Ledger:
    return Ledger(Budget(1.0, 1e-5))


_SCHEMA = Schema((Numeric("a", 0, 1), Categorical("b", ("no", "yes"))), Categorical("c", ("no", "yes")))


def _through_a_schema(X: Any, y: Any) -> Any:
    table = {"a": X, "b": X, "c": y}
    codes = _SCHEMA.encode_target(table)
    model = LogisticRegression(ledger=_spent(), bounds=(0, 1), records=_ROWS)
    return model.fit(_SCHEMA.encode(table), codes)


def entrances() -> dict[str, Entrance]:
    """Return every entry point that takes arrays, with the number of records declared."""
    return {
        "LogisticRegression": lambda X, y: LogisticRegression(ledger=_spent(), records=_ROWS).fit(X, y),
        "LinearSVC": lambda X, y: LinearSVC(ledger=_spent(), records=_ROWS, bounds=(0, 1)).fit(X, y),
        "LinearRegression": lambda X, y: LinearRegression(
            ledger=_spent(), records=_ROWS, bounds=(0, 1), target_bounds=(0, 1)
        ).fit(X, y),
        "PCA": lambda X, y: PCA(1, ledger=_spent(), records=_ROWS).fit(X),
        "PrivateScore": lambda X, y: PrivateScore(_spent(), 0.1, 1e-6, records=_ROWS)(_Answers(), X, y),
        "Simulated": lambda X, y: Simulated.split(X, y, clients=2, budgets=Budget(1.0, 1e-5)),
    }


def refusals() -> list[str]:
    """Check that a table and its neighbour with an odd record end alike, and that no message quotes it."""
    rng = np.arange(_ROWS * _WIDTH, dtype=np.float64).reshape(_ROWS, _WIDTH) % 7 / 7
    labels = np.arange(_ROWS) % 2.0
    complaints = []
    for name, entrance in entrances().items():
        usual = outcome(entrance, rng, labels)[0]
        for value in _VALUES:
            odd = (np.vstack([rng, np.full(_WIDTH, value)]), np.append(labels, 1.0))
            other = (np.vstack([rng, np.full(_WIDTH, 0.5)]), np.append(labels, value))
            complaints += _compared(name, entrance, usual, (odd, other))
    cells, texts = np.array(["0.5"] * 2, dtype=object), np.array(["no", "yes"], dtype=object)
    usual = outcome(_through_a_schema, cells, texts)[0]
    for cell in _CELLS:
        pairs = (
            (np.append(cells, cell), np.append(texts, "no")),
            (np.append(cells, "0.5"), np.append(texts, cell)),
        )
        complaints += _compared("a schema", _through_a_schema, usual, pairs)
    complaints += _counted()
    try:
        attempt(float, f"word {MARK}", said="no number")
    except FarthingError as error:
        complaints += [f"an error of another library is passed on: {each}" for each in _chained(error)]
    return sorted(set(complaints))


def _compared(name: str, entrance: Entrance, usual: str, pairs: Any) -> list[str]:
    complaints = []
    for X, y in pairs:
        ended, shown = outcome(entrance, X, y)
        if ended != usual:
            complaints.append(f"one record decides how {name} ends: {ended.split(':')[0]}")
        if str(MARK) in shown:
            complaints.append(f"a message of {name} quotes a record")
    return complaints


def _counted() -> list[str]:
    """Check that a perfect score hides the number of rows, and that values taken as public are recorded."""
    complaints = []
    scores = [
        PrivateScore(Ledger(Budget(1e6, 1e-5)), 1e5, 1e-6, records=4)(
            _Answers(), np.zeros((n, 1)), np.zeros(n)
        )
        for n in (3, 4)
    ]
    if abs(scores[1] - scores[0] - 0.25) > 0.1:
        complaints.append("a score is divided by the realised number of rows")
    ledger = _spent()
    LogisticRegression(0.5, 1e-6, ledger=ledger).fit(np.eye(4), [0, 1, 0, 1])
    if "public" not in ledger.guarantee.note:
        complaints.append("a guarantee does not say that the number of records was taken as public")
    return complaints
