"""Every exception farthing raises on purpose.

    FarthingError
    ├── InvalidValue (also ValueError)       an argument is not what it must be
    ├── Unsupported (also TypeError)         no theorem covers this combination
    ├── BudgetSpent                          the next query does not fit the budget
    ├── PromiseBroken                        a countdown was asked for something it did not price
    ├── NotReleased                          charged earlier, never released: nothing new comes out
    │   └── OutOfMemory (also MemoryError)   charged, and there was no memory for the batch
    └── LedgerLocked                         the journal is damaged, truncated or rolled back

    UserWarning
    └── NotPrivate                           a value of private records that no charge covers

Nothing is released when one of these is raised, and nothing that was charged is given back. Once a query is
charged, only errors with a true ``public`` are raised: whatever else goes wrong might depend on a record
(`farthing.ledger.failsafe`).
"""


class FarthingError(Exception):
    """The root: catch this to catch everything farthing raises on purpose."""

    public = False  # whether it says nothing about records, and so may be raised after a charge


class InvalidValue(FarthingError, ValueError):
    """An argument is out of range; the message names it, its value and the range."""


class Unsupported(FarthingError, TypeError):
    """No theorem known to farthing prices this combination; the message says what to use."""


class BudgetSpent(FarthingError):
    """The next query does not fit what is left of the budget. Nothing was charged for it."""


class PromiseBroken(FarthingError):
    """A countdown prices one unchanging plan; something else was asked or promised too late."""


class NotReleased(FarthingError):
    """This request was charged before and its answer is gone: no second answer is drawn."""

    public = True


class OutOfMemory(NotReleased, MemoryError):
    """There was no memory for a batch. It is charged; the message never says how large it was."""


class LedgerLocked(FarthingError):
    """The journal does not agree with its hash chain or with the head kept beside it."""


class NotPrivate(UserWarning):
    """A value was computed from private records without noise or charge: no guarantee covers it."""
