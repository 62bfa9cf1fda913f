"""From a budget to a storage for each table."""

from ._ladder import Finest as Finest  # for the command line
from ._plan import Plan, PlannedParameter
from ._planner import OptimizerName as OptimizerName
from ._planner import plan
from ._shapes import trained_parameters as trained_parameters  # for param_groups

__all__ = ["Plan", "PlannedParameter", "plan"]
