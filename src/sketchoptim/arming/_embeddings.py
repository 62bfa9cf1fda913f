"""Embeddings whose gradients are deferred: ids and output gradients instead of rows."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch_private import disable_dynamo, entries
from ..deferred import DeferredGradient, Lookups
from ..nn import EmbeddingBags
from ._layers import ArmedLayer, is_trained, refuse_second_derivative
from ._replicas import followed


class ArmedEmbedding(ArmedLayer, nn.Embedding):
    """An `nn.Embedding` whose gradient is deferred, sparse or dense."""

    armed_kind = nn.Embedding

    @disable_dynamo
    def forward(self, input: Tensor) -> Tensor:
        if not is_trained(self.weight):
            return super().forward(input)
        rows: Tensor = _Lookup.apply(  # type: ignore[no-untyped-call]
            followed(self.weight), input, self.padding_idx, self.sparse
        )
        return rows


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Tensor, padding_idx: int | None, is_sparse: bool
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding_idx, ctx.is_sparse = weight.detach(), padding_idx, is_sparse
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative(ctx.weight)
        (ids,) = ctx.saved_tensors
        if not ctx.is_sparse and upstream.numel() > ctx.weight.numel():
            # The plain gradient is smaller than what it is made of.
            padding_idx = -1 if ctx.padding_idx is None else ctx.padding_idx
            plain = torch.ops.aten.embedding_dense_backward(
                upstream, ids, ctx.weight.shape[0], padding_idx, False
            )
            return plain, None, None, None
        part = Lookups(
            ctx.weight,
            ids.reshape(-1),
            upstream.reshape(-1, ctx.weight.shape[1]),
            padding_idx=ctx.padding_idx,
            is_sparse=ctx.is_sparse,
        )
        # A sparse gradient of as many lookups is no smaller, whatever the number of rows.
        own = DeferredGradient(ctx.weight, [part], collapses=not ctx.is_sparse)
        return own, None, None, None


class ArmedEmbeddingBag(ArmedLayer, nn.EmbeddingBag):
    """An `nn.EmbeddingBag` of sums or means whose gradient is deferred, sparse or dense."""

    armed_kind = nn.EmbeddingBag

    @disable_dynamo
    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        if not is_trained(self.weight):
            return super().forward(input, offsets, per_sample_weights)
        pooled: Tensor = _Bags.apply(  # type: ignore[no-untyped-call]
            followed(self.weight), per_sample_weights, input, offsets, self
        )
        return pooled


class _Bags(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        lookup_weights: Tensor | None,
        ids: Tensor,
        offsets: Tensor | None,
        layer: nn.EmbeddingBag,
    ) -> Tensor:
        pooled = F.embedding_bag(
            ids,
            weight,
            offsets,
            mode=layer.mode,
            per_sample_weights=lookup_weights,
            include_last_offset=layer.include_last_offset,
            padding_idx=layer.padding_idx,
        )
        if offsets is None:  # [bags, ids in a bag]
            bags, size = ids.shape
            offsets = torch.arange(bags, device=ids.device, dtype=ids.dtype) * size
        elif layer.include_last_offset:
            offsets = offsets[:-1]
        own_weight = weight if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(ids, offsets, lookup_weights, own_weight)
        ctx.weight = weight.detach()
        ctx.options = {
            "mode": layer.mode,
            "padding_idx": layer.padding_idx,
            "is_sparse": layer.sparse,
        }
        return pooled

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative(ctx.weight)
        ids, offsets, lookup_weights, weight = ctx.saved_tensors
        own_weights = None if lookup_weights is None else lookup_weights.detach().reshape(-1)
        part = Lookups(
            ctx.weight,
            ids.reshape(-1),
            upstream,
            offsets=offsets,
            lookup_weights=own_weights,
            **ctx.options,
        )
        by_lookup = None
        if ctx.needs_input_grad[1]:
            padding_idx = -1 if part.padding_idx is None else part.padding_idx
            by_lookup = torch.ops.aten._embedding_bag_per_sample_weights_backward(
                upstream, weight, part.ids, offsets, part.bags, 0, padding_idx
            ).reshape(lookup_weights.shape)
        own = None
        if ctx.needs_input_grad[0]:
            own = DeferredGradient(ctx.weight, [part], collapses=not part.is_sparse)
        return own, by_lookup, None, None, None


class ArmedTable(ArmedLayer, nn.Embedding):
    """The table of a layer of sketchoptim.nn, which computes the sparse gradient itself."""

    armed_kind = nn.Embedding
    overrides = True

    def read(self) -> Tensor:
        """The weight, for what autograd follows."""
        if not is_trained(self.weight):
            return self.weight
        read: Tensor = _Rows.apply(followed(self.weight))  # type: ignore[no-untyped-call]
        return read


class ArmedEmbeddingBags(ArmedLayer, EmbeddingBags):
    """Tables whose gradients are deferred anyway; under DDP they are exchanged."""

    armed_kind = EmbeddingBags

    def armed_weights(self) -> list[nn.Parameter]:
        """The tables."""
        return self.table_parameters()

    def read(self, table: str) -> Tensor:
        """The rows of a table, as `forward` reads them."""
        weight = super().read(table)
        return followed(weight) if is_trained(weight) else weight


class _Rows(torch.autograd.Function):
    """The weight itself, whose sparse gradient becomes a deferred one of the same rows."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.weight = weight.detach()
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        refuse_second_derivative(ctx.weight)
        if not upstream.is_sparse:
            return upstream
        ids, values = entries(upstream)
        return DeferredGradient(ctx.weight, [Lookups(ctx.weight, ids[0], values)])
