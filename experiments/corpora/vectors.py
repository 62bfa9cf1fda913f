"""Many classes of vectors, each class a vector with random noise."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .arrays import load_array
from .corpus import Part

_PARTS = {"train": 0, "valid": 1, "test": 2}


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

    def batch(self, part: Part, number: int, size: int) -> tuple[Tensor, Tensor]:
        """Views [size, dim] and their classes, int64 [size], uniformly random."""
        # one stream of random numbers for each (seed, part, batch)
        words = np.random.SeedSequence((self.seed, _PARTS[part], number)).generate_state(2)
        generator = torch.Generator().manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)
        classes = torch.randint(self.classes, (size,), generator=generator)
        centers = F.normalize(self.vectors[classes], dim=1)
        noise = torch.randn(size, self.dim, generator=generator) * (self.noise / self.dim**0.5)
        return F.normalize(centers + noise, dim=1), classes


def read_vectors(path: str | Path) -> Tensor:
    """Vectors from an array in a .npy file, or from (embedding, class) arrays in an .npz file.

    An .npz holds `embeddings` [examples, dim] and `classes` [examples]; a class's vector is the
    mean of its embeddings.
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
    classes = torch.from_numpy(loaded["classes"].astype(np.int64))
    sums = torch.zeros(int(classes.max()) + 1, embeddings.shape[1])
    counts = classes.bincount()
    return sums.index_add_(0, classes, embeddings) / counts.clamp(min=1)[:, None]


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
