"""Read the list of mutants from the TOML files beside this module."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCE = Path("src") / "farthing"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A mutant: ``old`` in ``file`` (below src/farthing) becomes ``new``; one of ``tests`` should fail."""

    file: str
    old: str
    new: str
    breaks: str
    tests: str
    equivalent: bool = False

    @property
    def name(self) -> str:
        return f"{self.file}: {self.old} -> {self.new}"

    def applied(self, text: str) -> str:
        """Return the source with the bug; ValueError where the fragment does not occur exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(f"occurs {text.count(self.old)} times, not once: {self.name}")
        return text.replace(self.old, self.new)


def load(folder: Path = HERE) -> list[Mutant]:
    """Return every mutant, including those equivalent to the source."""
    found = list[Mutant]()
    for path in sorted(folder.glob("*.toml")):
        for file, table in tomllib.loads(path.read_text(encoding="utf-8")).items():
            for row in table.get("mutants", []):
                old, new, breaks, tests = [*row, table["tests"]][:4]
                found.append(Mutant(file, old, new, breaks, tests))
            for old, new, why in table.get("equivalent", []):
                found.append(Mutant(file, old, new, why, "", equivalent=True))
    return found
