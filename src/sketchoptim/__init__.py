"""Optimizers for PyTorch whose state is half a byte a row.

>>> import torch, sketchoptim as so
>>> model = torch.nn.EmbeddingBag(10_000, 64, sparse=True, mode="sum")
>>> optimizer = so.Adam(model.parameters(), lr=0.01)  # instead of torch.optim.SparseAdam
"""

from importlib.metadata import version

from . import nn
from ._files import save_checkpoint
from ._param_groups import find_tables, param_groups
from ._sketch import CountMinSketch, CountSketch
from ._sparse_norm import enable_sparse_clipping
from .arming import defer_gradients, materialize_gradients
from .deferred import DeferredGradient
from .diagnostics import diagnose, doctor, memory_report
from .optim import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    RMSprop,
    clip_grad_norm_,
    from_torch,
    replace_parameters,
    to_torch,
)
from .planning import plan
from .storage import Exact, Memory, Quantized, RankOne, RowWise, Sketched, TopSingular

__version__ = version("sketchoptim")

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "CountMinSketch",
    "CountSketch",
    "DeferredGradient",
    "Exact",
    "Memory",
    "Quantized",
    "RMSprop",
    "RankOne",
    "RowWise",
    "Sketched",
    "TopSingular",
    "clip_grad_norm_",
    "defer_gradients",
    "diagnose",
    "doctor",
    "enable_sparse_clipping",
    "find_tables",
    "from_torch",
    "materialize_gradients",
    "memory_report",
    "nn",
    "param_groups",
    "plan",
    "replace_parameters",
    "save_checkpoint",
    "to_torch",
]
