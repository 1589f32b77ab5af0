"""What several tests here measure by."""

import pytest


@pytest.fixture(autouse=True)
def new_records():
    """What other tests were trained on is no secret here."""
    from farthing.torch.checks import overlap

    overlap._known.clear()


@pytest.fixture
def one_by_one():
    """Each example's gradient by ordinary autograd, flat, a row an example."""
    import torch

    def rows(model, loss, inputs, targets):
        trained = [p for p in model.parameters() if p.requires_grad]
        found = []
        for n in range(len(targets)):
            value = loss(model(inputs[n : n + 1]), targets[n : n + 1]).sum()
            parts = torch.autograd.grad(value, trained, allow_unused=True)
            filled = [torch.zeros_like(p) if g is None else g for g, p in zip(parts, trained, strict=True)]
            found.append(torch.cat([part.flatten() for part in filled]))
        return torch.stack(found)

    return rows
