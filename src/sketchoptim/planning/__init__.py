"""From a budget to a storage for each table."""

from ._ladder import Finest as Finest  # for the command line
from ._plan import Plan, PlannedParameter
from ._planner import OptimizerName as OptimizerName
from ._planner import plan

__all__ = ["Plan", "PlannedParameter", "plan"]
