"""Layers for huge outputs, whose tables get sparse gradients."""

from .feature_hashing import BagEncoder, Bags, FeatureHashing
from .lsh_softmax import LSHSoftmax
from .mach import MACH, Aggregation, recall
from .sampled_softmax import SampledSoftmax
from .samplers import LogUniformSampler, Negatives, Repeats, Sampler, UnigramSampler

__all__ = [
    "MACH",
    "Aggregation",
    "BagEncoder",
    "Bags",
    "FeatureHashing",
    "LSHSoftmax",
    "LogUniformSampler",
    "Negatives",
    "Repeats",
    "SampledSoftmax",
    "Sampler",
    "UnigramSampler",
    "recall",
]
