"""A small network for tables: the same start for all, rows or whole clients as examples."""

import numpy as np
import pytest
from scipy import sparse

from farthing.torch.training.network import probabilities, table_examples, table_network

X, Y = np.eye(6, 4), np.array([0, 1, 2, 0, 1, 2])


def test_every_party_begins_with_the_same_weights_and_torchs_generator_is_as_it_was():
    torch = pytest.importorskip("torch")
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    one, other = table_network(4, 3), table_network(4, 3)
    assert torch.equal(torch.rand(1), expected)
    np.testing.assert_array_equal(one.start(), other.start())


def test_rows_may_be_sparse_and_clients_may_be_examples():
    assert len(table_examples(sparse.csr_array(X), Y)) == 6
    people = table_examples(X, Y, np.array([0, 0, 0, 1, 1, 2]))
    assert (len(people), people.unit.value, people.width) == (3, "user", 3)
    found = probabilities(table_network(4, 3), table_network(4, 3).start(), sparse.csr_array(X))
    np.testing.assert_allclose(found.sum(axis=1), 1.0)
