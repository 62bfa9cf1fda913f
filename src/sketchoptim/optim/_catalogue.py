"""The optimizers by name: the one list of them."""

from ._adagrad import Adagrad
from ._adam import Adam, AdamW
from ._rmsprop import RMSprop
from ._sgd import SGD
from .base import Optimizer

OPTIMIZERS: dict[str, type[Optimizer]] = {
    kind.__name__: kind for kind in (Adam, AdamW, RMSprop, Adagrad, SGD)
}
