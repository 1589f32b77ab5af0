"""The one door to private records: price, write the charge durably, compute, add noise, return.

`ledger` decides with `books` inside a transaction of the `journal`, an append-only, hash-chained file whose
newest hash is kept beside it (`journal_head`). `verifier` recomputes an export without any of this code.
"""
