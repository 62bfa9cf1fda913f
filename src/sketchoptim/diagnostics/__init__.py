"""Knowing what an optimizer keeps."""

from ..moments.sketch_error import SketchError, estimate_error
from .memory_report import MemoryReport, memory_report
from .plan import Plan
from .planner import plan

__all__ = ["MemoryReport", "Plan", "SketchError", "estimate_error", "memory_report", "plan"]
