"""Provide the arithmetic of farthing.torch: noise on tensors, exact float32 sums, kernels in Triton and C."""
