"""Layers whose gradients are deferred: the class of a layer changes, and nothing else of it.

Copies, pickles and averaged models of the layer are armed too, because its class and attributes
are all that there is.
"""

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from .._validation import is_dtensor


class ArmedLayer(nn.Module):
    """Base of the layers whose gradients are deferred; a subclass arms one kind of layer."""

    armed_kind: ClassVar[type[nn.Module]]
    """The class of layers that it arms, subclasses included."""
    overrides: ClassVar[bool] = False
    """Whether its methods come before those of the layer's class, instead of after."""
    bare: ClassVar[type[nn.Module]]
    """The class that a layer had before."""

    def armed_weights(self) -> list[nn.Parameter]:
        """The parameters whose gradients are deferred."""
        return [self.get_parameter("weight")]

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse_divided(name, value)
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Adds a parameter that no other process has a part of."""
        _refuse_divided(name, param)
        super().register_parameter(name, param)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class exists only in this process, so a pickle names what it is made of.
        _, _, *state = cast("tuple[Any, ...]", super().__reduce_ex__(protocol))
        return _new_layer, (_mixin_of(type(self)), self.bare), *state


def _refuse_divided(name: str, value: Any) -> None:
    """Raises if processes are about to divide a parameter among them."""
    if is_dtensor(value):
        raise ValueError(
            f"{name} cannot become a DTensor, because its gradient is deferred; call "
            "so.materialize_gradients(model) before fully_shard() or distribute_module()"
        )


def _new_layer(mixin: type[ArmedLayer], bare: type[nn.Module]) -> nn.Module:
    kind = armed_class(mixin, bare)
    return kind.__new__(kind)


def _mixin_of(kind: type[ArmedLayer]) -> type[ArmedLayer]:
    return next(it for it in kind.__mro__ if "armed_kind" in vars(it))


_CLASSES: dict[tuple[type[ArmedLayer], type[nn.Module]], type[ArmedLayer]] = {}


def armed_class(mixin: type[ArmedLayer], bare: type[nn.Module]) -> type[ArmedLayer]:
    """The class of armed layers that were of class `bare`.

    A `forward` of `bare` that calls ``super().forward`` reaches the one of the mixin.
    """
    found = _CLASSES.get((mixin, bare))
    if found is None:
        bases: tuple[type[nn.Module], ...] = (bare, mixin)
        if mixin.overrides:
            bases = mixin, bare
        elif bare is mixin.armed_kind:
            bases = (mixin,)
        attributes = {"bare": bare, "__module__": bare.__module__, "__doc__": bare.__doc__}
        found = _CLASSES[mixin, bare] = type(f"Deferred{bare.__name__}", bases, attributes)
    return found


def arm_(layer: nn.Module, mixin: type[ArmedLayer]) -> None:
    """Changes the class of a layer."""
    layer.__class__ = armed_class(mixin, type(layer))


def disarm_(layer: ArmedLayer) -> None:
    """Gives a layer its own class back."""
    layer.__class__ = layer.bare  # type: ignore[assignment]


def replaces_forward(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a layer does not come to the `forward` of `kind`, of which it is a subclass."""
    if "forward" in vars(layer):
        return True
    for base in type(layer).__mro__:
        if base is kind:
            return False
        forward = vars(base).get("forward")
        if forward is not None and "super" not in forward.__code__.co_names:
            return True
    return True


def is_trained(weight: Tensor) -> bool:
    """Whether autograd follows a weight that is read now."""
    return torch.is_grad_enabled() and weight.requires_grad


def refuse_second_derivative(weight: Tensor) -> None:
    """Raises where a backward pass is asked to be differentiable itself."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"the gradient of the parameter of shape {list(weight.shape)} is deferred, so it can "
            "be differentiated once, got create_graph=True; leave that out, or call "
            "so.materialize_gradients(model)"
        )
