"""Where a check runs: a GPU, or Triton's interpreter in its place."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .. import ops

INTERPRETER = "interpreter"


@dataclass(frozen=True)
class Place:
    """A device as the user names it, and how large the checks are there.

    The interpreter takes a tenth of a second for a program, so its tables are small.
    """

    name: str
    is_quick: bool

    @property
    def is_interpreted(self) -> bool:
        return self.name == INTERPRETER

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.is_interpreted else self.name)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the tables whose bits are compared."""
        return (40, 8) if self.is_interpreted else (2000, 64)

    @property
    def many(self) -> int:
        """Entries of the largest gradient that is compared."""
        return 70 if self.is_interpreted else 5000

    @property
    def tables(self) -> int:
        """Tables that are stepped together."""
        return 3 if self.is_interpreted else 26

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Steps within are taken by the GPU's kernels, on this device."""
        if self.is_interpreted:
            with ops.rehearsing_gpu():
                yield
        else:
            with torch.cuda.device(self.device):
                yield

    def synchronize(self) -> None:
        """Waits for the device."""
        if not self.is_interpreted:
            torch.cuda.synchronize(self.device)
