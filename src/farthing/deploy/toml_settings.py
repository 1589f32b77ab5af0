"""Read settings from a TOML file entry by entry: a missing, mistyped or unknown entry is an error.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "run.toml"
>>> _ = path.write_text('run = "r1"\\nrounds = "many"\\n')
>>> settings = Settings.load(path)
>>> settings.text("run")
'r1'
>>> settings.whole("rounds", 10)
Traceback (most recent call last):
    ...
farthing.errors.InvalidValue: rounds must be a whole number of at least 1, got 'many'
"""

import os
import tomllib
from collections.abc import Collection
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, overload

from farthing.errors import InvalidValue


def read(path: str | os.PathLike[str], subject: str) -> dict[str, Any]:
    """Return the tables of a TOML file; ``subject`` names it where it cannot be read."""
    try:
        with open(path, "rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise InvalidValue(f"{subject} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
    except tomllib.TOMLDecodeError as error:
        reason = str(error)
    else:
        if not _usable(found):
            raise InvalidValue(
                f"{subject} must hold texts without null characters and whole numbers of at most 64 bits"
            )
        return found
    raise InvalidValue(f"{subject} must be a TOML file: {reason}")


def _usable(value: Any) -> bool:
    """Return whether texts can be names of files, and whole numbers can be computed with."""
    match value:
        case dict():
            return all(_usable(part) for pair in value.items() for part in pair)
        case list():
            return all(map(_usable, value))
        case str():
            return "\0" not in value
        case int():
            return -(2**63) <= value < 2**64
    return True


def refuse_missing(where: str, kind: Any, given: Collection[str]) -> None:
    """Refuse a table that lacks an entry without which no ``kind``, a dataclass, can be made."""
    for entry in fields(kind):
        if entry.name not in given and entry.default is MISSING and entry.default_factory is MISSING:
            raise InvalidValue(f"{where} must have an entry {entry.name!r}")


class Settings:
    """A table of a TOML file; paths are relative to the file."""

    def __init__(self, values: dict[str, Any], folder: Path, prefix: str = "") -> None:
        self._values, self._folder, self._prefix = dict(values), folder, prefix

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Settings":
        return cls(read(path, "it"), Path(path).resolve().parent)

    @overload
    def text(self, name: str, default: str = ...) -> str: ...
    @overload
    def text(self, name: str, default: None) -> str | None: ...
    def text(self, name: str, default: str | None = "") -> str | None:
        """Return a text; without a default it must be there."""
        if default != "" and name not in self._values:
            return default
        value = self._values.pop(name, None)
        if not isinstance(value, str) or not value:
            raise InvalidValue(f"{self._prefix}{name} must be a text, got {value!r}")
        return value

    def path(self, name: str) -> Path:
        return self.beside(self.text(name))

    def beside(self, name: str) -> Path:
        """Return a path relative to the file."""
        return self._folder / name

    @overload
    def whole(self, name: str, default: int) -> int: ...
    @overload
    def whole(self, name: str, default: None) -> int | None: ...
    def whole(self, name: str, default: int | None) -> int | None:
        value = self._values.pop(name, default)
        if value is not None and (type(value) is not int or value < 1):
            raise InvalidValue(
                f"{self._prefix}{name} must be a whole number of at least 1, got {value!r}"
            ) from None
        return value

    @overload
    def number(self, name: str, default: float) -> float: ...
    @overload
    def number(self, name: str, default: None) -> float | None: ...
    def number(self, name: str, default: float | None) -> float | None:
        value = self._values.pop(name, default)
        if value is None:
            return None
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise InvalidValue(f"{self._prefix}{name} must be a positive number, got {value!r}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._values.pop(name, False)
        if not isinstance(value, bool):
            raise InvalidValue(f"{self._prefix}{name} must be true or false, got {value!r}")
        return value

    def table(self, name: str) -> "Settings":
        value = self._values.pop(name, None)
        if not isinstance(value, dict):
            raise InvalidValue(f"there must be a table [{self._prefix}{name}]")
        return Settings(value, self._folder, f"{self._prefix}{name}.")

    @property
    def names(self) -> list[str]:
        """Return the names of all entries that were not read yet."""
        return list(self._values)

    def done(self) -> None:
        """Refuse entries that were not read."""
        if self._values:
            raise InvalidValue(
                f"there is no setting {self._prefix}{min(self._values)!s}: see docs/parties.md"
            )
