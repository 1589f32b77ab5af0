"""What a policy allows of an invitation, and on what terms: public numbers alone, no ledger and no lock.

Pricing a draw takes as long as tight accounting does, up to seconds. So it is done before the guard's lock is
taken, one invitation at a time, and remembered, refusals too. What no policy needs is refused before it is
priced: a Poisson rate below `LEAST_RATE` (unless the policy lists it), noise above `MOST_NOISE`.
"""

import threading
from collections import OrderedDict

from farthing.deploy.guard.policy import Limits
from farthing.deploy.messages import forms
from farthing.deploy.messages.signed import Reason, Refused, refuse
from farthing.errors import FarthingError
from farthing.federated.protocol import ClientAgent
from farthing.federated.terms import Invitation, Terms
from farthing.queries.samplers import Poisson

LEAST_RATE = 1e-6
MOST_NOISE = 1e9  # over the clip
_SMALLEST = 1e-100  # of clips: floats have room below
_REMEMBERED = 1024


class Pricing:
    """Terms for invitations. Safe to call from several threads."""

    def __init__(self, limits: Limits, agent: ClientAgent) -> None:
        self._limits, self._agent = limits, agent
        self._lock = threading.Lock()
        self._known: OrderedDict[Invitation, Terms | Refused] = OrderedDict()

    def terms(self, invitation: Invitation) -> Terms:
        """Our terms for an invitation, if the policy allows them."""
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
        """What can be seen without pricing it."""
        limits, draw = self._limits, invitation.draw
        if invitation.trust is not limits.trust:
            refuse(Reason.TRUST, f"the policy allows {limits.trust} trust only")
        if not _SMALLEST <= invitation.clip <= limits.clip:
            refuse(Reason.CLIP, f"a clip of at most {limits.clip:g} is allowed")
        if not limits.allows_draw(draw):
            allowed = ", ".join(map(forms.draw, limits.draws))
            refuse(Reason.SAMPLER, f"draws that are allowed: {allowed}")
        if isinstance(draw, Poisson) and draw.rate < LEAST_RATE and draw not in limits.draws:
            refuse(Reason.SAMPLER, f"a Poisson rate of at least {LEAST_RATE:g} is allowed, or one listed")
        if invitation.rounds > limits.rounds:
            refuse(Reason.ROUNDS, f"at most {limits.rounds} rounds are allowed")
        if invitation.noise is not None and not limits.noise <= invitation.noise <= MOST_NOISE:
            refuse(Reason.NOISE, f"noise of {limits.noise:g} to {MOST_NOISE:g} is asked for")

    def _priced(self, invitation: Invitation) -> Terms | Refused:
        try:
            terms = self._agent.terms(invitation)
        except (FarthingError, ArithmeticError):
            return Refused(Reason.MALFORMED, "no theorem covers these terms with this budget")
        if terms.mechanism.noise < self._limits.noise:
            return Refused(Reason.NOISE, f"noise of at least {self._limits.noise:g} is asked for")
        return terms
