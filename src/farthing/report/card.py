"""Write a model card: Markdown with the front matter that Hugging Face reads, from a ``privacy.json``.

A card is a shorter report: the model, the guarantee, the facts taken as public, and the limits of the
guarantee. Fields that a program cannot know are marked "to be filled in".

`logged` sends the same facts to MLflow, where that is installed.
"""

import json
import math
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from farthing.budget import FORMAT
from farthing.errors import InvalidValue, Unsupported
from farthing.report.reading import count, guarantee, other_format
from farthing.report.statement import strength, upwards
from farthing.report.subject import Declared
from farthing.report.words import number, percent, plain
from farthing.validate import read_json

TO_FILL = "*To be filled in.*"
_TEXT = str.maketrans({letter: f"\\{letter}" for letter in "\\`*_{}[]<>|#"})


def read(folder: Path) -> dict[str, Any]:
    """Read the ``privacy.json`` of a training: the file, or the folder that holds it."""
    path = folder / "privacy.json" if folder.is_dir() else folder
    try:
        told = read_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidValue(
            f"{str(path)!r} cannot be read: {error.strerror}; FOLDER must be one that train wrote"
        ) from None
    except ValueError:
        told = None
    if not isinstance(told, dict) or not {"format", "guarantee", "public", "method"} <= told.keys():
        raise InvalidValue(f"{str(path)!r} is not a privacy.json: FOLDER must be one that train wrote")
    if told["format"] != FORMAT:
        raise InvalidValue(other_format(repr(str(path)), told["format"]))
    return told


_FIGURES = ("accuracy", "guessing", "auc", "rmse", "rmse_of_mean", "standard_error")


def card(told: Mapping[str, Any]) -> str:
    """Return the model card of a training, from the object of its ``privacy.json``."""
    try:
        return _card(told)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else f"{error}"[:200]
        raise InvalidValue(f"this privacy.json is not as train wrote it ({reason})") from None


def _card(told: Mapping[str, Any]) -> str:
    said, declared = guarantee(told["guarantee"]), Declared.of(told["public"], told)
    finite = math.isfinite(said.epsilon)
    size = f"({upwards(said.epsilon)}, {said.delta:g})-differential privacy" if finite else "none"
    checked = _text(declared.checked_by) or (
        "**nobody. If a bound or a value was read from the records, the guarantee is void.**"
    )
    rows = [f"| {_text(name)} | {role} | {_text(what)} |" for name, role, what in declared.rows()]
    people, choice = told.get("rows_per_person"), _text(told.get("choice", ""))
    kind = choice.partition(":")[0] or _text(told["trained"])
    by = f" (column {_text(declared.user_column)})" if declared.user_column else ""
    facts = {
        "Guarantee": f"**{size}**",
        "Neighbours": f"{said.adjacency}, per {said.unit}",
        "Holds against": str(said.observer),
        "Accounting": f"{said.accountant}: {_text(said.theorem)}",
        "Assumptions": _text(said.note) or "none beside what is declared public",
        "Records": f"{count(told['records']):,}"
        + ("" if people is None else f", at most {count(people):,} of a person{by}"),
        "Method": f"{_text(told['method'])}{f' ({choice})' * bool(choice)}, {count(told['steps']):,} steps",
        "Ledger": f"`{plain(told.get('ledger') or 'in memory')}`",
        "Date": plain(told["date"], 40),
        "Software": plain(told["software"], 40),
        "SHA-256 of the model": f"`{plain(declared.model_sha256, 64)}`",
    }
    return "\n".join(
        [
            *_front(told, declared, size),
            f"# {_text(declared.target['name'])}",
            "",
            f"A {kind} model, trained under differential privacy. "
            + (strength(said, count(told["records"]))[1] if finite else ""),
            "",
            "## Model details",
            "",
            *_table(("", ""), [f"| {name} | {value} |" for name, value in facts.items()]),
            "## Uses",
            "",
            TO_FILL,
            "",
            "## Bias, risks and limitations",
            "",
            "The guarantee limits what the model tells about one "
            f"{said.unit}. It says nothing about groups, fairness, or figures that were released beside it. "
            "Noise makes small groups' predictions less certain.",
            "",
            "## Training data",
            "",
            f"Taken as public ({_text(declared.source)}), checked by {checked}",
            "",
            *_table(("column", "role", "declared"), rows),
            "## Evaluation",
            "",
            *_evaluated(told),
        ]
    )


def _front(told: Mapping[str, Any], declared: Declared, size: str) -> list[str]:
    """Return the front matter, whose values are JSON: a subset of YAML."""
    kind = "classification" if "values" in declared.target else "regression"
    fields: dict[str, Any] = {
        "license": "other",
        "library_name": "farthing",
        "pipeline_tag": f"tabular-{kind}",
        "tags": ["differential-privacy", f"tabular-{kind}", "farthing"],
        "datasets": [],
        "metrics": [name for name in ("accuracy", "rmse") if name in told.get("test", {})],
        "privacy": size,
    }
    return ["---", *(f"{name}: {json.dumps(value)}" for name, value in fields.items()), "---", ""]


def _evaluated(told: Mapping[str, Any]) -> list[str]:
    test = told.get("test")
    if not test:
        return [TO_FILL, ""]
    shares = {"accuracy", "guessing"} | ({"standard_error"} if "accuracy" in test else set())
    cells = [(name, float(test[name])) for name in _FIGURES if name in test]
    rows = [
        f"| {name.replace('_', ' ')} | {percent(value) if name in shares else number(value)} |"
        for name, value in cells
    ]
    return [f"On {_text(test['table'])}: {_text(test['note'])}.", "", *_table(("figure", "value"), rows)]


def _table(heads: tuple[str, ...], rows: list[str]) -> list[str]:
    return [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *rows, ""]


def _text(value: object) -> str:
    """Return text in which Markdown marks nothing."""
    return plain(value, 2_000).translate(_TEXT)


def logged(folder: Path, told: Mapping[str, Any]) -> str:
    """Log a training to MLflow's active tracking server; return the run's identifier."""
    try:
        mlflow = import_module("mlflow")
    except ImportError:
        raise Unsupported("--mlflow needs a package that is missing: pip install mlflow") from None
    said = told["guarantee"]
    names = "method", "steps", "records", "features", "rows_per_person", "software", "format"
    try:
        with mlflow.start_run() as run:
            mlflow.log_params({name: told[name] for name in names if told.get(name) is not None})
            mlflow.set_tags({f"privacy.{name}": str(value)[:5000] for name, value in said.items()})
            mlflow.set_tag("privacy.checked_by", told["public"]["schema"]["checked_by"] or "nobody")
            mlflow.log_metric("delta", float(said["delta"]))
            if said["epsilon"] is not None:
                mlflow.log_metric("epsilon", float(said["epsilon"]))
            for name in ("accuracy", "auc", "rmse"):
                if name in told.get("test", {}):
                    mlflow.log_metric(name, float(told["test"][name]))
            mlflow.log_text(card(told), "model-card.md")
            for path in _written(folder, told):
                mlflow.log_artifact(str(path))
            return str(run.info.run_id)
    except Exception as error:  # MLflow saw no record, so that its words may be shown
        raise InvalidValue(
            f"MLflow refused the training ({type(error).__name__}): {plain(error, 600)}; "
            "MLFLOW_TRACKING_URI names the server or database"
        ) from None


def _written(folder: Path, told: Mapping[str, Any]) -> list[Path]:
    """Return the files that the training wrote; others of its folder, such as its table, are private."""
    place, privacy = (folder, "privacy.json") if folder.is_dir() else (folder.parent, folder.name)
    model, report, ledger = (Path(str(told.get(kind) or kind)).name for kind in ("model", "report", "ledger"))
    exports = (Path(f"{Path(model).stem}.{form}").name for form in told.get("sha256", {}))
    names = privacy, model, report, ledger, f"{ledger}.head", *exports
    return sorted({place / name for name in names if (place / name).is_file()})
