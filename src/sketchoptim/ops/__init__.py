"""One step of one parameter: what it does, and who does it."""

from .dispatch import Step, Stepper, reference_only, stepper
from .library import rule_to_tensor
from .reference import LARGEST_GRADIENT
from .rule import Rule

__all__ = [
    "LARGEST_GRADIENT",
    "Rule",
    "Step",
    "Stepper",
    "reference_only",
    "rule_to_tensor",
    "stepper",
]
