"""The optimizers."""

from ._adagrad import Adagrad
from ._adam import Adam, AdamW
from ._clip import clip_grad_norm_
from ._convert import from_torch, to_torch
from ._rmsprop import RMSprop
from ._sgd import SGD

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "RMSprop",
    "clip_grad_norm_",
    "from_torch",
    "to_torch",
]
