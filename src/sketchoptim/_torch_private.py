"""Every private name of torch that the library uses, with the reason and what could replace it.

A torch that lacks a name gets an error with that name, when it is first needed, or a slower way and
a warning (`tests/test_torch_private.py`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.optim import optimizer as _torch_optimizer

from ._validation import check_storage
from ._warning import warn

try:  # torch.compiler.disable is public and does the same, but takes two seconds to import
    from torch._compile import _disable_dynamo as disable_dynamo
except ImportError:
    from torch.compiler import disable as disable_dynamo  # type: ignore[no-redef]

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "active_ddp_module",
    "after_backward",
    "after_load",
    "after_state_dict",
    "before_load",
    "before_state_dict",
    "disable_dynamo",
    "entries",
    "has_scheduler",
    "has_tensor_guards",
    "hooked_when_needed",
    "ignored_by_ddp",
    "linear_by_onednn",
    "mark_as_stepped_",
    "multiplies_fast",
    "plain_torch_function",
    "store_of",
    "stored_ids",
    "stored_values",
    "tensor_guard",
    "version_of",
    "was_stepped",
    "without_torch_function",
    "wrapper_tensor",
]


def private(owner: Any, name: str) -> Any:
    """An attribute of torch; if this torch lacks it, an error that names both."""
    try:
        return getattr(owner, name)
    except AttributeError:
        place = getattr(owner, "__name__", type(owner).__name__)
        raise RuntimeError(
            f"torch {torch.__version__} lacks {place}.{name}, which sketchoptim needs; install a "
            "version of torch that its README lists, or a newer sketchoptim"
        ) from None


# The ids and the values of a sparse gradient, without a look at their memory.
stored_ids: Callable[[Tensor], Tensor] = private(Tensor, "_indices")
stored_values: Callable[[Tensor], Tensor] = private(Tensor, "_values")


def entries(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The ids ``[1, k]`` and values ``[k, ...]`` of a sparse gradient, duplicates included.

    The public `indices` and `values` refuse gradients that are not coalesced; coalescing them
    would copy every row.
    """
    ids, values = stored_ids(gradient), stored_values(gradient)
    if not (ids.data_ptr() and values.data_ptr()):  # empty, or freed
        check_storage("the ids of a gradient", ids)
        check_storage("the values of a gradient", values)
    return ids, values


@functools.cache
def has_tensor_guards() -> bool:
    """Whether torch compares several tensors with others in one call, `tensor_guard`."""
    found = hasattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards")
    if not found:
        warn(f"torch {torch.__version__} hides its guards: steps of many tables take longer")
    return found


def tensor_guard(
    tensors: Sequence[Tensor],
    shapes: Sequence[Sequence[int | None]] | None = None,
    strides: Sequence[Sequence[int | None]] | None = None,
) -> Callable[..., bool]:
    """A function that compares objects with these tensors, in all but their numbers.

    It returns whether they are different tensors of the same classes, dtypes, devices, layouts,
    shapes and strides; or of the given ones, in which None is any number. torch.compile guards its
    graphs by it. Without this name: look at each tensor in each step, as for other gradients.
    """
    guards: Any = torch._C._dynamo.guards.TensorGuards  # its stub has other types
    found = guards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = found.check
    return check


def hooked_when_needed(step: Callable[..., Any]) -> Callable[..., Any]:
    """torch's wrapper around an optimizer's `step`, for calls in which it has something to do.

    The wrapper opens a profiler record even without a profiler, which with cold caches takes as
    long as the rest of a small step. Without these names: always use torch's wrapper.
    """
    recorded: Callable[..., Any] = torch.optim.Optimizer.profile_hook_step(step)
    if not (
        hasattr(torch.autograd.profiler, "_is_profiler_enabled")
        and hasattr(_torch_optimizer, "_global_optimizer_pre_hooks")
        and hasattr(_torch_optimizer, "_global_optimizer_post_hooks")
    ):
        warn(f"torch {torch.__version__} hides its hooks: each step opens a profiler record")
        return recorded

    @functools.wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_watched = (
            torch.autograd.profiler._is_profiler_enabled
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _torch_optimizer._global_optimizer_pre_hooks
            or _torch_optimizer._global_optimizer_post_hooks
        )
        return (recorded if is_watched else step)(self, *args, **kwargs)

    return wrapper


def linear_by_onednn(input: Tensor, weight: Tensor) -> Tensor | None:
    """``input @ weight.T`` of float32 matrices on a CPU by oneDNN; None if torch was built without.

    `torch.mm` calls MKL, which on AMD's processors uses half of an AVX-512 register: oneDNN takes
    0.45 of its time there, and 0.9 with AVX2. Without this name: use `torch.mm`.
    """
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return None
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        warn(f"torch {torch.__version__} hides oneDNN's products: a vocabulary head takes longer")
        return None
    product: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, None, "none", [], "")
    return product


def multiplies_fast(dtype: torch.dtype) -> bool:
    """Whether torch's matrix products on this CPU have instructions for a half-precision dtype.

    Without them they take about twenty times as long as in float32. Without these names: True.
    """
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    is_supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return is_supported is None or bool(is_supported())


# -- tensors that hold something else than numbers ------------------------------------------------
# Without these names: the functions of torch.utils._python_dispatch, or a mode of its own.

# A tensor subclass whose results are not converted to that subclass.
plain_torch_function = private(torch._C, "_disabled_torch_function_impl")

# A context in which subclasses of tensors are taken as they are.
without_torch_function = private(torch._C, "DisableTorchFunctionSubclass")

_TensorKind = TypeVar("_TensorKind", bound=Tensor)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was modified in place; 0 if it cannot be."""
    return 0 if tensor.is_inference() else tensor._version


def wrapper_tensor(kind: type[_TensorKind], like: Tensor, device: torch.device) -> _TensorKind:
    """A tensor of a subclass, without storage, with the shape, strides and dtype of another."""
    wrapper: _TensorKind = _make_wrapper(
        kind, like.shape, strides=like.stride(), dtype=like.dtype, device=device
    )
    return wrapper


_make_wrapper: Callable[..., Any] = private(Tensor, "_make_wrapper_subclass")


# -- DistributedDataParallel ---------------------------------------------------------------------
# Without these names: register a communication hook that leaves out the gradients of these
# parameters, and exchange them in it.


def active_ddp_module() -> torch.nn.parallel.DistributedDataParallel | None:
    """The module whose forward pass is under way; None if there is none."""
    found: torch.nn.parallel.DistributedDataParallel | None = private(
        torch.nn.parallel.DistributedDataParallel, "_active_ddp_module"
    )
    return found


def after_backward(function: Callable[[], None]) -> None:
    """Calls a function when the backward pass that is under way has ended, in the same thread."""
    private(torch.autograd.Variable, "_execution_engine").queue_callback(function)


def store_of(group: "ProcessGroup") -> Any:
    """The store by which the processes of a group found each other; None for other groups.

    Without this name: an optimizer cannot compare the replicas of DistributedDataParallel.
    """
    from torch.distributed import distributed_c10d

    return private(distributed_c10d, "_world").pg_map.get(group, ("", None))[1]


def ignored_by_ddp(module: torch.nn.Module) -> set[str]:
    """The names of parameters that DistributedDataParallel leaves alone when it wraps a module.

    The set belongs to the module, and may be modified.
    """
    module._ddp_params_and_buffers_to_ignore = found = set(  # type: ignore[assignment]
        getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    )
    return found


# -- hooks of users on state_dict and load_state_dict ---------------------------------------------
# Optimizer.state_dict and load_state_dict call them, but also cast counters to the parameter's
# dtype, so ours replace both. Without these names: call the methods of torch and cast back.


def _hooks(optimizer: torch.optim.Optimizer, name: str) -> list[Callable[..., Any]]:
    hooks: Mapping[int, Callable[..., Any]] = private(optimizer, name)
    return list(hooks.values())


def before_state_dict(optimizer: torch.optim.Optimizer) -> None:
    for hook in _hooks(optimizer, "_optimizer_state_dict_pre_hooks"):
        hook(optimizer)


def after_state_dict(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
    """What the hooks make of a packed state."""
    for hook in _hooks(optimizer, "_optimizer_state_dict_post_hooks"):
        packed = _result_or(packed, hook(optimizer, packed))
    return packed


def before_load(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
    """What the hooks make of a state that is about to be loaded."""
    for hook in _hooks(optimizer, "_optimizer_load_state_dict_pre_hooks"):
        packed = _result_or(packed, hook(optimizer, packed))
    return packed


def after_load(optimizer: torch.optim.Optimizer) -> None:
    for hook in _hooks(optimizer, "_optimizer_load_state_dict_post_hooks"):
        hook(optimizer)


def _result_or(packed: dict[str, Any], result: Any) -> dict[str, Any]:
    return packed if result is None else result


# -- learning rate schedulers ---------------------------------------------------------------------
# They mark the `step` of the optimizer that they steer, and warn by the marks. Without these names:
# build new schedulers for a converted optimizer.


def has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def was_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scheduler has seen a step of the optimizer."""
    return bool(getattr(optimizer, "_opt_called", False))


def mark_as_stepped_(optimizer: torch.optim.Optimizer, was_stepped: bool) -> None:
    optimizer._opt_called = was_stepped  # type: ignore[attr-defined]
