"""``python -m experiments NAME [--small] [--folds N] [--repeats N] [--out DIR]``: its table and its figure.

Without a name it lists what there is. ``--draw`` makes table and figure anew from a NAME.csv in DIR. Exit
codes: 0 done, 2 unknown name, folds or repeats that the experiment does not have, a folder that cannot be
written, data or a package that is missing.
"""

import argparse
import sys
import time
from pathlib import Path

from experiments import frame

FOLDS = 5  # of each repeat


def main(arguments: list[str]) -> int:
    known = frame.names()
    listed = "\n".join(f"  {name:22}{title}" for name, title in known.items())
    parser = argparse.ArgumentParser(
        "python -m experiments",
        description="What papers report, computed again.",
        epilog=f"experiments:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?")
    parser.add_argument("--small", action="store_true", help="a version that takes seconds")
    parser.add_argument("--folds", type=_folds, metavar="N", help=f"the first N of {FOLDS} folds")
    parser.add_argument("--repeats", type=_count, metavar="N", help="how often, with other noise and folds")
    parser.add_argument("--out", type=Path, default=Path("build/experiments"), help="the folder to write to")
    parser.add_argument("--draw", action="store_true", help="from the rows that are there, without measuring")
    given = parser.parse_args(arguments)
    if given.name is None:
        print(listed)
        return 0
    if given.name not in known:
        frame.say(f"experiments: there is no {given.name!r}; one of: {', '.join(known)}")
        return 2
    size, begun = frame.Size(given.small, given.folds, given.repeats), time.perf_counter()
    try:
        experiment = frame.load(given.name)
        given.out.mkdir(parents=True, exist_ok=True)  # before an hour's work, not after it
        kept = given.out / f"{given.name}.csv"
        rows = frame.read(kept) if given.draw else experiment.measure(size)
    except (ImportError, OSError, frame.SizeError) as error:
        frame.say(f"experiments: {given.name} cannot run here: {error}")
        return 2
    for path in frame.write(given.name, known[given.name], rows, experiment, given.out, size):
        print(path)
    frame.say(f"{time.perf_counter() - begun:.0f} s")
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _folds(text: str) -> int:
    if _count(text) > FOLDS:
        raise argparse.ArgumentTypeError(f"{text} is more than the {FOLDS} folds that there are")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
