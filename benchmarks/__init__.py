"""Compare with peers side by side, in one run; every script prints ratios."""
