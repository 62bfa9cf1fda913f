"""Parameters whose device counts their steps: what the host tells it, and what it learns later."""

from typing import TYPE_CHECKING

from torch import Tensor

from .. import ops
from ..ops import AnyRule, FusedRule, Schedule
from ._binding import Binding

if TYPE_CHECKING:
    from .base import Group, Optimizer


def scheduled(
    optimizer: "Optimizer", rule: AnyRule, group: "Group", binding: Binding, gradient: Tensor
) -> AnyRule:
    """The rule of the next step with what its numbers come from.

    A class that gives a rule but no schedule has its numbers taken as they are.
    """
    if not isinstance(rule, FusedRule):  # the reference takes the step, by the host's numbers
        settle_(binding, group)
        return rule
    step = int(binding.step_count.value) + 1 - binding.began_after
    schedule = Schedule(step, rule.step_size)
    owner = next(it for it in type(optimizer).__mro__ if "rule" in vars(it))
    if "schedule" in vars(owner) and optimizer.schedule is not None:
        schedule = optimizer.schedule(
            group, step, memory=binding.memory, is_sparse=gradient.is_sparse
        )
    return rule._replace(schedule=schedule)


def settle_all_(optimizer: "Optimizer") -> None:
    """Waits for the devices that count steps; see `settle_`."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            binding = optimizer._bindings.get(id(parameter))
            if binding is not None:
                settle_(binding, group)


def settle_(binding: Binding, group: "Group", *, waits: bool = True) -> None:
    """Gives the state what the device has counted, and raises what it has refused.

    A step that the device refused has changed nothing there; later ones have gone on. Without
    waiting, only what the device has reported by now.
    """
    counting = binding.counting
    if counting is None or not (waits or counting.has_refused()):
        return
    extra_steps, values, ids = counting.settle_()
    binding.step_count.value += extra_steps
    owner = f"the gradient of the parameter of shape {list(binding.parameter.shape)}"
    left_out = "the device has left these steps out"
    if ids:
        raise ValueError(
            f"{owner} must have row ids between 0 and {binding.parameter.shape[0] - 1}, got "
            f"others in {ids} earlier steps; {left_out}"
        )
    if values and group["nonfinite"] == "raise":
        raise ValueError(
            f"{owner} must be finite and within {ops.LARGEST_GRADIENT:.2g}, got NaN, inf or more "
            f'in {values} earlier steps; {left_out}. nonfinite="skip" skips and counts such steps'
        )
    if values:
        binding.state["skipped"] = binding.state.get("skipped", 0) + values
