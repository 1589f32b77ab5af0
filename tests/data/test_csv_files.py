"""CSV files: what is read, what is refused, and that no message shows a cell."""

import gzip
from pathlib import Path

import pytest

from farthing.data import csv_cells, csv_files
from farthing.data.csv_files import Csv
from farthing.errors import InvalidValue


def table(path: Path, names: list[str], form: Csv = Csv()) -> list[dict[str, list[str]]]:  # noqa: B008
    return [
        {name: column.tolist() for name, column in block.items()} for block in form.columns(str(path), names)
    ]


def test_named_columns_in_any_order_and_quoted_cells(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('\ufeffa,b, c\n1,"x, y",3\n\n4,"two\nlines", 6\n', encoding="utf-8")
    assert table(path, ["c", "b"]) == [{"c": ["3", "6"], "b": ["x, y", "two\nlines"]}]
    assert Csv().header(str(path), "a") == ["a", "b", "c"]


def test_a_record_with_a_long_cell_is_a_record(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"a,note\n1,short\n2,{'x' * 200_000}\n", encoding="utf-8")
    assert table(path, ["a"]) == [{"a": ["1", "2"]}]


def test_gzip(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n1,2\n"))
    assert table(path, ["a"]) == [{"a": ["1"]}]
    path.write_bytes(gzip.compress(b"a,b\n1,2\n" * 1000)[:-9])
    with pytest.raises(InvalidValue, match="not a complete gzip file"):
        table(path, ["a"])
    path.write_bytes(b"a,b\n1,2\n")
    with pytest.raises(InvalidValue, match="not a complete gzip file"):
        table(path, ["a"])


def test_a_line_without_an_end_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_files, "_LONGEST", 100)
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "secret," * 100)
    with pytest.raises(InvalidValue, match="a line of more than 100 characters") as error:
        table(path, ["a"])
    assert "secret" not in str(error.value)
    path.write_text("a,b\n" + f"{'x' * 50},{'y' * 40}\n" * 3)
    assert len(table(path, ["a"])[0]["a"]) == 3


def test_records_are_counted_without_a_look_at_their_cells(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('a,b\n1,"two\nlines"\n\n,\n')
    assert Csv().count(str(path), ["b"]) == 2
    with pytest.raises(InvalidValue, match="no column 'c'"):
        Csv().count(str(path), ["c"])


def test_blocks_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_files, "_BLOCK", 2)
    monkeypatch.setattr(csv_cells, "split", lambda *_: None)  # as without kernels
    path = tmp_path / "a.csv"
    for rows, sizes in ((4, [2, 2]), (5, [2, 2, 1]), (0, [])):
        path.write_text("a\n" + "".join(f"{row}\n" for row in range(rows)))
        found = [block["a"] for block in table(path, ["a"])]
        assert [len(block) for block in found] == sizes
        assert [cell for block in found for cell in block] == [str(row) for row in range(rows)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"secret,7\nsecret,8\n", "no column 'a'"),
        (b"a,a,b\n1,2,secret\n", "two columns 'a'"),
        (b"a;c\n1;secret\n", "no column 'b': .* between semicolons"),
        (b"a:b\n1:secret\n", "no column 'a', no column 'b': .* between commas"),
        (b"a,b\n1,2\n3,secret,5\n", "not every record has as many cells as the header, 2"),
        (b"a,b\n1,2\nsecret\n", "not every record has as many cells as the header, 2"),
        (b"a,b\n1,secret\xff\n", "not UTF-8 text"),
        (b'a,b\n1,"secret\n', "not a CSV table"),
        (b'a,b\n1,"secret"more\n', "a quote within a cell is not doubled"),
    ],
)
def test_refused_without_showing_a_cell(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(InvalidValue, match=message) as caught:
        table(path, ["a", "b"])
    assert "secret" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_header_is_only_shown_when_it_is_one(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("39,secret\n40,secret\n")
    with pytest.raises(InvalidValue, match="no column 'income'") as caught:
        Csv().header(str(path), "income")
    assert "secret" not in str(caught.value)


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.csv", tmp_path, tmp_path / "missing.csv.gz"):
        with pytest.raises(InvalidValue, match=f"{path.name}' cannot be read"):
            table(path, ["a"])


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_first_line_alone_says_what_separates_cells(tmp_path: Path, delimiter: str) -> None:
    path = tmp_path / "a.csv"
    inside = '";;;,,,|||\t\t\t"'  # in quotes, and in a record, they do not count
    path.write_text(f"{inside}{delimiter}b{delimiter}c\n{inside}{delimiter}2{delimiter}3\n")
    assert table(path, ["b", "c"]) == [{"b": ["2"], "c": ["3"]}]


def test_a_delimiter_may_be_declared(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a:b,c\n1:2\n")
    assert table(path, ["b,c"], Csv(delimiter=":")) == [{"b,c": ["2"]}]
    for end in ("", "  "):  # as columns of a fixed width have
        path.write_text(f"a   b{end}\n 1  22{end}\n333 4")
        assert table(path, ["b"], Csv(delimiter=" ")) == [{"b": ["22", "4"]}]
    for wrong in ("", "ab", '"', "\n"):
        with pytest.raises(InvalidValue, match="one character"):
            Csv(delimiter=wrong)
    with pytest.raises(InvalidValue, match="commas cannot both"):
        Csv(delimiter=",", decimal=",")
    with pytest.raises(InvalidValue, match="decimal mark"):
        Csv(decimal="x")


def test_fractions_begin_with_a_comma_where_semicolons_separate(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for text, expected in (("a;b\n", True), ("a,b\n", False), ("a\tb\n", False)):
        path.write_text(text)
        assert Csv().commas(str(path)) is expected
    assert Csv(decimal=",").commas(str(path))
    assert not Csv(decimal=".").commas(str(path))


def test_all_wrong_names_are_said_at_once_with_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("Age,income,sex,sex\n1,2,3,4\n")
    with pytest.raises(InvalidValue) as caught:
        table(path, ["age", "income", "sex", "zzz"])
    expected = "no column 'age' (did you mean 'Age'?), two columns 'sex', no column 'zzz': its first line"
    assert expected in str(caught.value)


def test_a_first_line_without_any_wanted_name_is_never_hinted_at(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("Age,Income\n1,2\n")  # as a record might
    with pytest.raises(InvalidValue) as caught:
        table(path, ["age", "income"])
    assert "mean" not in str(caught.value)


def test_gzip_is_known_by_its_content_and_reading_tells_how_far_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.data"
    path.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 2_000_000, 1))
    seen: list[float] = []
    assert sum(len(block["a"]) for block in table(path, ["a"], Csv(seen=seen.append))) == 2_000_000
    assert seen == sorted(seen)
    assert len(seen) > 10
    assert seen[-1] == 1.0


def test_text_is_read_as_its_first_bytes_or_the_caller_say(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    text = "a,b\n1,Köln\n"
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"):
        path.write_bytes(text.encode(encoding))
        assert table(path, ["b"]) == [{"b": ["Köln"]}], encoding
        assert table(path, ["b"], Csv(encoding=encoding)) == [{"b": ["Köln"]}], encoding
    path.write_bytes(text.encode("cp1252"))
    with pytest.raises(InvalidValue, match="give --encoding"):
        table(path, ["b"])
    assert table(path, ["b"], Csv(encoding="cp1252")) == [{"b": ["Köln"]}]
    path.write_bytes(text.encode("utf-8-sig"))
    assert table(path, ["a"], Csv(encoding="UTF8")) == [{"a": ["1"]}]
    for wrong in ("latin-one", "hex"):
        with pytest.raises(InvalidValue, match="encoding must be one of text"):
            Csv(encoding=wrong)


def test_lines_above_the_header_and_blank_ones_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("\n  \na,b\n\n1,2\n   \n3,4\n")
    assert table(path, ["a"]) == [{"a": ["1", "3"]}]
    path.write_text("# made on Monday\nCustomers;;\n\na,b\n1,2\n")
    assert table(path, ["b"], Csv(header_line=3)) == [{"b": ["2"]}]
    path.write_text("sep=|\na,c|b\n1,5|2\n")
    assert table(path, ["a,c", "b"]) == [{"a,c": ["1,5"], "b": ["2"]}]
    with pytest.raises(InvalidValue, match="line of the header"):
        Csv(header_line=0)


def test_a_mark_at_the_end_of_records_opens_no_cell(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2,\n3,4\n")
    assert table(path, ["b"]) == [{"b": ["2", "4"]}]
    path.write_text("a,b\n1,2\n1,2,,\n")
    with pytest.raises(InvalidValue, match=r"the header, 2 \(record 2 after it"):
        table(path, ["b"])
