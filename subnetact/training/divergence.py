"""Divergences: how far the class scores of a subnet are from those of its teacher."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["alpha_divergence", "cross_entropy"]


def cross_entropy(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean cross-entropy with the teacher's probabilities, of scores (N, classes, ...)."""
    return F.cross_entropy(student.float(), teacher.float().softmax(1))


def alpha_divergence(student: Tensor, teacher: Tensor, clip: float = 5.0) -> Tensor:
    """Return the larger one of two alpha-divergences per sample, averaged, with clipped ratios.

    With alpha = 1, the Kullback-Leibler divergence, a student is punished for classes that it deems too
    unlikely; with alpha = -1, for those that it deems too likely. Give it to `sandwich_step` or `distill_` as
    `divergence`.

    Args:
        student: class scores of shape (N, classes, ...), with gradients.
        teacher: class scores of the same shape.
        clip: the ratios of the two probabilities are clipped at this value, which bounds the gradients.

    Returns:
        A scalar whose gradient is that of the divergences with clipped ratios as importance weights.

    Source:
        AlphaNet (ICML'21), equations 5 to 7.
    """
    log_q, log_p = student.float().log_softmax(1), teacher.float().log_softmax(1)
    q = log_q.detach().exp()
    ratio = (log_p - log_q.detach()).clamp(-60.0, 60.0).exp()  # far beyond any clip, and finite
    above, below = ratio.clamp(max=clip), ratio.reciprocal().clamp(max=clip)
    values = torch.stack([(q * above * above.log()).sum(1), 0.5 * ((q * below).sum(1) - 1.0)])
    gradients = torch.stack([-(q * above * log_q).sum(1), (q * below * log_q).sum(1)])
    chosen = values.argmax(0, keepdim=True)
    value, gradient = values.gather(0, chosen).mean(), gradients.gather(0, chosen).mean()
    return value + gradient - gradient.detach()
