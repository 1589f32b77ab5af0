"""The audit: attacks a mechanism or a whole training run and says what the attack shows, beside the claim.

    verdict = ft.audit(mechanism, neighbours=(without, with_), claim=ft.Budget(1.0, 1e-5))

The package is the function: ``ft.audit(...)`` is `farthing.audit.auditing.audit`. A verdict is "broken" or
"not refuted"; nothing here proves a guarantee. In a test, `assert_private` takes the same arguments.

>>> import farthing as ft
>>> from farthing.audit import (assert_private, each)
>>> @each
... def constant(data, stream):
...     return 0.0
>>> assert_private(constant, (1, 2), ft.Budget(0.1, 0.0), trials=100)
>>> ft.audit(constant, (1, 2), ft.Budget(0.1, 0.0), trials=100).broken
False
"""

import sys
from types import ModuleType

from farthing.audit.auditing import Verdict, audit, each, judge, section
from farthing.audit.helpers import assert_private, canaries_of, one_run
from farthing.audit.statistics import GaussianCurve, SampledCurve, Unknown

__all__ = [
    "GaussianCurve",
    "SampledCurve",
    "Unknown",
    "Verdict",
    "assert_private",
    "audit",
    "canaries_of",
    "each",
    "judge",
    "one_run",
    "section",
]


class _Audit(ModuleType):
    __call__ = staticmethod(audit)


sys.modules[__name__].__class__ = _Audit
