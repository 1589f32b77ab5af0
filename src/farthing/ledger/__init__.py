"""The ledger: the only way to private records. It prices, charges durably, computes, adds noise, returns.

`ledger` decides with `books` inside a transaction of the `journal`, an append-only, hash-chained file whose
newest hash is kept beside it (`journal_head`). `verifier` recomputes an export without any of this code.
"""

import os

if os.name != "posix":
    raise ImportError(
        "farthing needs a POSIX system such as Linux or macOS: its ledgers lock files by fcntl; on Windows, "
        "use it inside the Windows Subsystem for Linux"
    )
