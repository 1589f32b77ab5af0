"""Account for privacy: accountants and privacy filters, each with the theorem that it rests on.

`pld` is tight for plans that are fixed ahead, `filters` hold where the next price depends on the last answer,
and `calibrate` turns a budget into noise or steps. `api` answers the three questions people ask before a run.
"""
