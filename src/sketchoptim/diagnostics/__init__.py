"""Memory reports, and diagnoses of an optimizer's state."""

from ..moments import SketchError, estimate_error
from ._diagnose import Diagnosis, diagnose
from ._doctor import Checkup, doctor
from ._inspection import inspect_checkpoint as inspect_checkpoint
from ._memory_report import MemoryReport, ParameterMemory, memory_report
from ._power_law import PowerLaw, power_law
from ._watch import watch

__all__ = [
    "Checkup",
    "Diagnosis",
    "MemoryReport",
    "ParameterMemory",
    "PowerLaw",
    "SketchError",
    "diagnose",
    "doctor",
    "estimate_error",
    "memory_report",
    "power_law",
    "watch",
]
