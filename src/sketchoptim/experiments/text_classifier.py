"""The extreme classifier of the experiments: MACH over hashed trigrams of a text."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from ..nn import MACH, BagEncoder, Bags, FeatureHashing
from .models import Model


@dataclass(frozen=True, kw_only=True)
class MachSettings:
    """Sizes of a `TextClassifier`.

    Args:
        features: trigrams are hashed to, the rows of each member's table.
        dim: hidden units of a member.
        members: of the ensemble.
        buckets: meta-classes of a member.
        at: how many classes are looked among for the right one.
    """

    features: int = 80_000
    dim: int = 256
    members: int = 4
    buckets: int = 1024
    at: int = 100

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")

    @property
    def hashing(self) -> FeatureHashing:
        """What turns texts into bags of features."""
        return FeatureHashing(features=self.features)


class TextClassifier(Model):
    """The class of a text: an ensemble of one-layer networks over hashed classes.

    Example:
        >>> settings = MachSettings(features=100, dim=8, members=2, buckets=5, at=3)
        >>> model = TextClassifier(50, settings)
        >>> bags = settings.hashing(["usr/bin/env", "etc/passwd"])
        >>> loss, _ = model.loss(bags, torch.tensor([7, 8]), None, generator=None)
        >>> sorted(model.named_tables())
        ['mach.bodies.0.weight', 'mach.bodies.1.weight']
    """

    def __init__(self, classes: int, settings: MachSettings) -> None:
        super().__init__()
        self.mach = MACH(
            lambda: BagEncoder(settings.features, settings.dim),
            settings.dim,
            classes,
            settings.buckets,
            members=settings.members,
            # it draws its weights from a seed, which is to differ as the caller's does
            seed=int(torch.randint(2**31, ())),
        )

    def loss(
        self, inputs: Bags, labels: Tensor, state: None, *, generator: Generator | None
    ) -> tuple[Tensor, None]:
        """The sum of the members' losses; there is no state, and nothing is drawn."""
        return self.mach(inputs, labels), None

    def named_tables(self) -> dict[str, nn.Parameter]:
        """The members' tables of features."""
        return {
            name: weight
            for name, weight in self.named_parameters()
            if name.startswith("mach.bodies.") and name.endswith(".weight")
        }
