"""Layers for huge outputs, whose tables get sparse gradients."""

from .lsh_softmax import LSHSoftmax
from .sampled_softmax import SampledSoftmax
from .samplers import LogUniformSampler, Negatives, Repeats, Sampler, UnigramSampler

__all__ = [
    "LSHSoftmax",
    "LogUniformSampler",
    "Negatives",
    "Repeats",
    "SampledSoftmax",
    "Sampler",
    "UnigramSampler",
]
