"""Layers for huge outputs, whose tables get sparse gradients."""

from .sampled_softmax import LogUniformSampler, SampledSoftmax, Sampler

__all__ = ["LogUniformSampler", "SampledSoftmax", "Sampler"]
