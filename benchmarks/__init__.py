"""Side by side with peers, in one run; every script prints ratios."""
