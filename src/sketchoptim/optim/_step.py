"""One parameter's part of a step: checked first, then run."""

from typing import TYPE_CHECKING, Literal

from torch import Tensor

from .. import _rounding, moments, ops
from ..deferred import DeferredGradient
from ..ops import AnyRule
from . import _checks, _shards, _state
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

    __slots__ = (
        "binding",
        "fallback_reason",
        "gradient",
        "is_skipped",
        "nonfinite",
        "number",
        "prepared",
        "rule",
    )

    prepared: ops.CpuKernels | ops.RunnableStep

    def __init__(
        self,
        binding: Binding,
        gradient: Tensor,
        rule: AnyRule,
        number: int,
        nonfinite: Literal["raise", "skip", "unchecked"],
    ) -> None:
        self.binding, self.rule, self.number = binding, rule, number
        self.nonfinite = nonfinite
        self.fallback_reason: str | None = None
        self.is_skipped = False
        kernels, seed, shard = binding.kernels, binding.rounding_seed, binding.shard
        is_checked = binding.refuses_nonfinite and nonfinite != "unchecked"
        key = None if seed is None else _rounding.weights_key(seed, number)
        if shard is not None or type(gradient) is DeferredGradient:
            _checks.check_gradient(binding.parameter, gradient)
            gradient = gradient if shard is None else _shards.local(gradient)
        prepared: ops.CpuKernels | ops.RunnableStep | None = None
        if kernels is not None:
            prepared = kernels.prepare(gradient, rule, is_checked=is_checked, rounding_key=key)
            if prepared is None and type(gradient) is DeferredGradient and gradient.is_row_sparse:
                # Its rows are sums of output gradients, which the plain gradient shares.
                gradient = gradient.to_sparse_rows()
                prepared = kernels.prepare(gradient, rule, is_checked=is_checked, rounding_key=key)
        if prepared is None:
            if shard is None:
                _checks.check_gradient(binding.parameter, gradient)
            prepared = self._prepared_by_reference(gradient, is_checked=is_checked, key=key)
        self.gradient, self.prepared = gradient, prepared  # which points to the gradient

    def _prepared_by_reference(
        self, gradient: Tensor, *, is_checked: bool, key: int | None
    ) -> ops.ReferenceStep:
        binding, rule, shard = self.binding, self.rule, self.binding.shard
        if binding.kernels is None:
            self.fallback_reason = binding.fallback_reason
        else:
            self.fallback_reason = binding.kernels.unsupported_reason(gradient, rule)
        first_row = 0 if shard is None else shard.rows.start
        reference = ops.Reference(binding.local, binding.moments, first_row=first_row)
        return reference.prepare(
            gradient, rule, is_checked=is_checked, rounding_key=key, number=self.number
        )

    def settle_(self) -> None:
        """Skips or refuses what was found to be unfit to run."""
        prepared = self.prepared
        if type(prepared) is ops.CpuKernels and prepared.has_ids_outside:
            raise prepared.ids_error(self.gradient)
        self.is_skipped = not prepared.is_finite
        if self.is_skipped and self.nonfinite == "raise":
            decayed = ", with the weights that decay into it," if self.rule.weight_decay else ""
            raise ValueError(
                f"the gradient of the parameter of shape {list(self.parameter.shape)}{decayed} "
                f"must be finite and within {ops.LARGEST_GRADIENT:.2g}, got NaN, inf or more; the "
                'step is refused and nothing has changed. nonfinite="skip" skips and counts such '
                "steps"
            )

    @property
    def touched(self) -> int:
        """How many rows it moves."""
        return self.prepared.touched

    def skip_(self) -> None:
        """Leaves the step out."""
        self.is_skipped = True
        if type(self.prepared) is ops.CpuKernels:
            self.prepared.skip_()

    def reserve_(self) -> None:
        """Allocates what a step in blocks of rows needs; nothing has changed yet."""
        prepared = self.prepared
        if type(prepared) is ops.BlockStep and not self.is_skipped and self.parameter.numel():
            prepared.reserve_()

    def run_(self) -> None:
        """Moves the parameter and its moments, unless it is skipped or `ops.Calls` does so."""
        binding, prepared = self.binding, self.prepared
        if self.is_skipped or type(prepared) is ops.CpuKernels:
            return
        binding.step_count.value = self.number
        if binding.parameter.numel():
            prepared.run_()

    def count_skip_(self) -> None:
        """Counts a step that is not taken."""
        state = self.binding.state
        state["skipped"] = state.get("skipped", 0) + 1

    def maintain_(self) -> None:
        """Does what is due between this step and the next."""
        for moment in self.binding.maintained:
            if moment.maintain_(self.number):
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
        table = _shards.table_of(self.parameter, 0, self.binding.state)
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
        averages = (self.rule.first, self.rule.second)
        for moment, average in zip(self.binding.moments, averages, strict=True):
            if moment is not None and moment.added is not None and average is not None:
                moment.take_added_(average)
