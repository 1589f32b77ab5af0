"""Time private steps on a GPU against ordinary ones, peers in the same run; one table at the end.

python benchmarks/gpu.py [--device cuda] [--small] [--tune] [--only TEXT] [--out FOLDER]

First every kernel is checked against references: float64, or exact arithmetic from the same random words.
Then, for each model, the time of one step: the median of blocks of steps between two CUDA events, after a
warm-up. A ratio is to the ordinary step of the same kind (eager, or in a CUDA graph). ``without noise`` is a
private step without the release: the difference is the cost of noise. Memory is the peak, from making the
model to the last step, above the level before: choosing routes and capturing graphs included.

``by turns``: steps of AdaDP and DP-SGD, and whole batches of `train`, in alternating blocks; the ratio is the
median over pairs of blocks.

Packages are also imported from vendor/ beside the sources. Opacus runs where it can be imported. ``--small
--device cpu`` runs small versions of everything, with TRITON_INTERPRET=1 the kernels too.
"""

import argparse
import gc
import importlib.util
import json
import math
import os
import statistics
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
for place in (ROOT / "vendor", ROOT / "src"):
    if place.is_dir() and str(place) not in sys.path:
        sys.path.insert(0, str(place))

NEEDED = "torch", "numpy", "scipy", "cryptography", "mpmath"
Step = Callable[[], Any]


class Report:
    """A table whose rows are printed at once and kept."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.begun = time.time()

    def check(self, name: str, run: Callable[[], str]) -> bool:
        try:
            said, good = run(), True
        except Exception:
            said, good = last_lines(), False
            self.failed.append(name)
        self.checks.append({"check": name, "good": good, "said": said})
        print(f"[{time.time() - self.begun:5.0f} s] {'ok  ' if good else 'FAIL'} {name}: {said}", flush=True)
        return good

    def add(self, model: str, step: str, milliseconds: float | None, **more: Any) -> None:
        self.rows.append({"model": model, "step": step, "ms": milliseconds, **more})
        shown = "failed" if milliseconds is None else f"{milliseconds:9.4f} ms"
        extra = "  ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in more.items()
        )
        print(f"[{time.time() - self.begun:5.0f} s] {model:18} {step:28} {shown}  {extra}", flush=True)


def last_lines(count: int = 4) -> str:
    return " | ".join(line.strip() for line in traceback.format_exc().strip().splitlines()[-count:])


# ---- what is timed ----------------------------------------------------------------------------------------


class Clock:
    """A clock for milliseconds of one step on a device."""

    def __init__(self, torch: Any, device: Any, small: bool) -> None:
        self.torch, self.device = torch, device
        self.blocks, self.block_ms, self.most = (3, 5.0, 3) if small else (7, 150.0, 400)

    def sync(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)

    def time(self, step: Step, warm: int = 3) -> float:
        for _ in range(warm):
            step()
        self.sync()
        start = time.perf_counter()
        step()
        self.sync()
        once = (time.perf_counter() - start) * 1e3
        count = max(1, min(self.most, int(self.block_ms / max(once, 1e-3))))
        return statistics.median(self._block(step, count) for _ in range(self.blocks))

    def turns(self, steps: dict[str, Step]) -> dict[str, list[float]]:
        """Time all steps block by block, several times; return a step's time in each block."""
        once = max(self.time(step, 12 if self.blocks > 3 else 2) for step in steps.values())
        count = 10 * max(1, int(self.block_ms / once / 10))  # AdaDP finds scales every ten batches
        found: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(2 * self.blocks + 1):
            for name, step in steps.items():
                found[name].append(self._block(step, count))
        return found

    def _block(self, step: Step, count: int) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            for _ in range(count):
                step()
            return (time.perf_counter() - start) * 1e3 / count
        first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.sync()
        first.record()
        for _ in range(count):
            step()
        last.record()
        self.sync()
        return float(first.elapsed_time(last)) / count

    def kernel(self, step: Step, copies: int = 20) -> float:
        """Time one call among many in a CUDA graph, without the gaps between launches."""
        if self.device.type != "cuda":
            return self.time(step)

        def many() -> None:
            for _ in range(copies):
                step()

        return self.time(graphed(self.torch, many)) / copies

    def memory(self) -> int:
        return int(self.torch.cuda.memory_allocated(self.device)) if self.device.type == "cuda" else 0

    def peak(self) -> int:
        if self.device.type != "cuda":
            return 0
        return int(self.torch.cuda.max_memory_allocated(self.device))


def graphed(torch: Any, step: Step) -> Step:
    """Capture a step in a CUDA graph, after a warm-up on a stream of its own."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


# ---- models -----------------------------------------------------------------------------------------------


def models(torch: Any, small: bool) -> dict[str, tuple[Callable[[], Any], Callable[[Any], tuple[Any, Any]]]]:
    """Return, by name, a function that makes the model, and inputs and targets for one batch."""
    nn, F = torch.nn, torch.nn.functional

    class Block(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            batch, length, width = x.shape
            q, k, v = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
            x = x + self.out(mixed)
            return x + self.down(F.gelu(self.up(self.after(x))))

    class Transformer(nn.Module):
        def __init__(self, depth: int, width: int, heads: int, length: int, words: int = 1000) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
            self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

        def forward(self, x: Any) -> Any:
            places = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1).contiguous()
            return self.head(self.norm(self.blocks(self.words(x) + self.places(places))).mean(1))

    def mlp() -> Any:
        return nn.Sequential(nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 10))

    def cnn() -> Any:
        def pair(a: int, b: int) -> list[Any]:
            return [
                nn.Conv2d(a, b, 3, padding=1),
                nn.Tanh(),
                nn.Conv2d(b, b, 3, padding=1),
                nn.Tanh(),
                nn.MaxPool2d(2),
            ]

        body = [*pair(3, 32), *pair(32, 64), *pair(64, 128)]
        return nn.Sequential(*body, nn.Flatten(), nn.Linear(2048, 128), nn.Tanh(), nn.Linear(128, 10))

    def images(batch: int, *shape: int) -> Callable[[Any], tuple[Any, Any]]:
        return lambda device: (
            torch.randn(batch, *shape, device=device),
            torch.randint(10, (batch,), device=device),
        )

    def texts(batch: int, length: int) -> Callable[[Any], tuple[Any, Any]]:
        return lambda device: (
            torch.randint(1000, (batch, length), device=device),
            torch.randint(10, (batch,), device=device),
        )

    if small:
        return {
            "mlp": (mlp, images(8, 784)),
            "cifar": (cnn, images(4, 3, 32, 32)),
            "transformer fp32": (lambda: Transformer(2, 32, 4, 8), texts(4, 8)),
        }
    transformer = lambda: Transformer(12, 768, 12, 128)  # noqa: E731
    return {
        "mlp 600": (mlp, images(600, 784)),
        "cifar 512": (cnn, images(512, 3, 32, 32)),
        "transformer fp32": (transformer, texts(64, 128)),
        "transformer tf32": (transformer, texts(64, 128)),
    }


# ---- steps ------------------------------------------------------------------------------------------------


class OneBatch:
    """A batch that is already on the device, as for an ordinary step."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def physical_batches(self, physical: int | None = None) -> Any:
        yield self.x, self.y, None


def ordinary(torch: Any, model: Any, x: Any, y: Any) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def losses(torch: Any) -> Callable[[Any, Any], Any]:
    return lambda outputs, targets: torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


def private(torch: Any, model: Any, x: Any, y: Any, kind: str) -> Step:
    """Return a private step of a kind; ' graphed' behind the kind captures it in a CUDA graph.

    Kinds are 'noise', 'without noise', 'float noise', 'coordinates', 'vmap' and AdaDP's.

    'AdaDP box' and 'AdaDP ellipsoid' are the whole method: its update, and new scales every ten batches.
    """
    import numpy as np

    from farthing.noise.lattice import Stream
    from farthing.queries.bounds import ClipCoordinates, ClipNorm
    from farthing.torch.gradients import isolation
    from farthing.torch.gradients.bookkeeping import Gradient
    from farthing.torch.gradients.clipping import plain_sum
    from farthing.torch.kernels.noise import FloatGaussian, TensorGaussian

    kind, graph = kind.removesuffix(" graphed"), kind.endswith(" graphed")
    stream, batch = Stream(), OneBatch(x, y)
    gradient = Gradient(model, losses(torch))
    mechanism = FloatGaussian(1.0) if kind.startswith("float") else TensorGaussian(1.0)
    size = gradient.layout.size
    coordinates = "coordinates" in kind
    bound = ClipCoordinates(np.full(size, 1e-3)) if coordinates else ClipNorm(1.0)
    moved = mover(torch, model, gradient.layout, torch.optim.SGD(model.parameters(), lr=0.01), len(x))

    def summed() -> Any:
        if kind == "vmap":
            how, names = isolation.Isolation.VMAP, gradient.layout.names
            rows = isolation.per_example(how, model, losses(torch), names, x, y, None)
            return plain_sum(rows, bound)
        return gradient.bounded_sum(batch, None, bound)

    if kind.startswith("AdaDP"):
        return adadp(torch, model, gradient, batch, mechanism, stream, kind.removeprefix("AdaDP "))
    if not graph:

        def step() -> None:
            total = summed()
            moved(total if "without" in kind else mechanism.release(total, bound, stream))

        return step
    held: list[Any] = [None]

    def capture() -> None:
        held[0] = summed()

    replay = graphed(torch, capture)

    def captured() -> None:
        replay()
        moved(held[0] if "without" in kind else mechanism.release(held[0], bound, stream))

    return captured


def mover(torch: Any, model: Any, layout: Any, optimizer: Any, size: int) -> Callable[[Any], None]:
    """Return one step of the optimizer, as `train` makes it."""
    parameters = [p for p in model.parameters() if p.requires_grad]

    def moved(released: Any) -> None:
        for parameter, part in zip(parameters, layout.views(released / size), strict=True):
            parameter.grad = part
        optimizer.step()

    return moved


def adadp(torch: Any, model: Any, gradient: Any, batch: Any, mechanism: Any, stream: Any, shape: str) -> Step:
    """Return one batch of AdaDP as `train` runs it, without the ledger, as for the others."""
    from farthing.torch.kernels.noise import beside
    from farthing.torch.methods.adadp import AdaDP

    method, t = AdaDP(model, 0.01, shape=shape), 0
    moved = mover(torch, model, gradient.layout, method, len(batch))
    expected: list[Any] = [None, None]

    def step() -> None:
        nonlocal t
        t += 1
        bound = method.bound(t)
        released = mechanism.release(gradient.bounded_sum(batch, None, bound), bound, stream)
        if expected[0] is not bound:
            size = mechanism.noise_multiplier * bound.norm() / len(batch)
            spread = bound.scale if isinstance(bound.scale, float) else beside(bound.scale, released.device)
            expected[:] = bound, size if isinstance(spread, float) else gradient.layout.views(size * spread)
        method.expect(expected[1])
        moved(released)

    return step


def trained(torch: Any, model: Any, x: Any, kind: str) -> Step:
    """Return a batch of `train`, drawn from a hundred batches of records, with the ledger."""
    import farthing as ft
    from farthing.torch.methods.adadp import AdaDP

    model.train()
    shape = kind.removeprefix("AdaDP ")
    method = torch.optim.SGD(model.parameters(), 0.1) if kind == "noise" else AdaDP(model, 0.001, shape=shape)
    rows = torch.randn(100 * len(x), *x.shape[1:], device=x.device)
    labels = rows.flatten(1)[:, :10].argmax(1)
    ledger = ft.Ledger(ft.Budget(200.0, 1e-5))
    training = ft.torch.train(
        *(model, losses(torch), (rows, labels), ledger),
        sampling_rate=0.01,
        noise_multiplier=1.0,
        optimizer=method,
        clip_norm=getattr(method, "bound", 1.0),
    )
    return lambda: next(training)


def by_turns(torch: Any, report: Report, clock: Clock, name: str, make: Any, batch: Any) -> None:
    """Compare AdaDP's steps with those of DP-SGD in alternating blocks, so that load affects both alike."""
    x, y = batch(clock.device)
    kinds = {"DP-SGD": "noise", "AdaDP, box": "AdaDP box", "AdaDP, ellipsoid": "AdaDP ellipsoid"}
    for what in ("a step", "a batch of train"):
        try:
            steps: dict[str, Step] = {}
            for kind, way in kinds.items():
                torch.manual_seed(0)
                model = make().to(clock.device).train()
                whole = what == "a batch of train"
                steps[kind] = trained(torch, model, x, way) if whole else private(torch, model, x, y, way)
            times = clock.turns(steps)
        except Exception:
            report.add(f"{name}, {what}", "by turns", None, why=last_lines())
            continue
        for kind, found in times.items():
            ratio = statistics.median(a / b for a, b in zip(found, times["DP-SGD"], strict=True))
            quickest = {"quickest": min(found) / min(times["DP-SGD"])}
            report.add(f"{name}, {what}", kind, statistics.median(found), ratio=ratio, **quickest)


def opacus_step(torch: Any, model: Any, x: Any, y: Any, ghost: bool) -> Step:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if ghost:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

        wrapped: Any = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, use_ghost_clipping=True)
        private_optimizer: Any = DPOptimizerFastGradientClipping(
            optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(x)
        )
        criterion: Any = DPLossFastGradientClipping(
            wrapped, private_optimizer, torch.nn.CrossEntropyLoss(), loss_reduction="mean"
        )
    else:
        wrapped = GradSampleModule(model)
        private_optimizer = DPOptimizer(
            optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(x)
        )
        criterion = torch.nn.CrossEntropyLoss()

    def step() -> None:
        private_optimizer.zero_grad()
        criterion(wrapped(x), y).backward()
        private_optimizer.step()

    return step


def race(
    torch: Any, report: Report, clock: Clock, name: str, make: Any, batch: Any, has_opacus: bool
) -> None:
    """Time all kinds of step of one model, each with a model of its own."""
    device = clock.device
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = "tf32" in name
    kinds: dict[str, Callable[[Any, Any, Any], Step]] = {"ordinary": lambda m, x, y: ordinary(torch, m, x, y)}
    graphs = device.type == "cuda"
    if graphs:
        kinds["ordinary graphed"] = lambda m, x, y: graphed(torch, ordinary(torch, m, x, y))
    for kind in ("noise", "without noise", "float noise"):
        kinds[f"private, {kind}"] = lambda m, x, y, kind=kind: private(torch, m, x, y, kind)
        if graphs:
            kinds[f"private, {kind} graphed"] = lambda m, x, y, kind=kind: private(
                torch, m, x, y, f"{kind} graphed"
            )
    if not name.startswith("transformer"):
        kinds["coordinates"] = lambda m, x, y: private(torch, m, x, y, "coordinates")
        kinds["coordinates, without noise"] = lambda m, x, y: private(
            torch, m, x, y, "coordinates without noise"
        )
        for shape in ("box", "ellipsoid"):
            kinds[f"AdaDP, {shape}"] = lambda m, x, y, shape=shape: private(torch, m, x, y, f"AdaDP {shape}")
        if graphs:
            kinds["coordinates graphed"] = lambda m, x, y: private(torch, m, x, y, "coordinates graphed")
    if not name.endswith("tf32"):
        kinds["vmap"] = lambda m, x, y: private(torch, m, x, y, "vmap")
    if has_opacus:
        kinds["opacus hooks"] = lambda m, x, y: opacus_step(torch, m, x, y, ghost=False)
        kinds["opacus ghost"] = lambda m, x, y: opacus_step(torch, m, x, y, ghost=True)
    kinds["ordinary again"] = kinds["ordinary"]
    times: dict[str, float] = {}
    peaks: dict[str, float] = {}
    for kind, build in kinds.items():
        try:
            torch.manual_seed(0)
            if device.type == "cuda":  # otherwise cached for the next kind, which would get them for free
                torch._C._cuda_clearCublasWorkspaces()
            before = clock.memory()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            model = make().to(device).train()
            x, y = batch(device)
            step = build(model, x, y)
            times[kind] = clock.time(step)
            peaks[kind] = (clock.peak() - before) / 2**20
            against = "ordinary graphed" if "graphed" in kind and "ordinary graphed" in times else "ordinary"
            more = {"ratio": times[kind] / times[against], "MiB": peaks[kind]}
            if peaks.get(against):
                more["memory"] = peaks[kind] / peaks[against]
            report.add(name, kind, times[kind], **more)
        except Exception:
            report.add(name, kind, None, why=last_lines())
        model = step = x = y = None
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


# ---- kernels ----------------------------------------------------------------------------------------------


def exact(key: bytes, size: int, bits: int, block_of: Any) -> Any:
    """Return the samples of a draw from its words, on the CPU, in exact arithmetic where needed."""
    import numpy as np
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    from farthing.noise import lattice
    from farthing.torch.kernels import lattice_noise

    blocks = -(-size // (8 * lattice_noise.LANES)) * lattice_noise.LANES
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor().update(bytes(64 * blocks))
    words = (
        np.frombuffer(stream, "<u8").reshape(-1, lattice_noise.LANES, 8).transpose(0, 2, 1).reshape(-1)[:size]
    )
    for place in (0, 1, lattice_noise.LANES, size - 1):
        block, word = block_of(place)
        assert words[place] == np.frombuffer(stream, "<u8")[8 * block + word]
    signed = words.view(np.int64)
    cells = lattice._cells(lattice.Stream(), lattice._HALF_NORMAL, signed & (2**63 - 1), bits)
    return np.where(signed < 0, -cells, cells)


def check_kernels(torch: Any, report: Report, device: Any, small: bool) -> bool:
    import numpy as np

    from farthing.torch.kernels import grams, lattice_noise, noise
    from farthing.torch.kernels import layer_sums as sums
    from farthing.torch.kernels import noise as noise_pool

    draw = torch.Generator(device).manual_seed(1)

    def cipher() -> str:
        key, nonce = bytes(range(32)), bytes.fromhex("000000090000004a00000000")
        found = lattice_noise.blocks(key, 1, nonce, 16, device).cpu().numpy()
        assert found[0].tobytes().hex().startswith("10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c0680304")
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

        wanted = Cipher(algorithms.ChaCha20(key, struct.pack("<I", 1) + nonce), None).encryptor()
        assert found.tobytes() == wanted.update(bytes(64 * 16))
        return "RFC 8439, section 2.3.2, and 16 blocks"

    def samples(bits: int) -> Callable[[], str]:
        def run() -> str:
            size = 5000 if small else 2**20 + 77
            key = os.urandom(32)
            got, places = lattice_noise.gaussian(key, size, bits, device)
            wanted = exact(key, size, bits, lattice_noise.block_of)
            places = places.tolist()
            open_ = sorted(places[1 : 1 + places[0]])
            assert len(open_) == places[0], "more open than room"
            got = got.cpu().numpy().astype(np.int64)
            wrong = np.flatnonzero(got != wanted)
            undecided = set(open_)
            assert all(int(i) in undecided for i in wrong), (
                f"{len(wrong)} samples differ, {len(open_)} are open"
            )
            settled = noise_pool.settle(noise.Stream(), key, open_[:200], bits, lattice_noise.block_of)
            assert (settled == wanted[open_[:200]]).all()
            return f"{size} samples, {len(open_)} open of which {len(wrong)} would be wrong"

        return run

    def release() -> str:
        size = 3001 if small else 10**6 + 1
        total = torch.randn(size, generator=draw, device=device)
        drawn = torch.randint(-(2**24), 2**24, (size,), generator=draw, device=device, dtype=torch.int32)
        scale = torch.rand(size, generator=draw, device=device) + 0.1
        cell = 1.37 * 2.0**-22
        worst = 0.0
        for each in (None, scale):
            units = torch.ones_like(total) if each is None else each
            wanted = (torch.round(total.double() / units / cell) + drawn) * cell * units.double()
            got = lattice_noise.release(total, drawn, each, cell).double()
            error = (got - wanted).abs() - 2.0**-24 * wanted.abs()  # beyond the error of the last rounding
            worst = max(worst, float((error / (cell * units)).max()))
        assert worst < 1.5, worst  # one at a tie
        return f"within {worst:.2g} cells"

    def clamped(batch: int, length: int, rows: int, columns: int) -> Callable[[], str]:
        def run() -> str:
            worst = 0.0
            delta = torch.randn(batch, length, rows, generator=draw, device=device)
            a = torch.randn(batch, length, columns, generator=draw, device=device)
            for limit in (
                torch.tensor(0.5, device=device),
                torch.rand(rows, columns, generator=draw, device=device),
            ):
                wanted = torch.zeros(rows, columns, dtype=torch.float64, device=device)
                for d, x in zip(delta.double().split(16), a.double().split(16), strict=True):
                    g = torch.einsum("bto,bti->boi", d, x)
                    wanted += torch.minimum(torch.maximum(g, -limit.double()), limit.double()).sum(0)
                got = (
                    sums.clamped_outer(delta[:, 0].contiguous(), a[:, 0].contiguous(), limit)
                    if length == 1
                    else sums.clamped_dots(delta, a, limit)
                )
                worst = max(worst, float((got - wanted).norm() / wanted.norm()))
            assert worst < 1e-5, worst
            return f"relative error {worst:.2g}"

        return run

    def rows() -> str:
        g = torch.randn(77 if small else 601, 1003, generator=draw, device=device)
        limit = torch.rand(1003, generator=draw, device=device)
        wanted = torch.minimum(torch.maximum(g.double(), -limit.double()), limit.double()).sum(0)
        error = float((sums.clamped_rows(g, limit) - wanted).norm() / wanted.norm())
        assert error < 1e-5, error
        return f"relative error {error:.2g}"

    def gram() -> str:
        said = []
        for shape in (
            [(3, 9, 33, 70)] if small else [(64, 128, 3072, 768), (5, 49, 70, 90), (3, 200, 33, 130)]
        ):
            u, v = (torch.randn(*shape[:2], n, generator=draw, device=device) for n in shape[2:])
            wanted = torch.stack([(a.double().T @ b.double()).norm() for a, b in zip(u, v, strict=True)])
            error = float((grams.norms(u, v, coarse=False).double() / wanted - 1).abs().max())
            above = grams.norms(u, v, coarse=True).double() / wanted - 1
            assert error < 2e-6, error
            assert 0 <= float(above.min()) <= float(above.max()) < 0.1, above
            said.append(f"{error:.2g}, coarse {float(above.max()):.2g} above")
        x, delta = (torch.randn(7, 33, 768, generator=draw, device=device) for _ in range(2))
        hat = torch.nn.functional.layer_norm(x.double(), (768,), eps=1e-5)
        found = grams.norm_sums(x, delta, 1e-5)
        for one, other in zip(found, ((hat * delta).sum(1), delta.double().sum(1)), strict=True):
            assert float((one - other).norm() / other.norm()) < 1e-6
        return "relative error " + "; ".join(said)

    def whole() -> str:
        from farthing.queries.bounds import ClipNorm
        from farthing.torch.kernels import totals

        size = 20_000 if small else 2 * 10**6
        mechanism, stream = noise.TensorGaussian(1.5), noise.Stream()
        total = torch.randn(size, generator=draw, device=device)
        rounds = [mechanism.release(total, ClipNorm(2.0), stream) for _ in range(5)]
        for one in rounds:
            z = ((one - total) / 3.0).double()
            assert abs(float(z.mean())) < 6 / math.sqrt(size), float(z.mean())
            assert abs(float(z.std()) - 1 - totals.SLACK) < 6 / math.sqrt(size) + 1e-3, float(z.std())
        assert not any(torch.equal(a, b) for i, a in enumerate(rounds) for b in rounds[:i])
        pair = ((rounds[-1] - total) * (rounds[-2] - total)).double().mean() / 9.0
        assert abs(float(pair)) < 6 / math.sqrt(size)
        return "mean, deviation, and no release like another"

    good = report.check("chacha20", cipher)
    for bits in (20, 26, 33, 40):
        good &= report.check(f"gaussian, {bits} bits", samples(bits))
    good &= report.check("release", release)
    good &= report.check("Gaussian.release", whole)
    good &= report.check("norms of positions", gram)
    sizes = (
        [(5, 1, 70, 90), (4, 9, 33, 70)]
        if small
        else [(600, 1, 1000, 784), (37, 1, 130, 61), (64, 49, 96, 147)]
    )
    for size in sizes:
        good &= report.check(f"clamped sum {size}", clamped(*size))
    return good & report.check("clamped rows", rows)


def time_kernels(torch: Any, report: Report, clock: Clock, small: bool, tune: bool) -> None:
    from farthing.torch.kernels import lattice_noise
    from farthing.torch.kernels import layer_sums as sums

    device = clock.device
    key = os.urandom(32)
    for size in (5000,) if small else (795_010, 85_000_000):
        bits = 22 if size < 10**7 else 26
        total = torch.randn(size, device=device)
        noise = lattice_noise.gaussian(key, size, bits, device)[0]
        timed = {
            "gaussian": lambda size=size, bits=bits: lattice_noise.gaussian(key, size, bits, device),
            "release": lambda total=total, noise=noise: lattice_noise.release(total, noise, None, 1e-6),
            "torch.randn": lambda size=size: torch.randn(size, device=device),
            "torch.randn, added": lambda total=total: total + torch.randn_like(total) * 0.5,
            "copy": lambda total=total: total.clone(),
        }
        for name, call in timed.items():
            try:
                ms = clock.kernel(call, 20 if size < 10**7 else 2)
                bytes_ = {"gaussian": 4, "release": 12, "torch.randn": 4, "torch.randn, added": 8, "copy": 8}[
                    name
                ]
                more = {"ns a sample": ms * 1e6 / size, "GB/s": bytes_ * size / ms / 1e6}
                report.add(f"{size} samples", name, ms, **more)
            except Exception:
                report.add(f"{size} samples", name, None, why=last_lines())
        del total, noise, timed
    batch, rows, columns = (8, 70, 90) if small else (600, 1000, 784)
    delta, a = torch.randn(batch, rows, device=device) * 1e-2, torch.randn(batch, columns, device=device)
    one, each = torch.tensor(1e-3, device=device), torch.full((rows, columns), 1e-3, device=device)

    def materialised() -> Any:
        return (delta[:, :, None] * a[:, None, :]).clamp_(-1e-3, 1e-3).sum(0)

    clamps = {
        "one limit": lambda: sums.clamped_outer(delta, a, one),
        "limit a coordinate": lambda: sums.clamped_outer(delta, a, each),
        "materialised": materialised,
        "ordinary product": lambda: delta.T @ a,
    }
    if tune and device.type == "cuda":
        for down, across in ((4, 8), (8, 4), (4, 4), (2, 8)):
            for shares in (1, 2, 3, 4, 6):
                clamps[f"{down}x{across}, {shares} shares"] = outer(sums, delta, a, one, down, across, shares)
    for name, call in clamps.items():
        try:
            report.add(f"clamped {batch}x{rows}x{columns}", name, clock.kernel(call))
        except Exception:
            report.add(f"clamped {batch}x{rows}x{columns}", name, None, why=last_lines())
    shape = (4, 6, 20, 30) if small else (64, 128, 768, 768)
    d = torch.randn(shape[0], shape[1], shape[2], device=device)
    x = torch.randn(shape[0], shape[1], shape[3], device=device)
    for name, call in {
        "one limit": lambda: sums.clamped_dots(d, x, one),
        "ordinary product": lambda: d.flatten(0, 1).T @ x.flatten(0, 1),
    }.items():
        try:
            report.add("clamped positions " + "x".join(map(str, shape)), name, clock.kernel(call, 3))
        except Exception:
            report.add("clamped positions", name, None, why=last_lines())
    if tune and device.type == "cuda":
        size = 8 * 10**6
        out, places = lattice_noise.gaussian(key, size, 22, device)
        words = struct.unpack("<8i", key)
        for lanes in (128, 256, 512):
            for warps in (2, 4, 8):
                grid = (-(-size // (8 * lanes)),)

                def call(grid: Any = grid, lanes: int = lanes, warps: int = warps) -> None:
                    args = out, places, size, lattice_noise.bits_of(2.0**22), 64, *words
                    lattice_noise._gaussian[grid](*args, LANES=lanes, num_warps=warps)

                try:
                    ms = clock.kernel(call)
                    report.add(
                        "gaussian, tuned",
                        f"{lanes} lanes {warps} warps",
                        ms,
                        **{"ns a sample": ms * 1e6 / size},
                    )
                except Exception:
                    report.add("gaussian, tuned", f"{lanes} lanes {warps} warps", None, why=last_lines())


def outer(sums: Any, delta: Any, a: Any, limit: Any, down: int, across: int, shares: int) -> Step:
    (examples, rows), columns = delta.shape, a.shape[1]
    part = -(-examples // shares)
    out = delta.new_empty(shares, rows, columns)
    grid = (-(-columns // (8 * across)), -(-rows // (16 * down)), shares)
    args = delta, a, limit, out, examples, rows, columns, part

    def call() -> Any:
        sums._outer[grid](*args, MATRIX=False, ASM=True, DOWN=down, ACROSS=across)
        return out[0] if shares == 1 else out.sum(0)

    return call


# ---- the whole --------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--only", default="", help="models whose name contains this, or 'kernels'")
    parser.add_argument("--out", default=os.environ.get("OUT"))
    options = parser.parse_args([] if arguments is None else arguments)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"missing here: {', '.join(missing)}; put them into {ROOT / 'vendor'} or install them")
        return
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing measured (--small --device cpu runs all of it in small)")
        return
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    report, clock = Report(), Clock(torch, device, options.small)
    has_opacus = importlib.util.find_spec("opacus") is not None
    has_triton = importlib.util.find_spec("triton") is not None
    versions = f"torch {torch.__version__}, triton {has_triton}, opacus {has_opacus}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(f"{name}; Python {sys.version.split()[0]}, {versions}", flush=True)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted:
        mend_interpreter()
    if has_triton and (device.type == "cuda" or interpreted):
        if options.only in ("", "kernels"):
            try:
                check_kernels(torch, report, device, options.small)
                time_kernels(torch, report, clock, options.small, options.tune)
            except Exception:
                traceback.print_exc()
                report.failed.append("kernels")
    else:
        print("no kernels are checked: they need Triton, and a GPU or TRITON_INTERPRET=1")
    for model, (make, batch) in models(torch, options.small).items():
        if options.only in model:
            race(torch, report, clock, model, make, batch, has_opacus)
        if options.only in f"{model}, by turns" and not model.startswith("transformer"):
            by_turns(torch, report, clock, model, make, batch)
    table(report)
    if options.out:
        Path(options.out).mkdir(parents=True, exist_ok=True)
        told = {"device": name, "versions": versions, "checks": report.checks, "rows": report.rows}
        (Path(options.out) / "gpu.json").write_text(json.dumps(told, indent=1))


def mend_interpreter() -> None:
    """Patch Triton's interpreter, whose loop counters are arrays of one number, which new numpy refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = mended


def table(report: Report) -> None:
    print(f"\n{'model':28}{'step':32}{'ms':>10}{'ratio':>8}{'MiB':>9}{'memory':>8}")
    before = None
    for row in report.rows:
        if before not in (None, row["model"]):
            print()
        before = row["model"]
        if row["ms"] is None:
            print(f"{row['model'][:27]:28}{row['step']:32}    failed: {row['why'][:150]}")
            continue
        cells = "".join(
            f"{row[key]:{width}.{digits}f}" if key in row else " " * width
            for key, width, digits in (("ratio", 8, 2), ("MiB", 9, 0), ("memory", 8, 2))
        )
        extra = "".join(
            f"  {key} {row[key]:.3g}" for key in ("ns a sample", "GB/s", "quickest") if key in row
        )
        print(f"{row['model'][:27]:28}{row['step']:32}{row['ms']:10.4f}{cells}{extra}")
    for model in dict.fromkeys(row["model"] for row in report.rows):
        times = {row["step"]: row["ms"] for row in report.rows if row["model"] == model and row["ms"]}
        for end in ("", " graphed"):
            noisy, plain = times.get(f"private, noise{end}"), times.get(f"private, without noise{end}")
            if noisy and plain:
                print(f"{model}{end}: noise is {100 * (noisy - plain) / noisy:.1f} % of a private step")
            if noisy and f"coordinates{end}" in times:
                share = times[f"coordinates{end}"] / noisy
                print(f"{model}: clamped coordinates take {share:.2f} of a private step{end}")
    bad = ", ".join(report.failed)
    print(f"\nchecks: {len(report.checks)} made, " + (f"FAILED: {bad}" if bad else "none failed"))


if __name__ == "__main__":
    main(sys.argv[1:])
