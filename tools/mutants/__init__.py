"""One-line bugs planted one by one in a copy of the sources: does a test notice each of them?

``make mutants`` runs them all. The ``*.toml`` files beside this one hold the list: a table a source file,
with the tests that should notice and rows ``[old, new, what it breaks]`` (a fourth entry names other tests).
Rows under ``equivalent`` change nothing that any test could see; their third entry says why.
"""
