"""Backends: each takes prepared steps of single parameters and runs them."""

from ._bags import Mode, pool_bags
from ._dispatch import (
    CountingKernels,
    Kernels,
    PreparedStep,
    counts_steps,
    find_kernels,
    reference_only,
)
from ._rule import AnyRule, FusedRule, Rule
from ._schedule import Schedule
from .reference import LARGEST_GRADIENT, Reference, ReferenceStep

__all__ = [
    "LARGEST_GRADIENT",
    "AnyRule",
    "CountingKernels",
    "FusedRule",
    "Kernels",
    "Mode",
    "PreparedStep",
    "Reference",
    "ReferenceStep",
    "Rule",
    "Schedule",
    "counts_steps",
    "find_kernels",
    "pool_bags",
    "reference_only",
]
