"""The optimizers, and what a new one is written with."""

from ..moments import Average
from ..ops import FusedRule, Rule
from ._adagrad import Adagrad
from ._adam import Adam, AdamW
from ._catalogue import OPTIMIZERS
from ._clip import clip_grad_norm_
from ._convert import from_torch, to_torch
from ._replace import replace_parameters
from ._rmsprop import RMSprop
from ._sgd import SGD
from .base import Optimizer

__all__ = [
    "OPTIMIZERS",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Average",
    "FusedRule",
    "Optimizer",
    "RMSprop",
    "Rule",
    "clip_grad_norm_",
    "from_torch",
    "replace_parameters",
    "to_torch",
]
