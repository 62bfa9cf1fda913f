"""The norm of sparse gradients as a kernel of torch, so that torch's own clipping takes them.

`torch.nn.utils.clip_grad_norm_` needs two operators: a norm and a multiplication. torch 2.13 has
the multiplication for sparse tensors. It has `torch.norm` for them, but clipping calls
`torch.linalg.vector_norm`, also inside `torch._foreach_norm`, and that has no sparse kernel.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ._rows import arithmetic_dtype, of_gradient

_OPERATOR = "aten::linalg_vector_norm"
_DISPATCH_KEYS = ("SparseCPU", "SparseCUDA")

# A kernel exists only as long as the Library that registered it.
_libraries: list[torch.library.Library] = []


def enable_sparse_clipping() -> None:
    """Lets torch's own gradient clipping take sparse gradients, for the rest of the process.

    Call it once, before training. Then `torch.nn.utils.clip_grad_norm_` works on models with
    ``nn.Embedding(..., sparse=True)``, and so do the options that call it: `max_grad_norm` of
    transformers.Trainer, `Accelerator.clip_grad_norm_`, and `gradient_clip_val` of Lightning.
    In a loop of your own, `clip_grad_norm_` of this package needs no such call.

    It registers the one operator that torch lacks, `torch.linalg.vector_norm` of sparse COO
    tensors, with `torch.library`. Dense tensors are not affected, and a kernel that exists, of
    torch or of an earlier call, is left alone. A row that a gradient holds several times counts
    once, with its sum. Rows are summed and measured in float32 at least; the norm has the
    gradient's dtype, as with dense gradients. Norm types below 0 are refused.

    >>> import torch, sketchoptim as so
    >>> so.enable_sparse_clipping()
    >>> table = torch.nn.Embedding(1000, 4, sparse=True)
    >>> table(torch.tensor([3, 3, 5])).sum().backward()
    >>> torch.nn.utils.clip_grad_norm_(table.parameters(), max_norm=1.0)
    tensor(4.4721)
    """
    for key in _DISPATCH_KEYS:
        if not _has_kernel(key):
            library = torch.library.Library("aten", "IMPL", key)
            library.impl("linalg_vector_norm", _vector_norm)
            _libraries.append(library)


def _has_kernel(dispatch_key: str) -> bool:
    try:
        torch.library.get_kernel(_OPERATOR, dispatch_key)
    except RuntimeError:  # the only answer that torch has for a kernel that does not exist
        return False
    return True


def _vector_norm(
    tensor: Tensor,
    ord: float = 2.0,  # the names of torch.linalg.vector_norm, by which callers may pass them
    dim: list[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The norm of all elements of a sparse COO tensor, its zeros included."""
    if dim is not None or keepdim:
        raise NotImplementedError(
            "the norm of a sparse tensor is taken over all dimensions, without dim and keepdim; "
            f"got dim={dim}, keepdim={keepdim}. Use to_dense() first"
        )
    tensor = tensor.to(dtype or tensor.dtype)
    return sparse_norm(tensor, ord).to(tensor.dtype)


def sparse_norm(tensor: Tensor, norm_type: float) -> Tensor:
    """The norm of all elements of a sparse COO tensor, its zeros included, float32 at least."""
    if not norm_type >= 0:  # NaN too
        raise ValueError(
            f"the norm type of a sparse tensor must be >= 0, got {norm_type}: negative ones divide "
            "by the zeros that are not stored"
        )
    if not tensor.is_floating_point():
        raise TypeError(f"the norm of a sparse tensor needs real numbers, got {tensor.dtype}")
    norms = [torch.linalg.vector_norm(part, norm_type) for part in _unique_parts(tensor)]
    if not norms:
        return torch.zeros((), dtype=arithmetic_dtype(tensor.dtype), device=tensor.device)
    # A norm of type 0 counts elements, and counts are added.
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type or 1)
    return norm


def _unique_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The stored elements in parts, each element once with its sum, in float32 at least."""
    parts: Iterable[Tensor]
    if tensor.sparse_dim() == 1:
        parts = (chunk.gradient for chunk in of_gradient(tensor).chunks())
    else:
        parts = [tensor.to(arithmetic_dtype(tensor.dtype)).coalesce().values()]
    return (part for part in parts if part.numel())  # nothing has no largest value
