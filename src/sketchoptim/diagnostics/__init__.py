"""Knowing what an optimizer keeps."""

from .memory_report import MemoryReport, memory_report

__all__ = ["MemoryReport", "memory_report"]
