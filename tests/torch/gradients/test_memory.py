"""What is alive at once in a private sum, beside an ordinary gradient: weighed tensor by tensor."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from farthing.queries.bounds import ClipNorm
from farthing.torch.gradients.allowance import TermBytes, planned
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.holdings import HeldBytes
from farthing.torch.training.records import Examples

live_memory = pytest.importorskip("benchmarks.live_memory", reason="not a checkout")

from benchmarks import unseen  # noqa: E402
from benchmarks.further_models import FURTHER  # noqa: E402
from benchmarks.latest_models import LATEST  # noqa: E402
from benchmarks.unseen_models import SMALL  # noqa: E402

LiveBytes = live_memory.LiveBytes
QUICK = ("tcn", "vgg")
WITHIN = {  # of an ordinary step's peak
    "resnet": 1.25,  # parts of so little work would take too much time
    "albert": 2.0,  # the factors of all uses of one weight are there at once
}


def losses(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


class Lora(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.base = nn.Linear(inner, outer).requires_grad_(False)
        self.a, self.b = nn.Linear(inner, 2, bias=False), nn.Linear(2, outer, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Deep(nn.Module):
    """Blocks with trained matrices of low rank beside frozen ones, with or without checkpoints."""

    def __init__(self, reentrant=None, depth=8):
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32).requires_grad_(False), Lora(32, 96), nn.GELU(), Lora(96, 32))
            for _ in range(depth)
        )
        self.head = nn.Linear(32, 3).requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            more = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
            x = x + more
        return self.head(x.mean(1))


def data():
    made = torch.Generator().manual_seed(0)
    return torch.randn(8, 40, 32, generator=made, requires_grad=True), torch.arange(8) % 3


def ordinary_peak(model):
    x, y = data()
    gc.collect()
    with LiveBytes() as live:
        losses(model(x), y).mean().backward()
    return live.peak


def private_peak(model, **options):
    x, y = (part.detach() for part in data())
    gradient, batch = Gradient(model, losses, **options), Examples((x, y)).take(slice(None))
    gradient.bounded_sum(batch, None, ClipNorm(1.0))  # with the check, and the choice of routes
    gc.collect()
    with LiveBytes() as live:
        gradient.bounded_sum(batch, None, ClipNorm(1.0))
    return live.peak


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_private_sum_takes_little_more_than_an_ordinary_gradient(reentrant):
    torch.manual_seed(0)
    assert private_peak(Deep(reentrant)) <= 1.1 * ordinary_peak(Deep(reentrant))


def test_checkpoints_save_what_they_save_in_ordinary_training():
    torch.manual_seed(0)
    plain, again = (private_peak(Deep(reentrant)) for reentrant in (None, False))
    assert again < 0.5 * plain


def test_what_is_weighed_is_what_is_alive():
    with LiveBytes() as live:
        kept = torch.ones(1000)
        torch.ones(2000).sum()
    assert (live.peak, live.now, kept.numel()) == (12004, 4000, 1000)


def step_peak(name, method, memory="balanced"):
    case = (SMALL | FURTHER | LATEST)[name]
    step = unseen.made(case, method, torch.device("cpu"), "float32", memory)
    peak = live_memory.peak_of(step)[0].peak
    return peak if method is unseen.private else peak + live_memory.batch_bytes(case)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in (SMALL | FURTHER | LATEST)],
)
def test_a_private_step_takes_little_more_than_an_ordinary_one(name):
    """Noise and optimiser included, on models that nobody tuned for: rows are kept only while they fit."""
    assert step_peak(name, unseen.private) <= WITHIN.get(name, 1.15) * step_peak(name, unseen.ordinary)


def test_memory_is_given_for_speed_when_asked_for():
    space, balanced, speed = (
        step_peak("tcn", unseen.private, memory) for memory in ("space", "balanced", "speed")
    )
    assert space < balanced < 0.8 * speed


def allowed(model, shape, batch):
    gradient = Gradient(model, losses, expected_batch_size=batch)
    gradient.check(torch.randn(1, *shape), torch.zeros(1, dtype=torch.long))
    return gradient._ways.allowance


def test_what_is_kept_follows_from_shapes_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.LazyLinear(3))
    model(torch.zeros(1, 3, 12, 12))
    first = allowed(model, (3, 12, 12), 40)
    for p in model.parameters():
        p.data.mul_(3.0)
    assert allowed(model, (3, 12, 12), 40) == first


def test_a_batch_goes_in_parts_where_a_whole_one_would_hold_too_much():
    """Without norms an ordinary step holds one tensor a layer, a private one two."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(64, 64, 1), nn.ReLU(inplace=True)) for _ in range(6)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 3))
    few, many = (allowed(model, (64, 4, 4), batch).parts for batch in (4, 4000))
    assert (few, many > 1) == (1, True)


def test_layers_with_a_bias_keep_no_more_under_a_checkpoint():
    """What torch makes of three dimensions and a bias is a view, on which autograd keeps nothing for us."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(6))

    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = blocks, nn.Linear(16, 3)

        def forward(self, x):
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=False)
            return self.head(x.mean(1))

    torch.manual_seed(0)
    x, y = torch.randn(8, 40, 16), torch.arange(8) % 3
    gradient = Gradient(Saving(), losses)
    batch = Examples((x, y)).take(slice(None))
    gradient.check(x[:1], y[:1])
    seen = []

    def begin(tape):
        seen.append(sum(use.own for use in tape.holdings.held(list(gradient.model.parameters()))))

    inputs, targets, _ = next(iter(batch.physical_batches()))
    with gradient.plain.running():
        gradient._passes.run(inputs, targets, None, lambda slot, term: None, begin=begin)
    assert seen[0] < 12 * x.nbytes  # inputs and outputs of blocks: with what is inside, four times as much


def test_a_part_with_a_checkpoint_is_there_only_while_it_is_computed_again():
    inside = [HeldBytes(100, 0, 1, 100 * (n % 4 + 1)) for n in range(16)]
    terms = [TermBytes(n, n, 10**6, 100, 100) for n in range(16)]
    assert planned(inside, terms, 10**6, 0, "cpu").parts > 1
    assert planned([HeldBytes(100, 100)] * 16, terms, 10**6, 0, "cpu").parts == 1
    assert planned(inside, terms, 1, 0, "cpu").parts == 1  # of one example there are no parts
