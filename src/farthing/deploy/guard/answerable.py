"""Decide which questions a guard answers: gradients of four losses for tables, installed models for networks.

Both refuse before anything is charged, from public numbers alone, and return the contribution that is asked
of the ledger. The models of a policy are made and checked once, when the guard starts: the hash of their
source before it is imported, then the model itself on made-up examples of the records' shape.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from farthing.deploy import factories
from farthing.deploy.guard.models import InstalledModel, checked_source
from farthing.deploy.messages import forms
from farthing.deploy.messages.forms import Asked, Question
from farthing.deploy.messages.networks import EACH, NetworkAsk, NetworkKind
from farthing.deploy.messages.signed import Reason, refuse
from farthing.errors import FarthingError, InvalidValue
from farthing.federated.evaluation import Evaluation
from farthing.federated.local_steps import LocalSteps
from farthing.federated.terms import Trust
from farthing.linear.losses import Gradient, PlacedGradient
from farthing.queries.query import Contribution

if TYPE_CHECKING:
    from farthing.deploy.guard.policy import Limits, Policy
    from farthing.torch.training.network import Network
    from farthing.torch.training.records import Examples

_LONGEST = 1e6  # the largest factor between 1 and an intercept or radius


class Answerable(Protocol):
    """The questions that a guard answers."""

    @property
    def largest(self) -> int:
        """Return the most bytes that weights can have."""

    def refuse(self, question: Question) -> None:
        """Refuse a question that is not answered; nothing is charged for it."""

    def contribution(self, asked: Asked) -> Contribution:
        """Return what is asked of the ledger."""

    def local_steps(self, asked: Asked) -> LocalSteps | None:
        """Return the plan of local steps that is asked for; None where one answer is."""


class Tables:
    """Gradients of the losses that a policy allows, for tables."""

    def __init__(self, limits: "Limits") -> None:
        self._limits = limits

    @property
    def largest(self) -> int:
        return 8 * self._limits.coordinates

    def refuse(self, question: Question) -> None:
        limits, asked = self._limits, question.contribution
        if isinstance(asked, NetworkAsk):
            refuse(Reason.MODEL, "this guard holds a table, and no networks")
        if isinstance(asked, Evaluation):
            _refuse_evaluation(limits)
            asked = asked.gradient
        features = asked.features
        if forms.loss_name(asked) not in limits.losses:
            refuse(Reason.LOSS, f"allowed losses: {', '.join(limits.losses)}")
        if features.width != limits.width:
            refuse(Reason.SHAPE, f"records have {limits.width} features")
        lengths = [length for length in (features.intercept, features.radius) if length]
        if not all(1 / _LONGEST <= length <= _LONGEST for length in lengths):
            refuse(Reason.SHAPE, f"intercept and radius must lie within a factor of {_LONGEST:g} of 1")
        if not limits.allows_shape(asked.loss, features.size, question.shape):
            refuse(
                Reason.SHAPE,
                f"weights must have {features.size} rows and the {limits.outputs} columns allowed",
            )

    def contribution(self, asked: Asked) -> Contribution:
        if isinstance(asked, Evaluation):
            return replace(asked, gradient=self.contribution(asked.gradient))
        assert isinstance(asked, Gradient)
        return PlacedGradient(asked.loss, asked.features)

    def local_steps(self, asked: Asked) -> LocalSteps | None:
        return None


class Networks:
    """The models that a party has installed, checked on made-up examples of its records' shape."""

    def __init__(self, policy: "Policy", records: "Examples") -> None:
        self._models, self._limits = policy.models, policy.limits
        self._networks: dict[str, Network] = {}
        self.records = records
        for name, model in policy.models.items():
            self._networks[name] = found = _installed(name, model, policy)
            self.records = found.check(self.records)

    @property
    def largest(self) -> int:
        return EACH * max(model.weights for model in self._models.values())

    def refuse(self, question: Question) -> None:
        asked = question.contribution
        if not isinstance(asked, NetworkAsk):
            refuse(Reason.MODEL, f"this guard answers about networks: {', '.join(self._models)}")
        model = self._models.get(asked.network)
        if model is None:
            refuse(Reason.MODEL, f"installed models: {', '.join(self._models)}")
        if asked.source != model.hash:
            refuse(Reason.MODEL, "the source of this model differs from the coordinator's")
        if question.shape != (size := (self._networks[asked.network].size,)):
            refuse(Reason.SHAPE, f"this model has {size[0]} weights")
        if asked.steps > model.steps:
            refuse(Reason.ROUNDS, f"at most {model.steps} local steps a round are allowed")
        if asked.kind is NetworkKind.EVALUATION:
            _refuse_evaluation(self._limits)
        if asked.kind is NetworkKind.STEPS and self._limits.trust is not Trust.LOCAL:
            refuse(Reason.TRUST, "local steps need all of their noise: only under local trust")

    def contribution(self, asked: Asked) -> Contribution:
        assert isinstance(asked, NetworkAsk)
        network = self._networks[asked.network]
        if asked.kind is NetworkKind.UPDATE:
            return network.update(asked.steps, asked.lr, asked.batch)
        if asked.kind is NetworkKind.EVALUATION:
            return Evaluation(network.gradient, asked.cap, asked.clip)
        return network.gradient

    def local_steps(self, asked: Asked) -> LocalSteps | None:
        assert isinstance(asked, NetworkAsk)
        if asked.kind is not NetworkKind.STEPS:
            return None
        gradient = self._networks[asked.network].gradient
        return LocalSteps(gradient, asked.steps, asked.lr, asked.proximal)


def _refuse_evaluation(limits: "Limits") -> None:
    if not limits.evaluation:
        refuse(Reason.EVALUATION, "the policy allows no evaluation on these records")


def _installed(name: str, model: InstalledModel, policy: "Policy") -> "Network":
    """Return a model made by its factory, if its source and size are what the policy says."""
    from farthing.torch.training.network import Network

    where = f"[models.{name}]"
    source = checked_source(where, model.names, model.hash, policy.modules)
    make, loss = (factories.found(one, policy.modules) for one in model.names)
    try:
        made = Network(make(), loss, name=name, source=source, most=2 * policy.size, placed=True)
    except FarthingError as error:
        raise InvalidValue(f"{where}: {error}") from None
    except Exception as error:  # of the factory, which sees no record
        raise InvalidValue(f"{where}: {model.factory} failed ({type(error).__name__}: {error})") from None
    if made.size > model.weights:
        raise InvalidValue(f"{where}: weights must be at least {made.size}, which the model has")
    return made
