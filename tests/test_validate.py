"""Every check refuses what it must and names argument and value."""

import math

import numpy as np
import pytest

from farthing import validate
from farthing.budget import Adjacency
from farthing.errors import InvalidValue

NONSENSE = [math.nan, math.inf, -math.inf, "1", b"1", None, True, [1.0], 10**400, complex(1, 0)]


@pytest.mark.parametrize("value", NONSENSE)
@pytest.mark.parametrize(
    "check",
    [
        validate.positive,
        validate.non_negative,
        validate.finite,
        validate.rate,
        validate.probability,
        validate.delta,
        validate.count,
    ],
)
def test_nonsense_is_refused_by_name_and_value(check, value):
    with pytest.raises(InvalidValue, match="thing") as caught:
        check(thing=value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (validate.positive, [5e-324, 1, np.float32(2)], [0, -1, 0.0]),
        (validate.non_negative, [0, 3.5], [-5e-324]),
        (validate.rate, [1e-300, 1, 0.5], [0, 1.0000001, -0.1]),
        (validate.probability, [1e-300, 0.999], [0, 1, 1.5]),
        (validate.delta, [0, 0.5], [1, -1e-9]),
        (validate.count, [1, np.int64(7), 2**62 - 1], [0, -3, 1.5, 100.0, 2**62]),
    ],
)
def test_ranges(check, good, bad):
    for value in good:
        assert check(x=value) == value
    for value in bad:
        with pytest.raises(InvalidValue):
            check(x=value)


def test_choice_lists_what_is_known():
    assert validate.choice(Adjacency, adjacency="zero-out") is Adjacency.ZERO_OUT
    with pytest.raises(InvalidValue, match="'add-remove', 'replace-one', 'zero-out', got 'swap'"):
        validate.choice(Adjacency, adjacency="swap")
