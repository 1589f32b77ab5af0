"""The ledger: the only way to private records. It prices, charges durably, computes, adds noise, returns.

`ledger` decides with `books` inside a transaction of the `journal`, an append-only, hash-chained file whose
newest hash is kept beside it (`journal_head`). `verifier` recomputes an export without any of this code.
"""
