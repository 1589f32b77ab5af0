"""Examples: by record, by user, in views; what a batch holds, and what is refused."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from farthing.budget import Unit
from farthing.errors import InvalidValue, Unsupported
from farthing.queries.bounds import ClipNorm
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.training.loop import train
from farthing.torch.training.records import Examples

X = torch.arange(20.0).reshape(10, 2)
Y = torch.arange(10)


class Squares(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, place):
        return X[place], X[place] ** 2, int(Y[place])


class Passing(IterableDataset):
    def __iter__(self):
        return iter(Squares())


def read(batch, physical=None):
    return list(batch.physical_batches(physical))


def test_tensors_arrays_and_datasets_give_the_same_batch():
    chosen = np.array([7, 0, 3])
    for data in ((X, Y), [X.numpy(), Y.numpy()], TensorDataset(X, Y)):
        ((inputs, targets, weights),) = read(Examples(data).take(chosen))
        assert torch.equal(inputs, X[chosen])
        assert targets.tolist() == [7, 0, 3]
        assert weights is None


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_is_read_by_number_and_several_inputs_stay_a_tuple(workers):
    examples = Examples(Squares(), workers=workers)
    batches = read(examples.take(np.arange(10)), 3)
    (first, second), _, _ = batches[0]
    assert torch.equal(second, first**2)
    assert torch.cat([targets for _, targets, _ in batches]).tolist() == list(range(10))


def test_records_are_read_one_by_one_also_where_a_dataset_offers_many_at_once():
    class Many(Squares):
        def __getitems__(self, places):
            raise AssertionError("a transform of several records can mix them")

    ((first, _), targets, _), *_ = read(Examples(Many()).take(np.array([4, 2])))
    assert torch.equal(first, X[[4, 2]])
    assert targets.tolist() == [4, 2]


@pytest.mark.parametrize("physical", [1, 3, 4, 10, 100, None])
def test_batches_are_no_larger_than_asked_and_evenly_filled(physical):
    sizes = [len(targets) for _, targets, _ in read(Examples((X, Y)).take(np.arange(10)), physical)]
    assert sum(sizes) == 10
    assert max(sizes) <= (physical or 10)
    assert max(sizes) - min(sizes) <= 1


def test_an_empty_batch_has_no_physical_batches_and_everybody_is_everybody():
    examples = Examples((X, Y))
    assert read(examples.take(np.array([], dtype=np.int64)), 4) == []
    assert len(examples.take(slice(None))) == 10


def test_parts_of_a_batch_make_the_batch():
    batch = Examples((X, Y)).take(np.array([1, 5, 6, 9, 2]))
    parts = [batch.part(rank, 3) for rank in range(3)]
    assert np.concatenate([part.indices for part in parts]).tolist() == [1, 5, 6, 9, 2]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_user_is_one_example_with_the_first_records_in_order():
    users = np.array([3, 1, 3, 3, 1, 2, 3, 2, 1, 1])
    examples = Examples((X, Y), users=users, records_per_user=3)
    assert (len(examples), examples.unit, examples.width) == (3, Unit.USER, 3)
    ((inputs, targets, weights),) = read(examples.take(slice(None)))
    assert targets.tolist() == [[1, 4, 8], [5, 7, 5], [0, 2, 3]]
    assert weights.tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 1]]
    assert torch.equal(inputs[1], torch.stack([X[5], X[7], X[5]]))


def test_a_user_who_leaves_changes_nothing_for_the_others():
    users = np.array(list("cabacabbac"))
    whole = read(Examples((X, Y), users=users, records_per_user=2).take(slice(None)))[0]
    stays = users != "b"
    fewer = Examples((X[stays], Y[stays]), users=users[stays], records_per_user=2)
    left = read(fewer.take(slice(None)))[0]
    assert all(torch.equal(part[[0, 2]], other) for part, other in zip(whole, left, strict=True))


def test_users_of_a_dataset_are_read_as_those_of_tensors():
    users = [0, 0, 1, 1, 1, 2, 3, 3, 3, 3]
    (inputs, squares), targets, weights = read(
        Examples(Squares(), users=users, records_per_user=2).take(np.array([1, 2]))
    )[0]
    assert torch.equal(squares, inputs**2)
    assert targets.tolist() == [[2, 3], [5, 5]]
    assert weights.tolist() == [[1, 1], [1, 0]]


def test_a_batch_counts_rows_so_users_are_fewer_and_never_cut():
    examples = Examples((X, Y), users=np.arange(10) // 2, records_per_user=4)
    assert [len(targets) for _, targets, _ in read(examples.take(slice(None)), 8)] == [2, 2, 1]
    assert [len(targets) for _, targets, _ in read(examples.take(slice(None)), 1)] == [1] * 5


def test_views_are_drawn_one_by_one_and_weighted_to_a_mean():
    drawn = iter(range(1, 100))
    examples = Examples((X, Y), augment=lambda inputs: inputs + 100 * next(drawn), views=3)
    inputs, targets, weights = read(examples.take(np.array([2, 5])))[0]
    assert inputs.shape == (2, 3, 2)
    assert torch.equal(inputs[1] - X[5], torch.tensor([[100.0] * 2, [200.0] * 2, [300.0] * 2]))
    assert targets.tolist() == [[2, 2, 2], [5, 5, 5]]
    assert torch.allclose(weights.sum(1), torch.ones(2))


def test_one_view_is_an_ordinary_batch():
    inputs, targets, weights = read(Examples((X, Y), augment=lambda inputs: -inputs).take(np.array([1])))[0]
    assert torch.equal(inputs, -X[1:2])
    assert (targets.tolist(), weights) == ([1], None)


def test_views_of_users_records_stay_with_their_user():
    examples = Examples((X, Y), users=[0] * 3 + [1] * 7, records_per_user=4, augment=lambda x: x, views=2)
    inputs, targets, weights = read(examples.take(np.array([0])))[0]
    assert inputs.shape == (1, 8, 2)
    assert targets.tolist() == [[0, 0, 1, 1, 2, 2, 0, 0]]
    assert weights.tolist() == [[0.5] * 6 + [0.0] * 2]
    assert torch.equal(inputs[0, ::2][:3], X[:3])


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        ((X,), InvalidValue, "inputs and targets"),
        ((X, Y[:4]), InvalidValue, r"lengths \[4, 10\]"),
        ((X[:0], Y[:0]), InvalidValue, "no records"),
        (Passing(), Unsupported, "map-style"),
        (iter([1]), Unsupported, "__getitem__"),
        ({"x": X}, Unsupported, "got dict"),
        (DataLoader(TensorDataset(X, Y)), Unsupported, "give its dataset"),
    ],
)
def test_data_that_is_no_data_is_refused(data, error, says):
    with pytest.raises(error, match=says):
        Examples(data)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"users": [1] * 10}, "records_per_user"),
        ({"records_per_user": 2}, "needs users"),
        ({"users": [1] * 9, "records_per_user": 2}, "one whole number or text a record"),
        ({"users": [1.5] * 10, "records_per_user": 2}, "none of them is either"),
        ({"users": [1] * 10, "records_per_user": 0}, "records_per_user"),
        ({"views": 2}, "without augment"),
        ({"views": 0}, "views"),
        ({"workers": -1}, "workers"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, says):
    with pytest.raises(InvalidValue, match=says):
        Examples((X, Y), **options)


def test_a_record_without_a_target_is_refused_with_the_way_out():
    class Bare(Squares):
        def __getitem__(self, place):
            return X[place]

    with pytest.raises(InvalidValue, match="collate="):
        read(Examples(Bare()).take(np.array([1])))
    pairs = Examples(Bare(), collate=lambda rows: (torch.stack(rows), torch.zeros(len(rows))))
    assert read(pairs.take(np.array([1])))[0][1].tolist() == [0]


@pytest.mark.parametrize("odd", [None, float("nan"), 3.5, True, [1], {}, b"7"], ids=repr)
def test_a_record_of_nobody_decides_nothing_for_others(odd):
    tensors = torch.ones(6, 2), torch.zeros(6)
    people = [7, "ann", 7.0, odd, "ann", "ann"]
    examples = Examples(tensors, users=people, records_per_user=2)
    assert sorted(sorted(row) for row in examples._places.tolist()) == [[0, 2], [1, 4]]


def test_a_very_long_name_of_a_user_takes_no_memory_for_the_others():
    """An array of texts is as wide as the longest: 100,000 of these would be refused, 400 GB."""
    users = ["a", "b" * 10**6, *"ab" * 50_000]
    examples = Examples(
        (torch.zeros(len(users), 1), torch.zeros(len(users))), users=users, records_per_user=2
    )
    assert len(examples) == 3


def test_a_refusal_of_users_does_not_tell_how_many_there_are():
    for users in (np.arange(5), [1] * 5, np.ones(6), np.ones((6, 1), dtype=int)):
        with pytest.raises(InvalidValue, match="one whole number or text a record") as refused:
            Examples((torch.ones(6, 2), torch.zeros(6)), users=users, records_per_user=2)
        assert not any(
            count in str(refused.value).replace("float64", "").replace("int64", "") for count in "56"
        )


LABELLED = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 2
ENTROPY = torch.nn.CrossEntropyLoss(reduction="none")


def with_label(value, **options):
    """The examples as a training of two classes has them, the seventh with this label."""
    targets = LABELLED[1].clone()
    targets[7] = value
    return Examples((LABELLED[0], targets), **options).within(2)


@pytest.mark.parametrize("route", ["fast", "vmap"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"users": torch.arange(60) // 2, "records_per_user": 2},
        {"augment": lambda x: x + torch.rand(len(x), 1), "views": 2},
        {"augment": lambda x: 2 * x},
    ],
    ids=["records", "users", "views", "augmented"],
)
def test_a_label_out_of_range_counts_as_nothing_and_refuses_no_training(options, route):
    """An error, or a refusal, would tell that there is such a record."""
    found = Gradient(torch.nn.Linear(3, 2), ENTROPY, route=route)
    found.check(*with_label(0, **options).made_up_batch())
    totals = []
    for value in (99, -5):
        torch.manual_seed(3)
        totals.append(found.bounded_sum(with_label(value, **options).take(slice(None)), None, ClipNorm(9.0)))
    assert torch.equal(*totals)
    if not options:
        rest = Examples(LABELLED).take(np.delete(np.arange(60), 7))
        assert torch.allclose(totals[0], found.bounded_sum(rest, None, ClipNorm(9.0)), atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"users": torch.arange(60) // 2, "records_per_user": 2}])
def test_no_number_of_labels_out_of_range_is_refused_and_the_sum_is_that_of_the_others(options):
    """At any threshold a single record would decide whether there is an error."""
    found = Gradient(torch.nn.Linear(3, 2), ENTROPY)
    for wrong in (3, 6, 30, 60):
        targets = LABELLED[1].clone()
        targets[:wrong] = 7
        examples = Examples((LABELLED[0], targets), **options).within(2)
        total = found.bounded_sum(examples.take(slice(None)), None, ClipNorm(9.0))
        if wrong == 60:
            assert not total.any()
        elif not options:
            rest = Examples(LABELLED).take(np.arange(wrong, 60))
            assert torch.equal(total, found.bounded_sum(rest, None, ClipNorm(9.0)))


def test_the_range_of_labels_is_logged_whatever_the_labels_are(caplog):
    for targets in (LABELLED[1], torch.full_like(LABELLED[1], 7)):
        caplog.clear()
        with caplog.at_level("INFO", "farthing.torch"):
            Examples((LABELLED[0], targets)).within(2)
        assert caplog.messages == [
            "the model has 2 outputs: records whose target is not 0 to 1 count as zero"
        ]


def test_a_training_with_one_label_out_of_range_runs():
    data = with_label(99)
    how = {"epsilon": 1.0, "delta": 1e-5, "sampling_rate": 0.5, "steps": 2}
    for most in ({}, {"max_batch_size": 64, "records": 60}):
        assert len(list(train(torch.nn.Linear(3, 2), ENTROPY, data.data, **how, **most))) == 2


def test_blanks_of_a_user_do_not_spoil_what_the_others_make_of_it():
    """A model that divides by its input, say, takes no row of zeros."""
    from farthing.queries.bounds import ClipNorm
    from farthing.torch.gradients.bookkeeping import Gradient

    class Logarithms(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x.log())

    torch.manual_seed(0)
    rows, labels = torch.rand(4, 2) + 0.5, torch.tensor([0, 1, 0, 1])
    people = Examples((rows, labels), users=[1, 1, 1, 2], records_per_user=3)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    gradient = Gradient(Logarithms(2, 2), loss, route="fast")
    found = gradient.bounded_sum(people.take(np.array([1])), None, ClipNorm(1e3))
    alone = gradient.bounded_sum(Examples((rows[3:], labels[3:])).take(slice(None)), None, ClipNorm(1e3))
    assert float(found.norm()) > 0.01
    assert torch.allclose(found, alone, atol=1e-6)
