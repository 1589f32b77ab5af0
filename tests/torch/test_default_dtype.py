"""Whatever torch's default dtype is, sums are float32, and a training releases what it charges."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import farthing as ft
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.training.records import Examples

LOSS = nn.CrossEntropyLoss(reduction="none")
SOURCES = Path(ft.__file__).parent / "torch"
MODELS = {
    "stack": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), (6,)),
    "images": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)),
        (1, 6, 6),
    ),
}


@pytest.fixture(params=[torch.float64, torch.float16, torch.bfloat16], ids=str)
def default(request):
    before = torch.get_default_dtype()
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(before)


@pytest.mark.parametrize("route", ["fast", "vmap"])
@pytest.mark.parametrize("name", MODELS)
def test_sums_are_the_same_under_any_default(name, route, default):
    make, shape = MODELS[name]
    model, made = make(), torch.Generator().manual_seed(1)
    records = torch.randn(300, *shape, generator=made), torch.randint(0, 3, (300,), generator=made)
    batch, bound = Examples(records).take(slice(None)), ft.ClipNorm(0.1)
    plain = Gradient(model, LOSS, route=route).bounded_sum(batch, None, bound)
    default()
    found = Gradient(model, LOSS, route=route).bounded_sum(batch, None, bound)
    assert found.dtype == torch.float32
    assert float((found.double() - plain.double()).norm()) < 1e-4


def test_a_training_releases_what_it_charges_under_any_default(default):
    default()
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))  # of that dtype
    before = [parameter.detach().clone() for parameter in model.parameters()]
    records = torch.randn(40, 6), torch.randint(0, 3, (40,))
    ledger = ft.Ledger(ft.Budget(3.0, 1e-5))
    assert len([*ft.torch.train(model, LOSS, records, ledger, sampling_rate=0.5, steps=2)]) == 2
    assert not any(map(torch.equal, before, model.parameters()))


def test_no_room_is_made_in_the_default_dtype():
    """A kernel writes float32 where it is told to: room of half that size would be overrun."""
    makers = {"empty", "zeros", "ones", "full"}
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch":
                said = {keyword.arg for keyword in node.keywords}
                assert node.func.attr not in makers or said & {"dtype", None}, f"{path}:{node.lineno}"
