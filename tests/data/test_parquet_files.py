"""Parquet files: what is read, what is refused, and that no message shows a cell."""

import sys
from collections import Counter
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farthing.data import parquet_files, schema_draft, table_files
from farthing.data.schema import Categorical, Numeric, Schema
from farthing.data.splitting import Split
from farthing.errors import InvalidValue, Unsupported

SCHEMA = Schema(
    (Numeric("age", 0, 100), Categorical("sex", ("Female", "Male")), Categorical("code", ("0", "1"))),
    Categorical("rich", ("false", "true")),
)


@pytest.fixture
def arrow() -> Any:
    return pytest.importorskip("pyarrow", reason="needs the extra parquet")


def written(arrow: Any, path: Path, **columns: Any) -> str:
    from pyarrow import parquet

    parquet.write_table(arrow.table(columns), path)
    return str(path)


def people(arrow: Any, path: Path, **other: Any) -> str:
    columns = {
        "rich": arrow.array([False, True, True]),
        "sex": arrow.array(["Male", "Female", "Male"]).dictionary_encode(),
        "age": arrow.array([50, 250, 0], arrow.int16()),
        "code": arrow.array([1, 0, 7]),
    }
    return written(arrow, path, **columns | other)


def test_numbers_words_and_booleans_are_read_as_a_schema_means_them(arrow: Any, tmp_path: Path) -> None:
    path = people(arrow, tmp_path / "a.parquet")
    X, y = table_files.read(path, SCHEMA)
    assert X.tolist() == [[0.5, 0, 1, 0, 1], [1, 1, 0, 1, 0], [0, 0, 1, 0, 0]]
    assert y.tolist() == [0, 1, 1]
    flags = Schema((Numeric("rich", 0, 1),), Categorical("sex", ("Female", "Male")))
    assert table_files.read(path, flags)[0].tolist() == [[0], [1], [1]]
    assert table_files.count(path, SCHEMA) == 3
    assert table_files.header(path) == ["rich", "sex", "age", "code"]


def test_the_same_records_as_from_csv(arrow: Any, tmp_path: Path) -> None:
    ages, sexes = np.arange(40) * 2.5, np.array(["Female", "Male", "other", ""])[np.arange(40) % 4]
    codes, rich = np.arange(40) % 2, np.arange(40) % 3 == 0
    csv = tmp_path / "a.csv"
    rows = zip(ages, sexes, codes, np.where(rich, "true", "false"), strict=True)
    csv.write_text("age,sex,code,rich\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    missing = arrow.array([sex or None for sex in sexes])
    path = written(arrow, tmp_path / "a.pq", age=ages, sex=missing, code=codes, rich=rich)
    for ours, theirs in zip(table_files.read(path, SCHEMA), table_files.read(str(csv), SCHEMA), strict=True):
        assert np.array_equal(ours, theirs)


DAY, NOW = date(2000, 1, 2), datetime(2000, 1, 2, 3, 4, 5)
TYPED = {
    "bool_": [True, False],
    **{f"{sign}int{bits}": [1, 100] for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "large": [10**17 + 1, -(2**63)],
    **{name: [0.1, 1e22, float("inf"), float("nan"), -0.0] for name in ("float32", "float64")},
    "decimal": [Decimal("1.50"), Decimal("-7.25")],
    **{name: [DAY, date(1900, 1, 1)] for name in ("date32", "date64")},
    **{name: [NOW, datetime(1970, 1, 1)] for name in ("seconds", "nanoseconds")},
    **{name: ["true", "", "1.0", "nan"] for name in ("string", "large_string")},
    "null": [None, None],
}


def declared(arrow: Any, name: str) -> Any:
    special = {
        "large": lambda: arrow.int64(),
        "decimal": lambda: arrow.decimal128(9, 2),
        "seconds": lambda: arrow.timestamp("s"),
        "nanoseconds": lambda: arrow.timestamp("ns", "UTC"),
    }
    return special.get(name, getattr(arrow, name, None))()


@pytest.mark.parametrize("listed", [False, True], ids=["plain", "dictionary"])
@pytest.mark.parametrize("name", TYPED)
def test_a_record_more_with_a_null_changes_no_other_cell(
    name: str, listed: bool, arrow: Any, tmp_path: Path
) -> None:
    cells = {}
    for nulls in ([], [None]):
        column = arrow.array(TYPED[name] * 3 + nulls, declared(arrow, name))
        column = column.dictionary_encode() if listed and name != "null" else column
        (block,) = parquet_files.columns(written(arrow, tmp_path / "a.parquet", cell=column), ["cell"])
        cells[len(nulls)] = block["cell"].tolist()
    assert [*map(repr, cells[0])] == [*map(repr, cells[1][:-1])]
    assert [*map(str, cells[0])] == [*map(str, cells[1][:-1])]
    assert cells[1][-1] in ("", None) or np.isnan(cells[1][-1])


def test_a_missing_boolean_leaves_all_other_records_where_they_are(arrow: Any, tmp_path: Path) -> None:
    schema = Schema((Numeric("smokes", 0, 1),), Categorical("code", ("0", "1")))
    rows = {}
    for nulls in (0, 1):
        smokes = arrow.array([True, False] * 50 + [None] * nulls, arrow.bool_())
        code = arrow.array([0, 0, 1, 1] * 25 + [0] * nulls)
        path = written(arrow, tmp_path / "a.parquet", smokes=smokes, code=code, id=range(100 + nulls))
        found = table_files.training_rows(path, schema, Split(share=0.5))
        assert found.held is not None
        rows[nulls] = Counter(map(tuple, np.column_stack([found.X, found.y]).tolist()))
        held = Counter(map(tuple, np.column_stack(found.held).tolist()))
        for kept in (rows[nulls], held):
            for row in [row for row in kept if np.isnan(row[0])]:
                del kept[row]
        assert sum((rows[nulls] + held).values()) == 100
    assert rows[0] == rows[1]


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_a_cell_that_is_no_utf8_is_its_own_records_matter(arrow: Any, tmp_path: Path, kind: str) -> None:
    cells = arrow.array([b"Male", b"\xff\xfe", None], arrow.binary()).cast(arrow.string(), safe=False)
    cells = cells.dictionary_encode() if kind == "dictionary" else cells.cast(kind, safe=False)
    path = written(arrow, tmp_path / "people.parquet", sex=cells)
    (block,) = parquet_files.columns(path, ["sex"])
    assert block["sex"].tolist() == ["Male", "\ufffd\ufffd", ""]


def test_blocks_follow_each_other(arrow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_files, "_BLOCK", 2)
    path = people(arrow, tmp_path / "a.parquet")
    blocks = list(parquet_files.columns(path, ["age"]))
    assert [block["age"].tolist() for block in blocks] == [[50, 250], [0]]


def test_the_content_tells_and_not_the_name(arrow: Any, tmp_path: Path) -> None:
    assert table_files.count(people(arrow, tmp_path / "people.csv"), SCHEMA) == 3
    (tmp_path / "b.parquet").write_text("age,sex,code,rich\n1,Male,0,true\n")
    with pytest.raises(InvalidValue, match=r"b\.parquet' is not a complete Parquet file"):
        table_files.count(str(tmp_path / "b.parquet"), SCHEMA)


def test_a_file_cut_short_is_refused(arrow: Any, tmp_path: Path) -> None:
    path = Path(people(arrow, tmp_path / "a.parquet"))
    whole = path.read_bytes()
    for size in (4, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(InvalidValue, match="not a complete Parquet file"):
            table_files.read(str(path), SCHEMA)
    path.write_bytes(whole[:4] + b"\xff" * 40 + whole[44:])  # the footer is whole, the pages are not
    with pytest.raises(InvalidValue, match=r"not a complete Parquet file|cannot be read: it is damaged"):
        table_files.read(str(path), SCHEMA)


def test_cells_that_are_not_what_is_declared_are_nan(arrow: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    for other, nans in (
        ({"age": arrow.array([1.0, None, 2.0])}, (1, 0)),
        ({"age": arrow.array([1, None, 2])}, (1, 0)),
        ({"age": arrow.array(["1", "secret", "2"])}, (1, 0)),
        ({"age": arrow.array([float("inf"), 1.0, 2.0])}, (1, 0)),
        ({"rich": arrow.array(["true", "secret", "false"])}, (0, 1)),
        ({"rich": arrow.array([True, None, False])}, (0, 1)),
    ):
        X, y = table_files.read(people(arrow, path, **other), SCHEMA)
        assert (np.isnan(X).any(axis=1).sum(), np.isnan(y).sum()) == nans
        for options in ({"strict": True}, {"test": True}):
            with pytest.raises(InvalidValue, match=r"column '(age|rich)'") as error:
                table_files.read(people(arrow, path, **other), SCHEMA, **options)
            assert "secret" not in str(error.value)


def test_wrong_columns_are_refused_as_those_of_csv(arrow: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    for other, message in (
        ({"age": arrow.array([1, 2, 3], arrow.timestamp("s"))}, "'age' must hold numbers.* first and last"),
        ({"age": arrow.array([1, 2, 3], arrow.duration("s"))}, "column 'age' .* holds duration"),
        ({"age": arrow.array([[1], [2], [3]])}, "column 'age' .* holds list"),
        ({"sex": arrow.array([b"a", b"b", b"c"])}, "column 'sex' .* holds binary"),
    ):
        with pytest.raises(InvalidValue, match=message):
            table_files.read(people(arrow, path, **other), SCHEMA)
    with pytest.raises(InvalidValue, match="no column 'sex'"):
        table_files.read(written(arrow, path, age=[1]), SCHEMA)
    empty = written(arrow, path, **{name: arrow.array([], "string") for name in NAMES})
    assert len(table_files.read(empty, SCHEMA)[0]) == 0
    with pytest.raises(InvalidValue, match="has no records"):
        table_files.read(empty, SCHEMA, test=True)
    from pyarrow import parquet

    parquet.write_table(arrow.Table.from_arrays([arrow.array([1])] * 2, names=["age", "age"]), path)
    with pytest.raises(InvalidValue, match="two columns 'age'"):
        table_files.header(str(path), "age")


NAMES = ("age", "sex", "code", "rich")


def test_without_pyarrow_the_message_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a").write_bytes(b"PAR1")
    with pytest.raises(Unsupported, match="pip install pyarrow"):
        table_files.read(str(tmp_path / "a"), SCHEMA)


def test_a_draft_leaves_out_what_cannot_be_read_and_days_are_those_of_the_zone(
    arrow: Any, tmp_path: Path
) -> None:
    late = [datetime(2019, 12, day, 23, 30) for day in range(1, 25)]
    path = written(
        arrow,
        tmp_path / "a.parquet",
        when=arrow.array(late, arrow.timestamp("us", tz="Europe/Berlin")),
        plain=arrow.array(late, arrow.timestamp("us")),
        parts=arrow.array([[1, 2]] * 24),
        rich=arrow.array(["no", "yes"] * 12),
    )
    drafted, said = schema_draft.draft(path, "rich")
    assert '"when", "first"' in drafted
    assert said["parts"].startswith("holds list")
    with pytest.raises(InvalidValue, match="cannot be the target"):
        schema_draft.draft(path, "parts")
    (block,) = parquet_files.columns(path, ["when", "plain"])
    assert str(block["when"][0]) == "2019-12-02"  # 23:30 in UTC is half past midnight in Berlin
    assert str(block["plain"][0]) == "2019-12-01"
