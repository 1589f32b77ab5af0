"""Compare private steps of deep models on a CPU with peers: ratios to an ordinary step of the same model.

    python -m benchmarks.deep [mlp cnn cifar transformer adadp checks] [--rounds 9] [--threads N] [--busy] ...

An ordinary step is zero_grad, forward, mean loss, backward, SGD, on a batch in memory. Ours draws a Poisson
batch from ten times as many examples, charges the ledger, fetches the batch, sums clipped gradients, adds the
sound (lattice) noise and updates; the noise's share is printed. Opacus 1.6 (hooks and ghost) and vmap (plain
and compiled) clip and add torch.randn, without sampling or accounting. All of them alternate in one process,
warm; a ratio is that of medians. Peak memory is that of a fresh process each, above its level before the
first step (--no-memory: left out). ``adadp`` compares the steps of AdaDP and of DP-SGD, both by `train`.
``checks`` shows what Opacus does with three models that must be refused. ``--busy`` counts the process's own
time on one thread, noise drawn ahead included: for a shared machine.

A step that repeatedly allocates memory from the system waits for it. Most of these do, the ordinary one most;
set MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ to 1000000000 to avoid that.
"""

import argparse
import copy
import gc
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import farthing as ft
from farthing.queries.bounds import ClipNorm
from farthing.queries.query import Query
from farthing.queries.samplers import Poisson
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.kernels.noise import TensorGaussian
from farthing.torch.methods.adadp import AdaDP
from farthing.torch.training.records import Examples

TARGETS = {"mlp": 1.10, "cnn": 1.25, "cifar": 1.15, "transformer": 1.15}
CLIP, NOISE, LEARNING_RATE = 1.0, 1.1, 0.1
Step = Callable[[], Any]


class Transformer(nn.Module):
    """A classifier of 4 layers of width 128 over 64 tokens."""

    def __init__(self, width: int = 128, layers: int = 4, tokens: int = 64, words: int = 1000) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        out: Tensor = self.head(self.norm(self.layers(x)).mean(1))
        return out


def cnn() -> nn.Module:
    """Return the network of Opacus's and TensorFlow Privacy's MNIST examples."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1)),
        *(nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1)),
        *(nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def cifar() -> nn.Module:
    """Return the AlexNet-like network of Abadi et al. 2016 and AdaDP: two convolutions, three layers."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2, 2)),
        *(nn.Conv2d(64, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2, 2)),
        *(nn.Flatten(), nn.Linear(4096, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 10)),
    )


def mlp() -> nn.Module:
    """Return 60 (DpPCA) - 1000 - 10, the paper's MNIST network."""
    return nn.Sequential(nn.Linear(60, 1000), nn.ReLU(), nn.Linear(1000, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], int]] = {
    "mlp": (mlp, lambda n: torch.randn(n, 60), 600),
    "cnn": (cnn, lambda n: torch.randn(n, 1, 28, 28), 256),
    "cifar": (cifar, lambda n: torch.randn(n, 3, 32, 32), 128),
    "transformer": (Transformer, lambda n: torch.randint(0, 1000, (n, 64)), 64),
}


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def ordinary(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)

    def step() -> None:
        optimizer.zero_grad()
        losses(model(x), y).mean().backward()
        optimizer.step()

    return step


class Timed(TensorGaussian):
    """The mechanism, with a clock."""

    seconds = 0.0

    def release(self, total: Any, bound: Any, stream: Any, turn: int = 0) -> Any:
        start = time.perf_counter()
        found = super().release(total, bound, stream, turn)
        Timed.seconds += time.perf_counter() - start
        return found


def ours(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Make a whole step: draw, charge, clip, sum, sound noise, update."""
    size = len(y)
    examples = Examples((x.repeat(10, *[1] * (x.ndim - 1)), y.repeat(10)))
    gradient = Gradient(model, losses)
    query = Query(Poisson(0.1), gradient, ClipNorm(CLIP), Timed(NOISE))
    ledger = ft.Ledger(ft.Budget(200.0, 1e-5))
    ledger.promise(query)
    attached = ledger.over(examples)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE / size)
    trained = [p for p in model.parameters() if p.requires_grad]

    def step() -> None:
        released = attached.ask(query).value
        for p, view in zip(trained, gradient.layout.views(released), strict=True):
            p.grad = view
        optimizer.step()

    return step


def bare(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Make our step without draw, charge and noise: the bounded sum of one batch and the update."""
    examples = Examples((x, y)).take(slice(None))
    gradient, bound = Gradient(model, losses), ClipNorm(CLIP)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE / len(y))
    trained = [p for p in model.parameters() if p.requires_grad]

    def step() -> None:
        total = gradient.bounded_sum(examples, None, bound)
        for p, view in zip(trained, gradient.layout.views(total), strict=True):
            p.grad = view
        optimizer.step()

    return step


def trained(make: Callable[[nn.Module], torch.optim.Optimizer], model: nn.Module, x: Tensor) -> Step:
    """Make a step of `train` on learnable targets; an optimizer's own bound, if any, is the clipping rule."""
    size, teacher = len(x), torch.randn(x.shape[1], 10)
    x = torch.randn(10 * size, x.shape[1])
    method = make(model)
    training = ft.torch.train(
        *(model, losses, (x, (x @ teacher).argmax(1)), ft.Ledger(ft.Budget(200.0, 1e-5))),
        sampling_rate=0.1,
        noise_multiplier=NOISE,
        physical_batch_size=2 * size,
        optimizer=method,
        clip_norm=getattr(method, "bound", CLIP),
    )
    return partial(next, training)


def adadp(rounds: int, clock: Callable[[], float]) -> None:
    """Compare AdaDP's steps with those of DP-SGD, on the MLP."""
    torch.manual_seed(0)
    build, inputs, size = MODELS["mlp"]
    makers: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        "DP-SGD": lambda model: torch.optim.SGD(model.parameters(), LEARNING_RATE),
        "AdaDP, ellipsoid": lambda model: AdaDP(model, 0.001),
        "AdaDP, box": lambda model: AdaDP(model, 0.001, shape="box"),
    }
    steps = {name: trained(make, build(), inputs(size)) for name, make in makers.items()}
    for step in steps.values():
        for _ in range(12):  # AdaDP's scale is found after ten
            step()
    times = timed(steps, rounds, 30, clock)
    base = times["DP-SGD"]
    print(f"adadp: a step of DP-SGD takes {1e3 * median(base):.2f} ms; AdaDP's at most 1.90 times that")
    for name, found in times.items():
        ratio = median(one / other for one, other in zip(found, base, strict=True))
        print(f"  {name:16s} {ratio:6.2f}  (quickest {min(found) / min(base):.2f})")


def timed(
    steps: dict[str, Step], rounds: int, repeats: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return seconds a step, all methods alternating, so that load affects all alike."""
    times: dict[str, list[float]] = {method: [] for method in steps}
    for _ in range(rounds):
        for method, step in steps.items():
            gc.collect()
            start = clock()
            for _ in range(repeats):
                step()
            times[method].append((clock() - start) / repeats)
    return times


def opacus(mode: str, model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Make a step of Opacus's optimizer with its hooks or its ghost norms."""
    from opacus import GradSampleModule
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
    from opacus.validators import ModuleValidator

    model = ModuleValidator.fix(model)
    plain = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    settings = {"noise_multiplier": NOISE, "max_grad_norm": CLIP, "expected_batch_size": len(y)}
    if mode == "hooks":
        wrapped = GradSampleModule(model)
        optimizer = DPOptimizer(plain, **settings)

        def step() -> None:
            optimizer.zero_grad()
            losses(wrapped(x), y).mean().backward()
            optimizer.step()
    else:
        ghost = GradSampleModuleFastGradientClipping(model, max_grad_norm=CLIP, use_ghost_clipping=True)
        optimizer = DPOptimizerFastGradientClipping(plain, **settings)
        criterion = DPLossFastGradientClipping(ghost, optimizer, nn.CrossEntropyLoss())

        def step() -> None:
            optimizer.zero_grad()
            criterion(ghost(x), y).backward()
            optimizer.step()

    return step


def mapped(compiled: bool, model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Make a step by torch.func: vmap of grad, clip, sum, noise, update."""
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return losses(functional_call(model, weights, (x[None],)), y[None]).sum()

    def summed(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        found = vmap(grad(one), (None, 0, 0))(weights, x, y)
        squares = sum(g.flatten(1).square().sum(1) for g in found.values())
        factors = (CLIP / squares.sqrt()).clamp(max=1.0)
        return {name: torch.einsum("b,b...->...", factors, g) for name, g in found.items()}

    run = torch.compile(summed) if compiled else summed

    def step() -> None:
        for name, total in run(weights, x, y).items():
            noisy = total + CLIP * NOISE * torch.randn_like(total)
            weights[name].sub_(noisy, alpha=LEARNING_RATE / len(y))

    return step


METHODS: dict[str, Callable[[nn.Module, Tensor, Tensor], Step]] = {
    "ordinary": ordinary,
    "ours": ours,
    "ours, sum only": bare,
    "Opacus hooks": partial(opacus, "hooks"),
    "Opacus ghost": partial(opacus, "ghost"),
    "vmap": partial(mapped, False),
    "vmap compiled": partial(mapped, True),
}


def made(name: str, method: str) -> Step:
    """Return a step of a method, with its own copy of the model, ready."""
    torch.manual_seed(0)
    build, inputs, size = MODELS[name]
    step = METHODS[method](copy.deepcopy(build()), inputs(size), torch.randint(0, 10, (size,)))
    for _ in range(3):
        step()
    return step


def warm(step: Step) -> None:
    """Run forty steps, or five seconds: convolutions are prepared anew for every new batch size."""
    end = time.perf_counter() + 5.0
    for _ in range(40):
        if time.perf_counter() > end:
            return
        step()


def speed(name: str, rounds: int, clock: Callable[[], float]) -> None:
    """Time all methods on one model."""
    steps: dict[str, Step] = {}
    for method in METHODS:
        try:
            steps[method] = made(name, method)
        except Exception as error:
            print(f"  {method} is left out: {type(error).__name__}: {str(error).splitlines()[0][:90]}")
    for step in steps.values():
        warm(step)
    start = clock()
    steps["ordinary"]()
    repeats = max(1, int(0.2 / (clock() - start)))
    Timed.seconds = 0.0
    times = timed(steps, rounds, repeats, clock)
    base = median(times["ordinary"])
    print(f"{name}: an ordinary step takes {1e3 * base:.2f} ms; ours at most {TARGETS[name]:.2f} times that")
    for method, found in times.items():
        ratio = median(one / other for one, other in zip(found, times["ordinary"], strict=True))
        share = ""
        if method == "ours":
            noise = Timed.seconds / (rounds * repeats)
            share = f"  of which noise {noise / base:.3f}"
        print(f"  {method:16s} {ratio:6.2f}  (quickest {min(found) / min(times['ordinary']):.2f}){share}")


def memory(name: str, threads: int) -> None:
    """Measure the peak memory of a step above its process's level before, in processes of their own."""
    found = {}
    for method in METHODS:
        command = [sys.executable, "-m", "benchmarks.deep", "--peak", name, method, "--threads", str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.stdout:
            found[method] = float(done.stdout.split()[-1])
    base = found["ordinary"]
    print(f"  peak memory (ordinary {base:.0f} MiB): ", end="")
    print(", ".join(f"{method} {peak / base:.2f}" for method, peak in found.items() if method != "ordinary"))


def peak(name: str, method: str) -> None:
    """Print the peak memory of a step above the level before, in MiB (Linux)."""
    torch.manual_seed(0)
    build, inputs, size = MODELS[name]
    model, x, y = build(), inputs(size), torch.randint(0, 10, (size,))
    with suppress(RuntimeError):  # libraries, threads, accounting; Opacus fails on 8 examples of 64 tokens
        METHODS[method](copy.deepcopy(model), x[:8], y[:8])()
    step = METHODS[method](model, x, y)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    for _ in range(4):
        step()
    print(_status("VmHWM") - before, flush=True)


def _status(field: str) -> float:
    """Return a figure of this process's status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) / 1024


def checks() -> None:
    """Try three models whose per-example gradients no bound applies to."""

    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(torch.tanh(self.fc(x)), self.fc.weight)

    x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
    print("what must be refused: by us, by Opacus")
    for what, model, loss in (
        ("batch statistics", nn.Sequential(nn.Linear(8, 8), Centred()), losses),
        ("a weight used past its module", Reused(), losses),
        ("a loss divided by the batch", nn.Linear(8, 8), lambda out, y: losses(out, y) / len(y)),
    ):
        try:
            Gradient(model, loss).check(x, y)
            us = "passed"
        except ft.FarthingError as error:
            us = f"refused ({error})"
        try:
            from opacus import PrivacyEngine
            from torch.utils.data import DataLoader, TensorDataset

            loader = DataLoader(TensorDataset(x, y), batch_size=8)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            wrapped, optimizer, loader = PrivacyEngine().make_private(
                module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
            )
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss(wrapped(inputs), targets).mean().backward()
                optimizer.step()
            them = "passed"
        except Exception as error:
            them = f"refused ({type(error).__name__})"
        print(f"  {what}: ours {us}; Opacus {them}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", default=[*MODELS, "adadp", "checks"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--peak", nargs=2, metavar=("MODEL", "METHOD"))
    given = parser.parse_args([] if arguments is None else arguments)
    warnings.simplefilter("ignore")  # Opacus' and torch.compile's
    threads = 1 if given.busy else given.threads
    torch.set_num_threads(threads)
    if given.peak:
        peak(*given.peak)
        return
    print(f"torch {torch.__version__}, {threads} threads; ratios to an ordinary step")
    clock = time.process_time if given.busy else time.perf_counter
    for name in given.names:
        if name == "checks":
            checks()
            continue
        if name == "adadp":
            adadp(given.rounds, clock)
            continue
        speed(name, given.rounds, clock)
        if not given.no_memory:
            memory(name, given.threads)


if __name__ == "__main__":
    main(sys.argv[1:])
