"""Public rules that choose records: each looks at one person's records only."""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import farthing as ft
from farthing.data import splitting, table_files
from farthing.data.columns import Categorical, Numeric, Unbounded
from farthing.data.schema import Schema
from farthing.data.splitting import Partitions, People, Split, Spool
from farthing.data.tables import Table
from farthing.errors import InvalidValue
from farthing.linear.losses import logistic
from farthing.linear.methods.descent import descent
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream
from farthing.statistics.cells import Cells, Sums
from farthing.statistics.ranks import QuantileScores


def chosen(table: list[tuple[Any, str]], **rule: Any) -> tuple[list[tuple[Any, str]], list[tuple[Any, str]]]:
    """The rows that are kept, and those held out, of a table of (person, cell), read in blocks of three."""
    split, sides, people = Split(**rule), ([], []), (People(), People())
    for start in range(0, len(table), 3):
        block = table[start : start + 3]
        columns = {name: np.array([row[i] for row in block], dtype=object) for i, name in enumerate("pc")}
        *masks, keys = split.sides(columns, ["c"])
        for side, whose, mask in zip(sides, people, masks, strict=True):
            side.extend(row for row, takes in zip(block, mask, strict=True) if takes)
            whose.add([key for key, takes in zip(keys, mask, strict=True) if takes])
    if split.user is None:
        drawn = people[0].drawn(split.share)
        return tuple(
            [row for row, is_drawn in zip(sides[0], drawn, strict=True) if is_drawn is side]
            for side in (np.False_, np.True_)
        )
    kept, held = (
        [row for row, first in zip(side, whose.first(split.rows), strict=True) if first]
        for side, whose in zip(sides, people, strict=True)
    )
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
    rows = [("", cell) for _, cell in rows]  # equal cells are equal records: no others are read
    fewer = rows[:gone] + rows[gone + 1 :]
    for whole, without in zip(chosen(rows, share=0.5), chosen(fewer, share=0.5), strict=True):
        lost = Counter(whole) - Counter(without)
        assert not Counter(without) - Counter(whole)
        assert lost <= Counter(rows[gone : gone + 1])


@pytest.mark.parametrize("room", [0, 2**25])
def test_equal_records_are_on_both_sides(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Of a table with two kinds of records, both are learnt from and both are measured on."""
    first = People.__init__.__defaults__[:-1]
    monkeypatch.setattr(People.__init__, "__defaults__", (*first, room))
    rows = [("", "ab"[row % 2]) for row in range(4000)]
    for share in (0.2, 0.5):
        held = Counter(chosen(rows, share=share)[1])
        for kind in rows[:2]:
            assert abs(held[kind] - 2000 * share) < 6 * math.sqrt(2000 * share * (1 - share))
    assert chosen(rows[:9], share=0.0)[1] == []


def test_digests_that_share_a_word_are_told_apart() -> None:
    entries = np.array(
        [[5, 2, 0, 0, 0], [5, 1, 0, 0, 1], [4, 9, 0, 0, 2], [5, 2, 0, 0, 3], [5, 1, 0, 0, 4]], np.uint64
    )
    assert splitting._by_digest(entries)[:, -1].tolist() == [2, 1, 4, 0, 3]
    assert splitting._by_digest(entries[[0, 2, 3]])[:, -1].tolist() == [2, 0, 3]


def test_a_held_out_share_is_the_same_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "".join(f"{row % 7},{row % 3}\n" for row in range(3000))
    (tmp_path / "a.csv").write_text(f"x,y\n{rows}")
    schema = Schema((Numeric("x", 0, 7),), Numeric("y", 0, 2))
    found = []
    for room in (2**25, 0):
        for kind in (Spool, People):
            monkeypatch.setattr(kind.__init__, "__defaults__", (*kind.__init__.__defaults__[:-1], room))
        found.append(table_files.training_rows(str(tmp_path / "a.csv"), schema, Split(share=0.3)))
    few, many = found
    assert isinstance(few.X, np.memmap) < isinstance(many.X, np.memmap)
    assert few.held is not None
    assert many.held is not None
    for one, other in zip((few.X, few.y, *few.held), (many.X, many.y, *many.held), strict=True):
        assert np.array_equal(one, other)
    assert len(few.y) + len(few.held[1]) == 3000
    whole = Counter(
        zip(
            (np.arange(3000) % 7 / 7).astype(np.float32).tolist(),
            (np.arange(3000.0) % 3).tolist(),
            strict=True,
        )
    )
    parts = [Counter(zip(X[:, 0].tolist(), y.tolist(), strict=True)) for X, y in ((few.X, few.y), few.held)]
    assert parts[0] + parts[1] == whole
    assert all(part.keys() == whole.keys() for part in parts)


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


@given(
    st.lists(st.sampled_from("abcdefgh"), max_size=60), st.integers(1, 4), st.sampled_from([0, 200, 2**20])
)
def test_the_first_rows_of_each_person_are_found_in_memory_and_in_files(
    keys: list[str], most: int, room: int
) -> None:
    people = People(most=room)
    for start in range(0, len(keys), 7):
        people.add([key.encode() for key in keys[start : start + 7]])
    counted = Counter[str]()
    expected = []
    for key in keys:
        counted[key] += 1
        expected.append(counted[key] <= most)
    assert people.first(most).tolist() == expected


@pytest.mark.parametrize("room", [0, 2**29])
def test_a_table_in_files_keeps_the_same_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """A person's records are bounded on both sides, wherever features, targets and people lie."""
    monkeypatch.setattr(splitting, "_MARKED", room)
    whole = np.random.default_rng(0).integers(0, 700, 3000)
    rows = "".join(f"p{person},{row % 97},{row}\n" for row, person in enumerate(whole))
    (tmp_path / "a.csv").write_text(f"p,x,y\n{rows}")
    schema = Schema((Numeric("x", 0, 100),), Numeric("y", 0, 3000))
    for kind in (Spool, People):
        first = kind.__init__.__defaults__[:-1]
        monkeypatch.setattr(kind.__init__, "__defaults__", (*first, min(room, 2**25)))
    found = table_files.training_rows(str(tmp_path / "a.csv"), schema, Split("p", 2, 0.3))
    assert found.held is not None
    assert isinstance(found.X, np.memmap) == (room == 0)
    sides = [{int(row) for row in y} for y in (found.y, found.held[1])]
    places = {person: np.flatnonzero(whole == person).tolist() for person in set(whole.tolist())}
    for mine in places.values():
        (side,) = (side for side in sides if mine[0] in side)
        assert {*mine} & (sides[0] | sides[1]) == {*mine} & side == {*mine[:2]}
    for X, y in ((found.X, found.y), found.held):
        assert np.array_equal(X[:, 0], ((y % 97) / 100).astype(np.float32))


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


RNG = np.random.default_rng(0)
CODES, NUMBERS = RNG.integers(-1, 4, 3000), RNG.normal(3, 2, 3000)


def cut(*arrays: Any) -> list[tuple[Any, ...]]:
    """The arrays in parts of several sizes, one of them empty."""
    return list(zip(*(np.split(array, [10, 10, 1500, 2999]) for array in arrays), strict=True))


def released(records: Any, query: ft.Query) -> Any:
    ledger = ft.Ledger(ft.Budget(5.0, 1e-6), stream=SeededStream(7))
    return ledger.over(records).ask(query).value


SUMS = Sums(4, 0.0, 6.0)
QUERIES = {
    "everyone": ft.Query(ft.Everyone(), SUMS, ft.ClipNorm(SUMS.norms[1]), ft.Gaussian(2.0)),
    "counts": ft.Query(ft.Everyone(), Cells(1, 4), ft.ClipNorm(1.0), ft.Gaussian(2.0)),
}


@pytest.mark.parametrize("name", QUERIES)
def test_a_statistic_is_the_same_to_the_last_bit(name: str) -> None:
    whole = ft.Rows(CODES, NUMBERS)
    parts = Partitions([ft.Rows(*some) for some in cut(CODES, NUMBERS)])
    assert len(parts) == 3000
    assert np.array_equal(released(parts, QUERIES[name]), released(whole, QUERIES[name]))
    backwards = Partitions([ft.Rows(*some) for some in reversed(cut(CODES, NUMBERS))])
    assert np.array_equal(released(backwards, QUERIES[name]), released(whole, QUERIES[name]))


def test_some_of_the_records_are_those_of_the_whole() -> None:
    parts = Partitions([ft.Rows(*some) for some in cut(CODES, NUMBERS)])
    whole, some = ft.Rows(CODES, NUMBERS), RNG.permutation(3000)[:500]
    bound = ft.ClipNorm(SUMS.norms[1])
    expected = SUMS.bounded_sum(whole.take(some), None, bound)
    assert np.array_equal(parts.take(some).summed(SUMS, None, bound), expected)
    assert len(parts.take(some)) == 500
    assert len(parts.take(np.empty(0, np.int64))) == 0


def test_a_record_that_fails_counts_as_zero_in_any_part() -> None:
    def ill(rows: Any, w: Any) -> Any:
        if (rows[0] == 13).any():
            raise ValueError("record 13 is ill")
        return np.ones((len(rows), 1))

    ledger = ft.Ledger(ft.Budget(1e4, 1e-2))
    query = ft.Query(ft.Everyone(), ft.PerExample(ill), ft.ClipNorm(1.0), ft.Gaussian(0.01))
    parts = Partitions([ft.Rows(np.arange(10)), ft.Rows(np.arange(10, 20))])
    assert round(float(ledger.over(parts).ask(query).value[0])) == 19


def test_what_is_no_sum_is_refused_before_anything_is_charged() -> None:
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6))
    query = ft.Query(ft.Everyone(), QuantileScores(0.5, 0.0, 1.0), ft.ClipValue(-0.5, 0.5), ft.NoisyMax(9.0))
    with pytest.raises(ft.Unsupported, match="not a sum over records"):
        ledger.over(Partitions([ft.Rows(NUMBERS)])).ask(query)
    assert ledger.share == 0
    with pytest.raises(ft.InvalidValue, match="one part or more"):
        Partitions([])


def logistic_tables() -> tuple[Table, list[Table]]:
    X = np.random.default_rng(0).uniform(size=(3000, 3))
    y = (X[:, 0] > X[:, 1]).astype(np.float64)
    return Table(X, y), [Table(*some) for some in cut(X, y)]


def weights(records: Any) -> Any:
    ledger = ft.Ledger(ft.Budget(2.0, 1e-6), stream=SeededStream(3))
    u, constant = ft.run(descent(ledger.over(records), Problem(logistic, 3000, 3, unit=False))).w
    return np.append(u, constant)


def test_a_training_is_the_same_to_rounding() -> None:
    whole, parts = logistic_tables()
    assert np.allclose(weights(Partitions(parts)), weights(whole), rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed", reason="needs the extra dask")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as found,
    ):
        yield found


@pytest.mark.slow
def test_a_cluster_releases_the_same(client: Any) -> None:
    rows = [ft.Rows(*some) for some in cut(CODES, NUMBERS)]
    parts = Partitions.on(client, client.scatter(rows))
    assert np.array_equal(
        released(parts, QUERIES["everyone"]), released(ft.Rows(CODES, NUMBERS), QUERIES["everyone"])
    )
    whole, some = logistic_tables()
    assert np.allclose(
        weights(Partitions.on(client, client.scatter(some))), weights(whole), rtol=1e-9, atol=1e-9
    )
