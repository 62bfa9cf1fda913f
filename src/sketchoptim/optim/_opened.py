"""The moments of a live optimizer, to look at or to fill, whatever they are stored in."""

from torch import Tensor

from .. import moments
from ..moments import Moment, Name
from ._slot import parts
from .base import Group, Optimizer


def opened_moments(optimizer: Optimizer, parameter: Tensor, group: Group) -> dict[Name, Moment]:
    """The moments of a parameter that has state, over its tensors."""
    state = optimizer.state[parameter]
    storages = optimizer.storages(group, optimizer._memory(parameter, group))
    opened: dict[Name, Moment] = {}
    for name, storage in storages.items():
        kept = parts(state, name)
        if kept:  # SGD's momentum may have been switched on since the last step
            opened[name] = moments.open_moment(storage, name, kept)
    return opened
