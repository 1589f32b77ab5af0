"""Rows at places of their own: every one is there once, in blocks of one shape."""

import numpy as np
import pytest
from scipy import sparse

from farthing.data.placed import PLACES, placed
from farthing.data.tables import Features, Table
from farthing.errors import Unsupported


@pytest.mark.parametrize("count", [1, 2, 200])
@pytest.mark.parametrize("kind", [np.float64, np.float32, np.uint8])
def test_every_row_is_there_once_with_its_target(count, kind):
    X = np.arange(1, count + 1).astype(kind)[:, None]
    found = []
    for table in placed(Table(X, X[:, 0])):
        assert len(table) == PLACES
        for block in table.blocks(Features(1)):
            np.testing.assert_array_equal(block.x[:, 0], block.y)
            assert not block.y[block.weight == 0].any()
            found += block.y[block.weight > 0].tolist()
    assert sorted(found) == X[:, 0].tolist()


def test_sparse_rows_are_left_where_they_are():
    table = Table(sparse.csr_array(np.eye(5)), np.ones(5))
    assert list(placed(table)) == [table]


def test_rows_that_are_mapped_are_refused():
    for table in (Table(np.ones((2, 1)), np.ones(2), unit=True), Table(np.ones((2, 1)), bounds=(0, 2))):
        with pytest.raises(Unsupported, match="as they are"):
            next(placed(table))
