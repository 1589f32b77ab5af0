"""Where a guard's records come from."""

import numpy as np
import pytest

from farthing.data.adult import ADULT
from farthing.deploy.guard.policy import Policy
from farthing.deploy.guard.server import records_of
from farthing.errors import InvalidValue

SCHEMA = """{"columns": [{"name": "age", "low": 0, "high": 100}, {"name": "sex", "values": ["f", "m"]}],
"target": {"name": "ill", "values": ["no", "yes"]}}"""
ROWS = "ill,age,sex\nno,50,f\nyes,100,m\n"


@pytest.fixture
def load(village):
    """Records of a policy that was changed."""
    house = village.settle(1).houses["p0"]
    (house.folder / "ward.csv").write_text(ROWS)
    (house.folder / "ward.json").write_text(SCHEMA)

    def change(*changes):
        text = house.policy.read_text()
        for before, after in changes:
            assert before in text
            text = text.replace(before, after)
        house.policy.write_text(text)
        return records_of(Policy.load(house.policy))

    change.folder = house.folder
    return change


def test_arrays(load):
    table = load()
    assert (len(table), table.X.shape[1]) == (20, 2)


def test_a_table_with_its_schema(load):
    table = load(
        ('records = "records.npz"', 'records = "ward.csv"\nschema = "ward.json"'), ("width = 2", "width = 3")
    )
    np.testing.assert_array_equal(table.X, [[0.5, 1, 0], [1, 0, 1]])
    np.testing.assert_array_equal(table.y, [0.0, 1.0])


def test_the_embedded_data(load):
    table = load(
        ('records = "records.npz"', 'records = "adult"\nschema = "adult"'),
        ("width = 2", f"width = {ADULT.width}"),
    )
    assert len(table) > 30_000


@pytest.mark.parametrize(
    ("arrays", "what"),
    [
        ({"X": np.zeros((3, 2))}, "arrays X and y"),
        ({"X": np.zeros((3, 2)), "y": np.array([0.0, np.nan, 1.0])}, "finite"),
        ({"X": np.zeros((3, 2)), "y": np.zeros((3, 1))}, "one finite number"),
        ({"X": np.zeros((3, 2)), "y": np.array(["a", "b", "c"])}, "finite number"),
        ({"X": np.zeros(3), "y": np.zeros(3)}, "2 features"),
        ({"X": np.full((3, 2), np.inf), "y": np.zeros(3)}, "finite"),
        ({"X": np.zeros((3, 2)), "y": np.zeros(4)}, "one target per row"),
    ],
)
def test_arrays_that_are_no_records(arrays, what, load):
    np.savez(load.folder / "records.npz", **arrays)
    with pytest.raises(InvalidValue, match=what):
        load()


def test_files_that_are_none(load):
    for content in (b"", b"PK", b"hello"):
        (load.folder / "records.npz").write_bytes(content)
        with pytest.raises(InvalidValue, match=r"\.npz"):
            load()
    (load.folder / "records.npz").unlink()
    with pytest.raises(InvalidValue, match="No such file"):
        load()


def test_a_check_tells_the_public_key(village, run):
    house = village.settle(1).houses["p0"]
    done = run("guard", house.policy, "--check", "--json")
    assert done.code == 0
    assert done.json["ok"] is True
    assert len(bytes.fromhex(done.json["public"])) == 32
    assert run("guard", house.policy, "--json").code == 2


def test_a_policy_s_hashes_are_printed_as_they_go_into_it(installed, capsys):
    from farthing.cli.main import main

    asked = installed().settle(1)
    house = asked.village.houses["p0"]
    house.policy.write_text(house.policy.read_text().replace(asked.hash, "0" * 64))
    assert main(["guard", str(house.policy), "--hashes"]) == 0
    assert capsys.readouterr().out == f'[models.small]\nhash = "{asked.hash}"\n'
    assert main(["guard", str(house.policy), "--check"]) == 2
    assert "look at what changed" in capsys.readouterr().err
    house.policy.write_text(house.policy.read_text().replace("0" * 64, asked.hash))
    assert main(["guard", str(house.policy), "--check", "--json"]) == 0


def test_a_policy_of_a_table_has_no_hashes(village, capsys):
    from farthing.cli.main import main

    house = village.settle(1).houses["p0"]
    assert main(["guard", str(house.policy), "--hashes"]) == 2
    assert "names no model" in capsys.readouterr().err
