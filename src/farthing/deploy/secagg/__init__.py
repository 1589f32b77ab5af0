"""Secure aggregation: a server learns the sum of vectors, and of no vector anything else."""
