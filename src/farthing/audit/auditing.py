"""Attack a mechanism in two worlds, one with a record and one without, and judge its claim.

An audit never proves a guarantee: a verdict is "broken" or "not refuted".
"""

import html
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from farthing import validate
from farthing.audit import thresholds
from farthing.audit.statistics import (
    Curve,
    FittedStatistic,
    LastBits,
    Outcomes,
    Projection,
    Unknown,
    caught,
    lowest_bit,
    value,
)
from farthing.audit.thresholds import FlagRule, Statistic
from farthing.budget import Budget, Shown
from farthing.errors import InvalidValue
from farthing.noise.lattice import Stream

_SHAPES = ("additive", "additive-regression")
# attack names: for labels, and for numbers
ATTACKED_AS = {
    "auto": ("descent", "least-squares", *_SHAPES),  # of a model that is linear, or boosted
    "logistic": ("descent",),
    "linear": ("least-squares",),
    "additive": _SHAPES,
    "boosted": _SHAPES,
    "sgd-ma": ("dpsgd",),
    "sgd-adv": ("sgd-adv", "sgd-adv-clients"),
    "sgd1": ("sgd1", "sgd1-drawn", "sgd1-seen"),
    "addp": ("addp", "addp-poisson", "addp-seen"),
}
# names of train and simulate that no attack is for, and why
NOT_ATTACKED = {
    "nonprivate": "it claims no privacy, so that there is nothing to refute",
    "dp-fedavg": "it protects whole parties, and what it releases is one Gaussian answer: attack gaussian",
    "sgd-pass": "it draws records in turn, which can only be simulated: no ledger answers it",
}


def attacks(method: str) -> tuple[str, ...]:
    """Return the attack names of what `farthing train` and the estimators call ``method``.

    >>> attacks("linear"), attacks("dpagd")
    (('least-squares',), ('dpagd',))
    """
    return ATTACKED_AS.get(method, (method,))


@dataclass(frozen=True, slots=True)
class Verdict(Shown):
    """A lower bound on ε at the claim's δ, beside the claim.

    Parameters
    ----------
    eps_lower : float
        The bound; it is wrong with probability 1 - confidence at most.
    claim : Budget
        What was claimed.
    trials : int
        Runs in each of the two worlds that were counted (not those on which a threshold was chosen), or
        canaries in one run.
    confidence : float
        The probability with which the bound holds at least.
    attack : str
        What was done, in a few words.
    assumption : str, default ""
        What was taken for granted, if anything.
    trial : str, default "runs a world"
        What a trial is.
    caught : float or callable, optional
        `catches`, or a function that computes it when it is asked for.
    exact : float, optional
        The ε of the answers that were asked, composed exactly (`farthing.accounting.pld`): no attack can show
        more. It is below the claim where the method's own accounting is loose. None where it is not known.

    Examples
    --------
    >>> print(Verdict(7.49, Budget(0.689, 1e-5), 10_000, 0.99, "a canary"))
    broken: ε is at least 7.49 with 99 % confidence, and 0.689 is claimed (a canary, 10,000 runs a world)
    >>> Verdict(0.03, Budget(0.235, 1e-5), 10_000, 0.99, "a canary").word
    'not refuted'
    """

    eps_lower: float
    claim: Budget
    trials: int
    confidence: float
    attack: str
    assumption: str = ""
    trial: str = "runs a world"
    caught: float | Callable[[], float] | None = field(default=None, repr=False, compare=False)
    exact: float | None = None

    @property
    def broken(self) -> bool:
        """Return whether the claim is refuted. False says only that this attack did not refute it."""
        return self.eps_lower > self.claim.epsilon

    @property
    def word(self) -> str:
        """Return "broken" or "not refuted"."""
        return "broken" if self.broken else "not refuted"

    @property
    def catches(self) -> float | None:
        """Return the power of the attack, the smallest ε that it would have refuted the claim for.

        Had the method really had it, the same attack with as many trials would have refuted the claim in nine
        of ten tries. Infinite where it could not have refuted it at all; None where it is not known. It is an
        estimate (`statistics.caught`).
        """
        return self.caught() if callable(self.caught) else self.caught

    @property
    def share(self) -> float:
        """Return the bound over what an attack could show at most, the exact ε or else the claim."""
        return self.eps_lower / (self.claim.epsilon if self.exact is None else self.exact)

    @property
    def power(self) -> str:
        """Return `catches` in a word."""
        catches = self.catches
        if catches is None:
            return "not known"
        return f"{catches:.3g}" if math.isfinite(catches) else "none"

    def __str__(self) -> str:
        given = f", given that {self.assumption}" if self.assumption else ""
        return (
            f"{self.word}: ε is at least {_short(self.eps_lower)} with {100 * self.confidence:g} % confidence"
            f"{given}, and {self.claim.epsilon:g} is claimed ({self.attack}, {self.trials:,} {self.trial})"
        )

    def fields(self) -> dict[str, Any]:
        """Return plain JSON values; an infinite bound or power is null, an unknown power is left out."""
        catches = self.catches
        power = {} if catches is None else {"catches": catches if math.isfinite(catches) else None}
        return {
            "verdict": self.word,
            "broken": self.broken,
            "eps_lower": self.eps_lower if math.isfinite(self.eps_lower) else None,
            "eps_exact": self.exact,
            "claim": {name: _value(value) for name, value in asdict(self.claim).items()},
            **power,
            "attack": self.attack,
            "trials": self.trials,
            "confidence": self.confidence,
            "assumption": self.assumption,
        }


def _value(value: Any) -> float | str:
    return value if isinstance(value, float | int) else str(value)


def _short(value: float) -> str:
    """Return a lower bound with three digits, rounded down so that it stays one."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.floor(value / unit + 1e-9) * unit:.3g}"


def section(verdicts: Iterable[tuple[str, Verdict]], title: str = "Audit") -> str:
    """Return an HTML section for a report, with one row per verdict. All text is escaped.

    Parameters
    ----------
    verdicts : iterable of (str, Verdict)
        What was attacked, and what came out.
    title : str, default "Audit"
        The heading.

    Returns
    -------
    str

    Examples
    --------
    >>> verdict = Verdict(0.5, Budget(1.0, 1e-5), 100, 0.99, "a < b")
    >>> "a &lt; b" in section([("<mean>", verdict)]) and "<mean>" not in section([("<mean>", verdict)])
    True
    """
    verdicts = list(verdicts)
    common = {f"{100 * verdict.confidence:g} %" for _, verdict in verdicts}
    heads = ["verdict", "method", "attack", "ε at least", "ε exact", "ε claimed", "catches ε from"]
    heads += ["δ", "neighbours", "trials"] + ["confidence"] * (len(common) > 1)
    rows = []
    for name, verdict in verdicts:
        claim = verdict.claim
        attack = (
            f"{verdict.attack}; given that {verdict.assumption}" if verdict.assumption else verdict.attack
        )
        cells = [
            verdict.word,
            name,
            attack,
            _short(verdict.eps_lower),
            "not known" if verdict.exact is None else f"{verdict.exact:.4g}",
            f"{claim.epsilon:.4g}",
            verdict.power,
            f"{claim.delta:g}",
            str(claim.adjacency),
            f"{verdict.trials:,}",
            f"{100 * verdict.confidence:g} %",
        ]
        row = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells[: len(heads)])
        rows.append(f'<tr class="{"broken" if verdict.broken else "standing"}">{row}</tr>')
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    confidence = common.pop() if len(common) == 1 else "the stated"
    note = (
        "Each row is an attack on two neighbouring data sets, and a lower bound on ε that holds with "
        f"{confidence} confidence. Broken: the bound is above the claim. Not refuted: this attack did not "
        "show that, which is no proof. ε exact is that of the answers that were asked, composed exactly: no "
        "attack can show more, and it is below the claim where a method's own accounting is loose. The "
        "column 'catches ε from' is the power of an attack: the smallest true ε for which it would have "
        "refuted the claim in nine of ten tries; none where it could not have refuted it."
    )
    return (
        f'<section class="audit"><h2>{html.escape(title)}</h2><p>{note}</p>'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></section>"
    )


Mechanism = Callable[[Any, int, Stream], Any]

_WIDEST = 8  # bytes of a number: what lies below the last bit of a float64 would not be looked at


def audit_mechanism(
    mechanism: Mechanism,
    neighbours: tuple[Any, Any],
    claim: Budget,
    statistic: Statistic | Sequence[Statistic] | None = None,
    trials: int = 10_000,
    confidence: float = 0.99,
    *,
    threshold: float | None = None,
    curve: Curve | None = None,
    attack: str = "",
    stream: Stream | None = None,
) -> Verdict:
    """Attack a mechanism on two neighbouring data sets, and judge its claim.

    Parameters
    ----------
    mechanism : callable
        ``mechanism(data, runs, stream)``, which returns ``runs`` outputs, one a row; `each` makes one of a
        function that returns a single output. Mechanisms of diffprivlib and measurements of OpenDP are taken
        as they are.
    neighbours : (without, with)
        Two data sets that the claim's adjacency calls neighbours.
    claim : Budget
        What the mechanism is said to be.
    statistic : callable, FittedStatistic or a sequence of them, optional
        What is looked at in outputs: one number a run, large where it says "with". None looks at outputs as
        they are, projected if they are vectors, at how often each occurs if they are whole numbers, and at
        the last bits of floats (`statistics.lowest_bit`, `statistics.LastBits`), which show noise that was
        added in floats.
    trials : int, default 10,000
        Runs in each world.
    confidence : float, default 0.99
        The probability with which the bound holds at least.
    threshold : float, optional
        Runs whose statistic is at least this are flagged. None: half of the trials in each world choose it
        (and the statistic where there are several), and only the others are counted.
    curve : Curve, optional
        What may be assumed of the mechanism: `GaussianCurve` or `SampledCurve`. None assumes nothing.
    attack : str, default ""
        A name for the verdict.
    stream : Stream, optional
        Where random words come from; a `SeededStream` repeats an audit.

    Returns
    -------
    Verdict

    Raises
    ------
    InvalidValue
        For a claim that is no budget, or a mechanism that does not return one row a run.

    Notes
    -----
    Bounds are those of Clopper & Pearson 1934 on both error rates (`farthing.audit.statistics`).

    Examples
    --------
    >>> from farthing.noise.lattice import (SeededStream, gaussian)
    >>> def noisy_count(people, runs, stream):  # all runs at once: fast
    ...     return people + 0.5 * gaussian(stream, runs, 20) / 2**20
    >>> claim = Budget(1.0, 1e-5)
    >>> audit_mechanism(noisy_count, (100, 101), claim, trials=2000, stream=SeededStream(0)).word
    'broken'
    """
    if not isinstance(claim, Budget):
        raise InvalidValue(f"claim must be a Budget, got {claim!r}")
    trials = validate.count(trials=trials)
    confidence = validate.probability(confidence=confidence)
    if threshold is not None:
        validate.finite(threshold=threshold)
    stream = Stream() if stream is None else stream
    if not isinstance(neighbours, Sequence) or len(neighbours) != 2:
        raise InvalidValue("neighbours must be two data sets, (without, with)")
    without, within = _alike(*(_runs(mechanism, data, trials, stream) for data in neighbours))
    named = _named(_by_default(without, threshold) if statistic is None else statistic)
    if threshold is not None and (len(named) != 1 or isinstance(named[0][1], FittedStatistic)):
        raise InvalidValue("a fixed threshold needs one plain function of the outputs; leave it out")
    return judge(without, within, claim, named, confidence, threshold, curve or Unknown(), attack)


def judge(
    without: Any,
    within: Any,
    claim: Budget,
    statistics: Sequence[tuple[str, Statistic]],
    confidence: float = 0.99,
    threshold: float | None = None,
    curve: Curve = Unknown(),  # noqa: B008  frozen
    attack: str = "",
) -> Verdict:
    """Judge a claim by outputs of both worlds, as many of each.

    Parameters
    ----------
    without, within : array-like
        Outputs of the two worlds, one row a run.
    claim : Budget
        What is claimed.
    statistics : sequence of (str, callable or FittedStatistic)
        Names and statistics; the best on the first half of the runs is used on the second.
    confidence, threshold, curve, attack
        As in `audit_mechanism`.

    Returns
    -------
    Verdict

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> runs = rng.normal(size=1000), rng.normal(9.0, size=1000)
    >>> judge(*runs, Budget(1.0, 1e-5), [("value", value)]).broken
    True
    """
    trials = len(without)
    if len(within) != trials:
        raise InvalidValue(f"both worlds must have equally many runs, got {trials} and {len(within)}")
    if threshold is not None:
        name, plain = statistics[0]
        assert not isinstance(plain, FittedStatistic)
        rule = FlagRule(plain, threshold)
    else:
        half = trials // 2
        if half < 2:
            raise InvalidValue(
                f"trials must be at least 4 where a threshold is chosen on half of them, got {trials}"
            )
        name, rule = thresholds.best(statistics, without[:half], within[:half], curve, claim, confidence)
        without, within, trials = without[half:], within[half:], trials - half
    false, hit = rule.flagged(without), rule.flagged(within)
    strength = float(curve.strengths(hit, false, trials, claim, confidence))
    said = f"{attack}: {name}" if attack and name else attack or name
    power = partial(caught, curve, hit, false, trials, claim, confidence)
    return Verdict(
        curve.epsilon(strength, claim), claim, trials, confidence, said, curve.assumption, caught=power
    )


def each(mechanism: Callable[[Any, Stream], Any]) -> Mechanism:
    """Make a mechanism that returns many outputs from one that returns a single output.

    Parameters
    ----------
    mechanism : callable
        ``mechanism(data, stream)``.

    Returns
    -------
    callable
        ``mechanism(data, runs, stream)``, for `audit_mechanism`.

    Examples
    --------
    >>> each(lambda data, stream: data + 1)(1, 3, Stream())
    array([2, 2, 2])
    """

    def many(data: Any, runs: int, stream: Stream) -> Any:
        return np.array([mechanism(data, stream) for _ in range(runs)])

    return many


def repeated(mechanism: Any) -> Mechanism:
    """Return a mechanism of another library as one that returns many outputs; others as they are."""
    if callable(getattr(mechanism, "randomise", None)):  # diffprivlib
        return each(lambda data, stream: mechanism.randomise(data))
    if hasattr(mechanism, "invoke") and hasattr(mechanism, "map"):  # OpenDP
        return each(lambda data, stream: mechanism(data))
    try:
        inspect.signature(mechanism).bind(None, 1, None)
    except TypeError:
        raise InvalidValue(
            f"the mechanism must be a function of data, runs and a stream, got {type(mechanism).__name__}; "
            "farthing.audit.each makes one of a function of data and a stream with a single output"
        ) from None
    except ValueError:  # of what has no signature
        pass
    many: Mechanism = mechanism
    return many


def _runs(mechanism: Mechanism, data: Any, trials: int, stream: Stream) -> Any:
    outputs = np.asarray(repeated(mechanism)(data, trials, stream))
    if outputs.ndim == 0 or len(outputs) != trials:
        raise InvalidValue(
            f"the mechanism must return one row a run, {trials} of them, got shape {outputs.shape}; "
            "wrap one that returns a single output in farthing.audit.each"
        )
    if outputs.dtype.kind not in "biuf" or outputs.dtype.itemsize > _WIDEST:
        raise InvalidValue(f"outputs must be numbers, or codes of outcomes, got {outputs.dtype}")
    if not outputs.size:
        raise InvalidValue(f"outputs must hold at least one number each, got shape {outputs.shape}")
    return outputs


def _alike(without: Any, within: Any) -> tuple[Any, Any]:
    """Return outputs of both worlds as one kind of numbers, each row in the same form."""
    if without.shape != within.shape:
        raise InvalidValue(
            f"outputs of both worlds must have one shape, got {without.shape} and {within.shape}: a shape "
            "that depends on the data tells the worlds apart by itself"
        )
    kind = np.result_type(without, within)
    return without.astype(kind, copy=False), within.astype(kind, copy=False)


def _by_default(outputs: Any, threshold: float | None) -> Sequence[Statistic]:
    """Return the outputs as they are, and also by outcome or by last bits where a threshold is chosen."""
    plain: Statistic = Projection() if outputs.ndim > 1 and outputs[0].size > 1 else value
    if outputs.dtype.kind in "biu":
        return [Outcomes()] if threshold is not None else [Outcomes(), plain]
    return [plain] if threshold is not None else [plain, lowest_bit, LastBits()]


def _named(statistic: Statistic | Sequence[Statistic]) -> list[tuple[str, Statistic]]:
    parts = list(statistic) if isinstance(statistic, Sequence) else [statistic]
    return [
        (str(getattr(part, "name", None) or getattr(part, "__name__", "statistic")).replace("_", " "), part)
        for part in parts
    ]
