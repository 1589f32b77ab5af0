"""A pass over private examples leaves nothing behind: no gradient of its own, nothing in the model."""

import array
import collections
import contextvars
import copy
import ctypes
import dataclasses
import functools
import gc
import importlib
import io
import mmap
import multiprocessing
import queue
import random
import threading
import types
import weakref
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import farthing as ft
from farthing.errors import Unsupported
from farthing.noise.lattice import SeededStream
from farthing.queries.bounds import ClipNorm
from farthing.torch.checks import leftovers
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.training.loop import train
from farthing.torch.training.records import Examples

LOSS = nn.CrossEntropyLoss(reduction="none")
X = torch.randn(200, 4, generator=torch.Generator().manual_seed(0)) * 3
Y = (X[:, 0] > 0).long()


def run(model, loss=LOSS, **options):
    ledger = ft.Ledger(ft.Budget(2.0, 1e-5), stream=SeededStream(1))
    options = {"sampling_rate": 0.2, "noise_multiplier": 2.0, "steps": 3, **options}
    return list(train(model, loss, (X, Y), ledger, **options))


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.heat = nn.Parameter(torch.ones(()))

    def forward(self, outputs, targets):
        return LOSS(outputs * self.heat, targets)


class Net(nn.Module):
    """Two layers, and what ``keep`` does with an input on the way."""

    shared: torch.Tensor | None = None

    def __init__(self, keep=lambda self, x: None):
        super().__init__()
        self.first, self.second, self.keep = nn.Linear(4, 6), nn.Linear(6, 2), keep
        self.mean, self.rows, self.table, self.total, self.seen = torch.zeros(4), [], {}, 0.0, 0
        self.register_buffer("running", torch.zeros(4), persistent=False)

    def forward(self, x):
        self.keep(self, x.detach())
        return self.second(self.first(x).relu())


KEEPERS = {
    "last": lambda self, x: setattr(self, "last", x),
    "mean": lambda self, x: self.mean.mul_(0.9).add_(x.mean(0)),
    "rows": lambda self, x: self.rows.append(x),
    "table.x": lambda self, x: self.table.update(x=x),
    "total": lambda self, x: setattr(self, "total", self.total + float(x.mean())),
    "seen": lambda self, x: setattr(self, "seen", self.seen + len(x)),
    "running": lambda self, x: self.running.add_(x.mean(0)),
    "first.kept": lambda self, x: setattr(self.first, "kept", x),
    "first.weight.kept": lambda self, x: setattr(self.first.weight, "kept", x),
    "Net.shared": lambda self, x: setattr(Net, "shared", x),
}


@pytest.fixture(autouse=True)
def shared():
    yield
    Net.shared = None


SEEN: dict[str, list[torch.Tensor]] = {"rows": []}


def kept_in_a_table(self, x):
    self.table[0, "rows"].append(x)


def kept_by_an_inner_function(self, x):
    (lambda rows: SEEN["rows"].append(rows))(x)


class Writes(Net):
    """Keeps examples in a global, by a method that its forward calls."""

    def forward(self, x):
        self.write(x.detach())
        return super().forward(x)

    def write(self, x):
        SEEN["rows"].append(x)


def with_table():
    model = Net(kept_in_a_table)
    model.table = {(0, "rows"): [], (1, "rows"): []}
    return model


@pytest.mark.parametrize("route", ["auto", "vmap", "loop"])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (with_table, "table.tuple 0"),
        (lambda: Net(kept_by_an_inner_function), "SEEN.rows"),
        (Writes, "SEEN.rows"),
    ],
)
def test_tables_with_keys_of_any_kind_and_globals_of_methods_are_looked_into(make, name, route):
    try:
        with pytest.raises(Unsupported, match=name):
            run(make(), route=route)
    finally:
        SEEN["rows"].clear()


class Passed(torch.autograd.Function):
    """Hands numbers on, and keeps them in its class, or their gradients in a global."""

    kept: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx, x, here):
        ctx.here = here
        if here:
            Passed.kept.append(x.detach())
        return x.clone()

    @staticmethod
    def backward(ctx, delta):
        if not ctx.here:
            SEEN["rows"].append(delta)
        return delta, None


class Handed(Net):
    def __init__(self, here):
        super().__init__()
        self.here = here

    def forward(self, x):
        return self.second(Passed.apply(self.first(x), self.here))


class Logged:
    """A loss that is no module, and logs what it found."""

    history: ClassVar[list[torch.Tensor]] = []

    def __init__(self, where):
        self.where = where

    def __call__(self, outputs, targets):
        return self.noted(LOSS(outputs, targets))

    def noted(self, found):
        (self.history if self.where == "class" else SEEN["rows"]).append(found.detach())
        return found


@pytest.mark.parametrize(
    ("make", "loss", "name"),
    [
        (lambda: Handed(True), LOSS, "Passed.kept"),
        (lambda: Handed(False), LOSS, "backward.SEEN.rows"),
        (Net, Logged("class"), "Logged.history"),
        (Net, Logged("global"), "SEEN.rows"),
    ],
)
def test_functions_with_a_backward_and_losses_that_are_objects_are_looked_into(make, loss, name):
    try:
        with pytest.raises(Unsupported, match=name):
            run(make(), loss)
    finally:
        for kept in (SEEN["rows"], Passed.kept, Logged.history):
            kept.clear()


@pytest.mark.parametrize("route", ["auto", "vmap"])
@pytest.mark.parametrize("make", [Net, lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))])
def test_a_hook_of_all_modules_is_looked_into(make, route):
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(out))
    try:
        with pytest.raises(Unsupported, match=r"_global_forward_hooks.*seen"):
            run(make(), route=route)
    finally:
        handle.remove()


def test_a_hook_of_a_parameter_is_looked_into():
    seen, model = [], Net()
    model.first.weight.register_hook(seen.append)
    with pytest.raises(Unsupported, match=r"first\.weight\.hooks"):
        run(model)


def test_a_model_of_very_many_modules_is_looked_into():
    model = Net(lambda self, x: self.last[0][0].append(x))
    model.parts = nn.Sequential(*(nn.Sequential(nn.Identity(), nn.Identity()) for _ in range(1500)))
    model.last = [[[]]]
    before = leftovers.values(model)
    model(X)
    assert leftovers.changes(before, leftovers.values(model)) == ["last.0.0"]


@pytest.mark.parametrize("route", ["auto", "vmap", "loop"])
@pytest.mark.parametrize(
    "generator",
    [torch.Generator().manual_seed(0), np.random.default_rng(0), np.random.RandomState(0), random.Random(0)],
    ids=lambda generator: type(generator).__qualname__,
)
def test_a_random_generator_of_the_models_own_is_refused(generator, route):
    """Its seed may be public: what an example draws would follow from how many came before it."""
    draws = {
        torch.Generator: lambda g, x: torch.rand(x.shape, generator=g),
        np.random.Generator: lambda g, x: g.random(),
        np.random.RandomState: lambda g, x: g.rand(),
        random.Random: lambda g, x: g.random(),
    }
    model = Net(lambda self, x: draws[type(generator)](self.generator, x))
    model.generator = generator
    with pytest.raises(Unsupported, match=r"generator \(a random generator\)"):
        run(model, route=route)


@pytest.mark.parametrize(
    "generator",
    [torch.Generator().manual_seed(0), np.random.default_rng(0), np.random.RandomState(0), random.Random(0)],
    ids=lambda generator: type(generator).__qualname__,
)
def test_a_random_generator_is_put_back_so_that_every_user_draws_the_same(generator):
    """In whole updates of users the numbers of one would follow from how many drew before."""
    model, draw = Net(), (lambda: torch.rand(3, generator=generator).tolist())
    model.generator = generator
    if not isinstance(generator, torch.Generator):
        draw = generator.random
    wall, drawn = leftovers.Wall(model, LOSS), []
    for _ in range(3):
        with wall:
            drawn.append([draw(), draw()])
    assert drawn[0] == drawn[1] == drawn[2]
    assert drawn[0][0] != drawn[0][1]


@pytest.mark.parametrize("name", KEEPERS)
def test_what_keeps_something_of_examples_is_refused_by_name_before_any_charge(name):
    ledger = ft.Ledger(ft.Budget(2.0, 1e-5))
    model = Net(KEEPERS[name])
    with pytest.raises(Unsupported, match=rf"\b{name}\b"):
        train(model, LOSS, (X, Y), ledger, sampling_rate=0.2, noise_multiplier=2.0, steps=3)
    assert ledger.share == 0
    assert not hasattr(model, "last")


def sometimes(keep):
    """The same only for inputs that a check does not make up."""
    return lambda self, x: keep(self, x) if x.max() > 1.5 else None


@pytest.mark.parametrize("name", KEEPERS)
def test_what_is_kept_of_some_inputs_only_is_gone_after_every_sum(name):
    model = Net(sometimes(KEEPERS[name]))
    before = leftovers.values(model)
    for _ in run(model):
        pass
    trained = {name for name, _ in model.named_parameters()}
    assert set(leftovers.changes(before, leftovers.values(model))) <= trained
    assert Net.shared is None
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert set(torch.load(file)) == trained


def test_hooks_and_closures_are_looked_into():
    seen = []
    for hook in (
        lambda model: model.register_forward_hook(lambda module, args, out: seen.append(out.detach())),
        lambda model: model.register_forward_pre_hook(lambda module, args: seen.append(args[0])),
    ):
        model = nn.Linear(4, 2)
        hook(model)
        with pytest.raises(Unsupported, match="seen"):
            run(model)

    def loss(outputs, targets):
        found = LOSS(outputs, targets)
        seen.append(found.detach())
        return found

    with pytest.raises(Unsupported, match=r"loss\.seen"):
        run(nn.Linear(4, 2), loss)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_what_is_cached_once_and_for_all_may_stay():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.places = nn.Linear(4, 2), None

        def forward(self, x):
            if self.places is None:
                self.places = torch.arange(x.shape[1]).float()
            return self.fc(x + self.places)

    model = Positions()
    assert len(run(model)) == 3
    assert model.places.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert len(run(nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)))) == 3


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("hidden", [True, False])
def test_a_loss_with_parameters_is_refused_with_advice(stacked, hidden):
    loss = Temperature()
    used = (lambda outputs, targets: loss(outputs, targets)) if hidden else loss
    model = nn.Linear(4, 2) if stacked else nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    with pytest.raises(Unsupported, match=r"heat .* part of the model"):
        run(model, used)
    loss.heat.requires_grad_(False)
    assert len(run(model, used)) == 3


def test_a_parameter_of_the_loss_is_trained_as_part_of_the_model():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.scale = nn.Linear(4, 2), nn.Linear(1, 1, bias=False)

        def forward(self, x):
            return self.net(x) * self.scale(x.new_ones(len(x), 1))

    model = Both()
    before = model.scale.weight.item()
    run(model)
    assert model.scale.weight.item() != before


def other_leaves(model):
    """Tensors anywhere that hold a gradient, and are no parameter of the model."""
    own = {id(p) for p in model.parameters()}
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return [t for t in found if t.is_leaf and t.grad is not None and id(t) not in own]


MODELS = {
    "stack": lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)),
    "tape": lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_no_leaf_anywhere_keeps_a_gradient_but_the_released_one(kind, monkeypatch):
    """Also where a loss uses a leaf for some inputs only, which no check can see."""
    heat = torch.ones((), requires_grad=True)
    seen = []

    def loss(outputs, targets):
        return LOSS(outputs * heat, targets) if outputs.abs().max() > 0.7 else LOSS(outputs, targets)

    monkeypatch.setattr(leftovers, "refuse", lambda *given: seen.append(given))
    model = MODELS[kind]()
    x = X.clone().requires_grad_()
    before = {id(leaf) for leaf in other_leaves(model)}
    examples = Examples((x, Y))
    Gradient(model, loss).bounded_sum(examples.take(slice(None)), None, ClipNorm(1.0))
    assert seen
    assert heat.grad is None
    assert x.grad is None
    assert all(p.grad is None for p in model.parameters())
    assert [leaf for leaf in other_leaves(model) if id(leaf) not in before] == []
    run(model)
    assert all(p.grad is not None for p in model.parameters())  # what was released
    assert [leaf for leaf in other_leaves(model) if id(leaf) not in before] == []


def test_a_table_that_makes_what_it_gives_is_left_alone():
    """Its copy would hold other things than it does, and putting that back would spoil it."""

    class Makes(dict):
        def __getitem__(self, key):
            return super().__getitem__(key)()

        def __iter__(self):
            return super().__iter__()

    table = Makes(relu=nn.ReLU)

    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.table = nn.Linear(5, 3), table

        def forward(self, x):
            return self.fc(self.table["relu"](x))

    model = Chooses()
    with leftovers.Wall(model, None, everything=True):
        model(torch.randn(2, 5))
    assert isinstance(table["relu"], nn.ReLU)


class Needy(nn.Module):
    """A model that makes its input need a gradient in training mode, as Wav2Vec2 does."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x):
        x = x[:, None]
        if self.training:
            x.requires_grad = True
        return self.head(torch.tanh(self.body(x))).squeeze(1)


def test_an_input_that_a_pass_makes_need_a_gradient_is_no_weight_left_out():
    torch.manual_seed(0)
    model = Needy().train()
    gradient, bound = Gradient(model, LOSS, route="auto"), ClipNorm(0.5)
    found = gradient.bounded_sum(Examples((X[:20], Y[:20])).take(slice(None)), None, bound)
    expected = torch.zeros_like(found, dtype=torch.float64)
    wide = copy.deepcopy(model).double()
    trained = list(wide.parameters())
    for x, y in zip(X[:20], Y[:20], strict=True):
        parts = torch.autograd.grad(LOSS(wide(x[None].double()), y[None]).sum(), trained)
        row = torch.cat([part.flatten() for part in parts])
        expected += row * (0.5 / row.norm().clamp_min(0.5))
    assert torch.allclose(found.double(), expected, atol=1e-5)


class Meter:
    """What people count losses in."""

    def __init__(self):
        self.total = 0.0

    def update(self, value):
        SEEN["rows"].append(value)

    @staticmethod
    def put(value):
        SEEN["rows"].append(value)

    @classmethod
    def noted(cls, value):
        cls.put(value)


METER, SPACE, LOCAL, LAST = Meter(), types.SimpleNamespace(last=None), threading.local(), None
LOCAL.last = None
CONTEXT = contextvars.ContextVar("last", default=None)


@functools.cache
def remembered(value):
    return 0.0


def counted(self, x):
    METER.total += float(x.sum())


def named(self, x):
    SPACE.last = x


def local(self, x):
    LOCAL.last = x


def bound(self, x):
    global LAST
    LAST = x


def in_context(self, x):
    CONTEXT.set(x)


def in_a_cache(self, x):
    remembered(float(x.sum()))


@pytest.fixture
def globals_as_before():
    yield
    global LAST
    METER.total, SPACE.last, LOCAL.last, LAST = 0.0, None, None, None
    CONTEXT.set(None)
    remembered.cache_clear()


@pytest.mark.usefixtures("globals_as_before")
@pytest.mark.parametrize(
    ("keep", "name"),
    [
        (counted, "METER.total"),
        (named, "SPACE.last"),
        (local, "LOCAL.last"),
        (bound, "LAST"),
        (in_context, "CONTEXT"),
        (in_a_cache, "remembered.entries"),
    ],
)
def test_objects_of_the_users_own_that_are_globals_are_looked_into(keep, name):
    with pytest.raises(Unsupported, match=name):
        run(Net(keep), route="fast")


class Reports(Net):
    """Tells something of its own about every batch."""

    def __init__(self, keep):
        super().__init__(keep)
        self.meter = Meter()


@pytest.mark.parametrize("route", ["fast", "loop"])
@pytest.mark.parametrize(
    "keep",
    [
        lambda self, x: METER.update(float(x.sum())),
        lambda self, x: Meter().update(float(x.sum())),
        lambda self, x: Meter.put(float(x.sum())),
        lambda self, x: Meter.noted(float(x.sum())),
        lambda self, x: self.meter.update(float(x.sum())),
    ],
)
def test_methods_of_the_users_own_classes_are_looked_into(keep, route):
    try:
        with pytest.raises(Unsupported, match=r"SEEN\.rows"):
            run(Reports(keep), route=route)
    finally:
        SEEN["rows"].clear()


def test_a_module_inside_a_package_that_is_named_in_full_is_looked_into(tmp_path, monkeypatch):
    for name, text in (("__init__", ""), ("seen", "ROWS = []"), ("net", "import ownpackage.seen\n\n")):
        tmp_path.joinpath("ownpackage").mkdir(exist_ok=True)
        tmp_path.joinpath("ownpackage", f"{name}.py").write_text(text)
    with tmp_path.joinpath("ownpackage", "net.py").open("a") as file:
        file.write("def keep(self, x):\n    ownpackage.seen.ROWS.append(x)\n")
    monkeypatch.syspath_prepend(tmp_path)
    keep = importlib.import_module("ownpackage.net").keep
    with pytest.raises(Unsupported, match="ROWS"):
        run(Net(keep))


def told():
    last = None
    while True:
        last = yield last


QUEUE, ROOM, ARRAY, TELL = queue.Queue(), bytearray(4), array.array("d", [0.0]), told()
WEAK, WORDS, MEMORY = weakref.WeakKeyDictionary(), collections.UserDict(), mmap.mmap(-1, 4)
VIEW, NUMBER, SHARED = memoryview(bytearray(4)), ctypes.c_double(), multiprocessing.Value("d", 0.0)
SPARSE = torch.eye(3).to_sparse().coalesce()
next(TELL)


def byte(x):
    return int(1e6 * float(x.abs().sum())) % 251


@pytest.mark.parametrize(
    ("keep", "name"),
    [
        (lambda self, x: QUEUE.put(x), "QUEUE"),
        (lambda self, x: ROOM.__setitem__(0, byte(x)), "ROOM"),
        (lambda self, x: ARRAY.__setitem__(0, float(x.sum())), "ARRAY"),
        (lambda self, x: TELL.send(float(x.sum())), "TELL"),
        (lambda self, x: WEAK.__setitem__(self, float(x.sum())), "WEAK"),
        (lambda self, x: WORDS.__setitem__("x", float(x.sum())), "WORDS"),
        (lambda self, x: MEMORY.__setitem__(0, byte(x)), "MEMORY"),
        (lambda self, x: VIEW.__setitem__(0, byte(x)), "VIEW"),
        (lambda self, x: setattr(NUMBER, "value", float(x.sum())), "NUMBER"),
        (lambda self, x: setattr(SHARED, "value", float(x.sum())), "SHARED"),
        (lambda self, x: SPARSE.values().fill_(float(x.sum())), "SPARSE"),
    ],
)
def test_what_pythons_library_has_to_keep_things_in_is_looked_into(keep, name):
    with pytest.raises(Unsupported, match=name):
        run(Net(keep), route="fast")


def test_bytes_that_are_written_for_some_inputs_only_are_put_back():
    model = Net(sometimes(lambda self, x: self.room.__setitem__(0, 1 + byte(x))))
    for room in (bytearray(4), memoryview(bytearray(4)), mmap.mmap(-1, 4), (ctypes.c_ubyte * 4)()):
        model.room = room
        run(model)
        assert bytes(room) == bytes(4)


@dataclasses.dataclass(slots=True)
class Slotted:
    last: object = None


def large(keep):
    """What is kept of records that no made-up example is like."""
    return lambda self, x: keep(self, x) if float(x.abs().max()) > 1e6 else None


def into_slots(self, x):
    self.slotted.last = x


def into_numpy(self, x):
    self.array[:] = x[0].numpy()


def into_data(self, x):
    self.running.data.copy_(x[0])


def into_a_parameter(self, x):
    with torch.no_grad():
        self.centre.copy_(x[0])


def into_a_file(self, x):
    self.file.write(x.numpy().tobytes())


class Places(Net):
    """Places of all kinds to keep a record in."""

    def __init__(self, keep):
        super().__init__(keep)
        self.slotted, self.array, self.file = Slotted(), np.zeros(4), io.BytesIO()
        self.centre = nn.Parameter(torch.zeros(4), requires_grad=False)

    def held(self):
        known = (
            self.slotted.last,
            self.array.tolist(),
            self.file.getvalue(),
            METER.total,
            SPACE.last,
            LOCAL.last,
        )
        return *known, LAST, CONTEXT.get(), self.running.tolist(), self.centre.tolist()


@pytest.mark.usefixtures("globals_as_before")
@pytest.mark.parametrize("route", ["fast", "loop"])
@pytest.mark.parametrize(
    "keep",
    [
        into_slots,
        into_numpy,
        into_data,
        into_a_parameter,
        into_a_file,
        counted,
        named,
        local,
        bound,
        in_context,
    ],
)
def test_what_one_record_leaves_in_any_place_is_put_back(keep, route):
    model = Places(large(keep))
    gradient, examples = Gradient(model, LOSS, route=route), Examples((X * 1e7, Y))
    gradient.check(X, Y)
    before = model.held()
    gradient.bounded_sum(examples.take(slice(None)), None, ClipNorm(1.0))
    assert model.held() == before


def test_an_optimiser_that_writes_past_versions_is_not_undone():
    """Many of other libraries write p.data: no version of the parameter tells."""
    model = Places(lambda self, x: None)
    gradient = Gradient(model, LOSS)
    for step in range(3):
        model.running.data.fill_(step)
        model.centre.data.fill_(step)
        gradient.bounded_sum(Examples((X, Y)).take(slice(None)), None, ClipNorm(1.0))
        assert model.running.tolist() == model.centre.tolist() == [step] * 4


class Far(Net):
    """Keeps a large record in a tensor that is too large to be copied."""

    def __init__(self):
        super().__init__()
        self.bank = torch.zeros(2**22 + 1, 1)

    def forward(self, x):
        if float(x.abs().max()) > 1e3:
            self.bank[0] = x[0, 0].detach()
        return super().forward(x)


@pytest.mark.parametrize("route", ["fast", "loop"])
def test_what_large_examples_leave_where_nothing_is_put_back_is_refused(route):
    with pytest.raises(Unsupported, match="changes bank"):
        Gradient(Far(), LOSS, route=route).check(X, Y)
