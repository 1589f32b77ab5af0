"""Describe what a run took as public: columns, bounds, vocabularies, sizes, and who checked them.

A guarantee protects the records given these facts. Where one of them was read from the records, it does not
hold: that is the first question of a review, so that a report answers it column by column.

>>> facts = {"schema": {"source": "a.json", "sha256": "ab", "checked_by": ""},
...          "columns": [{"name": "age", "low": 0, "high": 99}],
...          "target": {"name": "rich", "values": ["no", "yes"]}}
>>> Declared.of(facts).rows()
[('age', 'feature', 'numbers from 0 to 99'), ('rich', 'target', '2 values: no, yes')]
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from farthing.report.words import number, plain

_MOST = 2_000  # letters of a vocabulary in a report


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """The facts that a run took as public. Read them from a ``privacy.json`` with `Declared.of`.

    Parameters
    ----------
    source : str
        The schema's file, or where else it came from.
    sha256 : str
        The hash of the schema as JSON, which the model file holds.
    checked_by : str
        Who checked that it is public; empty where nobody is named.
    columns : tuple of mappings
        The features, as in a schema's JSON.
    target : mapping
        What is predicted.
    records_declared : bool, default False
        Whether the number of records was declared, not counted.
    rows_per_person : int, optional
        How many records of a person were kept at most; None where that is not limited.
    model, model_sha256 : str
        The model file, and its hash.

    Examples
    --------
    >>> rich = {"name": "rich", "values": ["no", "yes"]}
    >>> Declared(source="a.json", sha256="ab", checked_by="Ann, 2026-11-16", columns=(), target=rich).rows()
    [('rich', 'target', '2 values: no, yes')]
    """

    source: str
    sha256: str
    checked_by: str
    columns: tuple[Mapping[str, Any], ...]
    target: Mapping[str, Any]
    records_declared: bool = False
    rows_per_person: int | None = None
    model: str = ""
    model_sha256: str = ""

    @classmethod
    def of(cls, public: Mapping[str, Any], told: Mapping[str, Any] | None = None) -> "Declared":
        """Read the object ``public`` of a ``privacy.json``, and of the whole the model's file and hash."""
        schema, told = public["schema"], told or {}
        rows = told.get("rows_per_person")
        return cls(
            source=str(schema["source"]),
            sha256=str(schema["sha256"]),
            checked_by=str(schema["checked_by"] or ""),
            columns=tuple({**column, "name": str(column["name"])} for column in public["columns"]),
            target={**public["target"], "name": str(public["target"]["name"])},
            records_declared=public.get("records_declared", False) is True,
            rows_per_person=None if rows is None else int(rows),
            model=str(told.get("model", "")),
            model_sha256=str(told.get("sha256", {}).get("model", "")),
        )

    def rows(self) -> list[tuple[str, str, str]]:
        """Return name, role and declaration of every column."""
        columns = [(column, "feature") for column in self.columns]
        return [(plain(c["name"], 120), role, _words(c)) for c, role in [*columns, (self.target, "target")]]


def _words(column: Mapping[str, Any]) -> str:
    """Return what is declared of a column."""
    if "values" in column:
        values = [str(value) for value in column["values"]]
        also = "; others are one more value" if column.get("other") else ""
        return plain(f"{len(values):,} values: {', '.join(values)}{also}", _MOST)
    if "first" in column:
        text = f"dates from {column['first']} to {column['last']}"
    elif "low" in column:
        text = f"numbers from {number(float(column['low']), 6)} to {number(float(column['high']), 6)}"
    else:
        return "numbers; bounds were bought from the budget"
    if column.get("bought"):
        return plain(f"{text}, bounds that were bought from the budget")
    missing = column.get("missing")
    return plain(text if missing is None else f"{text}; a missing one counts as {missing}")
