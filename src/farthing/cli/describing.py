"""Describe a table from one part of a budget, column by column."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.accounting.filters import BasicFilter, GdpFilter
from farthing.budget import Budget, Unit
from farthing.data import table_files
from farthing.data.columns import Categorical, Column, Date, Numeric, Unbounded, numbers
from farthing.data.csv_cells import CsvCells
from farthing.data.csv_files import Csv
from farthing.data.splitting import Spool
from farthing.errors import InvalidValue, Unsupported
from farthing.ledger.journal import Journal
from farthing.ledger.ledger import Ledger
from farthing.statistics.describing import Summary, Tally, describe
from farthing.statistics.spending import Allowance
from farthing.validate import repeated


def describe_table(
    table: str,
    columns: Sequence[Column] | None,
    budget: Budget,
    *,
    ledger: Path | None = None,
    drop: Sequence[str] = (),
    csv: Csv = table_files.PLAIN,
) -> dict[str, Any]:
    """Return released figures of every column; ``columns`` declares some of them, None buys all bounds.

    Without a declaration every column of the header is read as numbers: which ones hold none is not looked
    up, but released with noise.
    """
    if table == table_files.EMBEDDED:
        raise InvalidValue(
            "TABLE must be a file: the embedded table 'adult' is public and needs no private description"
        )
    strange = dict[str, str]()
    if columns is None:
        for name in drop:
            table_files.named(table, name, csv)
        strange = table_files.unreadable(table)
        left = {"", *drop, *strange}
        header = [name for name in table_files.named(table, None, csv) if name not in left]
        twice = repeated(header)
        if twice:
            raise InvalidValue(f"{table!r} has two columns {twice[0]!r}: rename one, or --drop it")
        ranged: list[tuple[str, tuple[float, float] | None]] = [(name, None) for name in header]
        listed = list[Categorical]()
    else:
        plain = [one for one in columns if not isinstance(one, Categorical)]
        ranged = [(one.name, None if isinstance(one, Unbounded) else _ends(one)) for one in plain]
        listed = [one for one in columns if isinstance(one, Categorical)]
    known = {one.name: one for one in columns or ()}
    cells, codes = _read(table, [name for name, _ in ranged], listed, known, csv)
    width = float(len(ranged) + len(listed))
    spend, book = _allowance(ledger, budget, (width, math.sqrt(width)))
    try:
        vocabularies = [(one.name, one.values) for one in listed]
        found = describe(cells, ranged, codes, vocabularies, spend)
        privacy = spend.ledger.guarantee
    finally:
        if book is not None:
            book.close()
    return {
        "guarantee": asdict(privacy),
        "table": table,
        "ledger": None if ledger is None else str(ledger),
        "left_out": {name: kind for name, kind in strange.items() if name not in drop},
        "columns": [{"kind": _kind(one, known.get(one.name)), **asdict(one)} for one in found],
    }


def _kind(found: Summary | Tally, column: Column | None) -> str:
    if isinstance(found, Tally):
        return "values"
    return "dates" if isinstance(column, Date) else "numbers"


def _ends(column: Numeric | Date) -> tuple[float, float]:
    inner = column if isinstance(column, Numeric) else column._numeric
    return float(inner.low), float(inner.high)


def _read(
    table: str, names: list[str], listed: list[Categorical], known: dict[str, Column], csv: Csv
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the numbers, one column a name, and the codes of declared values."""
    spool, codes = Spool(max(len(names), 1)), [np.zeros((0, len(listed)), np.int64)]
    commas = table_files.commas(table, csv)
    for block in table_files.columns(table, [*names, *(one.name for one in listed)], csv):
        if names:
            spool.add(
                np.column_stack([_numbers(known.get(name), name, block, csv, commas) for name in names])
            )
        if listed:
            codes.append(np.column_stack([one.codes(block[one.name]) for one in listed]))
    return spool.value(), np.concatenate(codes)


def _numbers(
    column: Column | None, name: str, block: Mapping[str, NDArray[Any]], csv: Csv, commas: bool
) -> NDArray[np.float64]:
    if isinstance(block, CsvCells) and not isinstance(column, Date):
        return block.numbers(name, commas=commas, declared=csv.decimal == ",")
    cells = block[name]
    if isinstance(column, Date):
        return column.days(cells)
    if cells.dtype.kind == "M":
        return Date(name, "1970-01-01", "1970-01-02").days(cells)
    return numbers(name, cells)


def _allowance(
    ledger: Path | None, budget: Budget, norms: tuple[float, float]
) -> tuple[Allowance, Ledger | None]:
    """Return what is spent, and the ledger to close."""
    rule = GdpFilter if budget.delta else BasicFilter
    if ledger is None:
        return Allowance.of(None, budget.epsilon, budget.delta, norms), None
    new = not Journal.exists(ledger)
    book = Ledger(budget, journal=ledger, filter=rule) if new else Ledger.open(ledger)
    if book.budget.unit is not Unit.RECORD:
        raise InvalidValue(
            f"--ledger must have unit record, because each row counts as one; this one has {book.budget}"
        )
    if not new and book.share and any(row.kind == "promise" for row in book.journal.rows()):
        raise Unsupported(
            "--ledger holds the plan of a training, which nothing else can spend: use a new ledger"
        )
    if not budget.delta and not isinstance(book.filter, BasicFilter):
        raise InvalidValue(
            f"--delta must be above 0 with this ledger, which adds up charges by {book.filter.name}, got 0"
        )
    return Allowance.of(book, budget.epsilon, budget.delta, norms), book
