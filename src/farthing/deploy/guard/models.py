"""Read what a policy says about networks: installed models with the hash of their source, and the records.

    modules = "models"                # a folder with modules of the party's own, besides installed packages

    [models.small]                    # a coordinator may ask about "small", and sends weights, never code
    factory = "ward_models:make_model"
    loss = "ward_models:loss"         # loss(outputs, targets): one value per record
    hash = "9b1c..."                  # of the source of both: `farthing guard POLICY --hashes` prints it
    weights = 20000                   # the most trained weights
    steps = 4                         # the most local steps a round

    [inputs]
    shape = [1, 28, 28]               # of one record's inputs, after a transform
    classes = 10                      # labels are 0 to 9; left out: finite numbers
    # kind = "int64"                  # tokens; vocabulary = 30000 says which, length = 64 how many of each
    # records_per_user = 20           # with an array ``users``: the most records of one that count
    # transform = "ward_models:prepare"    # from one record's inputs to an array
    # dataset = "ward_models:make_dataset" # a torch Dataset of pairs, in place of the file of records
    # hash = "51aa..."                # of the source of transform and dataset

Records are a ``.npz`` file with arrays X and y (and users), a folder with X.npy and y.npy, or a table with a
schema (CSV, Parquet). They are checked once, when they are loaded, on the party's own machine: shapes, finite
numbers, labels and tokens in their public range. Of a dataset, a record that does not fit counts as zero.
"""

from dataclasses import dataclass, fields
from typing import Any

from farthing import validate
from farthing.deploy import factories, toml_settings
from farthing.errors import InvalidValue

_HEXADECIMAL = frozenset("0123456789abcdef")
KINDS = ("float32", "int64")


def _hash(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) != 64 or not _HEXADECIMAL.issuperset(value):
        raise InvalidValue(
            f"{name} must be the 64 hexadecimal digits that `farthing guard POLICY --hashes` prints, "
            f"got {value!r}"
        )
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledModel:
    """A model that a party has installed, and what may be asked about it."""

    factory: str
    loss: str
    weights: int
    hash: str = ""
    steps: int = 1

    def __post_init__(self) -> None:
        for name in self.names:
            factories.parts(name)
        validate.count(weights=self.weights)
        validate.count(steps=self.steps)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names whose source the hash covers."""
        return self.factory, self.loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The public form of one record, as networks see it, and where the records come from."""

    shape: tuple[int, ...] = ()
    classes: int = 0
    kind: str = "float32"
    vocabulary: int = 0
    length: int = 0
    records_per_user: int = 0
    transform: str = ""
    dataset: str = ""
    hash: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if any(type(side) is not int or side < 1 for side in self.shape):
            raise InvalidValue(f"shape must be whole numbers above 0, got {list(self.shape)}")
        if self.kind not in KINDS:
            raise InvalidValue(f"kind must be one of {list(KINDS)}, got {self.kind!r}")
        for name in ("classes", "vocabulary", "length", "records_per_user"):
            if getattr(self, name) != 0:
                validate.count(**{name: getattr(self, name)})
        for name in self.names:
            factories.parts(name)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names whose source the hash covers."""
        return tuple(name for name in (self.transform, self.dataset) if name)


def models_of(given: Any) -> dict[str, InstalledModel]:
    """Return the [models.NAME] tables of a policy."""
    from farthing.deploy.messages.signed import checked_name

    if not isinstance(given, dict) or not all(isinstance(one, dict) for one in given.values()):
        raise InvalidValue(f"models must be tables [models.NAME], got {given!r}")
    return {
        checked_name(model=name): _made(f"[models.{name}]", InstalledModel, one)
        for name, one in given.items()
    }


def inputs_of(given: Any) -> Inputs:
    """Return the [inputs] table of a policy."""
    if not isinstance(given, dict):
        raise InvalidValue(f"inputs must be a table [inputs], got {given!r}")
    if not isinstance(given.get("shape", []), list):
        raise InvalidValue(f"shape must be a list of whole numbers, got {given['shape']!r}")
    found: Inputs = _made("[inputs]", Inputs, given)
    return found


def _made(where: str, kind: Any, given: dict[str, Any]) -> Any:
    known = {item.name for item in fields(kind)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise InvalidValue(f"{where} has no entry {unknown[0]!r}; known are {', '.join(sorted(known))}")
    toml_settings.refuse_missing(where, kind, given)
    try:
        return kind(**given)
    except TypeError as error:
        raise InvalidValue(f"{where} has an entry of a wrong kind: {error}") from None
    except InvalidValue as error:
        raise InvalidValue(f"{where}: {error}") from None


def _tables(policy: Any) -> dict[str, tuple[tuple[str, ...], str]]:
    """Return the names of every table of a policy that names source, and the hash that it states."""
    tables = {f"[models.{name}]": (model.names, model.hash) for name, model in policy.models.items()}
    return tables | ({"[inputs]": (policy.inputs.names, policy.inputs.hash)} if policy.inputs.names else {})


def hashes(policy: Any) -> dict[str, str]:
    """Return the hash of the source of every model of a policy, and of what loads its records."""
    if not (tables := _tables(policy)):
        raise InvalidValue("this policy names no model: [models.NAME] with factory and loss")
    return {where: factories.source_hash(names, policy.modules) for where, (names, _) in tables.items()}


def check_sources(policy: Any) -> None:
    """Refuse source that is not what the policy says; what is imported afterwards is what was hashed.

    All of it is read and checked before any is imported: a package may import another's.
    """
    tables = _tables(policy)
    source = factories.SourceFiles.read(
        [name for names, _ in tables.values() for name in names], policy.modules
    )
    for where, (names, said) in tables.items():
        installed = source.hash(names)
        _hash(f"{where} hash", said)
        if installed != said:
            raise InvalidValue(
                f"{where}: the installed source of {' and '.join(names)} has the hash {installed}, the "
                f"policy says {said}: look at what changed, and write the new hash if you agree to it"
            )
    source.seal()
