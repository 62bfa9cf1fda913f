"""Knowing what an optimizer keeps."""

from ..moments.sketch_error import SketchError, estimate_error
from .memory_report import MemoryReport, memory_report

__all__ = ["MemoryReport", "SketchError", "estimate_error", "memory_report"]
