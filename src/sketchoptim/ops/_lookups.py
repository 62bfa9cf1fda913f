"""Lookups as the kernels take them: those of a forward pass, and those behind a gradient."""

import ctypes

from torch import Tensor

from . import _native


class LookupCall:
    """Lookups of one table or of several, in the memory of their tensors.

    Args:
        ids: of all tables, int64 and contiguous.
        offsets: where each bag begins, int64 and contiguous; None if each has one id.
        factors: of each id, float32 and contiguous, or None.
        tables: how many there are.
        bags: of each table.
        is_mean: whether a bag is the mean of its rows, not their sum.
        values: ``[bags, columns]`` of all tables, whose rows are contiguous.
    """

    __slots__ = ("address", "kept", "struct", "values_at")

    def __init__(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        factors: Tensor | None,
        values: Tensor,
        *,
        tables: int,
        bags: int,
        is_mean: bool,
    ) -> None:
        self.kept = tuple(it for it in (ids, offsets, factors, values) if it is not None)
        self.values_at: int = values.data_ptr()
        self.struct = _native.Lookups(
            ids.data_ptr(),
            None if offsets is None else offsets.data_ptr(),
            None if factors is None else factors.data_ptr(),
            self.values_at,
            ids.numel(),
            tables,
            bags,
            values.shape[1],
            values.stride(0),
            is_mean,
        )
        self.address = ctypes.addressof(self.struct)
