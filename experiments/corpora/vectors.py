"""Many classes of vectors: examples of each, or one vector for a class with random noise."""

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .arrays import load_array
from .corpus import Part
from .orders import shuffled

_PARTS = {"train": 0, "valid": 1, "test": 2}
_HELD_OUT = 10_000  # examples of each held-out part, or a tenth of all where there are few


@dataclass(frozen=True)
class NoisyViews:
    """Views of class vectors: the vector plus Gaussian noise, normalized.

    Args:
        vectors: one for each class, float32 [classes, dim].
        noise: expected norm of the noise over the norm of the vector.
        seed: of the views; each part and each batch has random numbers of its own.
    """

    vectors: Tensor
    noise: float
    seed: int = 0

    def __post_init__(self) -> None:
        if self.vectors.dim() != 2 or not self.vectors.is_floating_point():
            raise ValueError(
                f"vectors must be floating-point [classes, dim], got {self.vectors.dtype} "
                f"{list(self.vectors.shape)}"
            )
        if self.noise < 0:
            raise ValueError(f"noise must be >= 0, got {self.noise}")

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.vectors.shape[0]

    @property
    def dim(self) -> int:
        """Numbers of a vector."""
        return self.vectors.shape[1]

    @property
    def examples(self) -> int:
        """Views of a pass: as many as there are classes."""
        return self.classes

    def batch(self, part: Part, number: int, size: int) -> tuple[Tensor, Tensor]:
        """Views [size, dim] and their classes, int64 [size], uniformly random."""
        # one stream of random numbers for each (seed, part, batch)
        words = np.random.SeedSequence((self.seed, _PARTS[part], number)).generate_state(2)
        generator = torch.Generator().manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)
        classes = torch.randint(self.classes, (size,), generator=generator)
        centers = F.normalize(self.vectors[classes], dim=1)
        noise = torch.randn(size, self.dim, generator=generator) * (self.noise / self.dim**0.5)
        return F.normalize(centers + noise, dim=1), classes


@dataclass(frozen=True)
class LabelledVectors:
    """Examples of classes, such as face embeddings of images, normalized.

    The last 10,000 of a random order are for testing, and as many before them for validation; a
    tenth of the examples each where there are fewer than 100,000.

    Args:
        vectors: one for each example, float32 [examples, dim].
        labels: their classes, int64 [examples].
        seed: of the order.
    """

    vectors: Tensor
    labels: Tensor
    seed: int = 0

    def __post_init__(self) -> None:
        if self.vectors.dim() != 2 or self.labels.shape != self.vectors.shape[:1]:
            raise ValueError(
                "vectors must be [examples, dim] with as many labels, got "
                f"{list(self.vectors.shape)} and {list(self.labels.shape)}"
            )

    @property
    def classes(self) -> int:
        """The number of classes."""
        return int(self.labels.max()) + 1

    @property
    def dim(self) -> int:
        """Numbers of a vector."""
        return self.vectors.shape[1]

    @property
    def examples(self) -> int:
        """Training examples."""
        return len(self.labels) - 2 * self._held_out

    @property
    def _held_out(self) -> int:
        return min(_HELD_OUT, len(self.labels) // 10)

    def batch(self, part: Part, number: int, size: int) -> tuple[Tensor, Tensor]:
        """Examples [<= size, dim] and their classes: those of batch `number` of a part.

        The training part begins again after its last batch, in another order.
        """
        start = {"train": 0, "valid": self.examples, "test": self.examples + self._held_out}[part]
        length = self.examples if part == "train" else self._held_out
        epoch, within = divmod(number, math.ceil(length / size)) if part == "train" else (0, number)
        chosen = shuffled(len(self.labels), self.seed)[start : start + length]
        if part == "train":
            chosen = chosen[shuffled(length, self.seed + 1 + epoch)]
        rows = chosen[within * size : (within + 1) * size]
        return F.normalize(self.vectors[rows], dim=1), self.labels[rows]


def read_vectors(path: str | Path) -> Tensor | LabelledVectors:
    """An array [classes, dim] from a .npy file, or labelled vectors from an .npz file.

    An .npz holds `embeddings` [examples, dim] and `classes` [examples].
    """
    loaded = load_array(path)
    if isinstance(loaded, np.ndarray):
        return torch.from_numpy(loaded.astype(np.float32))
    missing = {"embeddings", "classes"} - set(loaded.files)
    if missing:
        raise ValueError(
            f"{path} must hold the arrays embeddings [examples, dim] and classes [examples], got "
            f"{', '.join(loaded.files)}"
        )
    embeddings = torch.from_numpy(loaded["embeddings"].astype(np.float32))
    return LabelledVectors(embeddings, torch.from_numpy(loaded["classes"].astype(np.int64)))


def token_vectors() -> Tensor:
    """The 32,000 x 256 token vectors of the package `wordllama`."""
    from safetensors.torch import load_file

    return load_file(token_vectors_file())["embedding.weight"].float()


def token_vectors_file() -> Path:
    """The file of `wordllama` with its token vectors."""
    found = importlib.util.find_spec("wordllama")
    if found is None or found.origin is None:
        raise FileNotFoundError(
            "the token vectors come with the package wordllama; run: pip install wordllama"
        )
    return Path(found.origin).parent / "weights" / "l2_supercat_256.safetensors"
