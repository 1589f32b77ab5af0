"""Define the record of a federated method: its name, algorithm, options, and who may add its noise.

>>> Option(name="shrink_rate", help="The factor by which steps shrink.").flag
'--shrink-rate'
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from farthing.budget import Adjacency, Guarantee
from farthing.errors import InvalidValue

LOCAL, DISTRIBUTED, TRUSTED = TRUSTS = ("local", "distributed", "trusted")


def _any(**value: Any) -> Any:
    """Accept every value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of a federated method, on the command line, in a run's file and in `Job.options`.

    Parameters
    ----------
    name : str
        Its name; ``epsilon_iter`` is ``--epsilon-iter`` on the command line.
    kind : type
        One of float, int, str and bool.
    help : str
        A sentence that describes the option.
    symbol : str
        The symbol in the method's paper.
    argument : str
        The algorithm's argument, if it differs from the option's name.
    check : callable
        A function of `farthing.validate` that takes the value by name and rejects invalid values.
    convert : callable
        Converts the option's value to the argument's.
    choices : mapping of str to mapping
        The possible values, each with the arguments that it stands for.
    needs : str
        Another option that must be given with it.
    sets : str
        The quantity that it sets; at most one option (or two that need each other) may set a quantity.
    local : bool
        Whether it needs local noise.

    Examples
    --------
    >>> import farthing as ft
    >>> ft.federated.Option(name="shrink_rate", help="The factor by which steps shrink.").flag
    '--shrink-rate'
    """

    name: str
    kind: type[Any] = float
    help: str
    symbol: str = ""
    argument: str = ""
    check: Callable[..., Any] = _any
    convert: Callable[[Any], Any] | None = None
    choices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    needs: str = ""
    sets: str = ""
    local: bool = False

    @property
    def flag(self) -> str:
        """Return its name on the command line."""
        return f"--{self.name.replace('_', '-')}"

    def checked(self, value: Any) -> None:
        """Reject an invalid value."""
        if self.choices and value not in self.choices:
            raise InvalidValue(f"{self.flag} must be one of {list(self.choices)}, got {value!r}")
        self.check(**{self.flag: value})

    def arguments(self, value: Any) -> dict[str, Any]:
        """Return the algorithm's arguments that a value stands for."""
        if self.choices:
            return dict(self.choices[value])
        return {self.argument or self.name: self.convert(value) if self.convert else value}


def _plain_rows(clients: Any, problem: Any, *, trust: Any, survivors: int | None) -> Any:
    """Return the feature map that leaves rows as they are and appends the intercept column."""
    from farthing.data.tables import Features

    return Features(problem.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A federated method, described for simulations, deployments, the command line and the documents.

    Parameters
    ----------
    name : str
        The word for ``--method`` and ``method.name``.
    algorithm : callable
        ``algorithm(clients, problem, **arguments)`` returns an iterator of `farthing.Step`.
    summary : str
        A sentence for the documents.
    rounds : str
        The number of rounds, in words.
    options : tuple of Option
        The options it takes; options left out have the algorithm's own defaults.
    trusts : tuple of str
        The supported kinds of `Trust`, which decide the observer of the guarantee; the first is the default.
    adjacency : Adjacency
        The adjacency of budgets that state none.
    private : bool
        False for a method without a guarantee; the algorithm then gets a table in place of clients.
    deployed : bool
        Whether a coordinator may run it over guards.
    features : callable
        ``features(clients, problem, trust=, survivors=)`` returns the feature map of its weights.
    published : callable or None
        ``published(clients, noise, client, rounds)`` returns the guarantees of its published noise.
    most_records : int or None
        The largest total number of records, for a method whose iterations grow with its square.
    networks : bool
        Whether it trains a network (`farthing.torch.Network`), which it gets in place of a problem.

    Examples
    --------
    >>> import farthing as ft
    >>> ft.federated.METHODS["addp"].trusts
    ('local', 'distributed', 'trusted')
    """

    name: str
    algorithm: Callable[..., Any]
    summary: str
    rounds: str
    options: tuple[Option, ...] = ()
    trusts: tuple[str, ...] = (LOCAL,)
    adjacency: Adjacency = Adjacency.ADD_REMOVE
    private: bool = True
    deployed: bool = True
    features: Callable[..., Any] = _plain_rows
    published: Callable[[Any, float, int, int], Sequence[Guarantee]] | None = None
    most_records: int | None = None
    networks: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of its options."""
        return tuple(option.name for option in self.options)

    def check(self, options: Mapping[str, Any], trust: str | None = None) -> None:
        """Refuse unknown options, invalid values, and two options that set one quantity."""
        known = {option.name: option for option in self.options}
        given = {name: value for name, value in options.items() if value is not None and value is not False}
        for name, value in given.items():
            if name not in known:
                raise InvalidValue(
                    f"--{name.replace('_', '-')} must be left out with --method {self.name}, which does not "
                    f"have it, got {value!r}"
                )
            option = known[name]
            option.checked(value)
            if option.needs and option.needs not in given:
                first, second = sorted((option, known[option.needs]), key=self.options.index)
                raise InvalidValue(f"{first.flag} and {second.flag} go together: give both or neither")
            if option.local and trust not in (None, LOCAL):
                raise InvalidValue(
                    f"{option.flag} must be left out with --trust {trust}: only plain sums are seen there"
                )
        for quantity in {known[name].sets for name in given} - {""}:
            ways = [option for option in self.options if option.sets == quantity]
            if sum(option.name in given for option in ways) > 1:
                flags = [option.flag for option in ways]
                raise InvalidValue(
                    f"give one of {', '.join(flags[:-1])} and {flags[-1]}: each sets the {quantity}"
                )

    def arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the algorithm's arguments for the options given; the others keep their defaults."""
        found: dict[str, Any] = {}
        for option in sorted(self.options, key=lambda option: not option.choices):  # a choice gives way
            value = options.get(option.name)
            if value is not None or option.kind is bool:
                found |= option.arguments(bool(value) if option.kind is bool else value)
        return found
