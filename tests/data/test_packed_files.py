"""Packed files: each kind is unpacked by its content, and what is spoilt or something else is named."""

import bz2
import gzip
import io
import lzma
import zipfile
from pathlib import Path

import pytest

from farthing.data.csv_files import Csv
from farthing.errors import InvalidValue

TEXT = b"a,b\n" + b"".join(b"%d,secret%d\n" % (row, row) for row in range(5000))


def zipped(**files: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


PACKED = {
    "gzip": gzip.compress(TEXT),
    "bzip2": bz2.compress(TEXT),
    "xz": lzma.compress(TEXT),
    "zip": zipped(people=TEXT),
}


@pytest.mark.parametrize("kind", PACKED)
def test_each_kind_is_unpacked_and_a_part_of_it_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.data"
    path.write_bytes(PACKED[kind])
    seen: list[float] = []
    blocks = Csv(seen=seen.append).columns(str(path), ["a"])
    assert [cell for block in blocks for cell in block["a"]] == [str(row) for row in range(5000)]
    assert seen[-1] > 0.5
    for part in (len(PACKED[kind]) // 2, 8):
        path.write_bytes(PACKED[kind][:part])
        with pytest.raises(InvalidValue, match=f"is not a complete {kind} file") as caught:
            list(Csv().columns(str(path), ["a"]))
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (zipped(a=TEXT, b=TEXT), "holds 2 files"),
        (zipped(**{"[Content_Types].xml": b"", "xl/workbook.xml": b""}), "a workbook or a document"),
        (b"\xd0\xcf\x11\xe0secret", "an Excel workbook: save it as CSV"),
        (b"SQLite format 3\0secret", "an SQLite database"),
        (b"\x28\xb5\x2f\xfdsecret", "packed by zstd: unpack it first"),
        (b"\xff\xff\xff\xffsecret", "an Arrow stream"),
        (b'[{"a": "secret"}]', "a JSON file"),
        (b'{"a": "secret"}\n', "a JSON file"),
        (b"<!DOCTYPE html><table><td>secret", "an HTML or XML document"),
        (gzip.compress(b"PAR1secret", mtime=0), "a packed Parquet file: unpack it first"),
        (zipped(a=b'[{"a": "secret"}]'), "a JSON file"),
        (
            gzip.compress(b"a.csv".ljust(257, b"\0") + b"ustar" + TEXT, mtime=0),
            "a tar archive: unpack it first",
        ),
    ],
)
def test_what_is_no_text_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(InvalidValue, match=message) as caught:
        Csv().header(str(path))
    assert "secret" not in str(caught.value)
