"""Backends: each takes prepared steps of single parameters and runs them."""

from ._dispatch import Kernels, PreparedStep, find_kernels, reference_only
from ._rule import AnyRule, FusedRule, Rule
from .reference import LARGEST_GRADIENT, Reference, ReferenceStep

__all__ = [
    "LARGEST_GRADIENT",
    "AnyRule",
    "FusedRule",
    "Kernels",
    "PreparedStep",
    "Reference",
    "ReferenceStep",
    "Rule",
    "find_kernels",
    "reference_only",
]
