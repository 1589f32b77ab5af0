"""Plant one-line bugs one by one in a copy of the sources, and check that a test detects each.

``make mutants`` runs them all. The ``*.toml`` files beside this one hold the list: one table per source file,
with the tests that should fail and rows ``[old, new, what it breaks]`` (a fourth entry names other tests).
Rows under ``equivalent`` change nothing that a test could observe; their third entry says why.
"""
