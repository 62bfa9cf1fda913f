"""The extreme classifiers of the experiments: one hidden layer over hashed trigrams of a text."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Generator, Tensor, nn

from sketchoptim.nn import (
    MACH,
    Aggregation,
    BagEncoder,
    Bags,
    FeatureHashing,
    LSHSoftmax,
    SampledSoftmax,
)

from .models import Model

Output = Literal["mach", "sampled", "lsh"]


@dataclass(frozen=True, kw_only=True)
class TextClassifierSettings:
    """Sizes of a `TextClassifier`.

    Args:
        output: "mach", or a "sampled" or "lsh" softmax over all classes.
        features: rows of the hidden layer's table, to which trigrams are hashed.
        dim: hidden units, of each member.
        members: of MACH.
        buckets: meta-classes of a member of MACH.
        samples: negatives a step of the sampled softmax.
        active: the most classes that the LSH softmax, with the paper's 16 tables of 15 bits, takes
            from its buckets for a text, and as many random ones.
        at: a text counts as right if its class is among this many best ones.
        candidates: random classes that are ranked, together with the classes of the texts, when
            quality is measured; 0 ranks all. MACH only.
    """

    output: Output = "mach"
    features: int = 80_000
    dim: int = 256
    members: int = 4
    buckets: int = 1024
    samples: int = 4096
    active: int = 128
    at: int = 100
    candidates: int = 0

    def __post_init__(self) -> None:
        if self.output not in get_args(Output):
            raise ValueError(f"output must be one of {list(get_args(Output))}, got {self.output!r}")
        for name, value in vars(self).items():
            least = 0 if name == "candidates" else 1
            if name != "output" and value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")
        if self.candidates and self.output != "mach":
            raise ValueError(f'candidates need output = "mach", got {self.output!r}')

    @property
    def hashing(self) -> FeatureHashing:
        """The function from texts to bags of features."""
        return FeatureHashing(features=self.features)

    def encoder(self) -> BagEncoder:
        """A new hidden layer."""
        return BagEncoder(self.features, self.dim)

    def model(self, classes: int) -> "TextClassifier":
        """A new classifier."""
        kind = MachClassifier if self.output == "mach" else SoftmaxClassifier
        return kind(classes, self)


class TextClassifier(Model):
    """The class of a text."""

    def top_k(
        self,
        bags: Bags,
        k: int,
        *,
        aggregation: Aggregation = "mean",
        candidates: Tensor | None = None,
    ) -> Tensor:
        """The `k` best classes of each text, int64 [texts, k], of some candidates or of all."""
        raise NotImplementedError


class MachClassifier(TextClassifier):
    """The class of a text by an ensemble of one-layer networks over hashed classes.

    Example:
        >>> settings = TextClassifierSettings(features=100, dim=8, members=2, buckets=5, at=3)
        >>> model = MachClassifier(50, settings)
        >>> bags = settings.hashing(["usr/bin/env", "etc/passwd"])
        >>> loss, _ = model.loss(bags, torch.tensor([7, 8]), None, generator=None)
        >>> sorted(model.named_tables())
        ['mach.bodies.0.table.weight', 'mach.bodies.1.table.weight']
    """

    def __init__(self, classes: int, settings: TextClassifierSettings) -> None:
        super().__init__()
        self.mach = MACH(
            settings.encoder,
            settings.dim,
            classes,
            settings.buckets,
            members=settings.members,
            # its weights depend on a seed of its own, which follows torch's generator here
            seed=int(torch.randint(2**31, ())),
        )

    def loss(
        self, inputs: Bags, labels: Tensor, state: None, *, generator: Generator | None
    ) -> tuple[Tensor, None]:
        """The sum of the members' losses; there is no state, and `generator` is not used."""
        return self.mach(inputs, labels), None

    def named_tables(self) -> dict[str, nn.Parameter]:
        """The members' tables of features."""
        return {
            name: weight
            for name, weight in self.named_parameters()
            if name.startswith("mach.bodies.") and name.endswith(".weight")
        }

    def top_k(
        self,
        bags: Bags,
        k: int,
        *,
        aggregation: Aggregation = "mean",
        candidates: Tensor | None = None,
    ) -> Tensor:
        """The `k` best classes of each text, by the members' scores of its meta-classes."""
        return self.mach.top_k(bags, k, aggregation=aggregation, candidates=candidates).ids


class SoftmaxClassifier(TextClassifier):
    """The class of a text by one hidden layer and a softmax over all classes."""

    def __init__(self, classes: int, settings: TextClassifierSettings) -> None:
        super().__init__()
        self.encoder = settings.encoder()
        self.softmax: SampledSoftmax | LSHSoftmax
        if settings.output == "sampled":
            self.softmax = SampledSoftmax(
                settings.dim, classes, samples=settings.samples, bias=True
            )
        else:
            self.softmax = LSHSoftmax(
                settings.dim,
                classes,
                bits=15,
                tables=16,
                budget=settings.active,
                negatives=settings.active,
                rebuild_every=100,
                bias=True,
            )

    def loss(
        self, inputs: Bags, labels: Tensor, state: None, *, generator: Generator | None
    ) -> tuple[Tensor, None]:
        """The softmax's loss; there is no state."""
        return self.softmax(self.encoder(*inputs), labels, generator=generator), None

    def named_tables(self) -> dict[str, nn.Parameter]:
        """The features' table, and the classes'."""
        return {
            name: weight
            for name, weight in self.named_parameters()
            if name != "encoder.activation.bias"
        }

    def top_k(
        self,
        bags: Bags,
        k: int,
        *,
        aggregation: Aggregation = "mean",
        candidates: Tensor | None = None,
    ) -> Tensor:
        """The `k` classes of the largest logits, of all classes; there is nothing to aggregate."""
        assert candidates is None
        return self.softmax.top_k(self.encoder(*bags), k)
