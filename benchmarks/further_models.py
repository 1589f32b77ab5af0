"""Eight more models in plain torch for `benchmarks.unseen` and `benchmarks.live_memory` (``--further``).

The first four were looked at while memory was worked on; `HELD_OUT` were measured when that was done.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.unseen_models import LM, Case, norm2d, text

HELD_OUT = ("convmixer", "swin", "translator", "autoencoder")


class Dense(nn.Module):
    """A DenseNet: every layer takes what all before it gave."""

    def __init__(self, growth: int = 12, layers: int = 4, blocks: int = 2) -> None:
        super().__init__()
        width = 2 * growth
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.blocks, self.between = nn.ModuleList(), nn.ModuleList()
        for n in range(blocks):
            block = nn.ModuleList()
            for _ in range(layers):
                block.append(
                    nn.Sequential(
                        norm2d(width), nn.ReLU(), nn.Conv2d(width, growth, 3, padding=1, bias=False)
                    )
                )
                width += growth
            self.blocks.append(block)
            if n + 1 < blocks:
                self.between.append(nn.Sequential(nn.Conv2d(width, width // 2, 1), nn.AvgPool2d(2)))
                width //= 2
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for n, block in enumerate(self.blocks):
            for layer in block:  # type: ignore[union-attr, attr-defined]
                x = torch.cat([x, layer(x)], 1)
            x = self.between[n](x) if n < len(self.between) else x
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def vgg(widths: tuple[int, ...] = (16, 32, 64)) -> nn.Module:
    """Convolutions and ReLUs in place, without a norm."""
    layers: list[nn.Module] = []
    inner = 3
    for width in widths:
        for _ in range(2):
            layers += [nn.Conv2d(inner, width, 3, padding=1), nn.ReLU(inplace=True)]
            inner = width
        layers.append(nn.MaxPool2d(2))
    side = 32 // 2 ** len(widths)
    layers += [nn.Flatten(), nn.Linear(inner * side**2, 128), nn.ReLU(inplace=True), nn.Linear(128, 10)]
    return nn.Sequential(*layers)


class Inverted(nn.Module):
    """A block of MobileNetV3: expand, convolve each channel, squeeze and excite, project."""

    def __init__(self, inner: int, outer: int, stride: int, kernel: int) -> None:
        super().__init__()
        wide = 4 * inner
        self.expand, self.norm1 = nn.Conv2d(inner, wide, 1, bias=False), norm2d(wide)
        self.depth = nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False)
        self.norm2 = norm2d(wide)
        self.squeeze, self.excite = nn.Linear(wide, wide // 4), nn.Linear(wide // 4, wide)
        self.project, self.norm3 = nn.Conv2d(wide, outer, 1, bias=False), norm2d(outer)
        self.same = inner == outer and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        out = F.hardswish(self.norm1(self.expand(x)))
        out = F.hardswish(self.norm2(self.depth(out)))
        gate = F.hardsigmoid(self.excite(F.relu(self.squeeze(out.mean((2, 3))))))
        out = self.norm3(self.project(out * gate[:, :, None, None]))
        return x + out if self.same else out


def mobilenet() -> nn.Module:
    blocks = [Inverted(16, 16, 1, 3), Inverted(16, 24, 2, 3), Inverted(24, 24, 1, 5), Inverted(24, 40, 2, 5)]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), norm2d(16), nn.Hardswish()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 10))


class Tagger(nn.Module):
    """A bidirectional GRU that says something of every token."""

    def __init__(self, words: int = 400, width: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.net = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 12)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.net(self.words(x))[0])
        return out


class Mixed(nn.Module):
    """A layer of a ConvMixer."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.depth, self.norm1 = nn.Conv2d(width, width, kernel, padding="same", groups=width), norm2d(width)
        self.point, self.norm2 = nn.Conv2d(width, width, 1), norm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm1(F.gelu(self.depth(x)))
        out: Tensor = self.norm2(F.gelu(self.point(x)))
        return out


def convmixer(width: int = 48, depth: int = 4, kernel: int = 5, patch: int = 4) -> nn.Module:
    layers = [Mixed(width, kernel) for _ in range(depth)]
    stem = [nn.Conv2d(3, width, patch, patch), nn.GELU(), norm2d(width)]
    return nn.Sequential(*stem, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class WindowAttention(nn.Module):
    """Attention inside a window, with a learnt number for each head and each distance."""

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(0.02 * torch.randn((2 * window - 1) ** 2, heads))
        at = torch.stack(torch.meshgrid(*[torch.arange(window)] * 2, indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None, :] + window - 1).permute(1, 2, 0)
        self.register_buffer("places", apart[..., 0] * (2 * window - 1) + apart[..., 1])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(3, 0, 1, 4, 2, 5)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores + self.table[self.places].permute(2, 0, 1)
        out: Tensor = self.out((scores.softmax(-1) @ v).transpose(2, 3).flatten(3))
        return out


class Window(nn.Module):
    """A block of a Swin transformer: attention inside windows, shifted or not."""

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = WindowAttention(width, heads, window)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attend(self, x: Tensor) -> Tensor:
        n, high, across, width = x.shape
        w = self.window
        x = x.roll((-self.shift, -self.shift), (1, 2)) if self.shift else x
        x = x.view(n, high // w, w, across // w, w, width).transpose(2, 3).reshape(n, -1, w * w, width)
        x = self.attention(x).view(n, high // w, across // w, w, w, width)
        x = x.transpose(2, 3).reshape(n, high, across, width)
        return x.roll((self.shift, self.shift), (1, 2)) if self.shift else x

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Swin(nn.Module):
    def __init__(self, width: int = 32, window: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.first = nn.Sequential(Window(width, 2, window, 0), Window(width, 2, window, window // 2))
        self.merge, wide = nn.Linear(4 * width, 2 * width, bias=False), 2 * width
        self.second = nn.Sequential(Window(wide, 4, window, 0), Window(wide, 4, window, 0))
        self.norm, self.head = nn.LayerNorm(wide), nn.Linear(wide, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x).movedim(1, 3))
        x = torch.cat([x[:, a::2, b::2] for a in (0, 1) for b in (0, 1)], -1)
        out: Tensor = self.head(self.norm(self.second(self.merge(x))).mean((1, 2)))
        return out


class Translator(nn.Module):
    """An encoder and a decoder that looks at it; both read the same tokens."""

    def __init__(self, words: int = 500, width: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(64, width)
        options = {"dim_feedforward": 256, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 4, **options),  # type: ignore[arg-type]
            2,
            enable_nested_tensor=False,
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(width, 4, **options), 2)  # type: ignore[arg-type]
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        seen = self.words(x) + self.places(torch.arange(length, device=x.device))
        causal = nn.Transformer.generate_square_subsequent_mask(length, device=x.device)
        out: Tensor = self.head(self.decoder(seen, self.encoder(seen), tgt_mask=causal))
        return out


class Autoencoder(nn.Module):
    """Convolutions down and transposed ones up again."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        down: list[nn.Module] = []
        inner = 3
        for width in widths:
            down += [nn.Conv2d(inner, width, 3, 2, 1), norm2d(width), nn.SiLU()]
            inner = width
        up: list[nn.Module] = []
        for width in (*widths[-2::-1], 8):
            up += [nn.ConvTranspose2d(inner, width, 4, 2, 1), norm2d(width), nn.SiLU()]
            inner = width
        self.net = nn.Sequential(*down, *up, nn.Conv2d(inner, 4, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def pixels(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets[:, None, None].expand(-1, 32, 32), reduction="none").mean((1, 2))


IMAGES = (3, 32, 32)

FURTHER: dict[str, Case] = {
    "densenet": Case(Dense, IMAGES, 32),
    "vgg": Case(vgg, IMAGES, 64),
    "mobilenet": Case(mobilenet, IMAGES, 32),
    "tagger": text(Tagger, 32, 64, 400, classes=12, **LM),
    "convmixer": Case(convmixer, IMAGES, 64, adam=True),
    "swin": Case(Swin, IMAGES, 32, adam=True),
    "translator": text(Translator, 48, 32, 500, classes=500, **LM),
    "autoencoder": Case(Autoencoder, IMAGES, 32, loss=pixels, classes=4),
}
