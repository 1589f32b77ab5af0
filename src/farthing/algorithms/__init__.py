"""One paper a file: a method is a generator of `farthing.query.Step`s that asks a ledger until it ends."""
