"""Deferred gradients for the layers of a model that exists."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from .._torch_private import ignored_by_ddp
from .._validation import PLAIN_TENSORS, is_dtensor
from .._warning import warn
from ..deferred import DeferredGradient
from ..nn import EmbeddingBags
from ._embeddings import ArmedEmbedding, ArmedEmbeddingBag, ArmedEmbeddingBags, ArmedTable
from ._heads import ArmedLinear, ArmedLinearCrossEntropy
from ._layers import ArmedLayer, arm_, disarm_, replaces_forward
from ._replicas import replicated_layers

# A linear layer with fewer outputs is an output head only if it is tied or named.
_MIN_CLASSES = 1000


@dataclass
class Deferral:
    """The layers of a model that have deferred gradients; printing it gives a list."""

    armed: dict[str, str] = field(default_factory=dict)
    """What is deferred, by the name of the layer."""
    left_alone: dict[str, str] = field(default_factory=dict)
    """Why the gradient of a layer is not deferred, by its name."""

    def __repr__(self) -> str:
        plural = "" if len(self.armed) == 1 else "s"
        lines = [f"{len(self.armed)} layer{plural} with deferred gradients"]
        lines += [f"  {name or '(the model)'}  {what}" for name, what in self.armed.items()]
        if self.left_alone:
            lines.append(f"{len(self.left_alone)} left alone")
            lines += [f"  {name or '(the model)'}  {why}" for name, why in self.left_alone.items()]
        return "\n".join(lines)


def defer_gradients(model: nn.Module, *, heads: Iterable[str] = ()) -> Deferral:
    """Makes the gradients of a model's tables deferred, in place; returns what was done.

    `weight.grad` of these layers then is a `DeferredGradient`, which the optimizers of this package
    read block by block. Print the result to see which layers it found, and why others were left
    alone. The training loop stays as it is: accumulation, clipping, `GradScaler`, schedulers,
    checkpoints and `state_dict()` do not change.

    It arms

    - `nn.Embedding` and `nn.EmbeddingBag`, sparse or dense, and the layers of `sketchoptim.nn`;
    - output heads: an `nn.Linear` that a model of transformers gives by `get_output_embeddings()`,
      that shares its weight with an embedding, that has at least 1,000 outputs and as many as an
      embedding has rows, or that is named in `heads`.

    A head then returns deferred logits. `F.cross_entropy` turns them into the fused loss
    `nn.linear_cross_entropy`, also after casts, views, slices of leading dimensions and soft caps.
    Anything else that reads them computes them, with one warning.

    A layer changes by its class alone, so copies and pickles of the model are armed too. Call it
    before the model is wrapped by `DistributedDataParallel` or compiled. `materialize_gradients`
    undoes it.

    Args:
        model: Any module.
        heads: Names of further `nn.Linear` layers whose results go to `F.cross_entropy`.

    >>> model = nn.Sequential(nn.Embedding(1000, 16, sparse=True), nn.Linear(16, 1000))
    >>> defer_gradients(model)
    2 layers with deferred gradients
      0  Embedding, 1,000 x 16, sparse gradient
      1  Linear, 1,000 x 16, logits and gradient
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    _check_not_divided(model)
    left_alone: dict[str, str] = {}
    for layer, mixin in list(_plans(model, _heads(model, heads), left_alone)):
        arm_(layer, mixin)
    armed = {
        name: _describe(layer, model)
        for name, layer in model.named_modules()
        if isinstance(layer, ArmedLayer)
    }
    if not armed:
        reasons = "".join(f"; {name}: {why}" for name, why in left_alone.items())
        warn(f"defer_gradients found no layer whose gradient it can defer{reasons}")
    ignored_by_ddp(model).update(_weight_names(model))
    return Deferral(armed, left_alone)


def materialize_gradients(model: nn.Module) -> None:
    """Undoes `defer_gradients`: layers get plain gradients again, and those that exist become so.

    Gradients that a step has used up, and which cannot be computed again, become None.

    >>> model = nn.Embedding(1000, 16)
    >>> deferral = defer_gradients(model)
    >>> materialize_gradients(model)
    >>> type(model).__name__
    'Embedding'
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    layers = [layer for layer in model.modules() if isinstance(layer, ArmedLayer)]
    if set(layers).intersection(replicated_layers()):
        raise ValueError(
            "DistributedDataParallel has wrapped the model, and leaves parameters with deferred "
            "gradients alone; call materialize_gradients before the model is wrapped"
        )
    ignored_by_ddp(model).difference_update(_weight_names(model))
    for layer in layers:
        disarm_(layer)
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DeferredGradient):
            parameter.grad = gradient.to_plain() if gradient.is_current else None


_MIXINS: tuple[type[ArmedLayer], ...] = (
    ArmedEmbeddingBags,
    ArmedEmbedding,
    ArmedEmbeddingBag,
    ArmedLinearCrossEntropy,
)


def _plans(
    model: nn.Module, heads: set[nn.Module], left_alone: dict[str, str]
) -> Iterator[tuple[nn.Module, type[ArmedLayer]]]:
    """The layers to arm, with how; notes why others are left alone."""
    for name, layer in model.named_modules():
        mixin = ArmedLinear if layer in heads else _mixin_for(layer)
        if mixin is None or isinstance(layer, ArmedLayer):
            continue
        reason = _unsupported_reason(layer, mixin)
        if reason is None:
            yield layer, mixin
        else:
            left_alone[name] = reason


def _mixin_for(layer: nn.Module) -> type[ArmedLayer] | None:
    if isinstance(layer, nn.Embedding) and hasattr(layer, "read"):
        return ArmedTable
    return next((it for it in _MIXINS if isinstance(layer, it.armed_kind)), None)


def _heads(model: nn.Module, names: Iterable[str]) -> set[nn.Module]:
    """The linear layers whose results are logits."""
    modules = dict(model.named_modules(remove_duplicate=False))
    names = [names] if isinstance(names, str) else list(names)
    wrong = [name for name in names if not isinstance(modules.get(name), nn.Linear)]
    if wrong:
        raise ValueError(
            f"heads must be names of nn.Linear layers of the model, got {wrong}; see "
            "model.named_modules()"
        )
    found = {modules[name] for name in names}
    weights: set[Tensor | None] = set()
    sizes: set[int] = set()
    for module in modules.values():
        if isinstance(module, nn.Embedding):
            weights.add(module._parameters.get("weight"))
            sizes.add(module.num_embeddings)
        head: Any = getattr(module, "get_output_embeddings", None)  # of a model of transformers
        if callable(head):
            found.add(head())
        own: Any = getattr(module, "table_parameters", None)  # of a layer of sketchoptim.nn
        if own is not None and not getattr(module, "multi_label", False):
            weights.update(own())
    return {
        module
        for module in modules.values()
        if isinstance(module, nn.Linear)
        and (
            module in found
            or module._parameters.get("weight") in weights - {None}
            or (module.out_features in sizes and module.out_features >= _MIN_CLASSES)
        )
    }


def _unsupported_reason(layer: nn.Module, mixin: type[ArmedLayer]) -> str | None:
    """Why the gradient of a layer cannot be deferred, or None."""
    if parametrize.is_parametrized(layer):
        return "its weight is computed by a parametrization"
    own = layer.table_parameters() if isinstance(layer, EmbeddingBags) else None
    weights = [layer._parameters.get("weight")] if own is None else own
    for weight in weights:
        if weight is None:
            return "it has no weight of its own"
        if type(weight) not in PLAIN_TENSORS:
            return f"its weight is a {type(weight).__name__}"
        if not weight.requires_grad:
            return "its weight is frozen"
    if getattr(layer, "max_norm", None) is not None:
        return "max_norm modifies the weight in the forward pass"
    if getattr(layer, "scale_grad_by_freq", False):
        return "scale_grad_by_freq divides by counts of the whole batch"
    if isinstance(layer, nn.EmbeddingBag) and layer.mode not in ("sum", "mean"):
        return f"mode={layer.mode!r} is neither a sum nor a mean"
    if not mixin.overrides and replaces_forward(layer, mixin.armed_kind):
        return f"its forward() does not call that of {mixin.armed_kind.__name__}"
    return None


def _describe(layer: ArmedLayer, model: nn.Module) -> str:
    weights = layer.armed_weights()
    if len(weights) > 1:
        size = f"{len(weights)} tables"
    else:
        size = " x ".join(f"{size:,}" for size in weights[0].shape)
    if isinstance(layer, nn.Linear):
        gradient = "logits and gradient"
    else:
        gradient = f"{'sparse' if getattr(layer, 'sparse', False) else 'dense'} gradient"
    tied = [
        name
        for name, other in model.named_modules()
        if other is not layer and other._parameters.get("weight") is weights[0]
    ]
    shared = f", tied to {', '.join(tied)}" if tied else ""
    return f"{layer.bare.__name__}, {size}, {gradient}{shared}"


def _check_not_divided(model: nn.Module) -> None:
    """Raises if a wrapper has divided or replicated the parameters already."""
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            raise ValueError(
                f"{name} is a DTensor, whose rows are divided among processes; deferred gradients "
                "of such parameters are not supported"
            )
    for name, module in model.named_modules():
        kind = next((it.__name__ for it in type(module).__mro__ if it.__name__ in _WRAPPERS), None)
        if kind is not None:
            raise ValueError(
                f"defer_gradients must come before {kind}, got a model with {name or 'itself'} in "
                f"one: {_WRAPPERS[kind]}"
            )


_WRAPPERS = {
    "DistributedDataParallel": "call it on the module that is wrapped, before it is wrapped",
    "FullyShardedDataParallel": "it divides parameters, whose deferred gradients are not supported",
    "FSDPModule": "it divides parameters, whose deferred gradients are not supported",
}


def _weight_names(model: nn.Module) -> Iterator[str]:
    """All names of the parameters whose gradients are deferred, as DDP forms them."""
    weights = {
        id(weight)
        for layer in model.modules()
        if isinstance(layer, ArmedLayer)
        for weight in layer.armed_weights()
    }
    for module_name, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in weights:
                yield f"{module_name}.{name}"
                yield f"{module_name}.{name}".lstrip(".")
