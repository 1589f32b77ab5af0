"""Models in which examples do not stay apart are refused by name, and nothing else is."""

import os
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import farthing as ft
from farthing.errors import InvalidValue, Unsupported
from farthing.queries.bounds import ClipNorm
from farthing.torch.checks import independence, probe
from farthing.torch.checks.probe import Source
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.layout import Sketch
from farthing.torch.training.records import Examples

X, Y = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
IMAGES = torch.randn(8, 4, 6, 6, generator=torch.Generator().manual_seed(0))


def losses(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(F.linear(torch.tanh(self.fc(x)), self.fc.weight.clone().mul_(1.0)))


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return self.fc(x)


class Noisy(nn.Module):
    """Random, and not by a dropout that can be switched off; it may mix examples."""

    def __init__(self, mixes):
        super().__init__()
        self.fc, self.mixes = nn.Linear(5, 3), mixes

    def forward(self, x):
        x = x + torch.randn_like(x)
        return self.fc(x - x.mean(0) if self.mixes else x)


def image(layer):
    return nn.Sequential(nn.Sequential(nn.Conv2d(4, 48, 3), layer), nn.Flatten(), nn.Linear(768, 3))


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (image(nn.BatchNorm2d(48)), IMAGES, r"0\.1 \(BatchNorm2d\) mixes examples: use GroupNorm\(16, 48\)"),
        (image(nn.SyncBatchNorm(48)), IMAGES, r"0\.1 \(SyncBatchNorm\) mixes examples"),
        (image(nn.InstanceNorm2d(48, track_running_stats=True)), IMAGES, "set track_running_stats=False"),
        (nn.Sequential(nn.Linear(5, 4), Centred(), nn.Linear(4, 3)), X, r"1 \(Centred\) mixes examples"),
        (Reused(), X, r"fc \(Linear\): its parameter fc\.weight \(5, 5\) is used past its module"),
        (Remembering(), X, "a pass over the model changes mean"),
        (Noisy(mixes=True), X, "mixes examples"),
        (nn.Embedding(9, 3, max_norm=1.0), X, "set max_norm=None"),
        (nn.Embedding(9, 3, scale_grad_by_freq=True), X, "set scale_grad_by_freq=False"),
        (nn.DataParallel(nn.Linear(5, 3)), X, r"model\.module"),
        (nn.Linear(6, 3), X, r"does not run on made-up inputs.*example=\(inputs, targets\)"),
    ],
)
def test_refused_by_name(model, inputs, message):
    with pytest.raises(Unsupported, match=message):
        Gradient(model, losses).bounded_sum(Examples((inputs, Y)).take(slice(None)), None, ClipNorm(1.0))


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (lambda out, y: losses(out, y) / len(y), Unsupported, "the loss is divided by the size of the batch"),
        (
            lambda out, y: losses(out, y) * len(y),
            Unsupported,
            "the loss is multiplied by the size of the batch",
        ),
        (lambda out, y: losses(out - out.mean(0), y), Unsupported, "or its loss mixes examples"),
        (nn.CrossEntropyLoss(), InvalidValue, r'got \(\): use reduction="none"'),
        (lambda out, y: out, InvalidValue, r"shape \(4,\), got \(4, 3\)"),
    ],
)
def test_losses_that_are_not_one_a_record(loss, error, message):
    with pytest.raises(error, match=message):
        Gradient(nn.Linear(5, 3), loss).check(X, Y)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(5, 1, 8, 0.3, batch_first=True)

    def forward(self, x):
        return self.layer(x[:, None].expand(-1, 3, -1)).mean(1)[:, :3]


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 3)

    def forward(self, x):
        return self.fc(F.dropout(x, 0.5, self.training))


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
        Attends(),
        Drops(),
        Noisy(mixes=False),
        nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval(),
    ],
)
def test_randomness_and_fixed_statistics_pass(model):
    training, state = model.training, torch.get_rng_state()
    Gradient(model, losses).check(X, Y)
    assert model.training is training
    assert torch.equal(torch.get_rng_state(), state)


def test_only_shapes_are_looked_at():
    read, write = os.pipe()  # a list or a queue would be found, and refused

    class Seen(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(5, 3)

        def forward(self, x):
            os.write(write, b"x" if float(x.nan_to_num().abs().max()) < 1e5 else b"!")
            return self.fc(x)

    Gradient(Seen(), losses).check(torch.full_like(X, 1e9), Y)
    os.close(write)
    assert set(os.read(read, 2**16)) == {ord("x")}
    os.close(read)


def test_public_examples_for_a_model_that_is_particular():
    class Particular(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.fc = nn.Embedding(20, 5), nn.Linear(5, 3)

        def forward(self, ids):
            if int(ids.min()) < 10:
                raise ValueError("ids begin at 10")
            return self.fc(self.table(ids).mean(1))

    model, ids = Particular(), torch.randint(10, 20, (8, 4))
    with pytest.raises(Unsupported, match=r"ValueError: ids begin at 10\); .* give public ones"):
        Gradient(model, losses).check(ids, Y)
    gradient = Gradient(model, losses, example=(torch.tensor([[10, 11, 12, 13], [13, 12, 11, 19]]), Y[:2]))
    assert gradient.bounded_sum(Examples((ids, Y)).take(slice(None)), None, ClipNorm(1.0)).norm() > 0


def test_a_change_of_mode_is_checked_again():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval()
    gradient, batch = Gradient(model, losses), Examples((X, Y)).take(slice(None))
    gradient.bounded_sum(batch, None, ClipNorm(1.0))
    model.train()
    with pytest.raises(ft.FarthingError, match="BatchNorm1d"):
        gradient.bounded_sum(batch, None, ClipNorm(1.0))


class Moody(nn.Module):
    """A part that centres its batch in training mode."""

    def forward(self, x):
        return x - x.mean(0) if self.training else x


def mixing(module, args, out):
    return out - out.mean(0)


def keeping(module, args, out):
    module.last = args[0].detach()


CHANGES = {
    "frozen batch norms after train()": lambda model: model.train(),
    "a part in training mode": lambda model: model[1].train(),
    "a hook that mixes": lambda model: model[0].register_forward_hook(mixing),
    "a hook that keeps": lambda model: model[0].register_forward_hook(keeping),
    "another part": lambda model: model.__setitem__(1, nn.BatchNorm1d(4, affine=False)),
    "fewer parameters": lambda model: model[0].bias.requires_grad_(False),
    "another parameter": lambda model: model.register_parameter("more", nn.Parameter(torch.zeros(2))),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("part", [lambda: nn.BatchNorm1d(4, affine=False), Moody])
def test_a_model_that_is_changed_since_is_checked_again(change, part):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), part(), nn.Linear(4, 3)).train()
    model[1].eval()  # a frozen part in a model that is in training mode
    gradient = Gradient(model, losses)
    batch = Examples((torch.randn(6, 4), torch.randint(0, 3, (6,)))).take(slice(None))
    gradient.bounded_sum(batch, None, ClipNorm(1.0))
    CHANGES[change](model)
    with pytest.raises(Unsupported, match=r"mixes examples|keep something|when this run began") as refused:
        gradient.bounded_sum(batch, None, ClipNorm(1.0))
    assert refused.value.public  # no record decides


def test_an_evaluation_between_steps_does_not_thaw_a_frozen_batch_norm_unseen():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).train()
    model[1].eval()
    data = torch.randn(400, 4), torch.randint(0, 3, (400,))
    training = ft.torch.train(model, losses, data, epsilon=2.0, delta=1e-5, steps=3, sampling_rate=0.5)
    next(training)
    model.eval()
    model.train()  # as people write it around an evaluation
    with pytest.raises(Unsupported, match="BatchNorm1d"):
        next(training)


def test_weights_used_past_their_module_pass_by_vmap():
    model = Reused()
    found = Gradient(model, losses, route="vmap").bounded_sum(
        Examples((X, Y)).take(slice(None)), None, ClipNorm(9.0)
    )
    losses(model(X), Y).sum().backward()
    assert torch.allclose(found, torch.cat([p.grad.flatten() for p in model.parameters()]), atol=1e-5)


EQUAL = torch.ones(6, 5)


@pytest.mark.parametrize("inputs", [X[:1], EQUAL, (X[:1], X[:1]), (EQUAL, EQUAL)])
def test_an_example_of_one_record_or_of_equal_ones_is_refused(inputs):
    """On such a batch x - x.mean(0) is zero for everyone, whoever is exchanged."""
    with pytest.raises(InvalidValue, match=r"at least two records whose inputs differ, got [16]"):
        Gradient(nn.Linear(5, 3), losses, example=(inputs, Y[:6]))


def test_few_public_examples_show_what_mixes():
    model = nn.Sequential(Centred(), nn.Linear(5, 3))
    with pytest.raises(Unsupported, match="mixes examples"):
        Gradient(model, losses, example=(X[:2], Y[:2])).check(X, Y)


def test_what_draws_elsewhere_cannot_be_checked():
    class Elsewhere(nn.Linear):
        def forward(self, x):
            return super().forward(x * float(np.random.default_rng().uniform(1, 2)))

    with pytest.raises(Unsupported, match=r"does not repeat itself.*use route=.vmap"):
        Gradient(Elsewhere(5, 3), losses).check(X, Y)


def test_the_effort_follows_from_the_model_and_not_from_a_clock(monkeypatch):
    """A large model is checked on fewer and smaller batches, and the same ones every time."""
    calls = []
    monkeypatch.setattr(independence, "_exchanged", _noting(independence._exchanged, calls))
    sizes = []
    for width in (8, 1500):
        calls.clear()
        torch.manual_seed(0)
        Gradient(
            nn.Sequential(nn.Linear(5, width), nn.Linear(width, width), nn.Linear(width, 3)), losses
        ).check(X, Y)
        sizes.append(list(calls))
    assert max(sizes[0]) == 40
    assert 0 < len(sizes[1]) < len(sizes[0])


def _noting(function, calls):
    def run(batch, others, away):
        calls.append(len(away))
        return function(batch, others, away)

    return run


def test_whole_numbers_that_a_model_hardly_ever_meets_are_tried_first():
    """99 classes: of made-up targets below 100 one in a hundred is out of range, which would end a GPU."""
    model = nn.Sequential(nn.Embedding(99, 4), nn.Flatten(), nn.Linear(8, 99))
    source = Source(torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, dtype=torch.long))

    def runs(ranges):
        try:
            inputs, targets = source.batch(2, ranges=ranges)
            nn.functional.cross_entropy(model(inputs), targets)
        except IndexError:
            return False
        return True

    found = source.wildest(runs)
    assert found.inputs.high == found.targets.high == 10


class RandomInPlace(nn.Module):
    """Random numbers by a method that works in place, which lanes of vmap do not take."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        return self.fc(x) * torch.empty(2).bernoulli_(0.9)


def test_random_numbers_that_lanes_do_not_take_are_refused_by_name_of_the_way_out():
    gradient = Gradient(RandomInPlace(), nn.CrossEntropyLoss(reduction="none"), route="vmap")
    with pytest.raises(Unsupported, match='route="loop"'):
        gradient.check(torch.zeros(1, 3), torch.zeros(1, dtype=torch.long))


class Begun(nn.Module):
    """A recurrent model whose first state is learnt, beside a rate of its own."""

    def __init__(self):
        super().__init__()
        self.step, self.head = nn.Linear(2, 2), nn.Linear(2, 3)
        self.first, self.rate = nn.Parameter(torch.rand(1, 2)), nn.Parameter(torch.rand(2))

    def forward(self, x):
        state = self.first.expand(len(x), -1)
        for t in range(3):
            state = torch.sigmoid(self.rate) * state + torch.tanh(x[:, t] + self.step(state))
        return self.head(state)


class Stumbles:
    """Torch's counter of operations, where it stumbles over a view of a parameter."""

    def __init__(self, display):
        raise AssertionError("Expected gradient function to be set")


def test_a_model_whose_operations_torch_cannot_count_is_taken(monkeypatch, one_by_one):
    monkeypatch.setitem(sys.modules, "torch._dynamo", sys.modules.get("torch._dynamo", object()))
    monkeypatch.setattr(probe, "FlopCounterMode", Stumbles)
    torch.manual_seed(0)
    model, x, y = Begun(), torch.randn(5, 3, 2), torch.randint(3, (5,))
    loss = nn.CrossEntropyLoss(reduction="none")
    assert probe.operations(model, x) > 0
    gradient = Gradient(model, loss, memory="space")
    monkeypatch.undo()
    gradient.check(x, y)
    found, expected = gradient.rows(x, y), one_by_one(model, loss, x, y)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    balanced = Gradient(model, loss)
    balanced.check(x, y)
    assert gradient.most_rows() < balanced.most_rows()


@pytest.mark.parametrize("mixes", [False, True])
def test_gradients_of_a_large_model_are_compared_by_their_sketches(mixes, monkeypatch):
    monkeypatch.setattr(Sketch, "_MOST", 0)
    monkeypatch.setattr(Sketch, "_BUCKETS", 16)
    torch.manual_seed(0)
    between = Centred() if mixes else nn.Tanh()
    gradient = Gradient(nn.Sequential(nn.Linear(5, 40), between, nn.Linear(40, 3)), losses)
    if mixes:
        with pytest.raises(Unsupported, match="mixes examples"):
            gradient.check(X, Y)
    else:
        gradient.check(X, Y)
    with pytest.raises(Unsupported, match="used past its module"):
        Gradient(Reused(), losses).check(X, Y)


class Crowded(nn.Module):
    """Centre what is hidden, but only where more than so many examples come together."""

    def __init__(self, most):
        super().__init__()
        self.first, self.last, self.most = nn.Linear(3, 4), nn.Linear(4, 2), most

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden - hidden.mean(0) if len(x) > self.most else hidden)


class Pulled(torch.autograd.Function):
    """The identity, whose backward pass mixes examples where more than so many come together."""

    @staticmethod
    def forward(ctx, x, most):
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + 10 * grad.sum(0) if len(grad) > ctx.most else grad, None


class Pulling(Crowded):
    def forward(self, x):
        return self.last(Pulled.apply(self.first(x), self.most))


@pytest.mark.parametrize("kind", [Crowded, Pulling])
@pytest.mark.parametrize(("most", "refused"), [(60, True), (250, True), (300, False)])
def test_a_model_that_mixes_in_the_batches_of_its_training_only_is_refused(kind, most, refused):
    data = torch.randn(300, 3), torch.randint(2, (300,))
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5))

    def begin():
        return ft.torch.train(kind(most), nn.CrossEntropyLoss(reduction="none"), data, ledger, steps=2)

    if not refused:  # 300 never come together
        begin()
        return
    with pytest.raises(Unsupported, match="mixes examples"):
        begin()
    assert ledger.spent.epsilon == 0


def test_no_more_examples_are_tried_at_once_than_a_model_is_given():
    data = torch.randn(300, 3), torch.randint(2, (300,))
    given = {"epsilon": 1.0, "delta": 1e-5, "steps": 2, "physical_batch_size": 64}
    ft.torch.train(Crowded(64), nn.CrossEntropyLoss(reduction="none"), data, **given)


class InPlace(nn.Module):
    """Shifts its inputs where they lie."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 3)

    def forward(self, x):
        return self.fc(x.sub_(0.5).mul_(2.0))


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.bag = nn.Embedding(9, 4, sparse=True), nn.EmbeddingBag(9, 4, sparse=True)

    def forward(self, ids):
        return self.table(ids).sum(1)[:, :3] + self.bag(ids)[:, 1:]


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.fc = torch.jit.script(nn.Linear(5, 4)), nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(self.part(x).relu())


class Late(nn.Module):
    """Makes a layer when it is first called."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 4)

    def forward(self, x):
        if not hasattr(self, "last"):
            self.last = nn.Linear(4, 3)
        return self.last(self.first(x))


IDS = torch.randint(0, 9, (len(X), 3), generator=torch.Generator().manual_seed(2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("route", ["auto", "loop"])
@pytest.mark.parametrize(("make", "inputs"), [(InPlace, X), (Sparse, IDS), (Scripted, X)])
def test_inputs_written_in_place_sparse_tables_and_scripted_parts_are_summed(make, inputs, route):
    torch.manual_seed(0)
    model = make()
    gradient = Gradient(model, losses, route=route)
    gradient.check(inputs, Y)
    batch = Examples((inputs, Y)).take(slice(None))
    found = gradient.bounded_sum(batch, None, ClipNorm(1e6))
    trained = list(model.parameters())
    whole = torch.autograd.grad(losses(model(inputs.clone()), Y).sum(), trained)
    expected = torch.cat([part.to_dense().flatten() for part in whole])
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_cannot_be_followed_is_refused_with_what_to_do():
    with pytest.raises(Unsupported, match="TorchScript: give the module"):
        Gradient(torch.jit.script(nn.Linear(5, 3)), losses, route="auto").check(X, Y)
    with pytest.raises(InvalidValue, match="makes parameters in its forward: call it once"):
        Gradient(Late(), losses, route="auto").check(X, Y)


def test_labels_of_ctc_that_are_out_of_range_are_errors_and_end_no_process():
    """Torch's own function would read and write past its memory."""

    def ctc(outputs, targets):
        steps, lengths = torch.full((len(targets),), 6), torch.full((len(targets),), 2)
        return F.ctc_loss(outputs.transpose(0, 1).log_softmax(2), targets, steps, lengths, reduction="none")

    inputs, targets = torch.randn(8, 6, 5), torch.randint(1, 4, (8, 2))
    gradient = Gradient(nn.Linear(5, 4), ctc)
    gradient.check(inputs, targets)
    targets[3, 1] = 2**40
    with pytest.raises(IndexError, match="out of range"):
        gradient.bounded_sum(Examples((inputs, targets)).take(slice(None)), None, ClipNorm(1.0))
    assert torch.ctc_loss is F.ctc_loss.__globals__["torch"].ctc_loss is not None


def test_a_lane_that_stumbles_over_autocast_in_forward_says_so():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.layers(x).float()

    data = torch.randn(50, 4), torch.arange(50) % 2
    loss, how = nn.CrossEntropyLoss(reduction="none"), {"epsilon": 1.0, "delta": 1e-5, "steps": 2}
    with pytest.raises(Unsupported, match="autocast on in its forward"):
        ft.torch.train(Mixed(), loss, data, route="vmap", **how)
    assert not torch.is_autocast_enabled("cpu")
    assert len(list(ft.torch.train(Mixed(), loss, data, **how))) == 2


@pytest.mark.parametrize("route", ["auto", "vmap", "loop"])
def test_a_hook_that_changes_a_gradient_is_named(route):
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    model[0].weight.register_hook(lambda gradient: 5 * gradient)
    with pytest.raises(
        Unsupported, match=r"0 \(Linear\): a hook changes the gradient of its parameter 0\.weight"
    ):
        Gradient(model, losses, route=route).check(X[:1], Y[:1])


def test_a_layer_that_does_not_run_in_mixed_precision_is_refused_in_a_sentence():
    class Full(nn.Linear):
        def forward(self, x):
            if torch.is_autocast_enabled("cpu"):
                raise RuntimeError("could not create a primitive descriptor")
            return super().forward(x)

    with pytest.raises(
        Unsupported, match=r"not with autocast=torch\.float16 \(RuntimeError: could not create"
    ):
        Gradient(nn.Sequential(Full(5, 4), nn.Linear(4, 3)), losses, autocast=torch.float16).check(
            X[:1], Y[:1]
        )


class Turns(nn.Module):
    """Turns and stretches an image, as itself says."""

    def __init__(self, padding):
        super().__init__()
        self.padding, self.how, self.fc = padding, nn.Linear(16, 6), nn.Linear(16, 2)

    def forward(self, x):
        places = F.affine_grid(self.how(x.flatten(1)).view(-1, 2, 3), x.shape, align_corners=False)
        return self.fc(F.grid_sample(x, places, padding_mode=self.padding, align_corners=False).flatten(1))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("route", ["fast", "vmap", "loop"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_an_image_that_is_no_number_is_sampled_nowhere_and_ends_no_process(padding, route):
    """Torch's own backward pass reads past its memory there."""
    torch.manual_seed(0)
    loss = nn.CrossEntropyLoss(reduction="none")
    x, y = torch.randn(6, 1, 4, 4), torch.tensor([0, 1, 1, 0, 1, 0])
    gradient, bound, own = Gradient(Turns(padding), loss, route=route), ClipNorm(0.1), torch.grid_sampler
    expected = gradient.bounded_sum(Examples((x[2:], y[2:])).take(slice(None)), None, bound)
    x[0], x[1, 0, 0, 0] = torch.nan, torch.inf
    found = gradient.bounded_sum(Examples((x, y)).take(slice(None)), None, bound)
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.grid_sampler is own


class Sometimes(nn.Module):
    """Centres batches of some sizes."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes, self.fc = sizes, nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(x - x.mean(0) if len(x) in self.sizes else x)


@pytest.mark.parametrize("sizes", [range(64, 65), range(100, 200), range(500, 520)])
def test_batches_of_sizes_between_are_tried(sizes):
    loss = nn.CrossEntropyLoss(reduction="none")
    gradient = Gradient(Sometimes(sizes), loss, expected_batch_size=1000)
    with pytest.raises(Unsupported, match="mixes examples"):
        gradient.check(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64))
