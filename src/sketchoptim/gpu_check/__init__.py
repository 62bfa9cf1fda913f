"""`sketchoptim check gpu`: whether the kernels of a GPU are right there, and what they cost."""

from ._report import Report
from ._run import check_gpu

__all__ = ["Report", "check_gpu"]
