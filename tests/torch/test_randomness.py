"""Torch's generators: newly seeded inside, untouched outside."""

import pytest
import torch

from farthing.torch.randomness import OwnRandomness

CPU = torch.device("cpu")


class Draws:
    def bounded_sum(self, records, w, bound):
        return torch.rand(records)


def test_every_sum_has_numbers_of_its_own_and_leaves_none_behind():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    own = OwnRandomness(Draws(), CPU)
    first, second = (own.bounded_sum(100, None, None) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert not torch.equal(first, torch.rand(100))  # a seed that somebody knows decides nothing
    torch.set_rng_state(state)
    own.bounded_sum(12345, None, None)
    assert torch.equal(torch.get_rng_state(), state)  # nor does the state tell how much was drawn


class Breaks:
    def bounded_sum(self, records, w, bound):
        raise RuntimeError(f"broken after {len(torch.rand(records))}")


def test_an_error_leaves_them_as_they_were():
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="broken after 3"):
        OwnRandomness(Breaks(), CPU).bounded_sum(3, None, None)
    assert torch.equal(torch.get_rng_state(), state)
