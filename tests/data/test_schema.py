import hashlib
import importlib.util
import json
import lzma
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from farthing import validate
from farthing.data.adult import ADULT, ADULT_SHA256, Dataset, load_adult
from farthing.data.schema import Categorical, Numeric, Schema, find, skeleton
from farthing.errors import InvalidValue

PEOPLE = Schema(
    columns=(Numeric("age", 0, 100), Categorical("sex", ("Female", "Male"))),
    target=Categorical("rich", ("no", "yes")),
)


@pytest.fixture(scope="module")
def adult() -> Dataset:
    return load_adult()


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "build_adult.py"
    spec = importlib.util.spec_from_file_location("build_adult", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The embedded table


def test_adult_has_the_published_counts(adult: Dataset) -> None:
    assert adult.X.shape == (48_842, 108)
    assert adult.X_train.shape == (32_561, 108)
    assert adult.X_test.shape == (16_281, 108)
    assert len(adult.y_train) == 32_561
    assert len(adult.y_test) == 16_281
    assert set(adult.y.tolist()) == {0, 1}
    assert adult.y.sum() == 11_687


def test_first_records_are_those_of_ucis_files(adult: Dataset) -> None:
    def record(row: int) -> tuple[object, ...]:
        return tuple(np.asarray(adult.table[name])[row].item() for name in ("age", "workclass", "fnlwgt"))

    assert record(0) == (39, "State-gov", 77_516)
    assert record(adult.split) == (25, "Private", 226_802)


def test_missing_values_stay_where_uci_documents_them(adult: Dataset) -> None:
    missing = {name: int((np.asarray(column) == "?").sum()) for name, column in adult.table.items()}
    assert {name: count for name, count in missing.items() if count} == {
        "workclass": 2_799,
        "occupation": 2_809,
        "native-country": 857,
    }


def test_public_schema_covers_every_record(adult: Dataset) -> None:
    for column in ADULT.columns:
        values = np.asarray(adult.table[column.name])
        if isinstance(column, Numeric):
            assert column.low <= values.min() <= values.max() <= column.high
        else:
            assert (column.codes(values) >= 0).all()


def test_features_lie_in_the_unit_interval(adult: Dataset) -> None:
    assert adult.X.dtype == np.float64
    assert adult.X.min() == 0.0
    assert adult.X.max() == 1.0
    one_hot = ["=" in name for name in adult.schema.feature_names]
    assert (adult.X[:, one_hot].sum(axis=1) == 8).all()


def test_embedded_file_is_small_and_has_its_checksum() -> None:
    compressed = files("farthing").joinpath("data", "datasets", "adult.xz").read_bytes()
    assert len(compressed) < 600_000
    assert hashlib.sha256(lzma.decompress(compressed)).hexdigest() == ADULT_SHA256


def test_damaged_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farthing.data.adult.ADULT_SHA256", "0" * 64)
    with pytest.raises(InvalidValue, match="checksum"):
        load_adult()


def test_printing_a_dataset_shows_no_record(adult: Dataset) -> None:
    assert repr(adult) == "Dataset(name='adult', split=32561)"


# The builder


def source_csv(adult: Dataset) -> str:
    """The builder's source, written back from the embedded table."""

    def text(name: str) -> list[str]:
        suffix = ".0" if name in ("fnlwgt", "capital-gain", "capital-loss") else ""
        return [
            "" if value == "?" else f"{value}{suffix}" for value in np.asarray(adult.table[name]).tolist()
        ]

    names = [column.name for column in (*ADULT.columns, ADULT.target)]
    rows = list(zip(*map(text, names), strict=True))
    rows = rows[adult.split :] + rows[: adult.split]
    return "".join(",".join(row) + "\n" for row in [names, *rows])


def test_nothing_of_the_source_was_lost(adult: Dataset, builder: ModuleType) -> None:
    assert hashlib.sha256(source_csv(adult).encode()).hexdigest() == builder.CSV_SHA256


def test_builder_reproduces_the_embedded_table(adult: Dataset, builder: ModuleType, tmp_path: Path) -> None:
    source, out = tmp_path / "adult_census.csv", tmp_path / "adult.xz"
    source.write_bytes(source_csv(adult).encode())
    builder.main([str(source), "--out", str(out)])
    assert hashlib.sha256(lzma.decompress(out.read_bytes())).hexdigest() == ADULT_SHA256


def test_builder_refuses_another_source(builder: ModuleType, tmp_path: Path) -> None:
    source, out = tmp_path / "adult_census.csv", tmp_path / "adult.xz"
    source.write_text("age,class\n39,<=50K\n")
    with pytest.raises(SystemExit, match="sha256"):
        builder.main([str(source), "--out", str(out)])
    assert not out.exists()


@pytest.mark.parametrize(
    "table",
    [
        {"age": [0.5], "sex": ["Male"], "rich": ["no"]},
        {"age": [-1], "sex": ["Male"], "rich": ["no"]},
        {"age": [256], "sex": ["Male"], "rich": ["no"]},
        {"age": [1], "sex": ["Unknown"], "rich": ["no"]},
    ],
)
def test_builder_packs_only_what_it_can_give_back(
    builder: ModuleType, table: dict[str, list[object]]
) -> None:
    with pytest.raises(ValueError, match="holds a"):
        builder.pack(table, PEOPLE)


# The same records elsewhere


def test_agrees_with_an_independent_copy(adult: Dataset) -> None:
    path = find("adult.npz")
    if path is None:
        pytest.skip("adult.npz not found; set FARTHING_DATA to its folder")
    with np.load(path) as other:
        X = np.concatenate([other["X_train"], other["X_test"]]).astype(np.float64)
        y = np.concatenate([other["y_train"], other["y_test"]])
        raw = X * (other["col_max"] - other["col_min"]) + other["col_min"]
        names = other["feature_names"].tolist()
    assert sorted(names) == sorted(adult.schema.feature_names)
    assert np.array_equal(y, adult.y)
    for name, values in zip(names, np.rint(raw).T, strict=True):
        column, _, value = name.partition("=")
        mine = np.asarray(adult.table[column])
        assert np.array_equal(values, mine == value if value else mine), name


def test_find_looks_where_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.npz").touch()
    monkeypatch.setenv("FARTHING_DATA", str(tmp_path))
    assert find("a.npz") == tmp_path / "a.npz"
    assert find("b.npz") is None


# Schemas


def test_numbers_are_clipped_to_the_public_bounds() -> None:
    X = PEOPLE.encode({"age": [-5, 0, 25, 100, 1e300], "sex": ["Male"] * 5})
    assert X[:, 0].tolist() == [0.0, 0.0, 0.25, 1.0, 1.0]


@pytest.mark.parametrize("value", ["Unknown", "male", "", None, 1, float("nan"), ["Male"]])
def test_value_outside_the_vocabulary_encodes_as_zeros(value: object) -> None:
    sex = np.empty(2, dtype=object)
    sex[:] = [value, "Male"]
    assert PEOPLE.encode({"age": [1, 1], "sex": sex})[:, 1:].tolist() == [[0.0, 0.0], [0.0, 1.0]]


def test_labels_are_positions_in_the_targets_vocabulary() -> None:
    assert PEOPLE.encode_target({"rich": ["yes", "no", "yes"]}).tolist() == [1, 0, 1]


def test_an_unknown_label_is_none_of_them() -> None:
    assert PEOPLE.encode_target({"rich": ["yes", "secret"]}).tolist() == [1, -1]


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf"), None, "secret", 10**400, 1j, []]
)
def test_what_is_no_finite_number_becomes_nan_and_others_stay(value: object) -> None:
    age = np.empty(2, dtype=object)
    age[:] = [41.5, value]
    encoded = PEOPLE.encode({"age": age, "sex": ["Male"] * 2})
    assert np.isnan(encoded[1, 0])
    assert np.isfinite(encoded[0]).all()
    assert not PEOPLE.columns[0].holds(age)


@pytest.mark.parametrize("dtype", ["complex128", "datetime64[D]"])
def test_column_that_holds_no_numbers_is_refused(dtype: str) -> None:
    with pytest.raises(InvalidValue, match="column 'age'"):
        PEOPLE.encode({"age": np.zeros(2, dtype=dtype), "sex": ["Male"] * 2})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"age": [1]}, "no column 'sex'"),
        ({"age": [1, 2], "sex": ["Male"]}, "equally long: 'sex' and 'age' are not"),
        ({"age": np.array([[1]]), "sex": ["Male"]}, "column 'age' must be a column, .* got 2 dim"),
    ],
)
def test_malformed_table_is_refused(table: dict[str, list[int]], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        PEOPLE.encode(table)


def test_empty_table_encodes_to_no_rows() -> None:
    assert PEOPLE.encode({"age": [], "sex": []}).shape == (0, 3)


@pytest.mark.parametrize(
    ("low", "high"), [(1, 1), (2, 1), (0, float("inf")), (float("nan"), 1), (-1.7e308, 1.7e308)]
)
def test_nonsense_bounds_are_refused(low: float, high: float) -> None:
    with pytest.raises(InvalidValue):
        Numeric("age", low, high)


@pytest.mark.parametrize("values", [(), ("a", "a")])
def test_nonsense_vocabulary_is_refused(values: tuple[str, ...]) -> None:
    with pytest.raises(InvalidValue, match="distinct values"):
        Categorical("sex", values)


def test_schema_needs_distinct_names_and_a_column() -> None:
    age, label = Numeric("age", 0, 1), Categorical("age", ("no", "yes"))
    with pytest.raises(InvalidValue, match="each column once, got 'age' twice"):
        Schema((age,), label)
    with pytest.raises(InvalidValue, match="a column beside its target"):
        Schema((), label)


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(arrays(np.float64, st.integers(0, 20), elements=finite), finite, finite)
def test_every_finite_number_encodes_into_the_unit_interval(values: np.ndarray, a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    if not validate.interval(low, high):
        with pytest.raises(InvalidValue):
            Numeric("x", low, high)
        return
    schema = Schema((Numeric("x", low, high),), PEOPLE.target)
    X = schema.encode({"x": values})
    assert X.shape == (len(values), 1)
    assert ((X >= 0) & (X <= 1)).all()
    assert (np.diff(X[np.argsort(values), 0]) >= 0).all()


# Schemas as JSON


HOURS = Schema((Categorical("sex", ("Female", "Male, or other", "?")),), Numeric("hours", 1.5, 99))


@pytest.mark.parametrize("schema", [PEOPLE, HOURS, ADULT], ids=["people", "hours", "adult"])
def test_json_gives_the_schema_back(schema: Schema) -> None:
    assert Schema.from_json(schema.to_json()) == schema


names = st.text(min_size=1)
numeric = st.builds(
    lambda name, low, width: Numeric(name, low, low + width), names, st.integers(-9, 9), st.floats(0.1, 1e9)
)
categorical = st.builds(
    Categorical, names, st.lists(st.text(), min_size=2, max_size=4, unique=True).map(tuple)
)


@given(
    st.lists(numeric | categorical, min_size=2, max_size=5, unique_by=lambda column: column.name),
)
def test_json_gives_any_schema_back(columns: list[Numeric | Categorical]) -> None:
    schema = Schema(tuple(columns[1:]), columns[0])
    assert Schema.from_json(schema.to_json()) == schema


def test_a_filled_in_skeleton_is_a_schema() -> None:
    blank = json.loads(skeleton(["age", "sex", "rich"], "rich"))
    assert [column["name"] for column in blank["columns"]] == ["age", "sex"]
    with pytest.raises(InvalidValue, match="'age' either 'low' and 'high' or 'values'"):
        Schema.from_json(json.dumps(blank))
    blank["columns"][0] |= {"low": 0, "high": 100}
    blank["columns"][1]["values"] = ["Female", "Male"]
    blank["target"]["values"] = ["no", "yes"]
    assert Schema.from_json(json.dumps(blank)) == PEOPLE


def test_whole_numbers_may_be_values() -> None:
    text = '{"columns": [{"name": "x", "low": 0, "high": 1}], "target": {"name": "y", "values": [0, 1]}}'
    assert Schema.from_json(text).target == Categorical("y", ("0", "1"))


AGE = '{"name": "age", "low": 0, "high": 9}'
RICH = '{"name": "rich", "values": ["no", "yes"]}'


@pytest.mark.parametrize(
    ("columns", "target", "message"),
    [
        (
            AGE,
            '{"name": "rich"}',
            r"'target' .* column 'rich' either 'low' and 'high' or 'values' or 'first' and 'last', got \[\]",
        ),
        (AGE, '{"name": "rich", "values": ["no"]}', "target 'rich' needs two values or more"),
        (AGE, '{"values": ["no", "yes"]}', "'target' .* 'name'"),
        (AGE, "null", "'target' .* 'name'"),
        (AGE, AGE, "'age' twice"),
        ("", RICH, "needs a column"),
        (f'{AGE}, {{"name": "b", "low": 0}}', RICH, r"'columns\[1\]' .* column 'b' .* got \['low'\]"),
        ('{"name": "a", "low": 0, "high": 1, "values": ["x"]}', RICH, r"columns\[0\]"),
        ('{"name": "a", "low": 0, "high": 1, "scale": 3}', RICH, "scale"),
        ('{"name": "a", "low": 0, "high": "x"}', RICH, "high of column 'a'"),
        ('{"name": "a", "low": true, "high": 2}', RICH, "low of column 'a'"),
        ('{"name": "a", "low": 0, "high": Infinity}', RICH, "high of column 'a'"),
        ('{"name": "a", "low": NaN, "high": 1}', RICH, "low of column 'a'"),
        ('{"name": "a", "low": 2, "high": 1}', RICH, "column 'a' must have low < high"),
        ('{"name": "a", "values": "x"}', RICH, "'values' of column 'a'"),
        ('{"name": "a", "values": [1.5]}', RICH, "'values' of column 'a'"),
        ('{"name": "a", "values": [true]}', RICH, "'values' of column 'a'"),
        ('{"name": "a", "values": [1, "1"]}', RICH, "column 'a' needs distinct values"),
        ('{"name": 3, "values": ["x"]}', RICH, r"'columns\[0\]' .* 'name'"),
        ("7", RICH, r"'columns\[0\]'"),
    ],
)
def test_json_that_is_no_schema_names_the_key(columns: str, target: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        Schema.from_json(f'{{"columns": [{columns}], "target": {target}}}')


def test_a_schema_says_who_checked_it() -> None:
    text = f'{{"checked_by": "Ann, 2026-11-16", "columns": [{AGE}], "target": {RICH}}}'
    schema = Schema.from_json(text)
    assert schema.checked_by == "Ann, 2026-11-16"
    assert Schema.from_json(schema.to_json()) == schema
    assert schema.without([]).checked_by == schema.checked_by
    with pytest.raises(InvalidValue, match="'checked_by' of a schema must be a text, got 3"):
        Schema.from_json(text.replace('"Ann, 2026-11-16"', "3"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("age: 0 to 9", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ("[]", "'columns' and 'target' and may have 'checked_by', got list"),
        ('{"columns": []}', "'columns' and 'target'"),
        (f'{{"columns": [{AGE}], "target": {RICH}, "extra": 1}}', "extra"),
        (f'{{"columns": {AGE}, "target": {RICH}}}', "'columns' of a schema must be a list"),
    ],
)
def test_text_that_is_no_schema_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        Schema.from_json(text)


def test_a_numeric_target_is_clipped_in_its_own_unit() -> None:
    y = HOURS.encode_target({"hours": ["0", "40", "168"]})
    assert y.tolist() == [1.5, 40.0, 99.0]
    assert np.isnan(HOURS.encode_target({"hours": ["40", "secret"]})[1])
