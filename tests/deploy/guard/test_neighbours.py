"""Guards over neighbouring records give replies of the same kind and size, whatever they are sent."""

import numpy as np
import pytest

from farthing.data.tables import Features
from farthing.deploy.messages.signed import MessageKind, Reason
from farthing.errors import InvalidValue
from farthing.linear.losses import LinearGradient, multinomial

CLASSES = LinearGradient(multinomial, Features(2))
MATRIX = 'losses = ["multinomial"]\noutputs = 3'


def rewrite(house, change):
    """Other records in the same house."""
    path = house.folder / "records.npz"
    with np.load(path) as found:
        X, y = found["X"].copy(), found["y"].copy()
    change(X, y)
    np.savez(path, X=X, y=y)


@pytest.mark.parametrize("shape", [(3, 2), (3, 1), (3,), (3, 4)])
def test_weights_without_a_column_for_every_class_are_refused_before_a_charge(shape, village, told):
    """With fewer columns a record of the last class made the guard fail after the charge, and tell."""
    house = village.settle(1, limits=MATRIX).houses["p0"]
    rewrite(house, lambda X, y: y.__setitem__(0, 2.0))
    guard = house.open()
    assert told(guard.answer(village.question(gradient=CLASSES, w=np.zeros(shape))), house) is Reason.SHAPE
    assert village.check() == {"p0": (0, 0)}
    answer = told(guard.answer(village.question(gradient=CLASSES, w=np.zeros((3, 3)))), house)
    assert answer["kind"] is MessageKind.ANSWER


@pytest.mark.parametrize("label", [3.0, -1.0, 0.5])
def test_records_of_no_class_of_the_policy_are_refused_when_they_are_loaded(label, village):
    house = village.settle(1, limits=MATRIX).houses["p0"]
    rewrite(house, lambda X, y: y.__setitem__(5, label))
    with pytest.raises(InvalidValue, match="the classes 0 to 2") as refusal:
        house.open()
    assert str(label) not in str(refusal.value).replace("outputs = 3", "")


@pytest.mark.parametrize("label", [3.0, 77.0, -1.0, 0.5, np.nan, np.inf, -1e300])
def test_a_record_of_no_class_contributes_nothing(label):
    from farthing.data.tables import Table
    from farthing.queries.bounds import ClipNorm

    X, w = np.array([[0.5, 1.0], [0.25, 0.0]]), np.arange(9.0).reshape(3, 3) / 9
    odd = CLASSES.bounded_sum(Table(X, np.array([1.0, label])), w, ClipNorm(1.0))
    alone = CLASSES.bounded_sum(Table(X[:1], np.array([1.0])), w, ClipNorm(1.0))
    np.testing.assert_array_equal(odd, alone)
    assert (multinomial.value(X @ w[:2], np.array([label, label])) == 0).all()
