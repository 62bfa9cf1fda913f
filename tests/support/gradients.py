"""Streams of random gradients as training makes them."""

from collections.abc import Iterator

import torch
from torch import Tensor


def sparse(ids: Tensor, values: Tensor, shape, *, is_coalesced: bool | None = None) -> Tensor:
    """A sparse gradient with ``values[k, ...]`` at the rows ``ids[k]``, which may repeat."""
    return torch.sparse_coo_tensor(
        ids.reshape(1, -1), values, shape, check_invariants=True, is_coalesced=is_coalesced
    )


def unchecked(ids: list[int], like: Tensor, *, values: Tensor | None = None) -> Tensor:
    """A sparse gradient of that tensor, of ones if not told, whose ids nothing has checked."""
    if values is None:
        values = torch.ones(len(ids), *like.shape[1:])
    return torch.sparse_coo_tensor(torch.tensor([ids]), values, like.shape, check_invariants=False)


def sparse_stream(
    shape: tuple[int, ...],
    steps: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shift: float = 0.0,
) -> Iterator[Tensor]:
    """Uncoalesced gradients in which low ids are frequent and repeat; every seventh is empty."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        drawn = int(torch.randint(1, 2 * shape[0], (), generator=generator))
        count = 0 if step % 7 == 5 else drawn
        ids = (torch.rand(count, generator=generator).square() * shape[0]).long()
        values = torch.randn(count, *shape[1:], generator=generator, dtype=torch.float64) + shift
        yield sparse(ids, values.to(dtype), shape)


def dense_stream(
    shape: tuple[int, ...],
    steps: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shift: float = 0.0,
) -> Iterator[Tensor]:
    """Dense gradients, with rows of zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        values = torch.randn(shape, generator=generator, dtype=torch.float64) + shift
        kept = torch.rand(shape[:1], generator=generator) < 0.8
        yield (values * kept.view(-1, *[1] * (len(shape) - 1))).to(dtype)


STREAMS = {"sparse": sparse_stream, "dense": dense_stream}


def densified(gradient: Tensor) -> Tensor:
    """The same gradient with its zeros written out."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def start(shape: tuple[int, ...], *, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Weights to begin with, the same for every optimizer that is compared."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
