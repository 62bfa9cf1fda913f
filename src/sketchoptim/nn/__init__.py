"""Layers for huge outputs, whose tables get sparse gradients."""

from .sampled_softmax import SampledSoftmax
from .samplers import LogUniformSampler, Negatives, Repeats, Sampler, UnigramSampler

__all__ = [
    "LogUniformSampler",
    "Negatives",
    "Repeats",
    "SampledSoftmax",
    "Sampler",
    "UnigramSampler",
]
