"""Parameters whose device counts their steps: what the host learns of it later."""

from collections.abc import Sequence

from .. import ops
from ._algorithm import Group
from ._binding import Binding
from ._step import Step


def settle_(binding: Binding | None, group: Group, *, waits: bool = True) -> None:
    """Gives the state what the device has counted, and raises what it has refused.

    A step that the device refused has changed nothing there; later ones have gone on. Without
    waiting, only what the device has reported by now.
    """
    counting = None if binding is None else binding.counting
    if binding is None or counting is None or not (waits or counting.has_refused()):
        return
    extra_steps, values, ids = counting.settle_()
    binding.step_count.value += extra_steps
    owner = f"the gradient of the parameter of shape {list(binding.parameter.shape)}"
    left_out = "the device has left these steps out"
    if ids:
        raise ValueError(
            f"{owner} must have row ids between 0 and {binding.parameter.shape[0] - 1}, ascending "
            f"if it is coalesced, got others in {ids} earlier steps; {left_out}"
        )
    if values and group.get("nonfinite", "raise") == "raise":
        raise ValueError(
            f"{owner} must be finite and within {ops.LARGEST_GRADIENT:.2g}, got NaN, inf or more "
            f'in {values} earlier steps; {left_out}. nonfinite="skip" skips and counts such steps'
        )
    if values:
        binding.state["skipped"] = binding.state.get("skipped", 0) + values


def launch_together_(steps: Sequence[Step]) -> None:
    """Starts steps that devices count, several tables at once where the same kernels take them."""
    counted = [it for it in steps if it.binding.counting is not None]
    if len(counted) > 1 and (counting := counted[0].binding.counting) is not None:
        counting.launch_together_([it.prepared for it in counted])
