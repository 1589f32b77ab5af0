"""Run every benchmark in turn (``make bench``). Each prints ratios measured in this run."""

import importlib
import pkgutil

import benchmarks

for module in sorted(
    info.name for info in pkgutil.iter_modules(benchmarks.__path__) if info.name != "__main__"
):
    print(f"\n== {module} ==", flush=True)
    importlib.import_module(f"benchmarks.{module}").main()
