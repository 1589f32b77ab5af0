"""Give a guard's answers to the turns of one promised plan: cyclic draws, noise correlated over rounds.

Noise of ``bands`` rounds, and the draws that it needs, have no price round by round: the guard promises all
turns of the plan to its ledger as one event before the first answer (`farthing.queries.query.Query.promised`
binds the event to draw, noise, bands and exponent), and answers that plan alone. Each turn is given to one
answer, in order. Noise of earlier turns is kept in memory, as it is as secret as the records: a guard that
was restarted has none, begins a new block of noise and a new division into groups, and its price does not
change (`farthing.queries.correlated`, "Lost history"). A turn that was charged and whose answer was lost is
never given again, so no turn has two noises.

**Which turn a round takes.** Let b be the bands. Two chances of a record must lie b turns apart in every
noise that covers it (`farthing.queries.correlated`).

*Local noise.* The k-th answer of a guard is its turn k - 1, whichever round it is for. A round that it misses
takes none. All that an observer sees of its records is this sequence of answers, to which the theorem
applies as it stands: neither rounds nor other parties occur in it.

*Shares (distributed noise).* Round r of a run takes turn f + r - 1, of every member of its session, and a
guard that has fewer turns behind it forfeits those in between: they are charged, and nothing is released for
them. f is where the plan stood when the run began: guards say so when they agree to the terms, and the
coordinator states one f to all. Counting its own answers would not do. Say that a record of guard A is drawn
in rounds r and r + b, and that guard B answered in no round between: as its turns k and k + 1, B's shares of
the two sums would have the record's shifts in rows k to k + b of its noise, which overlap in b - 1 rows, and
shifts that add up there cost more than their roots of squares. With turns that the session names there is no
overlap: a session is identified by a digest that covers its round and f
(`farthing.deploy.secagg.protocol.session_of`), so all honest members of one sum release the same turn or
nothing; two chances of a record are at least b turns of its own guard apart, and with them the turns of every
honest member of these two sums; and of a guard each turn is in one sum at most. That is what the theorem on
shares needs ("Shares"), whoever is there in which rounds, over however many runs, and whatever f a
coordinator states. Forfeited turns are turns without a release, and a guard that skipped some has lost its
history.

The guarantee is that of the plan, for one unit under the policy's adjacency; against the server (local), or
whoever sees sums over at least ``survivors`` honest parties (shares).
"""

from farthing.budget import Budget
from farthing.deploy.messages.forms import Question
from farthing.federated.terms import NOTHING, Invitation, Terms, Trust
from farthing.queries.events import Event


def has_plan(terms: Terms) -> bool:
    """Return whether all rounds on these terms are one plan."""
    return terms.query(NOTHING).remembers


def charged_as(terms: Terms, budget: Budget) -> Event:
    """Return the event as which a round is charged: its price, or a turn of the plan."""
    return terms.query(NOTHING).promised(budget, max(1, terms.rounds))


def turn_of(question: Question, terms: Terms) -> int | None:
    """Return the turn that all shares of a round are of; None where the next one of the guard will do."""
    if not shares_plan(question.invitation, terms):
        return None
    return question.first + question.turn.round - 1


def shares_plan(invitation: Invitation, terms: Terms) -> bool:
    """Return whether a guard's answers are shares of one plan, which all members take at one turn."""
    return invitation.trust is Trust.DISTRIBUTED and has_plan(terms)
