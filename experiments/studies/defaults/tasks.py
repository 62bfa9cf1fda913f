"""What the tasks have in common, and their names."""

from collections.abc import Callable
from typing import NamedTuple

from .methods import Rates


class Result(NamedTuple):
    """What a run ends with."""

    value: float
    state_bytes: int


class Task(NamedTuple):
    """One model over one data set.

    Args:
        run: Trains with a method, rates and a seed.
        metric: The name of the result.
        is_loss: Whether less is better.
        rates: Of the tables, that are tried for Adam, from the least to the largest.
        rest: The rate of all else, if there is any.
        rows: Of each table.
    """

    run: Callable[[str, Rates, int], Result]
    metric: str
    is_loss: bool
    rates: tuple[float, ...]
    rest: float
    rows: tuple[int, ...]
