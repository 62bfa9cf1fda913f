"""Deferred gradients under DistributedDataParallel, which leaves their parameters alone.

At the end of a backward pass the processes exchange what the gradients are made of: lookups are
gathered, and the rows of an output head are summed when they are read, block by block. No process
holds a gradient of all rows. As for any parameter under DistributedDataParallel, the result is the
mean over the processes, before anything clips, unscales or steps.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .._torch_private import active_ddp_module, after_backward, entries
from ..deferred import (
    DeferredGradient,
    Lookups,
    Part,
    PlainRows,
    Scale,
    SharedSum,
    everywhere,
    gathered_lookups,
    joined_lookups,
)
from ._layers import ArmedLayer

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


def followed(weight: Tensor) -> Tensor:
    """A weight that a layer is about to use; under DDP, its gradient is exchanged."""
    ddp = active_ddp_module()
    if ddp is None:
        return weight
    replicas = _REPLICAS.get(ddp)
    if replicas is None:
        replicas = _REPLICAS[ddp] = _Replicas(ddp)
    if not ddp.require_backward_grad_sync:  # within no_sync()
        return weight
    replicas.is_queued = False
    used: Tensor = _Followed.apply(weight, replicas)  # type: ignore[no-untyped-call]
    return used


def replicated_layers() -> Iterator[nn.Module]:
    """The layers whose gradients are exchanged by a wrapper that exists."""
    for ddp in _REPLICAS:
        yield from ddp.modules()


class _Followed(torch.autograd.Function):
    """The weight itself, which notes that its gradient is under way."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, replicas: "_Replicas") -> Tensor:
        ctx.replicas = replicas
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        ctx.replicas.exchange_later()
        return upstream, None


class _Replicas:
    """The parameters with deferred gradients of one DDP module."""

    def __init__(self, ddp: "DistributedDataParallel") -> None:
        import torch.distributed as dist

        self.group = ddp.process_group
        self.weights = list(
            dict.fromkeys(
                weight
                for layer in ddp.module.modules()
                if isinstance(layer, ArmedLayer)
                for weight in layer.armed_weights()
            )
        )
        managed = set(ddp._module_parameters).intersection(self.weights)
        wrong = [name for name, it in ddp.module.named_parameters() if it in managed]
        if wrong:
            raise RuntimeError(
                f"DistributedDataParallel must leave parameters with deferred gradients alone, but "
                f"it manages {', '.join(wrong)}; call so.defer_gradients on the very module that "
                "it wraps, before it does"
            )
        self.is_queued = False
        # What DistributedDataParallel does with the parameters that it manages.
        with torch.no_grad():
            for weight in self.weights:
                dist.broadcast(weight, dist.get_global_rank(self.group, 0), self.group)

    def exchange_later(self) -> None:
        """Exchanges gradients when the backward pass that is under way has ended."""
        if not self.is_queued:
            self.is_queued = True
            after_backward(self.exchange)

    @torch.no_grad()
    def exchange(self) -> None:
        """Makes the gradients of all parameters their mean over the processes."""
        owned = [_Owned.of(weight) for weight in self.weights]
        flags = self._flags_everywhere(owned)
        if any(len({it.has_shared for it in each}) > 1 for each in flags):
            # A process has written down what it shared, because its own parts took more memory.
            owned = [_Owned.of(weight, takes_shared=True) for weight in self.weights]
            flags = self._flags_everywhere(owned)
        for weight, own, each in zip(self.weights, owned, flags, strict=True):
            weight.grad = self._mean(weight, own, each)

    def _flags_everywhere(self, owned: list["_Owned"]) -> list[list["_Flags"]]:
        """The flags of each process, by parameter."""
        flags = [it.flags() for it in owned]
        found = everywhere(flags, self.weights[0].device, self.group)
        return [[_Flags(*each[number]) for each in found] for number in range(len(flags))]

    def _mean(self, weight: Tensor, own: "_Owned", flags: list["_Flags"]) -> Tensor | None:
        import torch.distributed as dist

        if not any(it.has_gradient for it in flags):
            return None
        parts: list[Part] = []
        if any(it.has_lookups for it in flags):
            joined = joined_lookups(weight, own.lookups)
            is_sparse = all(it.is_sparse for it in flags)
            parts.append(gathered_lookups(joined, weight, self.group, is_sparse=is_sparse))
        if any(it.has_computed for it in flags):
            rows, nbytes = (max(it[at] for it in flags) for at in (-2, -1))
            parts.append(SharedSum(weight, own.computed, self.group, rows or None, nbytes))
        if any(it.has_plain for it in flags):
            total = own.plain_sum(weight)
            dist.all_reduce(total, group=self.group)
            if not parts and not own.shared:
                return total.div_(len(flags))
            parts.append(PlainRows(weight, total))
        for part in parts:
            part.is_shared = True
        gradient = DeferredGradient(weight, parts)
        gradient.div_(len(flags))
        for part, scale in own.shared:
            gradient.add_(DeferredGradient(weight, [part]) * scale)
        gradient.collapse_if_larger_()
        return gradient


_REPLICAS: "WeakKeyDictionary[DistributedDataParallel, _Replicas]" = WeakKeyDictionary()

_Terms = list[tuple[Part, Scale]]


class _Flags(NamedTuple):
    """What one process has of a gradient, in numbers."""

    has_gradient: int
    has_shared: int
    has_lookups: int
    has_plain: int
    is_sparse: int
    has_computed: int
    block_rows: int
    nbytes: int
    """Bytes of the computed parts."""


class _Owned(NamedTuple):
    """The gradient of one process, by what happens to it."""

    has_gradient: bool
    shared: _Terms
    """What all processes have, from an earlier exchange."""
    lookups: _Terms
    """Sparse rows that exist are among them."""
    computed: _Terms
    plain: _Terms

    @classmethod
    def of(cls, weight: Tensor, *, takes_shared: bool = False) -> "_Owned":
        """The gradient of a weight; with `takes_shared`, each process takes part in what it shares.

        The mean of what all processes have is what they have.
        """
        gradient = weight.grad
        own = cls(gradient is not None, [], [], [], [])
        for part, scale in _terms(weight, gradient):
            if part.is_shared and (part.is_collective or not takes_shared):
                own.shared.append((part, scale))
            elif isinstance(part, PlainRows) and not part.is_sparse:
                own.plain.append((part, scale))
            elif isinstance(part, Lookups | PlainRows):
                own.lookups.append((part, scale))
            else:
                own.computed.append((part, scale))
        return own

    def flags(self) -> _Flags:
        """What there is of each kind."""
        rows = max((part.block_rows or 0 for part, _ in self.computed), default=0)
        every = [*self.shared, *self.lookups, *self.computed, *self.plain]
        return _Flags(
            has_gradient=self.has_gradient,
            has_shared=bool(self.shared),
            has_lookups=bool(self.lookups),
            has_plain=bool(self.plain),
            is_sparse=all(part.is_sparse for part, _ in every),
            has_computed=bool(self.computed),
            block_rows=rows,
            nbytes=sum(part.nbytes for part, _ in self.computed),
        )

    def plain_sum(self, weight: Tensor) -> Tensor:
        """The sum of the dense rows that exist."""
        total = torch.zeros_like(weight)
        for part, scale in self.plain:
            assert isinstance(part, PlainRows)
            total.add_(part.values * scale)
        return total


def _terms(weight: Tensor, gradient: Tensor | None) -> _Terms:
    if gradient is None:
        return []
    if isinstance(gradient, DeferredGradient):
        return [(part, scale * gradient.scale) for part, scale in gradient.terms]
    if gradient.is_sparse:
        ids, values = entries(gradient)
        return [(Lookups(weight, ids[0], values.reshape(ids.shape[1], -1)), 1.0)]
    return [(PlainRows(weight, gradient), 1.0)]
