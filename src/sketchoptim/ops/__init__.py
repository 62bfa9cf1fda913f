"""One step of one parameter: what it does, and who does it."""

from .reference import LARGEST_GRADIENT, is_finite, step_
from .rule import Rule

__all__ = ["LARGEST_GRADIENT", "Rule", "is_finite", "step_"]
