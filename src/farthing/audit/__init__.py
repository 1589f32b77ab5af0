"""Audit privacy claims: attack a mechanism or a whole training run, and compare the result with the claim.

    verdict = ft.audit_mechanism(mechanism, neighbours=(without, with_), claim=ft.Budget(1.0, 1e-5))

A verdict is "broken" or "not refuted"; an audit never proves a guarantee. In a test, use `assert_private`,
which takes the same arguments.

>>> import farthing as ft
>>> from farthing.audit import (assert_private, each)
>>> @each
... def constant(data, stream):
...     return 0.0
>>> assert_private(constant, (1, 2), ft.Budget(0.1, 0.0), trials=100)
>>> ft.audit_mechanism(constant, (1, 2), ft.Budget(0.1, 0.0), trials=100).broken
False
"""

from farthing.audit.auditing import Verdict, audit_mechanism, each, judge, section
from farthing.audit.canaries import assert_private, canaries_of, one_run
from farthing.audit.statistics import GaussianCurve, SampledCurve, Unknown

__all__ = [
    "GaussianCurve",
    "SampledCurve",
    "Unknown",
    "Verdict",
    "assert_private",
    "audit_mechanism",
    "canaries_of",
    "each",
    "judge",
    "one_run",
    "section",
]
