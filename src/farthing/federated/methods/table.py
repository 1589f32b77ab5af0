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

from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from typing import Any

from farthing import validate
from farthing.budget import Adjacency
from farthing.errors import InvalidValue
from farthing.federated.methods.record import TRUSTS, Method, Option

__all__ = ["METHODS", "Method", "Option", "draw_of", "every_option", "named"]


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
    """Return A-DDP's accountants; the tight one also calibrates the noise, for more and cheaper rounds."""
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
    help="The clipping norm of a record's gradient.",
    symbol="C",
    check=validate.positive,
)
ROUNDS = Option(
    name="rounds",
    kind=int,
    help="The number of rounds that the noise is calibrated for.",
    symbol="T",
    check=validate.count,
)
LR = Option(
    name="lr",
    help="The learning rate; by default chosen from public numbers.",
    symbol="α, line 17",
    check=validate.positive,
)
ETA = replace(
    LR,
    help="The learning rate, which multiplies a sum; by default chosen from public numbers.",
    symbol="η, a constant",
    convert=_constant,
)
DRAW = Option(
    name="draw",
    kind=str,
    help="The records drawn in a round: one, a number, all, or poisson:P.",
    symbol="p",
    check=_check_draw,
    convert=draw_of,
)
ACCOUNTANT = Option(
    name="accountant",
    kind=str,
    help="The accountant of rounds: sampling (the paper's), advanced or tight.",
    symbol="Theorem 1",
    choices=_accountants(),
)
WEIGHTS = Option(
    name="weights",
    kind=str,
    help="The weights of uploads: plain (a mean over clients), records (a sum) or precision.",
    symbol="line 17",
    check=_check_weights,
    local=True,
)
EPSILON_ITER = Option(
    name="epsilon_iter",
    help="Set the noise by the epsilon of one round without its draw; needs --delta-iter.",
    symbol="eps_iter, lines 5 and 14",
    check=validate.positive,
    needs="delta_iter",
    sets="noise",
)
DELTA_ITER = Option(
    name="delta_iter",
    help="The delta of one round; needs --epsilon-iter.",
    symbol="δ_iter, lines 5 and 14",
    check=validate.probability,
    needs="epsilon_iter",
)
NOISE_MULTIPLIER = Option(
    name="noise_multiplier",
    help="The noise divided by the clipping norm, instead of the noise that fits the budget.",
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
    name="convexity",
    help="Add a term that makes every loss this strongly convex.",
    symbol="Δ",
    check=validate.positive,
)
PUBLISHED_NOISE = Option(
    name="published_noise",
    kind=bool,
    help="Use the published noise, and print the guarantee that it gives.",
    symbol="σ of (3)",
    argument="exact",
    convert=lambda wanted: not wanted,
    sets="noise",
)
SAMPLING_RATE = Option(
    name="sampling_rate",
    help="The probability that a record is in its client's batch; 1 for all records.",
    symbol="q",
    check=validate.rate,
)
BANDS = Option(
    name="bands",
    kind=int,
    help="The number of rounds over which noise is correlated; 1 for independent noise.",
    symbol="Choquette-Choo et al. 2023, Theorem 4",
    check=validate.count,
)
SERVER = Option(
    name="server",
    kind=str,
    help="The server's optimiser: sgd, momentum, adam or yogi.",
    symbol="Reddi et al. 2021, Algorithm 2",
    choices={rule: {"server": rule} for rule in ("sgd", "momentum", "adam", "yogi")},
)
LOCAL_STEPS = Option(
    name="local_steps",
    kind=int,
    help="The number of local steps of a client in a round.",
    symbol="E",
    check=validate.count,
)
LOCAL_LR = Option(
    name="local_lr", help="The learning rate of local steps.", symbol="η", check=validate.positive
)
PROXIMAL = Option(
    name="proximal",
    help="The weight of the proximal term of FedProx.",
    symbol="μ",
    check=validate.non_negative,
)


def _shrunk_rows(clients: Any, problem: Any, *, trust: Any, survivors: int | None) -> Any:
    """Return the feature map that shrinks rows to norm 1."""
    return problem.rows()


_LIPSCHITZ = replace(CLIP, argument="lipschitz", symbol="L")
_NETWORK = (
    *(CLIP, ROUNDS, replace(LR, symbol="η of the server"), replace(WEIGHTS, symbol="n_k/n")),
    *(NOISE_MULTIPLIER, SERVER),
)

#: Every federated method by its name.
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            name="federated-descent",
            algorithm=_late("federated_descent", "federated_descent"),
            summary="the default: whole local gradients, momentum, all parameters from public numbers",
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
            summary="one record of one party at a time, with the least noise that all budgets afford",
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
            name="fedsgd",
            algorithm=_late("networks", "fedsgd"),
            summary="a network: one noisy sum of clipped gradients per client and round",
            rounds="`--rounds`, 200",
            options=(*_NETWORK, SAMPLING_RATE, BANDS),
            trusts=TRUSTS,
            networks=True,
        ),
        Method(
            name="fedavg",
            algorithm=_late("networks", "fedavg"),
            summary="a network: several local steps of DP-SGD per round (FedAvg, FedProx)",
            rounds="`--rounds`, 50",
            options=(*_NETWORK, SAMPLING_RATE, LOCAL_STEPS, LOCAL_LR, PROXIMAL),
            networks=True,
        ),
        Method(
            name="dp-fedavg",
            algorithm=_late("networks", "dp_fedavg"),
            summary="a network: whole updates of a user or a party, clipped and noised as one",
            rounds="`--rounds`, 50",
            options=(*_NETWORK, SAMPLING_RATE, LOCAL_STEPS, LOCAL_LR),
            trusts=TRUSTS,
            networks=True,
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
            summary="A-DDP's baseline: the budget divided evenly",
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
    """Return the method, or the method of this name; reject an unknown name with a list of all names."""
    if isinstance(method, Method):
        return method
    known = {one.name: one for one in (METHODS.values() if among is None else among)}
    return known[validate.one_of(known, **{option: method})]


def every_option() -> dict[str, tuple[Option, list[str]]]:
    """Return every option of the table by its name, with the names of the methods that take it."""
    found: dict[str, tuple[Option, list[str]]] = {}
    for method in METHODS.values():
        for option in method.options:
            found.setdefault(option.name, (option, []))[1].append(method.name)
    return found
