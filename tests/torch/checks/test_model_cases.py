"""Over three hundred models and losses: nothing right is refused, nothing wrong is accepted.

The fast route's checks are checks: `UNSEEN` names what they do not see, and isolation is right there too.
"""

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from farthing.errors import FarthingError
from farthing.queries.bounds import ClipNorm
from farthing.torch.checks.independence import gradient
from farthing.torch.checks.probe import Calm, calm
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.clipping import plain_sum
from farthing.torch.gradients.plain import Makeup
from farthing.torch.gradients.tape import one
from farthing.torch.training.records import Examples

EVERYBODY = slice(None)


def _cases():
    spec = importlib.util.spec_from_file_location("model_cases", Path(__file__).with_name("model_cases.py"))
    found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found.RIGHT, found.WRONG


RIGHT, WRONG = _cases()
UNSEEN = ("hidden: condition on the mean",)  # made-up inputs do not bring that mean above its threshold


def _some(cases, every):
    """All of them, most marked slow."""
    return [pytest.param(case, marks=pytest.mark.slow) if n % every else case for n, case in enumerate(cases)]


def _named(names):
    return [case for case in WRONG if case.name in names]


EVERY = 1 if os.environ.get("FARTHING_EXPLORE") else 5  # of the cases that are run in isolation
SOME = _some(RIGHT, 4)
SEEN = _some([case for case in WRONG if case.name not in UNSEEN], 3)


def name_of(case):
    return case.name


def made(case):
    torch.manual_seed(5)
    model = case.make()
    return model, *case.batch()


def examples(inputs, targets):
    return Examples((*inputs, targets) if isinstance(inputs, tuple) else (inputs, targets))


def alone(model, case, inputs, targets):
    """Every example's gradient by ordinary autograd, one at a time."""
    each = [gradient(model, case.loss, *one(inputs, targets, n)) for n in range(len(targets))]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in each])


def summed(model, case, inputs, targets, route="fast", chosen=EVERYBODY, clip=None):
    found = Gradient(model, case.loss, route=route)
    with calm(model, lambda: [torch.rand(())]):
        rows = alone(model, case, inputs, targets) if clip is None else None
    bound = ClipNorm(0.7 * float(rows.norm(dim=1).median()) if clip is None else clip)
    found.check(inputs, targets)
    with calm(model, lambda: [torch.rand(())]):
        found.checked = Makeup(model)
        total = found.bounded_sum(examples(inputs, targets).take(chosen), None, bound)
    return total, None if rows is None else plain_sum(rows, bound)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("case", SOME, ids=name_of)
def test_right_models_are_accepted_and_summed_as_one_by_one(case):
    total, expected = summed(*made_for(case))
    assert torch.allclose(total, expected, rtol=1e-3, atol=1e-4 * float(expected.norm()))


@pytest.mark.parametrize("case", SEEN, ids=name_of)
def test_wrong_models_are_refused_by_the_check(case):
    model, inputs, targets = made(case)
    with pytest.raises(FarthingError):
        Gradient(model, case.loss).check(inputs, targets)


def made_for(case):
    model, inputs, targets = made(case)
    return model, case, inputs, targets


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:on a batch")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("route", ["vmap", "loop"])
@pytest.mark.parametrize("case", RIGHT[::EVERY], ids=name_of)
def test_right_models_are_summed_as_one_by_one_in_isolation(case, route):
    try:
        total, expected = summed(*made_for(case), route)
    except FarthingError:
        if route == "loop":  # which takes whatever runs on a batch of one
            raise
        return
    assert torch.allclose(total, expected, rtol=1e-3, atol=1e-4 * float(expected.norm()))


def moved(case, route):
    """|sum(D) - sum(D minus one)| over the clip, where the one that goes is unlike the others."""
    model, inputs, targets = made(case)
    if inputs.is_floating_point():
        inputs[0] *= 30
    found = Gradient(model, case.loss, route=route, physical_batch_size=4)
    found.check(inputs, targets)
    clip, sums = 1e-3, []
    for chosen in (EVERYBODY, np.arange(1, len(targets))):
        with torch.random.fork_rng(), Calm():
            torch.manual_seed(0)
            sums.append(found.bounded_sum(examples(inputs, targets).take(chosen), None, ClipNorm(clip)))
    return float((sums[0] - sums[1]).norm()) / clip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:on a batch")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("route", ["vmap", "loop"])
@pytest.mark.parametrize("case", [*WRONG[::EVERY], *_named(UNSEEN)], ids=name_of)
def test_wrong_models_are_refused_or_harmless_in_isolation(case, route):
    try:
        found = moved(case, route)
    except FarthingError:
        return
    assert found <= 1 + 1e-3
