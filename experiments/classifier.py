"""The classifier of the experiments: one table of classes, trained on those that LSH selects."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from sketchoptim.nn import LSHSoftmax

from .models import Model


@dataclass(frozen=True, kw_only=True)
class ClassifierSettings:
    """Options of the `LSHSoftmax` of a `Classifier`; the defaults are the paper's.

    Args:
        bits: planes of a hash table.
        tables: hash tables.
        budget: most classes that an example takes from its buckets.
        negatives: random classes for each example in addition.
        rebuild_every: steps between rebuilds.
    """

    bits: int = 15
    tables: int = 16
    budget: int = 256
    negatives: int = 0
    rebuild_every: int = 250

    def __post_init__(self) -> None:
        for name in ("bits", "tables", "budget", "rebuild_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.negatives < 0:
            raise ValueError(f"negatives must be >= 0, got {self.negatives}")


class Classifier(Model):
    """The class of a vector: a softmax over a table of class vectors.

    Example:
        >>> model = Classifier(8, 100, ClassifierSettings(bits=4, negatives=5))
        >>> loss, _ = model.loss(torch.randn(3, 8), torch.arange(3), None, generator=None)
        >>> loss.backward()
        >>> model.softmax.weight.grad.is_sparse
        True
    """

    def __init__(self, dim: int, classes: int, settings: ClassifierSettings) -> None:
        super().__init__()
        self.softmax = LSHSoftmax(
            dim,
            classes,
            bits=settings.bits,
            tables=settings.tables,
            budget=settings.budget,
            negatives=settings.negatives,
            rebuild_every=settings.rebuild_every,
        )

    @property
    def device(self) -> torch.device:
        """Where the table is."""
        return self.softmax.weight.device

    def loss(
        self, inputs: Tensor, labels: Tensor, state: None, *, generator: Generator | None
    ) -> tuple[Tensor, None]:
        """The training loss; there is no state."""
        return self.softmax(inputs, labels, generator=generator), None

    def named_tables(self) -> dict[str, nn.Parameter]:
        """The table."""
        return dict(self.named_parameters())
