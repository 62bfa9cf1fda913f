"""One parameter's part of a step: checked first, then run."""

from typing import TYPE_CHECKING, Literal

from torch import Tensor

from .. import _rounding, moments, ops
from ..deferred import DeferredGradient
from ..ops import AnyRule
from . import _shards, _state
from ._binding import Binding

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Step:
    """The step of one parameter, checked; until `run_` nothing has changed.

    Args:
        binding: Of the parameter.
        gradient: Of the right shape, dtype, device and layout.
        rule: What the step does.
        number: How many steps the parameter will have taken.
        nonfinite: The option of its group.
    """

    __slots__ = ("binding", "fallback_reason", "is_skipped", "number", "prepared", "rule")

    def __init__(
        self,
        binding: Binding,
        gradient: Tensor,
        rule: AnyRule,
        number: int,
        nonfinite: Literal["raise", "skip", "unchecked"],
    ) -> None:
        self.binding, self.rule, self.number = binding, rule, number
        self.fallback_reason: str | None = None
        self.prepared = self._prepared(gradient, nonfinite)
        self.is_skipped = not self.prepared.is_finite
        if self.is_skipped and nonfinite == "raise":
            decayed = ", with the weights that decay into it," if rule.weight_decay else ""
            raise ValueError(
                f"the gradient of the parameter of shape {list(binding.parameter.shape)}{decayed} "
                f"must be finite and within {ops.LARGEST_GRADIENT:.2g}, got NaN, inf or more; the "
                'step is refused and nothing has changed. nonfinite="skip" skips and counts such '
                "steps"
            )

    def _prepared(
        self, gradient: Tensor, nonfinite: Literal["raise", "skip", "unchecked"]
    ) -> ops.PreparedStep:
        binding, rule = self.binding, self.rule
        shard, kernels, seed = binding.shard, binding.kernels, binding.rounding_seed
        if shard is not None:
            gradient = _shards.local(gradient)
        is_checked = binding.refuses_nonfinite and nonfinite != "unchecked"
        key = None if seed is None else _rounding.weights_key(seed, self.number)
        if kernels is not None:
            step = kernels.prepare(gradient, rule, is_checked=is_checked, rounding_key=key)
            if step is None and isinstance(gradient, DeferredGradient) and gradient.is_row_sparse:
                # Its rows are sums of output gradients, which the plain gradient shares.
                gradient = gradient.to_sparse_rows()
                step = kernels.prepare(gradient, rule, is_checked=is_checked, rounding_key=key)
            if step is not None:
                return step
            self.fallback_reason = kernels.unsupported_reason(gradient, rule)
        else:
            self.fallback_reason = binding.fallback_reason
        first_row = 0 if shard is None else shard.rows.start
        reference = ops.Reference(binding.local, binding.moments, first_row=first_row)
        return reference.prepare(gradient, rule, is_checked=is_checked, rounding_key=key)

    @property
    def touched(self) -> int:
        """How many rows it moves."""
        return self.prepared.touched

    def run_(self) -> None:
        """Moves the parameter and its moments, or counts a step that is skipped."""
        binding = self.binding
        if self.is_skipped:
            binding.state["skipped"] = binding.state.get("skipped", 0) + 1
            return
        binding.step_count.value = self.number
        if binding.parameter.numel():
            self.prepared.run_()

    def maintain_(self) -> None:
        """Does what is due between this step and the next."""
        if self.is_skipped:
            return
        for moment in self.binding.moments:
            if moment is not None and moment.has_maintenance and moment.maintain_(self.number):
                self.binding.state.update(_state.state_entries(moment.name, moment.tensors))

    # -- for processes that divide the rows (`_exchange.SharedStep`) ---------------------------

    @property
    def parameter(self) -> Tensor:
        """The parameter that it moves."""
        return self.binding.parameter

    @property
    def process_group(self) -> "ProcessGroup | None":
        """The processes that divide the rows among them; None if one process has them all."""
        shard = self.binding.shard
        return None if shard is None else shard.group

    def gather_(self) -> list[Tensor]:
        """Takes in the rows of this process; returns what the processes then sum."""
        kept = [it for it in self.binding.moments if it is not None]
        if not any(it.gathers for it in kept):
            return []
        assert isinstance(self.prepared, ops.ReferenceStep)  # no kernel stops halfway
        self.prepared.gather_()
        return [it.gathered for it in kept if it.gathered is not None]

    def raised(self) -> list[Tensor]:
        """What each process has raised, and whose maximum is the moment's, after the step."""
        table = _shards.table_of(self.parameter, key=0)
        return [
            moment.tensors[part.name]
            for moment in self.binding.moments
            if moment is not None
            for part in moments.declare(moment.storage, moment.name, table)
            if part.combine == "max"
        ]

    def added(self) -> list[Tensor]:
        """What each process adds to a part that all have, after the step."""
        return [it.added for it in self.binding.moments if it and it.added is not None]

    def take_added_(self) -> None:
        """Takes in what the processes have added together."""
        for moment in self.binding.moments:
            if moment is not None and moment.added is not None:
                moment.take_added_()
