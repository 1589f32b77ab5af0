"""What estimators are given: bounds, refused or put in order."""

import numpy as np
import pytest

from farthing.errors import InvalidValue
from farthing.linear.checks import clipped, limits, target_bounds


def test_what_cannot_be_declared_is_refused():
    for wrong in (None, (1, 0), (0, np.inf), 3):
        with pytest.raises(InvalidValue):
            target_bounds(wrong)


def test_rows_are_clipped_to_bounds_of_every_feature():
    low, high = limits((0, [1.0, 2.0]), 2)
    assert clipped(np.array([[-1.0, 5.0]]), low, high).tolist() == [[0.0, 2.0]]
