"""Torch's generators: newly seeded inside, untouched outside."""

import random

import numpy as np
import pytest
import torch

from farthing.errors import Unsupported
from farthing.queries.bounds import Kind
from farthing.torch.training.loop import train
from farthing.torch.training.randomness import OwnRandomness, one_by_one

CPU = torch.device("cpu")


class Draws:
    honours, shape = (Kind.NORM,), None

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
    honours, shape = (Kind.NORM,), None

    def bounded_sum(self, records, w, bound):
        raise RuntimeError(f"broken after {len(torch.rand(records))}")


def test_an_error_leaves_them_as_they_were():
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="broken after 3"):
        OwnRandomness(Breaks(), CPU).bounded_sum(3, None, None)
    assert torch.equal(torch.get_rng_state(), state)


class Panics(Breaks):
    def __init__(self, error):
        self.error = error

    def bounded_sum(self, records, w, bound):
        raise self.error


class Panic(BaseException):
    """What libraries in Rust raise of a record that they do not expect."""


@pytest.mark.parametrize("error", [Panic, SystemExit, GeneratorExit])
def test_an_error_that_only_an_interruption_may_raise_becomes_an_ordinary_one(error):
    """The ledger then lets the record that it belongs to count as nothing."""
    with pytest.raises(RuntimeError, match="no Exception"):
        OwnRandomness(Panics(error), CPU).bounded_sum(3, None, None)
    with pytest.raises(KeyboardInterrupt):
        OwnRandomness(Panics(KeyboardInterrupt), CPU).bounded_sum(3, None, None)


class Keeps:
    """A transform that keeps its last input and how many it saw, as libraries of transforms do."""

    def __init__(self):
        self.last, self.sizes, self.sum = None, [], torch.zeros(3)

    def __call__(self, x):
        self.last = x
        self.sizes.append(len(x))
        self.sum += x.sum(0)
        return x + 0.1 * torch.rand_like(x)


def test_what_a_transform_keeps_of_a_batch_is_put_back():
    keeps, records = Keeps(), (5.0 + torch.rand(40, 3), torch.randint(2, (40,)))
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    how = {"epsilon": 1.0, "delta": 1e-5, "sampling_rate": 0.5, "steps": 3}
    run = train(torch.nn.Linear(3, 2), loss, records, augment=keeps, **how)
    before = keeps.last, [*keeps.sizes], keeps.sum.clone()
    assert len([*run]) == 3
    assert keeps.last is before[0]
    assert keeps.sizes == before[1]
    assert torch.equal(keeps.sum, before[2])


def flipped(images):
    return torch.where(torch.rand(len(images), 1, 1) < 0.5, images.flip(-1), images)


def mixed_up(images):
    share = torch.rand(1)
    return share * images + (1 - share) * images[torch.randperm(len(images))]


def cropped(images):
    across = torch.randint(0, 4, (len(images),))
    padded = torch.nn.functional.pad(images, (2, 2))
    return torch.stack([image[:, n : n + 8] for image, n in zip(padded, across.tolist(), strict=True)])


@pytest.mark.parametrize(
    "fine", [flipped, cropped, lambda x: x + torch.randn_like(x), lambda x: x * torch.rand(1), lambda x: x]
)
def test_transforms_of_single_examples_pass(fine):
    state = torch.get_rng_state()
    one_by_one(fine, torch.ones(1, 8, 8), CPU)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (mixed_up, "mixes examples"),
        (lambda x: x - x.mean(), "mixes examples"),
        (lambda x: x.roll(1, 0), "mixes examples"),
        (lambda x: x * random.random(), "torch's generators"),
        (lambda x: torch.cat([x, x]), "as many examples"),
        (lambda x: x / len(x), "mixes examples"),
        (lambda x: x + torch.rand(len(x), 1, 1) / len(x), "mixes examples"),
        (lambda x: x / x.max() if x.max() > 1 else x, "mixes examples"),
        (lambda x: x - x.mean() if len(x) > 32 else x, "mixes examples"),
        (lambda x: torch.cat([x[:-1], x[-1:] + x[:1]]), "mixes examples"),
        (lambda x: x - x.min() if x.min() < 0 else x, "mixes examples"),
    ],
)
def test_others_are_refused(odd, says):
    with pytest.raises(Unsupported, match=says):
        one_by_one(odd, torch.ones(1, 8, 8), CPU)


def test_several_inputs():
    one_by_one(lambda both: (both[0] + 1, both[1]), (torch.ones(1, 3), torch.ones(1, dtype=torch.long)), CPU)
    with pytest.raises(Unsupported, match="mixes examples"):
        one_by_one(lambda both: (both[0], both[1].flip(0)), (torch.ones(1, 3), torch.ones(1, 2)), CPU)


def from_a_generator(images):
    return images * torch.rand(len(images), 1, 1, generator=torch.Generator().manual_seed(0))


def from_a_seed(images):
    torch.manual_seed(0)
    return images * torch.rand(len(images), 1, 1)


def from_a_seed_aside(images):
    with torch.random.fork_rng([]):
        return from_a_seed(images) + images


@pytest.mark.parametrize(
    "odd",
    [
        from_a_generator,
        from_a_seed,
        from_a_seed_aside,
        lambda x: mixed_up(x) if torch.rand(()) > 0.98 else x,
        lambda x: mixed_up(x) if torch.randint(20, ()) == 7 else x,
        lambda x: x - x.mean() if len(x) > 300 else x,
        lambda x: x / 2 if len(x) > 150 else x,
    ],
)
def test_so_are_public_numbers_rare_ones_that_mix_and_what_large_batches_do(odd):
    with pytest.raises(Unsupported, match=r"mixes examples|seed torch's generator"):
        one_by_one(odd, torch.ones(1, 8, 8), CPU)


class Flipped(torch.utils.data.Dataset):
    """Pictures that Python's generator, or numpy's, turns over, as many transforms do."""

    def __init__(self, draw):
        self.rows = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
        self.draw, self.drawn = draw, []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, n):
        self.drawn.append(self.draw())
        return self.rows[n] * (1.0 if self.drawn[-1] < 0.5 else -1.0), n % 2


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
@pytest.mark.parametrize("route", ["fast", "loop"])
def test_what_a_dataset_draws_elsewhere_is_secret_and_leaves_nothing_behind(draw, route):
    """From a public seed an example's flip would follow from its place: all move with the one that goes."""
    data = Flipped(draw)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    how = {"epsilon": 1.0, "delta": 1e-5, "sampling_rate": 0.5, "steps": 2, "route": route}
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    training = train(torch.nn.Linear(3, 2), loss, data, **how)
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    data.drawn.clear()
    next(training)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002
    assert data.drawn
    assert data.drawn[:3] != [draw() for _ in range(3)]
