"""Time private steps of fourteen models that nobody tuned for, by turns with ordinary ones; Opacus beside.

python benchmarks/unseen.py [names ...] [--device cuda] [--small | --further | --untried | --latest] [--peers]
                            [--check] [--precision float32 tf32 bf16] [--profile] [--tuning]
                            [--seconds 2] [--memory balanced] [--out FILE]

An ordinary step is zero_grad, forward, mean loss, backward and the optimiser (SGD with momentum, or AdamW
where people take that); a private one is the sum of clipped gradients, lattice noise and the same optimiser,
as `train` makes it. Both alternate in blocks, and a ratio is the median over pairs of blocks. On a GPU the
busy time of its kernels is compared as well ("gpu"), for where Python sets the pace, and peak memory of
each in a model of its own, choosing routes and capturing graphs included, with the optimiser's state.
``--tuning`` leaves the four held-out models out (`benchmarks.unseen_models.HELD_OUT`); ``--profile`` lists
the operators that take longest, of ours and of the ordinary step; ``--check --small`` compares sums with one
example at a time instead of timing them.
"""

import argparse
import contextlib
import copy
import gc
import inspect
import json
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
for place in (ROOT, ROOT / "src"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks import further_models, latest_models, untried_models  # noqa: E402
from benchmarks.unseen_models import HELD_OUT, LARGE, SMALL, Case  # noqa: E402
from farthing.noise.lattice import Stream  # noqa: E402
from farthing.queries.bounds import ClipNorm  # noqa: E402
from farthing.torch.gradients.bookkeeping import Gradient  # noqa: E402
from farthing.torch.gradients.tape import call, mapped  # noqa: E402
from farthing.torch.kernels.noise import TensorGaussian  # noqa: E402
from farthing.torch.training.records import Examples  # noqa: E402

Step = Callable[[], Any]
HELD = (*HELD_OUT, *further_models.HELD_OUT, *latest_models.HELD_OUT)


class OneBatch:
    """A batch that is on the device already, as for an ordinary step."""

    def __init__(self, x: Any, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def physical_batches(self, physical: int | None = None) -> Any:
        step = physical or len(self.y)
        for start in range(0, len(self.y), step):
            yield *some((self.x, self.y), slice(start, start + step)), None


def some(values: Any, part: slice) -> Any:
    return mapped(values, lambda value: value[part])


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if case.adam:
        return torch.optim.AdamW(trained, lr=1e-5, fused=trained[0].is_cuda or None)
    return torch.optim.SGD(trained, lr=1e-3, momentum=0.9)


def mixed(device: torch.device, precision: str) -> Any:
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


def ordinary(case: Case, model: nn.Module, x: Any, y: Tensor, precision: str, _: str) -> Step:
    optimizer = optimizer_of(case, model)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with mixed(y.device, precision):
            loss = case.loss(call(model, x), y).mean()
        loss.backward()
        optimizer.step()

    return step


def private(case: Case, model: nn.Module, x: Any, y: Tensor, precision: str, memory: str) -> Step:
    autocast = torch.bfloat16 if precision == "bf16" else None
    more = {"memory": memory} if "memory" in inspect.signature(Gradient).parameters else {}
    gradient = Gradient(model, case.loss, autocast=autocast, expected_batch_size=len(y), **more)
    bound = ClipNorm(1.0)
    optimizer, mechanism, stream = optimizer_of(case, model), TensorGaussian(0.5), Stream()
    trained = [p for p in model.parameters() if p.requires_grad]
    batch: Any = (
        OneBatch(x, y)
        if y.is_cuda
        else Examples((*x, y) if isinstance(x, tuple) else (x, y)).take(slice(None))
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        total = mechanism.release(gradient.bounded_sum(batch, None, bound), bound, stream)
        for p, view in zip(trained, gradient.layout.views(total.div_(len(y))), strict=True):
            p.grad = view
        del total, view
        optimizer.step()

    step.gradient = gradient  # type: ignore[attr-defined]
    step.check = lambda: gradient.check(*some((x, y), slice(1)))  # type: ignore[attr-defined]
    return step


def opacus(mode: str) -> Callable[..., Step]:
    """Return a maker of Opacus's steps, by hooks or by ghost norms."""

    def make(case: Case, model: nn.Module, x: Any, y: Tensor, precision: str, _: str) -> Step:
        from opacus import GradSampleModule
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
        from opacus.validators import ModuleValidator

        for module in model.modules():
            if getattr(module, "inplace", False):  # its hooks hand out views, which may not be overwritten
                module.inplace = False
        model = (model if ModuleValidator.is_valid(model) else ModuleValidator.fix(model)).train()
        plain = optimizer_of(case, model)
        settings = {"noise_multiplier": 0.5, "max_grad_norm": 1.0, "expected_batch_size": len(y)}
        if mode == "hooks":
            wrapped: Any = GradSampleModule(model)
            optimizer: Any = DPOptimizer(plain, **settings)

            def step() -> None:
                optimizer.zero_grad(set_to_none=True)
                with mixed(y.device, precision):
                    loss = case.loss(call(wrapped, x), y).mean()
                loss.backward()
                optimizer.step()

            return step
        wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, use_ghost_clipping=True)
        optimizer = DPOptimizerFastGradientClipping(plain, **settings)

        def ghost() -> None:  # what DPLossFastGradientClipping does, for a loss of one's own
            optimizer.zero_grad(set_to_none=True)
            with mixed(y.device, precision):
                each = case.loss(call(wrapped, x), y)
            each.mean().backward(retain_graph=True)
            optimizer.zero_grad(set_to_none=True)
            factors = wrapped.get_clipping_coef()
            wrapped.disable_hooks()
            (each * factors).sum().backward()
            wrapped.enable_hooks()
            optimizer.step()

        return ghost

    return make


METHODS: dict[str, Callable[..., Step]] = {"ordinary": ordinary, "farthing": private}
PEERS: dict[str, Callable[..., Step]] = {"hooks": opacus("hooks"), "ghost": opacus("ghost")}


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory(device: torch.device, peak: bool = False) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def made(case: Case, how: Callable[..., Step], device: torch.device, precision: str, space: str) -> Step:
    torch.manual_seed(0)
    with torch.device(device):
        model = case.make()
    return how(case, model.to(device).train(), *case.data(device), precision, space)


def block(step: Step, count: int, device: torch.device) -> float:
    """Return milliseconds of one step: on a CPU the process's own, whatever else the machine does."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    sync(device)
    start = clock()
    for _ in range(count):
        step()
    sync(device)
    return (clock() - start) * 1e3 / count


def busy(step: Step) -> float:
    """Return the milliseconds that a GPU's kernels take in one step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    kernels = (row for row in found.key_averages() if row.device_type == torch.autograd.DeviceType.CUDA)
    return sum(row.self_device_time_total for row in kernels) / 2e3


def profiled(step: Step, device: torch.device, rows: int = 22) -> str:
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=kinds) as found:
        for _ in range(2):
            step()
        sync(device)
    name = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    lines = []
    for row in sorted(found.key_averages(), key=lambda row: -getattr(row, name))[:rows]:
        lines.append(f"      {getattr(row, name) / 2e3:9.3f} ms {row.count / 2:7.1f} x {row.key[:90]}")
    return "\n".join(lines)


def compared(name: str, case: Case, precision: str, asked: Any, device: torch.device) -> dict[str, Any]:
    """Return times, ratios and peaks of all methods on one model."""
    row: dict[str, Any] = {"model": name, "precision": precision, "held_out": name in HELD}
    steps: dict[str, Step] = {}
    methods = METHODS | (PEERS if asked.peers and precision != "bf16" else {})
    for method, how in methods.items():
        free(device)
        before = memory(device)
        try:
            steps[method] = made(case, how, device, precision, asked.memory)
            if hasattr(steps[method], "check"):
                begun = time.perf_counter()
                steps[method].check()
                row["check s"] = round(time.perf_counter() - begun, 1)
                row["check MiB"] = round((memory(device, peak=True) - before) / 2**20)
                free(device)
            for _ in range(5):
                steps[method]()
            sync(device)
            row[f"{method} MiB"] = round((memory(device, peak=True) - before) / 2**20)
        except Exception as error:
            row[f"{method} failed"] = f"{type(error).__name__}: {error}"[:160]
            steps.pop(method, None)
            if method in METHODS:
                traceback.print_exc()
    times = by_turns(steps, asked.seconds, device)
    for method, found in times.items():
        row[method] = statistics.median(found)
        if method != "ordinary":
            pairs = zip(found, times["ordinary"], strict=True)
            row[f"{method} ratio"] = statistics.median(a / b for a, b in pairs)
            row[f"{method} quickest"] = min(found) / min(times["ordinary"])
    for method in METHODS if device.type == "cuda" else ():
        if method in steps:
            row[f"{method} gpu"] = busy(steps[method])
    if asked.profile and name not in HELD:
        for method in METHODS:
            print(f"    {name} {precision} {method}\n{profiled(steps[method], device)}")
        gradient = getattr(steps["farthing"], "gradient", None)
        print("    routes", _routes(gradient))
    return row


def _routes(gradient: Any) -> str:
    found: dict[str, int] = {}
    for (slot, _), route in gradient._ways.routes.items():
        shape = gradient.layout.shapes[slot[0] if isinstance(slot, tuple) else slot]
        found[f"{shape} {route}"] = found.get(f"{shape} {route}", 0) + 1
    return str(found)


def by_turns(steps: dict[str, Step], seconds: float, device: torch.device) -> dict[str, list[float]]:
    """Time all steps block by block, a good many times."""
    once = {method: block(step, 1, device) for method, step in steps.items()}
    rounds = 9
    if device.type != "cuda":  # one step each, as many rounds as there is time for
        rounds = max(7, min(101, int(1e3 * seconds / sum(once.values()))))
    counts = {method: max(1, int(1e3 * seconds / rounds / took)) for method, took in once.items()}
    found: dict[str, list[float]] = {method: [] for method in steps}
    for _ in range(rounds):
        for method, step in steps.items():
            found[method].append(block(step, min(counts.values()) if device.type == "cuda" else 1, device))
    return found


def shown(row: dict[str, Any]) -> str:
    mark = "*" if row["held_out"] else " "
    text = f"{row['model']:22}{mark}{row['precision']:8} ordinary {row.get('ordinary', 0):9.2f} ms"
    for method in ("farthing", "hooks", "ghost"):
        if f"{method} ratio" in row:
            text += f"  {method} {row[f'{method} ratio']:.2f} ({row[f'{method} quickest']:.2f})"
        elif f"{method} failed" in row:
            text += f"  {method} failed"
    if row.get("farthing gpu") and row.get("ordinary gpu"):
        text += f"  gpu {row['farthing gpu'] / row['ordinary gpu']:.2f} of {row['ordinary gpu']:.2f} ms"
    if row.get("ordinary MiB"):
        base = row["ordinary MiB"]
        text += f"  MiB {base}"
        for method in ("farthing", "hooks", "ghost"):
            if row.get(f"{method} MiB"):
                text += f" {method} {row[f'{method} MiB'] / base:.2f}"
        text += f" (its check {row['check MiB'] / base:.2f}, {row['check s']} s)" if "check s" in row else ""
    return text


def right(name: str, case: Case, precision: str, device: torch.device) -> str:
    """Compare the sum of clipped gradients with ordinary autograd on one example at a time.

    In float64 for float32; in the same mixed precision otherwise, where the reference rounds as much.
    """
    from farthing.torch.checks.probe import Calm

    torch.manual_seed(0)
    model = case.make().to(device).train()
    x, y = some(case.data(device), slice(6))
    plain = copy.deepcopy(model).double() if precision == "float32" else model
    trained = [p for p in plain.parameters() if p.requires_grad]
    full = precision == "float32"
    x_plain = mapped((x, y), lambda v: v.double() if full and v.is_floating_point() else v)
    rows = []
    with torch.backends.cudnn.flags(enabled=False, allow_tf32=True), Calm():
        for n in range(len(y)):
            with mixed(device, precision):
                inputs, targets = some(x_plain, slice(n, n + 1))
                loss = case.loss(call(plain, inputs), targets).sum()
            found = torch.autograd.grad(loss, trained, allow_unused=True)
            parts = zip(found, trained, strict=True)
            rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in parts]))
    flat = torch.stack(rows).double()
    clip = float(flat.norm(dim=1).median())
    expected = ((clip / flat.norm(dim=1).clamp_min(clip))[:, None] * flat).sum(0)
    gradient = Gradient(model, case.loss, autocast=torch.bfloat16 if precision == "bf16" else None)
    with Calm():
        got = [gradient.bounded_sum(OneBatch(x, y), None, ClipNorm(clip)) for _ in range(4)]
    errors = [float((one - expected).norm() / expected.norm()) for one in got]
    most = {"float32": 1e-5, "tf32": 0.05, "bf16": 0.05}[precision]
    return f"{name:22} {precision:8} {'right' if max(errors) < most else 'WRONG'} {max(errors):.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--further", action="store_true")
    parser.add_argument("--untried", action="store_true")
    parser.add_argument("--latest", action="store_true")
    parser.add_argument("--precision", nargs="*", default=["float32"])
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tuning", action="store_true")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--memory", default="balanced")
    parser.add_argument("--out")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    device = torch.device(asked.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    cases = SMALL if asked.small or device.type == "cpu" else LARGE
    cases = further_models.FURTHER if asked.further else cases
    cases = untried_models.UNTRIED if asked.untried else cases
    cases = latest_models.LATEST if asked.latest else cases
    rows = []
    for name, case in cases.items():
        if (asked.names and name not in asked.names) or (asked.tuning and name in HELD):
            continue
        for precision in asked.precision:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"
            try:
                if asked.check:
                    print(right(name, case, precision, device), flush=True)
                    continue
                row = compared(name, case, precision, asked, device)
            except Exception:
                traceback.print_exc()
                continue
            rows.append(row)
            print(shown(row), flush=True)
            if asked.out:
                Path(asked.out).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
