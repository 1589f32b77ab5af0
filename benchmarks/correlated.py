"""Time batches of `train` with correlated noise against those with independent noise, and measure memory.

python -m benchmarks.correlated [--device cuda] [--small] [--only TEXT] [--bands 16]

For each model a batch of `ft.torch.train` (draw, sum, noise, update, ledger and all) with independent noise,
with noise over a number of bands and with buffers, in alternating blocks, so that load affects all alike; the
ratio is the median over pairs of blocks. On a CPU it is CPU time, of all threads, for networks of a size for
CPUs. Memory (on a GPU) is what a run holds after some batches beyond a
run with independent noise, in arrays of four bytes a weight: `bands` - 1 are expected for bands, and four for
two buffers. First, on a GPU with Triton, the kernel is compared with integers in numpy.
"""

import argparse
import gc
import statistics
import sys
import time
from collections import deque
from typing import Any

from benchmarks.gpu import Clock, Step, losses, models

WARM = 40  # batches until nothing more is allocated: longer than the bands


class ProcessClock(Clock):
    """A clock for the CPU time of one step, of all threads."""

    def _block(self, step: Step, count: int) -> float:
        start = time.process_time()
        for _ in range(count):
            step()
        return (time.process_time() - start) * 1e3 / count


def cpu_models(torch: Any) -> dict[str, Any]:
    """Return, by name, a function that makes a model of a size for CPUs, and inputs for one batch."""
    nn = torch.nn

    def mlp(width: int, batch: int) -> Any:
        make = lambda: nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))  # noqa: E731
        return make, lambda device: (torch.randn(batch, 784, device=device), None)

    def cnn() -> Any:
        first, second = nn.Conv2d(1, 16, 8, 2, padding=3), nn.Conv2d(16, 32, 4, 2)
        body = first, nn.Tanh(), nn.MaxPool2d(2, 1), second, nn.Tanh(), nn.MaxPool2d(2, 1)
        return nn.Sequential(*body, nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10))

    found = {f"mlp 784-{width}-10": mlp(width, 512) for width in (10, 100, 500)}
    found["mlp 784-1000-10"] = mlp(1000, 1024)
    found["two convolutions"] = cnn, lambda device: (torch.randn(512, 1, 28, 28, device=device), None)
    return found


def training(torch: Any, model: Any, x: Any, bands: int | str) -> Any:
    """Return a run on a hundred batches of records."""
    import farthing as ft

    records = 100 * len(x)
    places = torch.randint(len(x), (records,), device=x.device)
    rows = x[places] if x.dtype == torch.long else torch.randn(records, *x.shape[1:], device=x.device)
    labels = torch.randint(10, (records,), device=x.device)
    plan = {"steps": 5000} if bands == "pass" else {"noise_multiplier": 1.0}
    return ft.torch.train(
        *(model, losses(torch), (rows, labels), ft.Ledger(ft.Budget(200.0, 1e-5))),
        sampling_rate=0.01,
        optimizer=torch.optim.SGD(model.parameters(), 0.01),
        bands=bands,
        **plan,
    )


def step_of(run: Any) -> Step:
    return lambda: next(run)


def compared(torch: Any, clock: Clock, name: str, make: Any, batch: Any, bands: int) -> None:
    x, _ = batch(clock.device)
    kinds: dict[str, int | str] = {"independent": 1, f"{bands} bands": bands, "2 buffers": "pass"}
    steps, held = {}, {}
    for kind, number in kinds.items():
        torch.manual_seed(0)
        gc.collect()
        before = clock.memory()
        model = make().to(clock.device).train()
        weights = sum(p.numel() for p in model.parameters())
        run = training(torch, model, x, number)
        for _ in range(WARM if clock.blocks > 3 else 3):
            next(run)
        clock.sync()
        gc.collect()
        steps[kind], held[kind] = step_of(run), clock.memory() - before
    times = clock.turns(steps)
    for kind, found in times.items():
        ratio = statistics.median(a / b for a, b in zip(found, times["independent"], strict=True))
        more = (held[kind] - held["independent"]) / 4 / weights
        print(
            f"{name:30} {weights:>11,} weights  {kind:12} {statistics.median(found):9.3f} ms  "
            f"{ratio:5.2f} times  quickest {min(found) / min(times['independent']):5.2f}  "
            f"{more:6.2f} arrays of weights more",
            flush=True,
        )


def check_kernel(torch: Any, device: Any) -> None:
    """Compare the kernel of a GPU with integers in numpy, over more turns than there are bands."""
    import numpy as np

    from farthing.queries import correlated
    from farthing.torch.kernels.banded_noise import _Ring

    rng, size, bits = np.random.default_rng(0), 100_003, 22
    for bands in (2, 5, 16):
        column, before = correlated.coefficients(bands, 0.7), deque[Any](maxlen=bands - 1)
        ring = _Ring(size, column, bits, device)
        worst = 0
        for _ in range(2 * bands + 1):
            drawn = np.rint(rng.normal(size=size) * 2.0**bits).astype(np.int64)
            own = torch.from_numpy(drawn.copy()).to(device)
            ring.less(own)
            wanted = drawn - correlated.correction(before, column, bits, (size,))
            worst = max(worst, int(np.abs(own.cpu().numpy() - wanted).max()))
            before.appendleft(own.cpu().numpy())
        print(f"kernel, {bands} bands: at most {worst} cells from numpy (1 is a tie)", flush=True)
        if worst > 1:
            raise SystemExit("the kernel is wrong")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--bands", type=int, default=16)
    options = parser.parse_args([] if arguments is None else arguments)
    import torch

    from farthing.torch.kernels.noise import has_triton

    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing measured (--device cpu)")
        return
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    clock = (Clock if device.type == "cuda" else ProcessClock)(torch, device, options.small)
    if device.type == "cuda" and has_triton():
        check_kernel(torch, device)
    on_cpu = device.type == "cpu" and not options.small
    for name, (make, batch) in (cpu_models(torch) if on_cpu else models(torch, options.small)).items():
        if options.only in name:
            compared(torch, clock, name, make, batch, options.bands)


if __name__ == "__main__":
    main(sys.argv[1:])
