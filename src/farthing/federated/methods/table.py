"""List the federated methods: one record each, from which every other description is derived.

A `Method` states a name, an algorithm, its options, who may add its noise, and how its weights are used for
predictions. ``farthing simulate``, a run's file, the coordinator, the help of the command line and the tables
of the documentation read the record, so that a new method touches its own file and this table. Algorithms are
imported when they run: the command line needs no numpy to print its help.

>>> METHODS["sgd2"].names
('clip', 'rounds', 'lr', 'weights', 'radius', 'convexity', 'noise_multiplier', 'published_noise')
>>> METHODS["addp"].arguments({"lr": 0.3, "accountant": "tight"})["lr"]
0.3
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from farthing import validate
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
        A sentence on its meaning.
    symbol : str
        The symbol of the method's text.
    argument : str
        The algorithm's argument, where that has another name.
    check : callable
        Refuses a value, given by its name: one of `farthing.validate`.
    convert : callable
        Turns a value into that of the argument.
    choices : mapping of str to mapping
        The values that there are, each with the arguments that it stands for.
    needs : str
        Another option that must be given with it.
    sets : str
        The quantity that it sets; at most one option (or two that need each other) may.
    local : bool
        Whether it needs noise that is added locally.

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
        """Refuse a value that it cannot have."""
        if self.choices and value not in self.choices:
            raise InvalidValue(f"{self.flag} must be one of {list(self.choices)}, got {value!r}")
        self.check(**{self.flag: value})

    def arguments(self, value: Any) -> dict[str, Any]:
        """Return the algorithm's arguments that a value stands for."""
        if self.choices:
            return dict(self.choices[value])
        return {self.argument or self.name: self.convert(value) if self.convert else value}


def _plain_rows(clients: Any, problem: Any, *, trust: Any, survivors: int | None) -> Any:
    """Return the map of rows that leaves them as they are, with a constant beside them."""
    from farthing.data.tables import Features

    return Features(problem.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A federated method: everything that a simulation, a deployment, the help and the documents need.

    Parameters
    ----------
    name : str
        The word for ``--method`` and ``method.name``.
    algorithm : callable
        ``algorithm(clients, problem, **arguments)`` returns an iterator of `farthing.Step`.
    summary : str
        A sentence for the documents.
    rounds : str
        How many rounds it takes.
    options : tuple of Option
        The options it takes; those that are left out have the algorithm's own defaults.
    trusts : tuple of str
        Who may add the noise, the first by default: this decides the observer of the guarantee.
    adjacency : Adjacency
        The adjacency of budgets that state none.
    private : bool
        False where nothing is promised; the algorithm then gets a table in place of clients.
    deployed : bool
        Whether a coordinator may run it over guards.
    features : callable
        ``features(clients, problem, trust=, survivors=)`` is the map of rows that its weights belong to.
    published : callable or None
        ``published(clients, noise, client, rounds)`` returns the guarantees of its published noise.
    most_records : int or None
        The most records in all, where iterations grow with their square.

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


def _late(module: str, name: str) -> Callable[..., Any]:
    """Return a function of a method's file that is imported when it is first called."""

    def opened(*given: Any, **arguments: Any) -> Any:
        return getattr(import_module(f"farthing.federated.methods.{module}"), name)(*given, **arguments)

    return opened


def draw_of(text: str) -> Any:
    """Return the draw for ``one``, a whole number, ``all`` or ``poisson:P``."""
    from farthing.federated.terms import Exactly
    from farthing.queries.samplers import Everyone, Poisson

    if text in ("one", "all"):
        return Exactly(1) if text == "one" else Everyone()
    name, _, rate = text.partition(":")
    try:
        if name == "poisson":
            return Poisson(validate.rate(**{"the rate of --draw": float(rate)}))
        return Exactly(validate.count(**{"--draw": int(text)}))
    except InvalidValue:
        raise
    except ValueError:
        raise InvalidValue(f"--draw must be one, a whole number, all, or poisson:P, got {text!r}") from None


def _check_draw(**value: str) -> None:
    for text in value.values():
        draw_of(text)


def _accountants() -> dict[str, dict[str, Any]]:
    """Return A-DDP's accountants; a tight one also chooses the noise, whose rounds are cheaper then."""
    return {
        "sampling": {},
        "advanced": {"accountant": "advanced"},
        "tight": {"accountant": "tight", "calibration": "tight", "rounds": 1000},
    }


def _check_weights(**value: str) -> None:
    from farthing.federated.terms import Weights

    validate.choice(Weights, **value)


def _constant(rate: float) -> Callable[[int], float]:
    """Return a constant learning rate."""
    return lambda t: rate


CLIP = Option(
    name="clip",
    argument="clip_norm",
    help="Where a record's gradient is clipped.",
    symbol="C",
    check=validate.positive,
)
ROUNDS = Option(
    name="rounds", kind=int, help="The rounds that noise is chosen for.", symbol="T", check=validate.count
)
LR = Option(
    name="lr",
    help="The learning rate; from public numbers if left out.",
    symbol="α, line 17",
    check=validate.positive,
)
ETA = replace(
    LR,
    help="The learning rate, which multiplies a sum; from public numbers if left out.",
    symbol="η, a constant",
    convert=_constant,
)
DRAW = Option(
    name="draw",
    kind=str,
    help="The records of a round: one, a number, all, or poisson:P.",
    symbol="p",
    check=_check_draw,
    convert=draw_of,
)
ACCOUNTANT = Option(
    name="accountant",
    kind=str,
    help="How rounds are counted: sampling (the paper's), advanced or tight.",
    symbol="Theorem 1",
    choices=_accountants(),
)
WEIGHTS = Option(
    name="weights",
    kind=str,
    help="How uploads are added up: plain (a mean over clients), records (a sum) or precision.",
    symbol="line 17",
    check=_check_weights,
    local=True,
)
EPSILON_ITER = Option(
    name="epsilon_iter",
    help="Noise with which one round has this epsilon before its draw, with --delta-iter.",
    symbol="eps_iter, lines 5 and 14",
    check=validate.positive,
    needs="delta_iter",
    sets="noise",
)
DELTA_ITER = Option(
    name="delta_iter",
    help="The delta of one round, with --epsilon-iter.",
    symbol="δ_iter, lines 5 and 14",
    check=validate.probability,
    needs="epsilon_iter",
)
NOISE_MULTIPLIER = Option(
    name="noise_multiplier",
    help="Noise over the clip, in place of the budget's.",
    symbol="σ/C",
    check=validate.positive,
    sets="noise",
)
RADIUS = Option(
    name="radius",
    help="The radius of the L2 ball that steps are projected onto.",
    symbol="half of |C|₂",
    check=validate.positive,
)
CONVEXITY = Option(
    name="convexity", help="Makes every loss so strongly convex.", symbol="Δ", check=validate.positive
)
PUBLISHED_NOISE = Option(
    name="published_noise",
    kind=bool,
    help="The noise of the text; says what that really gives.",
    symbol="σ of (3)",
    argument="exact",
    convert=lambda wanted: not wanted,
    sets="noise",
)


def _shrunk_rows(clients: Any, problem: Any, *, trust: Any, survivors: int | None) -> Any:
    """Return the map of rows that shrinks them to norm 1."""
    return problem.rows()


_LIPSCHITZ = replace(CLIP, argument="lipschitz", symbol="L")

#: Every federated method by its name.
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            name="federated-descent",
            algorithm=_late("federated_descent", "federated_descent"),
            summary="the default: whole local gradients, momentum, every number from a public rule",
            rounds="100",
            trusts=TRUSTS,
            features=_late("federated_descent", "learnt_in"),
        ),
        Method(
            name="addp",
            algorithm=_late("addp", "addp"),
            summary="A-DDP, Cheng et al. 2020: local samples, and as many rounds as each budget allows",
            rounds="until spent",
            options=(
                *(CLIP, ROUNDS, LR, DRAW, ACCOUNTANT, WEIGHTS, EPSILON_ITER, DELTA_ITER),
                NOISE_MULTIPLIER,
            ),
            trusts=TRUSTS,
        ),
        Method(
            name="sgd2",
            algorithm=_late("sgd2", "sgd2"),
            summary="every party's whole gradient, and steps that are projected onto a ball",
            rounds="`--rounds`, 100",
            options=(
                *(_LIPSCHITZ, ROUNDS, ETA, replace(WEIGHTS, symbol="step 4"), RADIUS, CONVEXITY),
                replace(NOISE_MULTIPLIER, symbol="σ/L"),
                replace(PUBLISHED_NOISE, symbol="σ of the proof of Theorem 3"),
            ),
            trusts=TRUSTS,
            features=_shrunk_rows,
            published=_late("sgd2", "sgd2_published"),
        ),
        Method(
            name="sgd1",
            algorithm=_late("sgd1", "sgd1"),
            summary="one record of one party at a time, with the least noise that all afford",
            rounds="the square of the records",
            options=(
                *(_LIPSCHITZ, ETA, RADIUS, CONVEXITY, replace(NOISE_MULTIPLIER, symbol="σ/(nL)")),
                PUBLISHED_NOISE,
            ),
            features=_shrunk_rows,
            published=_late("sgd1", "sgd1_published"),
            most_records=1000,  # iterations grow with the square of the records
        ),
        Method(
            name="sgd-adv",
            algorithm=_late("addp", "sgd_adv"),
            summary="A-DDP's baseline: advanced composition of rounds amplified by sampling",
            rounds="`--rounds`, 10",
            options=(CLIP, ROUNDS, LR, DRAW),
            deployed=False,
        ),
        Method(
            name="sgd-pass",
            algorithm=_late("addp", "sgd_pass"),
            summary="A-DDP's baseline: every record in turn",
            rounds="`--rounds`, 10 passes",
            options=(CLIP, ROUNDS, LR),
            adjacency=Adjacency.ZERO_OUT,  # adding or removing a record would shift the turns of others
            deployed=False,
        ),
        Method(
            name="sgd-maj",
            algorithm=_late("addp", "sgd_maj"),
            summary="A-DDP's baseline: the budget in even parts",
            rounds="`--rounds`, 10",
            options=(CLIP, ROUNDS, LR, DRAW),
            deployed=False,
        ),
        Method(
            name="nonprivate",
            algorithm=_late("addp", "non_private"),
            summary="gradient descent on all records, **no privacy**; exits with 1",
            rounds="`--rounds`, 1000",
            options=(ROUNDS, LR),
            private=False,
            deployed=False,
        ),
    )
}


def named(method: Method | str, among: Iterable[Method] | None = None, option: str = "--method") -> Method:
    """Return a record, or the record of this name; an unknown name is refused with a list of all names."""
    if isinstance(method, Method):
        return method
    known = {one.name: one for one in (METHODS.values() if among is None else among)}
    if method not in known:
        raise InvalidValue(f"{option} must be one of {list(known)}, got {method!r}")
    return known[method]


def every_option() -> dict[str, tuple[Option, list[str]]]:
    """Return every option of the table by its name, with the names of the methods that take it."""
    found: dict[str, tuple[Option, list[str]]] = {}
    for method in METHODS.values():
        for option in method.options:
            found.setdefault(option.name, (option, []))[1].append(method.name)
    return found
