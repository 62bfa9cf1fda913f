"""The optimizers."""

from .adagrad import Adagrad
from .adam import Adam, AdamW
from .clip import clip_grad_norm_
from .convert import from_torch, to_torch
from .rmsprop import RMSprop
from .sgd import SGD

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
