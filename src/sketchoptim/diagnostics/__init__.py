"""Knowing what an optimizer keeps."""

from ..moments.sketch_error import SketchError, estimate_error
from .diagnose import Diagnosis, diagnose
from .memory_report import MemoryReport, memory_report
from .plan import Plan
from .planner import plan
from .power_law import PowerLaw, power_law
from .shadow import Shadow, ShadowRecord
from .watch import watch

__all__ = [
    "Diagnosis",
    "MemoryReport",
    "Plan",
    "PowerLaw",
    "Shadow",
    "ShadowRecord",
    "SketchError",
    "diagnose",
    "estimate_error",
    "memory_report",
    "plan",
    "power_law",
    "watch",
]
