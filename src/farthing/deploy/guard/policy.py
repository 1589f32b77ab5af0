"""Read a party's policy: the limits that its guard enforces on every question.

    dataset = "ward-7"
    records = "ward-7.npz"            # arrays X and y; or a CSV file, with schema = "ward.json"
    size = 500                        # the public number of records
    ledger = "ward-7.ledger"          # answers are logged in <ledger>.answers, unless answers = "..."
    socket = "guard.sock"
    key = "ward-7.key"                # an Ed25519 private key, as `Signer.save` writes it
    coordinators = ["3f..."]          # public keys of those who may ask

    [budget]
    epsilon = 1.0
    delta = 1e-6                      # adjacency, unit and observer have defaults

    [limits]
    noise = 2.0                       # the least, over the clip
    clip = 3.0                        # the largest
    rounds = 1000                     # the most, of all runs together
    draws = ["all", "poisson:0.1"]    # of Poisson draws the largest rate, of others exactly these
    losses = ["logistic"]
    width = 108                       # features of a record
    outputs = 0                       # columns of a weight matrix (multinomial: all classes); 0: a vector
    evaluation = true                 # loss and accuracy here may be asked for, as a charged round
    bands = 1                         # rounds that noise may be correlated over, on draws "cyclic:0.02:8"
    trust = "local"                   # or "distributed", with colluding = 1 and [parties] name = "public key"

    [[menu]]                          # optional: sampled rounds of these terms are charged one by one
    draw = "poisson:0.1"
    noise = 2.0

Paths are relative to the file. An unknown entry is an error. The entries of a policy for networks,
[models.NAME] and [inputs], are those of `farthing.deploy.guard.models`.

>>> Limits(noise=2.0, clip=3.0, rounds=10, draws=(Poisson(0.1),)).allows_draw(Poisson(0.05))
True

`TermsPricing` decides which invitations a policy allows, and on what terms: from public numbers alone,
without ledger or lock.

Pricing a draw takes as long as tight accounting does, up to seconds. So it is done before the guard's lock is
taken, one invitation at a time, and remembered, refusals too. Extreme values are refused before they are
priced: a Poisson rate below `LEAST_RATE` (unless the policy lists it), a noise multiplier above `MOST_NOISE`.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from farthing import validate
from farthing.accounting.filters import Filter
from farthing.accounting.menu import Menu
from farthing.budget import Budget, Observer, Unit
from farthing.deploy import toml_settings
from farthing.deploy.guard.models import Inputs, InstalledModel, inputs_of, models_of
from farthing.deploy.messages import forms
from farthing.deploy.messages.signed import Reason, Refused, checked_name, public_key, refuse
from farthing.errors import FarthingError, InvalidValue
from farthing.federated.protocol import ClientAgent
from farthing.federated.terms import Draw, Invitation, Terms, Trust, refuse_uncovered
from farthing.ledger.books import rule_of
from farthing.ledger.journal import Journal
from farthing.linear.losses import Loss, multinomial
from farthing.noise import summing
from farthing.queries.correlated import Cyclic
from farthing.queries.samplers import Everyone, Poisson

_EVERYONE = (Everyone(),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of what a coordinator may ask."""

    noise: float
    clip: float
    rounds: int
    draws: tuple[Draw, ...] = _EVERYONE
    losses: tuple[str, ...] = ("logistic",)
    width: int = 1
    outputs: int = 0
    trust: Trust = Trust.LOCAL
    colluding: int = 0  # parties that may collude with the coordinator; distributed noise only
    evaluation: bool = False  # of weights on these records; charged like a round
    bands: int = 1  # rounds that noise may be correlated over: as many arrays of it are kept

    def __post_init__(self) -> None:
        if validate.positive(noise=self.noise) > MOST_NOISE:
            raise InvalidValue(f"noise must be at most {MOST_NOISE:g}, got {self.noise!r}")
        if validate.positive(clip=self.clip) < _SMALLEST:
            raise InvalidValue(f"clip must be at least {_SMALLEST:g}, got {self.clip!r}")
        validate.count(rounds=self.rounds)
        validate.count(width=self.width)
        validate.count(bands=self.bands)
        for name in ("outputs", "colluding"):
            if getattr(self, name) != 0:
                validate.count(**{name: getattr(self, name)})
        object.__setattr__(self, "trust", validate.choice(Trust, trust=self.trust))
        if not isinstance(self.evaluation, bool):
            raise InvalidValue(f"evaluation must be true or false, got {self.evaluation!r}")
        if self.trust is Trust.TRUSTED:
            raise InvalidValue(
                "trust must be 'local' or 'distributed': a guard releases nothing without noise"
            )
        unknown = [name for name in self.losses if name not in forms.LOSSES]
        if unknown or not self.losses:
            raise InvalidValue(f"losses must be some of {list(forms.LOSSES)}, got {list(self.losses)}")
        if "multinomial" in self.losses and self.outputs < 2:
            raise InvalidValue(f"outputs must be the number of classes for multinomial, got {self.outputs}")
        if self.coordinates > forms.MOST_WEIGHTS:
            raise InvalidValue(
                f"width and outputs allow {self.coordinates:,} weights, and a ledger keeps answers of at "
                f"most {forms.MOST_WEIGHTS:,} numbers"
            )
        if not self.draws:
            raise InvalidValue("draws must hold at least one, such as 'all'")

    def allows_draw(self, draw: Draw) -> bool:
        """Return whether a draw is listed; a Poisson draw is also allowed at a lower rate."""
        if isinstance(draw, Poisson):
            return any(
                isinstance(known, Poisson) and draw.sampling_rate <= known.sampling_rate
                for known in self.draws
            )
        return draw in self.draws

    def allows_shape(self, loss: Loss, rows: int, shape: tuple[int, ...]) -> bool:
        """Return whether weights may have a shape: a vector, or a matrix with at most ``outputs`` columns.

        A multinomial loss needs exactly these: a record of a class without a column has no gradient.
        """
        if loss == multinomial:
            return shape == (rows, self.outputs) and self.outputs > 1
        return shape == (rows,) or (len(shape) == 2 and shape[0] == rows and shape[1] <= self.outputs)

    @property
    def coordinates(self) -> int:
        """Return the largest number of coordinates that weights can have."""
        return (self.width + 1) * max(self.outputs, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A party's instructions to its guard."""

    dataset: str
    records: Path
    size: int
    ledger: Path
    socket: Path
    key: Path
    coordinators: tuple[bytes, ...]
    budget: Budget
    limits: Limits
    schema: str | None = None
    answers: Path | None = None
    parties: dict[str, bytes] = field(default_factory=dict)  # enrolled, for secure aggregation
    peers: tuple[int, ...] = ()  # user ids that may connect besides the guard's own
    group: int | None = None  # a group whose members may open the socket; by default only its owner may
    modules: Path | None = None  # a folder with modules of the party's own
    models: dict[str, InstalledModel] = field(
        default_factory=dict
    )  # networks that are answered about, by name
    inputs: Inputs = field(default_factory=Inputs)
    menu: tuple[tuple[Draw, float], ...] = ()  # draws and noise multipliers that are paid for round by round

    def __post_init__(self) -> None:
        checked_name(dataset=self.dataset)
        if validate.count(size=self.size) > summing.MOST:
            raise InvalidValue(f"size must be at most {summing.MOST:,}, the records that a sum can hold")
        if not self.coordinators:
            raise InvalidValue("coordinators must hold at least one public key")
        observers = {Trust.LOCAL: (Observer.SERVER, Observer.COORDINATOR)}
        if self.budget.observer not in observers.get(self.limits.trust, (self.limits.trust.observer,)):
            raise InvalidValue(
                f"under {self.limits.trust} trust a budget holds against {self.limits.trust.observer}, "
                f"not against {self.budget.observer}"
            )
        if self.models and self.budget.unit is Unit.PARTY and self.size != 1:
            raise InvalidValue(f"size must be 1 where the whole party is protected, got {self.size}")
        if self.limits.trust is Trust.DISTRIBUTED and len(self.parties) < 2:
            raise InvalidValue("distributed noise needs [parties], the public keys of all who are enrolled")
        if self.limits.trust is Trust.DISTRIBUTED and self.limits.colluding >= len(self.parties):
            raise InvalidValue(
                f"colluding must be below the number of [parties], {len(self.parties)}, got "
                f"{self.limits.colluding}"
            )
        self._refuse_unanswerable()

    def _refuse_unanswerable(self) -> None:
        """Refuse a policy under which every question would be refused, whatever the draw."""
        limits, reason = self.limits, ""
        for draw in limits.draws:
            try:
                asked = Invitation(
                    limits.clip,
                    draw,
                    noise_multiplier=limits.noise,
                    trust=limits.trust,
                    seen=self.budget.observer is Observer.COORDINATOR,
                    clipped=self.budget.unit if self.models else Unit.RECORD,
                )
                return refuse_uncovered(asked, self.budget, self.size)
            except FarthingError as error:
                reason = str(error)
        raise InvalidValue(f"no question could be answered under this policy: {reason}")

    @property
    def log(self) -> Path:
        """The path of the log of answers."""
        return self.answers if self.answers is not None else Path(f"{self.ledger}.answers")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Policy":
        """Return the policy in a TOML file."""
        found = toml_settings.read(path, f"a policy ({os.fspath(path)!r})")
        try:
            return cls._of(found, Path(path).resolve().parent)
        except InvalidValue as error:
            raise InvalidValue(f"{os.fspath(path)}: {error}") from None

    @classmethod
    def _of(cls, found: dict[str, Any], folder: Path) -> "Policy":
        values = _known("the policy", found, {item.name for item in fields(cls)})
        limits = _known("[limits]", _table(values, "limits"), {item.name for item in fields(Limits)})
        if "draws" in limits:
            limits["draws"] = tuple(forms.draw_of(text) for text in _texts("draws", limits["draws"]))
        if "losses" in limits:
            limits["losses"] = _texts("losses", limits["losses"])
        tables = sorted({"losses", "width", "outputs"} & set(limits))
        if tables and "models" in values:
            raise InvalidValue(f"[limits] {tables[0]} is for tables: a policy with [models] has none")
        made = _made("[limits]", Limits, limits)
        budget = _known("[budget]", _table(values, "budget"), {item.name for item in fields(Budget)})
        values["budget"] = _made("[budget]", Budget, {"observer": made.trust.observer} | budget)
        values["limits"] = made
        values["models"] = models_of(values.get("models", {}))
        values["inputs"] = inputs_of(values.get("inputs", {}))
        if values["inputs"].dataset:
            values.setdefault("records", "no-file")
        for name in ("records", "ledger", "socket", "key", "answers", "modules"):
            if name in values:
                values[name] = folder / _text(name, values[name])
        if values.get("schema") not in (None, "adult"):
            values["schema"] = str(folder / _text("schema", values["schema"]))
        if values.get("records") == folder / "adult" and values.get("schema") == "adult":
            values["records"] = Path("adult")
        values["coordinators"] = tuple(map(public_key, _texts("coordinators", values.get("coordinators"))))
        parties = _table(values, "parties") if "parties" in values else {}
        values["parties"] = {checked_name(party=name): public_key(key) for name, key in parties.items()}
        if len(set(values["parties"].values())) != len(values["parties"]):
            raise InvalidValue("each party must have a key of its own")
        peers = values.get("peers", [])
        if not isinstance(peers, list) or any(type(user) is not int or user < 0 for user in peers):
            raise InvalidValue(f"peers must be a list of user ids, got {peers!r}")
        values["peers"] = tuple(peers)
        values["menu"] = _menu(values.get("menu", []))
        if values.get("group") is not None and (type(values["group"]) is not int or values["group"] < 0):
            raise InvalidValue(f"group must be a group id, got {values['group']!r}")
        made_policy: Policy = _made("the policy", cls, values)
        return made_policy


def _menu(given: Any) -> tuple[tuple[Draw, float], ...]:
    """Return the entries of a policy's menu."""
    if not isinstance(given, list) or not all(isinstance(entry, dict) for entry in given):
        raise InvalidValue(f"[[menu]] must be tables with draw and noise, got {given!r}")
    entries = []
    for entry in given:
        values = _known("[[menu]]", entry, {"draw", "noise"})
        if type(values.get("noise")) not in (int, float):
            raise InvalidValue(f"noise in [[menu]] must be a number, got {values.get('noise')!r}")
        entries.append((forms.draw_of(values.get("draw")), validate.positive(noise=values["noise"])))
        if isinstance(entries[-1][0], Cyclic):
            raise InvalidValue("cyclic draws in [[menu]] have no price round by round: promise them in a run")
    return tuple(entries)


def _known(where: str, given: dict[str, Any], names: set[str]) -> dict[str, Any]:
    unknown = sorted(set(given) - names)
    if unknown:
        raise InvalidValue(f"{where} has no entry {unknown[0]!r}; known are {', '.join(sorted(names))}")
    return dict(given)


def _made(where: str, kind: Any, values: dict[str, Any]) -> Any:
    toml_settings.refuse_missing(where, kind, values)
    try:
        return kind(**values)
    except TypeError as error:
        raise InvalidValue(f"{where} has an entry of a wrong kind: {error}") from None


def _table(values: dict[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name)
    if not isinstance(found, dict):
        raise InvalidValue(f"there must be a table [{name}]")
    return dict(found)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidValue(f"{name} must be a text, got {value!r}")
    return value


def _texts(name: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise InvalidValue(f"{name} must be a list of texts, got {values!r}")
    return tuple(_text(name, value) for value in values)


def spending(policy: Policy) -> Callable[[Budget], Filter] | None:
    """Return the filter of a policy's ledger: the menu's, where it has one; None for the ledger's own.

    The prices of a menu were found when its ledger was begun, and stay what its first row says.
    """
    if not policy.menu:
        return None
    limits = policy.limits
    offers = (
        Invitation(limits.clip, draw, noise_multiplier=noise, trust=limits.trust)
        for draw, noise in policy.menu
    )
    menu = Menu(offer.terms(policy.budget, policy.size).price(policy.budget) for offer in offers)
    if not Journal.exists(policy.ledger):
        return menu
    with Journal(policy.ledger) as begun:
        rule = rule_of(begun.header)
    if getattr(rule, "events", ()) != menu.events:
        raise InvalidValue(f"the ledger {policy.ledger} was begun with another menu, or with none")
    return lambda _: rule


LEAST_RATE = 1e-6
MOST_NOISE = 1e9  # a noise multiplier
_SMALLEST = 1e-100  # the smallest clipping norm, far above underflow
_REMEMBERED = 1024


class TermsPricing:
    """The terms of invitations under a policy, remembered; thread-safe."""

    def __init__(self, limits: Limits, agent: ClientAgent) -> None:
        self._limits, self._agent = limits, agent
        self._lock = threading.Lock()
        self._known: OrderedDict[Invitation, Terms | Refused] = OrderedDict()

    def terms(self, invitation: Invitation) -> Terms:
        """Return our terms for an invitation, if the policy allows them."""
        self._allowed(invitation)
        with self._lock:
            if invitation not in self._known:
                self._known[invitation] = self._priced(invitation)
                if len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
            found = self._known[invitation]
        if isinstance(found, Refused):
            raise Refused(found.reason, found.text)
        return found

    def _allowed(self, invitation: Invitation) -> None:
        """Refuse what the limits exclude, before pricing."""
        limits, draw = self._limits, invitation.draw
        if invitation.trust is not limits.trust:
            refuse(Reason.TRUST, f"the policy allows {limits.trust} trust only")
        if not _SMALLEST <= invitation.clip_norm <= limits.clip:
            refuse(Reason.CLIP, f"the policy allows a clipping norm of at most {limits.clip:g}")
        if not limits.allows_draw(draw):
            allowed = ", ".join(map(forms.draw, limits.draws))
            refuse(Reason.SAMPLER, f"allowed draws: {allowed}")
        if isinstance(draw, Poisson) and draw.sampling_rate < LEAST_RATE and draw not in limits.draws:
            refuse(
                Reason.SAMPLER, f"the policy allows Poisson rates of at least {LEAST_RATE:g}, or listed ones"
            )
        if invitation.bands > limits.bands:
            refuse(Reason.NOISE, f"the policy allows noise that is correlated over {limits.bands} rounds")
        noise = invitation.noise_multiplier
        if noise is not None and not limits.noise <= noise <= MOST_NOISE:
            refuse(Reason.NOISE, f"the noise multiplier must be {limits.noise:g} to {MOST_NOISE:g}")

    def _priced(self, invitation: Invitation) -> Terms | Refused:
        try:
            terms = self._agent.terms(invitation)
        except (FarthingError, ArithmeticError):
            return Refused(Reason.MALFORMED, "no theorem covers these terms with this budget")
        if terms.mechanism.noise_multiplier < self._limits.noise:
            return Refused(Reason.NOISE, f"the noise multiplier must be at least {self._limits.noise:g}")
        return terms
