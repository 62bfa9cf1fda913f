"""Plans, memory reports, and diagnoses of an optimizer's state."""

from ..moments._sketch_error import SketchError, estimate_error
from ._diagnose import Diagnosis, diagnose
from ._memory_report import MemoryReport, memory_report
from ._plan import Plan
from ._planner import plan
from ._power_law import PowerLaw, power_law
from ._watch import watch

__all__ = [
    "Diagnosis",
    "MemoryReport",
    "Plan",
    "PowerLaw",
    "SketchError",
    "diagnose",
    "estimate_error",
    "memory_report",
    "plan",
    "power_law",
    "watch",
]
