"""Features that are learnt from pictures made by random processes: no photograph is seen, and no record.

A picture is noise of a random spectrum under occluding shapes of all sizes, plain, shaded, striped or
textured ("dead leaves"; Baradad et al. 2021, Learning to see by looking at noise). A wide residual network
learns which two views show the same picture (contrastive learning: Chen et al. 2020), as in DP-RandP (Tang et
al. 2023). Everything follows from a public seed, so the network is a public function of each image, and costs
no privacy.
"""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.frame import say
from experiments.pictures import DEVICE

SEED, SIDE, VIEW = 0, 48, 32  # a picture's side, and that of a view
POOL, PAIRS, STEPS = 262_144, 1024, 4600
LEAVES, SMALLEST, LARGEST = 32, 0.06, 0.9  # shapes at most, and their sizes over half a picture
LEARNING_RATE, WEIGHT_DECAY, TEMPERATURE, WARM_UP = 2e-3, 0.02, 0.2, 200


class Chance:
    """Random numbers of one generator."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator(DEVICE).manual_seed(seed)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, device=DEVICE)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=DEVICE)

    def below(self, most: int, count: int) -> Tensor:
        return torch.randint(most, (count,), generator=self.generator, device=DEVICE)


def _wide(values: Tensor) -> Tensor:
    """One value a picture, to be used at all of its places."""
    return values[:, None, None]


def _colours(chance: Chance, count: int, each: int) -> Tensor:
    """Colours (count, each, 3), most of them near grey."""
    light, saturation = chance.uniform(count, each, 1), 0.45 * chance.uniform(count, each, 1) ** 1.5
    return (light + saturation * chance.normal(count, each, 3)).clamp(0, 1)


def _noise(chance: Chance, count: int) -> Tensor:
    """Pictures of noise whose amplitude falls with a random power of frequency."""
    frequency = torch.fft.fftfreq(SIDE, device=DEVICE)
    radius = (frequency[:, None] ** 2 + frequency**2).sqrt().clamp_min(1 / SIDE)
    power = 0.8 + 1.4 * chance.uniform(count, 1, 1, 1)
    found = torch.fft.ifft2(torch.fft.fft2(chance.normal(count, 3, SIDE, SIDE)) * radius**-power).real
    found = found - found.mean((2, 3), keepdim=True)
    found = found / found.std((2, 3), keepdim=True).clamp_min(1e-6)
    saturation = chance.uniform(count, 1, 1)
    mix = 0.12 * saturation * chance.normal(count, 3, 3) + 0.15 * chance.normal(count, 1, 3)
    base = _colours(chance, count, 1)[:, 0, :, None, None]
    return (base + torch.einsum("nij,njhw->nihw", mix, found)).clamp(0, 1)


def _leaf(chance: Chance, count: int, palette: Tensor, texture: Tensor) -> tuple[Tensor, Tensor]:
    """One shape for each picture: how much of each place it covers, and its colours."""
    axis = torch.linspace(-1, 1, SIDE, device=DEVICE)
    size = (SMALLEST / (1 - chance.uniform(count) * (1 - SMALLEST / LARGEST))).clamp(SMALLEST, LARGEST)
    x, y, turn = (
        2 * chance.uniform(count) - 1,
        2 * chance.uniform(count) - 1,
        2 * math.pi * chance.uniform(count),
    )
    stretch = torch.exp(0.6 * chance.normal(count)).sqrt()
    cos, sin = _wide(turn.cos()), _wide(turn.sin())
    right, down = axis - _wide(x), axis[:, None] - _wide(y)
    u = (cos * right + sin * down) / _wide(size * stretch)
    v = (cos * down - sin * right) / _wide(size / stretch)
    radius, angle = (u * u + v * v).sqrt(), torch.atan2(v, u)
    lobes, wave = _wide(2 + chance.below(5, count)), _wide(0.4 * chance.uniform(count))
    sector = 2 * math.pi / _wide(3 + chance.below(4, count))
    forms = torch.stack([
        radius, u.abs().maximum(v.abs()), radius / (1 + wave * torch.cos(lobes * angle)),
        1.3 * radius * torch.cos(torch.remainder(angle, sector) - sector / 2),
        (0.25 * u.abs()).maximum(2 * v.abs()),
    ])  # fmt: skip
    pictures = torch.arange(count, device=DEVICE)
    edge = (1 - forms[chance.below(len(forms), count), pictures]) * _wide(size) * (SIDE / 2)
    first, second = (
        (palette[pictures, chance.below(palette.shape[1], count)] + 0.06 * chance.normal(count, 3))[
            ..., None, None
        ]
        for _ in range(2)
    )
    stripes = _wide(1.5 + 8 * chance.uniform(count) ** 2) * math.pi * u + 3 * v * wave
    shades = torch.stack([
        torch.zeros_like(u), (u / 2 + 0.5).clamp(0, 1), 0.5 + 0.5 * torch.sin(stripes),
        (1 - radius).clamp(0, 1),
    ])  # fmt: skip
    shade = shades[chance.below(len(shades), count), pictures]
    colour = first + (second - first) * shade[:, None]
    rough = (chance.uniform(count) < 0.25)[:, None, None, None]
    return (edge + 0.5).clamp(0, 1), torch.where(rough, 0.5 * colour + 0.8 * texture, colour)


def pictures(chance: Chance, count: int) -> Tensor:
    """Made-up pictures (count, 3, SIDE, SIDE) in [0, 1]."""
    found, texture = _noise(chance, count), _noise(chance, count)
    leaves, palette = chance.uniform(count) * LEAVES, _colours(chance, count, 5)
    for number in range(LEAVES):
        moved = texture.roll((7 * number, 11 * number), (2, 3))
        cover, colour = _leaf(chance, count, palette, moved)
        cover = cover * _wide(leaves >= number + 1)
        found = found + cover[:, None] * (colour - found)
    axis = torch.linspace(-1, 1, SIDE, device=DEVICE)
    across, along = (_wide(0.3 * chance.normal(count)) for _ in range(2))
    light = (1 + across * axis + along * axis[:, None])[:, None]
    contrast = (0.6 + 0.8 * chance.uniform(count))[:, None, None, None]
    lift = (0.3 * (chance.uniform(count) - 0.5))[:, None, None, None]
    return (((found - 0.5) * contrast + 0.5 + lift) * light).clamp(0, 1)


def view(chance: Chance, whole: Tensor) -> Tensor:
    """A random crop of each picture, perhaps mirrored, turned a little, in other colours, grey or blurred."""
    count = len(whole)

    def often(share: float) -> Tensor:
        return (chance.uniform(count) < share)[:, None, None, None]

    side, shape = (
        (0.15 + 0.85 * chance.uniform(count)).sqrt(),
        torch.exp(0.14 * (2 * chance.uniform(count) - 1)),
    )
    width, height = (side * shape).clamp(max=1), (side / shape).clamp(max=1)
    x, y = ((2 * chance.uniform(count) - 1) * (1 - part) for part in (width, height))
    width = torch.where(chance.uniform(count) < 0.5, -width, width)
    turn = 0.15 * chance.normal(count)
    cos, sin = turn.cos(), turn.sin()
    rows = torch.stack([width * cos, -height * sin, x, width * sin, height * cos, y], 1).view(count, 2, 3)
    grid = functional.affine_grid(rows, [count, 3, VIEW, VIEW], align_corners=False)
    seen = functional.grid_sample(whole, grid, padding_mode="reflection", align_corners=False)
    light, contrast, colour = (0.6 + 0.8 * chance.uniform(3, count))[..., None, None, None]
    other = seen * light
    middle = other.mean((1, 2, 3), keepdim=True)
    other = (other - middle) * contrast + middle
    grey = other.mean(1, keepdim=True)
    other = (other - grey) * colour + grey
    other = other + torch.einsum("nij,njhw->nihw", 0.1 * chance.normal(count, 3, 3), other - grey)
    seen = torch.where(often(0.8), other, seen)
    seen = torch.where(often(0.2), seen.mean(1, keepdim=True).expand_as(seen), seen)
    blurred = functional.avg_pool2d(functional.pad(seen, (1, 1, 1, 1), mode="reflect"), 3, 1)
    return torch.where(often(0.3), blurred, seen).clamp(-0.2, 1.2)


class Block(nn.Module):
    """Two convolutions and a way past them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.n1, self.c1 = nn.BatchNorm2d(before), nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.n2, self.c2 = nn.BatchNorm2d(after), nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.s = nn.Conv2d(before, after, 1, stride, bias=False) if before != after else None

    def forward(self, x: Tensor) -> Tensor:
        start = functional.relu(self.n1(x))
        found: Tensor = self.c2(functional.relu(self.n2(self.c1(start))))
        return found + (x if self.s is None else self.s(start))


class Extractor(nn.Module):
    """A wide residual network that returns the maps of its three stages."""

    def __init__(self, wider: int = 4) -> None:
        super().__init__()
        widths = [16, 16 * wider, 32 * wider, 64 * wider]
        self.first = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        self.stages = nn.ModuleList(
            nn.Sequential(Block(a, b, stride), Block(b, b, 1))
            for a, b, stride in zip(widths, widths[1:], (1, 2, 2), strict=False)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths[1:])

    def forward(self, x: Tensor) -> list[Tensor]:
        x, maps = self.first((x - 0.45) * 4), list[Tensor]()
        for stage, norm in zip(self.stages, self.norms, strict=True):
            x = stage(x)
            maps.append(functional.relu(norm(x)))
        return maps


def extractor(small: bool, folder: str | None) -> Extractor:
    """The network, learnt anew or read from where ``folder`` keeps it."""
    path = Path(folder) / "random_processes.pt" if folder and not small else None
    made = Extractor(1 if small else 4).to(DEVICE, memory_format=torch.channels_last)
    if path is not None and path.exists():
        made.load_state_dict(torch.load(path, map_location=DEVICE))
        return made.eval()
    learn(made, *((64, 8, 2) if small else (POOL, PAIRS, STEPS)))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(made.state_dict(), path)
    return made.eval()


def learn(network: Extractor, pool: int, pairs: int, steps: int) -> None:
    """Teach a network which views are of one picture."""
    chance, size = Chance(SEED), min(2048, pool)
    torch.manual_seed(SEED)
    drawn = torch.cat([(255 * pictures(chance, size)).round().byte() for _ in range(pool // size)])
    width = sum(norm.num_features for norm in list(network.norms)[1:])
    head = nn.Sequential(nn.Linear(width, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 128)).to(
        DEVICE
    )
    parameters = [*network.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    falling = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min(1.0, t / WARM_UP) * 0.5 * (1 + math.cos(math.pi * t / steps))
    )
    partner = torch.arange(2 * pairs, device=DEVICE).roll(pairs)
    for step in range(steps):
        whole = drawn[chance.below(len(drawn), pairs)].float() / 255
        both = torch.cat([view(chance, whole), view(chance, whole)])
        with _half():
            maps = network(both.contiguous(memory_format=torch.channels_last))
            rows = head(torch.cat([part.mean((2, 3)) for part in maps[1:]], 1))
        rows = functional.normalize(rows.float(), dim=1)
        alike = (rows @ rows.T / TEMPERATURE).fill_diagonal_(-1e9)
        loss = functional.cross_entropy(alike, partner)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        falling.step()
        if step % 1000 == 999:
            say(f"pictures of random processes: step {step + 1} of {steps}, loss {loss.item():.2f}")


@torch.no_grad()
def maps(network: Extractor, light: Callable[[Tensor], Tensor], images: Tensor) -> list[Tensor]:
    """The maps of the last two stages for each image, of one side, in half precision."""
    found: list[tuple[Tensor, Tensor]] = []
    for part in images.split(1000):
        with _half():
            _, middle, last = network(light(part.to(DEVICE)).contiguous(memory_format=torch.channels_last))
        middle = functional.avg_pool2d(middle.float(), 2)
        found.append((middle.contiguous().half(), last.contiguous().half()))
    return [torch.cat(stage) for stage in zip(*found, strict=True)]


def _half() -> torch.autocast:
    return torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda")
