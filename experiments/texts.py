"""Text for experiments: the next character of documentation strings, from the eight before it.

The text is that of Python's own standard library, which every installation has: the documentation strings of
its modules, classes and functions, file by file. Other versions of Python have other texts.
"""

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ALPHABET = "\n !\"#%&'()*+,-./0123456789:;<=>?@[]_`abcdefghijklmnopqrstuvwxyz|~"  # the rest is a blank
CONTEXT = 8  # characters that are seen


def documentation() -> Iterator[tuple[str, str]]:
    """Every file of the standard library with its documentation strings, in order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" in name or "/test" in name or name.startswith("test"):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        said = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
        if text := "\n".join(filter(None, said)):
            yield name, text


def windows(text: str) -> NDArray[np.uint8]:
    """Numbers of characters, nine a row: eight to see, one to guess; rows do not overlap."""
    places = {character: place for place, character in enumerate(ALPHABET)}
    blank = places[" "]
    found = np.array([places.get(character, blank) for character in text.lower()], np.uint8)
    return found[: len(found) // (CONTEXT + 1) * (CONTEXT + 1)].reshape(-1, CONTEXT + 1)


def parts(count: int, names: tuple[str, ...]) -> dict[str, NDArray[np.uint8]]:
    """At most ``count`` windows for every name, each from files of its own."""
    rows: dict[str, list[NDArray[np.uint8]]] = {name: [] for name in names}
    for path, text in documentation():
        place = hashlib.sha256(path.encode()).digest()[0] % len(names)
        rows[names[place]].append(windows(text))
        if all(sum(map(len, some)) >= count for some in rows.values()):
            break
    shuffled = np.random.default_rng(0)
    found = {name: np.concatenate(some) for name, some in rows.items()}
    return {name: shuffled.permutation(some)[:count] for name, some in found.items()}
