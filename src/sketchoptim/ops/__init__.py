"""One step of one parameter: what it does, and who does it."""

from ._dispatch import Step, Stepper, reference_only, stepper
from ._library import rule_to_tensor
from ._rule import Rule
from .reference import LARGEST_GRADIENT

__all__ = [
    "LARGEST_GRADIENT",
    "Rule",
    "Step",
    "Stepper",
    "reference_only",
    "rule_to_tensor",
    "stepper",
]
