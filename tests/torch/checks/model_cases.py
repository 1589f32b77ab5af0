"""Models, losses and what they do with a batch: right ones, and ones that mix examples on purpose.

A `Case` makes a model anew, with examples of its own and a loss of one value a record. The right ones are of
the kinds that Opacus tests its layers on and of common architectures, in small; the wrong ones are ways in
which people's models let examples meet, or keep something of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

N, WIDTH, CLASSES = 12, 6, 3


@dataclass(frozen=True)
class Case:
    """A model to be made, where its inputs come from, its loss."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    loss: Callable[[Any, Any], Tensor]
    targets: Callable[[int], Any]

    def batch(self, size: int = N) -> tuple[Any, Any]:
        torch.manual_seed(11)
        return self.inputs(size), self.targets(size)


def rows(n: int) -> Tensor:
    return torch.randn(n, WIDTH)


def shaped(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape)


def ids(*shape: int, high: int = 9) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(0, high, (n, *shape))


def classes(n: int) -> Tensor:
    return torch.randint(0, CLASSES, (n,))


def numbers(n: int) -> Tensor:
    return torch.randn(n)


def entropy(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


def squared(out: Any, y: Tensor) -> Tensor:
    """The sum of squares of whatever comes out, so that every output has a gradient."""
    first = out[0] if isinstance(out, tuple) else out
    return (first.flatten(1) - 0.5).square().sum(1) + 0 * y


def case(
    name: str, make: Callable[[], nn.Module], inputs: Any = rows, loss: Any = squared, targets: Any = numbers
) -> Case:
    return Case(name, make, inputs, loss, targets)


class Fn(nn.Module):
    """A function with layers before and after it."""

    def __init__(self, function: Callable[..., Any], width: int = WIDTH, out: int = CLASSES) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(WIDTH, width), nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(torch.tanh(self.first(x))))


class Raw(nn.Module):
    """A function of the inputs themselves."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.last = function, nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(x))


class Calls(nn.Module):
    """A module called in some other way than with the inputs alone."""

    def __init__(self, module: nn.Module, how: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.how = module, how

    def forward(self, *given: Tensor) -> Any:
        return self.how(self.module, *given)


def seq(*layers: nn.Module) -> Callable[[], nn.Module]:
    """Layers that are made once and shared: cases do not train."""
    return lambda: nn.Sequential(*layers)


# --- right ones


def _layers() -> list[Case]:
    found = []
    for bias in (True, False):
        for shape in ((WIDTH,), (2, WIDTH), (2, 3, WIDTH)):
            found.append(
                case(f"linear {shape} {bias}", lambda b=bias: nn.Linear(WIDTH, 4, bias=b), shaped(*shape))
            )
    for kind, shape in ((nn.Conv1d, (4, 7)), (nn.Conv2d, (4, 5, 6)), (nn.Conv3d, (4, 4, 3, 5))):
        for more in (
            {},
            {"stride": 2},
            {"padding": 1},
            {"padding": "same"},
            {"dilation": 2, "padding": 2},
            {"groups": 2},
            {"groups": 4, "bias": False},
            {"padding": 1, "padding_mode": "circular"},
        ):
            found.append(
                case(f"{kind.__name__} {more}", lambda k=kind, m=more: k(4, 8, 3, **m), shaped(*shape))
                if "dilation" not in more or kind is not nn.Conv3d
                else case(f"{kind.__name__} deep", lambda k=kind: k(4, 4, (2, 1, 3)), shaped(*shape))
            )
    for kind, shape in (
        (nn.ConvTranspose1d, (4, 5)),
        (nn.ConvTranspose2d, (4, 3, 4)),
    ):
        found.append(case(kind.__name__, lambda k=kind: k(4, 3, 2, stride=2), shaped(*shape)))
    for shape in ((4,), (4, 5), (4, 3, 3), (4, 2, 2, 2)):
        for groups in (1, 2, 4):
            if groups == 4 and shape == (4,):
                continue  # groups of one number are zero
            found.append(
                case(
                    f"group norm {shape} {groups}",
                    lambda g=groups: nn.GroupNorm(g, 4),
                    shaped(*shape),
                )
            )
    for shape, normal in (((4,), 4), ((3, 4), 4), ((3, 4), (3, 4)), ((2, 3, 4), (3, 4))):
        found.append(case(f"layer norm {shape} {normal}", lambda s=normal: nn.LayerNorm(s), shaped(*shape)))
    for shape in ((4,), (3, 4)):
        found.append(case(f"rms norm {shape}", lambda: nn.RMSNorm(4), shaped(*shape)))
    for kind, shape in (
        (nn.InstanceNorm1d, (4, 5)),
        (nn.InstanceNorm2d, (4, 3, 3)),
        (nn.InstanceNorm3d, (4, 2, 2, 3)),
    ):
        found.append(case(kind.__name__, lambda k=kind: k(4, affine=True), shaped(*shape)))
    found += [
        case("embedding", lambda: nn.Embedding(9, 4), ids(3)),
        case("embedding of pairs", lambda: nn.Embedding(9, 4), ids(3, 2)),
        case("embedding with padding", lambda: nn.Embedding(9, 4, padding_idx=0), ids(5)),
        case("embedding bag sum", lambda: nn.EmbeddingBag(9, 4, mode="sum"), ids(5)),
        case("embedding bag mean", lambda: nn.EmbeddingBag(9, 4, mode="mean"), ids(5)),
        case("prelu", lambda: nn.PReLU(), shaped(4)),
        case("prelu of channels", lambda: nn.PReLU(4), shaped(4, 3)),
        case("bilinear", lambda: nn.Bilinear(3, 2, 4), lambda n: (torch.randn(n, 3), torch.randn(n, 2))),
    ]
    return found


def _recurrent() -> list[Case]:
    found = []
    for kind in (nn.RNN, nn.LSTM, nn.GRU):
        for more in ({}, {"num_layers": 2}, {"bidirectional": True}, {"bias": False}):
            found.append(
                case(
                    f"{kind.__name__} {more}",
                    lambda k=kind, m=more: k(4, 3, batch_first=True, **m),
                    shaped(5, 4),
                )
            )
        found.append(
            case(
                f"{kind.__name__} time first",
                lambda k=kind: Calls(k(4, 3), lambda m, x: m(x.transpose(0, 1))[0].transpose(0, 1)),
                shaped(5, 4),
            )
        )
        cell = {nn.RNN: nn.RNNCell, nn.LSTM: nn.LSTMCell, nn.GRU: nn.GRUCell}[kind]
        found.append(case(cell.__name__, lambda c=cell: c(4, 3), shaped(4)))
    return found


def _attention() -> list[Case]:
    def own(m: Any, x: Tensor) -> Tensor:
        return m(x, x, x)[0]

    def masked(m: Any, x: Tensor, blank: Tensor) -> Tensor:
        return m(x, x, x, key_padding_mask=blank)[0]

    def causal(m: Any, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return m(x, x, x, attn_mask=mask, need_weights=False)[0]

    def padded(n: int) -> tuple[Tensor, Tensor]:
        blank = torch.rand(n, 5) < 0.4
        blank[:, 0] = False
        return torch.randn(n, 5, 4), blank

    make: dict[str, Callable[[], nn.Module]] = {
        "plain": lambda: nn.MultiheadAttention(4, 2, batch_first=True),
        "no bias": lambda: nn.MultiheadAttention(4, 2, bias=False, batch_first=True),
        "bias kv": lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True),
        "zero": lambda: nn.MultiheadAttention(4, 2, add_zero_attn=True, batch_first=True),
        "dropout": lambda: nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True),
    }
    found = [case(f"attention {name}", lambda m=m: Calls(m(), own), shaped(5, 4)) for name, m in make.items()]
    found += [
        case("attention causal", lambda: Calls(make["plain"](), causal), shaped(5, 4)),
        case("attention masked", lambda: Calls(make["plain"](), masked), padded),
        case(
            "attention time first",
            lambda: Calls(
                nn.MultiheadAttention(4, 2),
                lambda m, x: own(m, x.transpose(0, 1)).transpose(0, 1),
            ),
            shaped(5, 4),
        ),
        case(
            "attention across",
            lambda: Calls(
                nn.MultiheadAttention(4, 2, kdim=3, vdim=2, batch_first=True),
                lambda m, q, k, v: m(q, k, v)[0],
            ),
            lambda n: (torch.randn(n, 5, 4), torch.randn(n, 2, 3), torch.randn(n, 2, 2)),
        ),
        case("encoder", lambda: nn.TransformerEncoderLayer(4, 2, 7, batch_first=True), shaped(5, 4)),
        case(
            "encoder, norms first",
            lambda: nn.TransformerEncoderLayer(4, 2, 7, norm_first=True, batch_first=True, activation="gelu"),
            shaped(5, 4),
        ),
        case(
            "encoder and decoder",
            lambda: nn.Transformer(4, 2, 1, 1, 6, 0.0, batch_first=True),
            lambda n: (torch.randn(n, 4, 4), torch.randn(n, 3, 4)),
        ),
    ]
    return found


class Token(nn.Module):
    """Patches, a class token, learnt positions, one block of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 4, 2, stride=2)
        self.token, self.place = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 5, 4))
        self.block, self.head = nn.TransformerEncoderLayer(4, 2, 6, 0.1, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        return self.head(self.block(x)[:, 0])


class Begins(nn.Module):
    """Recurrent layers whose first states are learnt, and a learnt word before the others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.state = nn.LSTM(4, 3, 2, batch_first=True), nn.Parameter(torch.randn(2, 1, 3))
        self.cell, self.second = nn.Parameter(torch.randn(2, 1, 3)), nn.GRU(3, 3, batch_first=True)
        self.word, self.head = nn.Parameter(torch.randn(2, 3)), nn.Linear(3, CLASSES)
        self.start = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        states = self.state.expand(-1, n, -1).contiguous(), self.cell.repeat(1, n, 1)
        x = torch.cat([self.start.expand(n, 3)[:, None], x[..., :3]], 1)
        x = self.first(torch.cat([x, x[..., :1]], 2), states)[0]
        x = torch.cat([self.word.unsqueeze(0).expand(n, -1, -1), x], 1)
        return self.head(self.second(x)[0][:, -1])


class Scaled(nn.Module):
    """A learnt number without a dimension, beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.gain = nn.Linear(WIDTH, CLASSES), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.fc(x)


class Own(nn.Module):
    """A weight of one's own, used as one likes."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nd,dk->nk", x, self.weight) if self.weight.ndim == 2 else x * self.weight


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.out = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.body(self.table(x))))


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.down = (
            nn.Linear(WIDTH, CLASSES).requires_grad_(False),
            nn.Linear(WIDTH, 2, bias=False),
        )
        self.up = nn.Linear(2, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Residual(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Conv2d(3, 4, 3, padding=1), norm, nn.Conv2d(4, 4, 3, padding=1)
        self.short, self.head = nn.Conv2d(3, 4, 1), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(F.relu(self.norm(self.one(x))))
        return self.head(F.relu(y + self.short(x)).mean((2, 3)))


class Squeeze(nn.Module):
    """Squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.head((x * self.gate(x.mean((2, 3))).sigmoid()[:, :, None, None]).amax((2, 3)))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels, self.norm = nn.Linear(5, 5), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(x.transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm(x))


class Gated(nn.Module):
    """A mixture of experts without a capacity: every example picks its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = (
            nn.Linear(WIDTH, 3),
            nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(3)),
        )

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(1)
        best = F.one_hot(gates.argmax(1), 3) * gates
        return sum(best[:, n, None] * expert(x) for n, expert in enumerate(self.experts))


class Words(nn.Module):
    """A bag of words with a mask of those that count."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weight = mask.float()[..., None]
        return self.head((self.table(x) * weight).sum(1) / weight.sum(1).clamp_min(1.0))


class Depth(nn.Module):
    """Stochastic depth, drawn for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        keep = (torch.rand(len(x), 1, device=x.device) < 0.7).float()
        return self.head(x + keep * self.body(x))


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 4), nn.Linear(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encode(x).chunk(2, 1)
        return self.decode(mean + spread.exp() * torch.randn_like(mean))


class Double(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Tensor:
        return 2 * delta


def _models() -> list[Case]:
    image = shaped(3, 6, 6)
    acts = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.ELU, nn.Softplus, nn.LeakyReLU, nn.Sigmoid)
    found = [
        case(
            f"perceptron {act.__name__}",
            lambda a=act: nn.Sequential(nn.Linear(WIDTH, 8), a(), nn.Linear(8, CLASSES)),
            rows,
            entropy,
            classes,
        )
        for act in acts
    ]
    for drop in (nn.Dropout(0.5), nn.AlphaDropout(0.3), nn.Identity()):
        make = seq(nn.Linear(WIDTH, 8), drop, nn.Linear(8, CLASSES))
        found.append(case(f"perceptron {type(drop).__name__}", make, rows, entropy, classes))
    found += [
        case("vit", Token, shaped(1, 4, 4), entropy, classes),
        case("learnt states", Begins, shaped(4, 4), entropy, classes),
        case("scalar parameter", Scaled, rows, entropy, classes),
        case("own weight", lambda: Own(WIDTH, CLASSES), rows, entropy, classes),
        case("own scale", lambda: Own(WIDTH), rows, entropy, lambda n: torch.randint(0, WIDTH, (n,))),
        case("tied language model", Tied, ids(4)),
        case("lora", Lora, rows, entropy, classes),
        case("resnet", lambda: Residual(nn.GroupNorm(2, 4)), image, entropy, classes),
        case("resnet, fixed statistics", lambda: Residual(nn.BatchNorm2d(4)).eval(), image, entropy, classes),
        case("squeeze", Squeeze, image, entropy, classes),
        case("mixer", Mixer, shaped(5, 4)),
        case("experts", Gated, rows, entropy, classes),
        case("words", Words, lambda n: (ids(5)(n), torch.rand(n, 5) < 0.7), entropy, classes),
        case("stochastic depth", Depth, rows, entropy, classes),
        case("variational", Variational, rows),
        case("dropout by hand", lambda: Fn(lambda x: F.dropout(x, 0.4)), rows, entropy, classes),
        case("noise", lambda: Fn(lambda x: x + 0.1 * torch.randn_like(x)), rows, entropy, classes),
        case("own function", lambda: Fn(Double.apply), rows, entropy, classes),
        case("softmax of features", lambda: Fn(lambda x: x.softmax(1)), rows, entropy, classes),
        case("sorted features", lambda: Fn(lambda x: x.sort(1).values), rows, entropy, classes),
        case("own norm", lambda: Fn(lambda x: F.normalize(x, dim=1)), rows, entropy, classes),
        case("own mean", lambda: Fn(lambda x: x - x.mean(1, keepdim=True)), rows, entropy, classes),
        case(
            "own maximum",
            lambda: Fn(lambda x: x / x.amax(1, keepdim=True).clamp_min(1.0)),
            rows,
            entropy,
            classes,
        ),
        case("own condition", lambda: Fn(lambda x: torch.where(x > 0.2, x, 0.1 * x)), rows, entropy, classes),
        case(
            "top features",
            lambda: Fn(lambda x: x * (x >= x.topk(3, 1).values[:, -1:])),
            rows,
            entropy,
            classes,
        ),
        case("cumulative features", lambda: Fn(lambda x: x.cumsum(1)), rows, entropy, classes),
        case(
            "outer product",
            lambda: Fn(lambda x: (x[:, :, None] * x[:, None]).mean(2)),
            rows,
            entropy,
            classes,
        ),
        case("shared chance", lambda: Fn(lambda x: x * (1 + torch.rand(1))), rows, entropy, classes),
        case("used twice", lambda: Calls(nn.Linear(WIDTH, WIDTH), lambda m, x: m(torch.tanh(m(x)))), rows),
        case(
            "weight norm",
            lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, 5)), nn.Linear(5, 3)),
            rows,
            entropy,
            classes,
        ),
        case(
            "upsampling",
            seq(nn.Conv2d(3, 4, 3, 2), nn.Upsample(scale_factor=2), nn.Conv2d(4, 2, 1), nn.Flatten()),
            image,
        ),
        case(
            "pooling",
            seq(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)),
            image,
            entropy,
            classes,
        ),
        case(
            "depthwise",
            seq(nn.Conv2d(3, 6, 3, groups=3), nn.Conv2d(6, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            image,
        ),
        case(
            "frozen front",
            lambda: nn.Sequential(nn.Linear(WIDTH, 5).requires_grad_(False), nn.Tanh(), nn.Linear(5, 3)),
            rows,
            entropy,
            classes,
        ),
    ]
    return found


def _losses() -> list[Case]:
    line = lambda: nn.Linear(WIDTH, CLASSES)  # noqa: E731
    soft = lambda n: torch.rand(n, CLASSES)  # noqa: E731
    wide = lambda n: torch.randn(n, CLASSES)  # noqa: E731
    return [
        case(
            "smoothed",
            line,
            rows,
            lambda o, y: F.cross_entropy(o, y, reduction="none", label_smoothing=0.1),
            classes,
        ),
        case("weighted", line, rows, lambda o, y: entropy(o, y) * torch.tensor([1.0, 2.0, 0.5])[y], classes),
        case("focal", line, rows, lambda o, y: (1 - (-entropy(o, y)).exp()) ** 2 * entropy(o, y), classes),
        case(
            "ignored",
            line,
            rows,
            lambda o, y: F.cross_entropy(o, y, reduction="none", ignore_index=0),
            classes,
        ),
        case("soft labels", line, rows, lambda o, y: -(o.log_softmax(1) * y).sum(1), soft),
        case(
            "several labels",
            line,
            rows,
            lambda o, y: F.binary_cross_entropy_with_logits(o, y, reduction="none").sum(1),
            soft,
        ),
        case(
            "probabilities",
            line,
            rows,
            lambda o, y: F.binary_cross_entropy(o.sigmoid(), y, reduction="none").mean(1),
            soft,
        ),
        case("huber", line, rows, lambda o, y: F.huber_loss(o, y, reduction="none").sum(1), wide),
        case("absolute", line, rows, lambda o, y: (o - y).abs().sum(1), wide),
        case("quantile", line, rows, lambda o, y: torch.maximum(0.9 * (o - y), -0.1 * (o - y)).mean(1), wide),
        case("cosine", line, rows, lambda o, y: 1 - F.cosine_similarity(o, y), wide),
        case(
            "divergence",
            line,
            rows,
            lambda o, y: F.kl_div(o.log_softmax(1), y.softmax(1), reduction="none").sum(1),
            wide,
        ),
        case("hinge", line, rows, lambda o, y: F.multi_margin_loss(o, y, reduction="none"), classes),
        case(
            "tokens",
            Tied,
            ids(4),
            lambda o, y: entropy(o.flatten(0, 1), y.flatten()).view(y.shape).sum(1),
            ids(4),
        ),
        case(
            "poisson",
            line,
            rows,
            lambda o, y: F.poisson_nll_loss(o[:, 0], y, reduction="none"),
            lambda n: torch.rand(n),
        ),
        case(
            "gaussian",
            line,
            rows,
            lambda o, y: F.gaussian_nll_loss(o[:, 0], y, o[:, 1].exp(), reduction="none"),
            numbers,
        ),
        case("two views of one", line, rows, lambda o, y: (o - o.roll(1, 1)).square().sum(1), numbers),
    ]


# --- wrong ones


def _chunks(x: Tensor, size: int) -> Tensor:
    if len(x) % size:
        return x
    parts = x.view(-1, size, *x.shape[1:])
    return (parts - parts.mean(1, keepdim=True)).flatten(0, 1)


def _capacity(x: Tensor, most: int = 4) -> Tensor:
    """Experts take so many examples each, first come first served; the rest is dropped."""
    expert = (x[:, 0] > x[:, 1]).long()
    place = (F.one_hot(expert, 2).cumsum(0) * F.one_hot(expert, 2)).sum(1)
    return x * (place <= most)[:, None]


def _hooked(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The identity, whose gradient is changed."""

    def run(x: Tensor) -> Tensor:
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(change)
        return x

    return run


class Centring(torch.autograd.Function):
    """The identity; its gradient has a mean over the batch taken away."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Tensor:
        return delta - delta.mean(0)


def _through(x: Tensor) -> Tensor:
    mean = x.mean(0)
    return x + mean - mean.detach()


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x - x.mean(0),
    "mean of values": lambda x: x - x.mean(),
    "detached mean": lambda x: x - x.mean(0).detach(),
    "median": lambda x: x - x.median(0).values,
    "spread": lambda x: x / (x.std(0, correction=0) + 0.1),
    "norm of all": lambda x: x / x.norm(),
    "largest": lambda x: x / x.abs().max(),
    "condition on the largest": lambda x: x / x.max() if x.max() > 1 else x,
    "condition on the mean": lambda x: 2 * x if x.mean() > 0.3 else x,
    "condition on the size": lambda x: 0.5 * x if len(x) > 10 else x,
    "condition on one": lambda x: x if bool((x < 100).all()) else 0 * x,
    "condition on nan": lambda x: x if bool(x.isfinite().all()) else torch.zeros_like(x),
    "size": lambda x: x * len(x) / 8,
    "root of the size": lambda x: x / len(x) ** 0.5,
    "mixup": lambda x: 0.7 * x + 0.3 * x[torch.randperm(len(x))],
    "mixup by a turn": lambda x: 0.7 * x + 0.3 * x.roll(1, 0),
    "mixup backwards": lambda x: 0.7 * x + 0.3 * x.flip(0),
    "mixup of some": lambda x: torch.where(torch.rand(len(x), 1) < 0.5, x, x[torch.randperm(len(x))]),
    "cut and mix": lambda x: torch.cat([x[:, :3], x[torch.randperm(len(x)), 3:]], 1),
    "shuffled": lambda x: x[torch.randperm(len(x))],
    "shuffled values": lambda x: x.flatten()[torch.randperm(x.numel())].view_as(x),
    "sorted": lambda x: x.sort(0).values,
    "sorted examples": lambda x: x[x[:, 0].argsort()],
    "cumulative": lambda x: x.cumsum(0),
    "cumulative product": lambda x: x.cumprod(0),
    "softmax": lambda x: x.softmax(0),
    "log softmax": lambda x: x.log_softmax(0),
    "slightly": lambda x: x + 1e-4 * x.sum(0),
    "very slightly": lambda x: x + 1e-6 * x.mean(0),
    "chunks of 8": lambda x: _chunks(x, 8),
    "chunks of 16": lambda x: _chunks(x, 16),
    "chunks of 5": lambda x: _chunks(x, 5),
    "halves": lambda x: _chunks(x, len(x) // 2) if len(x) > 1 else x,
    "capacity": _capacity,
    "capacity of 16": lambda x: _capacity(x, 16),
    "first 16": lambda x: torch.cat([x[:16], 0 * x[16:]]),
    "difference to the first": lambda x: x - x[:1],
    "difference to the last": lambda x: x - x[-1:],
    "difference to the next": lambda x: x - torch.cat([x[1:], x[-1:]]),
    "attention over the batch": lambda x: (x @ x.T).softmax(1) @ x,
    "gram": lambda x: x @ (x.T @ x),
    "whitening": lambda x: x @ torch.linalg.inv(x.T @ x + torch.eye(x.shape[1])),
    "quantile": lambda x: x.clamp(max=torch.quantile(x.detach().nan_to_num(), 0.9)),
    "quantised": lambda x: (x / x.abs().max() * 7).round() / 7 + x - x.detach(),
    "best half": lambda x: x * (x.sum(1) >= x.sum(1).median())[:, None],
    "top one": lambda x: x * (x.sum(1) == x.sum(1).max())[:, None],
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True) if len(x) > 1 else x,
    "layer norm of the batch": lambda x: F.layer_norm(x.T, (len(x),)).T,
    "group norm of the batch": lambda x: F.group_norm(x.reshape(1, 1, -1), 1).view_as(x),
    "noise of the batch's spread": lambda x: x + x.std(correction=0) * torch.randn_like(x),
    "dropout by the batch": lambda x: x * (x.sum() > 0),
    "through the gradient": _through,
    "hook, mean": _hooked(lambda g: g - g.mean(0)),
    "hook, size": _hooked(lambda g: g / len(g)),
    "hook, norm": _hooked(lambda g: g / (g.norm() + 1e-3)),
    "hook, largest": _hooked(lambda g: g.clamp(max=float(g.abs().mean()))),
    "own function, backward": Centring.apply,
    "neighbours": lambda x: F.avg_pool1d(x.T[None], 3, 1, 1)[0].T,
    "discrimination": lambda x: x + (-(x[:, None] - x[None]).abs().sum(2)).exp().sum(1, keepdim=True),
    "deviation of the batch": lambda x: x + x.var(0, correction=0).mean(),
    "unique": lambda x: x * len(torch.unique(x[:, 0])),
    "count": lambda x: x + (x > 0.3).float().sum() / 10,
    "any": lambda x: x + (x > 0.9).any().float(),
    "argmax": lambda x: x + x[x.sum(1).argmax()],
    "random partner": lambda x: x + 0.1 * x[torch.randint(0, len(x), (1,))],
    "reshaped": lambda x: x.T.reshape(x.shape),
}


class Kept(nn.Module):
    """Keeps something in an attribute and uses it later."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.fc, self.t, self.last, self.seen = how, nn.Linear(WIDTH, CLASSES), 0, None, []
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("bank", torch.zeros(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "counter":
                self.t += 1
                x = x * (1 + 0.1 * self.t)
            case "cache":
                x, self.last = x + (0.0 if self.last is None else self.last.mean()), x.detach()
            case "list":
                self.seen.append(x.detach().mean(0))
                x = x - self.seen[0]
            case "moving average":
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
                x = x - self.mean
            case "running mean":
                self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
                x = x - self.mean
            case "bank":
                self.bank.copy_(torch.cat([x.detach(), self.bank])[:4])
                x = x + self.bank.mean(0)
            case "only kept":
                self.last = x.detach()
            case "largest so far":
                self.t = max(self.t, float(x.detach().abs().max()))
                x = x / (1 + self.t)
        return self.fc(x)


KEPT = ["counter", "cache", "list", "moving average", "running mean", "bank", "only kept", "largest so far"]


class Over(nn.Module):
    """Layers that take the batch for a sequence, an image or a set."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.head = how, nn.Linear(WIDTH, CLASSES)
        self.attend, self.walk = nn.MultiheadAttention(WIDTH, 1), nn.GRU(WIDTH, WIDTH)
        self.slide, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "attention":
                x = self.attend(x[:, None], x[:, None], x[:, None])[0][:, 0]
            case "recurrence":
                x = self.walk(x[:, None])[0][:, 0]
            case "convolution":
                x = self.slide(x.T[None])[0].T
            case "set":
                x = x + self.norm(x.amax(0))
            case "transposed":
                x = F.layer_norm(x.T, (len(x),)).T
        return self.head(x)


def _wrong_losses() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    def unit(out: Tensor) -> Tensor:
        return F.normalize(out, dim=1)

    def contrast(out: Tensor, y: Tensor) -> Tensor:
        return entropy(unit(out) @ unit(out).T / 0.1, torch.arange(len(out)))

    def supervised(out: Tensor, y: Tensor) -> Tensor:
        same = (y[:, None] == y[None]).float()
        return -((unit(out) @ unit(out).T).log_softmax(1) * same).sum(1) / same.sum(1)

    def triplet(out: Tensor, y: Tensor) -> Tensor:
        far = torch.cdist(out, out)
        same = y[:, None] == y[None]
        return F.relu(far.masked_fill(~same, 0).amax(1) - far.masked_fill(same, 9).amin(1) + 1)

    def decorrelated(out: Tensor, y: Tensor) -> Tensor:
        centred = out - out.mean(0)
        return entropy(out, y) + (centred.T @ centred).square().sum() / len(out)

    def balanced(out: Tensor, y: Tensor) -> Tensor:
        counts = torch.bincount(y.clamp_min(0), minlength=CLASSES)
        return entropy(out, y) / counts[y].clamp_min(1)

    def transported(out: Tensor, y: Tensor) -> Tensor:
        plan = out.detach().exp()
        for _ in range(3):
            plan = plan / plan.sum(0, keepdim=True)
            plan = plan / plan.sum(1, keepdim=True)
        return -(plan * out.log_softmax(1)).sum(1)

    return {
        "mean for all": lambda o, y: entropy(o, y).mean().expand(len(y)),
        "divided by the size": lambda o, y: entropy(o, y) / len(y),
        "sum for all": lambda o, y: entropy(o, y).sum().expand(len(y)),
        "centred outputs": lambda o, y: entropy(o - o.mean(0), y),
        "centred losses": lambda o, y: entropy(o, y) - 0.5 * entropy(o, y).mean(),
        "contrast": contrast,
        "pairs": lambda o, y: entropy(o, y) + (o - o.roll(1, 0)).square().sum(1),
        "supervised contrast": supervised,
        "hard triplets": triplet,
        "decorrelation": decorrelated,
        "variance": lambda o, y: entropy(o, y) + F.relu(1 - o.std(0, correction=0)).sum(),
        "class balance": balanced,
        "transport": transported,
        "hardest": lambda o, y: entropy(o, y) * (entropy(o, y) >= entropy(o, y).median()),
        "hardest one": lambda o, y: entropy(o, y) * (entropy(o, y) == entropy(o, y).max()),
        "softmax of losses": lambda o, y: entropy(o, y) * entropy(o, y).detach().softmax(0) * len(y),
        "clamped at twice the mean": lambda o, y: entropy(o, y).clamp(max=2 * entropy(o, y).mean().item()),
        "over the largest": lambda o, y: entropy(o, y) / entropy(o, y).max().detach(),
        "permuted targets": lambda o, y: 0.5 * entropy(o, y) + 0.5 * entropy(o, y[torch.randperm(len(y))]),
        "negatives of the batch": lambda o, y: F.softplus(o.roll(1, 0)[:, 0] - o[:, 0]),
        "ranking": lambda o, y: F.softplus(-(o[:, None, 0] - o[None, :, 0]) * (y[:, None] - y[None])).mean(1),
        "masked mean": lambda o, y: entropy(o, y.clamp_min(0)) * (y > 0) / (y > 0).sum().clamp_min(1),
        "temperature of the batch": lambda o, y: entropy(o / (0.1 + o.detach().std()), y),
        "distances": lambda o, y: entropy(o, y) + torch.cdist(o, o).mean(1),
        "penalty of the batch": lambda o, y: entropy(o, y) + o.norm(),
        "smoothed by the batch": lambda o, y: (
            -(
                o.log_softmax(1)
                * (0.9 * F.one_hot(y.clamp_min(0), CLASSES) + 0.1 * o.detach().softmax(1).mean(0))
            ).sum(1)
        ),
        "past 20": lambda o, y: entropy(o, y) * (1.0 if len(y) <= 20 else 0.1),
        "last one dropped": lambda o, y: entropy(o, y) * (torch.arange(len(y)) < max(1, len(y) - 1)),
    }


def _wrong_modules() -> list[Case]:
    image = shaped(3, 6, 6)
    flat: dict[str, Callable[[], nn.Module]] = {
        "BatchNorm1d": lambda: nn.BatchNorm1d(5),
        "BatchNorm1d without statistics": lambda: nn.BatchNorm1d(5, track_running_stats=False).eval(),
    }
    found = [
        case(
            f"module: {name}",
            lambda m=m: nn.Sequential(nn.Linear(WIDTH, 5), m(), nn.Linear(5, CLASSES)),
            rows,
            entropy,
            classes,
        )
        for name, m in flat.items()
    ]
    norms: dict[str, Callable[[], nn.Module]] = {
        "BatchNorm2d": lambda: nn.BatchNorm2d(4),
        "SyncBatchNorm": lambda: nn.SyncBatchNorm(4),
        "InstanceNorm2d with statistics": lambda: nn.InstanceNorm2d(4, track_running_stats=True),
        "BatchNorm2d without momentum": lambda: nn.BatchNorm2d(4, momentum=None),
    }
    found += [
        case(f"module: {name}", lambda m=m: Residual(m()), image, entropy, classes)
        for name, m in norms.items()
    ]
    found += [
        case("module: max_norm", lambda: nn.Embedding(9, 4, max_norm=1.0), ids(3)),
        case("module: scale_grad_by_freq", lambda: nn.Embedding(9, 4, scale_grad_by_freq=True), ids(3)),
        case(
            "module: DataParallel", lambda: nn.DataParallel(nn.Linear(WIDTH, CLASSES)), rows, entropy, classes
        ),
    ]
    return found


RIGHT = [*_layers(), *_recurrent(), *_attention(), *_models(), *_losses()]
WRONG = [
    *(
        case(f"hidden: {name}", lambda f=f: Fn(f), rows, entropy, classes)
        for name, f in FUNCTIONS.items()
        if name not in ("condition on the largest", "condition on one")
    ),  # never, after a tanh
    *(
        case(f"inputs: {name}", lambda f=f: Raw(f), rows, entropy, classes)
        for name, f in FUNCTIONS.items()
        if not name.startswith(("hook", "own function", "through"))
    ),
    *(case(f"kept: {how}", lambda h=how: Kept(h), rows, entropy, classes) for how in KEPT),
    *(
        case(f"over the batch: {how}", lambda h=how: Over(h), rows, entropy, classes)
        for how in ("attention", "recurrence", "convolution", "set", "transposed")
    ),
    *(
        case(f"loss: {name}", lambda: nn.Linear(WIDTH, CLASSES), rows, loss, classes)
        for name, loss in _wrong_losses().items()
    ),
    *_wrong_modules(),
]
