"""Every check refuses what it must and names argument and value."""

import math
import re

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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is empty"),
        ("  \n", "it is empty"),
        ('{"a": [1,\n 2,\n]}', "line 2: remove the comma before ']'"),
        ('{"a": [1, 2], }', "line 1: remove the comma before '}'"),
        ('{"a": 1,}', "line 1: remove the comma before '}'"),
        ("{'a': 1}", "line 1, column 2: write texts between double quotes"),
        ('{"a": 1,\n // one\n "b": 2}', "line 2, column 2: remove the comment"),
        ('{"a": 1', "line 1, column 8: the text ends before"),
        ('{"a" 1}', "line 1, column 6: Expecting ':' delimiter"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_text_that_is_no_json_is_told_what_to_change(text, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        validate.read_json(text)


def test_of_a_text_that_is_no_json_no_cell_is_repeated():
    with pytest.raises(ValueError, match="line 1, column 1: Expecting value") as caught:
        validate.read_json("Smith,secret\nJones,secret\n")
    assert "secret" not in str(caught.value)
    assert "Smith" not in str(caught.value)
