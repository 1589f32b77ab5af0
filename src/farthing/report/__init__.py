"""Write the report: one offline HTML file with a privacy statement, pictures and the hashed ledger.

subject = Subject.of(ledger, title=..., method=..., steps=..., guarantee=..., history=...)
html = page(subject)
"""

from farthing.report.document import broken, page
from farthing.report.subject import ClientGroup, Declared, FederatedRun, Score, Subject

__all__ = ["ClientGroup", "Declared", "FederatedRun", "Score", "Subject", "broken", "page"]
