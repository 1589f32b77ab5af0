"""Provide random words, exact noise and exact sums: everything below the privacy accounting.

`streams` draws cryptographic random words, `lattice` turns them into Gaussian, Laplace and Gumbel noise on an
integer lattice, and `summing` bounds what rounding adds to a sum. `native` builds the kernels in C on first
use; each has a twin in numpy that gives the same answers.
"""

from farthing.noise.streams import SeededStream, Stream

__all__ = ["SeededStream", "Stream"]
