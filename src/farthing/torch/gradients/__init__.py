"""Sum bounded per-example gradients at about the cost of one ordinary gradient, with a rule per layer."""
