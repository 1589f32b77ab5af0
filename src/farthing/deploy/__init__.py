"""Run parties on machines of their own, under a coordinator that nobody has to trust.

`serve` runs the coordinator and `join` a party. Each party answers through its `guard`, which alone holds its
records, its noise and its ledger; `messages` are signed, `secagg` reveals only sums, and `flower` carries
opaque bytes.
"""
