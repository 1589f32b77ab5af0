"""Records become rows one by one: whatever a collate function does, nobody's row depends on another's."""

import signal
import sys
import traceback

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import farthing as ft
from farthing.errors import InvalidValue
from farthing.queries.bounds import ClipNorm
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.training.collating import Padded, Reader
from farthing.torch.training.records import Examples

LOSS = nn.CrossEntropyLoss(reduction="none")
SECRET = "8675309"


class Texts(Dataset):
    """Sequences of different lengths, the last one the longest."""

    def __init__(self, records=12, longest=True):
        self.records, self.longest = records, longest

    def __len__(self):
        return self.records

    def __getitem__(self, place):
        made = torch.Generator().manual_seed(place)
        length = 40 if place == self.records - 1 and self.longest else 3 + place % 4
        return torch.randint(1, 20, (length,), generator=made), place % 2


class Pooled(nn.Module):
    """A bag of embeddings, padding and all: what the usual text classifier is."""

    def __init__(self):
        super().__init__()
        self.table, self.fc = nn.Embedding(20, 5), nn.Linear(5, 2)

    def forward(self, tokens):
        return self.fc(self.table(tokens).mean(1))


def longest_of_the_batch(records):
    tokens = nn.utils.rnn.pad_sequence([tokens for tokens, _ in records], batch_first=True)
    return tokens, torch.tensor([target for _, target in records])


def centred(records):
    rows = torch.stack([tokens[:3].float() for tokens, _ in records])
    return rows - rows.mean(0), torch.tensor([target for _, target in records])


def move(collate, model, clip=0.1):
    """How far the last record moves the sum, in clips."""
    examples = Examples(Texts(), collate=collate)
    gradient = Gradient(model, LOSS)
    everyone, others = (
        gradient.bounded_sum(examples.take(np.arange(n)), None, ClipNorm(clip)) for n in (12, 11)
    )
    return float((everyone - others).norm()) / clip


@pytest.mark.parametrize(("collate", "model"), [(Padded(8), Pooled), (centred, lambda: nn.Linear(3, 2))])
def test_a_record_moves_the_sum_by_its_own_bound_at_most_whatever_collate_does(collate, model):
    torch.manual_seed(0)
    assert move(collate, model()) <= 1 + 1e-5


def words(records):
    """The usual recipe from texts."""
    tokens = [torch.tensor([len(word) for word in text.split()]) for text, _ in records]
    return nn.utils.rnn.pad_sequence(tokens, batch_first=True), torch.tensor([y for _, y in records])


@pytest.mark.parametrize(
    ("collate", "records"),
    [
        (longest_of_the_batch, Texts()),
        (words, [("a good film", 1), ("bad", 0), ("not so bad", 1)]),
        (lambda rows: longest_of_the_batch([(torch.tensor(a), b) for a, b in rows]), [([1, 2], 0), ([1], 1)]),
    ],
)
def test_a_collate_that_pads_to_the_longest_is_refused_before_any_charge_with_the_way_out(collate, records):
    with pytest.raises(InvalidValue, match=r"Padded\(length\)"):
        ft.torch.train(Pooled(), LOSS, Examples(records, collate=collate), epsilon=1.0, delta=1e-5, steps=2)


def test_padded_cuts_and_fills_to_a_public_length():
    tokens, targets = Padded(5, value=-1)([(torch.arange(3), 1), (np.arange(9), 0)])
    assert tokens.tolist() == [[0, 1, 2, -1, -1], [0, 1, 2, 3, 4]]
    assert targets.tolist() == [1, 0]
    words, first, second = Padded(3, targets=-100)([([1.5], torch.ones(2, 4), [1, 2])])
    assert words.tolist() == [[1.5, 0, 0]]
    assert first.shape == (1, 3, 4)
    assert second.tolist() == [[1, 2, -100]]
    with pytest.raises(InvalidValue, match="length"):
        Padded(0)


class Odd(Dataset):
    """Ten records, some of which are not like the first."""

    def __len__(self):
        return 10

    def __getitem__(self, place):
        if place == 4:
            raise OSError(f"{SECRET} is broken")
        odd = {2: (torch.ones(7), 1), 5: (torch.ones(3).double(), 1), 7: {}}
        return odd.get(place, (torch.full((3,), float(place)), place % 2))


@pytest.mark.parametrize("collate", [None, torch.utils.data.default_collate, lambda rows: rowed(rows)])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_record_of_another_shape_or_one_that_cannot_be_read_counts_as_zero(collate, workers):
    examples = Examples(Odd(), collate=collate, workers=workers)
    batches = list(examples.take(slice(None)).physical_batches(3))
    assert [row[0] for inputs, _, _ in batches for row in inputs.tolist()] == [0, 1, 3, 6, 8, 9]
    assert list(examples.take(np.array([2, 4])).physical_batches()) == []
    gradient = Gradient(nn.Linear(3, 2), LOSS)
    found, good = (
        gradient.bounded_sum(examples.take(np.array(places)), None, ClipNorm(1.0))
        for places in ([0, 1, 2, 3, 4, 5, 6], [0, 1, 3, 6])
    )
    assert torch.allclose(found, good)


def rowed(rows):
    return torch.stack([row for row, _ in rows]), torch.tensor([target for _, target in rows])


def test_a_user_keeps_the_records_that_can_be_read():
    examples = Examples(Odd(), users=[0] * 5 + [1] * 5, records_per_user=5)
    inputs, _, weights = next(examples.take(slice(None)).physical_batches())
    assert weights.tolist() == [[1, 1, 0, 1, 0], [0, 1, 0, 1, 1]]
    assert inputs[0, :, 0].tolist() == [0, 1, 0, 3, 0]


def test_the_first_record_is_refused_without_a_word_of_it():
    class Bad(Odd):
        def __getitem__(self, place):
            raise KeyError(f"no file {SECRET}")

    with pytest.raises(InvalidValue, match="KeyError") as caught:
        Reader(Bad()).read([3])
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(InvalidValue, match="list of one record"):
        Reader(Odd(), lambda rows: (torch.ones(4, 3), torch.ones(4))).read([0])


def targets_at(value):
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(60) % 3
    y[7] = value
    return x, y


class Rows(Dataset):
    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns[0])

    def __getitem__(self, place):
        return tuple(column[place] for column in self.columns)


@pytest.mark.parametrize("wrong", [1, 3, 4, 30, 60])
@pytest.mark.parametrize("dataset", [False, True])
def test_no_number_of_targets_out_of_range_decides_whether_training_runs(wrong, dataset):
    x, y = targets_at(0)
    y[:wrong] = 77
    options = {"sampling_rate": 0.5, "noise_multiplier": 3.0, "steps": 3}
    data = Rows((x, y)) if dataset else (x, y)
    ledger = ft.Ledger(ft.Budget(2.0, 1e-5))
    assert len(list(ft.torch.train(nn.Linear(4, 3), LOSS, data, ledger, **options))) == 3


@pytest.mark.parametrize("deep", [True, False])
def test_a_record_whose_target_is_out_of_range_counts_as_zero_in_a_dataset(deep):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)) if deep else nn.Linear(4, 3)
    ledger = ft.Ledger(ft.Budget(2.0, 1e-5))
    training = ft.torch.train(
        model, LOSS, Rows(targets_at(77)), ledger, sampling_rate=0.5, noise_multiplier=3.0, steps=3
    )
    assert len(list(training)) == 3


@pytest.mark.parametrize("deep", [True, False])
@pytest.mark.parametrize("users", [True, False])
def test_an_example_that_makes_a_pass_fail_counts_as_zero_and_the_others_do_not(deep, users):
    """Without train, which knows the range: the loss raises, quoting the target."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)) if deep else nn.Linear(4, 3)
    options = {"users": np.arange(60) // 2, "records_per_user": 2} if users else {}
    whole = Examples(targets_at(77), **options)
    gradient = Gradient(model, LOSS, physical_batch_size=16)
    without = np.delete(np.arange(len(whole)), 3 if users else 7)
    others = gradient.bounded_sum(whole.take(without), None, ClipNorm(1.0))
    budget = ft.Budget(1e6, 1e-5, unit="user" if users else "record")
    query = ft.Query(ft.Everyone(), gradient, ClipNorm(1.0), ft.torch.TensorGaussian(1e-3))
    answer = ft.Ledger(budget).over(whole).ask(query)
    assert torch.allclose(answer.value, others, atol=0.01)
    assert float(others.norm()) > 0.1


@pytest.mark.parametrize("first", [1, np.int64(1), torch.tensor(1)])
def test_the_type_of_the_first_label_does_not_decide_who_counts(first):
    """A neighbour whose first record says numpy's 1 would lose all others."""
    records = [(torch.ones(2), first), (torch.ones(2), 0), (torch.ones(2), np.int64(1))]
    (inputs, targets), there = Reader(records).read([0, 1, 2])
    assert there.tolist() == [True, True, True]
    assert targets.tolist() == [1, 0, 1]
    assert inputs.shape == (3, 2)


class First(Dataset):
    """Twelve records of one form but for the first."""

    def __init__(self, first):
        self.first = first

    def __len__(self):
        return 12

    def __getitem__(self, place):
        if place == 0 and self.first is SECRET:
            raise OSError(f"a damaged image of {SECRET}")
        return self.first if place == 0 else (torch.full((4,), float(place)), place % 2)


FIRST = [
    SECRET,
    (torch.ones(2), 1),
    (torch.ones(4, dtype=torch.float64), 1),
    (torch.ones(4), 1.0),
    (torch.ones(4), 1, 1),
    (torch.ones(4),),
    {"x": torch.ones(4)},
    ("word", 1),
    None,
]


@pytest.mark.parametrize("first", FIRST, ids=repr)
def test_the_first_record_decides_neither_the_form_nor_whether_there_is_a_refusal(first):
    dataset, model = First(first), nn.Linear(4, 2)
    assert Reader(dataset).form == Reader(First((torch.ones(4), 1))).form
    assert Reader(dataset).read([0, 1, 2])[1].tolist() == [False, True, True]
    options = {"sampling_rate": 0.5, "noise_multiplier": 1.0, "clip_norm": 1.0, "steps": 1}
    assert len([*ft.torch.train(model, LOSS, dataset, epsilon=50.0, delta=1e-5, **options)]) == 1


@pytest.mark.parametrize("records", [0, 1, 3])
def test_where_most_records_fail_the_refusal_quotes_none(records):
    class Failing(First):
        def __len__(self):
            return records

        def __getitem__(self, place):
            raise KeyError(SECRET)

    with pytest.raises(InvalidValue, match="most of the first records cannot be read") as refused:
        _ = Reader(Failing(None)).form
    assert SECRET not in "".join(traceback.format_exception(refused.value))
    assert refused.value.__context__ is None


def test_before_the_charge_an_augmentation_sees_made_up_records_only():
    def shifted(inputs):
        if (inputs == 7.0).any():
            raise ValueError(SECRET)
        return inputs + 0.1

    for dataset in (First((torch.full((4,), 7.0), 1)), (torch.full((12, 4), 7.0), torch.ones(12).long())):
        ledger = ft.Ledger(ft.Budget(50.0, 1e-5))
        options = {"sampling_rate": 0.5, "noise_multiplier": 1.0, "clip_norm": 1.0, "steps": 1}
        training = ft.torch.train(nn.Linear(4, 2), LOSS, dataset, ledger, augment=shifted, **options)
        assert ledger.share == 0
        assert len([*training]) == 1


class Shapes(Dataset):
    """Records of given widths."""

    def __init__(self, *widths):
        self.widths = widths

    def __len__(self):
        return len(self.widths)

    def __getitem__(self, place):
        if self.widths[place] is None:
            raise SystemExit("a damaged image")
        return torch.ones(self.widths[place]), 1


def test_no_single_record_decides_which_of_two_forms_counts():
    """One record may decide that data of several shapes are refused, never which of them is learnt from."""
    rest = (4, 5, 4, 5)
    forms = []
    for first in ((4, 4, 4, 4, 4, 5, 5), (4, 4, 4, 4, 5, 5, 5), (4, 4, 4, 5, 5, 5, 5), (4, 4, 5, 5, 5, 5, 5)):
        reader = Reader(Shapes(*first, *rest))
        if abs(first.count(4) - first.count(5)) > 1:
            forms.append(reader.form[0][0][1])
            continue
        with pytest.raises(InvalidValue, match="several shapes or types"):
            _ = reader.form
        forms.append(None)
    assert forms == [4, None, None, 5]


@pytest.mark.parametrize("fours", range(8))
def test_with_a_public_example_no_record_decides_how_others_are_read(fours):
    """Whatever the shapes of the records are, those of the example's shape count, and nothing is refused."""
    dataset = Shapes(*[4] * fours, *[5] * (7 - fours), 4, 5)
    public = torch.rand(3, 4), torch.tensor([0, 1, 0])
    reader = Reader(dataset).like(public)
    assert reader.form == [((1, 4), torch.float32), ((1,), torch.int64)]
    assert reader.read(range(9))[1].tolist() == [width == 4 for width in dataset.widths]
    options = {"sampling_rate": 0.5, "noise_multiplier": 1.0, "steps": 1, "example": public}
    assert len([*ft.torch.train(nn.Linear(4, 2), LOSS, dataset, epsilon=50.0, delta=1e-5, **options)]) == 1


def test_records_are_converted_to_the_types_of_a_public_example():
    records = [(np.ones(2), 1), (np.ones(2, dtype=np.float32), 1.0), ([1, 1], np.int8(1))]
    reader = Reader(
        records, lambda rows: (torch.as_tensor(np.asarray(rows[0][0]))[None], torch.tensor([rows[0][1]]))
    )
    columns, there = reader.like((torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64))).read(range(3))
    assert there.all()
    assert [column.dtype for column in columns] == [torch.float32, torch.int64]


def test_a_record_whose_reading_ends_the_program_counts_as_one_that_cannot_be_read():
    columns, there = Reader(Shapes(4, 4, 4, None)).read(range(4))
    assert there.tolist() == [True, True, True, False]
    assert len(columns[0]) == 3


class Panic(BaseException):
    """What libraries in Rust raise of a record that they do not expect."""


@pytest.mark.parametrize("error", [Panic, SystemExit, GeneratorExit, ValueError])
@pytest.mark.parametrize("place", [0, 3])
def test_no_error_of_a_record_ends_a_run(place, error):
    class Panics(Shapes):
        def __getitem__(self, at):
            if at == place:
                raise error
            return super().__getitem__(at)

    columns, there = Reader(Panics(*[4] * 9)).read(range(9))
    assert there.tolist() == [at != place for at in range(9)]
    assert len(columns[0]) == 8


def test_an_interruption_or_a_signal_ends_it():
    class Stopped(Shapes):
        def __getitem__(self, at):
            if at == 8:
                signal.raise_signal(signal.SIGTERM)
            return super().__getitem__(at)

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    try:
        with pytest.raises(SystemExit):
            Reader(Stopped(*[4] * 9)).read(range(9))
    finally:
        signal.signal(signal.SIGTERM, before)


class InPlace(Dataset):
    """Writes every record into the same memory."""

    def __init__(self, form):
        self.form, self.tensor, self.list = form, torch.zeros(2), [None, 0]

    def __len__(self):
        return 20

    def __getitem__(self, place):
        self.tensor.fill_(place)
        match self.form:
            case "tensor":
                return self.tensor, place
            case "view":
                return self.tensor[:], place
            case "array":
                return self.tensor.numpy(), place
            case "nested":
                return (self.tensor, torch.ones(1)), place
        self.list[:] = torch.full((2,), float(place)), place
        return self.list


def without_a_copy(records):
    ((inputs, target),) = records
    return inputs[None], torch.tensor([target])


@pytest.mark.parametrize(
    ("form", "collate"),
    [
        *((form, None) for form in ("tensor", "view", "array", "nested", "list")),
        *((form, without_a_copy) for form in ("tensor", "view", "list")),
    ],
)
def test_records_that_a_dataset_writes_into_the_same_memory_stay_apart(form, collate):
    examples = Examples(InPlace(form), collate=collate)
    for _ in range(2):
        inputs, targets, _ = next(examples.take(np.arange(9)).physical_batches(64))
        first = inputs[0] if isinstance(inputs, tuple) else inputs
        assert first[:, 0].tolist() == targets.tolist() == [*range(9)]
