"""Public rules that choose records: each looks at one person's records only."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farthing.data import table_files
from farthing.data.columns import Categorical, Numeric, Unbounded
from farthing.data.schema import Schema
from farthing.data.splitting import Split, Spool
from farthing.errors import InvalidValue


def chosen(table: list[tuple[Any, str]], **rule: Any) -> tuple[list[tuple[Any, str]], list[tuple[Any, str]]]:
    """The rows that are kept, and those held out, of a table of (person, cell), read in blocks of three."""
    split, kept, held = Split(**rule), [], []
    for start in range(0, len(table), 3):
        block = table[start : start + 3]
        columns = {name: np.array([row[i] for row in block], dtype=object) for i, name in enumerate("pc")}
        for into, mask in zip((kept, held), split.masks(columns, ["c"]), strict=True):
            into.extend(row for row, takes in zip(block, mask, strict=True) if takes)
    return kept, held


tables = st.lists(st.tuples(st.sampled_from("abcd"), st.text(max_size=3)), max_size=30)


@given(tables, st.integers(1, 3), st.sampled_from("abcd"))
def test_a_person_who_goes_changes_no_other_persons_rows(rows: list[Any], most: int, gone: str) -> None:
    rule = {"user": "p", "rows": most, "share": 0.4}
    fewer = [row for row in rows if row[0] != gone]
    for whole, without in zip(chosen(rows, **rule), chosen(fewer, **rule), strict=True):
        assert [row for row in whole if row[0] != gone] == without
        assert all(sum(row[0] == person for row in whole) <= most for person in "abcd")


@given(tables, st.integers(0, 29))
def test_a_record_that_goes_changes_no_other_records_place(rows: list[Any], gone: int) -> None:
    fewer = rows[:gone] + rows[gone + 1 :]
    for whole, without in zip(chosen(rows, share=0.5), chosen(fewer, share=0.5), strict=True):
        lost = Counter(whole) - Counter(without)
        assert not Counter(without) - Counter(whole)
        assert lost <= Counter(rows[gone : gone + 1])


def test_a_persons_rows_are_all_on_one_side() -> None:
    rows = [(str(person), str(row)) for row in range(5) for person in range(200)]
    kept, held = chosen(rows, user="p", rows=5, share=0.3)
    assert not {person for person, _ in kept} & {person for person, _ in held}
    assert len(kept) + len(held) == 1000
    assert 30 <= len({person for person, _ in held}) <= 90


@pytest.mark.parametrize("blank", ["", "  ", None, float("nan"), "NaN", "null", np.datetime64("NaT")])
def test_people_without_an_identifier_are_left_out_and_decide_nothing(blank: Any) -> None:
    rows = [(blank, "1"), (blank, "2"), ("b", "3")]
    for table in (rows, rows[1:]):
        assert chosen(table, user="p") == ([("b", "3")], [])
    kept, held = chosen(rows, user="p", rows=3, share=0.999999)
    assert kept + held == [("b", "3")]


def test_spaces_around_an_identifier_do_not_make_another_person() -> None:
    assert chosen([("a", "1"), ("a ", "2"), (" a", "3"), ("A", "4")], user="p")[0] == [("a", "1"), ("A", "4")]


def test_nonsense_is_refused() -> None:
    for rule in ({"share": 1.0}, {"share": -0.1}, {"rows": 0}, {"share": float("nan")}):
        with pytest.raises(InvalidValue):
            Split(**rule)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("most", [0, 7, 1000])
def test_a_spool_gives_back_what_it_was_given(most: int, dtype: type[np.floating[Any]]) -> None:
    blocks = [np.arange(6.0).reshape(3, 2), np.zeros((0, 2)), np.ones((2, 2))]
    spool = Spool(2, dtype, most)
    for block in blocks:
        spool.add(block)
    found = spool.value()
    assert np.array_equal(found, np.concatenate(blocks))
    assert found.dtype == dtype
    assert isinstance(found, np.memmap) == (most < 40)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_one_record_more_than_fits_into_memory_rounds_no_other(dtype: type[np.floating[Any]]) -> None:
    found = []
    for rows in (100, 101):
        spool = Spool(1, dtype, most=100 * np.dtype(dtype).itemsize)
        for row in range(rows):
            spool.add(np.array([[1_700_000_063.0 + row / 3]]))  # float32 is 128 apart there
        found.append(spool.value())
    assert [isinstance(table, np.memmap) for table in found] == [False, True]
    assert np.array_equal(found[0], found[1][:100])


def test_an_empty_spool_has_no_rows() -> None:
    assert Spool(3, most=0).value().shape == (0, 3)


def test_the_type_of_features_follows_from_the_schema_alone(tmp_path: Path) -> None:
    table, label = tmp_path / "a.csv", Categorical("y", ("0", "1"))
    for rows in (1, 3):
        table.write_text("x,y\n" + "0.1,1\n" * rows)
        bounded = table_files.training_rows(str(table), Schema((Numeric("x", 0, 1),), label), Split()).X
        bought = table_files.training_rows(str(table), Schema((Unbounded("x"),), label), Split()).X
        assert (bounded.dtype, bought.dtype) == (np.float32, np.float64)
        assert isinstance(bought, np.memmap)  # which estimators do not round, in tables of any size
        assert bought.shape == (rows, 1)
