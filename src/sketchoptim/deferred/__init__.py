"""Gradients that stay what they are made of until an optimizer reads them, block by block."""

from ._gradient import DeferredGradient, DeferredRows, is_row_sparse, plain_if_it_exists
from ._lookups import Lookups
from ._parts import Part, PlainRows, Reader, Scale
from ._shared import SharedSum, everywhere, gathered_lookups, joined_lookups

__all__ = [
    "DeferredGradient",
    "DeferredRows",
    "Lookups",
    "Part",
    "PlainRows",
    "Reader",
    "Scale",
    "SharedSum",
    "everywhere",
    "gathered_lookups",
    "is_row_sparse",
    "joined_lookups",
    "plain_if_it_exists",
]
