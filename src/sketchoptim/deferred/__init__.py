"""Gradients that stay what they are made of until an optimizer reads them, block by block."""

from . import _operations  # noqa: F401  # registers them
from ._gradient import (
    DeferredGradient,
    gradient_bytes,
    is_row_sparse,
    plain_if_it_exists,
    rows_of,
)
from ._lookups import Lookups, SharedLookups, TableLookups
from ._parts import Part, PlainRows, Reader, Scale
from ._shared import SharedSum, everywhere, gathered_lookups, joined_lookups

__all__ = [
    "DeferredGradient",
    "Lookups",
    "Part",
    "PlainRows",
    "Reader",
    "Scale",
    "SharedLookups",
    "SharedSum",
    "TableLookups",
    "everywhere",
    "gathered_lookups",
    "gradient_bytes",
    "is_row_sparse",
    "joined_lookups",
    "plain_if_it_exists",
    "rows_of",
]
