"""Train by DpOpt: noise whose shape harms the loss least, at the price of DP-SGD.

Xiang, Yang & Li 2019, "Differentially-Private Deep Learning from an Optimization Perspective": of all noises
that cost the same, Σ (Δ_i/σ_i)² <= 1/σ², take the one that moves the loss least. To first order that is the
least Σ g_i² σ_i², and the answer needs no search (they take 50 steps of projected descent):
σ_i² = σ² (Δ_i/|g_i|) Σ_j Δ_j |g_j|, large where the gradient is small. As published g is the gradient itself,
before any noise, so that the noise tells it. Here it is √E', the de-biased root mean square of what was
released (`farthing.torch.methods.adadp`), and Δ is public and the same for all coordinates of a parameter.

A gradient is clipped in the units of this noise, |g/s| <= C' with s_i² ∝ 1/√E'_i, so the price is that of
`ClipNorm`: a run costs what DP-SGD costs at this noise. This is the opposite of what AdaDP does with the same
estimate; it is here to be compared with (docs/deep-results.md).

>>> DpOpt(nn.Linear(3, 2), 0.1, clip_norm=4.0).bound(1).norm()
4.0
"""

from torch import Tensor, nn

from farthing.torch.methods.adadp import AdaDP, Estimate, mean


class DpOpt(AdaDP):
    """SGD on gradients that are released with DpOpt's noise; used like `AdaDP`.

    Parameters
    ----------
    model : nn.Module
        The model.
    lr : float, default 0.1
        Learning rate.
    clip_norm : float, default 1.0
        The clipping norm while no parameter's gradient exceeds its noise.
    memory : float, default 0.99
        Decay of the mean square that the noise is shaped by, in [0, 1).
    period : int, default 10
        Batches between two shapes of the noise.
    estimate : {"factored", "coordinate", "layer"}, default "factored"
        Over what the mean square is pooled.
    momentum : float, default 0.0
        Momentum of released gradients, in [0, 1).

    Notes
    -----
    Xiang, Yang & Li 2019, with the shape taken from released values; a run costs what DP-SGD costs.

    Examples
    --------
    >>> DpOpt(nn.Linear(3, 2), clip_norm=4.0).bound(1).norm()
    4.0
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.1,
        *,
        clip_norm: float = 1.0,
        memory: float = 0.99,
        period: int = 10,
        estimate: Estimate | str = Estimate.FACTORED,
        momentum: float = 0.0,
    ) -> None:
        super().__init__(
            model,
            lr,
            clip_norm=clip_norm,
            memory=memory,
            period=period,
            estimate=estimate,
            adaptive_rate=False,
            momentum=momentum,
        )

    def _shaped(self, root: Tensor) -> tuple[Tensor, Tensor]:
        scale = root.rsqrt()
        scale = scale / mean(scale.square()).sqrt()
        # a gradient spread evenly over its coordinates keeps its place inside or outside of the clip
        return scale, self._clip.clip * mean(scale.square().reciprocal()).sqrt()
