"""Records for networks: arrays, folders, tables, tokens and datasets, checked when they are loaded."""

import numpy as np
import pytest

from farthing.budget import Budget
from farthing.deploy import factories
from farthing.deploy.guard.examples import examples_of
from farthing.deploy.guard.models import Inputs
from farthing.deploy.guard.policy import Limits, Policy
from farthing.errors import InvalidValue

torch = pytest.importorskip("torch")

SOURCE = """
import numpy as np
import torch


def centred(x):
    return x - x.mean()


def broken(x):
    raise ValueError(f"record {x}")


def make_dataset():
    return torch.utils.data.TensorDataset(torch.ones(6, 3), torch.tensor([0, 1, 0, 1, 0, 1]))


class Lazy(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, place):
        if place == 2:
            raise ValueError("record 2")
        return torch.full((3,), float(place)), 7 if place == 3 else place % 2


def lazy():
    return Lazy()
"""


@pytest.fixture
def loaded(tmp_path):
    """Records that a policy with these [inputs] loads."""

    def load(inputs=None, unit="record", schema=None, records="records.npz", **arrays):
        if arrays and records.endswith(".npz"):
            np.savez(tmp_path / records, **arrays)
        elif arrays:
            (tmp_path / records).mkdir()
            for name, array in arrays.items():
                np.save(tmp_path / records / f"{name}.npy", array)
        policy = Policy(
            dataset="d",
            records=tmp_path / records,
            size=1,
            ledger=tmp_path / "l",
            socket=tmp_path / "s",
            key=tmp_path / "k",
            coordinators=(bytes(32),),
            budget=Budget(1.0, 1e-6, observer="server", unit=unit),
            limits=Limits(noise=0.5, clip=1.0, rounds=5),
            modules=tmp_path / "m",
            schema=schema,
            inputs=inputs or Inputs(shape=(2,), classes=2),
        )
        return examples_of(policy)

    return load


def first(examples):
    return examples.plain(np.zeros(1, dtype=np.int64))


X, Y = np.arange(8.0).reshape(4, 2), np.array([0, 1, 1, 0])


@pytest.mark.parametrize("place", ["records.npz", "folder"])
def test_arrays_become_float32_inputs_and_whole_labels(place, loaded):
    found = loaded(X=X, y=Y, records=place)
    inputs, targets = first(found)
    assert (len(found), inputs.dtype, targets.dtype) == (4, torch.float32, torch.int64)


def test_images_keep_their_shape(loaded):
    found = loaded(Inputs(shape=(1, 5, 5), classes=2), X=np.zeros((4, 1, 5, 5), dtype=np.uint8), y=Y)
    assert first(found)[0].shape == (1, 1, 5, 5)


def test_labels_without_classes_are_numbers(loaded):
    assert first(loaded(Inputs(shape=(2,)), X=X, y=Y / 3))[1].dtype == torch.float32


def test_tokens_have_a_public_length(loaded):
    tokens, ends = np.array([5, 3, 8, 7, 1, 2, 3, 4, 5, 6]), np.array([3, 4, 4, 10])
    inputs = Inputs(shape=(4,), kind="int64", length=4, vocabulary=9, classes=2)
    found = loaded(inputs, tokens=tokens, ends=ends, y=Y)
    rows = found.plain(np.arange(4))[0]
    assert rows.tolist() == [[5, 3, 8, 0], [7, 0, 0, 0], [0, 0, 0, 0], [1, 2, 3, 4]]
    assert rows.dtype == torch.int64


def test_users_are_examples_where_the_budget_protects_users(loaded):
    inputs = Inputs(shape=(2,), classes=2, records_per_user=2)
    found = loaded(inputs, unit="user", X=X, y=Y, users=np.array([7, 7, 7, 9]))
    assert (len(found), found.width, found.unit) == (2, 2, "user")
    with pytest.raises(InvalidValue, match="needs an array ``users``"):
        loaded(unit="user", X=X, y=Y)


def test_a_party_is_one_example_where_the_budget_protects_it_whole(loaded):
    found = loaded(unit="party", X=X, y=Y)
    assert (len(found), found.width) == (1, 4)


@pytest.mark.parametrize(
    ("inputs", "arrays", "message"),
    [
        ({}, {"X": X[:, :1]}, r"shape \[2\]"),
        ({}, {"X": X[:3]}, "one row per record"),
        ({}, {"X": np.where(X == 5, np.nan, X)}, "finite in float32"),
        ({}, {"X": np.where(X == 5, 1e39, X)}, "finite in float32"),
        ({}, {"X": X.astype(str)}, "must be numbers"),
        ({}, {"y": np.array([0, 1, 1, 77])}, "whole numbers from 0 to 1"),
        ({}, {"y": np.array([0, 1, 1, np.nan])}, "whole numbers from 0 to 1"),
        ({"classes": 0}, {"y": np.array([0, 1, 1, np.inf])}, "labels must be finite"),
        ({"kind": "int64"}, {}, "must be whole numbers, kind"),
        (
            {"kind": "int64", "vocabulary": 7},
            {"X": X.astype(int)},
            "tokens must be whole numbers from 0 to 6",
        ),
        ({"kind": "int64", "vocabulary": 9}, {"X": X.astype(int) - 1}, "from 0 to 8"),
    ],
)
def test_records_that_do_not_fit_are_refused_when_loaded_and_not_quoted(inputs, arrays, message, loaded):
    with pytest.raises(InvalidValue, match=message) as refused:
        loaded(Inputs(**{"shape": (2,), "classes": 2} | inputs), **{"X": X, "y": Y} | arrays)
    assert "77" not in str(refused.value)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"X": X}, "need arrays"),
        ({"tokens": np.arange(3), "ends": np.array([2, 1, 3, 3]), "y": Y}, "ends must grow"),
        ({"tokens": np.arange(3), "ends": np.array([0, 1, 2, 2]), "y": Y}, "the number of tokens"),
        ({"tokens": np.ones(3), "ends": np.array([0, 1, 2, 3]), "y": Y}, "whole numbers, end to end"),
    ],
)
def test_files_that_do_not_hold_records_are_refused(arrays, message, loaded):
    with pytest.raises(InvalidValue, match=message):
        loaded(Inputs(shape=(4,), kind="int64", length=4, classes=2), **arrays)


def test_tokens_without_a_public_length_and_files_that_are_not_there_are_refused(loaded, tmp_path):
    with pytest.raises(InvalidValue, match="tokens need length"):
        loaded(Inputs(shape=(4,), classes=2), tokens=np.arange(3), ends=np.array([0, 1, 2, 3]), y=Y)
    with pytest.raises(InvalidValue, match="cannot be read"):
        loaded(records="nowhere.npz")
    (tmp_path / "text.npz").write_text("no arrays")
    with pytest.raises(InvalidValue, match=r"\.npz or a folder"):
        loaded(records="text.npz")
    np.savez(tmp_path / "objects.npz", X=np.array([{}, {}], dtype=object), y=Y)
    with pytest.raises(InvalidValue, match=r"\.npz or a folder"):  # objects would be unpickled
        loaded(records="objects.npz")


@pytest.fixture
def written(tmp_path):
    """A module of the party's own: its name, and the hash of its source."""
    name = f"examples_{tmp_path.name.replace('-', '_')}"
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / f"{name}.py").write_text(SOURCE)
    return name, factories.source_hash([f"{name}:centred"], tmp_path / "m")


def test_a_transform_sees_one_record_at_a_time(written, loaded):
    name, source = written
    found = loaded(Inputs(shape=(2,), classes=2, transform=f"{name}:centred", hash=source), X=X, y=Y)
    np.testing.assert_array_equal(found.plain(np.arange(4))[0], [[-0.5, 0.5]] * 4)
    with pytest.raises(InvalidValue, match=r"the transform failed \(ValueError\)") as refused:
        loaded(Inputs(shape=(2,), classes=2, transform=f"{name}:broken", hash=source), X=X, y=Y)
    assert "record" not in str(refused.value).partition("(")[0]
    with pytest.raises(InvalidValue, match="look at what changed"):
        loaded(Inputs(shape=(2,), transform=f"{name}:centred", hash="0" * 64), X=X, y=Y)


def test_a_dataset_that_the_party_installs(written, loaded):
    name, source = written
    found = loaded(Inputs(shape=(3,), classes=2, dataset=f"{name}:make_dataset", hash=source))
    assert (len(found), first(found)[0].shape) == (6, (1, 3))
    with pytest.raises(InvalidValue, match=r"shape \[4\]"):
        loaded(Inputs(shape=(4,), classes=2, dataset=f"{name}:make_dataset", hash=source))
    with pytest.raises(InvalidValue, match="kind int64"):
        loaded(Inputs(shape=(3,), kind="int64", classes=2, dataset=f"{name}:make_dataset", hash=source))
    with pytest.raises(InvalidValue, match="single numbers of kind float32"):
        loaded(Inputs(shape=(3,), dataset=f"{name}:make_dataset", hash=source))
    with pytest.raises(InvalidValue, match=r"shape \[\]"):  # the first record would decide for all
        loaded(Inputs(classes=2, dataset=f"{name}:make_dataset", hash=source))
    party = Inputs(shape=(3,), classes=2, dataset=f"{name}:make_dataset", hash=source)
    assert len(loaded(party, unit="party")) == 1


def test_a_record_of_a_dataset_that_cannot_be_read_or_has_no_class_counts_as_zero(written, loaded):
    name, source = written
    found = loaded(Inputs(shape=(3,), classes=2, dataset=f"{name}:lazy", hash=source))
    inputs, targets, _ = next(found.take(slice(None)).physical_batches())
    assert (targets.tolist(), inputs[:, 0].tolist()) == ([0, 1], [0.0, 1.0])
