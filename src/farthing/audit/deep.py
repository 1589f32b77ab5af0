"""Attack the methods of `farthing.torch` through a ledger whose answers are recorded.

A layer without a bias is trained on rows e₁. The canary is e₂, so its gradient lies in weights that no other
record moves. A method's scales (of AdaDP and DpOpt) follow from released values in the canary's coordinates
too, and would reveal the canary if they used anything else.

The self-check of a model takes most of the time of such a short training. It depends on shapes and made-up
examples only, never on records, so it runs in the first run of each target and is left out of the others.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from farthing.accounting import calibrate
from farthing.accounting.filters import ZcdpFilter
from farthing.audit.targets import DELTA, TrainedTarget
from farthing.budget import Budget
from farthing.ledger.ledger import Ledger
from farthing.queries.events import GaussianEvent, PoissonEvent, RepeatedEvent
from farthing.queries.query import Step
from farthing.torch.gradients import bookkeeping
from farthing.torch.methods.adadp import AdaDP, AdaL, AdaN
from farthing.torch.methods.dpagd import dpagd
from farthing.torch.methods.dpopt import DpOpt
from farthing.torch.training.loop import train
from farthing.torch.training.records import Examples

_RATE, _STEPS, _CLIP = 0.9, 4, 0.1
_CLAIM = Budget(8.0, DELTA)
_LOSS = nn.CrossEntropyLoss(reduction="none")


def pair(records: int = 8) -> tuple[Examples, Examples]:
    """Return rows e₁ of class 0, and the same with the canary e₂ of class 1."""
    x = torch.zeros(records + 1, 2)
    x[:records, 0] = x[records, 1] = 1.0
    y = torch.zeros(records + 1, dtype=torch.long)
    y[records] = 1
    return Examples((x[:records], y[:records])), Examples((x, y))


def corner_pair(records: int = 8) -> tuple[Examples, Examples]:
    """Return rows 0, and the same with a canary whose gradient is as long in every weight."""
    x, y = torch.zeros(records + 1, 2), torch.zeros(records + 1, dtype=torch.long)
    x[records], y[records] = 1.0, 1
    return Examples((x[:records], y[:records])), Examples((x, y))


def _model() -> nn.Module:
    model = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    return model


def _steps(model: nn.Module, batches: Iterator[Any]) -> Iterator[Step]:
    for t, _ in enumerate(batches, 1):
        yield Step(t, torch.cat([part.detach().flatten() for part in model.parameters()]).double().numpy())


@contextmanager
def _unchecked() -> Iterator[None]:
    """Leave out the self-check of models, which an earlier run has passed."""
    names = vars(bookkeeping)
    verify, names["verify"] = names["verify"], lambda *_: None
    try:
        yield
    finally:
        names["verify"] = verify


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: for a layer of two weights, threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def checked_once(run: Callable[[Ledger], Iterator[Step]]) -> Callable[[Ledger], Iterator[Step]]:
    """Return trainings of one model, of which only the first checks it."""
    begun = 0

    def steps(ledger: Ledger) -> Iterator[Step]:
        nonlocal begun
        begun += 1
        with _one_thread(), nullcontext() if begun == 1 else _unchecked():
            yield from run(ledger)

    return steps


def _trained(
    noise: float,
    made: Callable[[nn.Module], AdaDP | None],
    records: tuple[Examples, Examples] | None = None,
    stepwise: bool = False,
) -> TrainedTarget:
    """Return batches of `train` with an optimizer for the model, and the matching clipping rule."""

    def run(ledger: Ledger) -> Iterator[Step]:
        model = _model()
        method = made(model)
        batches = train(
            model,
            _LOSS,
            ledger._records,
            ledger,
            sampling_rate=_RATE,
            noise_multiplier=noise,
            steps=_STEPS,
            records=8,
            optimizer=method,
            clip_norm=_CLIP if method is None else method.bound,
        )
        return _steps(model, batches)

    return TrainedTarget(checked_once(run), records or pair(), _CLAIM, runs=600, stepwise=stepwise)


def _agd(ledger: Ledger) -> Iterator[Step]:
    model, examples = _model(), ledger._records
    assert isinstance(examples, Examples)
    return _steps(model, dpagd(ledger, model, _LOSS, examples, splits=5, clip_norm=_CLIP, objective_clip=1.0))


def targets() -> dict[str, TrainedTarget]:
    """Return the methods for models, by name; their batches spend the whole claim."""
    noise = calibrate.noise(
        lambda noise: RepeatedEvent(PoissonEvent(_RATE, GaussianEvent(noise)), _STEPS), _CLAIM
    )
    return {
        "torch-dpsgd": _trained(noise, lambda model: None, stepwise=True),
        "torch-adadp": _trained(noise, lambda model: AdaDP(model, clip_norm=_CLIP, period=1, memory=0.5)),
        "torch-adadp-box": _trained(
            noise,
            lambda model: AdaDP(
                model, clip_norm=_CLIP, period=1, memory=0.5, shape="box", estimate="coordinate"
            ),
            corner_pair(),  # a box pays for its corner
        ),
        "torch-adal": _trained(noise, lambda model: AdaL(model, clip_norm=_CLIP), stepwise=True),
        "torch-adan": _trained(noise, lambda model: AdaN(model, clip_norm=_CLIP)),
        "torch-dpopt": _trained(noise, lambda model: DpOpt(model, clip_norm=_CLIP, period=1, memory=0.5)),
        "torch-dpagd": TrainedTarget(checked_once(_agd), pair(), _CLAIM, ZcdpFilter, runs=800),
    }
