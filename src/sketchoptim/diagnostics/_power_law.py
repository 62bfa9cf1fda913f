"""How the mass of a tensor is spread over its rows and elements: sketches need it to be skewed."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..deferred import rows_of

TOP = 100

# The bin of a float32 is its exponent and the first 6 bits of its mantissa: every bin is 1/64 of
# its magnitude wide.
_SHIFT = 17
_BINS = 1 << (31 - _SHIFT)


@dataclass(frozen=True)
class PowerLaw:
    """The spread of the magnitudes of a tensor ``[rows, dim]``."""

    row_midpoint: float
    """The share of all rows, heaviest first, that holds half of the mass; 0.5 is uniform."""
    element_midpoint: float | None
    """The share of all elements that holds half; None if one number stands for a row."""
    top_rows: tuple[int, ...]
    """The ids of the `TOP` heaviest rows, heaviest first; rows without mass are left out."""
    top_masses: tuple[float, ...]
    """The sums of magnitudes of those rows."""

    def kept_since(self, earlier: "PowerLaw") -> float | None:
        """The share of the earlier top rows that are top rows now; None if there were none."""
        if not earlier.top_rows:
            return None
        kept = set(earlier.top_rows) & set(self.top_rows)
        return len(kept) / len(earlier.top_rows)


class Spread:
    """A histogram of magnitudes, built chunk by chunk; its memory does not grow with them.

    Bins are 1/64 of their magnitude wide, and all numbers of a bin count as equal: midpoints are
    within 2 % (`tests/diagnostics/test_power_law.py::test_the_midpoint_is_that_of_a_sort`).
    """

    def __init__(self) -> None:
        self.counts = torch.zeros(_BINS, dtype=torch.int64, device="cpu")
        self.masses = torch.zeros(_BINS, dtype=torch.float64, device="cpu")

    def add_(self, magnitudes: Tensor) -> None:
        """Counts non-negative numbers of any shape."""
        flat = magnitudes.detach().flatten().float().cpu()
        bins = flat.view(torch.int32) >> _SHIFT
        self.counts += torch.bincount(bins, minlength=_BINS)
        self.masses += torch.bincount(bins, weights=flat.double(), minlength=_BINS)

    def midpoint(self, total: int) -> float:
        """The share of `total` numbers that holds half the mass; numbers not added are zero."""
        counts, masses = self.counts.flip(0).double(), self.masses.flip(0)
        reached = masses.cumsum(0)
        if not total or not reached[-1] > 0:
            return 0.5  # without any mass, all numbers are equal
        half = reached[-1] / 2
        at = int(torch.searchsorted(reached, half))
        before = reached[at] - masses[at]
        heavier = counts[:at].sum() + counts[at] * (half - before) / masses[at]
        return float(heavier / total)

    def curve(self) -> tuple[list[int], list[float]]:
        """Ranks and magnitudes of the sorted numbers, largest first, one point for each bin."""
        order = self.counts.flip(0).nonzero().squeeze(1)
        counts, masses = self.counts.flip(0)[order], self.masses.flip(0)[order]
        return counts.cumsum(0).tolist(), (masses / counts).tolist()


def power_law_of(chunks: Iterable[tuple[Tensor, Tensor]], *, rows: int, dim: int) -> PowerLaw:
    """The spread of a tensor ``[rows, dim]``, as chunks of ids ``[k]`` and values ``[k, dim]``.

    Rows in no chunk are zero. Values are ``[k, 1]`` if one number stands for a row.
    """
    by_row, by_element = Spread(), Spread()
    is_by_row = False
    top_ids = torch.zeros(0, dtype=torch.int64, device="cpu")
    top_masses = torch.zeros(0, device="cpu")
    for ids, values in chunks:
        magnitudes = values.detach().abs().float().cpu()
        masses = magnitudes.sum(1)
        is_by_row |= magnitudes.shape[1] != dim
        by_row.add_(masses)
        by_element.add_(magnitudes)
        masses, ids = torch.cat([top_masses, masses]), torch.cat([top_ids, ids.cpu()])
        top_masses, order = masses.topk(min(TOP, masses.numel()))
        top_ids = ids[order]
    has_mass = top_masses > 0
    return PowerLaw(
        row_midpoint=by_row.midpoint(rows),
        element_midpoint=None if is_by_row else by_element.midpoint(rows * dim),
        top_rows=tuple(top_ids[has_mass].tolist()),
        top_masses=tuple(top_masses[has_mass].tolist()),
    )


def power_law(tensor: Tensor) -> PowerLaw:
    """The spread of a dense tensor, or of the rows of a sparse COO one.

    >>> power_law(torch.tensor([[8.0, 0.0], [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]])).top_rows
    (0, 1, 2)
    """
    rows, dim = (tensor.shape[0] if tensor.dim() else 1), tensor.shape[1:].numel()
    chunks = ((chunk.ids, chunk.gradient) for chunk in rows_of(tensor.detach()).chunks())
    return power_law_of(chunks, rows=rows, dim=dim)
