"""Bounded sums of per-example gradients, for about the price of one ordinary gradient; a rule for each
layer."""
