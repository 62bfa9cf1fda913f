"""Gradients that stay what they are made of until an optimizer reads them, block by block."""

from ._gradient import DeferredGradient
from ._lookups import Lookups
from ._parts import Part, PlainRows, Reader, Scale

__all__ = ["DeferredGradient", "Lookups", "Part", "PlainRows", "Reader", "Scale"]
