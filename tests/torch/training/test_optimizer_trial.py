"""Every optimiser and schedule of torch works in a run, or is refused before anything is charged."""

import inspect
import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import farthing as ft
from farthing.errors import Unsupported
from farthing.noise.lattice import SeededStream
from farthing.torch.training.loop import train
from farthing.torch.training.optim import rehearse

LOSS = nn.CrossEntropyLoss(reduction="none")
X = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
STEPS = 4

OPTIMIZERS = sorted(
    name
    for name, found in vars(torch.optim).items()
    if inspect.isclass(found) and issubclass(found, torch.optim.Optimizer) and name != "Optimizer"
)
REFUSED = {"LBFGS": "several times a step", "SparseAdam": "dense"}

SCHEDULES = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o)]),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.LinearLR(o)], milestones=[2]
    ),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
}


def network():
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 2, bias=False))


def ledger_of():
    return ft.Ledger(ft.Budget(2.0, 1e-5), stream=SeededStream(1))


def begin(model, ledger, **options):
    return train(model, LOSS, (X, Y), ledger, sampling_rate=0.2, noise_multiplier=3.0, steps=STEPS, **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_works_or_is_refused_before_a_charge(name):
    model, ledger = network(), ledger_of()
    optimizer = getattr(torch.optim, name)(model.parameters())
    if name in REFUSED:
        with pytest.raises(Unsupported, match=REFUSED[name]):
            begin(model, ledger, optimizer=optimizer)
        assert ledger.share == 0
        return
    before = [p.detach().clone() for p in model.parameters()]
    assert len(list(begin(model, ledger, optimizer=optimizer))) == STEPS
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_of_torch_works_or_is_refused_before_a_charge(name):
    model, ledger = network(), ledger_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = SCHEDULES[name](optimizer)
    if name == "ReduceLROnPlateau":
        with pytest.raises(Unsupported, match="needs a metric"):
            begin(model, ledger, optimizer=optimizer, scheduler=schedule)
        assert ledger.share == 0
        return
    start = schedule.last_epoch if hasattr(schedule, "last_epoch") else 0
    training = begin(model, ledger, optimizer=optimizer, scheduler=schedule)
    assert getattr(schedule, "last_epoch", 0) == start  # what was tried were copies
    assert len(list(training)) == STEPS


def test_none_of_torch_is_left_out():
    made = {
        name
        for name, found in vars(lr_scheduler).items()
        if inspect.isclass(found) and issubclass(found, lr_scheduler.LRScheduler) and name[0] != "_"
    }
    assert made - {"LRScheduler"} <= set(SCHEDULES)


def test_a_schedule_that_is_shorter_than_the_run_is_refused_before_a_charge():
    for accumulate, fits in ((1, False), (2, True)):
        model, ledger = network(), ledger_of()
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        cycle = lr_scheduler.OneCycleLR(sgd, 0.1, total_steps=STEPS - 1)
        if fits:
            options = {"optimizer": sgd, "scheduler": cycle, "accumulate": accumulate}
            assert len(list(begin(model, ledger, **options))) == math.ceil(STEPS / accumulate)
        else:
            with pytest.raises(Unsupported, match=f"the {STEPS} steps of this run"):
                begin(model, ledger, optimizer=sgd, scheduler=cycle)
            assert ledger.share == 0


def test_what_is_tried_leaves_optimizer_hooks_and_weights_alone():
    weight = nn.Parameter(torch.ones(3, 2))
    adam = torch.optim.Adam([weight], 0.1)
    seen = []
    adam.register_step_post_hook(lambda *given: seen.append(given))
    schedule = lr_scheduler.LambdaLR(adam, lambda t: 0.5**t)
    weight.grad = torch.ones(3, 2)
    adam.step()
    assert len(seen) == 1
    state, kept = adam.state_dict(), weight.detach().clone()
    rehearse(adam, schedule, updates=7)
    assert len(seen) == 1
    assert torch.equal(weight, kept)
    assert adam.state_dict()["param_groups"] == state["param_groups"]
    assert schedule.last_epoch == 0


def test_a_step_that_wants_more_than_gradients_is_refused():
    class Wants(torch.optim.SGD):
        def step(self, closure):
            return super().step(closure)

    model, ledger = network(), ledger_of()
    with pytest.raises(Unsupported, match="nothing but the gradients"):
        begin(model, ledger, optimizer=Wants(model.parameters(), 0.1))
    assert ledger.share == 0


class FullFromTheStart(torch.optim.Optimizer):
    """Like Adagrad of PyTorch 2.11: its state exists as soon as it is made."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p] = {"step": torch.tensor(0.0), "sum": torch.full_like(p, 0.1)}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                total = self.state[p]["sum"].addcmul_(p.grad, p.grad)
                p.addcdiv_(p.grad, total.sqrt(), value=-group["lr"])


FullFromTheStart.__module__ = "torch.optim.full"  # only torch's own take a step in the trial


def test_an_optimizer_whose_state_exists_from_the_start_works():
    model, ledger = network(), ledger_of()
    optimizer = FullFromTheStart(model.parameters(), 0.1)
    assert len(list(begin(model, ledger, optimizer=optimizer))) == STEPS


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in REFUSED])
def test_an_optimizer_that_goes_on_from_earlier_steps_works_and_keeps_its_state(name):
    model = network()
    optimizer = getattr(torch.optim, name)(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    held = [value for state in optimizer.state.values() for value in state.values()]
    before = [value.clone() if isinstance(value, torch.Tensor) else value for value in held]
    rehearse(optimizer)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(held, before, strict=True))
    assert len(list(begin(model, ledger_of(), optimizer=optimizer))) == STEPS
