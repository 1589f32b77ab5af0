"""Fourteen models in plain torch, as other people write them, for `benchmarks.unseen`.

Two of them are there again with activation checkpoints.

`HELD_OUT` are not looked at while speed or memory is worked on: no profile of them is made, and no choice
is made by them. They show whether what was learnt on the other ten holds elsewhere.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

HELD_OUT = ("gru", "unet", "efficientnet", "mixer")


def norm2d(width: int) -> nn.Module:
    return nn.GroupNorm(math.gcd(width, 16), width)


# ---- convolutions -----------------------------------------------------------------------------------------


class PreActivation(nn.Module):
    """A block of a wide residual network: norm, ReLU, convolution, twice."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm2d(inner), nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm2, self.conv2 = norm2d(outer), nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(inner, outer, 1, stride, bias=False) if inner != outer else None

    def forward(self, x: Tensor) -> Tensor:
        before = F.relu(self.norm1(x))
        short = x if self.short is None else self.short(before)
        out: Tensor = self.conv2(F.relu(self.norm2(self.conv1(before)))) + short
        return out


def wide_resnet(depth: int = 16, wide: int = 4) -> nn.Module:
    """WRN-16-4 of De et al. 2022, with group normalisation."""
    widths = [16, 16 * wide, 32 * wide, 64 * wide]
    blocks: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    for n, (inner, outer) in enumerate(itertools.pairwise(widths)):
        for k in range((depth - 4) // 6):
            blocks.append(PreActivation(outer if k else inner, outer, 2 if n and not k else 1))
    head = [norm2d(widths[3]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[3], 10)]
    return nn.Sequential(*blocks, *head)


class Residual(nn.Module):
    """A basic block of a ResNet."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), norm2d(outer)
        self.conv2, self.norm2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), norm2d(outer)
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inner != outer:
            self.short = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), norm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + self.short(x))


def resnet(widths: tuple[int, ...] = (64, 128, 256, 512), blocks: int = 2, first: int = 7) -> nn.Module:
    """ResNet-18 with group normalisation."""
    parts: list[nn.Module] = [
        nn.Conv2d(3, widths[0], first, 2, first // 2, bias=False),
        norm2d(widths[0]),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inner = widths[0]
    for n, width in enumerate(widths):
        for k in range(blocks):
            parts.append(Residual(inner, width, 2 if n and not k else 1))
            inner = width
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, 10))


class ConvNeXtBlock(nn.Module):
    """Depthwise 7 × 7, LayerNorm over channels, two linear layers, a learnt scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.gamma * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of an image, as torchvision has it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


def convnext(
    widths: tuple[int, ...] = (96, 192, 384), depths: tuple[int, ...] = (3, 3, 9), patch: int = 2
) -> nn.Module:
    """ConvNeXt-T without its last stage, for images of 32 × 32."""
    parts: list[nn.Module] = [nn.Conv2d(3, widths[0], patch, patch), LayerNorm2d(widths[0])]
    for n, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        if n:
            parts += [LayerNorm2d(widths[n - 1]), nn.Conv2d(widths[n - 1], width, 2, 2)]
        parts += [ConvNeXtBlock(width) for _ in range(depth)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


class Squeeze(nn.Module):
    """An inverted residual block with squeeze and excitation, as in EfficientNet."""

    def __init__(self, inner: int, outer: int, grow: int, kernel: int, stride: int) -> None:
        super().__init__()
        wide = inner * grow
        self.grow = nn.Sequential(nn.Conv2d(inner, wide, 1, bias=False), norm2d(wide), nn.SiLU())
        self.depthwise = nn.Sequential(
            nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False),
            norm2d(wide),
            nn.SiLU(),
        )
        few = max(1, inner // 4)
        self.squeeze, self.excite = nn.Conv2d(wide, few, 1), nn.Conv2d(few, wide, 1)
        self.shrink = nn.Sequential(nn.Conv2d(wide, outer, 1, bias=False), norm2d(outer))
        self.same = stride == 1 and inner == outer

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.grow(x))
        y = y * torch.sigmoid(self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        y = self.shrink(y)
        return x + y if self.same else y


B0 = (
    (16, 1, 1, 3, 1),
    (24, 2, 6, 3, 2),
    (40, 2, 6, 5, 2),
    (80, 3, 6, 3, 2),
    (112, 3, 6, 5, 1),
    (192, 4, 6, 5, 2),
    (320, 1, 6, 3, 1),
)  # channels, blocks, expansion, kernel, stride


def efficientnet(rows: tuple[tuple[int, int, int, int, int], ...] = B0) -> nn.Module:
    """EfficientNet-B0 with group normalisation, for images of 64 × 64."""
    parts: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), norm2d(32), nn.SiLU()]
    inner = 32
    for outer, blocks, grow, kernel, stride in rows:
        for k in range(blocks):
            parts.append(Squeeze(inner, outer, grow, kernel, 1 if k else stride))
            inner = outer
    head = [nn.Conv2d(inner, 4 * inner, 1, bias=False), norm2d(4 * inner), nn.SiLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*parts, *head, nn.Flatten(), nn.Linear(4 * inner, 10))


class UNet(nn.Module):
    """A U-Net with transposed convolutions: a class for every pixel."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256)) -> None:
        super().__init__()

        def pair(a: int, b: int) -> nn.Module:
            one = nn.Conv2d(a, b, 3, padding=1), norm2d(b), nn.ReLU()
            return nn.Sequential(*one, nn.Conv2d(b, b, 3, padding=1), norm2d(b), nn.ReLU())

        self.down = nn.ModuleList(pair(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.rise = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(pair(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(widths[0], 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for n, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if n else x)
            seen.append(x)
        for n in reversed(range(len(self.up))):
            x = self.up[n](torch.cat([self.rise[n](x), seen[n]], 1))
        out: Tensor = self.head(x)
        return out


class Causal(nn.Module):
    """A residual block of dilated causal convolutions in one dimension."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.conv1 = nn.Conv1d(width, width, 3, dilation=dilation)
        self.conv2 = nn.Conv1d(width, width, 3, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv1(F.pad(x, (self.pad, 0))))
        return F.relu(x + self.conv2(F.pad(y, (self.pad, 0))))


def temporal(width: int = 128, blocks: int = 6, words: int = 5000) -> nn.Module:
    """A temporal convolutional network over tokens."""

    class Temporal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(words, width)
            self.body = nn.Sequential(*(Causal(width, 2**n) for n in range(blocks)))
            self.head = nn.Linear(width, 10)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.body(self.words(x).transpose(1, 2)).mean(2))
            return out

    return Temporal()


# ---- attention --------------------------------------------------------------------------------------------


class Lora(nn.Module):
    """A frozen linear layer with a trained product of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), 2.0
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.b.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.b(self.a(x)) * self.scale
        return out


class Encoder(nn.Module):
    """A block of BERT, of GPT-2 or of a ViT: norms before or after, causal or not."""

    def __init__(self, width: int, heads: int, first: bool = True, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.first, self.causal = heads, first, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return out

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = x + self.attend(self.norm1(x))
            return x + self.down(F.gelu(self.up(self.norm2(x))))
        x = self.norm1(x + self.attend(x))
        out: Tensor = self.norm2(x + self.down(F.gelu(self.up(x))))
        return out


class ViT(nn.Module):
    """A vision transformer with a class token and learnt positions."""

    def __init__(
        self, width: int = 384, depth: int = 12, heads: int = 6, patch: int = 4, side: int = 32
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Encoder(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        out: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return out


class GPT2(nn.Module):
    """GPT-2, whose head is its embedding."""

    def __init__(
        self, width: int = 768, depth: int = 12, heads: int = 12, words: int = 50257, length: int = 1024
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Encoder(width, heads, causal=True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        for p in (self.words.weight, self.places.weight):
            nn.init.normal_(p, std=0.02)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        out: Tensor = self.head(self.norm(self.blocks(h)))
        return out


class Bert(nn.Module):
    """BERT-base as a classifier, LoRA on queries and values; ``rank`` 0 trains all of it."""

    def __init__(
        self,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        words: int = 30522,
        length: int = 128,
        rank: int = 8,
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.Sequential(*(Encoder(width, heads, first=False) for _ in range(depth)))
        if rank:
            self.requires_grad_(False)
            for block in self.blocks:
                block.query, block.value = Lora(block.query, rank), Lora(block.value, rank)
        self.pool, self.head = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.words(x) + self.places(torch.arange(x.shape[1], device=x.device)))
        out: Tensor = self.head(torch.tanh(self.pool(self.blocks(h)[:, 0])))
        return out


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary positions, and a gated feed-forward layer."""

    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.heads, self.groups, self.each = heads, groups, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, groups * self.each, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            part(h).unflatten(2, (-1, self.each)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        q, k = turned(q, cos, sin).to(v.dtype), turned(k, cos, sin).to(v.dtype)
        k, v = (part.repeat_interleave(self.heads // self.groups, 1) for part in (k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """A model of the shape of Llama; ``rank`` above 0 trains LoRA on all seven projections of a block.

    ``checkpoints``: each block is computed again in the backward pass.
    """

    def __init__(
        self,
        width: int = 2048,
        depth: int = 22,
        heads: int = 32,
        groups: int = 4,
        inner: int = 5632,
        words: int = 32000,
        rank: int = 0,
        checkpoints: bool = False,
    ) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.words, self.each = nn.Embedding(words, width), width // heads
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups, inner) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, words, bias=False)
        if rank:
            self.requires_grad_(False)
            for block in self.blocks:
                for name in ("query", "key", "value", "out", "gate", "up", "down"):
                    setattr(block, name, Lora(getattr(block, name), rank))

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        rates = 1e4 ** (-torch.arange(0, self.each, 2, device=x.device) / self.each)
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * torch.cat([rates, rates])
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            h = (
                checkpoint(block, h, cos, sin, use_reentrant=False)
                if self.checkpoints
                else block(h, cos, sin)
            )
        out: Tensor = self.head(self.norm(h))
        return out


class Mixing(nn.Module):
    """A block of an MLP-mixer: a network over patches, then one over channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over1, self.over2 = nn.Linear(patches, 2 * patches), nn.Linear(2 * patches, patches)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over2(F.gelu(self.over1(self.norm1(x).transpose(1, 2)))).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Mixer(nn.Module):
    """An MLP-mixer for images of 32 × 32."""

    def __init__(self, width: int = 384, depth: int = 8, patch: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.Sequential(*(Mixing((32 // patch) ** 2, width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.blocks(self.patches(x).flatten(2).transpose(1, 2))).mean(1))
        return out


class Recurrent(nn.Module):
    """An embedding, a recurrent net and a classifier on its last output."""

    def __init__(self, kind: type[nn.RNNBase], words: int, width: int, hidden: int, layers: int = 1) -> None:
        super().__init__()
        self.words, self.net = nn.Embedding(words, width), kind(width, hidden, layers, batch_first=True)  # type: ignore[call-arg, arg-type]
        self.head = nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.net(self.words(x))[0][:, -1])
        return out


# ---- the bench --------------------------------------------------------------------------------------------


def classes(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over an example's tokens."""
    each = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    return each.view(targets.shape).mean(1)


def pixels(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none").mean((1, 2))


@dataclass(frozen=True)
class Case:
    """A model with the shape of its batches; ``adam`` for those that people train with AdamW."""

    make: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    batch: int
    words: int = 0
    loss: Callable[[Tensor, Tensor], Tensor] = classes
    classes: int = 10
    adam: bool = False

    def data(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of one batch."""
        shape = self.batch, *self.inputs
        x = (
            torch.randint(self.words, shape, device=device)
            if self.words
            else torch.randn(shape, device=device)
        )
        where: tuple[int, ...] = (self.batch,)
        if self.loss is tokens:
            where = shape
        elif self.loss is pixels:
            where = (self.batch, *self.inputs[1:])
        return x, torch.randint(self.classes, where, device=device)


def text(make: Callable[[], nn.Module], length: int, batch: int, words: int, **more: Any) -> Case:
    return Case(make, (length,), batch, words, **more)


LM = {"loss": tokens, "adam": True}

LARGE: dict[str, Case] = {
    "wrn": Case(wide_resnet, (3, 32, 32), 512),
    "resnet": Case(resnet, (3, 64, 64), 256),
    "convnext": Case(convnext, (3, 32, 32), 256, adam=True),
    "tcn": text(temporal, 256, 256, 5000),
    "vit": Case(ViT, (3, 32, 32), 256, adam=True),
    "gpt2": text(GPT2, 256, 16, 50257, classes=50257, **LM),
    "bert_lora": text(Bert, 128, 64, 30522, classes=2, adam=True),
    "llama_lora": text(lambda: Llama(rank=16), 512, 8, 32000, classes=32000, **LM),
    "llama_full": text(Llama, 512, 8, 32000, classes=32000, **LM),
    "llama_lora_checkpoints": text(
        lambda: Llama(rank=16, checkpoints=True), 512, 8, 32000, classes=32000, **LM
    ),
    "llama_full_checkpoints": text(lambda: Llama(checkpoints=True), 512, 8, 32000, classes=32000, **LM),
    "lstm": text(lambda: Recurrent(nn.LSTM, 5000, 128, 256), 256, 256, 5000, classes=2),
    "gru": text(lambda: Recurrent(nn.GRU, 5000, 128, 256, 2), 128, 256, 5000, classes=2),
    "unet": Case(UNet, (3, 64, 64), 64, loss=pixels, classes=4),
    "efficientnet": Case(efficientnet, (3, 64, 64), 256),
    "mixer": Case(Mixer, (3, 32, 32), 256, adam=True),
}

SMALL: dict[str, Case] = {
    "wrn": Case(lambda: wide_resnet(10, 1), (3, 32, 32), 32),
    "resnet": Case(lambda: resnet((16, 32, 64), 1, 3), (3, 32, 32), 64),
    "convnext": Case(lambda: convnext((24, 48), (1, 2)), (3, 32, 32), 32, adam=True),
    "tcn": text(lambda: temporal(64, 3, 500), 64, 32, 500),
    "vit": Case(lambda: ViT(64, 4, 4, 4, 32), (3, 32, 32), 64, adam=True),
    "gpt2": text(lambda: GPT2(64, 4, 4, 1000, 64), 64, 16, 1000, classes=1000, **LM),
    "bert_lora": text(lambda: Bert(128, 4, 4, 1000, 64), 64, 32, 1000, classes=2, adam=True),
    "llama_lora": text(lambda: Llama(128, 4, 4, 2, 352, 1000, 8), 64, 16, 1000, classes=1000, **LM),
    "llama_full": text(lambda: Llama(128, 4, 4, 2, 352, 1000), 64, 16, 1000, classes=1000, **LM),
    "llama_lora_checkpoints": text(
        lambda: Llama(128, 4, 4, 2, 352, 1000, 8, True), 64, 16, 1000, classes=1000, **LM
    ),
    "llama_full_checkpoints": text(
        lambda: Llama(128, 4, 4, 2, 352, 1000, checkpoints=True), 64, 16, 1000, classes=1000, **LM
    ),
    "lstm": text(lambda: Recurrent(nn.LSTM, 500, 64, 64), 64, 64, 500, classes=2),
    "gru": text(lambda: Recurrent(nn.GRU, 500, 64, 64, 2), 32, 64, 500, classes=2),
    "unet": Case(lambda: UNet((8, 16, 32)), (3, 32, 32), 16, loss=pixels, classes=4),
    "efficientnet": Case(
        lambda: efficientnet(((16, 1, 1, 3, 1), (24, 2, 4, 3, 2), (40, 2, 4, 5, 2))), (3, 32, 32), 32
    ),
    "mixer": Case(lambda: Mixer(64, 4, 4), (3, 32, 32), 64, adam=True),
}
