"""Run the list of mutants, or a part of it, and report those that no test detected."""

import argparse
import os
import signal
import sys
import time
from collections import Counter

from tools.mutants import runner
from tools.mutants.catalog import ROOT, Mutant, load


def main() -> int:
    given = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that started processes are ended
    every = [mutant for mutant in load() if given.only in mutant.name and given.file in mutant.file]
    chosen = [mutant for mutant in every if not mutant.equivalent]
    keeper = runner.Keeper(ROOT, ROOT / "build" / "mutants.json")
    found = [known for mutant in chosen if (known := keeper.find(mutant)) and not given.again]
    if given.survivors:
        found = [known for known in found if known.verdict != runner.SURVIVED]
    done, begun = {known.mutant for known in found}, time.monotonic()
    rest = [mutant for mutant in chosen if mutant not in done]
    print(f"{len(chosen)} mutants, {len(done)} of them known from before", flush=True)
    if rest:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        runner.warm_up()
        if not given.trust:
            _must_pass_unchanged(rest, given.workers, given.seconds)
    for outcome in runner.run(rest, ROOT, given.workers, given.seconds):
        found.append(outcome)
        if outcome.verdict != runner.BROKEN:
            keeper.keep(outcome)
        print(f"{outcome.verdict:9} {outcome.seconds:6.1f} s  {outcome.mutant.name}", flush=True)
        if outcome.verdict == runner.BROKEN:
            print(outcome.said, flush=True)
    return _summary(found, len(every) - len(chosen), time.monotonic() - begun)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose name (file: old -> new) contains this")
    parser.add_argument("--file", default="", help="mutants of files whose path contains this")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600.0, help="that one mutant may take")
    parser.add_argument("--again", action="store_true", help="run those as well whose outcome is known")
    parser.add_argument("--survivors", action="store_true", help="run those again that survived")
    parser.add_argument("--trust", action="store_true", help="do not first run the tests unchanged")
    return parser.parse_args()


def _must_pass_unchanged(mutants: list[Mutant], workers: int, seconds: float) -> None:
    """Check each selection of tests once without a bug: tests that fail anyway would kill every mutant."""
    kinds = {mutant.tests: mutant for mutant in mutants}
    same = [Mutant(one.file, one.old, one.old, "nothing", tests) for tests, one in kinds.items()]
    for outcome in runner.run(same, ROOT, workers, seconds):
        print(f"unchanged {outcome.seconds:6.1f} s  {outcome.mutant.tests}", flush=True)
        if outcome.verdict != runner.SURVIVED:
            print(outcome.said)
            sys.exit("these tests do not pass as they are (or take too long)")


def _summary(found: list[runner.Outcome], equivalent: int, took: float) -> int:
    counts = Counter(outcome.verdict for outcome in found)
    for outcome in found:
        if outcome.verdict in (runner.SURVIVED, runner.BROKEN):
            print(f"{outcome.verdict}: {outcome.mutant.name}\n    it breaks: {outcome.mutant.breaks}")
    killed = counts[runner.KILLED] + counts[runner.SLOW]
    valid = killed + counts[runner.SURVIVED]
    print(f"{killed} of {valid} killed ({killed / max(1, valid):.1%}) in {took:.0f} s; "
          f"{equivalent} more are equivalent, {counts[runner.BROKEN]} broken")  # fmt: skip
    return 0 if killed == valid and not counts[runner.BROKEN] else 1


if __name__ == "__main__":
    sys.exit(main())
