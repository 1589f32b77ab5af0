"""Weigh the tensors that are alive in a private step, beside an ordinary one: peak bytes, and who made them.

python benchmarks/live_memory.py [names ...] [--precision float32 bf16] [--large | --further | --latest]
                                 [--top 8] [--memory balanced]

On any device, a CPU included: every storage is weighed when an operator makes it, until it is freed. So the
peak is the same in every run, and each tensor that is alive at the peak is named by its shape and by the line
of ours, of the model or of torch that made it. What a library allocates inside an operator is not seen, nor
what a CUDA graph or an allocator keeps: `benchmarks.unseen` measures that on a GPU.
"""

import argparse
import gc
import sys
import traceback
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
for place in (ROOT, ROOT / "src"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_iter  # noqa: E402

_QUIET = ("site-packages/", "contextlib.py", "live_memory.py", "functools.py")


class LiveBytes(TorchDispatchMode):
    """A context in which the storages that operators make are weighed: ``peak``, in bytes, and `held` then.

    >>> with LiveBytes() as live:
    ...     kept = torch.ones(1000)
    ...     _ = torch.ones(2000).sum()
    >>> live.peak, live.now
    (12008, 4004)
    """

    def __init__(self, named: bool = False, least: int = 1 << 14) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._named, self._least = named, least
        self._alive: dict[int, tuple[int, str]] = {}
        self._at_peak: Counter[str] = Counter()
        self._noted = 0  # the peak of which `held` tells

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {id(value.untyped_storage()) for value in _tensors((args, kwargs))}
        for value in _tensors(out):
            self._weigh(value, func, given)
        return out

    def _weigh(self, value: Tensor, func: Any, given: set[int]) -> None:
        storage = value.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._alive or key in given or not size:  # a view is not made anew
            return
        name = ""
        if self._named and size >= self._least:
            name = f"{value.dtype}{list(value.shape)} {func} {_place()}".replace("torch.", "")
        self._alive[key] = size, name
        weakref.finalize(storage, self._freed, key)
        self.now += size
        if self.now > self.peak:
            self.peak = self.now
            if self._named and self.now > 1.01 * self._noted:
                self._noted, self._at_peak = self.now, Counter()
                for bytes_, made in self._alive.values():
                    self._at_peak[made] += bytes_

    def _freed(self, key: int) -> None:
        self.now -= self._alive.pop(key)[0]

    def restart(self) -> None:
        """Begin the peak anew: what is alive goes on counting."""
        self.peak, self._noted, self._at_peak = self.now, 0, Counter()

    def held(self, most: int = 8) -> list[tuple[str, int]]:
        """Return who made what was alive at the peak, the largest first."""
        return self._at_peak.most_common(most)


def _tensors(values: Any) -> list[Tensor]:
    return [
        value for value in tree_iter(values) if isinstance(value, Tensor) and value.layout is torch.strided
    ]


def _place() -> str:
    """Return the innermost lines outside of torch."""
    frames = [f for f in traceback.extract_stack()[:-3] if not any(part in f.filename for part in _QUIET)]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-3:]))


def peak_of(step: Any, steps: int = 3, named: bool = False) -> tuple[LiveBytes, int]:
    """Return what steps weigh, the first and what it makes for good included, and the check before them."""
    gc.collect()
    with LiveBytes(named) as live:
        if hasattr(step, "check"):
            step.check()
            gc.collect()
        check = live.peak
        live.restart()
        for _ in range(steps):
            step()
    return live, check


def batch_bytes(case: Any) -> int:
    """Return the bytes of a batch: ours gathers it, as an ordinary loop does, which is given it here."""
    return sum(part.nbytes for part in case.data(torch.device("cpu")))


def main() -> None:
    from benchmarks import unseen
    from benchmarks.further_models import FURTHER
    from benchmarks.latest_models import LATEST
    from benchmarks.unseen_models import LARGE, SMALL

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--precision", nargs="*", default=["float32"])
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--further", action="store_true")
    parser.add_argument("--latest", action="store_true")
    parser.add_argument("--top", type=int, default=8)
    parser.add_argument("--memory", default="balanced")
    asked = parser.parse_args()
    cases = LARGE if asked.large else FURTHER if asked.further else SMALL
    cases = LATEST if asked.latest else cases
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in asked.names or list(cases):
        for precision in asked.precision:
            peaks, checks = {}, {}
            for method, how in unseen.METHODS.items():
                step = unseen.made(cases[name], how, device, precision, asked.memory)
                peaks[method], checks[method] = peak_of(step, named=asked.top > 0)
                del step
            base = peaks["ordinary"].peak + batch_bytes(cases[name])
            ours = peaks["farthing"].peak / base
            check = f"its check {checks['farthing'] / base:.2f}"
            print(
                f"{name:13} {precision:8} {base / 2**20:8.1f} MiB  farthing {ours:.2f}, {check}", flush=True
            )
            for method, live in peaks.items() if asked.top else ():
                print(f"    {method}")
                for made, size in live.held(asked.top):
                    print(f"      {size / 2**20:8.2f} MiB {made}")


if __name__ == "__main__":
    main()
