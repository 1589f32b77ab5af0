"""Aggregate securely: a server learns the sum of the parties' vectors, and nothing else about any of them."""
