"""Ranks that hold different records are noticed by digests that say nothing else."""

import itertools

import pytest
import torch
from torch.utils.data import Dataset

from farthing.errors import InvalidValue
from farthing.torch.training.distributed import digests, refuse_different
from farthing.torch.training.records import Examples

X = torch.arange(300.0).reshape(100, 3)
Y = torch.arange(100) % 2


class Rows(Dataset):
    def __init__(self, start, noise=False):
        self.start, self.noise = start, noise

    def __len__(self):
        return 50

    def __getitem__(self, place):
        row = X[self.start + place]
        return row + torch.rand(3, generator=NOISE) if self.noise else row + torch.rand(3), int(Y[place])


NOISE = torch.Generator()  # nobody's seed reaches it


def told(*examples, key=5):
    refuse_different([digests(one, key) for one in examples])


def test_the_same_records_pass_also_as_copies():
    told(Examples((X, Y)), Examples((X.clone(), Y.clone())), Examples((X.numpy(), Y.numpy())))
    told(Examples(Rows(0)), Examples(Rows(0)))


DIFFERENT = {
    "shards": (Examples((X[:50], Y[:50])), Examples((X[50:], Y[50:]))),
    "one longer": (Examples((X, Y)), Examples((X[:99], Y[:99]))),
    "another order": (Examples((X, Y)), Examples((X.flip(0), Y))),
    "one number": (Examples((X, Y)), Examples((X + torch.eye(100, 3), Y))),
    "another dtype": (Examples((X, Y)), Examples((X.double(), Y))),
    "users": (Examples((X, Y)), Examples((X, Y), users=torch.arange(100), records_per_user=1)),
    "shards of a dataset": (Examples(Rows(0)), Examples(Rows(50))),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_ones_are_refused(name):
    for one, other in itertools.permutations(DIFFERENT[name]):
        with pytest.raises(InvalidValue, match="not a shard"):
            told(one, other)


def test_records_that_are_drawn_anew_are_compared_by_form():
    told(Examples(Rows(0, noise=True)), Examples(Rows(0, noise=True)))
    with pytest.raises(InvalidValue, match="number, shape or kind"):
        told(Examples(Rows(0, noise=True)), Examples((X, Y)))


def test_another_key_gives_another_digest():
    one, other = (digests(Examples((X, Y)), key) for key in (1, 2))
    assert one[0] != other[0]
    assert one[1] != other[1]
