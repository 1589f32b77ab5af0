"""Thirty-odd more models in plain torch for `benchmarks.unseen` (``--untried``): what people write by hand.

Parameters beside modules, inputs of several parts, outputs of several parts, layers that are used again and
again, convolutions with masks, layers of one's own. None was looked at while the routes were made; what each
found is in docs/deep-speed.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.unseen_models import norm2d


@dataclass(frozen=True)
class Case:
    """A model, what makes inputs and targets of so many examples, its loss, and its batch."""

    make: Callable[[], nn.Module]
    given: Callable[[int], tuple[Any, Tensor]]
    loss: Callable[[Any, Tensor], Tensor]
    batch: int
    adam: bool = True

    def data(self, device: torch.device) -> tuple[Any, Tensor]:
        """Return inputs and targets of one batch."""
        inputs, targets = self.given(self.batch)
        moved = tuple(x.to(device) for x in inputs) if isinstance(inputs, tuple) else inputs.to(device)
        return moved, targets.to(device)


def classes(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").mean(1)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().flatten(1).mean(1)


class SelectiveScan(nn.Module):
    """A block of Mamba: a short causal convolution, then a scan whose steps depend on the input."""

    def __init__(self, width: int = 32, state: int = 8) -> None:
        super().__init__()
        inner = 2 * width
        self.norm, self.enter = nn.LayerNorm(width), nn.Linear(width, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.steps, self.sides = nn.Linear(inner, inner), nn.Linear(inner, 2 * state, bias=False)
        self.A_log = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.leave = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        seen, gate = self.enter(self.norm(x)).chunk(2, -1)
        seen = F.silu(self.conv(seen.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step = F.softplus(self.steps(seen))
        b, c = self.sides(seen).chunk(2, -1)
        decay = torch.exp(step[..., None] * -self.A_log.exp())
        more = (step * seen)[..., None] * b[:, :, None]
        state, found = torch.zeros_like(more[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + more[:, t]
            found.append((state * c[:, t, None]).sum(-1))
        out: Tensor = x + self.leave((torch.stack(found, 1) + self.D * seen) * F.silu(gate))
        return out


class TimeMix(nn.Module):
    """A block of RWKV: shifted mixtures with learnt shares, and a decaying weighted mean."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.decay, self.bonus = nn.Parameter(torch.linspace(-3, 1, width)), nn.Parameter(torch.zeros(width))
        self.share_k = nn.Parameter(torch.full((1, 1, width), 0.5))
        self.share_v = nn.Parameter(torch.full((1, 1, width), 0.3))
        self.share_r = nn.Parameter(torch.full((1, 1, width), 0.7))
        self.k, self.v, self.r, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.ReLU(), nn.Linear(3 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        last = F.pad(h, (0, 0, 1, -1))
        k = self.k(h * self.share_k + last * (1 - self.share_k))
        v = self.v(h * self.share_v + last * (1 - self.share_v))
        r = torch.sigmoid(self.r(h * self.share_r + last * (1 - self.share_r)))
        w, found = torch.exp(-torch.exp(self.decay)), []
        top = bottom = torch.zeros_like(k[:, 0])
        for t in range(x.shape[1]):
            now, own = torch.exp(k[:, t].clamp_max(20)), torch.exp((self.bonus + k[:, t]).clamp_max(20))
            found.append((top + own * v[:, t]) / (bottom + own + 1e-6))
            top, bottom = w * top + now * v[:, t], w * bottom + now
        x = x + self.out(r * torch.stack(found, 1))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Reader(nn.Module):
    """Words, blocks and a head that says the next word."""

    def __init__(self, block: Callable[[], nn.Module], width: int, words: int = 300, depth: int = 2) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.blocks, self.norm = nn.Sequential(*(block() for _ in range(depth))), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.blocks(self.words(x))))
        return out


class DeepSets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(3, 128), nn.ELU(), nn.Linear(128, 128), nn.ELU())
        self.all = nn.Sequential(nn.Linear(128, 64), nn.ELU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.all(self.each(x).mean(1))
        return out


class SetTransformer(nn.Module):
    """Learnt points attend to a set, and the set to them."""

    def __init__(self, width: int = 64, points: int = 16) -> None:
        super().__init__()
        self.enter, self.points = nn.Linear(3, width), nn.Parameter(torch.randn(1, points, width))
        self.seed = nn.Parameter(torch.randn(1, 1, width))
        self.one, self.two, self.three = (nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(3))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        h, _ = self.one(self.points.expand(len(x), -1, -1), x, x)
        x = x + self.two(x, h, h)[0]
        out: Tensor = self.head(self.three(self.seed.expand(len(x), -1, -1), x, x)[0].squeeze(1))
        return out


class Graph(nn.Module):
    """Graph convolutions over a dense adjacency, one graph an example."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, width), nn.Linear(width, width), nn.Linear(width, width)])
        self.epsilon = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        for n, layer in enumerate(self.layers):
            x = F.relu(layer((1 + self.epsilon[n]) * x + adjacency @ x))
        out: Tensor = self.head(x.mean(1))
        return out


class GraphAttention(nn.Module):
    """Heads that score pairs of nodes by a learnt vector."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.enter, self.heads = nn.Linear(16, width * heads, bias=False), heads
        self.source = nn.Parameter(0.1 * torch.randn(heads, width))
        self.target = nn.Parameter(0.1 * torch.randn(heads, width))
        self.head = nn.Linear(width * heads, 10)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        h = self.enter(x).unflatten(-1, (self.heads, -1))
        scores = (h * self.source).sum(-1)[:, :, None] + (h * self.target).sum(-1)[:, None]
        scores = F.leaky_relu(scores, 0.2).masked_fill(adjacency[..., None] == 0, -1e9)
        out: Tensor = self.head(
            F.elu(torch.einsum("bijh,bjhd->bihd", scores.softmax(2), h)).flatten(2).mean(1)
        )
        return out


class TabTransformer(nn.Module):
    """A table for each categorical column, attention over columns, numbers beside."""

    def __init__(self, columns: int = 8, levels: int = 12, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(levels, width) for _ in range(columns))
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = (
            nn.LayerNorm(6),
            nn.Sequential(nn.Linear(columns * width + 6, 64), nn.ReLU(), nn.Linear(64, 2)),
        )

    def forward(self, kinds: Tensor, numbers: Tensor) -> Tensor:
        x = torch.stack([table(kinds[:, n]) for n, table in enumerate(self.tables)], 1)
        out: Tensor = self.head(torch.cat([self.encoder(x).flatten(1), self.norm(numbers)], 1))
        return out


class FTTransformer(nn.Module):
    """Every number times a learnt vector plus one, a class token, attention over features."""

    def __init__(self, features: int = 14, width: int = 32) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(features, width))
        self.bias = nn.Parameter(torch.zeros(features, width))
        self.token = nn.Parameter(torch.zeros(width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = x[..., None] * self.weight + self.bias
        x = torch.cat([self.token.expand(len(x), 1, -1), x], 1)
        out: Tensor = self.head(self.encoder(x)[:, 0])
        return out


class WaveNet(nn.Module):
    def __init__(self, width: int = 32, depth: int = 6, levels: int = 64) -> None:
        super().__init__()
        self.enter = nn.Embedding(levels, width)
        self.both = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**n) for n in range(depth))
        self.out = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(depth))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(width, 64, 1), nn.ReLU(), nn.Conv1d(64, levels, 1))

    def forward(self, x: Tensor) -> Tensor:
        h, skips = self.enter(x).transpose(1, 2), 0.0
        for n, (both, out) in enumerate(zip(self.both, self.out, strict=True)):
            a, b = both(F.pad(h, (2**n, 0))).chunk(2, 1)
            more, skip = out(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
            h, skips = h + more, skips + skip
        found: Tensor = self.head(skips).transpose(1, 2)
        return found


class MaskedConv(nn.Conv2d):
    """A convolution that does not look ahead: the weights are masked in the forward pass."""

    mask: Tensor

    def __init__(self, kind: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _, _, high, wide = self.weight.shape
        mask = torch.ones(high, wide)
        mask[high // 2, wide // 2 + (kind == "B") :] = 0
        mask[high // 2 + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.mask, self.bias, self.stride, self.padding)


def pixelcnn(width: int = 24) -> nn.Module:
    layers: list[nn.Module] = [MaskedConv("A", 1, width, 7, padding=3), nn.ReLU()]
    for _ in range(3):
        layers += [MaskedConv("B", width, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(width, 1, 1))


class Capsules(nn.Module):
    """Primary capsules, and classes that they agree on in three rounds."""

    def __init__(self, inner: int = 8, outer: int = 8) -> None:
        super().__init__()
        self.stem, self.primary = nn.Conv2d(1, 16, 9, 2), nn.Conv2d(16, 4 * inner, 5, 2)
        self.inner = inner
        self.W = nn.Parameter(0.1 * torch.randn(4 * 9, 10, outer, inner))

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        square = x.square().sum(-1, keepdim=True)
        return x * square / (1 + square) / (square + 1e-8).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        x = self.primary(F.relu(self.stem(x)))
        u = self.squash(x.view(len(x), 4, self.inner, -1).transpose(2, 3).flatten(1, 2))
        votes = torch.einsum("iodk,bik->biod", self.W, u)
        logits = torch.zeros(len(x), u.shape[1], 10, device=x.device)
        for _ in range(3):
            v = self.squash((logits.softmax(2)[..., None] * votes).sum(1))
            logits = logits + (votes * v[:, None]).sum(-1)
        return v.norm(dim=-1)


class Coupling(nn.Module):
    def __init__(self, width: int, swap: bool) -> None:
        super().__init__()
        self.swap, half = swap, width // 2
        self.net = nn.Sequential(
            nn.Linear(half, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2 * half)
        )
        self.scale = nn.Parameter(torch.zeros(half))

    def forward(self, x: Tensor, volume: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, 1)
        a, b = (b, a) if self.swap else (a, b)
        s, t = self.net(a).chunk(2, 1)
        s = torch.tanh(s) * self.scale.exp()
        b = b * s.exp() + t
        return torch.cat((b, a) if self.swap else (a, b), 1), volume + s.sum(1)


class RealNVP(nn.Module):
    """A normalising flow: what comes out is a point and the log of a volume."""

    def __init__(self, width: int = 12, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coupling(width, bool(n % 2)) for n in range(depth))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        volume = x.new_zeros(len(x))
        for layer in self.layers:
            x, volume = layer(x, volume)
        return x, volume


def likelihood(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return 0.5 * outputs[0].square().sum(1) - outputs[1] + 0 * targets


class Diffused(nn.Module):
    """A block of a diffusion U-Net: time is added between two convolutions."""

    def __init__(self, inner: int, outer: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm2d(inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.time, self.norm2 = nn.Linear(time, outer), norm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1)
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        out: Tensor = self.conv2(F.silu(self.norm2(h))) + self.skip(x)
        return out


class Diffusion(nn.Module):
    """Predicts noise from a noisy image and a time, with attention in the middle."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        time, self.width = 4 * width, width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down1, self.down2 = Diffused(width, width, time), Diffused(width, 2 * width, time)
        self.less = nn.Conv2d(width, width, 3, 2, 1)
        self.attend = nn.MultiheadAttention(2 * width, 4, batch_first=True)
        self.middle = Diffused(2 * width, 2 * width, time)
        self.more = nn.ConvTranspose2d(2 * width, width, 4, 2, 1)
        self.up, self.norm = Diffused(2 * width, width, time), norm2d(width)
        self.leave = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        rates = torch.exp(
            torch.arange(self.width // 2, device=t.device) * -(math.log(1e4) / (self.width // 2))
        )
        angles = t[:, None] * 100 * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        first = self.down1(self.enter(x), time)
        h = self.down2(self.less(first), time)
        flat = h.flatten(2).transpose(1, 2)
        h = h + self.attend(flat, flat, flat, need_weights=False)[0].transpose(1, 2).view_as(h)
        h = self.more(self.middle(h, time))
        out: Tensor = self.leave(F.silu(self.norm(self.up(torch.cat([h, first], 1), time))))
        return out


class VAE(nn.Module):
    """Draws its code in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 256), nn.ReLU())
        self.mean, self.spread = nn.Linear(256, 16), nn.Linear(256, 16)
        self.decoder = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 784))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x)
        mean, spread = self.mean(h), self.spread(h)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * spread).exp()), mean, spread


def evidence(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    seen, mean, spread = outputs
    lost = F.binary_cross_entropy_with_logits(seen, targets, reduction="none").sum(1)
    return lost - 0.5 * (1 + spread - mean.square() - spread.exp()).sum(1)


def video(width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(), nn.MaxPool3d(2),
        nn.Conv3d(width, 2 * width, 3, padding=1), nn.GroupNorm(4, 2 * width), nn.ReLU(), nn.MaxPool3d(2),
        nn.Conv3d(2 * width, 4 * width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d(1),
        nn.Flatten(), nn.Linear(4 * width, 10),
    )  # fmt: skip


def generator() -> nn.Module:
    """Transposed convolutions from a code to an image."""
    return nn.Sequential(
        nn.Linear(32, 64 * 16), nn.Unflatten(1, (64, 4, 4)), nn.GroupNorm(8, 64), nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.GroupNorm(8, 32), nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.GroupNorm(8, 16), nn.ReLU(),
        nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


class FakeQuant(nn.Linear):
    """Weights and inputs rounded to eight bits, with gradients straight through."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.detach().abs().amax() / 127
        weight = torch.fake_quantize_per_tensor_affine(self.weight, float(scale), 0, -128, 127)
        x = x + ((x * 16).round() / 16 - x).detach()
        return F.linear(x, weight, self.bias)


class StraightThrough(nn.Conv2d):
    """Binary weights, with gradients straight through."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + (self.weight.sign() - self.weight).detach()
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class Pairs(nn.Module):
    """Two inputs in a bilinear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.both = nn.Linear(20, 16), nn.Linear(30, 16), nn.Bilinear(16, 16, 24)
        self.head = nn.Linear(24, 5)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.head(F.relu(self.both(F.relu(self.one(a)), F.relu(self.two(b)))))
        return out


class Hopfield(nn.Module):
    """Looks patterns up in learnt memories, by a softmax with a learnt temperature."""

    def __init__(self, width: int = 64, memories: int = 128) -> None:
        super().__init__()
        self.enter = nn.Linear(48, width)
        self.keys = nn.Parameter(0.1 * torch.randn(memories, width))
        self.values = nn.Parameter(0.1 * torch.randn(memories, width))
        self.beta = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        q = self.enter(x)
        out: Tensor = self.head((self.beta * q @ self.keys.t()).softmax(-1) @ self.values)
        return out


class Performer(nn.Module):
    """Attention by random features, which are a buffer."""

    features: Tensor

    def __init__(self, width: int = 48, heads: int = 4, features: int = 16) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.register_buffer("features", torch.randn(features, width // heads))

    def map(self, x: Tensor) -> Tensor:
        return (
            torch.exp((x @ self.features.t() - 0.5 * x.square().sum(-1, keepdim=True)).clamp(-10, 10)) + 1e-4
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.map(0.5 * q), self.map(0.5 * k)
        found = q @ (k.transpose(2, 3) @ v) / (q @ k.sum(2)[..., None])
        out: Tensor = x + self.out(found.transpose(1, 2).flatten(2))
        return out


class Padded(nn.Module):
    """nn.MultiheadAttention with a mask of what is filling, and one of what lies ahead."""

    def __init__(self, words: int = 200, width: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=0)
        self.norm, self.attend = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.cross = nn.MultiheadAttention(width, 4, kdim=width, vdim=width, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        blank, length = x == 0, x.shape[1]
        ahead = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        h = self.words(x)
        n = self.norm(h)
        h = h + self.attend(n, n, n, key_padding_mask=blank, attn_mask=ahead, need_weights=False)[0]
        h = h + self.cross(h, n, n, key_padding_mask=blank)[0]
        share = (~blank).float()[..., None]
        out: Tensor = self.head((h * share).sum(1) / share.sum(1).clamp_min(1.0))
        return out


class RMSNorm(nn.Module):
    """A norm as people write it themselves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class GatedBlock(nn.Module):
    """A gated block with a norm of its own and a learnt scale of its branch."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.gate, self.up = (
            RMSNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, 2 * width),
        )
        self.down, self.scale = nn.Linear(2 * width, width), nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        out: Tensor = x + self.scale * self.down(F.silu(self.gate(h)) * self.up(h))
        return out


class Siamese(nn.Module):
    """One network for two images; a pair is an example."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 64),
        )  # fmt: skip

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.net(a) - self.net(b)).square().mean(1)


def margin(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.where(targets == 1, outputs, F.relu(1 - outputs))


class Perceiver(nn.Module):
    """Learnt latents read a long input twice, by the same weights."""

    def __init__(self, width: int = 64, latents: int = 16) -> None:
        super().__init__()
        self.latents, self.enter = nn.Parameter(0.1 * torch.randn(latents, width)), nn.Linear(3, width)
        self.places = nn.Parameter(0.1 * torch.randn(256, width))
        self.norm, self.read = nn.LayerNorm(width), nn.MultiheadAttention(width, 1, batch_first=True)
        layer = nn.TransformerEncoderLayer(width, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.think = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm(self.enter(x.flatten(2).transpose(1, 2)) + self.places)
        h = self.latents.unsqueeze(0).repeat(len(x), 1, 1)
        for _ in range(2):
            h = self.think(h + self.read(h, seen, seen, need_weights=False)[0])
        out: Tensor = self.head(h.mean(1))
        return out


class Detector(nn.Module):
    """Convolutions, an encoder and a decoder of learnt queries, two heads."""

    def __init__(self, width: int = 32, queries: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, width, 3, 2, 1), nn.ReLU()
        )
        self.rows, self.columns = (
            nn.Parameter(torch.rand(8, width // 2)),
            nn.Parameter(torch.rand(8, width // 2)),
        )
        self.queries = nn.Embedding(queries, width)
        self.net = nn.Transformer(width, 4, 1, 1, 64, dropout=0.0, batch_first=True)
        self.kinds, self.boxes = nn.Linear(width, 5), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.stem(x)
        places = torch.cat(
            [self.columns.unsqueeze(0).repeat(8, 1, 1), self.rows.unsqueeze(1).repeat(1, 8, 1)], -1
        ).flatten(0, 1)
        h = self.net(
            h.flatten(2).transpose(1, 2) + places, self.queries.weight.unsqueeze(0).repeat(len(x), 1, 1)
        )
        return self.kinds(h), self.boxes(h).sigmoid()


def detected(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    kinds, boxes = outputs
    return tokens(kinds, targets) + (boxes - 0.5).abs().mean((1, 2))


class Spline(nn.Module):
    """A layer of a Kolmogorov-Arnold network: a sum of learnt functions of each input."""

    def __init__(self, inner: int, outer: int, knots: int = 8) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(outer, inner) / inner**0.5)
        self.spline = nn.Parameter(0.1 * torch.randn(outer, inner, knots))
        self.register_buffer("knots", torch.linspace(-2, 2, knots))

    def forward(self, x: Tensor) -> Tensor:
        near = torch.exp(-(((x[..., None] - self.knots) * 2) ** 2))
        return F.linear(F.silu(x), self.base) + torch.einsum("bik,oik->bo", near, self.spline)


class Beats(nn.Module):
    """A block after another takes away what it explains of a series (N-BEATS)."""

    def __init__(self, back: int = 48, ahead: int = 12, width: int = 96, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(back, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
            for _ in range(depth)
        )
        self.heads, self.back = nn.ModuleList(nn.Linear(width, back + ahead) for _ in range(depth)), back

    def forward(self, x: Tensor) -> Tensor:
        found: Any = 0.0
        for block, head in zip(self.blocks, self.heads, strict=True):
            h = head(block(x))
            x, found = x - h[:, : self.back], found + h[:, self.back :]
        return found


class Hyper(nn.Module):
    """A network makes the weights of another, one for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16 * 24 + 24))
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        weights = self.maker(context)
        w, b = weights[:, : 16 * 24].view(-1, 24, 16), weights[:, 16 * 24 :]
        out: Tensor = self.head(F.relu((w @ x[..., None]).squeeze(-1) + b))
        return out


class OdeNet(nn.Module):
    """Four steps of Runge and Kutta through the same two convolutions."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.conv1, self.norm = nn.Conv2d(width + 1, width, 3, padding=1), norm2d(width)
        self.conv2, self.head = nn.Conv2d(width + 1, width, 3, padding=1), nn.Linear(width, 10)

    def slope(self, t: float, x: Tensor) -> Tensor:
        time = torch.full_like(x[:, :1], t)
        h = F.relu(self.norm(self.conv1(torch.cat([x, time], 1))))
        out: Tensor = self.conv2(torch.cat([h, time], 1))
        return out

    def forward(self, x: Tensor) -> Tensor:
        x, step = self.stem(x), 0.5
        for n in range(2):
            t = n * step
            a = self.slope(t, x)
            b = self.slope(t + step / 2, x + step / 2 * a)
            c = self.slope(t + step / 2, x + step / 2 * b)
            x = x + step / 6 * (a + 2 * b + 2 * c + self.slope(t + step, x + step * c))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class Recommender(nn.Module):
    """Tables of categories, a small network for numbers, and products of every two (DLRM)."""

    def __init__(self, tables: int = 6, levels: int = 1000, width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(levels, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(pairs + width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, numbers: Tensor, kinds: Tensor) -> Tensor:
        low = self.bottom(numbers)
        all_ = torch.stack([low, *(table(kinds[:, n]) for n, table in enumerate(self.tables))], 1)
        row, column = torch.triu_indices(all_.shape[1], all_.shape[1], 1)
        products = (all_ @ all_.transpose(1, 2))[:, row, column]
        out: Tensor = self.top(torch.cat([low, products], 1)).squeeze(1)
        return out


def clicked(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets.float(), reduction="none")


class Sine(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.linear, self.rate = nn.Linear(inner, outer), nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.rate * self.linear(x))


class ConvLSTM(nn.Module):
    """A cell with a convolution over input and state, with peepholes, over frames."""

    def __init__(self, width: int = 8, side: int = 12) -> None:
        super().__init__()
        self.gates, self.width = nn.Conv2d(1 + width, 4 * width, 3, padding=1), width
        self.peep = nn.Parameter(torch.zeros(2, width, side, side))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), self.width, *x.shape[3:])
        for t in range(x.shape[1]):
            i, f, o, g = self.gates(torch.cat([x[:, t], h], 1)).chunk(4, 1)
            i, f = torch.sigmoid(i + self.peep[0] * c), torch.sigmoid(f + self.peep[1] * c)
            c = f * c + i * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        out: Tensor = self.head(h.mean((2, 3)))
        return out


class SoftExperts(nn.Module):
    """Experts in one parameter of three dimensions, and a gate that mixes them."""

    def __init__(self, experts: int = 4, width: int = 32, inner: int = 64) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, inner) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, width) / inner**0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(torch.einsum("btd,edh->beth", x, self.up))
        found = torch.einsum("beth,ehd->betd", h, self.down)
        share = self.gate(x).softmax(-1).transpose(1, 2)
        return x + (share[..., None] * found).sum(1)


class Shared(nn.Module):
    """One layer for every depth, with a learnt vector for each (a universal transformer)."""

    def __init__(self, width: int = 48, depth: int = 4, words: int = 200) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.depths = nn.Parameter(0.1 * torch.randn(depth, width))
        self.layer = nn.TransformerEncoderLayer(width, 4, 96, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        for n in range(len(self.depths)):
            h = self.layer(h + self.depths[n])
        out: Tensor = self.head(h.mean(1))
        return out


class Relative(nn.Module):
    """Attention with relative places and two learnt biases (Transformer-XL)."""

    def __init__(self, width: int = 48, heads: int = 4, length: int = 32) -> None:
        super().__init__()
        self.heads, inner = heads, width // heads
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.places = nn.Linear(width, width, bias=False)
        self.u, self.v = nn.Parameter(torch.zeros(heads, inner)), nn.Parameter(torch.zeros(heads, inner))
        self.out = nn.Linear(width, width)
        rates = 1e4 ** (-torch.arange(0, width, 2) / width)
        angles = torch.arange(length - 1, -length, -1)[:, None] * rates
        self.register_buffer("waves", torch.cat([angles.sin(), angles.cos()], 1))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        r = self.places(self.waves).unflatten(-1, (self.heads, -1))
        near = torch.einsum("bihd,bjhd->bhij", q + self.u, k)
        far = torch.einsum("bihd,rhd->bhir", q + self.v, r)
        at = torch.arange(length)[None] - torch.arange(length)[:, None] + length - 1
        far = far.gather(3, (2 * length - 2 - at).expand(len(x), self.heads, -1, -1).to(x.device))
        scores = (near + far) * (q.shape[-1] ** -0.5)
        out: Tensor = x + self.out(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2))
        return out


class Additive(nn.Module):
    """A small network for each feature; what they say is added up."""

    def __init__(self, features: int = 14) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 2)) for _ in range(features)
        )
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        found = sum(net(x[:, n : n + 1]) for n, net in enumerate(self.nets))
        return found + self.bias


def words(length: int, high: int, what: int = 10) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randint(1, high, (n, length)), torch.randint(what, (n,)))


def text(length: int, high: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randint(high, (n, length)), torch.randint(high, (n, length)))


def shaped(*shape: int, what: int = 10) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randn(n, *shape), torch.randint(what, (n,)))


def graphs(n: int) -> tuple[Any, Tensor]:
    links = (torch.rand(n, 24, 24) < 0.2).float()
    links = ((links + links.transpose(1, 2) + torch.eye(24)) > 0).float()
    return (torch.randn(n, 24, 16), links / links.sum(2, keepdim=True)), torch.randint(10, (n,))


def same(*shape: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def given(n: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(n, *shape)
        return x, x

    return given


UNTRIED: dict[str, Case] = {
    "mamba": Case(lambda: Reader(SelectiveScan, 32), text(32, 300), tokens, 16),
    "rwkv": Case(lambda: Reader(TimeMix, 48), text(32, 300), tokens, 32),
    "deepsets": Case(DeepSets, shaped(100, 3), classes, 64),
    "settransformer": Case(SetTransformer, shaped(64, 3), classes, 64),
    "graph": Case(Graph, graphs, classes, 64),
    "graphattention": Case(GraphAttention, graphs, classes, 64),
    "tabtransformer": Case(
        TabTransformer,
        lambda n: ((torch.randint(12, (n, 8)), torch.randn(n, 6)), torch.randint(2, (n,))),
        classes,
        128,
    ),
    "fttransformer": Case(FTTransformer, shaped(14, what=2), classes, 128),
    "wavenet": Case(WaveNet, text(128, 64), tokens, 16),
    "pixelcnn": Case(pixelcnn, same(1, 16, 16), squares, 32),
    "capsules": Case(Capsules, shaped(1, 28, 28), classes, 32),
    "realnvp": Case(RealNVP, shaped(12), likelihood, 256),
    "diffusion": Case(
        Diffusion,
        lambda n: ((torch.randn(n, 3, 16, 16), torch.rand(n)), torch.randn(n, 3, 16, 16)),
        squares,
        16,
    ),
    "vae": Case(VAE, same(784), evidence, 128),
    "video": Case(video, shaped(1, 8, 16, 16), classes, 16),
    "generator": Case(
        generator, lambda n: (torch.randn(n, 32), torch.randn(n, 3, 32, 32)), squares, 32
    ),
    "fakequant": Case(
        lambda: nn.Sequential(
            FakeQuant(64, 128), nn.ReLU(), FakeQuant(128, 128), nn.ReLU(), FakeQuant(128, 10),
        ),
        shaped(64),
        classes,
        128,
    ),
    "binary": Case(
        lambda: nn.Sequential(
            StraightThrough(3, 16, 3, padding=1), nn.ReLU(), StraightThrough(16, 32, 3, 2, 1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        ),
        shaped(3, 16, 16),
        classes,
        32,
    ),
    "bilinear": Case(
        Pairs, lambda n: ((torch.randn(n, 20), torch.randn(n, 30)), torch.randint(5, (n,))), classes, 128
    ),
    "hopfield": Case(Hopfield, shaped(48), classes, 128),
    "performer": Case(lambda: Reader(Performer, 48), text(48, 300), tokens, 32),
    "padded": Case(Padded, words(40, 200), classes, 64),
    "gatedblocks": Case(lambda: Reader(GatedBlock, 64, depth=3), text(32, 300), tokens, 32),
    "siamese": Case(
        Siamese,
        lambda n: ((torch.randn(n, 1, 20, 20), torch.randn(n, 1, 20, 20)), torch.randint(2, (n,))),
        margin,
        32,
    ),
    "perceiver": Case(Perceiver, shaped(3, 16, 16), classes, 32),
    "detector": Case(
        Detector, lambda n: (torch.randn(n, 3, 32, 32), torch.randint(5, (n, 8))), detected, 32
    ),
    "kan": Case(lambda: nn.Sequential(Spline(24, 64), Spline(64, 10)), shaped(24), classes, 128),
    "nbeats": Case(Beats, lambda n: (torch.randn(n, 48), torch.randn(n, 12)), squares, 256),
    "hypernetwork": Case(
        Hyper, lambda n: ((torch.randn(n, 16), torch.randn(n, 8)), torch.randint(5, (n,))), classes, 128
    ),
    "odenet": Case(OdeNet, shaped(3, 32, 32), classes, 32),
    "dlrm": Case(
        Recommender,
        lambda n: ((torch.randn(n, 13), torch.randint(1000, (n, 6, 3))), torch.randint(2, (n,))),
        clicked,
        256,
    ),
    "siren": Case(
        lambda: nn.Sequential(Sine(2, 64), Sine(64, 64), nn.Linear(64, 3)),
        lambda n: (torch.rand(n, 64, 2), torch.rand(n, 64, 3)),
        squares,
        32,
    ),
    "convlstm": Case(ConvLSTM, shaped(6, 1, 12, 12), classes, 16),
    "experts": Case(lambda: Reader(SoftExperts, 32), text(32, 300), tokens, 16),
    "shared": Case(Shared, words(32, 200), classes, 32),
    "relative": Case(lambda: Reader(Relative, 48), text(32, 300), tokens, 32),
    "additive": Case(Additive, shaped(14, what=2), classes, 128),
}  # fmt: skip
