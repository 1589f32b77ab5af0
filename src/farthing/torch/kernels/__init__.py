"""Arithmetic of farthing.torch: noise on tensors, exact float32 sums, and kernels in Triton and C."""
