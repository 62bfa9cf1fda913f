"""Layers for huge outputs, whose tables get sparse gradients."""

from ._aggregation import Aggregation
from ._embedding_bags import EmbeddingBags
from ._feature_hashing import BagEncoder, Bags, FeatureHashing
from ._file_embedding import FileEmbedding
from ._linear_cross_entropy import LinearCrossEntropy, linear_cross_entropy
from ._lsh_softmax import LSHSoftmax
from ._mach import MACH
from ._metrics import recall
from ._sampled_softmax import SampledSoftmax
from ._samplers import LogUniformSampler, Negatives, Repeats, Sampler, UnigramSampler

__all__ = [
    "MACH",
    "Aggregation",
    "BagEncoder",
    "Bags",
    "EmbeddingBags",
    "FeatureHashing",
    "FileEmbedding",
    "LSHSoftmax",
    "LinearCrossEntropy",
    "LogUniformSampler",
    "Negatives",
    "Repeats",
    "SampledSoftmax",
    "Sampler",
    "UnigramSampler",
    "linear_cross_entropy",
    "recall",
]
