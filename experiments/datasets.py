"""Tables for experiments: those of the papers where they are at hand, and Adult, which farthing ships.

A data set is X, features in [0, 1], and y. Folders are as `farthing.data.schema.find` looks for them. In
small mode everything is Adult as farthing encodes it, the first few thousand records, so that it runs
anywhere.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.frame import Size, say
from farthing.data.adult import load_adult
from farthing.data.schema import find

Array = NDArray[Any]
Data = tuple[Array, Array]

CLASSIFY = {"Adult": "adult_a9a.npz", "BANK": "bank.npz", "IPUMS-BR": "ipums_br.npz"}
KDD = "KDDCup99"  # its 10 %, attacks against normal connections
FILES = {**CLASSIFY, KDD: "kddcup99_10pct.npz"}
CENSUS = "census income"
_ALL = {**FILES, CENSUS: "census_income_kdd.npz"}
SMALL, FEW = "Adult, 5,000 records", 5000


def classification(small: bool, names: Iterable[str] = tuple(CLASSIFY)) -> dict[str, Data]:
    """The three tables of A-DDP and DP-AGD (Adult as LIBSVM's a9a has it), as far as they are there.

    Without its file Adult is farthing's own encoding of the same records.
    """
    if small:
        adult = load_adult()
        return {SMALL: (adult.X[:FEW], adult.y[:FEW].astype(np.float64))}
    found = {}
    for name in names:
        path = find(file := _ALL[name])
        if path is not None:
            with np.load(path) as data:
                if "X" in data:
                    X, y = data["X"], data["y"]
                else:
                    X = np.concatenate([data["X_train"], data["X_test"]])
                    y = np.concatenate([data["y_train"], data["y_test"]])
            found[name] = X, y.astype(np.float64)
        elif name == "Adult":
            say(f"no {file}: Adult as farthing encodes it")
            adult = load_adult()
            found[name] = adult.X, adult.y.astype(np.float64)
        else:
            say(f"{name} is left out: there is no {file} in the folder that FARTHING_DATA names")
    return found


def folds(n: int, size: Size, full: int, of: int = 5) -> Iterator[tuple[int, Array, Array]]:
    """The fold's number, rows to learn from and rows to test on: ``full`` of ``of`` folds unless told.

    A repeat shuffles anew and goes on counting: its first fold is number ``of``.
    """
    for repeat in range(size.repeats_or(1)):
        order = np.random.default_rng(repeat).permutation(n)
        for fold in range(size.folds_or(full)):
            yield repeat * of + fold, np.delete(order, np.s_[fold::of]), order[fold::of]
