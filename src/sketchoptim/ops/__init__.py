"""Backends, which run prepared steps of single parameters, and what else has C++ kernels."""

from ._bags import Mode, pool_bags
from ._blocks import BlockStep
from ._calls import Calls, RepeatedCalls
from ._dispatch import (
    CountingKernels,
    Kernels,
    PreparedStep,
    RunnableStep,
    counts_steps,
    describe_backend,
    find_kernels,
    reference_only,
    rehearsing_gpu,
)
from ._logits import RunningSoftmax, SoftmaxLoss, differentiate_logits_
from ._native import description as describe_cpu_kernels
from ._rule import AnyRule, FusedRule, Rule
from ._schedule import Schedule
from ._top_classes import Combination, TopClasses, class_scores, top_classes
from .cpu import CpuKernels
from .reference import LARGEST_GRADIENT, Reference, ReferenceStep

__all__ = [
    "LARGEST_GRADIENT",
    "AnyRule",
    "BlockStep",
    "Calls",
    "Combination",
    "CountingKernels",
    "CpuKernels",
    "FusedRule",
    "Kernels",
    "Mode",
    "PreparedStep",
    "Reference",
    "ReferenceStep",
    "RepeatedCalls",
    "Rule",
    "RunnableStep",
    "RunningSoftmax",
    "Schedule",
    "SoftmaxLoss",
    "TopClasses",
    "class_scores",
    "counts_steps",
    "describe_backend",
    "describe_cpu_kernels",
    "differentiate_logits_",
    "find_kernels",
    "pool_bags",
    "reference_only",
    "rehearsing_gpu",
    "top_classes",
]
