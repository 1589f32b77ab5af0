"""Eight more models in plain torch for `benchmarks.unseen` and `benchmarks.live_memory` (``--latest``).

They were written when the memory of a step was planned anew, most of them with activation checkpoints.
`HELD_OUT` were measured when that was done.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.unseen_models import LM, Case, Encoder, Llama, Residual, norm2d, text

HELD_OUT = ("coatnet", "llama_wider")


class Vision(nn.Module):
    """A vision transformer whose blocks are computed again, by the older kind of checkpoint."""

    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, width, 4, 4), nn.Parameter(0.02 * torch.randn(1, 64, width))
        self.blocks = nn.ModuleList(Encoder(width, 4) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        out: Tensor = self.head(self.norm(x).mean(1))
        return out


class Saving(nn.Module):
    """A residual network whose blocks are computed again."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        self.stem, inner = nn.Conv2d(3, widths[0], 3, padding=1), widths[0]
        blocks: list[nn.Module] = []
        for n, width in enumerate(widths):
            blocks += [Residual(inner, width, 2 if n else 1), Residual(width, width, 1)]
            inner = width
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(inner, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class Conformer(nn.Module):
    """A block for speech: half a feed-forward layer, attention, a gated convolution, the other half."""

    def __init__(self, width: int, heads: int = 4, kernel: int = 9) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.before, self.after = (
            nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
            for _ in range(2)
        )
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.gate = nn.Conv1d(width, 2 * width, 1)
        self.depth = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.inner, self.point = nn.GroupNorm(4, width), nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.before(self.norms[0](x))
        h = self.norms[1](x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        h = F.glu(self.gate(self.norms[2](x).transpose(1, 2)), 1)
        x = x + self.point(F.silu(self.inner(self.depth(h)))).transpose(1, 2)
        x = x + 0.5 * self.after(self.norms[3](x))
        out: Tensor = self.norms[4](x)
        return out


class Speech(nn.Module):
    def __init__(self, bands: int = 40, width: int = 64) -> None:
        super().__init__()
        self.enter = nn.Conv1d(bands, width, 3, 2, 1)
        self.blocks, self.head = nn.Sequential(Conformer(width), Conformer(width)), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.enter(x).transpose(1, 2)).mean(1))
        return out


class TextCNN(nn.Module):
    """Convolutions of several widths over the same words, and their largest values."""

    def __init__(self, words: int = 1000, width: int = 64, filters: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.convs = nn.ModuleList(nn.Conv1d(width, filters, kernel) for kernel in (3, 4, 5))
        self.head = nn.Linear(3 * filters, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x).transpose(1, 2)
        out: Tensor = self.head(torch.cat([F.relu(conv(h)).amax(2) for conv in self.convs], 1))
        return out


class Albert(nn.Module):
    """One block that is used again and again, each time with a checkpoint."""

    def __init__(self, words: int = 500, width: int = 64, times: int = 4) -> None:
        super().__init__()
        self.words, self.enter, self.times = nn.Embedding(words, 32), nn.Linear(32, width), times
        self.block, self.head = Encoder(width, 4, first=False), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(self.words(x))
        for _ in range(self.times):
            h = checkpoint(self.block, h, use_reentrant=False)
        out: Tensor = self.head(h[:, 0])
        return out


class Attending(nn.Module):
    """An LSTM in both directions, and a decoder of one direction that attends to it."""

    def __init__(self, words: int = 400, width: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.reader = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.writer = nn.LSTM(width, 2 * width, batch_first=True)
        self.query, self.head = nn.Linear(2 * width, 2 * width), nn.Linear(4 * width, words)

    def forward(self, x: Tensor) -> Tensor:
        seen, said = self.reader(self.words(x))[0], self.writer(self.words(x.roll(1, 1)))[0]
        shares = (self.query(said) @ seen.transpose(1, 2)).softmax(-1)
        out: Tensor = self.head(torch.cat([said, shares @ seen], -1))
        return out


class CoAtNet(nn.Module):
    """Convolutions first, then attention, each block computed again."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), norm2d(width), nn.GELU())
        self.convs = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, 4 * width, 1), norm2d(4 * width), nn.GELU(),
                nn.Conv2d(4 * width, 4 * width, 3, padding=1, groups=4 * width), norm2d(4 * width), nn.GELU(),
                nn.Conv2d(4 * width, width, 1),
            )
            for _ in range(2)
        )  # fmt: skip
        self.down = nn.Conv2d(width, 2 * width, 2, 2)
        self.blocks, self.head = (
            nn.ModuleList(Encoder(2 * width, 4) for _ in range(2)),
            nn.Linear(2 * width, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv in self.convs:
            x = x + checkpoint(conv, x, use_reentrant=False)
        h = self.down(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        out: Tensor = self.head(h.mean(1))
        return out


LATEST: dict[str, Case] = {
    "vit_checkpoints": Case(Vision, (3, 32, 32), 64, adam=True),
    "resnet_checkpoints": Case(Saving, (3, 32, 32), 32),
    "conformer": Case(Speech, (40, 96), 32, adam=True),
    "textcnn": text(TextCNN, 64, 128, 1000, classes=4),
    "albert": text(Albert, 48, 64, 500, classes=2, adam=True),
    "attending": text(Attending, 32, 64, 400, classes=400, **LM),
    "coatnet": Case(CoAtNet, (3, 32, 32), 32, adam=True),
    "llama_wider": text(
        lambda: Llama(256, 4, 8, 4, 704, 2000, checkpoints=True), 128, 16, 2000, classes=2000, **LM
    ),
}
